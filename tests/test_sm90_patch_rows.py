"""Hopper patches whose pixels are wgmma's rows, for few filters: which problems they take, and on an H100/H200 what
they compute."""

from __future__ import annotations

from dataclasses import replace

import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import ROWS, SAME, call, hopper_library, hopper_tiles
from test_sm90_small import hopper_gpu

from cutefuse import kernels

__all__ = ["hopper_gpu", "hopper_library"]

WIDER = {179}  # the tile of 32 filters


@pytest.mark.usefixtures("hopper_library")
class TestLegality:
    base = Problem(1, 64, 64, (64, 32), 16, **SAME)

    def taken(self, problem: Problem, dtype: str = "float16", sm: int = 90) -> set[int]:
        return hopper_tiles(problem, dtype, sm) & set(ROWS)

    def test_up_to_32_filters_are_taken(self) -> None:
        for filters, tiles in ((1, set(ROWS)), (7, set(ROWS)), (16, set(ROWS)), (17, WIDER), (32, WIDER), (33, set())):
            assert self.taken(replace(self.base, K=filters)) == tiles, filters
        assert self.taken(self.base, "bfloat16") == set(ROWS)

    def test_strides_and_dilations_are_those_of_other_patches(self) -> None:
        for change in ({"strides": (2, 2)}, {"strides": (1, 2)}, {"dilations": (2, 3)}, {"S": 1}):
            assert self.taken(replace(self.base, **change)) == set(ROWS), change
        for change in ({"strides": (3, 1)}, {"strides": (2, 2), "dilations": (2, 2)}, {"dilations": (1, 40)}):
            assert not self.taken(replace(self.base, H=200, W=200, **change)), change
        assert not self.taken(replace(self.base, R=1, S=1, pads=(0, 0, 0, 0)))

    def test_all_filters_fit_into_a_block_or_none_do(self) -> None:
        assert self.taken(replace(self.base, C=(320,))) == set(ROWS)
        assert not self.taken(replace(self.base, C=(512,), K=32))
        assert not self.taken(replace(self.base, C=(2048,)))

    def test_one_output_is_taken_and_several_are_not(self) -> None:
        assert not self.taken(replace(self.base, outputs=(8, 8)))

    def test_float32_and_other_architectures_are_not(self) -> None:
        assert not self.taken(self.base, "float32")
        assert not self.taken(self.base, sm=80) and not self.taken(self.base, sm=100)

    def test_no_answer_depends_on_the_size(self) -> None:
        for height, width in ((1, 1), (2, 3), (3, 5000), (1000, 999)):
            assert self.taken(replace(self.base, H=height, W=width)) == set(ROWS)

    def test_few_filters_of_a_large_map_start_with_one(self) -> None:
        for images, side, channels, filters in ((1, 512, 16, 16), (8, 512, 32, 4), (8, 128, 64, 2), (8, 160, 32, 32)):
            problem = Problem(images, side, side, (channels,), filters, **SAME, activation="Relu")
            assert kernels.configs(call(problem))[0] in ROWS, problem


# ---- on the GPU -----------------------------------------------------------------------------------------------------

WIDE = {"R": 5, "S": 5, "pads": (2, 2, 2, 2)}
SHAPES = [
    Problem(1, 40, 72, (64,), 16, **SAME, activation="Relu"),
    Problem(2, 37, 45, (32, 72, 8), 13, **SAME, activation="Silu"),  # odd rows, columns and filters; tails of channels
    Problem(1, 1, 1, (16,), 16, **SAME),
    Problem(3, 5, 3, (24,), 3, **SAME, activation="Sigmoid"),
    Problem(1, 33, 66, (16, 16), 29, **WIDE, activation="HardSwish"),
    Problem(1, 20, 50, (40,), 9, 3, 2, pads=(0, 1, 2, 0), activation="Tanh"),
    Problem(2, 31, 40, (136,), 32, 3, 3, dilations=(3, 2), pads=(3, 2, 3, 2), activation="LeakyRelu"),
    Problem(1, 24, 37, (48,), 16, 1, 7, pads=(0, 6, 0, 0), activation="Clip"),
    Problem(1, 44, 70, (32,), 16, **SAME, activation="Silu", residual="after"),
    Problem(2, 19, 35, (24, 64), 21, **SAME, activation="Relu", residual="before"),
    Problem(1, 64, 96, (16,), 32, **SAME, strides=(2, 2), activation="Silu"),
    Problem(2, 39, 51, (40, 8), 10, 4, 3, strides=(2, 1), pads=(1, 2, 2, 0), activation="Relu"),
    Problem(1, 30, 47, (72,), 32, **WIDE, strides=(1, 2), residual="after"),
    Problem(1, 30, 31, (320,), 4, **SAME),  # one block a multiprocessor
]
MANY = Problem(9, 96, 160, (32, 16), 16, **SAME, activation="Silu")  # tiles by the dozen for each block
ENLARGED = [
    Problem(1, 40, 72, (32, 64), 16, **SAME, activation="Relu", upsample=(1, 2)),
    Problem(2, 26, 39, (72,), 21, **SAME, upsample=(1,)),
    Problem(1, 42, 48, (16, 24, 40), 16, **SAME, activation="Silu", upsample=(2, 1, 3)),
    Problem(1, 2, 2, (16, 16), 8, **SAME, upsample=(2, 1)),
    Problem(1, 34, 58, (32, 48), 24, **SAME, activation="Relu", upsample=(2, 1), starts=(8, 16), tail=24),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
class TestOnHopper:
    def check(self, problem: Problem, dtype: str, seed: int = 0) -> None:
        instance = problems.instantiate(problem, dtype, seed=seed)
        tiles = [i for i in kernels.configs(instance.call) if i in ROWS]
        assert set(tiles) == (WIDER if problem.K > 16 else set(ROWS))
        gpu_checks.assert_every_tile_is_right(instance, tiles)

    @pytest.mark.parametrize("index", range(len(SHAPES)))
    def test_plain_sources_match_float64(self, index: int, dtype: str) -> None:
        self.check(SHAPES[index], dtype, index)

    def test_rings_that_wrap_match_float64(self, dtype: str) -> None:
        self.check(problems.affordable(MANY), dtype)

    @pytest.mark.parametrize("index", range(len(ENLARGED)))
    def test_enlarged_sources_match_float64(self, index: int, dtype: str) -> None:
        self.check(ENLARGED[index], dtype, index)

    @pytest.mark.parametrize("activation", problems.ACTIVATIONS)
    def test_every_activation_matches_float64(self, activation: str, dtype: str) -> None:
        self.check(Problem(1, 18, 40, (16,), 12, **SAME, activation=activation), dtype)

    def test_a_graph_replays_what_an_eager_launch_gives(self, dtype: str) -> None:
        for problem in (SHAPES[1], SHAPES[8], ENLARGED[0]):
            gpu_checks.assert_replays_equal_eager(problems.instantiate(problem, dtype), sorted(ROWS))

    def test_a_chain_of_launches_sees_each_result(self, dtype: str) -> None:
        """Blocks fetch filters and pixels only when the kernel before has ended, though they start earlier."""
        shape = problems.emulable(Problem(1, 64, 64, (16,), 16, **SAME, activation="Tanh"))
        for config in sorted(ROWS):
            stages = gpu_checks.chained([problems.instantiate(shape, dtype, seed) for seed in range(6)])
            gpu_checks.assert_dependent_launches_wait(stages, config)

    @pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
    def test_nan_and_infinity_reach_the_outputs_under_their_taps_and_no_other(
        self, strides: tuple[int, int], dtype: str
    ) -> None:
        problem = Problem(2, 38, 70, (72, 24), 13, **SAME, strides=strides, activation="LeakyRelu")
        gpu_checks.assert_specials_reach_their_outputs_alone(problem, dtype, sorted(ROWS))
