"""PyTorch on a GPU as an engine: an ONNX graph in a CUDA graph, by cuDNN or torch.compile, fused nodes by our kernels.

    engine = TorchEngine.build(Path("model.onnx"), mode="compile")
    engine({"x": array})["y"];  engine.time_us();  engine.layer_times_us()

On the CPU the same program runs without a CUDA graph, and fused nodes run their function bodies: for tests only.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from cutefuse import kernels
from cutefuse.engines.inputs import input_specs, resolve, seeded
from cutefuse.engines.pytorch import layers as torch_layers
from cutefuse.engines.pytorch.layers import Layer
from cutefuse.engines.pytorch.lock import alone, is_shared
from cutefuse.engines.pytorch.onnx_ops import program as programs
from cutefuse.engines.pytorch.onnx_ops.convolution import ConvolutionRelu
from cutefuse.engines.pytorch.onnx_ops.heads import take_heads
from cutefuse.engines.pytorch.onnx_ops.merge import merge
from cutefuse.engines.pytorch.onnx_ops.sums import take_sums
from cutefuse.engines.pytorch.onnx_ops.windows import take_windows
from cutefuse.engines.pytorch.side_by_side import arrange, side_by_side
from cutefuse.engines.pytorch.tile_times import mean_us
from cutefuse.engines.pytorch.tiles import choose_tiles
from cutefuse.errors import CutefuseError
from cutefuse.graph import store
from cutefuse.timing.noise import interleave, steady
from cutefuse.torch.launch import sm_of

MODES = ("cudnn", "compile")
_WARM_RUNS = 3  # before a capture: cuDNN tries its algorithms, Triton loads its kernels


@dataclass(frozen=True)
class Settings:
    """`tf32`: float32 convolutions and products may round to TF32, as TensorRT's do."""

    mode: str
    device: str
    tf32: bool


def load_model(model: Path | onnx.ModelProto) -> onnx.ModelProto:
    """The model with its weights. Raises CutefuseError for a file that is missing or no ONNX model."""
    if isinstance(model, onnx.ModelProto):
        return model
    loaded = store.load_model(model)
    store.load_weights(loaded, model.parent)
    return loaded


class TorchEngine:
    """One model, ready to run for inputs of fixed shapes. Made by `build`; holds its memory until it is dropped."""

    def __init__(self, program: programs.Program, settings: Settings, inputs: dict[str, Tensor]) -> None:
        self.program, self.settings, self.inputs = program, settings, inputs
        self.device = torch.device(settings.device)
        self.constants = {s: t.to(self.device) for s, t in program.constants.items()}
        self.kernel_sources: list[torch_layers.KernelSource] = []  # of a compiled program
        self._graph: Any = None
        self._results: tuple[Tensor, ...] = ()
        self._workspace = self._allocate_workspace()
        with self._rules(), torch.no_grad():
            if self.device.type == "cuda" and settings.mode == "cudnn":
                with alone():
                    self._check_merges()
            self._function = program.function(self.constants)
            if settings.mode == "compile":
                self._compile()
            if self.device.type == "cuda":
                with alone():
                    self._capture()

    @classmethod
    def build(
        cls, model: Path | onnx.ModelProto, mode: str = "cudnn", device: str | None = None, *,
        shapes: Mapping[str, Sequence[int]] | None = None, plugins: bool = True, tf32: bool = True,
        tiles: Mapping[str, int] | str = "timed",
    ) -> TorchEngine:  # fmt: skip
        """An engine of an ONNX model.

        Args:
            mode: `cudnn` runs every node as one call of PyTorch, `compile` gives the whole graph to torch.compile; on a
            GPU both replay a CUDA graph. device: `cuda`, `cuda:1`, `cpu`; the first GPU where there is one.
            shapes: input name -> shape for dynamic inputs. plugins: False runs the bodies of fused nodes.
            tiles: `timed` takes those of the kernels' first guesses that are fastest together, `guess` the first one
            untimed; or name of a fused node -> id of its tile, where nodes that are not named are timed. A tile that
            cannot run the shapes at hand is left, with a note of the program. See `tiles.choose_tiles`.
        Raises: CutefuseError for a mode, device, shape or node that is not available here.
        """
        settings = Settings(mode, device or ("cuda" if torch.cuda.is_available() else "cpu"), tf32)
        _check(settings)
        proto = load_model(model)
        specs = input_specs(proto)
        dims = resolve(specs, shapes or {})
        where = torch.device(settings.device)
        with torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext():
            program = programs.load(proto, dims, fused=plugins and where.type == "cuda")
            merge(program, convolutions=mode == "cudnn")
            take_windows(program)
            take_heads(program, sm_of() if where.type == "cuda" else 0)
            if mode == "compile":
                take_sums(program)
            arrange(program)
            known = {n.name for n in proto.graph.node if n.domain == programs.DOMAIN}
            choose_tiles(program, tiles, known)
            inputs = {}
            for name, array in seeded(specs, dims).items():
                like = program.shapes[program.inputs[name]]
                inputs[name] = programs.image_like(list(dims[name]), like.dtype, where)
                inputs[name].copy_(torch.from_numpy(array))
            return cls(program, settings, inputs)

    # ------------------------------------------------------------------------------------------------------ running
    def __call__(self, feed: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Run once. `feed`: arrays or tensors by input name, the last values where one is missing; returns copies."""
        for name, value in (feed or {}).items():
            if name not in self.inputs:
                raise CutefuseError(f"the model has no input {name}; its inputs are {', '.join(self.inputs)}")
            own, given = self.inputs[name], _tensor(value)
            if given.shape != own.shape:
                raise CutefuseError(
                    f"input {name} is {list(given.shape)}, the engine was built for {list(own.shape)}; build another"
                )
            own.copy_(given)
        return dict(zip(self.program.outputs, (t.clone() for t in self.run()), strict=True))

    def run(self) -> tuple[Tensor, ...]:
        """Enqueue one inference over the present inputs; the outputs are overwritten by the next one."""
        if self._graph is not None:
            self._graph.replay()
            return self._results
        return self.run_outside_graph()

    def run_outside_graph(self) -> tuple[Tensor, ...]:
        """Run once call by call, as on the CPU."""
        with self._rules(), torch.no_grad():
            results: tuple[Tensor, ...] = self._function(*self.inputs.values())
        return results

    def run_steps(self, around: Callable[[int], contextlib.AbstractContextManager[Any]]) -> None:
        """Run step by step, outside of a CUDA graph, each step inside of `around(its number)`."""
        values = self._start()
        with self._rules(), torch.no_grad():
            for i, step in enumerate(self.program.steps):
                with around(i):
                    self._execute(step, values)

    def _start(self) -> dict[str, Tensor]:
        return dict(zip(self.program.inputs.values(), self.inputs.values(), strict=True))

    def _execute(self, step: programs.Step, values: dict[str, Tensor]) -> None:
        made = step.run(*(None if s is None else values.get(s, self.constants.get(s)) for s in step.inputs))
        values |= dict(zip(step.outputs, made if isinstance(made, (tuple, list)) else [made], strict=True))

    # ------------------------------------------------------------------------------------------------------- timing
    def time_us(self, rounds: int = 15, sample_ms: float = 2.0) -> float:
        """Median latency of one inference in microseconds, warm."""
        return statistics.median(time_interleaved_us([self], rounds, sample_ms)[0])

    def sample_us(self, runs: int) -> float:
        """Mean time of one inference over `runs` of them, one after the other."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(runs):
                self.run()
            return (time.perf_counter() - begin) * 1e6 / runs
        with torch.cuda.device(self.device):
            return mean_us(self.run, runs)

    def layers(self, runs: int = 20) -> list[Layer]:
        """What the engine runs, in order, with the time of each layer in each of `runs` inferences."""
        with self._rules(), torch.no_grad():
            return self._layers(runs) if self.device.type == "cuda" else self._layers_on_cpu(runs)

    def layer_times_us(self, runs: int = 20) -> dict[str, float]:
        """Layer name -> median time of its kernels in microseconds; layers without a kernel are left out."""
        return {layer.name: statistics.median(layer.times_us) for layer in self.layers(runs) if layer.times_us}

    def _layers(self, runs: int) -> list[Layer]:
        steps, whole = self.program.steps, self._profiled(runs)
        if self.settings.mode == "compile":
            return torch_layers.compiled_layers(steps, self.kernel_sources, whole)

        def once() -> None:
            self.run_steps(lambda i: torch.profiler.record_function(f"{torch_layers.REGION}{i}"))

        by_step = torch_layers.profiled(once)
        names = [k.name for k in by_step]
        if any([k.name for k in run] != names for run in whole):
            # Other kernels inside the graph: the times outside of it are the best there are.
            whole = [by_step, *(torch_layers.profiled(once) for _ in range(3))]
        return torch_layers.step_layers(steps, by_step, whole)

    def _profiled(self, runs: int) -> list[list[torch_layers.Kernel]]:
        """The kernels of each of `runs` inferences, one after the other: of replays of a graph without branches, or of
        plain calls where a trace does not show what is inside of a graph."""
        with alone(), kernels.side_by_side(False):
            graph, _ = self._captured()

        def replay() -> None:
            for _ in range(runs):
                graph.replay()

        for _ in range(2):  # the first trace of a process may lack its first kernels
            found = torch_layers.replays(torch_layers.profiled(replay))
            if len(found) == runs and len({len(run) for run in found}) == 1:
                return found
        return [torch_layers.profiled(self.run_outside_graph) for _ in range(3)]

    def _layers_on_cpu(self, runs: int) -> list[Layer]:
        """The steps with their times, the only times that a compiled program shows."""
        layers = [Layer(step.name, [step], ["CPU"]) for step in self.program.steps]

        @contextlib.contextmanager
        def timed(i: int) -> Iterator[None]:
            begin = time.perf_counter()
            yield
            layers[i].times_us.append((time.perf_counter() - begin) * 1e6)

        for _ in range(runs):
            self.run_steps(timed)
        return layers

    # ------------------------------------------------------------------------------------------------------ building
    @contextlib.contextmanager
    def _rules(self) -> Iterator[None]:
        """PyTorch's global switches as this engine needs them, restored afterwards."""
        if self.device.type != "cuda":
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.settings.tf32 else "highest")
        try:
            flags = {"enabled": True, "benchmark": True, "deterministic": False, "allow_tf32": self.settings.tf32}
            with torch.cuda.device(self.device), torch.backends.cudnn.flags(**flags):
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    def _allocate_workspace(self) -> Tensor | None:
        """One buffer for all kernels of ours: those that need it run one after the other."""
        size = max((node.workspace_bytes() for node in self.program.kernels), default=0)
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device) if size > 0 else None
        for node in self.program.kernels:
            node.workspace = buffer
        return buffer

    def _check_merges(self) -> None:
        """Run step by step, and take convolution and activation apart where cuDNN's fused kernel does not do.

        It has none for some shapes. And PyTorch passes the fresh output as a summand with factor 0, so that a kernel
        which reads it turns a NaN that lay in that memory into a NaN of the result.
        """
        values, steps = self._start(), self.program.steps
        for i, step in enumerate(steps):
            run: Any = step.run
            merged = isinstance(run, ConvolutionRelu)
            apart = replace(step, run=replace(run, apart=True)) if merged else step
            try:
                self._execute(step, values)
                if merged and self._reads_old_memory(step, apart, values):
                    steps[i] = apart
            except RuntimeError as error:
                if not merged or isinstance(error, torch.cuda.OutOfMemoryError):
                    raise CutefuseError(f"{step.name} cannot run on {self.device} ({_first(error)})") from None
                steps[i] = apart
            if steps[i] is not step:
                self._execute(apart, values)

    def _reads_old_memory(self, step: programs.Step, apart: programs.Step, values: dict[str, Tensor]) -> bool:
        """Whether NaNs in freed memory come back in the result, which the allocator puts where they lay."""
        kept = values[step.outputs[0]]
        poison = torch.full_like(kept, float("nan"))
        del poison
        self._execute(step, values)
        again = values[step.outputs[0]]
        if not bool(again.isnan().any()):
            return False
        self._execute(apart, values)
        return not bool(values[step.outputs[0]].isnan().any())

    def _compile(self) -> None:
        from torch._dynamo.exc import BackendCompilerFailed
        from torch._inductor import config as inductor_config
        from torch._inductor.utils import run_and_get_code

        backend: Any = _quiet_inductor if is_shared() else "inductor"
        compiled = torch.compile(self._function, fullgraph=True, dynamic=False, backend=backend)
        try:
            try:
                _, codes = run_and_get_code(compiled, *self.inputs.values())
            except BackendCompilerFailed as error:  # some patterns match attention whose sizes they do not fit
                self.program.notes.append(f"compiled without inductor's patterns, which fail here: {_first(error)}")
                with inductor_config.patch(pattern_matcher=False):
                    _, codes = run_and_get_code(compiled, *self.inputs.values())
        except Exception as error:  # dynamo, inductor and Triton raise their own kinds
            raise CutefuseError(f"torch.compile cannot take the model ({_first(error)}); use --mode=cudnn") from None
        self._function = compiled
        self.kernel_sources = [s for code in codes for s in torch_layers.kernel_sources(code)]

    def _capture(self) -> None:
        try:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                for _ in range(_WARM_RUNS):
                    self._function(*self.inputs.values())
            torch.cuda.current_stream(self.device).wait_stream(side)
            torch.cuda.synchronize(self.device)
            with side_by_side(self.program):
                self._graph, self._results = self._captured()
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            raise CutefuseError(
                f"the model cannot be captured in a CUDA graph on {self.device} ({_first(error)})"
            ) from None

    def _captured(self) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        """One inference as a CUDA graph, and its results. All graphs of an engine share memory: the results of one are
        there until another one runs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if self._graph is None else self._graph.pool()):
            results: tuple[Tensor, ...] = self._function(*self.inputs.values())
        return graph, results


def time_interleaved_us(engines: Sequence[TorchEngine], rounds: int = 15, sample_ms: float = 2.0) -> list[list[float]]:
    """For each engine the time of one inference in each round, in microseconds.

    A round takes one sample of every engine in turn, so that clocks and other load are the same for all.
    """
    return interleave([steady(engine.sample_us, 1000 * sample_ms) for engine in engines], rounds)


def _quiet_inductor(graph: Any, given: Any) -> Callable[..., Any]:
    """Inductor, whose result runs alone on the GPU: its first run is where kernels are tried."""
    from torch._inductor.compile_fx import compile_fx

    made: Any = compile_fx(graph, given)

    def run(*xs: Any) -> Any:
        with alone():
            return made(*xs)

    return run


def _check(settings: Settings) -> None:
    if settings.mode not in MODES:
        raise CutefuseError(f"mode {settings.mode} is unknown; choose one of {', '.join(MODES)}")
    try:
        device = torch.device(settings.device)
    except RuntimeError:
        raise CutefuseError(f"device {settings.device} is unknown; give cpu, cuda or cuda:<number>") from None
    if device.type not in ("cpu", "cuda"):
        raise CutefuseError(f"device {settings.device} is neither cpu nor cuda; give one of them")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise CutefuseError(f"device {settings.device} does not exist, PyTorch sees {count} GPUs; give another one")


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":  # ml_dtypes', which torch does not read
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array)


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
    return (lines[0] if lines else type(error).__name__)[:300]
