"""What the GPU tests and benchmarks share: device tensors in the operators' layouts, guarded and poisoned.

torch is imported inside the functions: only tests marked `gpu` need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import emulated

from cutefuse import kernels

DEVICE = "cpu" if emulated.EMULATED else "cuda"
GUARD_ELEMENTS = 512  # poisoned elements before and after every buffer
GUARD_VALUE = -1234.0
INT8_GUARD, INT8_POISON = 77, 111  # int8 has no NaN
FLOAT8, FLOAT8_NAN = "float8_e4m3fn", 0x7F  # kept as bytes: torch compares and indexes no float8


def torch_dtype(name: str) -> Any:
    import torch

    return torch.uint8 if name == FLOAT8 else getattr(torch, name)


def float8_of(x: Any) -> Any:
    """The bytes of a tensor rounded to float8 of e4m3."""
    import torch

    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def from_float8(x: Any) -> Any:
    """What such bytes are worth, in float32."""
    import torch

    return x.contiguous().view(torch.float8_e4m3fn).float()


def device_facts() -> tuple[int, int]:
    """(compute capability * 10, multiprocessors) of the current device."""
    if emulated.EMULATED:
        return emulated.device_facts()
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def synchronize() -> None:
    """Wait for all that was launched; what the emulator launched is done."""
    if not emulated.EMULATED:
        import torch

        torch.cuda.synchronize()


def new_stream() -> Any:
    """A stream beside the current one; its handle is `cuda_stream`."""
    if emulated.EMULATED:
        return emulated.Stream()
    import torch

    return torch.cuda.Stream()


def current_stream() -> int:
    """The handle of the stream on which torch works."""
    if emulated.EMULATED:
        return 0
    import torch

    return torch.cuda.current_stream().cuda_stream


def capture(launch: Callable[[int], None], stream: Any) -> Any:
    """A graph of what `launch` enqueues on the stream whose handle it is given, to `replay`."""
    if emulated.EMULATED:
        return emulated.Graph(launch, stream)
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch(stream.cuda_stream)
    return graph


def poison(dtype: str) -> float:
    """What a buffer holds before anyone wrote to it."""
    return {"int8": INT8_POISON, FLOAT8: FLOAT8_NAN}.get(dtype, float("nan"))


@dataclass
class Buffer:
    """A device buffer of `elements` between two guards; `view` is the payload, flat."""

    storage: Any
    view: Any

    @classmethod
    def of(cls, elements: int, dtype: str, fill: float) -> Buffer:
        import torch

        guard = INT8_GUARD if dtype in ("int8", FLOAT8) else GUARD_VALUE
        storage = torch.full((elements + 2 * GUARD_ELEMENTS,), guard, dtype=torch_dtype(dtype), device=DEVICE)
        view = storage[GUARD_ELEMENTS : GUARD_ELEMENTS + elements]
        view.fill_(fill)
        buffer = cls(storage, view)
        if emulated.EMULATED:
            emulated.allow(buffer, view)
        return buffer

    def guards_intact(self) -> Any:
        """One boolean, still on the device: who asks for many of them waits for it once."""
        guard = GUARD_VALUE if self.storage.is_floating_point() else INT8_GUARD
        intact = self.storage == guard
        intact[GUARD_ELEMENTS : GUARD_ELEMENTS + self.view.numel()] = True
        return intact.all()


def padded(channels: int, dtype: str, dense: bool = False) -> int:
    """Elements of a pixel that holds so many channels: kHWC8 for 16-bit types, kHWC16 for 8-bit ones, kHWC for float32;
    `dense`, the channels alone."""
    step = 1 if dense else {"float32": 1, "int8": 16, FLOAT8: 16}.get(dtype, 8)
    return -(-channels // step) * step


def to_channel_range(
    x: Any, dtype: str, start: int = 0, tail: int = 0, dense: bool = False
) -> tuple[Buffer, kernels.Tensor]:
    """An NCHW torch tensor as channels [start, start + C) of a guarded channels-last operand with `tail` more; those,
    and pad lanes, hold NaN. The operand is the wide tensor."""
    n, c, h, w = x.shape
    wide = start + c + tail
    ld = padded(wide, dtype, dense)
    buffer = Buffer.of(n * h * w * ld, dtype, poison(dtype))
    buffer.view.view(n, h, w, ld)[..., start : start + c] = x.permute(0, 2, 3, 1)
    return buffer, kernels.Tensor((n, wide, h, w), dtype, kernels.CHANNELS_LAST, buffer.view.data_ptr())


def to_channels_last(x: Any, dtype: str) -> tuple[Buffer, kernels.Tensor]:
    """An NCHW torch tensor as a guarded channels-last operand whose pad lanes hold NaN."""
    return to_channel_range(x, dtype)


def empty_channels_last(
    shape: tuple[int, int, int, int], dtype: str, dense: bool = False
) -> tuple[Buffer, kernels.Tensor]:
    """A NaN-poisoned channels-last output."""
    n, c, h, w = shape
    buffer = Buffer.of(n * h * w * padded(c, dtype, dense), dtype, poison(dtype))
    return buffer, kernels.Tensor(shape, dtype, kernels.CHANNELS_LAST, buffer.view.data_ptr())


def to_linear(x: Any, dtype: str) -> tuple[Buffer, kernels.Tensor]:
    """A torch tensor as a guarded row-major operand."""
    buffer = Buffer.of(x.numel(), dtype, poison(dtype))
    buffer.view.copy_(x.reshape(-1))
    return buffer, kernels.Tensor(tuple(x.shape), dtype, kernels.LINEAR, buffer.view.data_ptr())


def from_channels_last(
    buffer: Buffer, shape: tuple[int, int, int, int], dtype: str, dense: bool = False
) -> tuple[Any, Any]:
    """(NCHW values, pad lanes) of a channels-last output."""
    n, c, h, w = shape
    pixels = buffer.view.view(n, h, w, padded(c, dtype, dense))
    return pixels[..., :c].permute(0, 3, 1, 2), pixels[..., c:]
