"""The int8 ConcatConv on the GPU: every tile against float64, garbage in pad lanes and outputs, guards."""

from __future__ import annotations

from dataclasses import replace

import emulated
import gpu
import gpu_checks
import problems
import pytest
import quant_problems

from cutefuse import kernels

pytestmark = pytest.mark.gpu

OUTPUTS = ("float16", "float32", "bfloat16", "int8")
DRAINS, ONE_SCALE = {12, 13, 14, 18, 19, 41}, {1, 16, 17}
ROWS = {16: 256, 18: 256, 19: 128}  # tiles over filter rows, and their outputs
HOPPER, SMALL, HALO = quant_problems.ON_HOPPER, quant_problems.SMALL, quant_problems.PATCHES


def expected_tiles(problem: problems.Problem, one_scale: bool) -> set[int]:
    """Tiles over rows: three columns of neighbouring pixels, and images so wide that a tile touches eight rows."""
    plain = problem.S == 3 and problem.strides[1] == problem.dilations[1] == 1
    wrong = {i for i, m in ROWS.items() if not plain or (m - 2) // problem.output[3] + 2 > 8}
    return (DRAINS | ONE_SCALE if one_scale or len(problem.C) == 1 else DRAINS) - wrong


def possible_on_hopper(problem: problems.Problem, output_type: str, layout: str) -> set[int]:
    """Of kHWC16 to float16, or to int8 by whole vectors; patches with a halo for several taps of a stride up to 2."""
    whole = output_type == "float16" or (output_type == "int8" and problem.K % 16 == 0)
    if gpu.device_facts()[0] != 90 or layout != "kHWC16" or not whole:
        return set()
    dilated = any(d > 1 and taps > 1 for d, taps in zip(problem.dilations, (problem.R, problem.S), strict=True))
    patches = problem.R * problem.S > 1 and max(problem.strides) <= (1 if dilated else 2)
    return HOPPER if patches else HOPPER - HALO


def check(
    problem: problems.Problem, output_type: str, layout: str, one_scale: bool, seed: int = 0, split: bool = True
) -> None:
    instance = quant_problems.instantiate(problem, output_type, layout, one_scale, seed)
    if not split:
        instance.call = replace(instance.call, workspace=0, workspace_bytes=0)
    ids = kernels.configs(instance.call)
    assert set(ids) - HOPPER == expected_tiles(problem, one_scale)
    possible = possible_on_hopper(problem, output_type, layout)
    assert possible & ({204, 245, 246} | SMALL) <= set(ids) & HOPPER <= possible
    gpu_checks.assert_every_tile_is_right(instance, ids)


@pytest.mark.parametrize("problem", problems.benchmark_shapes(), ids=lambda p: p.name)
def test_benchmark_shapes_match_float64(problem: problems.Problem) -> None:
    small = problems.affordable(replace(problem, N=min(problem.N, 2), H=min(problem.H, 128), W=min(problem.W, 128)))
    check(small, "float16", "kHWC16", one_scale=True)
    check(small, "int8", "kCHW32", one_scale=False)


@pytest.mark.parametrize("output_type", OUTPUTS)
@pytest.mark.parametrize("layout", quant_problems.LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_random_problems_match_float64(seed: int, layout: str, output_type: str) -> None:
    for i, problem in enumerate(problems.random_problems(16, 40 + seed)):
        check(problem, output_type, layout, one_scale=i % 2 == 0, seed=i, split=i % 3 != 0)


Problem = problems.Problem
ROW_PROBLEMS = {
    "20 columns": Problem(1, 20, 20, (64, 64), 64, 3, 3, pads=(1, 1, 1, 1)),
    "19 columns, tails": Problem(2, 9, 19, (64, 32), 40, 3, 3, pads=(1, 1, 1, 1), activation="Relu"),
    "three images in a tile": Problem(3, 3, 42, (80, 48, 20), 200, 3, 3, pads=(0, 1, 2, 1)),
    "odd width, four sources": Problem(1, 33, 37, (48, 96, 192, 16), 136, 3, 3, pads=(1, 1, 1, 1), activation="Silu"),
    "two rows, wide pads": Problem(2, 16, 129, (16, 130), 72, 2, 3, pads=(1, 2, 0, 0)),
    "five rows": Problem(1, 7, 300, (64,), 64, 5, 3, pads=(2, 1, 2, 1)),
    "stride of rows": Problem(1, 31, 41, (128, 64), 130, 3, 3, strides=(2, 1), pads=(1, 1, 1, 1)),
    "dilated rows": Problem(1, 31, 41, (96, 33), 96, 3, 3, dilations=(2, 1), pads=(2, 1, 2, 1), activation="Tanh"),
    "no pads": Problem(2, 12, 50, (40, 72), 19, 3, 3, activation="Clip"),
    "one row of taps": Problem(1, 30, 60, (128,), 65, 1, 3, pads=(0, 1, 0, 1)),
    "eight sources": Problem(4, 12, 64, (8, 8, 8, 8, 8, 8, 8, 8), 33, 3, 3, pads=(1, 1, 1, 1), activation="Sigmoid"),
    "split": Problem(1, 8, 22, (112, 320), 96, 3, 3, pads=(1, 1, 1, 1)),
    "too narrow": Problem(2, 40, 12, (64,), 40, 3, 3, pads=(1, 1, 1, 1)),
    "dilated columns": Problem(1, 20, 60, (64,), 40, 3, 3, dilations=(1, 2), pads=(1, 2, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_PROBLEMS)
def test_tiles_over_filter_rows_match_float64(name: str) -> None:
    problem = ROW_PROBLEMS[name]
    if problems.SANITIZED:  # these are about widths
        problem = replace(problems.affordable(problem), H=min(problem.H, 9), W=problem.W)
    for i, layout in enumerate(quant_problems.LAYOUTS):
        for one_scale in (True, False):
            seed = i + 2 * one_scale + len(name)
            check(problem, OUTPUTS[seed % 4], layout, one_scale, seed, split=seed % 3 != 0)


HOPPER_PROBLEMS = {
    "several tiles of a block, filters beside a tile": Problem(9, 61, 67, (48, 130, 16), 328, 1, 1, activation="Silu"),
    "halo, several tiles of a block": Problem(5, 61, 67, (64, 80, 20), 144, 3, 3, pads=(1, 1, 1, 1)),
    "halo, few filters": Problem(7, 95, 71, (96, 64), 48, 3, 3, pads=(1, 1, 1, 1), activation="Relu"),
    "strides": Problem(2, 47, 93, (33, 65), 176, 3, 3, strides=(2, 3), pads=(1, 0, 2, 1), activation="Sigmoid"),
    "dilations, asymmetric pads": Problem(2, 31, 45, (64, 24), 80, 3, 2, dilations=(2, 3), pads=(0, 3, 2, 1)),
    "1x5": Problem(1, 23, 129, (128, 128, 128), 256, 1, 5, pads=(0, 2, 0, 2), activation="HardSwish"),
    "1x1 with pads": Problem(2, 13, 29, (80,), 64, 1, 1, pads=(1, 2, 0, 1), activation="LeakyRelu"),
    "one pixel, one filter": Problem(1, 1, 1, (16, 1), 1, 1, 1),
    "filters in part of a vector": Problem(3, 17, 19, (64, 64), 37, 3, 3, pads=(1, 1, 1, 1), activation="Clip"),
    "eight sources": Problem(4, 12, 64, (8, 70, 8, 129, 8, 8, 64, 8), 160, 3, 3, pads=(1, 1, 1, 1), activation="Tanh"),
    "long sum": Problem(1, 20, 20, (512, 512), 512, 3, 3, pads=(1, 1, 1, 1), activation="Relu"),
    "a pixel beyond a patch of 14": Problem(1, 15, 15, (72,), 80, 3, 3, pads=(1, 1, 1, 1), activation="Relu"),
    "a pixel beyond a patch of 10": Problem(1, 11, 11, (72,), 80, 3, 3, pads=(1, 1, 1, 1), activation="Silu"),
}  # fmt: skip


@pytest.mark.parametrize("one_scale", [True, False], ids=["one_scale", "own_scales"])
@pytest.mark.parametrize("output_type", ["float16", "int8"])
@pytest.mark.parametrize("name", HOPPER_PROBLEMS)
def test_hopper_tiles_match_float64(name: str, output_type: str, one_scale: bool) -> None:
    check(problems.affordable(HOPPER_PROBLEMS[name]), output_type, "kHWC16", one_scale, seed=len(name))


def test_sources_of_one_scale_whose_sums_could_overflow_are_drained() -> None:
    problem = problems.Problem(1, 5, 9, (8192, 8192), 32, 3, 3, pads=(1, 1, 1, 1))
    instance = quant_problems.instantiate(problem, one_scale=True)
    ids = kernels.configs(instance.call)
    assert not set(ids) & (ONE_SCALE | quant_problems.ONE_SUM)
    gpu_checks.assert_every_tile_is_right(instance, ids)


@pytest.mark.parametrize("scales", [(2.0, 0.5, 0.25), (0.25, 2.0, 0.5)], ids=["falling", "mixed"])
@pytest.mark.parametrize("output_type", ["float32", "float16"])
def test_sums_are_exact_integers_where_scales_are_powers_of_two(output_type: str, scales: tuple[float, ...]) -> None:
    """Hopper's one sum is rounded where the next source's unit is larger: by at most half of that unit."""
    import torch

    problem = problems.Problem(1, 9, 39, (48, 96, 20), 40, 3, 3, pads=(1, 1, 1, 1))
    instance = quant_problems.instantiate(problem, output_type)
    exact, before = instance.exact, instance.call.attrs["input_scales"]
    exact.x = [(x / old).round() * new for x, old, new in zip(exact.x, before, scales, strict=True)]
    exact.w = (exact.w / instance.buffers[4].view.double().view(-1, 1, 1, 1)).round() * 0.125
    exact.b.fill_(3.0)
    instance.buffers[4].view.fill_(0.125)
    instance.buffers[5].view.fill_(3.0)
    instance.call = replace(instance.call, attrs={**instance.call.attrs, "input_scales": scales})
    truth = problems.convolve(exact, torch.float64)
    for config in gpu_checks.tiles_of(instance.call):
        instance.run(config)
        y = instance.output()[0]
        if config in quant_problems.ONE_SUM and scales[1] > scales[0]:
            finite = truth.to(y.dtype).isfinite()
            error = (y.double() - truth).abs() - problems.UNIT[output_type] * truth.abs()
            assert error[finite].max() <= 0.5 * scales[1] * 0.125, f"tile {config}"
        else:
            assert torch.equal(y, truth.to(y.dtype)), f"tile {config}"


def test_graph_replay_equals_eager_for_every_tile() -> None:
    problem = problems.Problem(1, 17, 43, (64, 40), 72, 3, 3, pads=(1, 1, 1, 1))
    gpu_checks.assert_replays_equal_eager(quant_problems.instantiate(problem, one_scale=True))


@pytest.mark.parametrize("size", [64, 14])
def test_a_chain_of_launches_sees_each_result(size: int) -> None:
    """As of float16: a kernel that starts early waits for the one before."""
    problem = problems.emulable(problems.Problem(1, size, size, (64,), 64, 3, 3, pads=(1, 1, 1, 1), activation="Tanh"))
    first = quant_problems.instantiate(problem, "int8", one_scale=True)
    for config in emulated.compiled(first, kernels.configs(first.call)):
        stages = gpu_checks.chained(
            [quant_problems.instantiate(problem, "int8", one_scale=True, seed=seed) for seed in range(6)]
        )
        gpu_checks.assert_dependent_launches_wait(stages, config)


@pytest.mark.parametrize("name", ["2_sources_Relu", "odd_everything", "strided_to_int8", "odd_everything_to_int8"])
def test_the_plugin_is_right_in_both_formats(name: str) -> None:
    import numpy as np

    from cutefuse.operators.quant_concat_conv import OPERATOR
    from cutefuse_host import Host, Input, memory

    case = next(c for c in OPERATOR.cases() if c.name == name)
    call = OPERATOR.call(case, "float32")
    operands = OPERATOR.operands(call, np.random.default_rng(3))
    arrays = [v.astype(t.dtype) for v, t in zip(operands, call.inputs, strict=True)]
    (truth,) = OPERATOR.reference(call, [a.astype(np.float64) for a in arrays])
    plugin = Host().build((call.op_type, call.attrs), [Input(t.dims, t.dtype) for t in call.inputs]).check()
    assert [c["formats"][0] for c in plugin.report["combinations"]] == ["kCHW32", "kHWC16"]
    for combination in range(2):
        with memory.Session() as session:
            (y,) = plugin._bind(session, plugin.context(combination=combination), arrays).results()
        step = 1 if y.dtype == np.int8 else 1e-4  # float32 may fall on the other side of a tie
        assert y.shape == truth.shape and np.abs(y - truth).max() <= step


def test_an_empty_batch_writes_nothing() -> None:
    instance = quant_problems.instantiate(problems.Problem(0, 8, 8, (16, 16), 8))
    instance.run()
    assert instance.buffers[-1].guards_intact()


def test_a_tile_for_one_scale_is_refused_for_several() -> None:
    instance = quant_problems.instantiate(problems.Problem(1, 8, 8, (16, 16), 8))
    with pytest.raises(kernels.KernelError, match="tile 1 cannot run sources of other scales"):
        kernels.run(replace(instance.call, config=1))


def test_misaligned_pointers_are_refused() -> None:
    instance = quant_problems.instantiate(problems.Problem(1, 8, 8, (16, 16), 8))
    shifted = replace(instance.call.inputs[0], data=instance.call.inputs[0].data + 8)
    with pytest.raises(kernels.KernelError, match="aligned to 16 bytes"):
        kernels.run(replace(instance.call, inputs=[shifted, *instance.call.inputs[1:]]))
