"""Faults of TensorRT that others have reported and that change results without a word, and the nodes that meet them.

The reports are NVIDIA's public issues; nothing here was run. A version outside of the reported range may have a fault
too, and a node that is named may be right: compare the engine's outputs with the model's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import onnx
from onnx import NodeProto, TensorProto

Version = tuple[int, ...]
_ACTIVATIONS = ("Relu", "LeakyRelu", "Clip", "HardSwish", "Sigmoid", "Tanh", "Swish", "Elu", "Gelu", "Mish")


@dataclass(frozen=True)
class Fault:
    """`first`: the oldest version with a report; `last`: the newest that is not known to be mended, None for any."""

    title: str
    source: str
    first: Version
    last: Version | None
    advice: str
    nodes: Callable[[onnx.ModelProto], list[str]]

    def concerns(self, version: Version) -> bool:
        """Whether a version, as (11, 2), is one of the reported ones or newer than all of them."""
        given = tuple(version[: len(self.first)])
        return given >= self.first and (self.last is None or given <= self.last)

    @property
    def versions(self) -> str:
        first = ".".join(map(str, self.first))
        return f"{first} and newer" if self.last is None else f"{first} to {'.'.join(map(str, self.last))}"


def _shortcuts_over_views(model: onnx.ModelProto) -> list[str]:
    """Adds behind a float16 Conv and its activation whose other operand also goes into a Concat as it is."""
    makers: dict[str, NodeProto] = {out: n for n in model.graph.node for out in n.output}
    readers: defaultdict[str, list[NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            readers[name].append(node)
    half = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT16}

    def maker(name: str, *op_types: str) -> NodeProto | None:
        node = makers.get(name)
        return node if node is not None and node.op_type in op_types else None

    def convolved(name: str) -> bool:
        """Whether a tensor is the activation of a Conv, with or without a BatchNormalization between."""
        act = maker(name, *_ACTIVATIONS)
        source = act.input[0] if act else ""
        if product := maker(name, "Mul"):
            gates = {g.input[0] for i in product.input if (g := maker(i, "Sigmoid", "HardSigmoid"))}
            source = next((i for i in product.input if i in gates), "")
        norm = maker(source, "BatchNormalization")
        conv = maker(norm.input[0] if norm else source, "Conv")
        return conv is not None and conv.input[1] in half

    found = []
    for node in model.graph.node:
        if node.op_type == "Add" and len(node.input) == 2:
            a, b = node.input
            for one, other in ((a, b), (b, a)):
                if convolved(one) and other in makers and any(r.op_type == "Concat" for r in readers[other]):
                    found.append(node.name or node.output[0])
                    break
    return found


def _grid_samples(model: onnx.ModelProto) -> list[str]:
    return [n.name or n.output[0] for n in model.graph.node if n.op_type == "GridSample" and not n.domain]


FAULTS = (
    Fault(
        "a float16 Conv with activation and shortcut Add reads the Add's other operand at wrong places where that also "
        "goes into a Concat",
        "https://github.com/NVIDIA/TensorRT/issues/4854", (11, 2), None,
        "a site that `cutefuse patch` fuses with its Add is computed by a plugin instead", _shortcuts_over_views,
    ),
    Fault(
        "GridSample gives wrong results in some networks, detection transformers among them",
        "https://github.com/NVIDIA/TensorRT/issues/4813", (10, 14), None,
        "cutefuse does not replace GridSample; a Gather-based sampling is said to be right", _grid_samples,
    ),
)  # fmt: skip


def known(version: Version) -> list[Fault]:
    """The faults that are reported for a version of TensorRT."""
    return [fault for fault in FAULTS if fault.concerns(version)]
