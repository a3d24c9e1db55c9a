"""The whole operator on every Hopper tile against float64: shortcuts, several outputs, enlarged sources."""

from __future__ import annotations

from dataclasses import replace

import gpu
import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import CORNERS, HALO, TILES

from cutefuse import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

DTYPES = ("float16", "bfloat16")
PAIRED = {i for i, name in TILES.items() if name.endswith("_f2")}  # filter tiles by twos; each output has its own
IN_TURNS = {i for i, name in TILES.items() if "_pp_" in name or "_four_" in name}
NO_SHORTCUT = IN_TURNS | {173}  # the widest of those whose pixels are rows
SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}


@pytest.fixture
def hopper_gpu() -> None:
    if gpu.device_facts()[0] != 90:
        pytest.skip("needs a Hopper GPU")


def check(problem: Problem, dtype: str, seed: int = 0) -> set[int]:
    """Run the Hopper tiles alone and return their ids."""
    instance = problems.instantiate(problem if problem.upsample else problems.affordable(problem), dtype, seed)
    ids = [i for i in kernels.configs(instance.call) if i in TILES]
    gpu_checks.assert_every_tile_is_right(instance, ids)
    return set(ids)


LARGE = [  # several tiles for each block, in a ring that wraps
    Problem(8, 80, 80, (64, 24), 256, **SAME, activation="Silu"),
    Problem(9, 61, 75, (200,), 320, activation="Relu"),
    Problem(2, 20, 20, (512,), 512, **SAME, activation="Silu"),  # splits
    Problem(1, 47, 53, (96,), 75, **SAME, activation="HardSwish"),  # pad lanes
    Problem(4, 90, 71, (72,), 136, 3, 3, strides=(2, 2), pads=(1, 1, 1, 1), activation="Sigmoid"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", ["before", "after"])
class TestShortcut:
    @pytest.mark.parametrize("index", range(len(CORNERS)))
    def test_corner_sizes_match_float64(self, index: int, residual: str, dtype: str) -> None:
        plain = CORNERS[index]
        if residual == "after" and plain.activation == "":
            plain = replace(plain, activation="LeakyRelu")
        assert check(replace(plain, residual=residual), dtype, seed=index)

    @pytest.mark.parametrize("index", range(len(LARGE)))
    def test_many_tiles_match_float64(self, index: int, residual: str, dtype: str) -> None:
        assert check(replace(LARGE[index], residual=residual), dtype, seed=index)

    @pytest.mark.parametrize("activation", problems.ACTIVATIONS)
    def test_every_activation_on_every_tile(self, activation: str, residual: str, dtype: str) -> None:
        if residual == "after" and activation == "":
            pytest.skip("one op_type stands for both")
        problem = Problem(2, 30, 37, (72,), 256, **SAME, activation=activation, residual=residual)
        assert check(problem, dtype) == set(TILES) - NO_SHORTCUT
        pointwise = Problem(3, 50, 61, (136,), 256, activation=activation, residual=residual)
        assert check(pointwise, dtype)

    def test_a_graph_replays_what_an_eager_launch_gives(self, residual: str, dtype: str) -> None:
        for problem in (Problem(1, 20, 20, (256,), 256, **SAME), Problem(2, 60, 60, (128,), 192)):
            problem = problems.emulable(replace(problem, residual=residual, activation="Silu"))
            instance = problems.instantiate(problem, dtype)
            tiles = [i for i in kernels.configs(instance.call) if i in TILES]
            gpu_checks.assert_replays_equal_eager(instance, tiles)


def test_a_shortcut_of_a_kernel_that_still_runs_is_waited_for() -> None:
    """Programmatic dependent launch starts a kernel early; its load of the shortcut must wait for the one before."""
    shape = problems.emulable(Problem(1, 64, 64, (64,), 64, **SAME, activation="Tanh", residual="after"))
    for config in sorted(TILES):
        stages = [problems.instantiate(shape, "float16", seed) for seed in range(6)]
        if config not in kernels.configs(stages[0].call):
            continue
        for previous, stage in zip(stages, stages[1:], strict=False):
            stage.call.inputs[-1] = previous.call.outputs[0]
        gpu_checks.assert_dependent_launches_wait(stages, config)


@pytest.mark.parametrize("dtype", DTYPES)
class TestSeveralOutputs:
    @pytest.mark.parametrize(
        "outputs",
        [
            (128, 128),
            (64, 200),
            (
                8,
                56,
                13,
            ),
            (16, 8, 8, 96),
            (128, 1),
            (192, 320),
        ],
    )
    def test_splits_that_are_multiples_of_a_tile_and_splits_that_are_not(
        self, outputs: tuple[int, ...], dtype: str
    ) -> None:
        for shape in (
            Problem(2, 33, 37, (40, 24), 1, **SAME),
            Problem(3, 45, 52, (72,), 1),
            Problem(1, 20, 20, (320,), 1, **SAME),
        ):
            ids = check(replace(shape, K=sum(outputs), activation="Silu", outputs=outputs), dtype)
            whole = check(replace(shape, K=sum(outputs), activation="Silu"), dtype)
            assert ids - PAIRED == whole - PAIRED

    def test_more_tiles_than_multiprocessors(self, dtype: str) -> None:
        check(Problem(8, 80, 80, (64,), 256, **SAME, activation="Relu", outputs=(64, 192)), dtype)
        check(Problem(8, 80, 80, (64,), 256, activation="HardSwish", outputs=(72, 56, 128)), dtype)

    @pytest.mark.skipif(problems.SANITIZED, reason="torch profiles no kernel of the emulator or under a sanitizer")
    def test_they_are_one_launch(self, dtype: str) -> None:
        import torch

        instance = problems.instantiate(Problem(1, 20, 20, (64,), 64, **SAME, outputs=(32, 32)), dtype)
        ids = [i for i in kernels.configs(instance.call) if i in TILES]
        instance.run(ids[0])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for config in ids:
                kernels.run(replace(instance.call, config=config))
            gpu.synchronize()
        ours = [e.count for e in profile.key_averages() if "conv_sm90" in e.key]
        assert sum(ours) == len(ids)


ENLARGED = {
    "one load": Problem(1, 8, 8, (8,), 8, upsample=(2,)),
    "one tap": Problem(2, 30, 44, (64, 136), 200, activation="Silu", upsample=(2, 1)),
    "one tap and pads": Problem(2, 12, 20, (72,), 24, pads=(1, 2, 0, 3), upsample=(2,)),
    "large factor": Problem(2, 64, 48, (64, 16), 24, activation="Relu", upsample=(16, 1)),
    "images": Problem(3, 26, 34, (64, 40), 72, **SAME, activation="Relu", upsample=(2, 1)),
    "tall": Problem(2, 74, 6, (40,), 72, **SAME, upsample=(2,)),
    "ranges": Problem(1, 24, 36, (72, 8, 16), 40, **SAME, upsample=(1, 3, 4), starts=(8, 0, 16), tail=5),
    "dilated": Problem(2, 20, 14, (128,), 130, 5, 3, pads=(3, 0, 1, 2), dilations=(1, 2), upsample=(2,)),
    "wide pads": Problem(1, 18, 30, (24,), 64, 3, 3, pads=(9, 5, 2, 7), upsample=(3,)),
    "seven taps": Problem(1, 40, 42, (48,), 64, 7, 7, pads=(3, 3, 3, 3), upsample=(2,)),
    "divided": Problem(1, 20, 20, (256, 256), 64, **SAME, activation="Silu", upsample=(2, 1)),
    "a ring that wraps": Problem(2, 80, 80, (200, 64), 256, **SAME, upsample=(2, 1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
class TestEnlargedSources:
    @pytest.mark.parametrize("name", ENLARGED)
    def test_they_match_float64(self, name: str, dtype: str) -> None:
        problem = ENLARGED[name]
        ids = check(problem, dtype)
        assert ids and ids <= HALO

    @pytest.mark.parametrize("residual", ["before", "after"])
    def test_a_shortcut_beside_them(self, residual: str, dtype: str) -> None:
        for problem in (
            Problem(2, 26, 34, (64, 40), 72, **SAME, activation="Silu", upsample=(2, 1)),
            Problem(2, 26, 34, (64,), 72, activation="Relu", upsample=(2,)),
            Problem(8, 64, 64, (64,), 128, activation="Relu", upsample=(2,)),  # several tiles for each block
        ):
            assert check(replace(problem, residual=residual), dtype)

    def test_several_outputs_beside_them(self, dtype: str) -> None:
        check(Problem(2, 20, 20, (128, 64), 64, **SAME, activation="Silu", upsample=(2, 1), outputs=(16, 48)), dtype)
        check(Problem(2, 20, 28, (128,), 256, upsample=(4,), outputs=(128, 128)), dtype)
