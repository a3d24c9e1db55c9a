"""The layers of an engine as data, out of the layer information of TensorRT and its tools, and what they move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cutefuse.engines.kinds import copy_origin, kind_of, node_names, precision_of
from cutefuse.engines.tensors import Tensor, dtype_of, tensor_of
from cutefuse.errors import CutefuseError
from cutefuse.roofline.peaks import DTYPE_BITS


@dataclass
class Layer:
    """One layer of an engine graph with its measured time.

    `time_us` is the median of the profile, which no outlier rules; its mean where it has no median (`mean_us` is always
    that), and None when the layer was not profiled (no-ops, constants).
    `sources` names file and field of each figure, for tooltips.
    """

    index: int
    name: str
    type: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    raw: dict[str, Any]
    kind: str = "other"
    precision: str = ""
    time_us: float | None = None
    mean_us: float | None = None
    onnx: list[str] = field(default_factory=list)
    title: str = ""  # its name, or that of the fused node whose body it computes
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> tuple[Tensor | None, Tensor | None]:
        return self.inputs[0] if self.inputs else None, self.outputs[0] if self.outputs else None

    @property
    def tactic(self) -> str:
        return str(self.raw.get("TacticName", ""))

    @property
    def origin(self) -> str:
        """Why a copy exists, in a word of `kinds.copy_origin`."""
        return copy_origin(self.name, self.raw, self.type)

    @property
    def label(self) -> str:
        """A short title: long fused names show their ends."""
        text = self.title or self.name
        return text if len(text) <= 60 else f"{text[:28]} … {text[-28:]}"


def read_layers(data: Any, file: str) -> list[Layer]:
    """The layers of trtexec's layer information, or of what `rtx_log.layer_information` makes of a log.

    Raises CutefuseError where there are none; `file` names the source.
    """
    inside = isinstance(data, dict)
    found, path = (data.get("Layers", data.get("layers")), "Layers") if inside else (data, "")
    if not isinstance(found, list):
        raise CutefuseError(
            f"{file} is no layer information of TensorRT (no list 'Layers'); give trtexec's --exportLayerInfo"
        )
    layers: list[Layer] = []
    _collect(found, f"{file} › {path}", "", layers)
    if not layers:
        raise CutefuseError(f"{file} lists no layers; build the engine again with --profilingVerbosity=detailed")
    return layers


def _collect(found: list[Any], where: str, prefix: str, layers: list[Layer]) -> None:
    """Flatten a list of layers; sub-graphs of conditionals and loops follow their owner."""
    for position, item in enumerate(found):
        source = f"{where}[{position}]"
        if isinstance(item, str):
            item = {"Name": item}
        if not isinstance(item, dict) or not any(k in item for k in ("Name", "name", "LayerType", "Inputs", "Outputs")):
            continue
        name = str(item.get("Name", item.get("name", f"layer {len(layers)}")))
        layer = Layer(
            index=len(layers),
            name=prefix + name,
            type=str(item.get("LayerType", item.get("Type", ""))) or "unknown",
            inputs=_tensors(item.get("Inputs")),
            outputs=_tensors(item.get("Outputs")),
            raw={k: v for k, v in item.items() if k not in ("Inputs", "Outputs")},
            sources={"layer": source},
        )
        layer.kind = kind_of(layer.type, layer.raw, layer.name)
        layer.precision = precision_of(layer.kind, layer.inputs, layer.outputs, layer.tactic)
        layer.onnx = node_names(layer.name, layer.raw)
        layers.append(layer)
        for key in ("Layers", "TrueBranch", "FalseBranch", "Body", "Branches"):
            if isinstance(item.get(key), list):
                layer.raw.pop(key, None)
                _collect(item[key], f"{source}.{key}", f"{name}/", layers)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in map(tensor_of, value) if t] if isinstance(value, list) else []


def traffic_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; one of unknown size counts nothing."""
    return int(sum(tensor.size_bytes or 0 for tensor in tensors))


def weight_bytes(layer: Layer) -> float:
    """Bytes of the layer's weights and bias: counts of elements, or in Myelin's records whole tensors."""
    total = 0.0
    for key in ("Weights", "Bias", "Constants"):
        part = layer.raw.get(key)
        for item in part if isinstance(part, list) else [part]:
            if isinstance(item, dict) and "Dimensions" in item:
                tensor = tensor_of(item)
                total += (tensor.size_bytes or 0.0) if tensor else 0.0
            else:
                bits = DTYPE_BITS.get(dtype_of(str(item.get("Type", ""))), 32) if isinstance(item, dict) else 0
                total += count_of(item) * bits / 8
    return total


def count_of(part: Any) -> float:
    """Elements of weights; 0 where they are not told."""
    value = part.get("Count") if isinstance(part, dict) else None
    return float(value) if isinstance(value, (int, float)) and value > 0 else 0.0


@dataclass(frozen=True)
class Moved:
    """All copies among some layers, the bytes that they read and write, and those of all layers with their weights."""

    copies: int
    copy_bytes: int
    all_bytes: int

    @property
    def text(self) -> str:
        if not self.copy_bytes:
            return f"{self.copies} copies"
        return f"{self.copies} copies move {self.copy_bytes / 1e6:.1f} of {self.all_bytes / 1e6:.1f} MB"


def moved(layers: Iterable[Layer]) -> Moved:
    layers = list(layers)
    copies = [layer for layer in layers if layer.kind == "copy"]
    everything = sum(layer_bytes(layer) + int(weight_bytes(layer)) for layer in layers if layer.kind != "noop")
    return Moved(len(copies), sum(map(layer_bytes, copies)), everything)


def layer_bytes(layer: Layer) -> int:
    """Bytes of the activations that a layer reads and writes; a no-op touches none."""
    if layer.kind == "noop":
        return 0
    if layer.name.endswith(" copy"):  # of a concatenation: it writes its own part of the tensor that it names
        return 2 * min(traffic_bytes(layer.inputs), traffic_bytes(layer.outputs))
    # Myelin lists a tensor for each of the elementwise steps that read it; a kernel reads it once.
    read = {t.name: t for t in layer.inputs}.values() if layer.kind == "pointwise" else layer.inputs
    return traffic_bytes((*read, *layer.outputs))


@dataclass(frozen=True)
class CompiledGraph:
    """A compiled model. Times and memory are those of building, on this machine's CPU.

    `layers`: in the order of execution. `seconds`: of building. `peak_mib`: memory of the process that built.
    """

    layers: tuple[Layer, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    engine_bytes: int = 0
    seconds: float = 0.0
    peak_mib: float = 0.0
    sm: int = 0  # compute capability * 10 that it was compiled for

    @property
    def copies(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.kind == "copy"]

    @cached_property
    def moved(self) -> Moved:
        """Copies, the bytes that they read and write in one inference, and those of all layers."""
        return moved(self.layers)

    @property
    def plugin_layers(self) -> int:
        return sum(layer.kind == "plugin" for layer in self.layers)
