"""Writes SiLU behind convolutions as x * (0.5 * tanh(0.5 * x) + 0.5), which TensorRT 11 computes in their kernel.

It gives x * sigmoid(x) a kernel of its own, which takes 20 % of the time of a YOLO there (ultralytics PR 26223). The
two are equal but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from cutefuse.graph.numbers import FLOATS
from cutefuse.graph.read import Graph, attribute, label, replace_nodes
from cutefuse.rewrite.apply import fresh
from cutefuse.select.rules_tensorrt import shortcut_fault

_BEHIND = ("Conv", "ConvTranspose", "BatchNormalization")
LEFT = "its sum with a part of a wider tensor is computed wrongly by TensorRT 11.2 (NVIDIA/TensorRT 4854)"


@dataclass(frozen=True)
class Silu:
    """A SiLU that stays outside of fused nodes. `left` says why it keeps its form; "" where it is written anew."""

    name: str  # of its last node
    x: str
    y: str
    gate: str  # the tensor between Sigmoid and Mul; "" for a Swish
    dtype: str
    left: str = ""


def find(graph: Graph, gone: Set[int] = frozenset()) -> list[Silu]:
    """Every SiLU behind a convolution among the nodes that stay, in graph order; `gone`: ids of those that do not."""
    found = []
    for node in graph.nodes:
        if id(node) in gone:
            continue
        pair = _pair(graph, node)
        if pair is None:
            continue
        x, gate = pair
        before, dtype = graph.producer(x), graph.dtype(x) or ""
        if graph.is_op(before, *_BEHIND) and id(before) not in gone and dtype in FLOATS:
            y = node.output[0]
            found.append(Silu(label(node), x, y, gate, dtype, LEFT if shortcut_fault(graph, y) else ""))
    return found


def _pair(graph: Graph, node: NodeProto) -> tuple[str, str] | None:
    """(x, the gate's tensor) where the node is the end of a SiLU."""
    if graph.is_op(node, "Swish"):
        return (node.input[0], "") if attribute(node, "alpha", 1.0) == 1.0 else None
    if not graph.is_op(node, "Mul") or len(set(node.input)) != 2:
        return None
    for x, gate in (node.input, reversed(node.input)):
        maker = graph.producer(gate)
        if graph.is_op(maker, "Sigmoid") and maker.input[0] == x and graph.only_user(gate) is node:
            return x, gate
    return None


def write(model: onnx.ModelProto, silus: Sequence[Silu]) -> None:
    """Write those that are not `left` in their tanh form; tensors keep their names."""
    chosen = {s.y: s for s in silus if not s.left}
    if not chosen:
        return
    gates = {s.gate for s in chosen.values() if s.gate}
    taken = {n.name for n in model.graph.node} | {o for n in model.graph.node for o in n.output}
    taken |= {v.name for v in (*model.graph.input, *model.graph.initializer)}
    halves: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        silu = chosen.get(node.output[0]) if node.output else None
        if silu is not None:
            if silu.dtype not in halves:
                halves[silu.dtype] = name = fresh(f"half.{silu.dtype}", taken, ".")
                value = numpy_helper.from_array(np.array(0.5, np.dtype(silu.dtype)), name)
                nodes.insert(0, helper.make_node("Constant", [], [name], name=name, value=value))
            nodes += _tanh_form(silu, node.name, halves[silu.dtype], taken)
        elif not gates & set(node.output):
            nodes.append(node)
    replace_nodes(model.graph, nodes)


def _tanh_form(silu: Silu, name: str, half: str, taken: set[str]) -> list[NodeProto]:
    inner, tanh, scaled, gate = (fresh(f"{silu.y}.{part}", taken, ".") for part in ("half", "tanh", "scaled", "gate"))
    return [
        helper.make_node("Mul", [silu.x, half], [inner], name=inner),
        helper.make_node("Tanh", [inner], [tanh], name=tanh),
        helper.make_node("Mul", [tanh, half], [scaled], name=scaled),
        helper.make_node("Add", [scaled, half], [gate], name=gate),
        helper.make_node("Mul", [silu.x, gate], [silu.y], name=name),
    ]
