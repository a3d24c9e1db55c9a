"""Small Hopper tiles: which problems they take, and on an H100/H200 what every cluster of them computes."""

from __future__ import annotations

from dataclasses import replace

import emulated
import gpu
import gpu_checks
import problems
import pytest
from test_sm90 import PATCHES, SAME, SMALL, call, hopper_library, hopper_tiles

from cutefuse import kernels

__all__ = ["hopper_library"]


@pytest.mark.usefixtures("hopper_library")
class TestLegality:
    base = problems.Problem(1, 20, 20, (32, 19), 64, **SAME)

    def test_every_channel_count_is_taken(self) -> None:
        assert set(SMALL) <= hopper_tiles(self.base)

    def test_strides_and_dilations_are_taken(self) -> None:
        assert set(SMALL) <= hopper_tiles(replace(self.base, strides=(2, 3), dilations=(2, 1)))

    def test_patches_take_filters_three_taps_wide_of_stride_one(self) -> None:
        assert set(PATCHES) <= hopper_tiles(self.base)
        assert set(PATCHES) <= hopper_tiles(replace(self.base, R=5, pads=(2, 1, 2, 1), dilations=(2, 3)))
        for change in ({"strides": (1, 2)}, {"S": 1, "pads": (1, 0, 1, 0)}, {"S": 5, "pads": (1, 2, 1, 2)},
                       {"R": 1, "S": 1, "pads": (0, 0, 0, 0)}, {"dilations": (33, 1)}):  # fmt: skip
            assert not set(PATCHES) & hopper_tiles(replace(self.base, H=90, W=90, **change)), change
        assert not set(PATCHES) & hopper_tiles(self.base, "float32")

    def test_few_pixels_and_a_long_sum_start_with_one(self) -> None:
        for side, channels, filters in ((20, (256, 512), 512), (20, (288,) * 4, 576), (14, (768, *(192,) * 5), 768)):
            assert kernels.configs(call(problems.Problem(1, side, side, channels, filters)))[0] in SMALL

    def test_wide_strides_float32_and_other_architectures_are_not(self) -> None:
        assert not set(SMALL) & hopper_tiles(replace(self.base, H=300, W=300, strides=(9, 1)))
        assert not set(SMALL) & hopper_tiles(self.base, "float32")
        assert not set(SMALL) & hopper_tiles(self.base, sm=80)

    def test_many_pixels_start_with_none(self) -> None:
        for shape in (problems.Problem(8, 128, 128, (512, 512), 256), problems.Problem(8, 64, 64, (512,), 512, **SAME)):
            assert kernels.configs(call(shape))[0] not in SMALL


# ---- on the GPU -----------------------------------------------------------------------------------------------------

# Multiprocessors that the plan is told of: few or many make other clusters the fastest.
MULTIPROCESSORS = (1, 20, 66, 132, 264, 900)
SHAPES = [
    problems.Problem(1, 20, 20, (256, 512), 512, activation="Silu"),
    problems.Problem(1, 7, 7, (256, 320, 128, 128), 384, activation="Relu"),
    problems.Problem(1, 1, 1, (2040,), 9),  # a long sum of one pixel
    problems.Problem(3, 11, 13, (72, 8, 200), 130, activation="HardSwish"),  # odd pixels, tails of every kind
    problems.Problem(1, 40, 40, (576, 384), 264),  # an odd number of tiles: half of a cluster has nothing to store
    problems.Problem(1, 21, 19, (130, 64), 72, **SAME, activation="Sigmoid"),
    problems.Problem(2, 15, 17, (24,), 65, 5, 3, pads=(2, 0, 1, 2), strides=(2, 1), activation="Tanh"),
    problems.Problem(1, 33, 31, (32, 16, 8), 40, **SAME, dilations=(2, 1), activation="LeakyRelu"),
    problems.Problem(1, 20, 20, (512,), 64, 7, 7, pads=(3, 3, 3, 3), activation="Clip"),
    # Sources that end in half a block: an odd number of halves, k-tiles of two sources, one half alone.
    problems.Problem(1, 20, 20, (96, 32, 96), 128, activation="Silu"),
    problems.Problem(2, 11, 13, (32, 24, 100, 8), 72, **SAME, strides=(2, 1), activation="Relu"),
    problems.Problem(1, 9, 10, (32,), 64),
    problems.Problem(1, 14, 13, (96, 40), 136, **SAME, activation="Silu", residual="after"),
    problems.Problem(3, 7, 7, (160, 32), 75, activation="Relu", residual="before"),
    problems.Problem(1, 12, 13, (130, 64), 149, **SAME, activation="Silu", outputs=(64, 72, 13)),
    # Patches across and along, filters of one row and of seven, parts that begin within a patch.
    problems.Problem(2, 9, 37, (80,), 96, 7, 3, pads=(3, 1, 3, 1), activation="Relu", residual="before"),
    problems.Problem(3, 30, 9, (200, 24), 64, **SAME, activation="Silu"),
    problems.Problem(1, 17, 23, (48,), 40, 1, 3, pads=(0, 2, 0, 1), dilations=(1, 2), activation="Tanh"),
]


@pytest.fixture
def hopper_gpu() -> None:
    if gpu.device_facts()[0] != 90:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("index", range(len(SHAPES)))
    def test_every_cluster_matches_float64(self, index: int, dtype: str) -> None:
        instance = problems.instantiate(problems.affordable(SHAPES[index]), dtype, seed=index)
        tiles = [i for i in kernels.configs(instance.call) if i in SMALL | PATCHES]
        for sm_count in MULTIPROCESSORS:
            other = replace(instance, call=replace(instance.call, sm_count=sm_count, _keep=[]))
            gpu_checks.assert_every_tile_is_right(other, tiles)

    @pytest.mark.parametrize(("side", "channels", "filters", "tile"), [
        (80, (64,) * 4, 128, 158), (40, (512, 256), 256, 154), (20, (384, 576), 576, 154),
    ])  # fmt: skip
    def test_a_sum_stays_whole_where_its_tiles_fill_the_chip(
        self, side: int, channels: tuple[int, ...], filters: int, tile: int
    ) -> None:
        instance = problems.instantiate(problems.Problem(1, side, side, channels, filters), "float16")
        assert kernels.Plan(replace(instance.call, config=tile, sm_count=132)).splits == 1

    @pytest.mark.parametrize("index", [0, 1, 3])
    def test_the_clusters_divide_sums_into_one_and_into_many(self, index: int) -> None:
        instance = problems.instantiate(SHAPES[index], "float16")
        parts = {
            kernels.Plan(replace(instance.call, sm_count=count, config=config, _keep=[])).splits
            for count in MULTIPROCESSORS for config in SMALL
        }  # fmt: skip
        assert min(parts) == 1 and max(parts) >= 4, parts

    @pytest.mark.parametrize("config", sorted(SMALL))
    def test_the_same_bits_every_time(self, config: int) -> None:
        instance = problems.instantiate(problems.Problem(1, 20, 20, (512, 512), 256), "float16")
        instance.run(config)
        first = instance.output()[0].clone()
        for _ in range(emulated.repeats(20)):
            instance.run(config)
            assert bool((instance.output()[0] == first).all())
