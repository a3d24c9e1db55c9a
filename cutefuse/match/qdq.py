"""QuantizeLinear and DequantizeLinear nodes: which numbers they make of which scales, and the Casts around them.

Those of TensorRT's own domain, `trt::TRT_FP8QuantizeLinear` and `TRT_FP8DequantizeLinear`, mean the same without a zero
point: NVIDIA ModelOpt exports them from PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from onnx import NodeProto, helper

from cutefuse.graph.numbers import FLOAT8, FLOATS, LARGEST, NUMBERS, Number
from cutefuse.graph.read import RUN_TIME, TYPE_NAMES, Graph, attribute

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
CUSTOM_DOMAIN = "trt"
CUSTOM = {QUANTIZE: "TRT_FP8QuantizeLinear", DEQUANTIZE: "TRT_FP8DequantizeLinear"}


class NotFused(Exception):
    """Why a quantised site stays as it is."""


@dataclass(frozen=True)
class Linear:
    """What a Q or DQ node does: `q = round(x / scale)`; the scale tensor's name and values."""

    node: NodeProto
    tensor: str  # the scale
    scale: np.ndarray  # float64, a scalar or a vector along `axis`
    axis: int
    number: Number

    @property
    def zero_point(self) -> str:
        """The tensor of the zero point; "" where there is none."""
        return self.node.input[2] if len(self.node.input) > 2 else ""


def kind_of(node: NodeProto | None, graph: Graph) -> str:
    """QuantizeLinear or DequantizeLinear for a node that is one in the standard or in TensorRT's domain, else ""."""
    if graph.is_op(node, QUANTIZE, DEQUANTIZE):
        return node.op_type
    if node is None or node.domain != CUSTOM_DOMAIN or len(node.input) != 2 or len(node.output) != 1:
        return ""
    return next((kind for kind, name in CUSTOM.items() if name == node.op_type), "")


def quantises(node: NodeProto | None, graph: Graph) -> TypeGuard[NodeProto]:
    """Whether the node makes quantised numbers."""
    return kind_of(node, graph) == QUANTIZE


def dequantises(node: NodeProto | None, graph: Graph) -> TypeGuard[NodeProto]:
    """Whether the node makes floats of quantised numbers."""
    return kind_of(node, graph) == DEQUANTIZE


def casts(node: NodeProto | None, graph: Graph) -> TypeGuard[NodeProto]:
    """Whether the node is a Cast from one float type to another."""
    if not graph.is_op(node, "Cast") or TYPE_NAMES.get(attribute(node, "to", 0)) not in FLOATS:
        return False
    return graph.dtype(node.input[0]) in (None, *FLOATS)


def before_cast(graph: Graph, tensor: str) -> tuple[list[NodeProto], str]:
    """The Cast between float types that makes a tensor, if one does, and the tensor before it."""
    node = graph.producer(tensor)
    return ([node], node.input[0]) if casts(node, graph) else ([], tensor)


def after_cast(graph: Graph, tensor: str) -> tuple[list[NodeProto], str]:
    """The Cast between float types that alone reads a tensor, if one does, and the tensor that it makes."""
    node = graph.only_user(tensor)
    return ([node], node.output[0]) if casts(node, graph) else ([], tensor)


def cast_type(nodes: Sequence[NodeProto]) -> str:
    """The type that a Cast makes; "" where there is none."""
    return TYPE_NAMES[attribute(nodes[0], "to")] if nodes else ""


def linear(graph: Graph, node: NodeProto, what: str) -> Linear:
    """The scale of a Q or DQ node. Raises NotFused when it is not symmetric with a constant scale, or makes another
    number type than the kernels take."""
    custom = node.domain == CUSTOM_DOMAIN
    if len(node.input) < 2:
        raise NotFused(f"the quantiser of {what} has no scale; repair the model")
    zero_point = node.input[2] if len(node.input) > 2 else ""
    scale, zero = graph.constant(node.input[1]), graph.constant(zero_point) if zero_point else None
    no_scale = "" if scale is not None else graph.not_constant(node.input[1])
    kind = FLOAT8.name if custom else graph.type_word(zero_point) if zero_point else _stored_type(graph, node)
    number, block = NUMBERS.get(kind), attribute(node, "block_size", 0)
    if (number is None or block) and no_scale != RUN_TIME:
        how = f"to {kind} in blocks of {block}; one scale a channel is the finest" if block else f"to {kind}"
        raise NotFused(f"{what} is quantised {how}; only {' and '.join(NUMBERS)} can be fused, quantise it to one")
    if scale is None or number is None:
        raise NotFused(f"the scale of {what} {no_scale}; only constant scales can be fused")
    if zero_point and zero is None:
        raise NotFused(f"the zero point of {what} {graph.not_constant(zero_point)}; only constant zeros can be fused")
    points = np.ravel(np.zeros(1) if zero is None else zero).astype(np.float64)
    if np.any(points != 0):
        first = points[np.argmax(points != 0)]
        raise NotFused(f"{what} has zero point {first:g}; only symmetric quantisation (zero point 0) can be fused")
    if not attribute(node, "saturate", 1):
        raise NotFused(f"{what} is quantised without saturation; the kernels saturate, quantise with saturate=1")
    values = np.asarray(scale, np.float64)
    if not np.all(np.isfinite(values) & (values > 0)):
        raise NotFused(f"{what} has a scale that is not positive; repair the model")
    return Linear(node, node.input[1], values, int(attribute(node, "axis", 0 if custom else 1)), number)


def scalar(found: Linear, what: str) -> float:
    """The one scale of an activation. Raises NotFused when there are several."""
    if found.scale.size != 1:
        raise NotFused(f"{what} has {found.scale.size} scales, one for each channel; an activation may have one only")
    return float(np.float32(found.scale.reshape(-1)[0]))


def dequantised(graph: Graph, node: NodeProto, between: Sequence[NodeProto], what: str) -> Linear:
    """The scale of a DQ node behind which Casts may stand. Raises NotFused where float16 could not hold its result."""
    found = linear(graph, node, what)
    half = any(cast_type([n]) == "float16" for n in between)
    if half and found.scale.max() * found.number.highest > LARGEST["float16"]:
        raise NotFused(f"{what} is cast to float16, which cannot hold all that its scale makes; take out the Cast")
    return found


def _stored_type(graph: Graph, node: NodeProto) -> str:
    """The number type of a Q or DQ node without a zero point."""
    if node.op_type == DEQUANTIZE:
        value = graph.constant(node.input[0]) if graph.dtype(node.input[0]) is None else None
        return graph.type_word(node.input[0]) if value is None else value.dtype.name
    named = attribute(node, "output_dtype", 0)
    return str(helper.tensor_dtype_to_np_dtype(named).name) if named else "uint8"
