"""Problems of ConcatConv for GPU tests and benchmarks: built on the device, checked against float64."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import emulated
import gpu

from cutefuse import kernels

ACTIVATIONS = tuple(kernels.describe()["activations"])
ALPHA, LO, HI = 0.1, -0.5, 0.75
# Unit roundoff of the stored type, and of the products: tf32 keeps 10 bits of each factor, rounded to nearest in the
# registers of mma.sync and by TMA for wgmma, so that two factors lose 2 * 2^-11 of their product.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
# Under compute-sanitizer (see scripts/sanitize.sh) and under the emulator every access takes long.
SANITIZED = "CUTEFUSE_SANITIZED" in os.environ or emulated.EMULATED
# What an activation by fast exponentials is off; GELU is that of a fitted polynomial (calibration/gelu.py).
APPROXIMATE = dict.fromkeys(ACTIVATIONS, 1e-6) | {"Gelu": 4e-6}
SUM_UNIT = {"float16": 2.0**-20, "bfloat16": 2.0**-20, "float32": 2.0**-10}


@dataclass(frozen=True)
class Problem:
    """N H W, channels of each source, K R S, and the convolution's attributes; `activation` is a suffix of op_type.

    H and W are those of the concatenation. A view's source i has H / upsample[i] rows and lies in a tensor with
    `starts[i]` channels before it and `tail` after it, its residual in one with `residual_start` channels before it and
    `tail` after it. `residual` is "", "before" or "after" the activation. `dense`: pixels hold no padding (layout 1).
    `image`: the type of the source as a network is given it, "own" for the filter's, in NCHW, or behind "pixels of" in
    dense pixels; `common`: its filter is packed as that of any other source. `depthwise`: filter k reads channel k of
    the sources alone. `spread`: the K filters of a pixel make the channels of so many rows and columns of pixels.
    """

    N: int
    H: int
    W: int
    C: tuple[int, ...]
    K: int
    R: int = 1
    S: int = 1
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    activation: str = ""
    name: str = ""
    starts: tuple[int, ...] = ()
    upsample: tuple[int, ...] = ()
    tail: int = 0
    residual: str = ""
    outputs: tuple[int, ...] = ()
    pre_activated: bool = False
    dense: bool = False
    residual_start: int = 0
    image: str = ""
    depthwise: bool = False
    common: bool = False
    spread: int = 1

    @property
    def op_type(self) -> str:
        """Cute[View|Pre|Image|Depthwise|Spread<s>]ConcatConv<n>[x<m>] and the activation with a residual beside it."""
        forms = {"View": self.is_view, "Pre": self.pre_activated, "Image": self.image, "Depthwise": self.depthwise,
                 f"Spread{self.spread}": self.spread > 1}  # fmt: skip
        form = next((name for name, holds in forms.items() if holds), "")
        several = f"x{len(self.outputs)}" if self.outputs else ""
        before, after = ("Add" if self.residual == r else "" for r in ("before", "after"))
        return f"Cute{form}ConcatConv{len(self.C)}{several}{before}{self.activation}{after}"

    @property
    def is_view(self) -> bool:
        return bool(self.starts or self.upsample or self.residual_start)

    @property
    def output(self) -> tuple[int, int, int, int]:
        """(N, K, P, Q); P and Q are < 1 when the filter does not fit."""
        p = (self.H + self.pads[0] + self.pads[2] - self.dilations[0] * (self.R - 1) - 1) // self.strides[0] + 1
        q = (self.W + self.pads[1] + self.pads[3] - self.dilations[1] * (self.S - 1) - 1) // self.strides[1] + 1
        return self.N, self.K, p, q

    @property
    def stored(self) -> list[tuple[int, int, int, int]]:
        """The sizes of each output; unknown ones (-1) stay so."""
        n, k, p, q = self.output
        rows, columns = (d * self.spread if size >= 0 else -1 for d, size in ((p, self.H), (q, self.W)))
        return [(n, c, rows, columns) for c in self.outputs or (k // self.spread**2,)]

    @property
    def read(self) -> int:
        """Channels that a filter reads."""
        return 1 if self.depthwise else sum(self.C)

    @property
    def columns(self) -> list[int]:
        """Of the packed filter, for each source."""
        taps = self.R * self.S
        return list(self.C) if self.depthwise else [-(-c // self.block) * self.block * taps for c in self.C]

    @property
    def block(self) -> int:
        """Channels of a block of the packed filter."""
        return -(-self.C[0] // 4) * 4 if self.image and not self.common else 64

    @property
    def flops(self) -> int:
        """Multiply-adds count as two."""
        n, k, p, q = self.output
        return 2 * n * p * q * k * self.read * self.R * self.S

    def bytes_moved(self, element_bytes: int) -> int:
        """Every source, filter and output element moved once."""
        n, k, p, q = self.output
        factors = self.upsample or (1,) * len(self.C)
        sources = sum(self.H // u * (self.W // u) * c for c, u in zip(self.C, factors, strict=True))
        pixels = n * sources + n * p * q * k * (2 if self.residual else 1)
        return element_bytes * (pixels + k * self.read * self.R * self.S) + 4 * k


def benchmark_shapes(name: str = "conv") -> list[Problem]:
    """The shapes of benchmarks/<name>_shapes.json, named after the layer of the model they come from."""
    path = Path(__file__).parent.parent / "benchmarks" / f"{name}_shapes.json"
    names = {"none": "", "relu": "Relu", "silu": "Silu", "sigmoid": "Sigmoid"}
    return [
        Problem(
            s["N"],
            s["H"],
            s["W"],
            tuple(s["C"]),
            s["K"],
            s["R"],
            s["S"],
            tuple(s["stride"]),
            tuple(s["pads"]),
            dilations=tuple(s.get("dilations", (1, 1))),
            activation=names[s["activation"]],
            name=s["name"],
            depthwise=name == "depthwise",
        )  # fmt: skip
        for s in json.loads(path.read_text())["shapes"]
    ]


def affordable(problem: Problem) -> Problem:
    """The problem itself; under compute-sanitizer just large enough for several tiles and channel blocks of every kind.

    Tails stay what they are: channels and filters lose whole multiples of 64.
    """
    if not SANITIZED:
        return problem
    p = problem
    reach_h, reach_w = p.dilations[0] * (p.R - 1) + 1, p.dilations[1] * (p.S - 1) + 1
    blocks = 1 if p.R * p.S > 1 else 2  # of 64 channels: more k-tiles than a ring has stages, with the taps
    channels = tuple(min(c, 64 * blocks + c % 64) for c in p.C)
    filters = sum(channels) if p.depthwise else p.K if p.outputs else min(p.K, 256 + p.K % 64)
    return replace(
        p, N=min(p.N, 2), H=min(p.H, max(18, reach_h)), W=min(p.W, max(17, reach_w)), C=channels, K=filters,
    )  # fmt: skip


def emulable(problem: Problem, wide: bool = False) -> Problem:
    """The problem itself; an affordable one under the emulator, or with `wide` one of few rows, each as long."""
    if not emulated.EMULATED:
        return problem
    small = affordable(problem)
    rows = min(small.H, max(9, problem.dilations[0] * (problem.R - 1) + 1))
    return replace(small, H=rows, W=problem.W) if wide else small


def random_problems(count: int, seed: int, channel_step: int = 1) -> list[Problem]:
    """Random legal problems: odd sizes, 1 to 8 sources, strides, asymmetric pads, dilations, every activation.

    Under compute-sanitizer a quarter of them, on cropped images.
    """
    count = -(-count // 4) if SANITIZED else count
    rng = random.Random(seed)
    found: list[Problem] = []
    while len(found) < count:
        sources = rng.choice([1, 2, 2, 3, 4, 8])
        problem = Problem(
            N=rng.choice([1, 1, 2, 3]),
            H=rng.randint(1, 40),
            W=rng.randint(1, 40),
            C=tuple(rng.choice([channel_step * rng.randint(1, 40), 8, 16, 64, 80, 136]) for _ in range(sources)),
            K=rng.choice([1, 8, 19, 64, 128, rng.randint(1, 300)]),
            R=rng.choice([1, 1, 2, 3, 3, 5, 7]),
            S=rng.choice([1, 1, 2, 3, 3, 5]),
            strides=(rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2])),
            pads=(rng.randint(0, 3), rng.randint(0, 3), rng.randint(0, 3), rng.randint(0, 3)),
            dilations=(rng.choice([1, 1, 2]), rng.choice([1, 1, 3])),
            activation=ACTIVATIONS[len(found) % len(ACTIVATIONS)],
        )
        problem = affordable(problem)
        if min(problem.output) >= 1:
            found.append(problem)
    return found


def pack_filter(w: Any, channels: Sequence[int], depthwise: bool = False, block: int = 64) -> Any:
    """[K, C, R, S] -> [K, columns] in the packed layout [K][source][ceil(C/block)][R][S][block], on the filter's
    device; depthwise [K, 1, R, S] -> [R * S, K]."""
    import torch.nn.functional as F
    from torch import cat

    if depthwise:
        return w.flatten(1).t().contiguous()
    parts, start = [], 0
    for c in channels:
        source = F.pad(w[:, start : start + c], (0, 0, 0, 0, 0, -c % block))
        parts.append(source.view(w.shape[0], -1, block, *w.shape[2:]).permute(0, 1, 3, 4, 2).reshape(w.shape[0], -1))
        start += c
    return cat(parts, 1).contiguous()


@dataclass
class Instance:
    """A problem with data on the device. `buffers` keep the operands alive; the last ones are the outputs.

    x: the sources as the concatenation takes them: their channels alone, enlarged.
    """

    problem: Problem
    dtype: str
    call: kernels.Call
    buffers: list[gpu.Buffer]
    x: list[Any]
    w: Any
    b: Any
    truth: tuple[Any, Any] | None = None
    z: Any = None
    vectors: tuple[Any, Any] | None = None  # scale and shift of a pre-activation

    def __str__(self) -> str:
        return f"{self.problem} in {self.dtype}"

    def output(self) -> tuple[Any, Any]:
        """(NCHW values, pad lanes) of the output; several outputs are joined along the channels."""
        from torch import cat

        sizes = self.problem.stored
        parts = [
            gpu.from_channels_last(buffer, dims, self.dtype, self.problem.dense)
            for buffer, dims in zip(self.buffers[-len(sizes) :], sizes, strict=True)
        ]
        return parts[0] if len(parts) == 1 else (cat([v for v, _ in parts], 1), cat([pad for _, pad in parts], -1))

    @property
    def kind(self) -> str:
        """What its errors are compared with those of."""
        return self.dtype

    def error_ratio(self) -> Any:
        """Largest elementwise error over its bound, on the device."""
        return worst_ratio(self.output()[0], *reference(self))

    def run(self, config: int = 0) -> None:
        """Poison the output with NaN, run one tile and wait."""
        for buffer in self.buffers[-len(self.call.outputs) :]:
            buffer.view.fill_(float("nan"))
        kernels.run(replace(self.call, config=config))
        gpu.synchronize()


def instantiate(problem: Problem, dtype: str, seed: int = 0) -> Instance:
    """Random operands of unit variance (the filter scaled to keep the output near it), pad lanes NaN."""
    import torch

    generator = torch.Generator(gpu.DEVICE).manual_seed(seed)
    kind = gpu.torch_dtype(dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device=gpu.DEVICE, generator=generator)

    p = problem
    factors, starts = p.upsample or (1,) * len(p.C), p.starts or (0,) * len(p.C)
    x = [normal(p.N, c, p.H // u, p.W // u).to(kind) for c, u in zip(p.C, factors, strict=True)]
    w = (normal(p.K, p.read, p.R, p.S) / math.sqrt(p.read * p.R * p.S)).to(kind)
    b = normal(p.K)
    operands = [gpu.to_channel_range(t, dtype, start, p.tail, p.dense) for t, start in zip(x, starts, strict=True)]
    if p.image:
        own, in_pixels = p.image.endswith("own"), p.image.startswith("pixels of ")
        given = dtype if own else "float32"
        image = x[0] if own else x[0].float() + normal(*x[0].shape) * x[0].float().abs() * UNIT[dtype] / 8
        laid = gpu.to_channel_range(image, given, 0, 0, True) if in_pixels else gpu.to_linear(image, given)
        x, operands = [image.to(kind)], [laid]
    operands += [gpu.to_linear(pack_filter(w, p.C, p.depthwise, p.block), dtype), gpu.to_linear(b, "float32")]
    vectors = (normal(sum(p.C)).to(kind), normal(sum(p.C)).to(kind)) if p.pre_activated else None
    operands += [gpu.to_linear(v, dtype) for v in vectors or ()]
    z = normal(*p.output).to(kind) if p.residual else None
    beside = (p.residual_start, p.tail if p.residual_start else 0)
    operands += [gpu.to_channel_range(z, dtype, *beside, p.dense)] if p.residual else []
    outputs = [gpu.empty_channels_last(dims, dtype, p.dense) for dims in p.stored]
    sm, sm_count = gpu.device_facts()
    attrs = {
        "channels": p.C, "kernel_shape": (p.R, p.S), "strides": p.strides, "pads": p.pads,
        "dilations": p.dilations, "packed_sizes": p.columns,
        "alpha": ALPHA, "lo": LO, "hi": HI, "output_channels": p.outputs or (0,), "layout": int(p.dense),
    }  # fmt: skip
    if p.is_view:
        attrs |= {"channel_starts": starts, "upsample": factors, "residual_start": p.residual_start}
    inputs = [t for _, t in operands]
    call = kernels.Call(p.op_type, inputs, [t for _, t in outputs], attrs, sm=sm, sm_count=sm_count)
    size = kernels.workspace_bytes(call)
    if size > 0:  # garbage: an operator may not expect zeros
        workspace = gpu.Buffer.of((size + 3) // 4, "float32", float("nan"))
        operands.append((workspace, None))
        call = replace(call, workspace=workspace.view.data_ptr(), workspace_bytes=size)
    buffers = [buffer for buffer, _ in (*operands, *outputs)]
    enlarged = [t.repeat_interleave(u, 2).repeat_interleave(u, 3) for t, u in zip(x, factors, strict=True)]
    return Instance(problem, dtype, call, buffers, enlarged, w, b, z=z, vectors=vectors)


def activate(y: Any, suffix: str) -> Any:
    """The activation of an op_type's suffix in the type of y."""
    import torch
    import torch.nn.functional as F

    functions = {
        "": lambda v: v, "Relu": F.relu, "LeakyRelu": lambda v: F.leaky_relu(v, ALPHA), "Silu": F.silu,
        "Clip": lambda v: v.clamp(LO, HI), "HardSwish": F.hardswish, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh,
        "Gelu": F.gelu,
    }  # fmt: skip
    return functions[suffix](y)


def convolve(instance: Instance, kind: Any, magnitude: bool = False) -> Any:
    """conv2d(concat(x), w) + b in the given torch type; with `magnitude` the sum of absolute values instead.

    One matrix product per filter tap: cuDNN's float64 convolutions take minutes where these take milliseconds.
    """
    import torch.nn.functional as F
    from torch import cat

    p = instance.problem
    n, k, rows, columns = p.output
    # Under compute-sanitizer on the CPU: initcheck would follow these products access by access.
    device = instance.w.device
    x, w, b = ((v.cpu() if SANITIZED else v).to(kind) for v in (cat(instance.x, 1), instance.w, instance.b))
    if instance.vectors:
        scale, shift = (v.to(x.device, kind).view(1, -1, 1, 1) for v in instance.vectors)
        x = (x * scale + shift).relu()
    if magnitude:
        x, w, b = x.abs(), w.abs(), b.abs()
    x = F.pad(x, (p.pads[1], p.pads[3], p.pads[0], p.pads[2]))
    y = b.view(1, k, 1).expand(n, k, rows * columns).clone()
    for r in range(p.R):
        for s in range(p.S):
            top, left = r * p.dilations[0], s * p.dilations[1]
            bottom, right = top + (rows - 1) * p.strides[0] + 1, left + (columns - 1) * p.strides[1] + 1
            window = x[:, :, top : bottom : p.strides[0], left : right : p.strides[1]]
            window = window.reshape(n, x.shape[1], rows * columns)
            y += w[:, :, r, s] * window if p.depthwise else w[:, :, r, s] @ window
    return y.view(n, k, rows, columns).to(device)


def reference(instance: Instance) -> tuple[Any, Any]:
    """(truth, elementwise bound) in float64, computed once for all tiles.

    The bound is one rounding of the result plus the float32 (or tf32) rounding of the products and of their sum, both
    against the float64 convolution of the rounded operands; pre-activated ones are rounded once more.
    """
    import torch

    if instance.truth is None:
        sums = convolve(instance, torch.float64)
        scale = convolve(instance, torch.float64, magnitude=True)
        residual, z = instance.problem.residual, instance.z
        truth = activate(sums + z.double() if residual == "before" else sums, instance.problem.activation)
        truth, scale = (truth + z.double(), scale) if residual == "after" else (truth, scale)
        scale = scale + z.double().abs() if residual else scale
        own = SUM_UNIT[instance.dtype] + (UNIT[instance.dtype] if instance.vectors else 0.0)
        bound = 1.01 * UNIT[instance.dtype] * truth.abs() + own * scale + APPROXIMATE[instance.problem.activation]
        instance.truth = spread(truth, instance.problem), spread(bound, instance.problem)
    return instance.truth


def spread(y: Any, problem: Problem) -> Any:
    """What the filters of each pixel make, where the outputs have it: element by element, as ONNX says it of
    DepthToSpace (DCR)."""
    s, channels = problem.spread, problem.K // problem.spread**2
    if s == 1:
        return y
    placed = y.new_empty(problem.stored[0])
    for i in range(s):
        for j in range(s):
            first = (i * s + j) * channels
            placed[:, :, i::s, j::s] = y[:, first : first + channels]
    return placed


def worst_ratio(values: Any, truth: Any, bound: Any) -> Any:
    """Largest elementwise |values - truth| over its bound, on the device; infinity where nobody wrote."""
    ratio = ((values.double() - truth).abs() / bound).nan_to_num(nan=float("inf"))
    return ratio.max() if ratio.numel() else ratio.new_zeros(())
