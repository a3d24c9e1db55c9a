"""Outputs that are spread over squares of pixels: which calls are legal, which tiles take them, what these compute."""

from __future__ import annotations

from dataclasses import replace

import emulated
import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import call, hopper_tiles, library_or_skip

from cutefuse import kernels
from cutefuse.errors import CutefuseError

SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}
NECK = Problem(1, 90, 90, (256,), 1024, activation="Relu", spread=2)
RUNS = {105, 113, 131, 175, 180, 181}  # im2col tiles that store by TMA; of 174 the threads do
PATCHES = {121, 124, 126, 129, 130, 176}


def rejected(problem: Problem, dtype: str = "float16") -> str:
    library_or_skip()
    return kernels.reject(call(problem, dtype)) or ""


class TestLegality:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("spread", [2, 3, 4])
    def test_every_16_bit_type_and_factor_is_legal(self, spread: int, dtype: str) -> None:
        problem = replace(NECK, spread=spread, K=72 * spread**2)
        assert rejected(problem, dtype) == "" and problem.stored == [(1, 72, 90 * spread, 90 * spread)]
        assert rejected(replace(problem, H=-1, W=-1), dtype) == ""
        assert rejected(replace(problem, N=0), dtype) == ""

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"K": 1020}, "1020 float16 filters (output_channels 0) cannot be spread over squares of 2x2"),
            ({"K": 16}, "a multiple of 8 channels for each pixel"),
            ({"spread": 3}, "over squares of 3x3"),
            ({"N": 1 << 10, "H": 1 << 10, "W": 1 << 10}, "are more than 2^31; split the batch"),
        ],
    )
    def test_what_the_kernels_cannot_spread_is_refused(self, change: dict[str, object], words: str) -> None:
        reason = rejected(replace(NECK, **change))  # type: ignore[arg-type]
        assert words in reason and ". " not in reason

    def test_float32_is_refused(self) -> None:
        assert "float16 or bfloat16" in rejected(NECK, "float32")

    def test_output_sizes_are_those_of_the_squares(self) -> None:
        library_or_skip()
        made = call(NECK)
        for dims in ((1, 256, 90, 90), (1, 1024, 180, 180), (1, 256, 180, 178), (2, 256, 180, 180)):
            wrong = replace(made, outputs=[replace(made.outputs[0], dims=dims)], _keep=[])
            assert "repair the model" in (kernels.reject(wrong) or ""), dims

    @pytest.mark.parametrize("wide", [264, 512])
    def test_pixels_with_more_than_the_channels_are_refused(self, wide: int) -> None:
        library_or_skip()
        made = call(NECK)
        wider = replace(made, outputs=[replace(made.outputs[0], ld=wide)], _keep=[])
        assert "make the pixels dense" in (kernels.reject(wider) or "")

    def test_an_op_type_spreads_by_its_own_factor_alone(self) -> None:
        library_or_skip()
        plain = replace(call(NECK), op_type="CuteConcatConv1Relu", _keep=[])
        assert "the convolution gives" in (kernels.reject(plain) or "")
        with pytest.raises(CutefuseError, match="CuteSpread5ConcatConv1"):
            kernels.facts("CuteSpread5ConcatConv1")

    @pytest.mark.parametrize(("problem", "tiles"), [
        (NECK, RUNS), (Problem(2, 40, 40, (64, 48), 512, **SAME, spread=2), RUNS | PATCHES),
    ])  # fmt: skip
    def test_on_hopper_the_tiles_that_store_by_tma_take_them(self, problem: Problem, tiles: set[int]) -> None:
        assert hopper_tiles(problem) == tiles < hopper_tiles(replace(problem, spread=1))

    @pytest.mark.parametrize(("tile", "problem"), [
        (153, NECK), (174, NECK), (50, Problem(1, 40, 40, (16,), 64, **SAME, spread=2)),
    ])  # fmt: skip
    def test_other_tiles_say_so(self, tile: int, problem: Problem) -> None:
        library_or_skip()
        assert tile in kernels.configs(call(replace(problem, spread=1)))
        with pytest.raises(CutefuseError, match="spread outputs|several sources, outputs"):
            kernels.Launcher(replace(call(problem), config=tile, _keep=[]))

    @pytest.mark.parametrize("sm", [0, 80, 89, 90, 100, 120])
    def test_every_gpu_has_a_tile_for_pixels_of_any_stride(self, sm: int) -> None:
        if sm and kernels.reject_device(sm) is not None:
            pytest.skip(f"this build holds no code for {sm}")
        for channels in ((64,), (13,), (3, 5)):
            made = call(replace(NECK, C=channels), sm=sm)
            dense = replace(made, attrs={**made.attrs, "layout": 1}, _keep=[])
            assert kernels.reject(dense) is None and kernels.configs(dense)

    def test_on_hopper_a_small_map_runs_by_mma_sync(self) -> None:
        """The tiles that store by TMA divide no reduction, and the small ones, which do, store no spread outputs."""
        library_or_skip()
        first = [kernels.configs(call(replace(NECK, H=side, W=side, C=(1024,), K=2048)))[0] for side in (8, 90)]
        assert first[0] < 100 <= first[1]

    def test_it_takes_as_long_as_the_same_products_without(self) -> None:
        library_or_skip()
        for problem in (NECK, replace(NECK, N=8)):
            spread, plain = (
                kernels.predicted_us(replace(call(p), config=105, _keep=[]))
                for p in (problem, replace(problem, spread=1))
            )
            assert spread is not None and spread == plain


CORNERS = [
    Problem(1, 20, 22, (64,), 256, activation="Relu", spread=2),
    Problem(2, 17, 15, (72,), 96, activation="Silu", spread=2),
    Problem(3, 9, 7, (24,), 72, activation="Clip", spread=3),
    Problem(1, 13, 19, (40,), 384, activation="LeakyRelu", spread=4),
    Problem(2, 11, 21, (16, 40), 160, **SAME, activation="Tanh", spread=2),
    Problem(1, 18, 14, (64,), 288, **SAME, strides=(2, 1), spread=3),
    Problem(1, 1, 1, (8,), 32, activation="Sigmoid", spread=2),
    Problem(4, 1, 5, (136,), 32, spread=2),
    Problem(2, 3, 40, (64, 8, 128), 128, activation="Gelu", spread=4),
    Problem(1, 8, 8, (1024,), 128, activation="Relu", spread=2),  # divided
    Problem(2, 12, 9, (13, 5), 64, activation="Relu", spread=2, dense=True),
    Problem(1, 10, 33, (48,), 288, **SAME, activation="HardSwish", spread=2, dense=True),
    Problem(1, 24, 20, (3,), 64, **SAME, activation="Relu", spread=2),
]


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("index", range(len(CORNERS)))
    def test_corner_sizes_match_float64(self, index: int, dtype: str) -> None:
        instance = problems.instantiate(problems.affordable(CORNERS[index]), dtype, index)
        gpu_checks.assert_every_tile_is_right(instance, gpu_checks.tiles_of(instance.call))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("spread", [2, 3, 4])
    def test_random_problems_match_float64(self, spread: int, dtype: str) -> None:
        for i, problem in enumerate(problems.random_problems(6, spread, 1 if spread == 4 else 8)):
            filters = (8 + problem.K // 8 * 8) % 104 or 8
            spread_out = replace(problem, K=filters * spread**2, spread=spread, dense=spread == 4)
            instance = problems.instantiate(spread_out, dtype, i)
            gpu_checks.assert_every_tile_is_right(instance, gpu_checks.tiles_of(instance.call))

    def test_a_tile_of_pixels_that_lies_in_several_images_is_stored_in_each(self) -> None:
        """Runs of linear pixels, of which TMA steps over the rows of other ranges and from image to image."""
        instance = problems.instantiate(Problem(7, 5, 3, (64,), 128, activation="Relu", spread=2), "float16")
        gpu_checks.assert_every_tile_is_right(instance, gpu_checks.tiles_of(instance.call))

    def test_replays_of_a_graph_equal_eager_runs(self) -> None:
        instance = problems.instantiate(problems.affordable(CORNERS[1]), "float16")
        tiles = emulated.compiled(instance, gpu_checks.tiles_of(instance.call))
        gpu_checks.assert_replays_equal_eager(instance, tiles)

    def test_nan_and_infinity_reach_the_outputs_of_their_square_and_no_other(self) -> None:
        instance = problems.instantiate(Problem(2, 21, 39, (16,), 96, activation="Relu", spread=2), "float16")
        pixels = instance.buffers[0].view.view(2, 21, 39, -1)
        for (n, h, w, c), value in {(0, 0, 0, 1): "nan", (1, 20, 38, 15): "nan"}.items():
            pixels[n, h, w, c] = instance.x[0][n, c, h, w] = float(value)
        gpu_checks.assert_only_their_outputs(instance, emulated.compiled(instance, kernels.configs(instance.call)))
