"""Elementwise operators, and others that PyTorch has by another name: arithmetic, comparison, activations, types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.node import Node, Run, broadcastable, dtype_of, operator


def _divide(a: Any, b: Any) -> Tensor:
    whole = isinstance(a, Tensor) and not a.is_floating_point()
    return torch.div(a, b, rounding_mode="trunc") if whole else torch.true_divide(a, b)


_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _divide,
    "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge,
    # Of booleans bitwise and logical are one, and only bitwise takes the value of a known operand.
    "And": torch.bitwise_and, "Or": torch.bitwise_or, "Xor": torch.bitwise_xor,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip
# Functions of the inputs as they are, for every opset.
_DIRECT: dict[str, Callable[..., Tensor]] = {
    "Abs": torch.abs, "Neg": torch.neg, "Sqrt": torch.sqrt, "Exp": torch.exp, "Log": torch.log, "Ceil": torch.ceil,
    "Floor": torch.floor, "Round": torch.round, "Sign": torch.sign, "Reciprocal": torch.reciprocal, "Erf": torch.erf,
    "Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan,
    "Sinh": torch.sinh, "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh,
    "Not": torch.logical_not, "BitwiseNot": torch.bitwise_not, "IsNaN": torch.isnan,
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Softplus": F.softplus,
    "HardSwish": F.hardswish, "Mish": F.mish,
    "Where": torch.where, "MatMul": torch.matmul, "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
}  # fmt: skip
# Functions of one tensor and of attributes, with the defaults of these.
_ATTRIBUTED: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "LeakyRelu": (lambda x, alpha: F.leaky_relu(x, alpha), {"alpha": 0.01}),
    "Elu": (F.elu, {"alpha": 1.0}),
    "Celu": (F.celu, {"alpha": 1.0}),
    "HardSigmoid": (lambda x, alpha, beta: (x * alpha + beta).clamp(0, 1), {"alpha": 0.2, "beta": 0.5}),
    "Gelu": (F.gelu, {"approximate": "none"}),
    "Swish": (lambda x, alpha: F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x), {"alpha": 1.0}),
}


def _scalar(node: Node, index: int, other: int) -> int | float | bool | None:
    """The value of a known operand of one element that changes neither shape nor type of the other operand."""
    found, against = node.tensor(index), node.tensor(other)
    if found.device.type == "meta" or found.numel() != 1 or found.dim() > against.dim():
        return None
    return found.item() if found.dtype == against.dtype else None


@operator(*_BINARY)
def binary(node: Node) -> Run:
    function, kind = _BINARY[node.op_type], node.op_type
    a, b = node.tensor(0), node.tensor(1)
    if node.opset < 7 and not broadcastable(b.shape, a.shape):
        axis = node.axis(node.attr("axis", a.dim() - b.dim()), a.dim())
        tail = (1,) * (a.dim() - axis - b.dim())
        return lambda x, y: function(x, y.reshape(y.shape + tail))
    whole = not a.is_floating_point()  # the value of an integer stays an integer: 7 / 2 is 3
    right, left = _scalar(node, 1, 0), _scalar(node, 0, 1)
    if right is not None and not (kind == "Div" and whole):
        return lambda x, _y: function(x, right)
    if left is not None and kind in ("Add", "Mul"):
        return lambda _x, y: function(y, left)
    return lambda x, y: function(x, y)


@operator("Pow")
def power(node: Node) -> Run:
    dtype, exponent = node.tensor(0).dtype, node.tensor(1)
    if exponent.device.type != "meta" and exponent.numel() == 1 and exponent.dim() <= node.rank(0):
        value = exponent.item()
        return lambda x, _e: torch.pow(x, value).to(dtype)
    return lambda x, e: torch.pow(x, e).to(dtype)


@operator("Mod")
def modulo(node: Node) -> Run:
    return torch.fmod if node.attr("fmod", 0) else torch.remainder


@operator(*_DIRECT)
def direct(node: Node) -> Run:
    return _DIRECT[node.op_type]


@operator(*_ATTRIBUTED)
def attributed(node: Node) -> Run:
    function, defaults = _ATTRIBUTED[node.op_type]
    return partial(function, **{name: node.attr(name, default) for name, default in defaults.items()})


@operator("Identity", "Dropout")
def identity(node: Node) -> Run:
    if node.outputs > 1:
        return lambda x, *_: (x, torch.ones_like(x, dtype=torch.bool))
    return lambda x, *_: x


@operator("IsInf")
def is_infinite(node: Node) -> Run:
    low, high = node.attr("detect_negative", 1), node.attr("detect_positive", 1)
    if low and high:
        return torch.isinf
    return torch.isneginf if low else torch.isposinf if high else lambda x: torch.zeros_like(x, dtype=torch.bool)


@operator("Sum", "Min", "Max", "Mean")
def variadic(node: Node) -> Run:
    function = {"Min": torch.minimum, "Max": torch.maximum}.get(node.op_type, torch.add)
    count = len(node.inputs) if node.op_type == "Mean" else 1

    def run(*xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = function(total, x)
        return total / count if count > 1 else total

    return run


@operator("Cast", "CastLike")
def cast(node: Node) -> Run:
    if node.op_type == "CastLike":
        dtype = node.tensor(1).dtype
    else:
        dtype = dtype_of(node.attr("to", 0), f"the target of Cast '{node.name}'")
    if node.tensor(0).is_floating_point() and dtype == torch.uint8:
        return lambda x, *_: x.to(torch.int32).to(dtype)  # out of range wraps as in NumPy, instead of being undefined
    return lambda x, *_: x.to(dtype)


@operator("Clip")
def clip(node: Node) -> Run:
    bounds: list[Any] = [node.attr("min", None), node.attr("max", None)]  # attributes before opset 11
    if node.opset >= 11:
        given = [node.inputs[i] if node.has(i) else None for i in (1, 2)]
        if any(t is not None and t.device.type == "meta" for t in given):
            return torch.clamp
        bounds = [None if t is None else t.item() for t in given]
    lo, hi = bounds
    return (lambda x, *_: x) if lo is None and hi is None else lambda x, *_: torch.clamp(x, lo, hi)
