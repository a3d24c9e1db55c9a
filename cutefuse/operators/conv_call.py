"""Calls of ConcatConv: from sources, filters and geometry to a call with every attribute written, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cutefuse.kernels import CHANNELS_LAST, LINEAR, Call, Tensor
from cutefuse.operators import conv_form, conv_math
from cutefuse.operators.conv_form import Form, Source
from cutefuse.operators.layouts import HWC8, NHWC, TO_NCHW

FLOAT_MAX = 3.402823466e38


def make_call(
    form: Form, sources: Sequence[Source], outputs: Sequence[int], geometry: conv_math.Geometry, dtype: str,
    params: dict[str, float], layout: int = HWC8, residual: Source | None = None, image_dtype: str = "",
) -> Call:  # fmt: skip
    """The call of these sources, `outputs` channels of each output, every attribute written.

    Its tensors have logical NCHW dims in either layout: HWC8 (pixels padded to whole vectors) or NHWC (dense pixels).
    `residual`: where the channels to add are found, of a View form; without it, in a tensor of their own.
    `image_dtype`: of the source of an image; "" for `dtype`.
    """
    channels = [s.channels for s in sources]
    sizes = conv_math.packed_sizes(channels, geometry.kernel_shape, form)
    rows, columns = (geometry.output_size(i, d) for i, d in enumerate(conv_form.first_size(sources)))
    batch = next((s.dims[0] for s in sources if s.dims[0] >= 0), -1)
    attrs: dict[str, Any] = {
        "channels": channels, **geometry.attrs(), "packed_sizes": sizes,
        "alpha": [0.01], "lo": [-FLOAT_MAX], "hi": [FLOAT_MAX], **{k: [v] for k, v in params.items()},
        "channel_starts": [s.start for s in sources] if form.view else [0],
        "upsample": [s.upsample for s in sources] if form.view else [1],
        "output_channels": list(outputs) if form.outputs > 1 else [0],
        "residual_start": [residual.start if residual else 0], "layout": [layout],
    }  # fmt: skip
    filters = sum(outputs) * form.spread**2
    kind = (image_dtype or dtype, LINEAR) if form.image else (dtype, CHANNELS_LAST)
    inputs = [Tensor(s.dims, *kind) for s in sources]
    rows_of_filter = math.prod(geometry.kernel_shape) if form.depthwise else filters
    inputs += [Tensor((rows_of_filter, sum(sizes)), dtype, LINEAR), Tensor((filters,), "float32", LINEAR)]
    inputs += [Tensor((sum(channels),), dtype, LINEAR)] * 2 if form.pre_activated else []
    added = residual.dims if residual else (batch, filters, rows, columns)
    inputs += [Tensor(added, dtype, CHANNELS_LAST)] if form.residual else []
    size = [d * form.spread if d >= 0 else -1 for d in (rows, columns)]
    results = [Tensor((batch, k, *size), dtype, CHANNELS_LAST) for k in outputs]
    return Call(form.op_type, inputs, results, attrs)


def sources_of(call: Call) -> list[Source]:
    """The sources of a call."""
    attrs: dict[str, Any] = dict(call.attrs)
    count = len(attrs["channels"])
    starts, factors = (
        list(attrs[name]) if len(attrs[name]) == count else [attrs[name][0]] * count
        for name in ("channel_starts", "upsample")
    )
    rows = zip(call.inputs, attrs["channels"], starts, factors, strict=False)
    return [Source(tuple(t.dims), c, start, factor) for t, c, start, factor in rows]


def with_logical_dims(op_type: str, inputs: Sequence[Tensor], attrs: Mapping[str, Any]) -> list[Tensor]:
    """The inputs of a node as those of its call: of a convolution's in NHWC, the images get NCHW dims."""
    if list(attrs.get("layout", ())) != [NHWC] or conv_form.form_of(op_type).image:
        return list(inputs)
    return [replace(t, dims=tuple(t.dims[i] for i in TO_NCHW)) if len(t.dims) == 4 else t for t in inputs]
