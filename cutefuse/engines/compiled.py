"""A compiled engine as data: its layers with their tensors and ONNX nodes, and what is only moved in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cutefuse.engines.kinds import kind_of, node_names
from cutefuse.engines.tensors import Tensor, tensor_of


@dataclass(frozen=True)
class CompiledLayer:
    """One layer of an engine. `kind` is one of `kinds.KINDS`; `inputs` and `outputs` are without the constants."""

    name: str
    kind: str
    layer_type: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    onnx_nodes: tuple[str, ...]

    @property
    def is_copy(self) -> bool:
        """Whether it moves data: alone (a reformat, a concatenation) or on its way to a sum or an activation."""
        return self.kind == "copy"

    @property
    def bytes_moved(self) -> int:
        """Bytes that a copy reads and writes; 0 for any other layer."""
        return traffic_bytes((*self.inputs, *self.outputs)) if self.is_copy else 0


@dataclass(frozen=True)
class CompiledGraph:
    """What a compiler made of a model. Times and memory are those of building, on this machine's CPU.

    `layers`: in the order of execution. `seconds`: of building. `peak_mib`: memory of the process that built.
    """

    layers: tuple[CompiledLayer, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    engine_bytes: int = 0
    seconds: float = 0.0
    peak_mib: float = 0.0
    sm: int = 0  # compute capability * 10 that it was compiled for

    @property
    def copies(self) -> tuple[CompiledLayer, ...]:
        return tuple(layer for layer in self.layers if layer.is_copy)

    @property
    def copy_bytes(self) -> int:
        """Bytes that the copies read and write in one inference."""
        return sum(layer.bytes_moved for layer in self.layers)

    @cached_property
    def all_bytes(self) -> int:
        """Bytes that all layers read and write in one inference, their constants included."""
        return sum(traffic_bytes((*la.inputs, *la.outputs, *la.constants)) for la in self.layers)

    @property
    def plugin_layers(self) -> int:
        return sum(layer.kind == "plugin" for layer in self.layers)


def traffic_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; one of unknown size counts nothing."""
    return int(sum(tensor.size_bytes or 0 for tensor in tensors))


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return tuple(t for t in map(tensor_of, value) if t) if isinstance(value, list) else ()


def read_layers(information: dict[str, Any]) -> tuple[CompiledLayer, ...]:
    """The layers of trtexec's layer information, or of what `rtx_log.layer_information` makes of a log."""
    layers = []
    for raw in information.get("Layers", []):
        name, layer_type = str(raw.get("Name", "")), str(raw.get("LayerType", ""))
        layers.append(
            CompiledLayer(
                name, kind_of(layer_type, raw, name), layer_type, _tensors(raw.get("Inputs")),
                _tensors(raw.get("Outputs")), _tensors(raw.get("Constants")), tuple(node_names(name, raw)),
            )
        )  # fmt: skip
    return tuple(layers)
