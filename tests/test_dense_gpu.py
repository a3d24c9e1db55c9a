"""Dense NHWC pixels of any channel count on the GPU, and residuals that are channel ranges: every tile against float64,
NaN in every channel that is not the node's, guards around each buffer."""

from __future__ import annotations

import random
from dataclasses import replace

import emulated
import gpu
import gpu_checks
import problems
import pytest
import quant_problems
from problems import Problem

from cutefuse import kernels

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32")
SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}
ODD = (1, 2, 3, 4, 5, 6, 7, 9, 80, 85, 255)


def check(problem: Problem, dtype: str, seed: int = 0) -> set[int]:
    """Run every legal tile and return their ids."""
    instance = problems.instantiate(problems.affordable(problem), dtype, seed)
    ids = gpu_checks.tiles_of(instance.call)
    gpu_checks.assert_every_tile_is_right(instance, ids)
    return set(ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", ODD)
def test_sources_and_outputs_of_every_channel_count(channels: int, dtype: str) -> None:
    check(Problem(2, 13, 11, (channels,), channels, **SAME, activation="Relu", dense=True), dtype, channels)
    check(Problem(1, 9, 17, (64, channels, 24), 255, activation="Silu", dense=True), dtype, channels)
    check(Problem(2, 12, 10, (channels, 8), 19, **SAME, upsample=(2, 1), dense=True), dtype, channels)


FORMS = [
    Problem(2, 11, 13, (40, 24), 75, **SAME, activation="Silu", residual="after"),
    Problem(1, 11, 13, (5,), 85, **SAME, activation="Relu", residual="before"),
    Problem(2, 9, 8, (21, 7), 61, **SAME, outputs=(3, 16, 41, 1), activation="Silu"),
    Problem(1, 14, 14, (64,), 64, outputs=(32, 32), activation="Relu"),
    Problem(1, 10, 12, (13, 32), 40, **SAME, starts=(1, 3), tail=5, activation="Tanh"),
    Problem(1, 10, 12, (13, 32), 40, **SAME, starts=(2, 4), tail=2, upsample=(2, 1)),
    Problem(1, 20, 20, (512, 85), 33, **SAME, activation="Relu"),  # the reduction is divided
    Problem(1, 20, 20, (512,), 130, **SAME, outputs=(65, 65), activation="Relu"),
    Problem(1, 30, 33, (3,), 24, **SAME, strides=(2, 2), activation="Silu"),
    Problem(1, 30, 33, (3,), 64, 7, 7, strides=(2, 2), pads=(3, 3, 3, 3), activation="Relu"),
    Problem(1, 30, 33, (4,), 17, **SAME, strides=(2, 2), activation="Silu", starts=(3,), tail=2),
    Problem(1, 15, 9, (66, 20), 72, 1, 5, pads=(0, 4, 0, 4), dilations=(1, 2), strides=(2, 1)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(len(FORMS)))
def test_forms(index: int, dtype: str) -> None:
    check(replace(FORMS[index], dense=True), dtype, index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("residual", ["before", "after"])
@pytest.mark.parametrize("shape", [(20, 20, 64), (9, 40, 128), (64, 64, 32)])
def test_a_residual_may_be_a_range_of_a_wider_tensor(
    shape: tuple[int, int, int], residual: str, dense: bool, dtype: str
) -> None:
    h, w, k = shape
    problem = Problem(1, h, w, (64,), k, **SAME, activation="Silu", residual=residual, residual_start=16, tail=24)
    padded = check(replace(problem, dense=dense), dtype)
    assert gpu.device_facts()[0] != 90 or dtype == "float32" or any(i > 100 for i in padded)
    for start in (8, 24) if not dense else (1, 2, 4):
        check(replace(problem, dense=dense, residual_start=start, tail=7 if dense else 8), dtype, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_random_problems(seed: int, dtype: str) -> None:
    rng = random.Random(seed)
    for i, problem in enumerate(problems.random_problems(12, 70 + seed)):
        channels = tuple(rng.choice([c, *ODD]) for c in problem.C)
        views = {"starts": tuple(rng.randint(0, 9) for _ in channels), "tail": rng.randint(0, 5)}
        problem = replace(problem, C=channels, dense=True, **(views if rng.random() < 0.4 else {}))
        kind = rng.choice(["", "", "before", "outputs"])
        if kind == "outputs" and problem.K > 4:
            cut = rng.randint(1, problem.K - 1)
            problem = replace(problem, outputs=(cut, problem.K - cut))
        elif kind == "before":
            problem = replace(problem, residual=kind, residual_start=rng.choice([0, 1, 3, 8]))
        check(problem, dtype, seed=100 * seed + i)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_vectors_run_the_tiles_of_padded_pixels(dtype: str) -> None:
    for problem in (
        Problem(1, 20, 20, (64, 32), 128, **SAME),
        Problem(1, 8, 8, (8,), 8),
        Problem(1, 40, 40, (256,), 24),
    ):
        ids = [kernels.configs(problems.instantiate(replace(problem, dense=d), dtype).call) for d in (False, True)]
        assert ids[0] == ids[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_replays_and_chains_of_launches(dtype: str) -> None:
    shape = problems.emulable(Problem(1, 30, 30, (21,), 21, **SAME, activation="Tanh", residual="after", dense=True))
    first = problems.instantiate(shape, dtype)
    gpu_checks.assert_replays_equal_eager(first)
    for config in emulated.compiled(first, kernels.configs(first.call)):
        stages = [problems.instantiate(shape, dtype, seed) for seed in range(4)]
        for previous, stage in zip(stages, stages[1:], strict=False):
            stage.call.inputs[0] = stage.call.inputs[-1] = previous.call.outputs[0]
        gpu_checks.assert_dependent_launches_wait(stages, config)


QUANTISED = [
    *(Problem(1, 13, 11, (c,), c, **SAME, activation="Relu") for c in (1, 3, 4, 7, 18, 85)),
    Problem(2, 12, 17, (64, 21, 8), 255, activation="Silu"),
    Problem(1, 20, 20, (512, 36), 35, **SAME),  # the reduction is divided
    Problem(1, 16, 16, (64, 32), 64, **SAME, activation="Silu"),  # whole vectors
    Problem(2, 31, 29, (3,), 16, **SAME, strides=(2, 2), activation="Relu"),
]


@pytest.mark.parametrize("dtype", ["int8", gpu.FLOAT8])
@pytest.mark.parametrize("index", range(len(QUANTISED)))
def test_quantised_pixels(index: int, dtype: str) -> None:
    problem = problems.affordable(QUANTISED[index])
    for output_type in ("float32", "float16", "bfloat16", dtype):
        instance = quant_problems.instantiate(problem, output_type, "NHWC", seed=index, dtype=dtype)
        if reason := kernels.reject(instance.call):
            assert "float8" in reason
            pytest.skip(reason)
        gpu_checks.assert_every_tile_is_right(instance, gpu_checks.tiles_of(instance.call))
