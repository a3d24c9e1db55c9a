"""Evaluates constant subgraphs, each once, in one ONNX Runtime session, and only where the results are small.

A node takes part where it is a pure standard operator, its operands are small constants and shape inference knows the
sizes of its results beforehand, so that a constant that would be expanded to a huge one is never computed.
DequantizeLinear and QuantizeLinear stay: the patterns of quantised graphs need them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from cutefuse.errors import CutefuseError
from cutefuse.graph.read import ELEM_TYPES, TYPE_NAMES, Graph, attribute, label, read_tensor, run_node
from cutefuse.table import counted

MAX_ELEMENTS = 1 << 16  # of a folded constant; sizes, scales and parameters of channels are smaller, filters are not
NEWEST_IR = 10  # that every supported ONNX Runtime reads
# Deterministic functions of their operands alone: nothing random, no state, no bodies, no quantisers.
PURE = frozenset(
    "Abs Add And Cast CastLike Ceil Clip Concat Constant ConstantOfShape Div Equal Exp Expand Flatten Floor Gather "
    "Greater GreaterOrEqual Identity Less LessOrEqual Log Max Min Mod Mul Neg Not Or Pad Pow Range Reciprocal "
    "ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Reshape Round Shape Size Slice Split Sqrt Squeeze Sub Sum "
    "Tile Transpose Unsqueeze Where".split()
)
# ONNX Runtime hands these out as NumPy arrays of their own types; bfloat16 it does not.
_TYPES = frozenset(TYPE_NAMES.values()) - {"bfloat16"}


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
    if not nodes:
        return {}, ""
    nodes = [_typed(graph, n) for n in nodes]
    names = [o for n in nodes for o in n.output]
    needed = dict.fromkeys(i for n in nodes for i in n.input if i and i not in names)
    try:
        operands = [_inline(graph, name, known) for name in needed]
    except CutefuseError as error:  # damaged data that no site may need; who needs it reports it
        return {}, f"no constant was folded: {error}"
    results = [helper.make_tensor_value_info(o, ELEM_TYPES[graph.dtype(o) or ""], None) for o in names]
    model = helper.make_model(
        helper.make_graph(nodes, "constants", [], results, operands),
        opset_imports=[helper.make_opsetid("", graph.opset)], ir_version=min(NEWEST_IR, max(4, graph.model.ir_version)),
    )  # fmt: skip
    try:
        return dict(zip(names, _run(model, names), strict=True)), ""
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        reason = " ".join(str(error).split())
    # One node that it lacks fails the session: ONNX's own evaluator computes the others one by one.
    values = {t.name: numpy_helper.to_array(t) for t in operands}
    found: dict[str, np.ndarray] = {}
    failed = []
    for node in nodes:
        able = all(i in values for i in node.input if i) and all(node.input)
        result = run_node(node, graph.opset, [values[i] for i in node.input]) if able else None
        if result is None:
            failed.append(label(node))
            continue
        made = dict(zip(node.output, result, strict=True))
        found |= made
        values |= made
    if not failed:
        return found, ""
    count = counted(len(failed), "constant")
    return found, f"{count} could not be folded, first '{failed[0]}' ({reason}); sites are matched without"


def _typed(graph: Graph, node: NodeProto) -> NodeProto:
    """A CastLike, whose type is known where its result is bounded, as a Cast; another node as it is."""
    if node.op_type != "CastLike":
        return node
    to = ELEM_TYPES[graph.dtype(node.output[0]) or ""]
    return helper.make_node("Cast", node.input[:1], list(node.output), name=node.name, to=to)


def _inline(graph: Graph, name: str, known: Mapping[str, TensorProto]) -> TensorProto:
    """A tensor with its data inside. Raises CutefuseError where the data is missing or broken."""
    tensor, inline = known[name] if name in known else graph.initializers[name], TensorProto()
    value = read_tensor(tensor, graph.folder)
    inline.CopyFrom(numpy_helper.from_array(value) if tensor.data_location == TensorProto.EXTERNAL else tensor)
    inline.name = name
    return inline


def _run(model: onnx.ModelProto, names: Sequence[str]) -> list[np.ndarray]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values: Any = session.run(list(names), {})
    return [np.asarray(v) for v in values]
