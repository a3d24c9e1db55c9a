"""ConcatConv nodes for the plugin tests: attributes, tensors and descriptions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cutefuse import kernels
from cutefuse_host import Host, Input, Raw
from cutefuse_host.abi import CDesc, dynamic_desc

CHANNELS = (64, 24, 8, 72, 16, 40, 136, 32)
FILTERS = 48
ACTIVATIONS = tuple(kernels.describe()["activations"])


def attributes(channels: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    r, s = changes.get("kernel_shape", [3, 3])
    attrs: dict[str, Any] = {
        "channels": list(channels),
        "kernel_shape": [3, 3],
        "strides": [1, 1],
        "pads": [1, 1, 1, 1],
        "dilations": [1, 1],
        "packed_sizes": [-(-c // 64) * r * s * 64 for c in channels],
        "alpha": 0.01,
        "lo": 0.0,
        "hi": 6.0,
        "channel_starts": [0],
        "upsample": [1],
        "output_channels": [0],
        "residual_start": [0],
        "layout": [0],
    }
    return attrs | changes


def inputs_of(attrs: dict[str, Any], dtype: str = "float16", dynamic: bool = True) -> list[Input]:
    """Sources, packed filter and bias of a ConcatConv node; N, H and W are dynamic unless told otherwise."""
    sources = [
        Input((-1, c, -1, -1), dtype, (1, c, 8, 8), (2, c, 40, 24), (4, c, 64, 64))
        if dynamic
        else Input((2, c, 40, 24), dtype)
        for c in attrs["channels"]
    ]
    return [*sources, Input((FILTERS, sum(attrs["packed_sizes"])), dtype), Input((FILTERS,), "float32")]


def has_layouts(op_type: str) -> bool:
    """Whether nodes of this op_type say how their images lie."""
    return any(a["name"] == "layout" for a in kernels.operator_of(op_type)["attributes"])


def in_layout(call: kernels.Call, layout: int) -> kernels.Call:
    """The call as a node of that layout has it: attribute written and, in layout 1, images NHWC."""
    if layout == 0:
        return call
    tensors = [
        [t if t.layout == kernels.LINEAR else replace(t, dims=to_node(t.dims)) for t in some]
        for some in (call.inputs, call.outputs)
    ]
    return replace(call, inputs=tensors[0], outputs=tensors[1], attrs={**call.attrs, "layout": [1]}, _keep=[])


def to_node(dims: Any) -> tuple[int, ...]:
    """NHWC sizes of NCHW ones; what is no image stays."""
    return tuple(dims[i] for i in (0, 2, 3, 1)) if len(dims) == 4 else tuple(dims)


def as_node(array: np.ndarray, layout: int) -> np.ndarray:
    """An NCHW operand as a node of that layout takes or gives it; what is no image stays."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if layout == 1 and array.ndim == 4 else array


def build(host: Host, sources: int = 2, dtype: str = "float16", activation: str = "Relu", **changes: Any) -> Any:
    attrs = attributes(CHANNELS[:sources], **changes)
    return host.build((f"CuteConcatConv{sources}{activation}", attrs), inputs_of(attrs, dtype))


def descs_of(items: list[Input], layouts: list[str]) -> list[CDesc]:
    """Static descriptions, as onShapeChange and enqueue see them."""
    return [dynamic_desc(i, layout).desc for i, layout in zip(items, layouts, strict=True)]


def good_node(dtype: str = "float16") -> tuple[dict[str, Any], list[Input], list[str]]:
    """Attributes, tensors (the output last) and layouts of a legal static CuteConcatConv2Relu."""
    attrs = attributes(CHANNELS[:2])
    pixel = "kHWC" if dtype == "float32" else "kHWC8"
    tensors = [*inputs_of(attrs, dtype, dynamic=False), Input((2, FILTERS, 40, 24), dtype)]
    return attrs, tensors, [pixel, pixel, "kLINEAR", "kLINEAR", pixel]


def create(host: Host, attrs: dict[str, Any] | None = None) -> Raw:
    fields = host.fields(host.find("CuteConcatConv2Relu"), attrs or attributes(CHANNELS[:2]))
    made = host.create("CuteConcatConv2Relu", fields)
    assert made is not None
    return made
