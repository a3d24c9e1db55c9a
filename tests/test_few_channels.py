"""The tile for images, whose k-tile is eight taps of one vector of channels: what it takes, and what it computes."""

from __future__ import annotations

from dataclasses import replace

import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import call, library_or_skip

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.operators import conv_call, conv_math
from cutefuse.operators.conv_form import Form, Source

TILE = 19
SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}
IMAGE = Problem(1, 64, 64, (3,), 32, **SAME, strides=(2, 2), activation="Silu")


def takes(problem: Problem, dtype: str = "float16", sm: int = 90) -> bool:
    library_or_skip()
    return TILE in kernels.configs(call(problem, dtype, sm))


class TestLegality:
    @pytest.mark.parametrize("channels", [1, 3, 4, 8])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_up_to_one_vector_of_channels(self, channels: int, dtype: str) -> None:
        assert takes(replace(IMAGE, C=(channels,)), dtype)

    def test_it_comes_before_the_tiles_that_load_every_tap_on_its_own(self) -> None:
        """On the shape on which it was timed as the fastest, the patches of a ViT; image tiles do not take those. On
        64x64 pixels a small tile takes 2.34 us for its 4.03, out of the L2 cache of an H200, 2026-11-27."""
        library_or_skip()
        patches = Problem(8, 224, 224, (3,), 768, 16, 16, strides=(16, 16))
        assert kernels.configs(replace(call(patches), sm_count=132, _keep=[]))[0] == TILE
        first = kernels.configs(replace(call(IMAGE), sm_count=132, _keep=[]))[0]
        names = {c["id"]: c["name"] for c in kernels.operator_of(call(IMAGE).op_type)["configs"]}
        assert names[first].startswith("sm90_small_64x")

    @pytest.mark.parametrize(
        "change",
        [
            {"C": (9,)},
            {"C": (16,)},
            {"C": (3, 3)},
            {"R": 1, "S": 1, "pads": (0, 0, 0, 0)},
        ],
    )
    def test_more_channels_or_sources_or_a_single_tap_have_other_tiles(self, change: dict[str, object]) -> None:
        problem = replace(IMAGE, **change)  # type: ignore[arg-type]
        assert not takes(problem)
        with pytest.raises(CutefuseError, match="more than a vector of channels, or one tap"):
            kernels.Launcher(replace(call(problem), config=TILE, _keep=[]))

    def test_float32_and_a_pre_activation_have_other_tiles(self) -> None:
        assert not takes(IMAGE, "float32")
        form = Form(1, "Relu", pre_activated=True)
        geometry = conv_math.Geometry((3, 3), pads=(1,) * 4)
        pre = conv_call.make_call(form, [Source((2, 8, 20, 20), 8)], [32], geometry, "float16", {})
        ids = kernels.configs(pre)
        assert ids and TILE not in ids


CORNERS = [
    Problem(1, 20, 22, (3,), 16, **SAME, strides=(2, 2), activation="Silu"),
    Problem(1, 30, 34, (3,), 64, 7, 7, strides=(2, 2), pads=(3, 3, 3, 3), activation="Relu"),
    Problem(2, 17, 15, (8,), 72, **SAME, activation="Relu"),
    Problem(1, 13, 19, (1,), 40, 5, 1, pads=(2, 0, 2, 0)),
    Problem(1, 33, 31, (4,), 32, 6, 6, strides=(2, 2), pads=(2, 2, 2, 2), activation="Silu"),
    Problem(3, 40, 30, (6,), 65, 3, 5, pads=(3, 0, 1, 4), dilations=(3, 2), activation="Tanh"),
    Problem(1, 60, 60, (3,), 48, 16, 16, strides=(16, 16)),
    Problem(1, 20, 22, (3,), 16, **SAME, residual="after", activation="Silu"),
    Problem(1, 20, 22, (3,), 16, **SAME, residual="before", activation="Relu"),
    Problem(1, 20, 22, (3,), 48, **SAME, outputs=(16, 32), activation="Silu"),
    Problem(1, 320, 320, (3,), 48, **SAME, strides=(2, 2), activation="Silu"),
]


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("index", range(len(CORNERS)))
    def test_corner_sizes_match_float64(self, index: int, dtype: str) -> None:
        instance = problems.instantiate(problems.affordable(CORNERS[index]), dtype, index)
        assert TILE in kernels.configs(instance.call)
        gpu_checks.assert_every_tile_is_right(instance, [TILE])

    def test_replays_of_a_graph_equal_eager_runs(self) -> None:
        instance = problems.instantiate(problems.affordable(CORNERS[0]), "float16")
        gpu_checks.assert_replays_equal_eager(instance, [TILE])

    def test_a_chain_of_launches_sees_each_result(self) -> None:
        shape = problems.emulable(Problem(1, 64, 64, (8,), 8, **SAME, activation="Tanh"))
        stages = gpu_checks.chained([problems.instantiate(shape, "float16", seed) for seed in range(6)])
        gpu_checks.assert_dependent_launches_wait(stages, TILE)
