"""The arithmetic of ConcatConv in NumPy and in standard ONNX operators: geometry, packing, reference, test problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutefuse.body import Body
from cutefuse.kernels import Call
from cutefuse.ops.op import Case

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


def convolve(call: Call, operands: Sequence[np.ndarray]) -> np.ndarray:
    """conv2d(concat(sources), filter) + bias in float64, without the activation."""
    attrs: dict[str, Any] = dict(call.attrs)
    *sources, packed, bias = operands
    w = unpacked(packed, attrs["channels"], attrs["kernel_shape"])
    top, left, bottom, right = attrs["pads"]
    x = np.pad(np.concatenate(sources, axis=1), ((0, 0), (0, 0), (top, bottom), (left, right)))
    (sh, sw), (dh, dw) = attrs["strides"], attrs["dilations"]
    n, k, p, q = call.outputs[0].dims
    y = np.zeros((n, p, q, k)) + bias
    for r in range(w.shape[2]):
        for s in range(w.shape[3]):
            tap = x[:, :, r * dh : r * dh + (p - 1) * sh + 1 : sh, s * dw : s * dw + (q - 1) * sw + 1 : sw]
            y += np.tensordot(tap, w[:, :, r, s], axes=(1, 1))
    return y.transpose(0, 3, 1, 2)


def activation(call: Call, y: np.ndarray) -> np.ndarray:
    """The activation of the call's op_type in float64."""
    attrs: dict[str, Any] = dict(call.attrs)
    gate = 1 / (1 + np.exp(-np.clip(y, -700, 700)))
    table = {
        "": y, "Relu": np.maximum(y, 0), "LeakyRelu": np.where(y > 0, y, attrs["alpha"][0] * y),
        "Clip": np.clip(y, attrs["lo"][0], attrs["hi"][0]), "Silu": y * gate,
        "HardSwish": y * np.clip(y / 6 + 0.5, 0, 1), "Sigmoid": gate, "Tanh": np.tanh(y),
    }  # fmt: skip
    return table[call.op_type.removeprefix("CuteConcatConv")[1:]]


def cases(suffixes: Sequence[str], max_sources: int) -> list[Case]:
    """Every op_type on a small problem, then the sizes that break kernels: odd, tiny, empty, strided, dilated, long."""
    small = [
        _case(f"{n}_sources_{suffix or 'linear'}", [16, 8, 72, 4, 64, 12, 20, 24][:n], suffix, K=24, H=9, W=7)
        for n in range(1, max_sources + 1) for suffix in suffixes
    ]  # fmt: skip
    return [
        *small,
        _case("one_pixel", [8, 8], "Relu", K=8, H=1, W=1, R=1, S=1, pads=(0, 0, 0, 0)),
        _case("one_filter", [64, 64], "", K=1, H=5, W=5),
        _case("empty_batch", [16, 16], "Relu", N=0, K=16, H=4, W=4),
        _case("odd_everything", [13, 77], "Silu", N=3, K=19, H=13, W=11, dtypes=("float16", "bfloat16")),
        _case("one_channel_each", [1, 1, 1], "Tanh", K=7, H=6, W=5, dtypes=("float16", "bfloat16")),
        _case("strided", [48, 96], "Relu", N=2, K=40, H=15, W=18, strides=(2, 3)),
        _case("dilated", [64, 32], "Relu", K=72, H=17, W=16, pads=(2, 3, 2, 3), dilations=(2, 3)),
        _case("asymmetric_pads", [32, 64], "LeakyRelu", K=64, H=10, W=12, pads=(0, 2, 3, 1)),
        _case("row_filter", [128, 128, 128], "Sigmoid", K=96, H=9, W=20, R=1, S=5, pads=(0, 2, 0, 2)),
        _case("column_filter", [24, 40], "Tanh", K=33, H=20, W=9, R=7, S=1, pads=(3, 0, 3, 0)),
        _case("pads_wider_than_image", [16, 16], "Relu", K=16, H=1, W=2, R=5, S=5, pads=(4, 4, 4, 4)),
        _case("unet_up", [64, 64], "Relu", K=64, H=32, W=32),
        _case("bevfusion", [80, 256], "Relu", K=256, H=20, W=20),
        _case("hrnet_head", [48, 96, 192, 384], "Relu", K=720, H=12, W=16, R=1, S=1, pads=(0, 0, 0, 0)),
        _case("long_reduction", [512, 512], "Relu", K=64, H=8, W=8),
    ]


def _case(
    name: str, channels: list[int], suffix: str, *, K: int, H: int, W: int, N: int = 1, R: int = 3, S: int = 3,
    pads: tuple[int, ...] = (1, 1, 1, 1), dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16"),
    **attrs: Any,
) -> Case:  # fmt: skip
    sizes: dict[str, int | list[int]] = {"N": N, "C": channels, "H": H, "W": W, "K": K, "R": R, "S": S}
    params = {"LeakyRelu": {"alpha": [0.125]}, "Clip": {"lo": [-0.5], "hi": [0.75]}}.get(suffix, {})
    return Case(name, f"CuteConcatConv{len(channels)}{suffix}", sizes, {"pads": pads, **attrs, **params}, dtypes)
