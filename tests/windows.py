"""Pools and linear Resizes as calls of the operator `window`, and what they should compute, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gpu
from gpu import Buffer, device_facts, empty_channels_last, to_channel_range

from cutefuse import kernels

MAX, MEAN, LINEAR = 0, 1, 2


@dataclass(frozen=True)
class Window:
    """`channels`: of each source. `size`: N, H, W. `out`: P, Q; None: as many windows as fit into the padded image."""

    mode: int
    channels: tuple[int, ...]
    size: tuple[int, int, int]
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    counts_pads: bool = False
    out: tuple[int, int] | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    offsets: tuple[float, float] = (0.0, 0.0)

    @property
    def sizes(self) -> tuple[int, int]:
        if self.out is not None:
            return self.out
        padded = [n + self.pads[i] + self.pads[i + 2] for i, n in enumerate(self.size[1:])]
        extent = [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]
        p, q = ((n - e) // s + 1 for n, e, s in zip(padded, extent, self.strides, strict=True))
        return p, q

    @property
    def attrs(self) -> dict[str, Any]:
        return {
            "mode": [self.mode], "kernel_shape": list(self.kernel), "strides": list(self.strides),
            "pads": list(self.pads), "dilations": list(self.dilations), "count_include_pad": [int(self.counts_pads)],
            "scales": list(self.scales), "offsets": list(self.offsets),
        }  # fmt: skip

    def call(self, dtype: str, sm: int = 0, sm_count: int = 0) -> kernels.Call:
        n, h, w = self.size
        inputs = [kernels.Tensor((n, c, h, w), dtype, kernels.CHANNELS_LAST) for c in self.channels]
        output = kernels.Tensor((n, sum(self.channels), *self.sizes), dtype, kernels.CHANNELS_LAST)
        op_type = f"CuteWindow{len(self.channels)}"
        return kernels.Call(op_type, inputs, [output], self.attrs, sm=sm, sm_count=sm_count)


def reference(window: Window, x: Any) -> Any:
    """The outputs over x, the concatenation in float64, tap by tap."""
    import torch

    if window.mode == LINEAR:
        for axis in (0, 1):
            size = x.shape[2 + axis]
            places = torch.arange(window.sizes[axis], dtype=torch.float64, device=x.device)
            places = (places * window.scales[axis] + window.offsets[axis]).clamp(0, size - 1)
            first = places.floor().long()
            weight = (places - first).reshape([-1, 1] if axis == 0 else [-1])
            second = (first + 1).clamp(max=size - 1)
            x = x.index_select(2 + axis, first) * (1 - weight) + x.index_select(2 + axis, second) * weight
        return x
    p, q = (torch.arange(n, device=x.device) for n in window.sizes)
    total = torch.full((*x.shape[:2], *window.sizes), float("-inf") if window.mode == MAX else 0.0, dtype=x.dtype,
                       device=x.device)  # fmt: skip
    count = torch.zeros(window.sizes, dtype=x.dtype, device=x.device)
    height, width = x.shape[2:]
    for r in range(window.kernel[0]):
        for s in range(window.kernel[1]):
            h = p * window.strides[0] - window.pads[0] + r * window.dilations[0]
            w = q * window.strides[1] - window.pads[1] + s * window.dilations[1]
            inside = ((h >= 0) & (h < height))[:, None] & ((w >= 0) & (w < width))
            tap = x[:, :, h.clamp(0, height - 1)][..., w.clamp(0, width - 1)]
            if window.mode == MAX:
                total = torch.where(inside, torch.maximum(total, tap), total)
                continue
            total = total + torch.where(inside, tap, 0.0)
            if window.counts_pads:
                rows = (h >= -window.pads[0]) & (h < height + window.pads[2])
                count += rows[:, None] & (w >= -window.pads[1]) & (w < width + window.pads[3])
            else:
                count += inside
    return total if window.mode == MAX else total / count


@dataclass
class Instance:
    """A window over random sources on the device, between guards; outputs hold NaN before a run. Sources lie in wider
    pixels, whose other channels hold NaN."""

    window: Window
    dtype: str
    x: Any  # the concatenation in float64
    call: kernels.Call
    buffers: list[Buffer]  # the output's last

    @classmethod
    def of(cls, window: Window, dtype: str, wider: bool = True, x: Any = None) -> Instance:
        import torch

        n, h, w = window.size
        device = gpu.DEVICE
        given = torch.randn(n, sum(window.channels), h, w, dtype=torch.float64) if x is None else x
        given = given.to(getattr(torch, dtype)).double().to(device)
        call = window.call(dtype, *device_facts())
        vector = 4 if dtype == "float32" else 8
        inputs, buffers = [], []
        for i, part in enumerate(given.split(window.channels, 1)):
            tail = vector * (i % 3) if wider else 0
            buffer, tensor = to_channel_range(part, dtype, 0, tail)
            inputs.append(replace(tensor, dims=tuple(part.shape), ld=part.shape[1] + tail))
            buffers.append(buffer)
        buffer, output = empty_channels_last(call.outputs[0].dims, dtype)
        call = replace(call, inputs=inputs, outputs=[output], _keep=[])
        return cls(window, dtype, given, call, [*buffers, buffer])

    def run(self) -> Any:
        """The outputs in float64."""
        self.buffers[-1].view.fill_(float("nan"))
        kernels.run(replace(self.call, _keep=[]))
        n, c, p, q = self.call.outputs[0].dims
        return self.buffers[-1].view.view(n, p, q, c).permute(0, 3, 1, 2).double()
