"""A stand-in for the Python package tensorrt: only the calls that cutefuse makes, with the parameter names of NVIDIA's
bindings (python/src of tags v10.3.0, v10.16, v11.1), so that a wrong name, order or count fails here as there.

The engine that it "builds" is JSON, so that profiling can read it back. With `costs` (node name -> ms, "fused NAME" for
a node of ours) an engine has the nodes of its model as layers, and `elapsed_ms` adds up what they take.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

__version__ = "10.16.0"
LAYERS = [
    {"Name": "conv_first", "LayerType": "CaskConvolution", "Inputs": [], "Outputs": [], "TacticValue": "0x0"},
    {"Name": "fused_0", "LayerType": "PluginV3", "Inputs": [], "Outputs": [], "TacticValue": "0x1"},
]
calls: list[str] = []
costs: dict[str, float] = {}
elapsed_ms = 0.0


def _layers_of(model: str) -> list[dict[str, Any]]:
    import onnx

    nodes = [(n.name, n.domain == "cutefuse") for n in onnx.load(model, load_external_data=False).graph.node]
    return [
        {**LAYERS[0], "Name": name, "LayerType": "PluginV3" if fused else "CaskConvolution",
         "Ms": costs.get(f"fused {name}" if fused else name, 0.01)}
        for name, fused in nodes
    ]  # fmt: skip


class DataType(IntEnum):
    FLOAT = 0
    HALF = 1

    @property
    def itemsize(self) -> int:
        return 4 if self is DataType.FLOAT else 2


def nptype(trt_type: DataType) -> str:
    return "float16" if trt_type is DataType.HALF else "float32"


class TensorIOMode(IntEnum):
    NONE, INPUT, OUTPUT = range(3)


class LayerInformationFormat(IntEnum):
    ONELINE, JSON = range(2)


class ProfilingVerbosity(IntEnum):
    LAYER_NAMES_ONLY, NONE, DETAILED = range(3)


class MemoryPoolType(IntEnum):
    WORKSPACE = 0


class NetworkDefinitionCreationFlag(IntEnum):
    EXPLICIT_BATCH, STRONGLY_TYPED = range(2)


class BuilderFlag(IntEnum):
    FP16, INT8, TF32, BF16, FP8 = 0, 1, 7, 17, 15


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None:
        self.ready = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError  # as TensorRT's own class: the user overrides it


class IProfiler:
    def __init__(self) -> None:
        self.ready = True

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        raise NotImplementedError  # as TensorRT's own class: the user overrides it


def volume(iterable: Any) -> int:
    result = 1
    for value in iterable:
        result *= value
    return result


class _Registry:
    def load_library(self, plugin_path: str) -> object | None:
        calls.append(f"load {plugin_path.rsplit('/', 1)[-1]}")
        return None if "broken" in plugin_path else object()


class _Tensor:
    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape


class _Network:
    def __init__(self, flags: int) -> None:
        self.flags, self.num_inputs, self.model = flags, 1, ""

    def get_input(self, index: int) -> _Tensor:
        return _Tensor("x", (-1, 8, 4, 4))


class OnnxParser:
    def __init__(self, network: _Network, logger: ILogger) -> None:
        assert isinstance(network, _Network) and logger.ready
        self.num_errors, self.network = 0, network

    def parse_from_file(self, model: str) -> bool:
        self.num_errors, self.network.model = int("unparsable" in model), model
        return not self.num_errors

    def get_error(self, index: int) -> str:
        return f"node {index} is\nnot supported"


class _OptimizationProfile:
    def set_shape(self, input: str, min: tuple[int, ...], opt: tuple[int, ...], max: tuple[int, ...]) -> None:
        calls.append(f"profile {input} {min} {opt} {max}")


class _Cache:
    def serialize(self) -> bytes:
        return b"timings"


class _Config:
    profiling_verbosity = ProfilingVerbosity.NONE
    builder_optimization_level = 3
    max_aux_streams = 0

    def set_flag(self, flag: BuilderFlag) -> None:
        calls.append(f"flag {flag.name}")

    def clear_flag(self, flag: BuilderFlag) -> None:
        calls.append(f"no {flag.name}")

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        calls.append(f"pool {pool_size}")

    def create_timing_cache(self, serialized_timing_cache: bytes) -> _Cache:
        calls.append(f"cache {serialized_timing_cache!r}")
        return _Cache()

    def set_timing_cache(self, cache: _Cache, ignore_mismatch: bool) -> bool:
        return isinstance(cache, _Cache) and ignore_mismatch in (True, False)

    def get_timing_cache(self) -> _Cache:
        return _Cache()

    def add_optimization_profile(self, profile: _OptimizationProfile) -> int:
        return 0


class Builder:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def get_plugin_registry(self) -> _Registry:
        return _Registry()

    def create_network(self, flags: int = 0) -> _Network:
        calls.append(f"network {flags}")
        return _Network(flags)

    def create_builder_config(self) -> _Config:
        return _Config()

    def create_optimization_profile(self) -> _OptimizationProfile:
        return _OptimizationProfile()

    def build_serialized_network(self, network: _Network, config: _Config) -> bytes | None:
        assert config.profiling_verbosity is ProfilingVerbosity.DETAILED
        self.logger.log(ILogger.Severity.VERBOSE, "Generating copy for a because input is not movable.")
        if config.builder_optimization_level == 5:
            self.logger.log(ILogger.Severity.ERROR, "no tactic was found")
            return None
        layers = _layers_of(network.model) if costs else LAYERS
        return json.dumps({"Layers": layers, "Bindings": ["x", "y"]}).encode()


class _Inspector:
    execution_context: Any = None

    def __init__(self, text: str) -> None:
        self.text = text

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        assert format is LayerInformationFormat.JSON
        return self.text


class _Context:
    profiler: IProfiler | None = None

    def __init__(self, layers: list[dict[str, Any]]) -> None:
        self.layers = layers
        self.addresses: dict[str, int] = {}
        self.shapes = {"y": (1, 8, 4, 4)}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return shape[0] <= 4

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert set(self.addresses) == {"x", "y"} and isinstance(stream_handle, int)
        global elapsed_ms
        for layer in self.layers:
            elapsed_ms += layer.get("Ms", 0.25)
            if self.profiler is not None:
                self.profiler.report_layer_time(layer["Name"], layer.get("Ms", 0.25))
        return True


class _Engine:
    num_io_tensors = 2

    def __init__(self, text: str) -> None:
        self.text = text

    def create_engine_inspector(self) -> _Inspector:
        return _Inspector(self.text)

    def create_execution_context(self) -> _Context:
        return _Context(json.loads(self.text)["Layers"])

    def get_tensor_name(self, index: int) -> str:
        return ("x", "y")[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name == "x" else TensorIOMode.OUTPUT

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 8, 4, 4)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [(1, 8, 4, 4), (2, 8, 4, 4), (4, 8, 4, 4)]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType.HALF

    def get_tensor_vectorized_dim(self, name: str) -> int:
        return 1

    def get_tensor_components_per_element(self, name: str) -> int:
        return 16


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        assert logger.ready

    def get_plugin_registry(self) -> _Registry:
        return _Registry()

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> _Engine | None:
        return _Engine(serialized_engine.decode()) if serialized_engine.startswith(b"{") else None
