"""Faults of TensorRT that others have reported and that change results without a word, and the nodes that meet them.

The reports are NVIDIA's public issues; nothing here was run. A version outside of the reported range may have a fault
too, and a node that is named may be right: compare the engine's outputs with the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto

from cutefuse.graph.read import Graph, label

Version = tuple[int, ...]
_ACTIVATIONS = (
    "Relu", "LeakyRelu", "Clip", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh", "Swish", "Elu", "Gelu", "Mish",
)  # fmt: skip
_AFFINE = ("BatchNormalization", "Mul", "Add", "Sub", "Div")
_MOST = 16  # nodes of an activation behind a Conv; the longest form that exporters write has seven


@dataclass(frozen=True)
class Fault:
    """`first`: the oldest version with a report; `last`: the newest that is not known to be mended, None for any."""

    title: str
    source: str
    first: Version
    last: Version | None
    advice: str
    places: Callable[[Graph], Iterator[tuple[NodeProto, ...]]]  # nodes that meet it together, first the one to name

    def concerns(self, version: Version) -> bool:
        """Whether a version, as (11, 2), is one of the reported ones or newer than all of them."""
        given = tuple(version[: len(self.first)])
        return given >= self.first and (self.last is None or given <= self.last)

    def nodes(self, graph: Graph) -> list[str]:
        """The names of the nodes that meet it."""
        return [label(place[0]) for place in self.places(graph)]

    @property
    def versions(self) -> str:
        first = ".".join(map(str, self.first))
        return f"{first} and newer" if self.last is None else f"{first} to {'.'.join(map(str, self.last))}"


def _shortcuts_over_views(graph: Graph) -> Iterator[tuple[NodeProto, ...]]:
    """Adds behind a float16 Conv and its activation whose other operand also goes into a Concat as it is."""
    for add in graph.nodes:
        if not graph.is_op(add, "Add"):
            continue
        for own, other in (add.input, reversed(add.input)):
            conv = _activated(graph, own)
            viewed = graph.producer(other) is not None and any(n.op_type == "Concat" for n in graph.users(other))
            if conv and viewed and graph.dtype(conv.input[1]) == "float16":
                yield add, conv
                break


def _activated(graph: Graph, tensor: str) -> NodeProto | None:
    """The Conv from which elementwise nodes, an activation among them, make a tensor; None where there is none, or
    where anything but constants goes in beside it."""
    nodes: dict[int, NodeProto] = {}
    waiting = [tensor]
    while waiting:
        node = graph.producer(waiting.pop())
        if not graph.is_op(node, "Conv", *_ACTIVATIONS, *_AFFINE) or len(nodes) > _MOST:
            return None
        if id(node) not in nodes:
            nodes[id(node)] = node
            waiting += [t for t in node.input if t and not graph.is_constant(t)] if node.op_type != "Conv" else []
    found = [n for n in nodes.values() if n.op_type == "Conv"]
    return found[0] if len(found) == 1 and any(n.op_type in _ACTIVATIONS for n in nodes.values()) else None


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
        "cutefuse does not replace GridSample; a Gather-based sampling is said to be right",
        lambda graph: ((node,) for node in graph.nodes if graph.is_op(node, "GridSample")),
    ),
)  # fmt: skip


def met(graph: Graph, version: Version, gone: Set[int]) -> list[dict[str, Any]]:
    """The faults of a version that a graph meets, as patch.json holds them.

    gone: ids of the nodes that fused nodes replace. `stays`: the nodes that TensorRT computes; `fused`: those that a
    fused node computes with a part of what the fault needs.
    """
    found = []
    for fault in (f for f in FAULTS if f.concerns(version)):
        fused, stays = list[str](), list[str]()
        for place in fault.places(graph):
            (fused if any(id(n) in gone for n in place) else stays).append(label(place[0]))
        if fused or stays:
            found.append({"title": fault.title, "source": fault.source, "versions": fault.versions,
                          "advice": fault.advice, "stays": stays, "fused": fused})  # fmt: skip
    return found
