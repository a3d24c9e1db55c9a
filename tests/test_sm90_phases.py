"""Small Hopper tiles for sources of which some are enlarged by two: which problems they take, and on an H100/H200 what
every cluster of them computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated
import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import ENLARGING, hopper_library
from test_sm90_small import MULTIPROCESSORS, hopper_gpu

from cutefuse import kernels
from cutefuse.operators import conv_call, conv_math
from cutefuse.operators.conv_form import Form, Source

__all__ = ["hopper_gpu", "hopper_library"]


@pytest.mark.usefixtures("hopper_library")
class TestLegality:
    def tiles(
        self, factors: tuple[int, ...] = (2, 1), residual: str = "", dtype: str = "float16", sm: int = 90,
        **geometry: Any,
    ) -> set[int]:  # fmt: skip
        """Those of ENLARGING that take sources of 64 channels, enlarged to 48 x 36 pixels."""
        sources = [Source((1, 64, 48 // f, 36 // f), 64, upsample=f) for f in factors]
        shape = geometry.pop("kernel_shape", (1, 1))
        form = Form(len(factors), "Relu", view=True, residual=residual)
        call = conv_call.make_call(form, sources, [64], conv_math.Geometry(shape, **geometry), dtype, {})
        return set(kernels.configs(replace(call, sm=sm, sm_count=132))) & set(ENLARGING)

    def test_enlarged_sources_beside_others_are_taken(self) -> None:
        for factors in ((2, 1), (1, 2), (2, 1, 2, 1)):
            assert self.tiles(factors) == set(ENLARGING)

    def test_other_factors_are_not(self) -> None:
        for factors in ((2, 2), (2,), (1, 1), (4, 1), (2, 1, 3)):
            assert not self.tiles(factors)

    def test_other_filters_are_not(self) -> None:
        assert not self.tiles(kernel_shape=(3, 3), pads=(1, 1, 1, 1))
        assert not self.tiles(pads=(1, 0, 0, 0))
        assert not self.tiles(strides=(2, 2))

    def test_residuals_float32_and_other_architectures_are_not(self) -> None:
        assert not self.tiles(residual="before")
        assert not self.tiles(dtype="float32")
        assert not self.tiles(sm=80)

    def test_no_answer_depends_on_the_size(self) -> None:
        for height, width in ((2, 2), (14, 6), (2, 5000), (1000, 998)):
            sources = [Source((1, 64, height // f, width // f), 64, upsample=f) for f in (2, 1)]
            call = conv_call.make_call(Form(2, view=True), sources, [64], conv_math.Geometry((1, 1)), "float16", {})
            assert set(ENLARGING) <= set(kernels.configs(replace(call, sm=90, sm_count=132)))

    def test_a_neck_of_yolo_starts_with_one(self) -> None:
        for side, channels, filters in ((40, (512, 256), 256), (80, (256, 128), 128), (80, (384, 192), 192)):
            sources = [
                Source((1, c, side // f, side // f), c, upsample=f) for c, f in zip(channels, (2, 1), strict=True)
            ]
            form = Form(2, "Silu", view=True)
            call = conv_call.make_call(form, sources, [filters], conv_math.Geometry((1, 1)), "float16", {})
            assert kernels.configs(replace(call, sm=90, sm_count=132))[0] in ENLARGING


# ---- on the GPU -----------------------------------------------------------------------------------------------------

SHAPES = [
    Problem(1, 40, 40, (256, 128), 128, activation="Silu", upsample=(2, 1)),
    Problem(1, 20, 20, (512, 512), 64, activation="Relu", upsample=(1, 2)),  # sums in many parts
    Problem(3, 14, 22, (72, 8, 200), 130, activation="HardSwish", upsample=(2, 1, 2)),  # images that share a tile
    Problem(1, 2, 2, (64, 64), 9, upsample=(1, 2)),  # one pixel of the source
    Problem(2, 26, 6, (40, 136, 24, 64), 75, activation="Sigmoid", upsample=(1, 2, 1, 2)),
    Problem(1, 38, 50, (64, 40), 200, activation="Tanh", upsample=(2, 1), starts=(8, 16), tail=24),
    Problem(1, 28, 28, (128, 64), 149, activation="Silu", upsample=(2, 1), outputs=(64, 72, 13)),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("index", range(len(SHAPES)))
    def test_every_cluster_matches_float64(self, index: int, dtype: str) -> None:
        instance = problems.instantiate(SHAPES[index], dtype, seed=index)
        tiles = [i for i in kernels.configs(instance.call) if i in ENLARGING]
        assert set(tiles) == set(ENLARGING)
        for sm_count in MULTIPROCESSORS:
            other = replace(instance, call=replace(instance.call, sm_count=sm_count, _keep=[]))
            gpu_checks.assert_every_tile_is_right(other, tiles)

    def test_the_clusters_divide_sums_into_one_and_into_many(self) -> None:
        calls = [problems.instantiate(SHAPES[i], "float16").call for i in (0, 1)]
        parts = {
            kernels.Plan(replace(call, sm_count=count, config=config, _keep=[])).splits
            for call in calls for count in MULTIPROCESSORS for config in ENLARGING
        }  # fmt: skip
        assert min(parts) == 1 and max(parts) >= 4, parts

    def test_a_sum_has_no_more_parts_than_k_tiles_of_either_kind(self) -> None:
        instance = problems.instantiate(Problem(1, 20, 20, (1024, 64), 64, upsample=(2, 1)), "float16")
        for config in ENLARGING:
            assert kernels.Plan(replace(instance.call, config=config, _keep=[])).splits == 1

    @pytest.mark.parametrize("config", sorted(ENLARGING))
    def test_the_same_bits_every_time(self, config: int) -> None:
        instance = problems.instantiate(SHAPES[1], "float16")
        instance.run(config)
        first = instance.output()[0].clone()
        for _ in range(emulated.repeats(20)):
            instance.run(config)
            assert bool((instance.output()[0] == first).all())
