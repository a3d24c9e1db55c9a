"""Scale, shift and ReLU of joined sources, convolution and activation as one PyTorch operator with autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutefuse.errors import CutefuseError
from cutefuse.operators.conv_call import FLOAT_MAX
from cutefuse.torch.conv import ACTIVATIONS, compute, empty_output, gradients
from cutefuse.torch.launch import runs_in_library
from cutefuse.torch.pixels import fusible


def _seen(xs: Sequence[Tensor], scale: Tensor, shift: Tensor) -> Tensor:
    """What the filter sees, without its pads."""
    x = torch.cat(list(xs), 1)
    return torch.relu(x * _along_channels(scale, x) + _along_channels(shift, x))


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.to(like.dtype).view(1, -1, 1, 1)


@torch.library.custom_op(
    "cutefuse::pre_concat_conv",
    mutates_args=(),
    schema="(Tensor[] xs, Tensor scale, Tensor shift, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, str activation, float alpha, float lo, float hi) -> Tensor",
)
def _pre_concat_conv(
    xs: Sequence[Tensor], scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor:
    if runs_in_library(xs[0]) and all(x.shape[1] * x.element_size() % 16 == 0 for x in xs):
        return compute(xs, (scale, shift), weight, bias, *rest)
    return compute([_seen(xs, scale, shift)], (), weight, bias, *rest)


@_pre_concat_conv.register_fake
def _(xs: Sequence[Tensor], scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return empty_output(xs, weight, *rest[:3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, scale, shift, weight, bias, *rest = inputs
    ctx.save_for_backward(scale, shift, weight, bias, *xs)
    ctx.rest = rest


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    scale, shift, weight, bias, *xs = ctx.saved_tensors
    seen = _seen(xs, scale, shift)
    da, dw, db = gradients(seen, weight, bias, ctx.rest, dy)
    dz = torch.where(seen > 0, da, 0.0)
    dx = dz * _along_channels(scale, dz)
    dscale, dshift = (dz * torch.cat(xs, 1)).sum((0, 2, 3)), dz.sum((0, 2, 3))
    dxs = list(dx.split([t.shape[1] for t in xs], 1))
    return dxs, dscale.to(scale.dtype), dshift.to(shift.dtype), dw, db, *[None] * 7


_pre_concat_conv.register_autograd(_backward, setup_context=_setup)


def pre_concat_conv(
    xs: Sequence[Tensor], scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0, 0, 0), dilation: Sequence[int] = (1, 1),
    activation: str = "", *, alpha: float = 0.01, lo: float = -FLOAT_MAX, hi: float = FLOAT_MAX,
) -> Tensor:  # fmt: skip
    """activation(conv2d(relu(cat(xs, 1) * scale + shift), weight) + bias): a layer of a DenseNet, padded with zeros
    behind its ReLU; channels-last in and out.

    xs: 1 to 8 tensors [N, C_i, H, W] of one type; scale, shift: [sum C_i], such as a BatchNorm in eval mode has;
    weight: [K, sum C_i, R, S]; padding: top, left, bottom, right; activation, alpha, lo, hi: as of `concat_conv`.
    """
    channels = sum(x.shape[1] for x in xs)
    if activation not in ACTIVATIONS:
        raise CutefuseError(f"activation '{activation}' is unknown; choose one of {', '.join(ACTIVATIONS[1:])} or ''")
    if (channels,) * 3 != (weight.shape[1], scale.numel(), shift.numel()):
        found = f"the filter has {weight.shape[1]}, scale and shift have {scale.numel()} and {shift.numel()}"
        raise CutefuseError(f"the sources have {channels} channels, {found}; give all of them as many")
    return torch.ops.cutefuse.pre_concat_conv(
        [fusible(x) for x in xs], scale, shift, weight, bias, list(stride), list(padding), list(dilation), activation,
        alpha, lo, hi,
    )  # fmt: skip
