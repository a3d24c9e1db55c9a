"""Problems of the int8 and float8 ConcatConv for GPU tests and benchmarks, over the shapes of `problems`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gpu
import problems

from cutefuse import kernels
from cutefuse.operators import quant_math

LAYOUTS = {"kHWC16": kernels.CHANNELS_LAST, "kCHW32": kernels.BLOCKS32}
TYPE_NUMBERS = {"float32": 1, "float16": 10, "bfloat16": 16, "int8": 1, gpu.FLOAT8: 1}
# Largest error of a sum over that of its terms. In each step of 32 float8 products the tensor cores align these and the
# sum so far with the largest of them, and keep 13 bits of each behind that one's leading bit.
INT8_SLACK, FLOAT8_STEP_SLACK = 2.0**-20, 2.0**-15
# Ids are stored in engines: a row may be added, none may change its meaning; one that goes names an heir.
SMALL_NAMES = {
    231: "s8_sm90_small_64x32", 232: "s8_sm90_small_64x64", 233: "s8_sm90_small_64x112", 234: "s8_sm90_small_128x80",
    238: "s8_sm90_small_64x80",
}  # fmt: skip
SMALL = set(SMALL_NAMES)
ON_HOPPER = set(range(201, 300))
ONE_SUM = ON_HOPPER - SMALL  # those that keep one sum of all sources
PATCHES = {211, 237, 243}
OUTPUT_SCALE = 1 / 40
STEEPEST = 1.5  # the largest slope of any activation, HardSwish's


def own_scale(source: int) -> float:
    """One of four, where sources have scales of their own; in units of the number type's."""
    return 0.5 + 0.75 * ((3 * source) % 4)


def _blocks32(shape: Sequence[int]) -> tuple[int, ...]:
    n, c, h, w = shape
    return n, -(-c // 32), h, w, 32


def empty_bytes(
    shape: tuple[int, int, int, int], layout: str, dtype: str = "int8"
) -> tuple[gpu.Buffer, kernels.Tensor]:
    """A guarded 8-bit tensor full of garbage in TensorRT's kHWC16 or kCHW32, or in dense NHWC."""
    if layout != "kCHW32":
        return gpu.empty_channels_last(shape, dtype, layout == "NHWC")
    buffer = gpu.Buffer.of(math.prod(_blocks32(shape)), "int8", gpu.INT8_POISON)
    return buffer, kernels.Tensor(shape, "int8", kernels.BLOCKS32, buffer.view.data_ptr())


def store(buffer: gpu.Buffer, x: Any, layout: str) -> None:
    """Write an NCHW tensor; pad lanes stay garbage."""
    n, c, h, w = x.shape
    if layout != "kCHW32":
        buffer.view.view(n, h, w, gpu.padded(c, "int8", layout == "NHWC"))[..., :c] = x.permute(0, 2, 3, 1)
        return
    shape = _blocks32(x.shape)
    wide = buffer.view.view(shape).permute(0, 1, 4, 2, 3).reshape(n, shape[1] * 32, h, w).clone()
    wide[:, :c] = x
    buffer.view.view(shape).copy_(wide.view(n, shape[1], 32, h, w).permute(0, 1, 3, 4, 2))


def load(buffer: gpu.Buffer, shape: tuple[int, int, int, int], layout: str) -> tuple[Any, Any]:
    """(NCHW values, pad lanes) of an int8 tensor."""
    if layout != "kCHW32":
        return gpu.from_channels_last(buffer, shape, "int8", layout == "NHWC")
    blocks = _blocks32(shape)
    wide = buffer.view.view(blocks).permute(0, 1, 4, 2, 3).reshape(shape[0], blocks[1] * 32, *shape[2:])
    return wide[:, : shape[1]], wide[:, shape[1] :]


@dataclass
class Instance:
    """A quantised problem on the device; `exact` is the same problem on the dequantised operands in float64."""

    problem: problems.Problem
    output_type: str
    layout: str
    call: kernels.Call
    buffers: list[gpu.Buffer]
    exact: problems.Instance
    w_scale: Any
    bounds: dict[float, tuple[Any, Any]] = field(default_factory=dict)
    dtype: str = "int8"
    one_scale: bool = False
    config: int = 0

    def __str__(self) -> str:
        return f"{self.problem} to {self.output_type} in {self.layout}"

    def output(self) -> tuple[Any, Any]:
        """(NCHW values, pad lanes) of the output."""
        dense = self.layout == "NHWC"
        if self.output_type == gpu.FLOAT8:
            values, lanes = gpu.from_channels_last(self.buffers[-1], self.problem.output, gpu.FLOAT8, dense)
            return gpu.from_float8(values), lanes
        if self.output_type == "int8":
            return load(self.buffers[-1], self.problem.output, self.layout)
        return gpu.from_channels_last(self.buffers[-1], self.problem.output, self.output_type, dense)

    def run(self, config: int = 0) -> None:
        """Poison the output, run one tile and wait."""
        self.config = config
        self.buffers[-1].view.fill_(gpu.poison(self.output_type))
        kernels.run(replace(self.call, config=config))
        gpu.synchronize()

    @property
    def kind(self) -> str:
        """What its errors are compared with those of."""
        return f"{self.dtype} to {self.output_type}"

    @property
    def slack(self) -> float:
        """Of a sum, over that of its terms. Of several scales, tiles of mma.sync add up few steps in float8's sums."""
        if self.dtype == "int8":
            return INT8_SLACK
        taps, whole = self.problem.R * self.problem.S, self.one_scale or self.config in ON_HOPPER
        steps = sum(-(-c // 32) for c in self.problem.C) * taps if whole else 2 * taps
        return FLOAT8_STEP_SLACK * max(steps, 16)

    @property
    def roundings(self) -> float:
        """Of an integer sum of all sources, over its filter's scale: half a product of each source of another scale,
        and what a factor of 22 bits adds to that where sums are kept as float32."""
        attrs = self.call.attrs
        scales = attrs["input_scales"] if self.dtype == "int8" and self.config in ONE_SUM else ()
        raised = attrs["sum_bound"] <= 2**22 and self.config not in PATCHES
        each = 0.5 + (attrs["sum_bound"] / 2**22 if raised else 0.0)
        return sum(each * scale for before, scale in zip(scales, scales[1:], strict=False) if scale != before)

    def error_ratio(self) -> Any:
        """Largest elementwise error over its bound, on the device; int8 counts in steps, half of one to round."""
        import torch

        kind = self.slack + self.roundings
        if kind not in self.bounds:
            truth = problems.activate(problems.convolve(self.exact, torch.float64), self.problem.activation)
            slack = self.slack * problems.convolve(self.exact, torch.float64, magnitude=True)
            slack = slack + problems.APPROXIMATE[self.problem.activation]
            slack = slack + STEEPEST * self.roundings * self.w_scale
            if self.output_type == "int8":
                steps = (truth / OUTPUT_SCALE).clamp(-128, 127)
                self.bounds[kind] = steps, slack / OUTPUT_SCALE + 0.5
            elif self.output_type == gpu.FLOAT8:  # four bits of significand, subnormals in steps of 2^-9
                steps = (truth / OUTPUT_SCALE).clamp(-448, 448)
                self.bounds[kind] = steps, slack / OUTPUT_SCALE * 1.07 + 2.0**-4 * steps.abs() + 2.0**-10
            else:
                self.bounds[kind] = truth, slack + 1.01 * problems.UNIT[self.output_type] * truth.abs()
        return problems.worst_ratio(self.output()[0], *self.bounds[kind])


def instantiate(
    problem: problems.Problem, output_type: str = "float16", layout: str = "kHWC16", one_scale: bool = False,
    seed: int = 0, dtype: str = "int8", scale_of: Sequence[int] = (), trained: bool = False,
) -> Instance:  # fmt: skip
    """Random operands, int8 ones over the whole range; source i has a scale of its own unless `one_scale`.

    `scale_of[i]`, where it is given, says which of four scales source i has. `trained`: int8 filters are distributed
    normally, with a step of their own each, as those of networks are, and their node bounds its sums, as `patch` writes
    it.
    """
    import torch

    generator = torch.Generator(gpu.DEVICE).manual_seed(seed)

    def integers(*shape: int) -> Any:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device=gpu.DEVICE, generator=generator)

    def values(*shape: int) -> Any:
        if dtype == "int8":
            return integers(*shape)
        return gpu.float8_of(torch.randn(shape, device=gpu.DEVICE, generator=generator))

    def worth(x: Any) -> Any:
        return x.double() if dtype == "int8" else gpu.from_float8(x).double()

    p, unit = problem, 0.0136 if dtype == "int8" else 1.0
    taps = sum(p.C) * p.R * p.S
    scale_of = scale_of or range(len(p.C))
    scales = [unit * (0.75 if one_scale else own_scale(i)) for i in scale_of]
    scales = torch.tensor(scales, dtype=torch.float32).tolist()
    x = [values(p.N, c, p.H, p.W) for c in p.C]
    w, bound = values(p.K, sum(p.C), p.R, p.S), 0
    if trained and dtype == "int8":
        w = torch.randn(w.shape, device=gpu.DEVICE, generator=generator)
        w = (127 * w / w.abs().amax((1, 2, 3), keepdim=True)).round().to(torch.int8)
        bound = quant_math.sum_bound(w.cpu().numpy(), p.C, scales)
    w_scale = (0.5 + torch.rand(p.K, device=gpu.DEVICE, generator=generator)) * (unit / math.sqrt(taps))
    b = torch.randn(p.K, device=gpu.DEVICE, generator=generator)
    operands = [empty_bytes((p.N, c, p.H, p.W), layout, dtype) for c in p.C]
    for (buffer, _), source in zip(operands, x, strict=True):
        store(buffer, source, layout)
    operands += [gpu.to_linear(problems.pack_filter(w, p.C), dtype)]
    operands += [gpu.to_linear(w_scale, "float32"), gpu.to_linear(b, "float32")]
    quantised = output_type == dtype
    wide = gpu.empty_channels_last(p.output, output_type, layout == "NHWC")
    output = empty_bytes(p.output, layout, dtype) if quantised else wide
    sm, sm_count = gpu.device_facts()
    call = kernels.Call(
        f"CuteQConcatConv{len(p.C)}{p.activation}{'Q' if quantised else ''}",
        [t for _, t in operands],
        [output[1]],
        {
            "channels": p.C, "kernel_shape": (p.R, p.S), "strides": p.strides, "pads": p.pads,
            "dilations": p.dilations, "packed_sizes": [-(-c // 64) * 64 * p.R * p.S for c in p.C],
            "input_scales": scales, "output_scale": OUTPUT_SCALE, "output_type": TYPE_NUMBERS[output_type],
            "alpha": problems.ALPHA, "lo": problems.LO, "hi": problems.HI, "sum_bound": bound,
            "layout": int(layout == "NHWC"),
        },
        sm=sm,
        sm_count=sm_count,
    )  # fmt: skip
    size = kernels.workspace_bytes(call)
    if size > 0:  # garbage: an operator may not expect zeros
        workspace = gpu.Buffer.of((size + 3) // 4, "float32", float("nan"))
        operands.append((workspace, None))
        call = replace(call, workspace=workspace.view.data_ptr(), workspace_bytes=size)
    real = [worth(v) * s for v, s in zip(x, scales, strict=True)]
    exact = problems.Instance(p, "float64", call, [], real, worth(w) * w_scale.double().view(-1, 1, 1, 1), b.double())
    buffers = [buffer for buffer, _ in operands] + [output[0]]
    per_filter = w_scale.double().view(1, -1, 1, 1)
    return Instance(p, output_type, layout, call, buffers, exact, per_filter, dtype=dtype, one_scale=one_scale)
