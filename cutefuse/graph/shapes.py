"""Shape inference for files of any size, through the shape arithmetic that exporters write around dynamic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from cutefuse.errors import CutefuseError
from cutefuse.graph.read import external_fields, run_node
from cutefuse.graph.store import INLINE_BYTES

ROUNDS = 16  # of inference and folding; each makes at least one more size known
MAX_ELEMENTS = 64  # of a value that can describe a shape
ARITHMETIC = frozenset("Gather Slice Squeeze Unsqueeze Concat Cast Add Sub Mul Div Floor Identity".split())


def inferred(
    model: ModelProto, stored: Mapping[str, TensorProto] | None = None, sizes: Mapping[str, Sequence[int]] | None = None
) -> onnx.GraphProto:
    """The graph after shape inference, without its large weights; as it is written where inference fails.

    Nodes that compute sizes from known sizes count as constants, so that channels stay known behind a sliced tensor of
    a dynamic batch. `stored` are the initializers where the model itself holds none. `sizes` are those of inputs with
    dynamic axes; an axis name has one size everywhere.
    """
    skeleton = _skeleton(model, {t.name: t for t in model.graph.initializer} if stored is None else stored)
    if sizes:
        _set_sizes(skeleton.graph, sizes)
    known: dict[str, np.ndarray] = {}
    graph = model.graph
    try:
        for _ in range(ROUNDS):
            graph = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
            if not _fold(skeleton, graph, known):
                break
    except Exception:  # contradictory shapes, or more than 2 GB of constants inside nodes: go on with what is known
        pass
    return graph


def check_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises CutefuseError where `--input-shape` names no input of the model or contradicts its sizes."""
    stored = {t.name for t in model.graph.initializer}
    inputs = {v.name: v for v in model.graph.input if v.name not in stored}
    for name, given in shapes.items():
        if name not in inputs:
            raise CutefuseError(f"--input-shape names '{name}'; the model's inputs are {', '.join(inputs)}")
        dims = _dims(inputs[name])
        if dims is None:
            continue
        if len(dims) != len(given):
            raise CutefuseError(f"--input-shape gives '{name}' {len(given)} axes, it has {len(dims)}")
        if any(d >= 0 and d != g for d, g in zip(dims, given, strict=True)):
            texts = ["x".join("?" if d < 0 else str(d) for d in sizes) for sizes in (given, dims)]
            raise CutefuseError(f"--input-shape gives '{name}' {texts[0]}, the model has {texts[1]}; only ? may differ")


def _set_sizes(graph: onnx.GraphProto, sizes: Mapping[str, Sequence[int]]) -> None:
    named: dict[str, int] = {}
    for info in graph.input:
        for dim, size in zip(info.type.tensor_type.shape.dim, sizes.get(info.name, ()), strict=False):
            if dim.dim_param:
                named.setdefault(dim.dim_param, size)
            dim.dim_value = size
    for info in (*graph.input, *graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in named:
                dim.dim_value = named[dim.dim_param]


def _skeleton(model: ModelProto, stored: Mapping[str, TensorProto]) -> ModelProto:
    skeleton = ModelProto()
    skeleton.ir_version = max(model.ir_version, 4)  # from there on initializers need not be inputs
    skeleton.opset_import.extend(model.opset_import)
    skeleton.functions.extend(model.functions)
    graph = skeleton.graph
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    graph.input.extend(model.graph.input)
    listed = {v.name for v in graph.input}
    for name, t in stored.items():
        if not external_fields(t) and t.ByteSize() <= INLINE_BYTES:
            graph.initializer.append(t)
            graph.initializer[-1].name = name
        elif name not in listed:
            graph.input.append(helper.make_tensor_value_info(name, t.data_type, list(t.dims)))
    return skeleton


def _fold(skeleton: ModelProto, graph: onnx.GraphProto, known: dict[str, np.ndarray]) -> bool:
    """Turn shape arithmetic whose result is known by now into Constants of the skeleton; whether there was any."""
    if not any(n.op_type == "Shape" for n in skeleton.graph.node):
        return False
    opset = next((o.version for o in skeleton.opset_import if o.domain in ("", "ai.onnx")), 1)
    dims = {v.name: _dims(v) for v in (*graph.input, *graph.value_info, *graph.output)}
    overridable = {v.name for v in skeleton.graph.input}
    small = {
        t.name: t for t in skeleton.graph.initializer if t.name not in overridable and np.prod(t.dims) <= MAX_ELEMENTS
    }
    partial: dict[str, np.ndarray] = {}  # results of Shape, -1 where a size is not known
    found = False
    for node in skeleton.graph.node:
        if node.domain not in ("", "ai.onnx") or len(node.output) != 1 or node.output[0] in known:
            continue
        if node.op_type == "Shape" and not node.attribute and node.input and dims.get(node.input[0]) is not None:
            partial[node.output[0]] = np.array(dims[node.input[0]], dtype=np.int64)
            continue
        for name in node.input:
            if name in small and name not in known:
                known[name] = numpy_helper.to_array(small[name])
        if node.op_type == "Constant":
            literal = run_node(node, opset, []) if node.ByteSize() <= INLINE_BYTES else None
            known.update({node.output[0]: literal[0]} if literal and literal[0].size <= MAX_ELEMENTS else {})
        elif node.op_type in ARITHMETIC and (value := _value(node, opset, known, partial)) is not None:
            known[node.output[0]] = value
            node.CopyFrom(helper.make_node("Constant", [], list(node.output), value=numpy_helper.from_array(value)))
            found = True
    return found


def _value(
    node: NodeProto, opset: int, known: dict[str, np.ndarray], partial: dict[str, np.ndarray]
) -> np.ndarray | None:
    operands: Sequence[np.ndarray | None] = [known.get(n, partial.get(n)) for n in node.input if n]
    if any(o is None for o in operands) or len(operands) != len(node.input) or not operands:
        return None
    from_shape = any(n in partial and n not in known for n in node.input)
    if from_shape and node.op_type not in ("Gather", "Slice", "Concat", "Identity"):
        return None if any(n in partial and (partial[n] < 0).any() for n in node.input) else _run(node, opset, operands)
    value = _run(node, opset, operands)
    return None if value is None or (from_shape and (value < 0).any()) else value


def _run(node: NodeProto, opset: int, operands: Sequence[np.ndarray | None]) -> np.ndarray | None:
    results = run_node(node, opset, [o for o in operands if o is not None])
    return results[0] if results and results[0].size <= MAX_ELEMENTS else None


def _dims(info: onnx.ValueInfoProto) -> list[int] | None:
    kind = info.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
