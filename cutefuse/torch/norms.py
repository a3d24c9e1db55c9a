"""RMSNorm and LayerNorm as PyTorch operators with autograd, and as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from cutefuse.torch import compiled
from cutefuse.torch.compiled import loaded
from cutefuse.torch.launch import run, runs_in_library


def _results(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a forward pass makes, without values: (y, sum, mean, 1 / deviation), the last two a value for each row."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide, rows = torch.float64 if x.dtype == torch.float64 else torch.float32, x.numel() // max(1, x.shape[-1])
    mean, rstd = (x.new_empty(rows, dtype=wide) for _ in range(2))
    return y, x.new_empty(0) if residual is None else torch.empty_like(y), mean, rstd


def _gradients(x: Tensor, weight: Tensor | None, bias_dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """What a backward pass makes, without values: (dx, dweight, dbias); unwanted ones are empty."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = x.new_empty(0) if weight is None else torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    dbias = x.new_empty(0) if bias_dtype is None else torch.empty(x.shape[-1:], dtype=bias_dtype, device=x.device)
    return dx, dweight, dbias


def forward_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, epsilon: float, layer: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, sum, mean, 1 / deviation) in PyTorch; the statistics [rows] and the arithmetic in float32, or float64."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    s = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    mean = s.mean(-1, keepdim=True) if layer else torch.zeros_like(s[..., :1])
    rstd = ((s - mean).square().mean(-1, keepdim=True) + epsilon).rsqrt()
    y = (s - mean) * rstd
    y = y if weight is None else y * weight.to(wide)
    y = y if bias is None else y + bias.to(wide)
    total = x.new_empty(0) if residual is None else s.to(x.dtype)
    return y.to(x.dtype), total, mean.reshape(-1).clone(), rstd.reshape(-1).clone()


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, epsilon: float, layer: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not runs_in_library(x):
        return forward_reference(x, residual, weight, bias, epsilon, layer)
    compiled.ensure()
    y, total, mean, rstd = _results(x, residual)
    outputs = [y, None if residual is None else total, mean if layer else None, rstd]
    attrs = {"epsilon": epsilon, "layer": int(layer)}
    run("CuteRowNormForward", (x, residual, weight, bias), outputs, attrs)
    return y, total, mean, rstd


def rms_kernel(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, _, rstd = _forward(x, residual, weight, None, epsilon, False)
    return y, total, rstd


def layer_kernel(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward(x, residual, weight, bias, epsilon, True)


_rms_norm = torch.library.custom_op(
    "cutefuse::rms_norm", rms_kernel, mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor? weight, float epsilon) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
_layer_norm = torch.library.custom_op(
    "cutefuse::layer_norm", layer_kernel, mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float epsilon)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@_rms_norm.register_fake
def _(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, total, _, rstd = _results(x, residual)
    return y, total, rstd


@_layer_norm.register_fake
def _(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _results(x, residual)


def backward_reference(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweight, dbias) in PyTorch, the arithmetic in the type of the statistics; unwanted ones are empty."""
    wide, column = rstd.dtype, (-1, x.shape[-1])
    s, d = x.reshape(column).to(wide), dy.reshape(column).to(wide)
    xhat = (s - (0 if mean is None else mean[:, None])) * rstd[:, None]
    wdy = d if weight is None else d * weight.to(wide)
    c2 = 0 if mean is None else wdy.mean(1, keepdim=True)
    dx = (wdy - c2 - xhat * (xhat * wdy).mean(1, keepdim=True)) * rstd[:, None]
    dx = dx if dsum is None else dx + dsum.reshape(column).to(wide)
    dweight = x.new_empty(0) if weight is None else (d * xhat).sum(0).to(weight.dtype)
    dbias = x.new_empty(0) if bias_dtype is None else d.sum(0).to(bias_dtype)
    return dx.reshape(x.shape).to(x.dtype), dweight, dbias


def backward_kernel(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweight, dbias) of the tensor that was normalised; a mean makes it LayerNorm; unwanted ones are empty."""
    if not runs_in_library(x):
        return backward_reference(dy, dsum, x, weight, mean, rstd, bias_dtype)
    compiled.ensure()
    dx, dweight, dbias = _gradients(x, weight, bias_dtype)
    outputs = [dx, None if weight is None else dweight, None if bias_dtype is None else dbias]
    attrs = {"epsilon": 0.0, "layer": int(mean is not None)}
    run("CuteRowNormBackward", (dy, dsum, x, weight, mean, rstd), outputs, attrs)
    return dx, dweight, dbias


_row_norm_backward = torch.library.custom_op(
    "cutefuse::row_norm_backward", backward_kernel, mutates_args=(),
    schema="(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, ScalarType? bias_dtype)"
    " -> (Tensor, Tensor, Tensor)",
)  # fmt: skip


@_row_norm_backward.register_fake
def _(_dy: Tensor, _dsum: Tensor | None, x: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(x, weight, rest[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight = inputs[:3]
    ctx.layer = len(output) == 4  # it has a mean, and its inputs a bias
    normalised = x if residual is None else output[1]
    ctx.save_for_backward(normalised, weight, output[2] if ctx.layer else None, output[-1])
    ctx.mark_non_differentiable(*output[2:], *(() if residual is not None else (output[1],)))
    ctx.set_materialize_grads(False)
    ctx.has_residual = residual is not None
    ctx.bias_dtype = inputs[3].dtype if ctx.layer and inputs[3] is not None else None


def _backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dweight, dbias = torch.ops.cutefuse.row_norm_backward(dy, dsum, x, weight, mean, rstd, ctx.bias_dtype)
    of_bias = [None if ctx.bias_dtype is None else dbias] if ctx.layer else []
    return dx, dx if ctx.has_residual else None, None if weight is None else dweight, *of_bias, None


_rms_norm.register_autograd(_backward, setup_context=_setup)
_layer_norm.register_autograd(_backward, setup_context=_setup)


def call_rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """`rms_norm` by the operator."""
    return torch.ops.cutefuse.rms_norm(x, None, weight, eps)[0]


def call_layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`layer_norm` by the operator."""
    return torch.ops.cutefuse.layer_norm(x, None, weight, bias, eps)[0]


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, like x; weight: [x.shape[-1]], float32 or x's type."""
    if loaded.rms_norm is not None and not is_compiling():
        return loaded.rms_norm(x, weight, eps)
    return call_rms_norm(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last axis, like x; weight and bias: [x.shape[-1]], of one type, float32 or x's."""
    if loaded.layer_norm is not None and not is_compiling():
        return loaded.layer_norm(x, weight, bias, eps)
    return call_layer_norm(x, weight, bias, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the unrounded float32 sum is what is normalised."""
    y, total, _ = torch.ops.cutefuse.rms_norm(x, residual, weight, eps)
    return y, total


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual); the unrounded float32 sum is what is normalised."""
    y, total, _, _ = torch.ops.cutefuse.layer_norm(x, residual, weight, bias, eps)
    return y, total


def _default_epsilon(dtype: torch.dtype) -> float:
    """What torch.nn.RMSNorm adds where eps is None: by version, the machine epsilon of 16-bit types or of float32."""
    x = torch.full((1,), 2.0**-12, dtype=dtype, device="cpu")
    y = nn.functional.rms_norm(x, (1,)).double()
    epsilons = (torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return min(epsilons, key=lambda e: float(y - x.double() * (2.0**-24 + e) ** -0.5) ** 2)


DEFAULT_EPSILONS = {t: _default_epsilon(t) for t in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}


class RMSNorm(nn.RMSNorm):
    """Drop-in for torch.nn.RMSNorm over one axis; eps=None is the machine epsilon that it takes there."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, DEFAULT_EPSILONS[x.dtype] if self.eps is None else self.eps)


class LayerNorm(nn.LayerNorm):
    """Drop-in for torch.nn.LayerNorm over one axis, with and without affine parameters."""

    def forward(self, input: Tensor) -> Tensor:
        if loaded.layer_norm is not None and not is_compiling():  # as layer_norm, less a frame of Python
            return loaded.layer_norm(input, self.weight, self.bias, self.eps)
        return layer_norm(input, self.weight, self.bias, self.eps)
