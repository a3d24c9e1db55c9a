"""What a convolution and a pass over memory cost, in microseconds: the engine's own, and ours.

The constants were fitted to times taken on an H200; other GPUs are scaled by their peak rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.kernels import Call
from cutefuse.roofline.peaks import Peaks, boards, by_name

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int32": 4, "int64": 8, "float64": 8, "bool": 1}
_PRECISION = {"float32": "TF32", "float16": "FP16", "bfloat16": "BF16", "int8": "INT8"}
# The board that a compute capability stands for where none is named.
_USUAL = {80: "A100 SXM4 80GB", 86: "RTX 3090", 87: "Jetson AGX Orin 64GB", 89: "RTX 4090", 90: "H200", 100: "B200",
          120: "RTX 5090"}  # fmt: skip
_FITTED = 90

# One pass over memory.
_KERNEL_US = 1.3  # a kernel in a CUDA graph that does nothing
_PASS_SHARE = 0.8  # of the peak bandwidth, reading and writing a tensor

# The engines' own convolutions: implicit GEMMs in tiles of outputs x filters that share the multiprocessors. Fitted to
# cuDNN 9.19 on an H200: 21 shapes of docs/measured.md, the sum over the Conv+SiLU of a YOLOv8s, 33 small 1x1 and 3x3.
_START_US = 2.2  # start, first loads, last stores
_CONVOLUTION_SHARE = 0.92  # of the peak bandwidth
_TILES = ((64, 64), (64, 128), (128, 128), (256, 64), (128, 256), (256, 128))
_TILE_SHARES = ((1 << 15, 0.83), (1 << 14, 0.53), (0, 0.21))  # outputs of a tile -> share of the peak rate it reaches
_SPLIT_US = 2.8  # adding up a divided reduction, and a tenth more for each part
_SPLITS = (1, 2, 4, 8)
_STEP = 64  # channels of a step of the reduction

# Our Ampere kernels on the Ampere and Ada parts: their constants are an H200's, where mma.sync reaches this share of
# the peak rate that wgmma has.
_MMA_SYNC_SHARE = 0.62


@dataclass(frozen=True)
class Device:
    """The GPU whose time is predicted; `assumed`: nobody named it."""

    peaks: Peaks
    sm: int
    assumed: bool = True

    @property
    def name(self) -> str:
        return self.peaks.device

    def rate(self, dtype: str) -> float:
        """Floating-point operations of one multiprocessor in a microsecond, at the peak."""
        rate = self.peaks.rate(_PRECISION.get(dtype, "FP32"))
        assert rate is not None, "every board has a rate for FP32"
        return rate * 1e6 / self.peaks.multiprocessors

    def pass_us(self, size_bytes: float) -> float:
        """Time of an elementwise kernel that reads and writes so many bytes together."""
        return _KERNEL_US + self.move_us(size_bytes)

    def move_us(self, size_bytes: float) -> float:
        """Time that so many bytes more cost a kernel that runs anyway."""
        return size_bytes / (_PASS_SHARE * self.peaks.bandwidth_gbs * 1e3)


def device_of(sm: int, name: str = "") -> Device:
    """The GPU of a name, or the usual one of a compute capability (times 10); an H200 where neither is given.

    Raises CutefuseError for a name that the table of peaks has not.
    """
    peaks = by_name(name or _USUAL.get(sm, _USUAL[_FITTED]))
    if peaks is None:
        known = ", ".join(b.device for b in boards())
        raise CutefuseError(f"the peak rates of a GPU '{name}' are not known; choose one of {known}")
    return Device(peaks, sm or round(10 * float(peaks.capability)), assumed=not name)


@dataclass(frozen=True)
class Convolution:
    """An image [N, C, H, W] and a filter [K, C, R, S] with the output size P x Q, types and bytes as stored."""

    N: int
    C: int
    H: int
    W: int
    K: int
    P: int
    Q: int
    taps: int  # R * S
    dtype: str

    @property
    def output_bytes(self) -> int:
        return self.N * self.K * self.P * self.Q * ELEMENT_BYTES[self.dtype]

    @property
    def bytes_moved(self) -> int:
        """One read of the image and the filter, one write of the output."""
        read = self.N * self.C * self.H * self.W + self.K * self.C * self.taps
        return read * ELEMENT_BYTES[self.dtype] + self.output_bytes


def convolution_us(conv: Convolution, device: Device) -> float:
    """Time of an engine's own kernel: convolution, bias and an activation that it computes inside."""
    pixels = conv.N * conv.P * conv.Q
    steps = math.ceil(conv.C / _STEP) * conv.taps
    best = math.inf
    for outputs, filters in _TILES:
        tiles = math.ceil(pixels / outputs) * math.ceil(conv.K / filters)
        share = next(share for least, share in _TILE_SHARES if outputs * filters >= least)
        step_us = 2 * outputs * filters * _STEP / (device.rate(conv.dtype) * share)
        for splits in _SPLITS:
            if splits > 1 and steps < 4 * splits:
                break
            rounds = math.ceil(tiles * splits / device.peaks.multiprocessors)
            adding_us = _SPLIT_US * (1 + 0.1 * splits) if splits > 1 else 0.0
            best = min(best, rounds * math.ceil(steps / splits) * step_us + adding_us)
    memory_us = conv.bytes_moved / (_CONVOLUTION_SHARE * device.peaks.bandwidth_gbs * 1e3)
    return _START_US + math.hypot(best, memory_us)  # the two overlap, but not completely


def fused_us(call: Call, device: Device, bytes_moved: float) -> float | None:
    """Time of our kernel's first guess for a call of known sizes; None where the library predicts none."""
    asked = replace(call, sm=device.sm, sm_count=device.peaks.multiprocessors, _keep=[])
    found = kernels.predicted_us(asked)
    if found is None or device.sm == _FITTED:
        return found
    slower = _MMA_SYNC_SHARE * device_of(_FITTED).rate("float16") / device.rate("float16")
    return max(found * slower, _START_US + bytes_moved / (_CONVOLUTION_SHARE * device.peaks.bandwidth_gbs * 1e3))
