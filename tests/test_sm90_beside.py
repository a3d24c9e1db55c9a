"""Hopper patches for few filters, whose neighbouring pixels share wgmma's rows: which problems they take, and on an
H100/H200 what they compute."""

from __future__ import annotations

from dataclasses import replace

import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import BESIDE, SAME, call, hopper_library
from test_sm90_small import hopper_gpu

from cutefuse import kernels
from cutefuse.operators import conv_call, conv_math
from cutefuse.operators.conv_form import Form, Source

__all__ = ["hopper_gpu", "hopper_library"]


@pytest.mark.usefixtures("hopper_library")
class TestLegality:
    base = Problem(1, 64, 64, (64, 32), 32, **SAME)

    def taken(self, problem: Problem, dtype: str = "float16", sm: int = 90) -> set[int]:
        p, factors = problem, problem.upsample or (1,) * len(problem.C)
        form = Form(len(p.C), p.activation, view=bool(p.upsample), residual=p.residual)
        sources = [Source((p.N, c, p.H // f, p.W // f), c, upsample=f) for c, f in zip(p.C, factors, strict=True)]
        geometry = conv_math.Geometry((p.R, p.S), p.strides, p.pads, p.dilations)
        made = conv_call.make_call(form, sources, list(p.outputs or (p.K,)), geometry, dtype, {})
        return set(kernels.configs(replace(made, sm=sm, sm_count=132))) & set(BESIDE)

    def test_filters_of_several_columns_and_stride_one_are_taken(self) -> None:
        for change in ({}, {"K": 7}, {"K": 200}, {"R": 1, "pads": (0, 1, 0, 1)}, {"dilations": (2, 1)}):
            assert self.taken(replace(self.base, **change)) == set(BESIDE), change
        assert self.taken(self.base, "bfloat16") == set(BESIDE)

    def test_it_has_room_for_more_taps_but_not_for_any_number(self) -> None:
        five = replace(self.base, R=5, S=5, pads=(2, 2, 2, 2))
        assert self.taken(five) == set(BESIDE)
        assert self.taken(replace(five, R=7, S=7, pads=(3, 3, 3, 3))) == set(BESIDE)
        assert not self.taken(replace(five, R=13, S=13, pads=(6, 6, 6, 6)))

    def test_enlarged_sources_are_taken_if_their_factor_is_two(self) -> None:
        for factors, taken in (((2,), True), ((1, 2), True), ((4,), False), ((2, 3), False), ((1, 4), False)):
            problem = replace(self.base, H=48, W=48, C=(64,) * len(factors), upsample=factors)
            assert self.taken(problem) == (set(BESIDE) if taken else set()), factors

    def test_residuals_are_taken_and_several_outputs_are_not(self) -> None:
        assert self.taken(replace(self.base, residual="after", activation="Relu")) == set(BESIDE)
        assert not self.taken(replace(self.base, K=48, outputs=(32, 16)))

    def test_filters_of_one_column_are_not(self) -> None:
        assert not self.taken(replace(self.base, R=1, S=1, pads=(0, 0, 0, 0)))
        assert not self.taken(replace(self.base, S=1, pads=(1, 0, 1, 0)))

    def test_strides_and_wide_dilations_are_not(self) -> None:
        assert not self.taken(replace(self.base, strides=(1, 2)))
        assert not self.taken(replace(self.base, strides=(2, 1)))
        assert not self.taken(replace(self.base, dilations=(1, 2)))

    def test_float32_and_other_architectures_are_not(self) -> None:
        assert not self.taken(self.base, "float32")
        assert not self.taken(self.base, sm=80) and not self.taken(self.base, sm=100)

    def test_no_answer_depends_on_the_size(self) -> None:
        for height, width in ((1, 1), (2, 3), (3, 5000), (1000, 999)):
            assert self.taken(replace(self.base, H=height, W=width)) == set(BESIDE)

    def test_32_filters_over_many_channels_of_a_large_map_start_with_one(self) -> None:
        for images, side, channels, filters in ((1, 512, (32, 32, 32, 64), 32), (1, 512, (128, 64), 32)):
            problem = Problem(images, side, side, channels, filters, **SAME, activation="Relu")
            assert kernels.configs(call(problem))[0] in BESIDE


# ---- on the GPU -----------------------------------------------------------------------------------------------------

WIDE = {"R": 5, "S": 5, "pads": (2, 2, 2, 2)}
SHAPES = [
    Problem(1, 40, 72, (64,), 32, **SAME, activation="Relu"),
    Problem(2, 37, 45, (32, 72, 8), 29, **SAME, activation="Silu"),  # odd rows, columns and filters; tails of channels
    Problem(1, 1, 1, (16,), 16, **SAME),  # a pair of which one pixel exists
    Problem(3, 5, 3, (24,), 3, **SAME, activation="Sigmoid"),
    Problem(1, 33, 66, (16, 16), 16, **WIDE, activation="HardSwish"),
    Problem(1, 20, 50, (40,), 75, 3, 2, pads=(0, 1, 2, 0), activation="Tanh"),  # an even filter; tiles of filters
    Problem(2, 31, 40, (136,), 32, 3, 3, dilations=(3, 1), pads=(3, 0, 3, 0), activation="LeakyRelu"),
    Problem(1, 24, 37, (48,), 40, 1, 7, pads=(0, 6, 0, 0), activation="Clip"),
    Problem(1, 44, 70, (32,), 32, **SAME, activation="Silu", residual="after"),
    Problem(2, 19, 35, (24, 64), 21, **SAME, activation="Relu", residual="before"),
]
MANY = Problem(9, 96, 160, (32, 16), 32, **SAME, activation="Silu")  # tiles by the dozen for each block
ENLARGED = [
    Problem(1, 40, 72, (32, 64), 32, **SAME, activation="Relu", upsample=(1, 2)),
    Problem(2, 26, 38, (72,), 21, **SAME, upsample=(2,)),
    Problem(1, 42, 46, (16, 24, 64), 16, **WIDE, activation="Silu", upsample=(2, 1, 2)),
    Problem(1, 30, 34, (40, 8), 32, 2, 4, pads=(1, 0, 0, 3), activation="Tanh", upsample=(2, 1)),
    Problem(1, 2, 2, (16, 16), 8, **SAME, upsample=(2, 1)),
    Problem(2, 22, 50, (64, 32), 32, **SAME, activation="Silu", upsample=(2, 1), residual="after"),
    Problem(1, 34, 58, (32, 48), 24, **SAME, activation="Relu", upsample=(2, 1), starts=(8, 16), tail=24),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
class TestOnHopper:
    def check(self, problem: Problem, dtype: str, seed: int = 0) -> None:
        instance = problems.instantiate(problem, dtype, seed=seed)
        tiles = [i for i in kernels.configs(instance.call) if i in BESIDE]
        assert set(tiles) == set(BESIDE)
        gpu_checks.assert_every_tile_is_right(instance, tiles)

    @pytest.mark.parametrize("index", range(len(SHAPES)))
    def test_plain_sources_match_float64(self, index: int, dtype: str) -> None:
        self.check(SHAPES[index], dtype, index)

    def test_rings_that_wrap_match_float64(self, dtype: str) -> None:
        self.check(problems.affordable(MANY), dtype)

    @pytest.mark.parametrize("index", range(len(ENLARGED)))
    def test_sources_enlarged_by_two_match_float64(self, index: int, dtype: str) -> None:
        self.check(ENLARGED[index], dtype, index)

    @pytest.mark.parametrize("activation", problems.ACTIVATIONS)
    def test_every_activation_matches_float64(self, activation: str, dtype: str) -> None:
        self.check(Problem(1, 18, 40, (16,), 24, **SAME, activation=activation), dtype)

    def test_a_graph_replays_what_an_eager_launch_gives(self, dtype: str) -> None:
        for problem in (SHAPES[1], SHAPES[8], ENLARGED[0]):
            gpu_checks.assert_replays_equal_eager(problems.instantiate(problem, dtype), sorted(BESIDE))

    @pytest.mark.parametrize("factor", [1, 2])
    def test_nan_and_infinity_reach_the_outputs_under_their_taps_and_no_other(self, factor: int, dtype: str) -> None:
        """Where one pixel of a pair does not read a column, its filters are zeros, which would make a NaN of these."""
        problem = Problem(2, 38, 70, (72, 24), 29, **SAME, activation="LeakyRelu", upsample=(factor, 1))
        gpu_checks.assert_specials_reach_their_outputs_alone(problem, dtype, sorted(BESIDE))
