"""Concat + convolution + activation as one PyTorch operator with autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.operators import conv_math
from cutefuse.operators.conv_call import FLOAT_MAX
from cutefuse.operators.conv_form import Form
from cutefuse.torch.launch import NAMES, enqueue, runs_in_library
from cutefuse.torch.pixels import as_pixels, empty_pixels, fusible

# name -> function of (z, alpha, lo, hi)
_FUNCTIONS: dict[str, Callable[[Tensor, float, float, float], Tensor]] = {
    "": lambda z, *_: torch.clone(z), "Relu": lambda z, *_: F.relu(z),
    "LeakyRelu": lambda z, alpha, *_: F.leaky_relu(z, alpha), "Clip": lambda z, _, lo, hi: z.clamp(lo, hi),
    "Silu": lambda z, *_: F.silu(z), "HardSwish": lambda z, *_: F.hardswish(z),
    "Sigmoid": lambda z, *_: torch.sigmoid(z), "Tanh": lambda z, *_: torch.tanh(z),
}  # fmt: skip
ACTIVATIONS = tuple(_FUNCTIONS)


def activate(z: Tensor, activation: str, alpha: float, lo: float, hi: float) -> Tensor:
    """A new tensor: one of ACTIVATIONS of z."""
    return _FUNCTIONS[activation](z, alpha, lo, hi)


def pack(weight: Tensor, channels: Sequence[int]) -> Tensor:
    """[K, C, R, S] as the kernels read it: [K][source][ceil(C/64)][R][S][64], pads zero."""
    parts = []
    for w in weight.split(list(channels), 1):
        blocks = F.pad(w, (0, 0, 0, 0, 0, -w.shape[1] % 64)).unflatten(1, (-1, 64))
        parts.append(blocks.permute(0, 1, 3, 4, 2).flatten(1))
    return torch.cat(parts, 1)


def _convolve(xs: Sequence[Tensor], weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
              dilation: Sequence[int]) -> Tensor:  # fmt: skip
    top, left, bottom, right = padding
    x = F.pad(torch.cat(list(xs), 1), (left, right, top, bottom))
    return F.conv2d(x, weight, None if bias is None else bias.to(x.dtype), list(stride), 0, list(dilation))


def _slope(z: Tensor, activation: str, alpha: float, lo: float, hi: float) -> Tensor:
    """The derivative of the activation at z."""
    if activation == "Relu":
        return (z > 0).to(z.dtype)
    if activation == "LeakyRelu":
        return torch.where(z > 0, 1.0, alpha).to(z.dtype)
    if activation == "Clip":
        return ((z >= lo) & (z <= hi)).to(z.dtype)
    if activation == "HardSwish":
        return torch.where(z < -3, 0.0, torch.where(z <= 3, z / 3 + 0.5, 1.0)).to(z.dtype)
    if activation == "Tanh":
        return 1 - torch.tanh(z).square()
    if activation in ("Sigmoid", "Silu"):
        s = torch.sigmoid(z)
        return s * (1 - s) if activation == "Sigmoid" else s * (1 + z * (1 - s))
    return torch.ones_like(z)


def _image(x: Tensor, pixel: int) -> kernels.Tensor:
    """An image with its elements from pixel to pixel."""
    return kernels.Tensor(tuple(x.shape), NAMES[x.dtype], kernels.CHANNELS_LAST, ld=pixel)


def _output_shape(xs: Sequence[Tensor], weight: Tensor, stride: Sequence[int], padding: Sequence[int],
                  dilation: Sequence[int]) -> tuple[Any, ...]:  # fmt: skip
    def size(axis: int) -> Any:
        room = xs[0].shape[2 + axis] + padding[axis] + padding[axis + 2]
        return (room - dilation[axis] * (weight.shape[2 + axis] - 1) - 1) // stride[axis] + 1

    return xs[0].shape[0], weight.shape[0], size(0), size(1)


@torch.library.custom_op(
    "cutefuse::concat_conv",
    mutates_args=(),
    schema="(Tensor[] xs, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "str activation, float alpha, float lo, float hi) -> Tensor",
)
def _concat_conv(
    xs: Sequence[Tensor], weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], activation: str, alpha: float, lo: float, hi: float,
) -> Tensor:  # fmt: skip
    return compute(xs, (), weight, bias, stride, padding, dilation, activation, alpha, lo, hi)


def compute(
    xs: Sequence[Tensor], vectors: Sequence[Tensor], weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], activation: str, alpha: float, lo: float, hi: float,
) -> Tensor:  # fmt: skip
    """The operator, by a kernel on a GPU and in PyTorch's own operators elsewhere; `vectors`: scale and shift of a
    pre-activation, for kernels alone."""
    if not runs_in_library(xs[0]):
        z = _convolve(xs, weight, bias, stride, padding, dilation)
        return activate(z, activation, alpha, lo, hi).contiguous(memory_format=torch.channels_last)
    channels = [x.shape[1] for x in xs]
    N, K, P, Q = _output_shape(xs, weight, stride, padding, dilation)
    read = [as_pixels(x) for x in xs]
    y = empty_pixels((N, K, P, Q), xs[0].dtype, xs[0].device)
    b = torch.zeros(K, device=y.device) if bias is None else bias.float()
    packed = pack(weight.to(y.dtype), channels)
    own = [v.to(y.dtype).contiguous() for v in vectors]

    def call() -> kernels.Call:
        dtype, filter_shape = NAMES[y.dtype], (weight.shape[2], weight.shape[3])
        inputs = [_image(x, pixel) for x, pixel in read]
        inputs += [kernels.Tensor(tuple(packed.shape), dtype), kernels.Tensor((K,), "float32")]
        inputs += [kernels.Tensor(tuple(v.shape), dtype) for v in own]
        attrs = {
            "channels": channels, "kernel_shape": filter_shape, "strides": list(stride), "pads": list(padding),
            "dilations": list(dilation), "packed_sizes": conv_math.packed_sizes(channels, filter_shape),
            "alpha": [alpha], "lo": [lo], "hi": [hi],
        }  # fmt: skip
        form = Form(len(xs), activation, pre_activated=bool(own))
        return kernels.Call(form.op_type, inputs, [_image(y, y.stride(3))], attrs)

    shapes = (*((x.shape, pixel) for x, pixel in read), weight.shape)
    key = ("concat_conv", len(own), activation, y.dtype, shapes, *stride, *padding, *dilation, alpha, lo, hi)
    enqueue(key, call, [*(x for x, _ in read), packed, b, *own], [y])
    return y.contiguous(memory_format=torch.channels_last)


@_concat_conv.register_fake
def _(
    xs: Sequence[Tensor], weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], activation: str, alpha: float, lo: float, hi: float,
) -> Tensor:  # fmt: skip
    return empty_output(xs, weight, stride, padding, dilation)


def empty_output(
    xs: Sequence[Tensor], weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """What the operator returns, without values."""
    shape = _output_shape(xs, weight, stride, padding, dilation)
    return torch.empty(shape, dtype=xs[0].dtype, device=xs[0].device, memory_format=torch.channels_last)


def _conv_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, weight, bias, *rest = inputs
    ctx.save_for_backward(weight, bias, *xs)
    ctx.rest = rest


def _conv_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    weight, bias, *xs = ctx.saved_tensors
    dx, dw, db = gradients(torch.cat(xs, 1), weight, bias, ctx.rest, dy)
    return list(dx.split([t.shape[1] for t in xs], 1)), dw, db, *[None] * 7


def gradients(
    joined: Tensor, weight: Tensor, bias: Tensor | None, rest: Sequence[Any], dy: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of what the filter sees, the filter and the bias; `rest`: the operator's arguments behind the bias."""
    stride, padding, dilation, activation, alpha, lo, hi = rest
    top, left, bottom, right = padding
    x = F.pad(joined, (left, right, top, bottom))
    w = weight.to(x.dtype)
    z = F.conv2d(x, w, None if bias is None else bias.to(x.dtype), list(stride), 0, list(dilation))
    dz = dy * _slope(z, activation, alpha, lo, hi)
    dx, dw, db = torch.ops.aten.convolution_backward(
        dz, x, w, [w.shape[0]], list(stride), [0, 0], list(dilation), False, [0, 0], 1, [True, True, bias is not None]
    )
    dx = dx[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]
    return dx, dw.to(weight.dtype), None if bias is None else db.to(bias.dtype)


_concat_conv.register_autograd(_conv_backward, setup_context=_conv_setup)


def concat_conv(
    xs: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0), dilation: Sequence[int] = (1, 1), activation: str = "", *,
    alpha: float = 0.01, lo: float = -FLOAT_MAX, hi: float = FLOAT_MAX,
) -> Tensor:  # fmt: skip
    """activation(conv2d(cat(xs, 1), weight) + bias) without the concatenated tensor; channels-last in and out.

    xs: 1 to 8 tensors [N, C_i, H, W] of one type; weight: [K, sum C_i, R, S]; padding: top, left, bottom, right.
    activation: one of ACTIVATIONS; alpha is LeakyRelu's slope, lo and hi are Clip's bounds.
    """
    if activation not in ACTIVATIONS:
        raise CutefuseError(f"activation '{activation}' is unknown; choose one of {', '.join(ACTIVATIONS[1:])} or ''")
    if sum(x.shape[1] for x in xs) != weight.shape[1]:
        raise CutefuseError(
            f"the sources have {sum(x.shape[1] for x in xs)} channels, the filter has {weight.shape[1]}"
        )
    return torch.ops.cutefuse.concat_conv(
        [fusible(x) for x in xs], weight, bias, list(stride), list(padding), list(dilation), activation, alpha, lo, hi
    )
