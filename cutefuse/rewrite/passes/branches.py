"""Writes a sum of convolutions of one tensor, as RepVGG trains them, as one convolution.

`Conv3x3(x) + Conv1x1(x) + BatchNorm(x)` is linear in x: the filters, with their norms folded in, are added tap by tap,
and a norm of x alone is a 1x1 filter of its own. No engine does this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from cutefuse.graph.read import Graph, label, reads_of, replace_nodes
from cutefuse.graph.shapes import inferred
from cutefuse.match.after import Affine, affine_before, composed
from cutefuse.match.answer import Refusal
from cutefuse.match.conv import read as conv_facts
from cutefuse.match.conv.front import Front
from cutefuse.operators.conv_math import Geometry
from cutefuse.rewrite.apply import Names
from cutefuse.rewrite.state import Folded, State

FORM = "branches"  # of --without
_MAX_STEPS = 8  # affine steps behind one branch
_ITSELF = Geometry((1, 1))  # of a branch without a convolution


@dataclass(frozen=True)
class _Branch:
    """A term of a sum: a convolution of `source`, or `source` itself, and the affine steps behind it, first to last."""

    source: str
    conv: NodeProto | None
    steps: tuple[Affine, ...]


def run(state: State) -> None:
    """Reads `model`, and writes its sums of branches as convolutions; leaves `branches`. `converted` stays."""
    asked = FORM not in state.options.without
    state.branches = fold(state.model, state.source.parent) if asked else []


def fold(model: onnx.ModelProto, folder: Path) -> list[Folded]:
    """Write every sum of branches of the model's main graph as one Conv, where that multiplies no more than before and
    the added filter loses no precision. The sums, in graph order."""
    if not any(n.op_type in ("Add", "Sum") for n in model.graph.node):
        return []
    graph = Graph(model, folder, inferred(model))
    names, gone = Names(graph), set[int]()
    made: dict[int, NodeProto] = {}
    found: list[Folded] = []
    for node in reversed(graph.nodes):  # a sum before the sums in it
        if id(node) in gone or not graph.is_op(node, "Add", "Sum"):
            continue
        terms, nodes = _terms(graph, node)
        if len(set(terms)) < len(terms):
            continue
        branches = [_branch(graph, t) for t in terms]
        convs = [b for b in branches if b.conv is not None]
        if len({b.source for b in branches}) > 1 or len(convs) + any(b.steps for b in branches if b.conv is None) < 2:
            continue
        new = _joined(graph, branches, node.output[0], names)
        if new is None:
            continue
        made[id(node)], filters = new
        model.graph.initializer.extend(filters)
        nodes += [n for b in branches for n in (b.conv, *(s.node for s in b.steps)) if n is not None]
        gone |= {id(n) for n in nodes}
        found.append(Folded(made[id(node)].name, len(convs), node.output[0]))
    if found:
        _write(graph, [made.get(id(n), n) for n in graph.nodes if id(n) not in gone or id(n) in made])
    return found[::-1]


def _terms(graph: Graph, node: NodeProto) -> tuple[list[str], list[NodeProto]]:
    """What a sum adds, sums that only it reads opened, and the nodes that add."""
    terms, nodes, pending = list[str](), [node], list(node.input)
    while pending:
        name = pending.pop(0)
        inner = graph.producer(name)
        opens = graph.is_op(inner, "Add", "Sum") and graph.only_user(name) is not None
        if opens and inner is not None and not any(graph.is_constant(t) for t in inner.input if t):
            nodes.append(inner)
            pending = [*inner.input, *pending]
        else:
            terms.append(name)
    return terms, nodes


def _branch(graph: Graph, tensor: str) -> _Branch:
    """The longest branch that makes a tensor, whose inner tensors nothing else reads."""
    steps: list[Affine] = []
    name = tensor
    while len(steps) < _MAX_STEPS and graph.only_user(name) is not None:
        node = graph.producer(name)
        if graph.is_op(node, "Conv"):
            return _Branch(node.input[0], node, tuple(reversed(steps)))
        dims = graph.dims(name)
        found = affine_before(graph, name, dims[1]) if dims is not None and len(dims) == 4 and dims[1] > 0 else None
        if found is None:
            break
        step, name = found
        steps.append(step)
    return _Branch(name, None, tuple(reversed(steps)))


def _joined(
    graph: Graph, branches: Sequence[_Branch], output: str, names: Names
) -> tuple[NodeProto, list[onnx.TensorProto]] | None:
    """The convolution that all branches together are, with its filter and bias; None where there is none."""
    source = branches[0].source
    facts = list[conv_facts.Facts | None]()
    for branch in branches:
        read = conv_facts.read(graph, branch.conv, Front((source,), (), ())) if branch.conv else None
        if isinstance(read, Refusal):
            return None
        facts.append(read)
    known = [f for f in facts if f]
    kinds = {(f.dtype, f.weight_dims[:2], f.depthwise) for f in known}
    dtype, (K, C), depthwise = next(iter(kinds))
    if len(kinds) > 1 or (len(known) < len(facts) and K != C and not depthwise):
        return None
    itself = np.ones((K, 1)) if depthwise else np.eye(K)
    geometries = [f.geometry if f else _ITSELF for f in facts]
    geometry = _covering(geometries)
    if geometry is None:
        return None
    weight, bias = np.zeros((K, C, *geometry.kernel_shape)), np.zeros(K)
    for branch, own, g in zip(branches, facts, geometries, strict=True):
        w, b = (own.filters(graph), own.biases(graph)) if own else (itself[:, :, None, None], np.zeros(K))
        with np.errstate(all="ignore"):
            scale, shift = composed(branch.steps)
            w, b = w.astype(np.float64) * scale[:, None, None, None], b * scale + shift
        (top, left), (R, S) = (geometry.pads[i] - g.pads[i] for i in range(2)), g.kernel_shape
        weight[:, :, top : top + R, left : left + S] += w
        bias += b
    if not conv_facts.keeps_precision(weight, dtype) or not np.isfinite(bias.astype(np.float32)).all():
        return None
    largest = max(known, key=lambda f: math.prod(f.weight_dims[2:]))
    chief = next(b.conv for b, f in zip(branches, facts, strict=True) if b.conv and f is largest)
    stored = [
        numpy_helper.from_array(v.astype(np.dtype(dtype)), names.of_tensor(f"{label(chief)}.{part}"))
        for part, v in (("weight", weight), ("bias", bias))
    ]
    inputs = [source, *(t.name for t in stored)]
    node = helper.make_node("Conv", inputs, [output], name=chief.name)
    attrs = geometry.attrs() | ({"group": K} if depthwise else {})
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attrs.items())
    return node, stored


def _covering(geometries: Sequence[Geometry]) -> Geometry | None:
    """The smallest geometry whose taps cover those of all; None where they differ in their strides or in the size of
    their outputs, or where it multiplies more than they do together."""
    strides = {g.strides for g in geometries}
    if len(strides) > 1 or any(set(g.dilations) != {1} for g in geometries):
        return None
    kernel, begin, end = list[int](), list[int](), list[int]()
    for axis in range(2):
        before = max(g.pads[axis] for g in geometries)
        behind = max(g.kernel_shape[axis] - g.pads[axis] for g in geometries)
        ends = {behind + g.pads[axis] + g.pads[axis + 2] - g.kernel_shape[axis] for g in geometries}
        if len(ends) > 1 or min(ends) < 0:
            return None
        kernel.append(before + behind)
        begin.append(before)
        end += ends
    taps = sum(math.prod(g.kernel_shape) for g in geometries)
    pads = (begin[0], begin[1], end[0], end[1])
    return Geometry(tuple(kernel), strides.pop(), pads) if math.prod(kernel) <= taps else None


def _write(graph: Graph, nodes: Sequence[NodeProto]) -> None:
    """Give the model these nodes, without what only the nodes that went have read."""
    kept, ours = list(nodes), {id(n) for n in nodes}
    needed = {name for n in graph.nodes if id(n) not in ours for name in n.input}
    while True:
        read = {name for n in kept for name in reads_of(n)} | graph.outputs
        idle = [n for n in kept if needed & set(n.output) and not read & set(n.output)]
        if not idle:
            break
        needed |= {name for n in idle for name in n.input}
        kept = [n for n in kept if not any(n is i for i in idle)]
    replace_nodes(graph.proto, kept)
