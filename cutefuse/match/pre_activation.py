"""What stands before a convolution: affine steps with constants and ReLU over each input channel, and the tensors that
a Concat in front of them joins, older ones in groups where they are more than the operator takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute
from cutefuse.match.after import Affine, composed, steps_before
from cutefuse.match.answer import Constant, Joined
from cutefuse.match.conv.front import Front, flattened, pass_through
from cutefuse.match.conv.read import Facts
from cutefuse.operators.conv_form import Source

# Each layer of a dense block joins all tensors before it. Groups of fixed sizes from the first tensor on are the same
# in all its layers, so that a group is joined once: (sizes, largest Concat that becomes at most 8 operands by them).
GROUPS = (((7,), 26), ((16, 4), 62))


@dataclass(frozen=True)
class PreActivation:
    """ReLU of affine steps of `tensor`, and what a Conv reads of it; `nodes` from the Conv on backwards."""

    tensor: str
    nodes: tuple[NodeProto, ...]
    steps: tuple[Affine, ...]  # in the order of computation

    def reject(self, dtype: str) -> str | None:
        """Why scale and shift cannot be stored in a type; None where they can."""
        with np.errstate(all="ignore"):
            if all(np.isfinite(v.astype(np.dtype(dtype)).astype(np.float64)).all() for v in composed(self.steps)):
                return None
        return f"the normalisation before this Conv has constants that {dtype} cannot hold; keep it in float32"

    def constants(self, channels: int, dtype: str) -> list[Constant]:
        """Scale and shift as operands of the fused node."""
        return [
            Constant(f"pre_{name}", (channels,), dtype, partial(self._vector, i, channels, dtype), typed=True)
            for i, name in enumerate(("scale", "shift"))
        ]

    def _vector(self, index: int, channels: int, dtype: str) -> np.ndarray:
        return np.array(np.broadcast_to(composed(self.steps)[index], (channels,)).astype(np.dtype(dtype)))


def pre_activation(graph: Graph, conv: NodeProto) -> PreActivation | None:
    """The ReLU of affine steps that only this Conv reads; None without, or where engines fold them otherwise."""
    weight = graph.dims(conv.input[1])
    between, tensor = pass_through(graph, conv.input[0])
    relu = graph.producer(tensor)
    if not graph.is_op(relu, "Relu") or not weight or len(weight) != 4 or attribute(conv, "group", 1) != 1:
        return None
    steps, tensor = steps_before(graph, relu.input[0], weight[1])
    nodes = [*between, relu, *(s.node for s in reversed(steps))]
    inner = [n.output[0] for n in nodes]
    if not steps or any(graph.only_user(t) is None for t in inner):
        return None
    before = graph.producer(tensor)
    if graph.is_op(before, "Conv", "ConvTranspose") and graph.only_user(tensor) is nodes[-1]:
        return None
    return PreActivation(tensor, tuple(nodes), tuple(steps))


def fronts(graph: Graph, found: PreActivation) -> list[Front]:
    """What the fused Conv may read: the tensors that Concats join, opened as far as possible, then the joined one."""
    whole = Front((found.tensor,), found.nodes, ())
    between, tensor = pass_through(graph, found.tensor)
    concat = graph.producer(tensor)
    if not graph.is_op(concat, "Concat") or attribute(concat, "axis", 1) not in (1, -3):
        return [whole]
    opened = [flattened(graph, concat, limit, convolved=False) for limit in (GROUPS[-1][1], 0)]
    if opened[0][0] == opened[1][0]:
        opened.pop()
    nodes = (*found.nodes, *between, concat)
    return [*(Front(tuple(sources), (*nodes, *inner), (concat, *inner)) for sources, inner in opened), whole]


def grouped(facts: Facts, front: Front, most: int) -> list[tuple[str | Joined, Source]] | None:
    """The operands of a call that takes at most `most`, older tensors joined where they are more; None for too many."""
    pairs = list(zip(front.sources, facts.sources, strict=True))
    sizes = next((sizes for sizes, limit in GROUPS if len(pairs) <= limit), ()) if len(pairs) > most else ()
    operands, done = list[tuple[str | Joined, Source]](), 0
    for size in sizes:
        while len(pairs) - done >= size:
            operands.append(_joined(pairs[done : done + size]))
            done += size
    operands += [(name, Source(d, d[1])) for name, d in pairs[done:]]
    return operands if len(operands) <= most else None


def _joined(pairs: Sequence[tuple[str, tuple[int, int, int, int]]]) -> tuple[Joined, Source]:
    (n, _, h, w), channels = pairs[0][1], sum(d[1] for _, d in pairs)
    return Joined(tuple(name for name, _ in pairs)), Source((n, channels, h, w), channels)
