"""The arithmetic of ConcatConv in NumPy: geometry, packing, views, reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cutefuse.kernels import Call
from cutefuse.operators.conv_form import AFTER, BEFORE, Form, form_of

CHANNEL_BLOCK = 64  # as kChannelBlock in cutlass_kernels/concat_conv/problem.h


@dataclass(frozen=True)
class Geometry:
    """Filter size and how it moves; pads are top, left, bottom, right."""

    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    dilations: tuple[int, ...] = (1, 1)

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Geometry:
        """Of the attributes of a node."""
        return cls(*(tuple(attrs[f.name]) for f in fields(cls)))

    def attrs(self) -> dict[str, list[int]]:
        """As attributes of the node."""
        return {name: list(values) for name, values in vars(self).items()}

    def output_size(self, axis: int, size: int) -> int:
        """Output rows (axis 0) or columns (axis 1) for an input size; -1 for an unknown one."""
        if size < 0 or self.strides[axis] < 1:
            return -1
        return max(0, self.positions(axis, size))

    def positions(self, axis: int, size: Any) -> Any:
        """Where the filter can stand along an axis of a known size, which may be a symbol; not above 0: nowhere."""
        extent = self.dilations[axis] * (self.kernel_shape[axis] - 1) + 1
        return (size + self.pads[axis] + self.pads[axis + 2] - extent) // self.strides[axis] + 1

    def dilated_taps(self, size: Sequence[int]) -> float:
        """Taps of a dilated filter that lie inside of an image of known size (rows, columns), in the mean over the
        outputs; 0 without a dilation."""
        inside = float(any(r > 1 and d > 1 for r, d in zip(self.kernel_shape, self.dilations, strict=True)))
        for axis, (taps, extent) in enumerate(zip(self.kernel_shape, size, strict=True)):
            outputs = self.output_size(axis, extent)
            starts = np.arange(outputs) * self.strides[axis] - self.pads[axis]
            at = starts[:, None] + np.arange(taps) * self.dilations[axis]
            inside *= float(((at >= 0) & (at < extent)).sum()) / max(outputs, 1)
        return inside


def blocks(channels: int) -> int:
    """Packed blocks of 64 channels that a source takes."""
    return -(-channels // CHANNEL_BLOCK)


def packed_sizes(channels: Sequence[int], kernel_shape: Sequence[int], form: Form | None = None) -> list[int]:
    """Filter columns per source; without a form those of the common packing."""
    if form and form.depthwise:
        return list(channels)
    return [blocks(c) * math.prod(kernel_shape) * block_of(c, form) for c in channels]


def block_of(channels: int, form: Form | None) -> int:
    """Channels of a packed block: whole fours alone in an image's compact packing."""
    return min(CHANNEL_BLOCK, -(-channels // 4) * 4) if form and form.image else CHANNEL_BLOCK


def pack_depthwise(w: np.ndarray) -> np.ndarray:
    """Filter [C, 1, R, S] -> matrix [R * S, C]."""
    return np.ascontiguousarray(w.reshape(len(w), -1).T)


def pack(w: np.ndarray, channels: Sequence[int], form: Form | None = None) -> np.ndarray:
    """Filter [K, sum(channels), R, S] -> matrix [K, columns], laid out [K][source][ceil(C/64)][R][S][64], of an image
    [K][R][S][ceil(C/4)*4], pads zero."""
    K, _, R, S = w.shape
    out = np.zeros((K, sum(packed_sizes(channels, (R, S), form))), dtype=w.dtype)
    first, column = 0, 0
    for c in channels:
        width = block_of(c, form)
        size = blocks(c) * R * S * width
        block = np.zeros((K, blocks(c) * width, R, S), dtype=w.dtype)
        block[:, :c] = w[:, first : first + c]
        block = block.reshape(K, blocks(c), width, R, S).transpose(0, 1, 3, 4, 2)
        out[:, column : column + size] = block.reshape(K, size)
        first, column = first + c, column + size
    return out


def unpacked(matrix: np.ndarray, channels: Sequence[int], kernel_shape: Sequence[int]) -> np.ndarray:
    """The inverse of `pack`: of an image the matrix tells the packing, the compact or the common one."""
    (K, columns), (R, S) = matrix.shape, kernel_shape
    width = min(CHANNEL_BLOCK, columns // (R * S))
    parts = np.split(matrix, np.cumsum(packed_sizes(channels, kernel_shape))[:-1], axis=1)
    shaped = [p.reshape(K, -1, R, S, width).transpose(0, 1, 4, 2, 3).reshape(K, -1, R, S) for p in parts]
    return np.concatenate([p[:, :c] for p, c in zip(shaped, channels, strict=True)], axis=1)


def seen(call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The sources as the convolution sees them: channel ranges taken, pixels repeated, channels pre-activated."""
    form, attrs = form_of(call.op_type), dict[str, Any](call.attrs)
    xs = list(operands[: form.sources])
    if form.pre_activated:
        scale, shift = operands[form.sources + 2 : form.sources + 4]
        borders = np.cumsum(attrs["channels"])[:-1]
        parts = zip(xs, np.split(scale, borders), np.split(shift, borders), strict=True)
        return [np.maximum(x * s[:, None, None] + t[:, None, None], 0) for x, s, t in parts]
    if not form.view:
        return xs
    ranges = zip(xs, attrs["channel_starts"], attrs["channels"], attrs["upsample"], strict=True)
    return [x[:, start : start + c].repeat(u, axis=2).repeat(u, axis=3) for x, start, c, u in ranges]


def convolve(call: Call, operands: Sequence[np.ndarray]) -> np.ndarray:
    """conv2d(concat(sources), filter) + bias in float64 for all K filters: no residual, no activation."""
    depthwise, attrs = form_of(call.op_type).depthwise, dict[str, Any](call.attrs)
    sources = seen(call, operands)
    packed, bias = operands[len(sources) : len(sources) + 2]
    if depthwise:
        w = packed.T.reshape(-1, 1, *attrs["kernel_shape"])
    else:
        w = unpacked(packed, attrs["channels"], attrs["kernel_shape"])
    top, left, bottom, right = attrs["pads"]
    x = np.pad(np.concatenate(sources, axis=1), ((0, 0), (0, 0), (top, bottom), (left, right)))
    (sh, sw), (dh, dw) = attrs["strides"], attrs["dilations"]
    spread = form_of(call.op_type).spread
    n, (p, q) = call.outputs[0].dims[0], (d // spread for d in call.outputs[0].dims[2:])
    y = np.zeros((n, p, q, len(bias))) + bias
    for r in range(w.shape[2]):
        for s in range(w.shape[3]):
            tap = x[:, :, r * dh : r * dh + (p - 1) * sh + 1 : sh, s * dw : s * dw + (q - 1) * sw + 1 : sw]
            one = w[:, :, r, s]
            y += tap.transpose(0, 2, 3, 1) * one[:, 0] if depthwise else np.tensordot(tap, one, axes=(1, 1))
    return y.transpose(0, 3, 1, 2)


def finish(call: Call, y: np.ndarray, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs in float64 from what `convolve` gives: residual, activation, channel ranges."""
    form = form_of(call.op_type)
    y = y + added(call, operands) if form.residual == BEFORE else y
    y = activation(call, form.suffix, y)
    y = y + added(call, operands) if form.residual == AFTER else y
    return split_channels(call, y)


def added(call: Call, operands: Sequence[np.ndarray]) -> np.ndarray:
    """The channels of the residual that are added to those of all outputs."""
    start: Any = call.attrs["residual_start"]
    return operands[-1][:, start[0] : start[0] + sum(t.dims[1] for t in call.outputs)]


def split_channels(call: Call, y: np.ndarray) -> list[np.ndarray]:
    """The K channels cut into those of each output, or spread over squares of pixels."""
    if (s := form_of(call.op_type).spread) > 1:
        n, _, p, q = y.shape
        squares = y.reshape(n, s, s, -1, p, q).transpose(0, 3, 4, 1, 5, 2)
        return [squares.reshape(call.outputs[0].dims)]
    return np.split(y, np.cumsum([t.dims[1] for t in call.outputs])[:-1], axis=1)


def activation(call: Call, suffix: str, y: np.ndarray) -> np.ndarray:
    """The activation of an op_type's suffix in float64."""
    attrs: dict[str, Any] = dict(call.attrs)
    if suffix == "Gelu":
        return np.asarray(y * (1 + np.vectorize(math.erf, otypes=[np.float64])(y * 0.5**0.5)) / 2)
    gate = 1 / (1 + np.exp(-np.clip(y, -700, 700)))
    table = {
        "": y, "Relu": np.maximum(y, 0), "LeakyRelu": np.where(y > 0, y, attrs["alpha"][0] * y),
        "Clip": np.clip(y, attrs["lo"][0], attrs["hi"][0]), "Silu": y * gate,
        "HardSwish": y * np.clip(y / 6 + 0.5, 0, 1), "Sigmoid": gate, "Tanh": np.tanh(y),
    }  # fmt: skip
    return table[suffix]
