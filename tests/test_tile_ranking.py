"""The first guess on Hopper: among the tiles within 10 % of the fastest, by times of H100s and H200s.

The float32 rows are what its tiles were made for: twice the rate of mma.sync where that limits a filter of several
taps, and the Ampere tiles wherever there is little to do or TMA cannot read the pixels. On the 17 float32 shapes that
were timed the first guess was the fastest tile.
"""

from __future__ import annotations

import collections
import csv
import functools
import math
import statistics
from dataclasses import replace
from pathlib import Path

import problems
import pytest
import quant_problems

from cutefuse import kernels
from cutefuse.graph.numbers import FLOAT8, INT8
from cutefuse.operators import conv_call, conv_math, quant_concat_conv, quant_math
from cutefuse.operators.conv_form import Form, Source

ROOT = Path(__file__).resolve().parent.parent
NEAR, NOT_RECORDED = 1.1, 1.3  # of random layers tiles within 25 % were recorded
HEAD, STAGE = (48, 96, 192, 384), (38, 19, 128)
PATCHES = {"sm90_halo_tf32_64x16x32", "sm90_halo_tf32_128x8x16"}
FLOAT32 = {  # as CASES
    "float32, 8 images": ((8, 80, 80), (128, 128), (1, 1), 128, 3, False, PATCHES),
    "float32, enlarged": ((1, 128, 128), (256, 256), (2, 1), 256, 3, False, PATCHES),
    "float32, few filters": ((1, 512, 512), (64, 64), (1, 1), 64, 3, False, {"sm90_halo_tf32_64x16x32"}),
    "float32, small image": ((1, 14, 14), (256,), (1,), 256, 3, False, {"sm80_tf32_32x64x32_w8_s4"}),
    "float32, pointwise": ((8, 80, 80), (128, 128), (1, 1), 256, 1, False, {"sm80_tf32_128x128x16_s4"}),
    "float32, odd channels": ((8, 46, 46), STAGE, (1,) * 3, 128, 7, False, {"sm80_any_tf32_64x128x32_s3"}),
}  # fmt: skip
CASES = {  # (images, height, width), channels, enlarged by, filters, taps, pre-activated, names
    "enlarged by 8, pointwise": ((1, 128, 256), HEAD, (1, 2, 4, 8), 720, 1, False, {"sm80_up_128x128x32_s4"}),
    "enlarged by 8, 3072 channels": (
        (2, 128, 128), (768,) * 4, (8, 4, 2, 1), 768, 1, False, {"sm80_up_128x128x32_s4"}),
    "enlarged by 2, 3x3": ((1, 512, 512), (64, 64), (2, 1), 64, 3, False, {"sm90_halo_64x16x32"}),
    "odd channels": (
        (1, 46, 46), STAGE, (1,) * 3, 128, 7, False,
        {"sm90_small_128x80"}),
    "odd channels, 8 images": (
        (8, 46, 46), STAGE, (1,) * 3, 128, 7, False,
        {"sm90_two_32x32x24", "sm90_halo_64x16x32"}),
    "pre-activated, 14 pixels": (
        (1, 14, 14), (256, 32, 32, 32), (1,) * 4, 128, 1, True,
        {"sm90_small_64x32", "sm90_small_64x64"}),
    "pre-activated, 7 pixels": (
        (1, 7, 7), (704, 224, 32, 32), (1,) * 4, 128, 1, True, {"sm90_small_64x32"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES | FLOAT32)
def test_the_first_guess_is_near_the_fastest(name: str) -> None:
    (images, height, width), channels, factors, filters, taps, pre, near = (CASES | FLOAT32)[name]
    enlarged = any(f > 1 for f in factors)
    sources = [
        Source((images, c, height // f, width // f), c, upsample=f) for c, f in zip(channels, factors, strict=True)
    ]
    geometry = conv_math.Geometry((taps, taps), pads=(taps // 2,) * 4)
    form = Form(len(channels), "Relu", view=enlarged, pre_activated=pre)
    dtype = "float32" if name in FLOAT32 else "float16"
    call = replace(conv_call.make_call(form, sources, [filters], geometry, dtype, {}), sm=90, sm_count=132)
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
    assert names[kernels.configs(call)[0]] in near


def living(times: dict[str, float], stem: str = "concat_conv") -> dict[str, float]:
    """Of recorded times those of tiles that the table still has."""
    return {name: us for name, us in times.items() if name in names_of(stem)}


@functools.cache
def names_of(stem: str) -> set[str]:
    return {tile["name"] for op in kernels.describe()["ops"] if op["name"] == stem for tile in op["configs"]}


def recorded() -> dict[str, dict[str, float]]:
    """Shape of a benchmark's set -> tile -> microseconds of an H200, 2026-11-27: conv_shapes from memory, small maps
    out of the L2 cache, every tile in one run (tests/recorded/tiles_h200.csv)."""
    times: dict[str, dict[str, float]] = collections.defaultdict(dict)
    with (ROOT / "tests/recorded/tiles_h200.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            times[line["shape"]][line["tile"]] = float(line["time_us"])
    return times


@pytest.mark.parametrize(
    ("name", "stem"),
    [("tiles", "concat_conv"), ("random_layers", "concat_conv"), ("tiles_8bit", "quant_concat_conv"),
     ("tiles_int8_ordered", "quant_concat_conv")],
)  # fmt: skip
def test_without_the_tiles_that_left_the_table_recorded_layers_lose_little(name: str, stem: str) -> None:
    """1 % in the geometric mean of each recorded table, and 10 % of few single layers, all of them drawn at random."""
    times: dict[tuple[str, ...], dict[str, float]] = collections.defaultdict(dict)
    with (ROOT / f"tests/recorded/{name}_h200.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            *layer, tile, us = line.values()
            times[tuple(layer)][tile] = float(us)
    losses = [min(living(own, stem).values(), default=NOT_RECORDED * best) / best
              for own in times.values() for best in [min(own.values())]]  # fmt: skip
    assert len(losses) > 40 and statistics.geometric_mean(losses) < 1.01
    assert sum(loss > NEAR for loss in losses) <= (5 if name == "random_layers" else 0)


def test_first_guesses_of_the_benchmarks_are_near_the_fastest() -> None:
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    times, far = recorded(), list[tuple[str, str]]()
    shapes = [p for name in ("conv", "latency", "single_source") for p in problems.benchmark_shapes(name)]
    for problem in shapes:
        n, h, w = problem.N, problem.H, problem.W
        geometry = conv_math.Geometry((problem.R, problem.S), problem.strides, problem.pads, problem.dilations)
        form = Form(len(problem.C), problem.activation)
        call = conv_call.make_call(
            form, [Source((n, c, h, w), c) for c in problem.C], [problem.K], geometry, "float16", {}
        )
        call = replace(call, sm=90, sm_count=132)
        names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
        legal = [names[tile] for tile in kernels.configs(call)]
        own = living(times[problem.name])
        assert set(legal) == set(own)
        if own[legal[0]] > NEAR * min(own.values()):
            far.append((problem.name, legal[0]))
    assert len(far) <= 0.05 * len(shapes), far


def test_first_guesses_of_random_layers_are_near_the_fastest() -> None:
    """150 convolutions whose sizes were drawn, in float16, out of the L2 cache of an H200, 2026-11-27; every tile was
    timed in one run, and those within 25 % of the fastest were kept (tests/recorded/random_layers_h200.csv)."""
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    times: dict[tuple[str, ...], dict[str, float]] = collections.defaultdict(dict)
    with (ROOT / "tests/recorded/random_layers_h200.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            times[tuple(line.values())[:-2]][line["tile"]] = float(line["time_us"])
    far = []
    for layer, known in times.items():
        n, h, w, k, r, s, stride = (int(layer[i]) for i in (0, 1, 2, 4, 5, 6, 7))
        sources = [Source((n, int(c), h, w), int(c)) for c in layer[3].split("+")]
        geometry = conv_math.Geometry((r, s), (stride, stride), (r // 2, s // 2, r // 2, s // 2))
        form = Form(len(sources), {"none": "", "relu": "Relu", "silu": "Silu"}[layer[8]])
        call = replace(conv_call.make_call(form, sources, [k], geometry, "float16", {}), sm=90, sm_count=132)
        names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
        first, known = names[kernels.configs(call)[0]], living(known)
        if known and known.get(first, math.inf) > NEAR * min(known.values()):
            far.append((layer, first))
    assert len(times) == 150 and len(far) <= 9, far


def test_first_guesses_of_8_bit_shapes_are_near_the_fastest() -> None:
    """Times of an H200, 2026-11-27: conv_shapes from memory, small maps out of the L2 cache, every tile of a type and a
    set in one run (tests/recorded/tiles_8bit_h200.csv). `one`: all sources share a scale; `own`: each has its own."""
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    times: dict[tuple[str, str, str], dict[str, float]] = collections.defaultdict(dict)
    with (ROOT / "tests/recorded/tiles_8bit_h200.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            times[line["type"], line["scales"], line["shape"]][line["tile"]] = float(line["time_us"])
    known, far = {p.name: p for name in ("conv", "latency") for p in problems.benchmark_shapes(name)}, []
    for (dtype, scales, shape), own in times.items():
        p = known[shape]
        geometry = conv_math.Geometry((p.R, p.S), p.strides, p.pads, p.dilations)
        plain = quant_concat_conv.plain_of([(p.N, c, p.H, p.W) for c in p.C], p.K, geometry, p.activation, {})
        factors = [0.5 + (i if scales == "own" else 0) for i in range(len(p.C))]
        call = quant_concat_conv.make_call(plain, factors, "float16", None, {n.name: n for n in (INT8, FLOAT8)}[dtype])
        call = replace(call, sm=90, sm_count=132)
        names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
        legal = [names[tile] for tile in kernels.configs(call)]
        own = living(own, "quant_concat_conv")
        assert set(legal) == set(own)
        if own[legal[0]] > NEAR * min(own.values()):
            far.append((dtype, scales, shape, legal[0]))
    assert len(times) == 172 and len(far) <= 0.05 * len(times), far


def test_first_guesses_of_int8_sources_in_order_are_near_the_fastest() -> None:
    """Times of an H200, 2026-11-28, of the same shapes with sources in the order of their scales and bounded sums, as
    `patch` writes them (tests/recorded/tiles_int8_ordered_h200.csv)."""
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    times: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
    with (ROOT / "tests/recorded/tiles_int8_ordered_h200.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            times[line["shape"], line["sum_bound"]][line["tile"]] = float(line["time_us"])
    known, far = {p.name: p for name in ("conv", "latency") for p in problems.benchmark_shapes(name)}, []
    for (shape, bound), own in times.items():
        p = known[shape]
        scales = [quant_problems.own_scale(i) for i in range(len(p.C))]
        order = quant_math.order_of(scales)
        geometry = conv_math.Geometry((p.R, p.S), p.strides, p.pads, p.dilations)
        dims = [(p.N, p.C[i], p.H, p.W) for i in order]
        plain = quant_concat_conv.plain_of(dims, p.K, geometry, p.activation, {})
        scales = [scales[i] for i in order]
        call = quant_concat_conv.make_call(plain, scales, "float16", None, INT8, int(bound))
        call = replace(call, sm=90, sm_count=132)
        names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
        first, own = names[kernels.configs(call)[0]], living(own, "quant_concat_conv")
        if own[first] > NEAR * min(own.values()):
            far.append((shape, first))
    assert len(times) == 43 and len(far) <= 2, far


@pytest.mark.parametrize("taps", [1, 3])
def test_im2col_is_slow_over_pixels_whose_stride_is_no_multiple_of_32_bytes(taps: int) -> None:
    """200 channels of float16 are 400 bytes, 208 are 416: both are four blocks. Plain matrices take no longer."""
    if reason := kernels.reject_device(90):
        pytest.skip(reason)

    def predicted_us(channels: int) -> float:
        geometry = conv_math.Geometry((taps, taps), pads=(taps // 2,) * 4)
        call = conv_call.make_call(Form(1), [Source((1, channels, 40, 40), channels)], [64], geometry, "float16", {})
        found = kernels.predicted_us(replace(call, sm=90, sm_count=132, config=158))  # small 64x104
        assert found is not None
        return found

    assert (predicted_us(200) > 1.2 * predicted_us(208)) == (taps > 1)


def test_an_ampere_tile_starts_early_only_where_its_blocks_spread_evenly() -> None:
    """52 blocks, of which two fit on a multiprocessor, would crowd onto some of 132; 13 leave enough free."""
    if reason := kernels.reject_device(90):
        pytest.skip(reason)

    def predicted_us(filters: int, sm: int) -> float:
        source = Source((1, 64, 40, 40), 64)
        call = conv_call.make_call(Form(1), [source], [filters], conv_math.Geometry((1, 1)), "float16", {})
        found = kernels.predicted_us(replace(call, sm=sm, sm_count=132, config=4))  # 128x64
        assert found is not None
        return found

    assert predicted_us(256, 90) - predicted_us(64, 90) == pytest.approx(2.3 - 1.2)
    assert predicted_us(256, 80) == predicted_us(64, 80), "code for 8.0 cannot wait"


def test_an_ampere_tile_takes_longer_over_sources_whose_last_k_tile_is_nearly_empty() -> None:
    """80 channels are one and a quarter of a k-tile, and take more than half as long again as one."""
    if reason := kernels.reject_device(90):
        pytest.skip(reason)

    def predicted_us(channels: int) -> float:
        geometry = conv_math.Geometry((5, 5), pads=(2,) * 4)
        sources = [Source((4, channels, 26, 26), channels)] * 4
        call = conv_call.make_call(Form(4), sources, [64], geometry, "float16", {})
        call = replace(call, sm=90, sm_count=132, config=43, workspace_bytes=0)  # 128x64x64_w8
        return kernels.predicted_us(call) or 0.0

    whole, over = predicted_us(64), predicted_us(80)
    assert 1.7 * whole > over > 1.4 * whole > 0
