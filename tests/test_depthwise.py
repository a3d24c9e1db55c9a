"""The tile for depthwise convolutions: what it takes and what it computes."""

from __future__ import annotations

from dataclasses import replace

import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import call, library_or_skip

from cutefuse import kernels
from cutefuse.errors import CutefuseError

TILE = 52


def depthwise(N: int, H: int, W: int, C: int | tuple[int, ...], R: int = 3, S: int = 0, **more: object) -> Problem:
    """Of one source or several, and as many pads as keep the size, if nothing else is said."""
    S, C = S or R, C if isinstance(C, tuple) else (C,)
    pads = (R // 2, S // 2, (R - 1) // 2, (S - 1) // 2)
    return Problem(N, H, W, C, sum(C), R, S, depthwise=True, **{"pads": pads, **more})  # type: ignore[arg-type]


MIDDLE = depthwise(1, 80, 80, 64, activation="Silu")


class TestLegality:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("channels", [1, 8, 20, 64, 960])
    def test_one_tile_takes_every_number_of_channels(self, channels: int, dtype: str) -> None:
        library_or_skip()
        for sm in (0, 80, 86, 90, 120):
            problem = replace(MIDDLE, C=(channels,), K=channels)
            ids = [tile for tile in kernels.configs(call(problem, dtype, sm))]
            assert ids in ([TILE], [])  # a library without code for the GPU has none
        assert kernels.configs(call(problem, dtype, 0)) == [TILE]

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"K": 32}, "the packed depthwise filter is 9x32, 9 taps x 64 channels are needed"),
            (
                {"R": 5, "dilations": (200, 200), "strides": (2, 2), "H": 3000, "W": 3000, "C": (8,), "K": 8},
                "a depthwise source of 8",
            ),
            ({"R": 5, "S": 16, "dilations": (200, 900), "strides": (1, 2), "H": 3000, "W": 15000}, "dilations 200x900"),
            ({"strides": (1, 1000), "R": 16, "S": 16, "H": 400, "W": 9000}, "under a 16x16 float16 filter"),
        ],
    )
    def test_all_else_is_refused_in_a_sentence(self, change: dict[str, object], reason: str) -> None:
        library_or_skip()
        problem = replace(MIDDLE, **change)  # type: ignore[arg-type]
        assert reason in (kernels.reject(call(problem)) or "")

    @pytest.mark.parametrize("channels", [(8, 8), (256, 48), (16, 20), (8,) * 7 + (1,)])
    def test_sources_of_whole_vectors_are_taken_whatever_the_last_one_has(self, channels: tuple[int, ...]) -> None:
        library_or_skip()
        for dtype in ("float16", "bfloat16"):
            assert kernels.configs(call(depthwise(1, 20, 22, channels), dtype, 0)) == [TILE]

    @pytest.mark.parametrize("channels", [(8, 12, 8), (4, 8), (1, 1), (16, 8, 20, 16)])
    def test_a_vector_of_two_sources_is_refused(self, channels: tuple[int, ...]) -> None:
        library_or_skip()
        odd = next(c for c in channels if c % 8)
        reason = kernels.reject(call(depthwise(1, 20, 22, channels))) or ""
        assert f"a depthwise source of {odd} channels" in reason and "whole vectors of channels" in reason

    @pytest.mark.parametrize("sizes", [{"packed_sizes": [8, 24]}, {"packed_sizes": [16]}])
    def test_packed_sizes_are_those_of_the_sources(self, sizes: dict[str, list[int]]) -> None:
        library_or_skip()
        made = call(depthwise(1, 20, 22, (16, 8)))
        assert "packed_sizes" in (kernels.reject(replace(made, attrs={**made.attrs, **sizes}, _keep=[])) or "")

    def test_float32_is_refused(self) -> None:
        library_or_skip()
        assert "under a 3x3 float32 filter" in (kernels.reject(call(MIDDLE, "float32")) or "")

    def test_a_filter_over_all_channels_is_refused(self) -> None:
        library_or_skip()
        made = call(MIDDLE)
        filters = call(replace(MIDDLE, depthwise=False)).inputs[1]
        wide = replace(made, inputs=[made.inputs[0], filters, *made.inputs[2:]], _keep=[])
        assert "64x576, 9 taps x 64 channels are needed; repack it" in (kernels.reject(wide) or "")

    @pytest.mark.parametrize("tile", [4, 50, 105])
    def test_no_other_tile_is_offered_it(self, tile: int) -> None:
        library_or_skip()
        with pytest.raises(CutefuseError, match="single channels"):
            kernels.Launcher(replace(call(MIDDLE), config=tile, _keep=[]))

    def test_it_takes_nothing_else(self) -> None:
        library_or_skip()
        plain = replace(MIDDLE, depthwise=False, C=(8,), K=8)
        assert TILE not in kernels.configs(call(plain))
        with pytest.raises(CutefuseError, match="all channels"):
            kernels.Launcher(replace(call(plain), config=TILE, _keep=[]))

    def test_more_bytes_take_longer(self) -> None:
        library_or_skip()
        times = [
            kernels.predicted_us(replace(call(p), config=TILE, _keep=[]))
            for p in (MIDDLE, replace(MIDDLE, N=8), replace(MIDDLE, N=8, R=7, S=7, pads=(3,) * 4))
        ]
        assert 1 < times[0] < times[1] < times[2]


CORNERS = [
    depthwise(1, 20, 22, 64, activation="Silu"),
    depthwise(2, 17, 15, 20, activation="Relu"),
    depthwise(1, 13, 19, 1, 5, 1),
    depthwise(3, 14, 14, 72, 5, strides=(2, 2), activation="HardSwish"),
    depthwise(1, 31, 37, 96, 7, activation="Gelu"),
    depthwise(1, 33, 31, 40, 7, strides=(2, 2), activation="Clip"),
    depthwise(1, 40, 30, 24, 3, 5, pads=(3, 0, 1, 4), dilations=(3, 2), activation="Tanh"),
    depthwise(1, 9, 70, 136, 2, 4, strides=(3, 3), activation="Sigmoid"),
    depthwise(2, 18, 70, 8, strides=(2, 1), activation="LeakyRelu"),
    depthwise(1, 65, 65, 16, dilations=(12, 12), pads=(12,) * 4, activation="Relu"),
    depthwise(2, 32, 32, 40, dilations=(12, 12), pads=(12,) * 4),  # classes of two and three
    depthwise(1, 17, 31, 72, dilations=(24, 36), pads=(24, 36) * 2, activation="Relu"),  # dilations beyond the image
    depthwise(2, 26, 26, 24, 7, dilations=(3, 3), pads=(9,) * 4, activation="Silu"),  # classes of nine: 8 and 1 columns
    depthwise(1, 10, 49, 64, 5, 3, dilations=(4, 2), pads=(8, 2, 8, 2), dense=True),
    depthwise(1, 29, 23, 20, 5, dilations=(2, 3), pads=(0, 6, 5, 1), strides=(2, 1), activation="HardSwish"),
    depthwise(2, 21, 34, 8, 3, 7, dilations=(5, 2), pads=(5, 6, 5, 6), strides=(1, 2)),
    depthwise(1, 27, 30, 33, dilations=(2, 2), pads=(2,) * 4, strides=(2, 2), activation="Clip"),
    depthwise(1, 9, 20, 16, 1, 3, dilations=(7, 6), pads=(0, 6, 0, 6), activation="Gelu"),
    depthwise(2, 7, 7, 960, 5, activation="Silu"),
    depthwise(2, 19, 21, (256, 48), activation="Relu"),
    depthwise(1, 15, 18, (8, 8, 136, 24, 16, 8, 40, 5), 5, activation="Silu"),
    depthwise(2, 14, 17, (40, 13), strides=(2, 2), activation="Clip"),
    depthwise(1, 24, 30, (72, 16, 32), 3, 5, dilations=(3, 4), pads=(3, 8, 3, 8), dense=True),
    depthwise(1, 1, 1, 130, activation="Silu"),
    depthwise(1, 1, 300, 33, 1, 9, activation="Relu"),
    depthwise(1, 129, 3, 64, 9, 3),
    depthwise(1, 12, 65, 32, activation="Silu", dense=True),
    depthwise(5, 6, 5, 48, 1, activation="Silu"),
]


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("index", range(len(CORNERS)))
    def test_corner_sizes_match_float64(self, index: int, dtype: str) -> None:
        instance = problems.instantiate(problems.affordable(CORNERS[index]), dtype, index)
        assert kernels.configs(instance.call) == [TILE]
        gpu_checks.assert_every_tile_is_right(instance, [TILE])

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("seed", range(6))
    def test_random_problems_match_float64(self, seed: int, dtype: str) -> None:
        for problem in problems.random_problems(4, seed):
            instance = problems.instantiate(replace(problem, C=(problem.K,), depthwise=True), dtype, seed)
            gpu_checks.assert_every_tile_is_right(instance, gpu_checks.tiles_of(instance.call))

    @pytest.mark.parametrize("seed", range(4))
    def test_random_sources_match_float64(self, seed: int) -> None:
        for problem in problems.random_problems(3, 100 + seed, channel_step=8):
            shape = replace(problem, K=sum(problem.C), depthwise=True)
            instance = problems.instantiate(shape, ("float16", "bfloat16")[seed % 2], seed)
            gpu_checks.assert_every_tile_is_right(instance, gpu_checks.tiles_of(instance.call))

    @pytest.mark.parametrize("index", range(len(CORNERS)))
    def test_large_blocks_match_float64(self, index: int) -> None:
        """Cut for one multiprocessor, small images make blocks of many rows and columns too."""
        shape = problems.affordable(replace(CORNERS[index], N=2))
        instance = problems.instantiate(shape, "float16")
        large = replace(instance, call=replace(instance.call, sm_count=1, _keep=[]))
        gpu_checks.assert_every_tile_is_right(large, [TILE])

    @pytest.mark.parametrize("dilations", [(1, 1), (4, 3), (1, 5)])
    def test_nan_and_infinity_reach_the_outputs_of_their_channel_and_no_other(self, dilations: tuple[int, int]) -> None:
        """In a class of a dilated filter's outputs too."""
        strides = (2, 1) if dilations[0] == 1 else (1, 1)
        problem = depthwise(2, 21, 39, 18, activation="Relu", strides=strides, dilations=dilations)
        instance = problems.instantiate(problem, "float16")
        pixels = instance.buffers[0].view.view(2, 21, 39, -1)
        for (n, h, w, c), value in {(0, 0, 0, 1): "nan", (0, 9, 13, 2): "inf", (1, 20, 38, 17): "nan"}.items():
            pixels[n, h, w, c] = instance.x[0][n, c, h, w] = float(value)
        gpu_checks.assert_only_their_outputs(instance, [TILE])

    def test_replays_of_a_graph_equal_eager_runs(self) -> None:
        instance = problems.instantiate(problems.affordable(CORNERS[0]), "float16")
        gpu_checks.assert_replays_equal_eager(instance, [TILE])

    def test_a_chain_of_launches_sees_each_result(self) -> None:
        shape = problems.emulable(depthwise(1, 64, 64, 8, activation="Tanh"))
        stages = gpu_checks.chained([problems.instantiate(shape, "float16", seed) for seed in range(6)])
        gpu_checks.assert_dependent_launches_wait(stages, TILE)
