"""Evaluates constant subgraphs, each node once, and only where the results are small.

A node takes part where it is a pure standard operator, its operands are small constants and shape inference knows the
sizes of its results beforehand, so that a constant that would be expanded to a huge one is never computed.
DequantizeLinear and QuantizeLinear stay: the patterns of quantised graphs need them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from cutefuse.errors import CutefuseError
from cutefuse.graph.read import ELEM_TYPES, TYPE_NAMES, Graph, attribute, label, read_tensor, run_node
from cutefuse.table import counted

MAX_ELEMENTS = 1 << 16  # of a folded constant; sizes, scales and parameters of channels are smaller, filters are not
# Deterministic functions of their operands alone: nothing random, no state, no bodies, no quantisers.
PURE = frozenset(
    "Abs Add And Cast CastLike Ceil Clip Concat Constant ConstantOfShape Div Equal Exp Expand Flatten Floor Gather "
    "Greater GreaterOrEqual Identity Less LessOrEqual Log Max Min Mod Mul Neg Not Or Pad Pow Range Reciprocal "
    "ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Reshape Round Shape Size Slice Split Sqrt Squeeze Sub Sum "
    "Tile Transpose Unsqueeze Where".split()
)
_TYPES = frozenset(TYPE_NAMES.values()) - {"bfloat16"}  # in which runtimes round steps of a computation differently


def fold(graph: Graph, kept: set[str]) -> tuple[dict[str, TensorProto], str]:
    """(tensor -> its value, why constants are left or "") of all tensors that one pass can compute, but none of a node
    that makes one of `kept`. Another pass over a graph with these values may find more: more sizes are known then."""
    found = {t.name: t for node in graph.nodes for t in _from_sizes(graph, node)}
    ready = [n for n in _ready(graph, found.keys()) if not set(n.output) & found.keys()]
    values, note = _evaluated(graph, ready, found)
    found |= {name: numpy_helper.from_array(value, name) for name, value in values.items()}
    stays = {o for n in graph.nodes if kept & set(n.output) for o in n.output}
    return {name: t for name, t in found.items() if name not in stays}, note


def _from_sizes(graph: Graph, node: NodeProto) -> list[TensorProto]:
    """The result of a Shape of known sizes, or of arithmetic over sizes that shape inference followed."""
    if not graph.is_op(node, *PURE) or len(node.output) != 1 or graph.is_constant(node.output[0]):
        return []
    value = graph.known_sizes(node.output[0])
    if node.op_type == "Shape":
        dims = graph.dims(node.input[0])
        if dims is not None:
            part = dims[attribute(node, "start", 0) : attribute(node, "end", None)]
            value = np.array(part, dtype=np.int64) if min(part, default=0) >= 0 else None
    return [] if value is None else [numpy_helper.from_array(value, node.output[0])]


def _ready(graph: Graph, known: Collection[str]) -> list[NodeProto]:
    """The nodes that can be evaluated now, in graph order."""
    made = set(known)

    def small(name: str) -> bool:
        if name in made:
            return True
        stored = name in graph.initializers and name not in graph.overridable
        return stored and math.prod(graph.initializers[name].dims) <= MAX_ELEMENTS

    def bounded(name: str) -> bool:
        dims = graph.dims(name)
        known = dims is not None and min(dims, default=0) >= 0 and graph.dtype(name) in _TYPES
        return bool(name) and known and math.prod(dims or ()) <= MAX_ELEMENTS

    nodes = []
    for node in graph.nodes:
        read = node.input[:1] if node.op_type == "CastLike" else node.input  # its second operand gives a type alone
        if not graph.is_op(node, *PURE) or not all(small(i) for i in read if i):
            continue
        if all(bounded(o) for o in node.output):
            nodes.append(node)
            made.update(node.output)
    return nodes


def _evaluated(
    graph: Graph, nodes: Sequence[NodeProto], known: Mapping[str, TensorProto]
) -> tuple[dict[str, np.ndarray], str]:
    """(tensor -> its value) of what these nodes make, and why some of them make nothing, "" where none is so."""
    nodes = [_typed(graph, n) for n in nodes]
    made = {o for n in nodes for o in n.output}
    stored = {i for n in nodes for i in n.input if i} - made - known.keys()
    try:
        values = {name: read_tensor(graph.initializers[name], graph.folder) for name in stored}
    except CutefuseError as error:  # damaged data that no site may need; who needs it reports it
        return {}, f"no constant was folded: {error}"
    values |= {name: numpy_helper.to_array(tensor) for name, tensor in known.items()}
    failed = []
    for node in nodes:
        able = all(i in values for i in node.input if i)
        results = run_node(node, graph.opset, [values[i] for i in node.input if i]) if able else None
        if results and all(map(partial(_is_as_inferred, graph), node.output, results)):
            values.update(zip(node.output, results, strict=True))
        else:
            failed.append(label(node))
    found = {name: value for name, value in values.items() if name in made}
    if not failed:
        return found, ""
    first = f"first '{failed[0]}', which ONNX's evaluator cannot compute"
    return found, f"{counted(len(failed), 'constant')} could not be folded, {first}; sites are matched without"


def _is_as_inferred(graph: Graph, tensor: str, value: np.ndarray) -> bool:
    """Whether a value is of the type and the sizes that shape inference tells: ONNX's evaluator heeds no schema."""
    return value.dtype.name == graph.dtype(tensor) and value.shape == graph.dims(tensor)


def _typed(graph: Graph, node: NodeProto) -> NodeProto:
    """A CastLike, whose type is known where its result is bounded, as a Cast; another node as it is."""
    if node.op_type != "CastLike":
        return node
    to = ELEM_TYPES[graph.dtype(node.output[0]) or ""]
    return helper.make_node("Cast", node.input[:1], list(node.output), name=node.name, to=to)
