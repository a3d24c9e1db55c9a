"""The time of a whole network in an engine, so that a gain can be told as a share of it.

Both come from one model. What is common to all kernels of a run, such as the clock and how busy the memory is, changes
both alike and so cancels in the share. Only torch.compile's networks are on record; TensorRT's are told by its rules
and the same times.
"""

from __future__ import annotations

import math

from onnx import NodeProto

from cutefuse.graph.numbers import ELEMENT_BYTES
from cutefuse.graph.read import attribute
from cutefuse.match.conv.read import geometry_of
from cutefuse.operators.conv_math import Geometry
from cutefuse.select.gain import Model
from cutefuse.select.times import Convolution
from cutefuse.select.wiring import CONVOLUTIONS, ELEMENTWISE, RANGES, Wiring

# Nodes that read their inputs and write their output once.
_PASSES = (
    "MaxPool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2", "ArgMax",
    "TopK", "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization",
    "InstanceNormalization", "GroupNormalization", "LRN", "GridSample", "Transpose",
    "LpPool", "CumSum", "CumProd",
)  # fmt: skip
_OVER_IMAGES = ("InstanceNormalization", "GroupNormalization")
_PRODUCTS = ("MatMul", "Gemm")


def network_us(model: Model) -> float:
    """Microseconds of the network with nothing fused; NaN where that is not known."""
    wiring = model.plain
    return sum(model.node_us(n, wiring) + _own_us(model, n, wiring) for n in model.graph.nodes)


def _own_us(model: Model, node: NodeProto, wiring: Wiring) -> float:
    """What `Model.node_us` leaves out: convolutions and products with what follows them, and passes over memory."""
    if node.op_type in _PASSES and node.output:
        read = [t for t in node.input if t and not model.graph.is_constant(t)]
        if node.op_type in _OVER_IMAGES:  # Triton sums parts of an image, adds these up, and reads it once more
            size = wiring.size_of(read[0])
            return 2 * model.device.pass_us(size) + model.device.pass_us(2 * size)
        return model.device.pass_us(sum(map(wiring.size_of, read)) + wiring.size_of(node.output[0]))
    if node.op_type not in (*CONVOLUTIONS, *_PRODUCTS):
        return 0.0
    if len(node.input) < 2 or not node.output:  # damaged
        return math.nan
    maker = model.graph.producer(node.input[0])
    quantised = maker is not None and maker.op_type.endswith("DequantizeLinear")  # then its own input is multiplied
    dtype = model.graph.dtype(maker.input[0] if maker is not None and quantised else node.input[0]) or "float32"
    x, w, y = (wiring.dims(t) for t in (node.input[0], node.input[1], node.output[0]))
    if not x or not w or not y or min(*x, *w, *y) < 1 or dtype not in ELEMENT_BYTES:
        return math.nan
    if node.op_type in _PRODUCTS:
        inner = x[0] if attribute(node, "transA", 0) else x[-1]
        rows = math.prod(y[:-1])
        return model.convolution_us(Convolution(1, inner, rows, 1, y[-1], rows, 1, 1, dtype))
    return _convolution_us(model, node, dtype, wiring) if len(x) == len(w) == len(y) == 4 else math.nan


def _convolution_us(model: Model, node: NodeProto, dtype: str, wiring: Wiring) -> float:
    x, w, y = (wiring.dims(t) for t in (node.input[0], node.input[1], node.output[0]))
    size, taps, maker = wiring.size_of(node.output[0]), w[2] * w[3], model.graph.producer(node.input[0])
    grouped = attribute(node, "group", 1) != 1  # taken for depthwise
    if node.op_type == "Conv" or grouped:
        geometry = geometry_of(node, (w[2], w[3]), x[2:])
        dilated_taps = geometry.dilated_taps(x[2:]) if grouped and isinstance(geometry, Geometry) else 0.0
        conv = Convolution(x[0], x[1], x[2], x[3], y[1], y[2], y[3], taps, dtype, grouped, dilated_taps)
        us = model.convolution_us(conv)
    else:  # a product of each pixel with all taps
        us = model.transposed_us(Convolution(x[0], x[1], x[2], x[3], w[1] * taps, x[2], x[3], 1, dtype))
    if not model.engine.reads_ranges and maker is not None and maker.op_type in RANGES:
        us += model.device.copy_us(2 * wiring.size_of(node.input[0]))
    pass_us = 0.0 if wiring.in_gate(node.output[0]) else model.device.pass_us(2 * size)
    after = [u.op_type for u in model.graph.users(node.output[0]) if u.op_type in ELEMENTWISE]
    if not model.engine.inside(""):  # bias and whatever follows are a kernel
        return us + (pass_us if len(node.input) > 2 or after else 0.0)
    group = wiring.siblings(node)
    if node.op_type == "Conv" and len(group) > 1:  # one kernel for all of them
        us = model.merged_us(node, wiring) / len(group)
    silu = {"Sigmoid", "Mul"} == set(after)
    outside = [op for op in after if op not in ("Add", "Sum", "BatchNormalization") and not model.engine.inside(op)]
    return us + (pass_us if outside and not (silu and model.engine.inside("Silu")) else 0.0)
