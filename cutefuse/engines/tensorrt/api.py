"""Build and profile an engine through TensorRT's Python API, for machines where it is only pip-installed.

The same files result as from trtexec. Calls are those of TensorRT 10.0 to 11.x; names and argument order were checked
against the sources of NVIDIA's bindings (10.3, 10.16, 11.1) and the 11.4 wheel. Nothing here has run in TensorRT yet.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from cutefuse.engines.artifacts import Artifacts, concat_notes, log_errors
from cutefuse.engines.cuda_memory import Device, open_device
from cutefuse.engines.inputs import parse_shapes
from cutefuse.engines.options import Effort, repeat
from cutefuse.engines.options import options_of as given_options
from cutefuse.engines.records import write_build, write_profile
from cutefuse.errors import CutefuseError
from cutefuse.output import write_text

_PRECISIONS = {"--fp16": "FP16", "--bf16": "BF16", "--int8": "INT8", "--fp8": "FP8"}
TARGET = "--sm"  # ours, among trtexec's options: the compute capability * 10 that TensorRT for RTX builds for
_SHAPES = ("--minShapes", "--optShapes", "--maxShapes", "--shapes")
_OTHER = ("--builderOptimizationLevel", "--iterations", "--duration", "--warmUp", "--maxAuxStreams", "--stronglyTyped",
          "--noTF32", "--verbose", "--noDataTransfers", "--separateProfileRun", "--useSpinWait", "--memPoolSize",
          "--dynamicPlugins", "--profilingVerbosity")  # fmt: skip
_REFUSAL = (
    "{name} is not supported when building through TensorRT's Python API; allowed are {known}; install trtexec for the "
    "others"
)


def options_of(words: Sequence[str]) -> dict[str, str]:
    """trtexec options that this backend can honour; anything else is refused rather than dropped."""
    return given_options(words, sorted((*_PRECISIONS, *_SHAPES, *_OTHER)), _REFUSAL, idle=(TARGET,))


class Log:
    """Collects TensorRT's messages in the format of trtexec's logs; each also goes to `sink` at once."""

    def __init__(self, trt: Any, sink: TextIO | None = None) -> None:
        log = self
        self.lines = [f"[TensorRT v{trt.__version__}] Python API"]
        if sink:
            sink.write(self.text)
        named = {"INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W", "INFO": "I", "VERBOSE": "V"}
        letters = {getattr(trt.ILogger.Severity, name): letter for name, letter in named.items()}

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                stamp = time.strftime("%m/%d/%Y-%H:%M:%S")
                log.lines.append(f"[{stamp}] [{letters.get(severity, 'V')}] {msg}")
                if sink:
                    sink.write(log.lines[-1] + "\n")

        self.logger = Logger()

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def _import() -> Any:
    try:
        import tensorrt
    except ImportError as error:
        raise CutefuseError(f"the Python package tensorrt cannot be imported ({error}); reinstall it") from None
    return tensorrt


def version() -> tuple[int, int, int]:
    """Of the TensorRT that the Python package is; parts that it does not give are 0."""
    numbers = [int("".join(filter(str.isdigit, p)) or 0) for p in str(_import().__version__).split(".")[:3]]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    return major, minor, patch


def _load_plugins(registry: Any, libraries: list[Path]) -> None:
    for path in libraries:
        if registry.load_library(str(path)) is None:
            raise CutefuseError(f"TensorRT could not load the plugin library {path}; build it again for this machine")


def build(model: Path, files: Artifacts, words: list[str], libraries: list[Path], low_precision: bool) -> None:
    """Parse, build, serialise and inspect; writes engine, graph JSON, log, metadata and timing cache."""
    trt = _import()
    options = options_of(words)
    log = Log(trt)
    try:
        major = int(trt.__version__.split(".")[0])
        precisions = [flag for flag in _PRECISIONS if flag in options]
        if major >= 11:
            refuse_precisions(options, f"TensorRT {trt.__version__}")
        strong = major == 10 and ("--stronglyTyped" in options or (low_precision and not precisions))
        builder, network, _parser = parse(trt, log, model, libraries, strong)
        config = configure(trt, builder, network, options)
        for flag in precisions:
            config.set_flag(getattr(trt.BuilderFlag, _PRECISIONS[flag]))
        cache = config.create_timing_cache(files.timing_cache.read_bytes() if files.timing_cache.is_file() else b"")
        config.set_timing_cache(cache, False)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise CutefuseError(
                f"TensorRT could not build {model}: {log_errors(log.text)}; the whole log is {files.build_log}"
            )
        files.engine.write_bytes(plan)
        beside = files.timing_cache.with_suffix(".part")
        beside.write_bytes(config.get_timing_cache().serialize())
        os.replace(beside, files.timing_cache)
        runtime = trt.Runtime(log.logger)
        _load_plugins(runtime.get_plugin_registry(), libraries)
        engine = _deserialize(runtime, files.engine)
        _write_graph(trt, engine, None, files)
        precision = "strongly typed" if strong or major >= 11 else "+".join(["FP32", *precisions])
        facts = {"tensorrt_version": trt.__version__, "concats": concat_notes(log.text)}
        write_build(files, model, {"Precision": precision}, **facts)
    finally:
        write_text(files.build_log, log.text)


def refuse_precisions(options: dict[str, str], builder: str) -> None:
    """Raise CutefuseError where a precision is asked of a builder that takes types from the model alone."""
    if given := [flag for flag in _PRECISIONS if flag in options]:
        raise CutefuseError(
            f"{given[0]} was given, but {builder} builds strongly typed engines; "
            "convert the ONNX model to that precision and leave the option out"
        )


def parse(trt: Any, log: Log, model: Path, libraries: list[Path], strong: bool) -> tuple[Any, Any, Any]:
    """Builder, network and parser of a model; the network holds weights of the parser, so keep that as long."""
    builder = trt.Builder(log.logger)
    _load_plugins(builder.get_plugin_registry(), libraries)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if strong else 0)
    parser = trt.OnnxParser(network, log.logger)
    if not parser.parse_from_file(str(model)):
        reasons = "; ".join(" ".join(str(parser.get_error(i)).split()) for i in range(parser.num_errors))
        raise CutefuseError(f"TensorRT's ONNX parser refused {model.name}: {reasons}")
    return builder, network, parser


def configure(trt: Any, builder: Any, network: Any, options: dict[str, str]) -> Any:
    """The builder's configuration by trtexec options, with an optimisation profile for dynamic inputs."""
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if "--noTF32" in options:
        config.clear_flag(trt.BuilderFlag.TF32)
    if "--builderOptimizationLevel" in options:
        config.builder_optimization_level = int(options["--builderOptimizationLevel"])
    if "--maxAuxStreams" in options:
        config.max_aux_streams = int(options["--maxAuxStreams"])
    for part in filter(None, options.get("--memPoolSize", "").split(",")):
        pool, _, size_mib = part.partition(":")
        if pool != "workspace" or not size_mib.rstrip("M").isdigit():
            raise CutefuseError(f"--memPoolSize={part} is not supported here; give workspace:<MiB>")
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(size_mib.rstrip("M")) << 20)
    profile = _optimization_profile(builder, network, options)
    if profile is not None:
        config.add_optimization_profile(profile)
    return config


def _optimization_profile(builder: Any, network: Any, options: dict[str, str]) -> Any | None:
    """A profile for the dynamic inputs. Like trtexec: --shapes or --optShapes alone fix all three."""
    given = {name: parse_shapes(options[name]) for name in _SHAPES if name in options}
    middle = given.get("--optShapes") or given.get("--shapes") or {}
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    names = [tensor.name for tensor in inputs]
    for option, shapes in given.items():
        if unknown := sorted(set(shapes) - set(names)):
            raise CutefuseError(f"{option} names {unknown[0]}, the model's inputs are {', '.join(names)}; correct it")
    dynamic = [tensor for tensor in inputs if any(d < 0 for d in tuple(tensor.shape))]
    if not dynamic:
        return None
    profile = builder.create_optimization_profile()
    for tensor in dynamic:
        # trtexec builds unnamed dynamic dimensions for 1.
        fallback = tuple(max(int(d), 1) for d in tuple(tensor.shape))
        optimum = middle.get(tensor.name, fallback)
        least = given.get("--minShapes", {}).get(tensor.name, optimum)
        most = given.get("--maxShapes", {}).get(tensor.name, optimum)
        profile.set_shape(tensor.name, least, optimum, most)
    return profile


def _deserialize(runtime: Any, path: Path) -> Any:
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise CutefuseError(
            f"TensorRT could not load {path}; it was built by another version, GPU or without the plugins"
        )
    return engine


def _write_graph(trt: Any, engine: Any, context: Any | None, files: Artifacts) -> None:
    inspector = engine.create_engine_inspector()
    if context is not None:
        inspector.execution_context = context
    write_text(files.graph, inspector.get_engine_information(trt.LayerInformationFormat.JSON))


class Session:
    """An engine file, loaded and bound to buffers of its own, so that it can run. Close it to free them."""

    def __init__(
        self, engine_path: Path, words: list[str], libraries: list[Path], log: Log | None = None, trt: Any = None
    ) -> None:
        self.trt: Any = trt or _import()
        self.options = options_of(words)
        self.log = log or Log(self.trt)
        self._runtime = self.trt.Runtime(self.log.logger)
        _load_plugins(self._runtime.get_plugin_registry(), libraries)
        self.engine = _deserialize(self._runtime, engine_path)
        self.context = self.engine.create_execution_context()
        self.device = open_device()
        try:
            shapes = parse_shapes(self.options.get("--shapes", ""))
            self._addresses = _bind(self.trt, self.engine, self.context, self.device, shapes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.device.close()

    def infer(self) -> None:
        if not self.context.execute_async_v3(self.device.stream):
            raise CutefuseError("TensorRT could not run the engine; see the log")

    def outputs(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One inference over these inputs, of linear formats."""
        for name, array in feed.items():
            self.device.upload(self._addresses[name], np.ascontiguousarray(array).tobytes())
        self.infer()
        self.device.synchronize()
        results = {}
        for name in self._addresses.keys() - feed.keys():
            dtype = np.dtype(self.trt.nptype(self.engine.get_tensor_dtype(name)))
            results[name] = np.zeros(tuple(self.context.get_tensor_shape(name)), dtype)
            self.device.download(self._addresses[name], results[name])
        return results

    def sample_us(self, runs: int) -> float:
        """Mean time of one inference over `runs` of them, one after the other."""

        def work() -> None:
            for _ in range(runs):
                self.infer()

        return self.device.time_ms(work) * 1000 / runs


def profile(engine_path: Path, files: Artifacts, words: list[str], libraries: list[Path], trt: Any = None) -> None:
    """Time whole inferences first, then layers in a separate run, as trtexec's --separateProfileRun does.

    `trt`: the module that runs it; by default the Python package tensorrt.
    """
    trt = trt or _import()
    log = Log(trt)
    try:
        with contextlib.closing(Session(engine_path, words, libraries, log, trt)) as session:
            _measure(session, files)
    finally:
        write_text(files.profile_log, log.text)


def _bind(trt: Any, engine: Any, context: Any, device: Device, wanted: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Give every input and output memory of its size; returns name -> address."""
    addresses: dict[str, int] = {}
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    for name in names:
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            if engine.is_shape_inference_io(name):
                raise CutefuseError(
                    f"input {name} is a shape tensor, which this profiler cannot fill; profile with trtexec"
                )
            shape = tuple(engine.get_tensor_shape(name))
            if any(d < 0 for d in shape):
                shape = wanted.get(name) or tuple(engine.get_tensor_profile_shape(name, 0)[1])
                if not context.set_input_shape(name, shape):
                    raise CutefuseError(
                        f"shape {shape} of input {name} is outside of the engine's profile; see --shapes"
                    )
    for name in names:
        shape = tuple(context.get_tensor_shape(name))
        if any(d < 0 for d in shape):
            raise CutefuseError(
                f"output {name} has a data-dependent shape, which this profiler cannot bind; use trtexec"
            )
        dims = list(shape)
        axis = engine.get_tensor_vectorized_dim(name)
        if axis >= 0:
            step = engine.get_tensor_components_per_element(name)
            dims[axis] = -(-dims[axis] // step) * step
        size_bytes = int(trt.volume(dims) * engine.get_tensor_dtype(name).itemsize + 0.5)
        addresses[name] = device.allocate(size_bytes)
        context.set_tensor_address(name, addresses[name])
    return addresses


def _measure(session: Session, files: Artifacts) -> None:
    device, context, effort = session.device, session.context, Effort.of(session.options, duration_s=3)
    trt: Any = session.trt

    def sample() -> list[float]:
        return [device.time_ms(session.infer)]

    latencies, wall_s = effort.times(sample)
    layers: dict[str, list[float]] = {}

    class Profiler(trt.IProfiler):
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            layers.setdefault(layer_name, []).append(ms)

    profiler = Profiler()
    context.profiler = profiler
    repeat(sample, min(effort.duration_s, 2), effort.least)
    device.synchronize()
    _write_graph(trt, session.engine, context, files)
    inference = {"Device binding": device.name, "CUDA Graph": "Disabled"}
    write_profile(files, layers, latencies, wall_s, inference, tensorrt_version=trt.__version__)
