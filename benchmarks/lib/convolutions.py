"""The distinct 2-D convolutions of an ONNX model, how often each occurs, and those whose sizes are not known."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from onnx import ModelProto, NodeProto

from cutefuse.graph.read import Graph, attribute, label, nodes_of, subgraphs
from cutefuse.graph.shapes import inferred
from cutefuse.match.conv.read import geometry_of


@dataclass(frozen=True)
class Convolution:
    """Sizes of one convolution. C and K are of all groups together; pads are top, left, bottom, right."""

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    strides: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    dilations: tuple[int, ...] = (1, 1)
    groups: int = 1

    @property
    def output(self) -> tuple[int, int, int, int]:
        """(N, K, P, Q); P and Q are < 1 where the filter does not fit."""
        p, q = (
            (size + self.pads[i] + self.pads[i + 2] - self.dilations[i] * (extent - 1) - 1) // self.strides[i] + 1
            for i, (size, extent) in enumerate(((self.H, self.R), (self.W, self.S)))
        )
        return self.N, self.K, p, q

    @property
    def flops(self) -> int:
        """Multiply-adds count as two."""
        n, k, p, q = self.output
        return 2 * n * k * p * q * (self.C // self.groups) * self.R * self.S

    def __str__(self) -> str:
        words = [f"{self.N}x{self.C}x{self.H}x{self.W} -> {self.K}, {self.R}x{self.S}"]
        for name, values in (("stride", self.strides), ("pads", self.pads), ("dilation", self.dilations)):
            if set(values) != {0 if name == "pads" else 1}:
                words.append(f"{name} " + (str(values[0]) if len(set(values)) == 1 else ",".join(map(str, values))))
        return " ".join(words + [f"groups {self.groups}"] * (self.groups > 1))


@dataclass
class Found:
    """counts: convolution -> how often it occurs, in the model's order. other_ranks: Convs that are 1-D or 3-D.
    unknown: a sentence for each whose sizes cannot be told."""

    counts: dict[Convolution, int] = field(default_factory=dict)
    other_ranks: int = 0
    unknown: list[str] = field(default_factory=list)

    @property
    def left_out(self) -> int:
        return self.other_ranks + len(self.unknown)


def of(model: ModelProto) -> Found:
    """The convolutions of a model's graph. Raises CutefuseError for a broken graph."""
    graph, found = Graph(model, Path(), inferred(model)), Found()
    for node in graph.nodes:
        if node.op_type == "Conv" and node.domain in ("", "ai.onnx"):
            known = _read(graph, node)
            if isinstance(known, Convolution):
                found.counts[known] = found.counts.get(known, 0) + 1
            elif known:
                found.unknown.append(f"Conv '{label(node)}': {known}")
            else:
                found.other_ranks += 1
        for body in subgraphs(node):
            inner = [n for n in nodes_of(body) if n.op_type == "Conv"]
            found.unknown += [f"Conv '{label(n)}' stands in a body of '{label(node)}'" for n in inner]
    return found


def _read(graph: Graph, node: NodeProto) -> Convolution | str:
    """A node's sizes, why they are not known, or "" where it is no 2-D convolution."""
    if len(node.input) < 2:
        return "it has no filter"
    x, w = (graph.dims(name) for name in node.input[:2])
    if w is None or x is None:
        return f"the rank of '{node.input[0 if x is None else 1]}' is not known"
    if len(x) != len(w):
        return f"its input has rank {len(x)}, its filter {len(w)}"
    if len(w) != 4:
        return ""
    if min(*x, *w) < 1:
        return f"sizes of its input {list(x)} or filter {list(w)} are not known or 0"
    (K, c, R, S), groups = w, attribute(node, "group", 1)
    if groups < 1 or x[1] != c * groups or K % groups:
        return f"{x[1]} channels and {K} filters of {c} do not suit {groups} groups"
    if tuple(attribute(node, "kernel_shape", (R, S))) != (R, S):
        return f"its kernel_shape is not that of its filter {list(w)}"
    geometry = geometry_of(node, (R, S), x[2:])
    if isinstance(geometry, str):
        return geometry
    if min(*geometry.strides, *geometry.dilations) < 1 or min(geometry.pads) < 0:
        return "a stride or dilation is below 1, or a pad below 0"
    found = Convolution(
        x[0], x[1], x[2], x[3], K, R, S, geometry.strides, geometry.pads, geometry.dilations, groups
    )  # fmt: skip
    return found if min(found.output) > 0 else "its filter is larger than its padded input"
