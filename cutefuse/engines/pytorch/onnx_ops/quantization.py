"""QuantizeLinear and DequantizeLinear, and what they need."""

from __future__ import annotations

import torch
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.node import Node, Run, dtype_of, operator

_RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-32768, 32767)}
_FLOAT8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def _along(node: Node, parameter: int) -> list[int]:
    """The shape in which a scale or zero point broadcasts: one value, or one for each slice of an axis."""
    if node.attr("block_size", 0):
        raise node.refuse("blocked quantisation is not supported; quantise by tensor or by axis")
    shape = node.shape(parameter)
    if len(shape) == 0 or shape == [1]:
        return [1] * node.rank(0)
    axis = node.axis(node.attr("axis", 1), node.rank(0))
    if shape != [node.shape(0)[axis]]:
        raise node.refuse(f"the scale is {shape}, axis {axis} has {node.shape(0)[axis]} elements; repair the model")
    return [-1 if i == axis else 1 for i in range(node.rank(0))]


@operator("QuantizeLinear")
def quantize(node: Node) -> Run:
    along = _along(node, 1)
    if node.has(2):
        dtype = node.tensor(2).dtype
    elif node.attr("output_dtype", 0):
        dtype = dtype_of(node.attr("output_dtype", 0), f"QuantizeLinear '{node.name}'")
    else:
        dtype = torch.uint8
    if dtype in _FLOAT8_MAX:
        most = _FLOAT8_MAX[dtype]
        return lambda x, scale, *_: (x.float() / scale.float().reshape(along)).clamp(-most, most).to(dtype)
    if dtype not in _RANGES:
        raise node.refuse(f"it quantises to {dtype}; int8, uint8, int16 and float8 are supported")
    low, high = _RANGES[dtype]

    def run(x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        y = torch.round(x.float() / scale.float().reshape(along))
        y = y if zero is None else y + zero.float().reshape(along)
        return y.clamp(low, high).to(dtype)

    return run


@operator("DequantizeLinear")
def dequantize(node: Node) -> Run:
    along, dtype = _along(node, 1), node.tensor(1).dtype

    def run(x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        y = x.to(torch.float32)
        y = y if zero is None else y - zero.float().reshape(along)
        return (y * scale.float().reshape(along)).to(dtype)

    return run


@operator("MatMulInteger")
def matmul_integer(node: Node) -> Run:
    def run(a: Tensor, b: Tensor, za: Tensor | None = None, zb: Tensor | None = None) -> Tensor:
        # Sums of products of 8-bit numbers are exact in float64, and GPUs multiply no int32 matrices.
        x, y = a.double(), b.double()
        x = x if za is None else x - za.double().reshape(-1, 1) if za.dim() else x - za.double()
        y = y if zb is None else y - zb.double()
        return torch.matmul(x, y).to(torch.int32)

    return run
