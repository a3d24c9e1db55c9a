"""The arithmetic of ConcatConv in NumPy and in standard ONNX operators: geometry, packing, views, reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutefuse.graph.body import Body
from cutefuse.kernels import Call
from cutefuse.ops.conv_form import AFTER, BEFORE, form_of

CHANNEL_BLOCK = 64  # as kChannelBlock in cutlass_kernels/concat_conv/problem.h


@dataclass(frozen=True)
class Geometry:
    """Filter size and how it moves; pads are top, left, bottom, right."""

    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    dilations: tuple[int, ...] = (1, 1)

    def attrs(self) -> dict[str, list[int]]:
        """As attributes of the node."""
        return {
            "kernel_shape": list(self.kernel_shape), "strides": list(self.strides),
            "pads": list(self.pads), "dilations": list(self.dilations),
        }  # fmt: skip

    def output_size(self, axis: int, size: int) -> int:
        """Output rows (axis 0) or columns (axis 1) for an input size; -1 for an unknown one."""
        if size < 0 or self.strides[axis] < 1:
            return -1
        extent = self.dilations[axis] * (self.kernel_shape[axis] - 1) + 1
        return max(0, (size + self.pads[axis] + self.pads[axis + 2] - extent) // self.strides[axis] + 1)


def blocks(channels: int) -> int:
    """Packed blocks of 64 channels that a source takes."""
    return -(-channels // CHANNEL_BLOCK)


def packed_sizes(channels: Sequence[int], kernel_shape: Sequence[int]) -> list[int]:
    """Filter columns per source."""
    return [blocks(c) * kernel_shape[0] * kernel_shape[1] * CHANNEL_BLOCK for c in channels]


def pack(w: np.ndarray, channels: Sequence[int]) -> np.ndarray:
    """Filter [K, sum(channels), R, S] -> matrix [K, columns], laid out [K][source][ceil(C/64)][R][S][64], pads zero."""
    K, _, R, S = w.shape
    out = np.zeros((K, sum(packed_sizes(channels, (R, S)))), dtype=w.dtype)
    first, column = 0, 0
    for c in channels:
        size = blocks(c) * R * S * CHANNEL_BLOCK
        block = np.zeros((K, blocks(c) * CHANNEL_BLOCK, R, S), dtype=w.dtype)
        block[:, :c] = w[:, first : first + c]
        block = block.reshape(K, blocks(c), CHANNEL_BLOCK, R, S).transpose(0, 1, 3, 4, 2)
        out[:, column : column + size] = block.reshape(K, size)
        first, column = first + c, column + size
    return out


def unpacked(matrix: np.ndarray, channels: Sequence[int], kernel_shape: Sequence[int]) -> np.ndarray:
    """The inverse of `pack`."""
    (K, _), (R, S) = matrix.shape, kernel_shape
    parts = np.split(matrix, np.cumsum(packed_sizes(channels, kernel_shape))[:-1], axis=1)
    shaped = [p.reshape(K, -1, R, S, CHANNEL_BLOCK).transpose(0, 1, 4, 2, 3).reshape(K, -1, R, S) for p in parts]
    return np.concatenate([p[:, :c] for p, c in zip(shaped, channels, strict=True)], axis=1)


def unpack(body: Body, w: str, xs: Sequence[str]) -> str:
    """The filter [K, C, R, S] in standard operators, from attributes only, so that every runtime folds it."""
    parts = body.split(w, "packed_sizes", len(xs), axis=1)
    if body.opset >= 12:
        kernel = body.add("Constant", refs={"value_ints": "kernel_shape"})
        channels = body.add("Constant", refs={"value_ints": "channels"})
        counts = [body.add("Slice", channels, body.constant([i]), body.constant([i + 1])) for i in range(len(xs))]
    else:  # ints attributes cannot become tensors yet: pooling 32x32 zeros leaves 33-R by 33-S of them
        pooled = body.add("MaxPool", body.zeros([1, 1, 32, 32]), refs={"kernel_shape": "kernel_shape"})
        left = body.add("Gather", body.add("Shape", pooled), body.constant([2, 3]))
        kernel = body.add("Sub", body.constant([33, 33]), left)
        counts = [body.add("Gather", body.add("Shape", x), body.constant([1])) for x in xs]
    blocked = body.add("Concat", body.constant([0, -1]), kernel, body.constant([CHANNEL_BLOCK]), axis=0)
    plain = body.add("Concat", body.constant([0, -1]), kernel, axis=0)
    filters = []
    for part, count in zip(parts, counts, strict=True):
        blocks_last = body.add("Transpose", body.add("Reshape", part, blocked), perm=[0, 1, 4, 2, 3])
        filters.append(body.head(body.add("Reshape", blocks_last, plain), count, axis=1))
    return body.add("Concat", *filters, axis=1) if len(filters) > 1 else filters[0]


def activate(body: Body, suffix: str, y: str, dtype: str) -> str:
    """The activation of an op_type's suffix in standard operators; y is of `dtype`."""
    if suffix == "":
        return y
    if suffix == "LeakyRelu":
        return body.add("LeakyRelu", y, refs={"alpha": "alpha"})
    if suffix == "Clip" and body.opset < 11:
        return body.add("Clip", y, refs={"min": "lo", "max": "hi"})
    if suffix == "Clip":
        return body.add("Clip", y, *(body.cast_like(body.float_attr(a), y, dtype) for a in ("lo", "hi")))
    if suffix == "Silu":
        return body.add("Mul", y, body.add("Sigmoid", y))
    if suffix == "HardSwish":
        return body.add("Mul", y, body.add("HardSigmoid", y, alpha=1 / 6, beta=0.5))
    return body.add(suffix, y)


def view(body: Body, x: str, index: int) -> str:
    """Source `index` of a View form in standard operators: a channel range of x, its pixels repeated (opset >= 12)."""

    def value_of(attr: str) -> str:
        values = body.add("Constant", refs={"value_ints": attr})
        return body.add("Slice", values, body.constant([index]), body.constant([index + 1]))

    start, factor = value_of("channel_starts"), body.add("Cast", value_of("upsample"), to=1)  # 1: float32
    taken = body.add("Slice", x, start, body.add("Add", start, value_of("channels")), body.constant([1]))
    scales = body.add("Concat", body.constant([1.0, 1.0], "float32"), factor, factor, axis=0)
    roi = "" if body.opset >= 13 else body.constant([], "float32")
    rules: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return body.add("Resize", taken, roi, scales, **rules)


def seen(call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The sources as the convolution sees them: channel ranges taken, pixels repeated."""
    form, attrs = form_of(call.op_type), dict[str, Any](call.attrs)
    xs = list(operands[: form.sources])
    if not form.view:
        return xs
    ranges = zip(xs, attrs["channel_starts"], attrs["channels"], attrs["upsample"], strict=True)
    return [x[:, start : start + c].repeat(u, axis=2).repeat(u, axis=3) for x, start, c, u in ranges]


def convolve(call: Call, operands: Sequence[np.ndarray]) -> np.ndarray:
    """conv2d(concat(sources), filter) + bias in float64 for all K filters: no residual, no activation."""
    attrs: dict[str, Any] = dict(call.attrs)
    sources = seen(call, operands)
    packed, bias = operands[len(sources) : len(sources) + 2]
    w = unpacked(packed, attrs["channels"], attrs["kernel_shape"])
    top, left, bottom, right = attrs["pads"]
    x = np.pad(np.concatenate(sources, axis=1), ((0, 0), (0, 0), (top, bottom), (left, right)))
    (sh, sw), (dh, dw) = attrs["strides"], attrs["dilations"]
    n, _, p, q = call.outputs[0].dims
    y = np.zeros((n, p, q, len(bias))) + bias
    for r in range(w.shape[2]):
        for s in range(w.shape[3]):
            tap = x[:, :, r * dh : r * dh + (p - 1) * sh + 1 : sh, s * dw : s * dw + (q - 1) * sw + 1 : sw]
            y += np.tensordot(tap, w[:, :, r, s], axes=(1, 1))
    return y.transpose(0, 3, 1, 2)


def finish(call: Call, y: np.ndarray, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs in float64 from what `convolve` gives: residual, activation, channel ranges."""
    form = form_of(call.op_type)
    y = y + operands[-1] if form.residual == BEFORE else y
    y = activation(call, form.suffix, y)
    y = y + operands[-1] if form.residual == AFTER else y
    return split_channels(call, y)


def split_channels(call: Call, y: np.ndarray) -> list[np.ndarray]:
    """The K channels cut into those of each output."""
    return np.split(y, np.cumsum([t.dims[1] for t in call.outputs])[:-1], axis=1)


def activation(call: Call, suffix: str, y: np.ndarray) -> np.ndarray:
    """The activation of an op_type's suffix in float64."""
    attrs: dict[str, Any] = dict(call.attrs)
    gate = 1 / (1 + np.exp(-np.clip(y, -700, 700)))
    table = {
        "": y, "Relu": np.maximum(y, 0), "LeakyRelu": np.where(y > 0, y, attrs["alpha"][0] * y),
        "Clip": np.clip(y, attrs["lo"][0], attrs["hi"][0]), "Silu": y * gate,
        "HardSwish": y * np.clip(y / 6 + 0.5, 0, 1), "Sigmoid": gate, "Tanh": np.tanh(y),
    }  # fmt: skip
    return table[suffix]
