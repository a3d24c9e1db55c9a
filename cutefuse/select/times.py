"""What a convolution and a pass over memory cost, in microseconds: the engine's own, and ours.

The constants were fitted to times taken on an H200; other GPUs are scaled by their peak rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph.numbers import ELEMENT_BYTES
from cutefuse.kernels import Call
from cutefuse.roofline.peaks import Peaks, boards, by_name, sharing

_PRECISION = {"float32": "TF32", "float16": "FP16", "bfloat16": "BF16", "int8": "INT8", "float8_e4m3fn": "FP8"}
# The board that a compute capability stands for where none is named.
_USUAL = {80: "A100 SXM4 80GB", 86: "RTX 3090", 87: "Jetson AGX Orin 64GB", 89: "RTX 4090", 90: "H200", 100: "B200",
          120: "RTX 5090"}  # fmt: skip
_NEAR = {103: "B200", 110: "Jetson AGX Orin 64GB", 121: "Jetson AGX Orin 64GB"}  # in rates, where its own are not known
_FITTED = 90
FITTED_GPU, FITTED_TO = "H200", "cuDNN 9.19 under torch.compile on an H200"

# One pass over memory: 504 Triton kernels of bias and activation in 20 networks, from 0.2 to 130 MB, within 10 %.
_KERNEL_US = 1.3  # a kernel in a CUDA graph that does nothing, and 0.2 until the next one starts
_PASS_SHARE = 1.0  # of the peak bandwidth: much of what a network passes on lies in L2
_SPILLED_SHARE, _HELD_SHARE = 0.8, 0.3  # the same of bytes beyond this share of L2, which come from memory
_L2_BYTES = 50e6
_COPY_US = 2.6  # the same of PyTorch's copy of a strided tensor, which is no Triton kernel
NORM_US = 1.5  # how much longer than a pass our norm takes inside a network: one of 4.8 MB 3.9 us, Triton's 2.4


@dataclass(frozen=True)
class Rates:
    """An engine's convolutions: implicit GEMMs in tiles of outputs x filters that share the multiprocessors."""

    start_us: float  # start, first loads, last stores, and 0.1 until the next kernel starts
    bandwidth: float  # share of the peak
    again: float  # how often a pixel that lies under nine filters' taps is read once more
    load: float  # bytes that L2 delivers to a multiprocessor in a microsecond
    least_us: float  # of a step of the reduction: the latency of its loads
    end_us: float  # storing _AREA outputs; all but the first tiles of a multiprocessor do it beside another's reduction
    split_us: float  # adding up a divided reduction, and a tenth more for each part
    pads_us: float  # of images and filters, before the kernel, and of the result, where filters are no whole _VECTOR
    vector_us: float  # how much sooner one pixel is done, as in squeeze-and-excite blocks
    block: int  # channels that are computed together; fewer take as long, down to _FEW
    few: float  # share of the bandwidth that is left where filters are fewer than a _VECTOR


# Fitted to 1,446 convolutions of 21 networks, one image and eight, under torch.compile on an H200 (cuDNN 9.19). A
# single kernel is off by 8 % (spatial) and 16 % in the mean: which of two kernels computes a 1x1 filter, cuBLAS's or
# its own, is known to cuDNN alone. The load of spatial filters was fitted again, to whole networks; the bandwidth of
# few 1x1 filters to the last layers of four networks.
POINTWISE = Rates(3.2, 1.0, 0.0, 160e3, 0.16, 0.0, 1.1, 0.0, 1.4, 16, 0.61)
SPATIAL = Rates(4.3, 0.85, 2.4, 108e3, 0.0, 1.35, 4.1, 4.7, 0.0, 32, 1.0)
_TILES = ((64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 32), (256, 64), (256, 128))
_AREA = 1 << 13
_FEW = 16  # channels
_SPLITS = (1, 2, 4, 8)
_STEP = 64  # channels of a step of the reduction
_VECTOR = 8  # filters; cuDNN pads others to them, in kernels of their own

# cuDNN's depthwise filters of nine taps, and for each million bytes of the result: the layers of calibration/data's
# depthwise_cudnn_h200.csv. Filters of more taps start later, and take longer by the root of their number.
_DEPTHWISE_START_US, _DEPTHWISE_US = 2.2, 0.85
# Those of dilated ones, a kernel of its own that passes over taps outside of the image: for each million bytes of the
# result, and for each tap inside of it. Within 3 % of DeepLabV3+'s dilations 12, 24 and 36, one image and eight, and of
# the dilated layer that was recorded before. No other filter than 3x3 was timed, and no other dilation.
_DILATED_US, _DILATED_TAP_US = 10.2, 1.98

# How much longer cuDNN takes over a ConvTranspose than over the convolution of as many products, as measured on an
# H200, 256 channels to 256 on 90x90 pixels with 2x2 filters: 18.6 us for one image, 88 for eight.
TRANSPOSED = 1.7

# On Hopper and later a kernel of ours starts while another one of ours ends (programmatic dependent launch). Behind any
# other kernel it starts when that has ended: it then takes this much longer, as 250 of 1,107 fused convolutions did.
_LATE_US = 1.2

# Our Ampere kernels on Ampere and Ada: their constants are an H200's, where mma.sync reaches this share of its peak.
_MMA_SYNC_SHARE = 0.62


@dataclass(frozen=True)
class Device:
    """The GPU whose time is predicted.

    assumed: nobody named it. others: boards that share the name it was given. spills: large passes are slower, so that
    one costs more than its two halves; where what is copied decides, they should not.
    """

    peaks: Peaks
    sm: int
    assumed: bool = True
    others: tuple[str, ...] = ()
    spills: bool = True

    @property
    def name(self) -> str:
        """Of the board, or the compute capability where another one's rates stand for those of its boards."""
        return f"compute capability {self.sm / 10}" if self.near else self.peaks.device

    @property
    def near(self) -> bool:
        """Whether no board of this compute capability is known, so that the peaks are those of another one."""
        return self.assumed and round(10 * float(self.peaks.capability)) != self.sm

    def rate(self, dtype: str) -> float:
        """Floating-point operations of one multiprocessor in a microsecond, at the peak."""
        rate = self.peaks.rate(_PRECISION.get(dtype, "FP32"))
        assert rate is not None, "every board has a rate for FP32"
        return rate * 1e6 / self.peaks.multiprocessors

    def pass_us(self, size_bytes: float) -> float:
        """Time of an elementwise kernel that reads and writes so many bytes together."""
        spilled = max(size_bytes - _HELD_SHARE * _L2_BYTES, 0.0) if self.spills else 0.0
        return _KERNEL_US + self.move_us(size_bytes) + self.move_us(spilled) * (1 / _SPILLED_SHARE - 1)

    def copy_us(self, size_bytes: float) -> float:
        """Time in which PyTorch makes a strided tensor dense, reading and writing so many bytes together."""
        return _COPY_US + self.move_us(size_bytes)

    def depthwise_us(self, size_bytes: float, taps: int, dilated_taps: float = 0.0) -> float:
        """Time of an engine's depthwise filter that makes so many bytes. dilated_taps: as in Convolution."""
        if dilated_taps:
            per_million_us = _DILATED_US + _DILATED_TAP_US * dilated_taps
            return _DEPTHWISE_START_US + per_million_us * size_bytes * 1e-6 * self.slower
        nines = taps / 9
        return _DEPTHWISE_START_US * nines + _DEPTHWISE_US * nines**0.5 * size_bytes * 1e-6 * self.slower

    @property
    def late_us(self) -> float:
        """What it costs one of our kernels that it cannot start while the one before it ends."""
        return _LATE_US if self.sm >= _FITTED else 0.0

    @property
    def slower(self) -> float:
        """How much less bandwidth it has than the GPU of the constants."""
        return device_of(_FITTED).peaks.bandwidth_gbs / self.peaks.bandwidth_gbs

    def move_us(self, size_bytes: float) -> float:
        """Time that so many bytes more cost a kernel that runs anyway."""
        return size_bytes / (_PASS_SHARE * self.peaks.bandwidth_gbs * 1e3)


def device_of(sm: int, name: str = "") -> Device:
    """The GPU of a name, or the usual one of a compute capability (times 10), at the rates of a near one where none is
    known; an H200 where neither is given.

    Of several boards that share a name it is the usual one, else the one that the driver calls so, else that of the
    shortest name. Raises CutefuseError for a name that the table of peaks has not.
    """
    named = sharing(name)
    usual = [p for p in named if p.device in _USUAL.values()]
    usual_name = (_USUAL | _NEAR).get(sm, _USUAL[_FITTED])
    peaks = by_name(name or usual_name) or min(named, key=lambda p: len(p.device), default=None)
    peaks = usual[0] if usual else peaks
    if peaks is None:
        known = ", ".join(b.device for b in boards())
        raise CutefuseError(f"the peak rates of a GPU '{name}' are not known; choose one of {known}")
    others = tuple(p.device for p in named if p.device != peaks.device)
    return Device(peaks, sm or round(10 * float(peaks.capability)), assumed=not name, others=others)


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
    depthwise: bool = False  # each filter sees one channel
    dilated_taps: float = 0.0  # of a depthwise filter with dilations: taps inside of the image, in the mean

    @property
    def output_bytes(self) -> int:
        return self.N * self.K * self.P * self.Q * ELEMENT_BYTES[self.dtype]

    @property
    def bytes_moved(self) -> int:
        """One read of the image and the filter, one write of the output."""
        seen = 1 if self.depthwise else self.C
        read = self.N * self.C * self.H * self.W + self.K * seen * self.taps
        return read * ELEMENT_BYTES[self.dtype] + self.output_bytes


def convolution_us(conv: Convolution, device: Device, rates: Rates | None = None) -> float:
    """Time of an engine's own kernel: convolution, bias and an activation that it computes inside."""
    rates = rates or (POINTWISE if conv.taps == 1 else SPATIAL)
    pixels, size = conv.N * conv.P * conv.Q, ELEMENT_BYTES[conv.dtype]
    block = rates.block if conv.C > _FEW else _FEW
    steps = math.ceil(conv.C / block) * block / _STEP * conv.taps
    best = math.inf
    for outputs, filters in _TILES:
        tiles = math.ceil(pixels / outputs) * math.ceil(conv.K / filters)
        multiply_us = 2 * outputs * filters * _STEP / device.rate(conv.dtype)
        step_us = max(multiply_us, (outputs + filters) * _STEP * size / rates.load, rates.least_us)
        for splits in _SPLITS:
            if splits > 1 and steps < 4 * splits:
                break
            rounds = math.ceil(tiles * splits / device.peaks.multiprocessors)
            end_us = rates.end_us * outputs * filters / _AREA
            adding_us = rates.split_us * (1 + 0.1 * splits) if splits > 1 else 0.0
            best = min(best, rounds * max(steps / splits, 1.0) * step_us + end_us + adding_us)
    covered = conv.taps * conv.P * conv.Q / (conv.H * conv.W)  # taps over a pixel
    again = rates.again * max(covered - 1, 0) / 8 * conv.N * conv.C * conv.H * conv.W * size
    bandwidth = rates.bandwidth * (rates.few if conv.K < _VECTOR else 1.0)
    memory_us = (conv.bytes_moved + again) / (bandwidth * device.peaks.bandwidth_gbs * 1e3)
    pads_us = rates.pads_us if conv.K % _VECTOR else 0.0
    vector_us = rates.vector_us if pixels == 1 else 0.0
    return rates.start_us + pads_us - vector_us + math.hypot(best, memory_us)


def fused_us(call: Call, device: Device, bytes_moved: float) -> float | None:
    """Time of the kernel that the library guesses to be our fastest for a call of known sizes; None without one."""
    asked = replace(call, sm=device.sm, sm_count=device.peaks.multiprocessors, _keep=[])
    tile = call.config or next(iter(kernels.configs(asked)), None)
    found = None if tile is None else kernels.predicted_us(replace(asked, config=tile, _keep=[]))
    if found is None or device.sm == _FITTED:
        return found
    depthwise = kernels.facts(call.op_type)["depthwise"]  # by no tensor core
    share, kind = (1.0, "") if depthwise else (_MMA_SYNC_SHARE, "float16")
    slower = share * device_of(_FITTED).rate(kind) / device.rate(kind)
    # A faster peak than Hopper's is tcgen05's (B200), which these kernels cannot reach.
    return max(found * max(slower, 1.0), device.pass_us(bytes_moved))
