"""Models that hold nodes of many op_types at once, as the rewriter writes them: constants stored, images as inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
from bodies import given_dims, in_layout
from onnx import TensorProto, helper, numpy_helper

from cutefuse.graph.body import FORMAL
from cutefuse.graph.numbers import FLOAT8, NUMBERS, Number
from cutefuse.graph.read import ELEM_TYPES
from cutefuse.kernels import Call, Tensor
from cutefuse.operators import operators
from cutefuse.operators.conv_call import HWC8
from cutefuse.operators.function import body_for, node_attributes
from cutefuse.operators.op import Case, FusedOp

IMAGES = ("x", "z", "residual")  # formal inputs of bodies that are activations begin so: x, x0, z, residual
SCALE = np.float32(0.5)


def calls_of_all(
    dtype: str, number: Number | None, layout: int, opset: int, pairs: bool = False
) -> list[list[Call]]:  # fmt: skip
    """The calls of every op_type over `dtype`, or of the quantised ones over `number`; with `pairs`, two of each."""
    found = []
    for op in operators():
        if (op.stem == "quant_concat_conv") != (number is not None):
            continue
        for case in {c.op_type: c for c in reversed(op.cases()) if 0 not in c.sizes.values()}.values():
            kind = dtype if dtype in case.dtypes else case.dtypes[0]
            if opset >= op.oldest_opset(case.op_type, number.name if number else kind):
                cases = [case, _other(op, case, opset)][: 1 + pairs]
                made = [op.call(c, kind, number) if number else op.call(c, kind) for c in cases]  # type: ignore[call-arg]
                found.append([c if op.stem == "row_norm" else in_layout(c, layout) for c in made])
    return found


def _other(op: FusedOp, case: Case, opset: int) -> Case:
    """A problem of the same op_type that differs in all that one body may serve."""
    if op.stem == "row_norm":
        return replace(case, sizes={"leading": (3,), "columns": 48}, attrs={"epsilon": [0.25]})
    attrs = dict(case.attrs) | {"pads": (1, 0, 2, 1)}
    free = {"strides": (2, 1), "dilations": (1, 2)}
    attrs |= {name: value for name, value in free.items() if name not in op.must_agree(opset)}
    attrs |= {name: [v + 0.125 for v in attrs[name]] for name in ("alpha", "lo", "hi", "output_scale") if name in attrs}
    if "channel_starts" in attrs:
        attrs |= {"channel_starts": [s + 8 for s in attrs["channel_starts"]], "upsample": [2] * len(attrs["upsample"])}
        attrs |= {"residual_start": [8]} if "Add" in case.op_type else {}
    if "output_channels" in attrs:
        attrs |= {"output_channels": [2 * k for k in attrs["output_channels"]]}
    sizes = {k: v for k, v in case.sizes.items() if k != "widths"} | {"H": 8, "W": 8, "R": 2, "S": 3}
    sizes |= {"K": sum(attrs["output_channels"])} if "output_channels" in attrs else {}
    more = 1 if "Image" in case.op_type else 8
    return replace(case, sizes=sizes | {"C": [c + more for c in case.sizes["C"]]}, attrs=attrs)  # type: ignore[union-attr]


def model_of_calls(groups: Sequence[Sequence[Call]], opset: int, bodies: bool = True) -> onnx.ModelProto:
    """One node of every call; each group, of one op_type, has one body, unless there are to be no `bodies`."""
    graph = helper.make_graph([], "many", [], [])
    functions = [body_for(list(group), opset) for group in groups]
    for number, (body, call) in enumerate((b, c) for b, group in zip(functions, groups, strict=True) for c in group):
        _add(graph, f"n{number}", [name.removeprefix(FORMAL) for name in body.input], call)
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("cutefuse", 1)]
    return helper.make_model(
        graph, opset_imports=domains, functions=functions if bodies else [], ir_version=8 if opset < 21 else 10
    )


def _add(graph: onnx.GraphProto, name: str, formals: Sequence[str], call: Call) -> None:
    (layout,) = call.attrs.get("layout", [HWC8])
    inputs, outputs = [f"{name}_{f}" for f in formals], [f"{name}_y{i}" for i in range(len(call.outputs))]
    for formal, tensor, t in zip(formals, inputs, call.inputs, strict=True):
        dims = given_dims(t, layout)
        if not formal.startswith(IMAGES):
            graph.initializer.append(_constant(tensor, t))
        elif t.dtype in NUMBERS:
            graph.input.append(helper.make_tensor_value_info(f"{tensor}_f", TensorProto.FLOAT, dims))
            graph.node.append(_quantiser("QuantizeLinear", graph, f"{tensor}_f", tensor, t.dtype))
        else:
            graph.input.append(helper.make_tensor_value_info(tensor, ELEM_TYPES[t.dtype], dims))
    attrs = node_attributes(call)
    graph.node.append(helper.make_node(call.op_type, inputs, outputs, name, domain="cutefuse", **attrs))
    for tensor, t in zip(outputs, call.outputs, strict=True):
        dims, kind = given_dims(t, layout), ELEM_TYPES[t.dtype]
        if t.dtype in NUMBERS:
            graph.value_info.append(helper.make_tensor_value_info(tensor, kind, dims))
            graph.node.append(_quantiser("DequantizeLinear", graph, tensor, f"{tensor}_f", t.dtype))
            tensor, kind = f"{tensor}_f", TensorProto.FLOAT
        graph.output.append(helper.make_tensor_value_info(tensor, kind, dims))


def _quantiser(op_type: str, graph: onnx.GraphProto, given: str, made: str, dtype: str) -> onnx.NodeProto:
    zero = np.zeros((), ml_dtypes.float8_e4m3fn if dtype == FLOAT8.name else np.int8)
    scale, point = f"{made}_scale", f"{made}_zero"
    graph.initializer.extend([numpy_helper.from_array(SCALE, scale), numpy_helper.from_array(zero, point)])
    return helper.make_node(op_type, [given, scale, point], [made], f"{made}_{op_type[0].lower()}")


def _constant(name: str, t: Tensor) -> onnx.TensorProto:
    """Numbers of about one; the scales of a filter of both signs, as a folded BatchNormalization leaves them."""
    rng = np.random.default_rng(len(name))
    values = rng.integers(-4, 5, t.dims) if t.dtype in NUMBERS else rng.uniform(0.5, 1, t.dims)
    if name.endswith("w_scale"):
        values *= np.where(np.arange(values.size) % 2, 1, -1)
    return numpy_helper.from_array(values.astype(np.dtype(t.dtype)), name)
