"""The last tiles of filters and of pixels on Hopper, which lack some: what is left out, and what is computed twice."""

from __future__ import annotations

from dataclasses import replace

import gpu_checks
import problems
import pytest
from test_sm90 import SAME, call, hopper_library, hopper_tiles
from test_sm90_small import MULTIPROCESSORS, hopper_gpu

from cutefuse import kernels

__all__ = ["hopper_gpu", "hopper_library"]
DTYPES = ["float16", "bfloat16"]
# Filters that no tile divides, in one tile and in several; pixels that no tile divides.
SHAPES = [
    problems.Problem(1, 13, 13, (64,), 8),
    problems.Problem(2, 19, 17, (96, 64), 40, **SAME, activation="Silu"),
    problems.Problem(1, 29, 31, (72,), 168, activation="Relu"),
    problems.Problem(3, 17, 23, (128, 40), 328, activation="Silu"),
    problems.Problem(1, 25, 26, (64,), 161, **SAME, activation="Sigmoid"),
    problems.Problem(1, 23, 22, (64,), 200, 3, 3, pads=(1, 1, 1, 1), strides=(2, 1)),
]


@pytest.mark.usefixtures("hopper_library")
class TestLegality:
    base = problems.Problem(2, 40, 40, (64, 48), 320, **SAME)

    def test_tiles_of_pixel_rows_take_any_number_of_filters(self) -> None:
        rows = {171, 173, 174}
        for filters in (1, 8, 159, 160, 161, 1000):
            assert rows <= hopper_tiles(replace(self.base, K=filters)), filters

    def test_float32_other_architectures_and_wide_strides_have_none(self) -> None:
        rows = {171, 173, 174}
        assert not rows & hopper_tiles(self.base, "float32")
        assert not rows & hopper_tiles(self.base, sm=80)
        assert not rows & hopper_tiles(replace(self.base, H=300, W=300, strides=(9, 1)))

    def test_filters_in_blocks_of_160_start_with_tiles_as_wide(self) -> None:
        for images in (1, 8):
            shape = problems.Problem(images, 160, 160, (160, 80, 80), 160, activation="Silu")
            assert kernels.configs(call(shape))[0] == 174


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("index", range(len(SHAPES)))
    def test_every_tile_matches_float64(self, index: int, dtype: str) -> None:
        instance = problems.instantiate(problems.affordable(SHAPES[index]), dtype, seed=index)
        tiles = [i for i in kernels.configs(instance.call) if i >= 100]
        for sm_count in MULTIPROCESSORS[::2]:
            other = replace(instance, call=replace(instance.call, sm_count=sm_count, _keep=[]))
            gpu_checks.assert_every_tile_is_right(other, tiles)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("residual", ["before", "after"])
    def test_a_shortcut_beside_them(self, residual: str, dtype: str) -> None:
        for index in (1, 3):
            shape = replace(problems.affordable(SHAPES[index]), residual=residual)
            instance = problems.instantiate(shape, dtype, seed=index)
            gpu_checks.assert_every_tile_is_right(instance, [i for i in kernels.configs(instance.call) if i >= 100])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("taps", [1, 3])
    def test_what_lies_where_no_filters_are_loaded_does_not_matter(self, taps: int, dtype: str) -> None:
        """A launch whose filters are NaNs leaves its stages behind; the next one loads fewer filters into them."""
        filter_of = {"R": taps, "S": taps, "pads": (taps // 2,) * 4}
        before = problems.instantiate(problems.Problem(1, 20, 20, (128,), 384, **filter_of), dtype, seed=1)
        before.buffers[1].view.fill_(float("nan"))
        few = problems.instantiate(problems.Problem(1, 20, 20, (128,), 24, **filter_of), dtype, seed=2)
        for tile in (i for i in kernels.configs(few.call) if i >= 100 and i in kernels.configs(before.call)):
            before.run(tile)
            assert bool(before.output()[0].isnan().all()), tile
            gpu_checks.assert_every_tile_is_right(few, [tile])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_several_outputs_that_end_within_a_tile(self, dtype: str) -> None:
        for outputs in ((160, 40), (64, 256), (24, 160, 96)):
            shape = problems.Problem(1, 21, 19, (96,), sum(outputs), activation="Silu", outputs=outputs)
            instance = problems.instantiate(shape, dtype, seed=3)
            gpu_checks.assert_every_tile_is_right(instance, [i for i in kernels.configs(instance.call) if i >= 100])
