"""Convolutions of plain filters with derivatives: `concat_conv` and `pre_concat_conv`, over the packed operator.

The filter is packed at every call, as a step of training changes it; `PackedConv` keeps a packed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefuse.errors import CutefuseError
from cutefuse.operators.conv_call import FLOAT_MAX
from cutefuse.operators.conv_form import Form, most_sources
from cutefuse.torch.conv import ACTIVATIONS, pack
from cutefuse.torch.pixels import fusible, padded

aten = torch.ops.aten
# The gradients of ACTIVATIONS, by (dy, z, alpha, lo, hi)
_GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "Relu": lambda dy, z, *_: aten.threshold_backward(dy, z, 0),
    "LeakyRelu": lambda dy, z, alpha, *_: aten.leaky_relu_backward(dy, z, alpha, False),
    "Clip": lambda dy, z, _, lo, hi: torch.where((z >= lo) & (z <= hi), dy, 0.0),
    "HardSwish": lambda dy, z, *_: aten.hardswish_backward(dy, z),
    "Tanh": lambda dy, z, *_: aten.tanh_backward(dy, torch.tanh(z)),
    "Sigmoid": lambda dy, z, *_: aten.sigmoid_backward(dy, torch.sigmoid(z)),
    "Silu": lambda dy, z, *_: aten.silu_backward(dy, z), "Gelu": lambda dy, z, *_: aten.gelu_backward(dy, z),
}  # fmt: skip


def _joined(xs: Sequence[Tensor], scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """What the filter sees, without its pads."""
    x = torch.cat(list(xs), 1)
    return x if scale is None or shift is None else torch.relu(x * _as_image(scale, x) + _as_image(shift, x))


def _as_image(vector: Tensor, like: Tensor) -> Tensor:
    return vector.to(like.dtype).view(1, -1, 1, 1)


class _FusedConv(torch.autograd.Function):
    """(weight, bias, scale, shift, (op_type, activation, stride, padding, dilation, alpha, lo, hi), *sources) -> y"""

    @staticmethod
    def forward(
        weight: Tensor, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, rest: Sequence[Any],
        *xs: Tensor,
    ) -> Tensor:  # fmt: skip
        op_type, _, stride, padding, dilation, *numbers = rest
        dtype, channels = xs[0].dtype, [x.shape[1] for x in xs]
        wide = torch.promote_types(dtype, torch.float32)
        b = weight.new_zeros(weight.shape[0], dtype=wide) if bias is None else bias.to(wide)
        vectors = [v.to(dtype) for v in (scale, shift) if v is not None]
        inputs = [*xs, pack(weight.to(dtype), channels), b, *vectors]
        geometry = (channels, list(weight.shape[2:]), stride, padding, dilation)
        (y,) = torch.ops.cutefuse.packed_conv(inputs, op_type, *geometry, [0], [1], [0], *numbers, 0)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, bias, scale, shift, ctx.rest, *xs = inputs
        ctx.save_for_backward(weight, bias, scale, shift, *xs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        weight, bias, scale, shift, *xs = ctx.saved_tensors
        _, activation, stride, (top, left, bottom, right), dilation, *numbers = ctx.rest
        x, seen = torch.cat(xs, 1), _joined(xs, scale, shift)
        padded_x, w = F.pad(seen, (left, right, top, bottom)), weight.to(x.dtype)
        if activation:
            z = F.conv2d(padded_x, w, None if bias is None else bias.to(x.dtype), stride, 0, dilation)
            dy = _GRADIENTS[activation](dy, z, *numbers)
        dseen, dw, db = aten.convolution_backward(
            dy, padded_x, w, [w.shape[0]], stride, [0, 0], dilation, False, [0, 0], 1, [True, True, bias is not None]
        )
        dx = dseen[:, :, top : padded_x.shape[2] - bottom, left : padded_x.shape[3] - right]
        dscale = dshift = None
        if scale is not None:
            dz = torch.where(seen > 0, dx, 0.0)
            dscale, dshift = (dz * x).sum((0, 2, 3)).to(scale.dtype), dz.sum((0, 2, 3)).to(shift.dtype)
            dx = dz * _as_image(scale, dz)
        db = None if bias is None else db.to(bias.dtype)
        return dw.to(weight.dtype), db, dscale, dshift, None, *dx.split([t.shape[1] for t in xs], 1)


@torch.compiler.assume_constant_result
def _op_type(sources: int, activation: str, pre_activated: bool) -> str:
    if activation not in ACTIVATIONS:
        raise CutefuseError(f"activation '{activation}' is unknown; choose one of {', '.join(ACTIVATIONS[1:])} or ''")
    if not 1 <= sources <= most_sources():
        raise CutefuseError(f"{sources} sources were given; give 1 to {most_sources()}, the others joined before")
    return Form(sources, activation, pre_activated=pre_activated).op_type


def _convolve(
    xs: Sequence[Tensor], scale: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor | None,
    activation: str, *rest: Any,
) -> Tensor:  # fmt: skip
    if scale is not None and any(x.shape[1] != padded(x.shape[1], x.element_size()) for x in xs):
        xs, scale, shift = [_joined(xs, scale, shift)], None, None  # kernels scale whole vectors of channels
    op_type = _op_type(len(xs), activation, scale is not None)
    made: Tensor = _FusedConv.apply(weight, bias, scale, shift, (op_type, activation, *rest), *map(fusible, xs))
    # Outside the function: inside it, torch.compile of PyTorch 2.11 made all gradients 0 wherever nothing had to move.
    return made.contiguous(memory_format=torch.channels_last)


def concat_conv(
    xs: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0), dilation: Sequence[int] = (1, 1), activation: str = "", *,
    alpha: float = 0.01, lo: float = -FLOAT_MAX, hi: float = FLOAT_MAX,
) -> Tensor:  # fmt: skip
    """activation(conv2d(cat(xs, 1), weight) + bias) without the concatenated tensor; channels-last in and out.

    xs: 1 to 8 tensors [N, C_i, H, W] of one type; weight: [K, sum C_i, R, S]; padding: top, left, bottom, right.
    activation: one of ACTIVATIONS; alpha is LeakyRelu's slope, lo and hi are Clip's bounds.
    """
    channels = sum(x.shape[1] for x in xs)
    if channels != weight.shape[1]:
        raise CutefuseError(f"the sources have {channels} channels, the filter has {weight.shape[1]}")
    return _convolve(xs, None, None, weight, bias, activation, [*stride], [*padding], [*dilation], alpha, lo, hi)


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
    if (channels,) * 3 != (weight.shape[1], scale.numel(), shift.numel()):
        found = f"the filter has {weight.shape[1]}, scale and shift have {scale.numel()} and {shift.numel()}"
        raise CutefuseError(f"the sources have {channels} channels, {found}; give all of them as many")
    return _convolve(xs, scale, shift, weight, bias, activation, [*stride], [*padding], [*dilation], alpha, lo, hi)
