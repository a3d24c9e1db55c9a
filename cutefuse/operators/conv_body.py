"""The parts of a ConcatConv's function body: its filter unpacked, its views, its convolution, its activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutefuse.graph.body import LAST, Body
from cutefuse.kernels import Call, Tensor
from cutefuse.operators import layouts
from cutefuse.operators.conv_form import GROUP
from cutefuse.operators.conv_math import CHANNEL_BLOCK, blocks


def unpack(body: Body, w: str, count: int, xs: Sequence[str] = (), image: bool = False) -> str:
    """The filter [K, C, R, S] of `count` sources from its packed matrix [K][source][ceil(C/64)][R][S][64].

    `xs` are the sources themselves; before opset 12 their shapes tell how many channels they have. `image`: of one
    block, whose size is that of the matrix, so that a body serves the compact packing and the common one.
    """
    channels = body.agreed("channels")
    # Some call may have a source that does not fill its blocks.
    padded = not body.calls or any(c % CHANNEL_BLOCK for attrs in body.calls for c in attrs["channels"])
    if channels is None and padded:
        packed = body.split(w, "packed_sizes", count, axis=1)
        parts = [_trimmed(body, p, i, count, xs, image) for i, p in enumerate(packed)]
        filters = body.add("Concat", *parts, axis=1) if count > 1 else parts[0]
    else:
        filters = _without_pads(body, w if _is_pointwise(body) else _filters(body, w, image), channels or ())
    return _plain(body, filters) if _is_pointwise(body) else filters


def unpack_depthwise(body: Body, w: str) -> str:
    """The depthwise filter [C, 1, R, S] from its packed matrix [R * S, C]."""
    return body.add("Reshape", body.add("Transpose", w, perm=[1, 0]), _shape(body, 0, 1))


def _is_pointwise(body: Body) -> bool:
    return body.agreed("kernel_shape") == [1, 1]


def _shape(body: Body, *front: int, back: Sequence[int] = ()) -> str:
    """The shape (front, R, S, back) for a Reshape."""
    if (kernel := body.agreed("kernel_shape")) is not None:
        return body.constant([*front, *kernel, *back])
    parts = [body.constant(front), body.ints("kernel_shape"), *([body.constant(back)] if back else [])]
    return body.add("Concat", *parts, axis=0)


def _plain(body: Body, matrix: str) -> str:
    return body.add("Reshape", matrix, _shape(body, 0, -1))


def _filters(body: Body, packed: str, image: bool) -> str:
    """Packed columns as [K, blocks * 64, R, S]; of an image, as many channels as its block has."""
    if image:
        return body.add("Transpose", body.add("Reshape", packed, _shape(body, 0, back=[-1])), perm=[0, 3, 1, 2])
    blocked = body.add("Reshape", packed, _shape(body, 0, -1, back=[CHANNEL_BLOCK]))
    return _plain(body, body.add("Transpose", blocked, perm=[0, 1, 4, 2, 3]))


def _without_pads(body: Body, filters: str, channels: Sequence[int]) -> str:
    """Axis 1 without the pads of the last block of each source, whose channel counts are known."""
    kept, first = list[int](), 0
    for c in channels:
        kept += range(first, first + c)
        first += blocks(c) * CHANNEL_BLOCK
    if len(kept) == first:
        return filters
    if kept == list(range(len(kept))):
        return body.cut(filters, [0], [len(kept)], [1])
    return body.add("Gather", filters, body.constant(kept), axis=1)


def _trimmed(body: Body, part: str, index: int, count: int, xs: Sequence[str], image: bool) -> str:
    """The packed columns of one source as filters without its pads, where calls differ in the number of channels."""
    filters = part if _is_pointwise(body) else _filters(body, part, image)
    numbers = {attrs["channels"][index] for attrs in body.calls}
    if numbers and all(n % CHANNEL_BLOCK == 0 for n in numbers):
        return filters
    if len(numbers) == 1:
        return body.cut(filters, [0], [*numbers], [1])
    if body.opset >= 12:
        return body.cut(filters, [0], body.each(body.ints("channels"), count)[index], [1])
    if body.opset >= 10:
        return body.cut(filters, [0], body.size(xs[index], 1), [1])
    # Opset 9 has no computed ends, but may refer to the list of all channels: give it as many axes, all but one of
    # size 1, which no end cuts.
    axes = list(range(1, count + 1))
    spread = [-1 if i == index else 1 for i in range(count)]
    wide = _reshaped(body, filters, [0, *spread]) if count > 1 else filters
    cut = body.add("Slice", wide, starts=[0] * count, axes=axes, refs={"ends": "channels"})
    return _reshaped(body, cut, [0, -1]) if count > 1 else cut


def _reshaped(body: Body, filters: str, front: Sequence[int]) -> str:
    """Another split of all but the last two axes of a filter; a pointwise one has no such two yet."""
    return body.add("Reshape", filters, body.constant(front) if _is_pointwise(body) else _shape(body, *front))


def convolve(body: Body, x: str, filters: str, bias: str, depthwise: bool = False) -> str:
    """Conv of x with the pads, strides and dilations of the call, and with its `group` where it is depthwise.

    Of the other attributes TensorRT's parser resolves no reference. Where calls differ in the stride, every
    position is computed and a Slice takes the wanted ones; where they differ in the dilation, zeros go into the filter.
    """
    attrs: dict[str, Any] = {}
    for name in ("kernel_shape", "strides", "dilations"):
        if (values := body.agreed(name)) is not None:
            attrs[name] = values
    if _is_pointwise(body):
        attrs["dilations"] = [1, 1]
    if "dilations" not in attrs:
        filters = _dilated(body, filters)
        attrs.pop("kernel_shape", None)
    refs = {"pads": "pads"} | ({"group": GROUP} if depthwise else {})
    y = body.add("Conv", x, filters, bias, refs=refs, **attrs)
    if "strides" in attrs:
        return y
    return body.cut(y, [0, 0], [LAST, LAST], [2, 3], body.ints("strides"))


def _dilated(body: Body, filters: str) -> str:
    """The filter with dilation - 1 zeros between its rows and between its columns (opset >= 11)."""
    factors = body.ints("dilations")
    zeros = body.add("Sub", factors, body.constant([1]))
    rows, columns = body.each(zeros, 2)
    spread = body.add("Reshape", filters, _interleaved(body))
    pads = body.add("Concat", body.constant([0] * 9), rows, body.constant([0]), columns, axis=0)
    padded = body.add("Pad", spread, pads)
    size = body.add("Mul", body.ints("kernel_shape"), factors)
    flat = body.add("Reshape", padded, body.add("Concat", body.constant([0, 0]), size, axis=0))
    return body.cut(flat, [0, 0], body.add("Sub", size, zeros), [2, 3])


def _interleaved(body: Body) -> str:
    """The shape (K, C, R, 1, S, 1) for a Reshape of [K, C, R, S]."""
    if (kernel := body.agreed("kernel_shape")) is not None:
        return body.constant([0, 0, kernel[0], 1, kernel[1], 1])
    rows, columns = body.each(body.ints("kernel_shape"), 2)
    one = body.constant([1])
    return body.add("Concat", body.constant([0, 0]), rows, one, columns, one, axis=0)


def is_nhwc(body: Body) -> bool:
    """Whether the images of all calls are NHWC tensors."""
    return body.agreed("layout") == [layouts.NHWC]


def to_nchw(body: Body, image: str) -> str:
    """An image of the calls as the standard's convolution takes it."""
    return body.add("Transpose", image, perm=layouts.TO_NCHW) if is_nhwc(body) else image


def from_nchw(body: Body, image: str) -> str:
    """What a convolution gives, as an image of the calls."""
    return body.add("Transpose", image, perm=layouts.TO_NHWC) if is_nhwc(body) else image


def pre_activate(body: Body, x: str, scale: str, shift: str) -> str:
    """ReLU of x * scale + shift, vectors of the channels of x."""
    vectors = (body.add("Reshape", v, body.constant([1, -1, 1, 1])) for v in (scale, shift))
    return body.add("Relu", body.add("Add", body.add("Mul", x, next(vectors)), next(vectors)))


def activate(body: Body, suffix: str, y: str, dtype: str) -> str:
    """The activation of an op_type's suffix in standard operators; y is of `dtype`, or of the body's type."""
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
    if suffix == "Gelu":  # its own operator is of opset 20
        root, one, half = (body.cast_like(body.constant(v, "float32"), y, dtype) for v in (0.5**0.5, 1.0, 0.5))
        gate = body.add("Add", body.add("Erf", body.add("Mul", y, root)), one)
        return body.add("Mul", body.add("Mul", y, half), gate)
    return body.add(suffix, y)


def view(body: Body, x: str, index: int, count: int, calls: Sequence[Call]) -> str:
    """Source `index` of a View form: a channel range of x, its pixels repeated (opset >= 12)."""
    ranges = [(_at(call, "channel_starts", index), _at(call, "channels", index)) for call in calls]
    if not _are_whole(ranges, [call.inputs[index] for call in calls]):
        if len(set(ranges)) == 1:
            x = body.cut(x, [ranges[0][0]], [sum(ranges[0])], [1])
        else:
            first = body.each(body.ints("channel_starts"), count)[index]
            x = body.cut(x, first, body.add("Add", first, body.each(body.ints("channels"), count)[index]), [1])
    factors = {_at(call, "upsample", index) for call in calls}
    if factors == {1}:
        return x
    if len(factors) == 1:
        (number,) = factors
        scales = body.constant([1.0, 1.0, number, number], "float32")
    else:
        factor = body.add("Cast", body.each(body.ints("upsample"), count)[index], to=1)  # 1: float32
        scales = body.add("Concat", body.constant([1.0, 1.0], "float32"), factor, factor, axis=0)
    roi = "" if body.opset >= 13 else body.constant([], "float32")
    rules: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return body.add("Resize", x, roi, scales, **rules)


def residual(body: Body, z: str, w: str, sources: int, calls: Sequence[Call]) -> str:
    """The residual of a View form: as many channels of z as the packed filter w has rows."""
    ranges = [(_at(call, "residual_start", 0), *call.inputs[sources].dims[:1]) for call in calls]
    if _are_whole(ranges, [call.inputs[-1] for call in calls]):
        return z
    if len(set(ranges)) == 1 and len(ranges[0]) == 2:
        return body.cut(z, [ranges[0][0]], [sum(ranges[0])], [1])
    first = body.int_attr("residual_start")
    return body.cut(z, first, body.add("Add", first, body.size(w, 0)), [1])


def _are_whole(ranges: Sequence[tuple[int, ...]], images: Sequence[Tensor]) -> bool:
    """Whether each range (first channel, count) is known to be all channels of its image; not where there is none."""
    pairs = zip(ranges, images, strict=True)
    return bool(ranges) and all(len(r) == 2 and image.dims[1:2] == r[1:] for r, image in pairs)


def _at(call: Call, name: str, index: int) -> int:
    values: Any = call.attrs[name]
    return int(values[index])
