"""What TensorRT's ONNX parser can read in a function body, and calls that share a body but little else.

test_parser.py asks a parser of NVIDIA's. The rules here add what it does not show: parsers of TensorRT 10, every opset
of every op_type in milliseconds, and numbers (alpha, lo, hi, epsilon, scales) that no size of a tensor depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, NodeProto, helper, numpy_helper

from cutefuse.kernels import LINEAR, Call, Tensor
from cutefuse.operators.layouts import NHWC, TO_NHWC
from cutefuse.operators.op import FusedOp

# Attributes in which the parser (onnx-tensorrt 10.1 and 10.10) resolves `ref_attr_name`: those that an importer reads
# through OnnxAttrs::get. getKernelParams reads kernel_shape, strides and dilations with OnnxAttrs::at, and sees 1.
RESOLVED = {
    "Cast": {"to"}, "Clip": {"min", "max"}, "Conv": {"pads", "group"},
    "Constant": {"value_float", "value_floats", "value_int", "value_ints"},
    "LeakyRelu": {"alpha"}, "Slice": {"starts", "ends", "axes"}, "Split": {"split"},
}  # fmt: skip
LISTS_SINCE = 12  # the parser reads a Constant's value_* from this opset on


def unresolved(body: FunctionProto) -> list[str]:
    """References of a body that the parser would not resolve, as 'Conv.strides'."""
    opset = next(o.version for o in body.opset_import if o.domain == "")
    found = []
    for node in body.node:
        for a in node.attribute:
            late = node.op_type == "Constant" and opset < LISTS_SINCE
            if a.ref_attr_name and (late or a.name not in RESOLVED.get(node.op_type, ())):
                found.append(f"{node.op_type}.{a.name}")
    return found


def doubtful_scales(body: FunctionProto) -> list[str]:
    """Scales of Q and DQ nodes that are neither positive numbers nor `input_scales` or `output_scale` of the call.

    Those two are scales of activations, and a site with one that is not positive is refused.
    """
    makers = {o: n for n in body.node for o in n.output}
    found = []
    for node in body.node:
        if node.op_type not in ("DequantizeLinear", "QuantizeLinear"):
            continue
        maker: NodeProto | None = makers.get(node.input[1])
        while maker is not None and maker.op_type == "Gather":
            maker = makers.get(maker.input[0])
        values = maker.attribute[0] if maker is not None and maker.op_type == "Constant" else None
        if values is None:
            found.append(node.input[1])
        elif values.ref_attr_name not in ("input_scales", "output_scale", ""):
            found.append(values.ref_attr_name)
        elif not values.ref_attr_name and not np.all(numpy_helper.to_array(values.t) > 0):
            found.append(node.input[1])
    return found


def faults(bodies: Iterable[FunctionProto]) -> list[str]:
    """All that the parser would misread in these bodies."""
    return [f"{b.name}: {text}" for b in bodies for text in (*unresolved(b), *doubtful_scales(b))]


def stranger(op: FusedOp, call: Call, opset: int) -> Call:
    """A call of the same op_type that differs in every attribute that one body need not have in common."""
    attrs: dict[str, Any] = dict(call.attrs)
    for name in attrs.keys() - set(op.must_agree(opset)):
        step = {"output_type": 9, "packed_sizes": 64, "input_scales": 0.5, "output_scale": 0.5}.get(name, 1)
        attrs[name] = [v + step if abs(v) < 1e30 else 1.0 for v in attrs[name]]
    other = {"float32": "float16", "float16": "float32"}.get(call.inputs[0].dtype, call.inputs[0].dtype)
    kind = other if opset >= 15 else call.inputs[0].dtype
    return Call(call.op_type, [replace(t, dims=(), dtype=kind) for t in call.inputs], [], attrs)


def in_layout(call: Call, layout: int) -> Call:
    """The same call by a node of another layout."""
    return replace(call, attrs={**call.attrs, "layout": [layout]})


def as_given(value: np.ndarray, layout: int) -> np.ndarray:
    """A logical operand of a convolution's call as a node of a layout takes or gives it."""
    return np.ascontiguousarray(value.transpose(TO_NHWC)) if layout == NHWC and value.ndim == 4 else value


def operands_given(call: Call, values: Sequence[np.ndarray], layout: int) -> list[np.ndarray]:
    """The logical operands of a convolution's call as a node of a layout takes them."""
    return [v if t.layout == LINEAR else as_given(v, layout) for t, v in zip(call.inputs, values, strict=True)]


def given_dims(t: Tensor, layout: int) -> tuple[int, ...]:
    """The sizes of an operand of a convolution's call as a node of a layout has them."""
    turned = layout == NHWC and len(t.dims) == 4 and t.layout != LINEAR
    return tuple(t.dims[i] for i in TO_NHWC) if turned else tuple(t.dims)


def literal_of(model: onnx.ModelProto, name: str) -> list[Any]:
    """The values of an attribute of the convolution in each body of a model; None where it has none in numbers."""
    found = []
    for body in model.functions:
        (conv,) = (n for n in body.node if n.op_type == "Conv" and len(n.input) == 3)  # the one with a bias
        values = [helper.get_attribute_value(a) for a in conv.attribute if a.name == name and not a.ref_attr_name]
        found.append(values[0] if values else None)
    return found
