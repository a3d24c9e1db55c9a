"""The whole operator on every Hopper tile against float64: shortcut before or after the activation, several outputs."""

from __future__ import annotations

from dataclasses import replace

import emulated
import gpu
import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import CORNERS, TILES

from cutefuse import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

DTYPES = ("float16", "bfloat16")
SMALL = {i for i, name in TILES.items() if "_small_" in name}  # one output, no shortcut
IN_TURN = {i for i, name in TILES.items() if "_pp_" in name}  # no shortcut
SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}


@pytest.fixture
def hopper_gpu() -> None:
    if gpu.device_facts()[0] != 90:
        pytest.skip("needs a Hopper GPU")


def check(problem: Problem, dtype: str, seed: int = 0) -> set[int]:
    """Run the Hopper tiles alone and return their ids."""
    instance = problems.instantiate(problems.affordable(problem), dtype, seed)
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
        assert check(problem, dtype) == set(TILES) - SMALL - IN_TURN
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
    import torch

    shape = problems.emulable(Problem(1, 64, 64, (64,), 64, **SAME, activation="Tanh", residual="after"))
    for config in sorted(TILES):
        stages = [problems.instantiate(shape, "float16", seed) for seed in range(6)]
        if config not in kernels.configs(stages[0].call):
            continue
        for previous, stage in zip(stages, stages[1:], strict=False):
            stage.call.inputs[-1] = previous.call.outputs[0]
        launches = [kernels.Launcher(replace(s.call, config=config)) for s in stages]
        results = []
        for wait in (True, False):
            for stage in stages:
                stage.buffers[-1].view.fill_(float("nan"))
            gpu.synchronize()
            for launch in launches:
                launch(gpu.current_stream())
                if wait:
                    gpu.synchronize()
            gpu.synchronize()
            results.append(stages[-1].output()[0].clone())
        assert torch.equal(*results) and not bool(results[0].isnan().any()), TILES[config]


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
            assert ids == check(replace(shape, K=sum(outputs), activation="Silu"), dtype) - SMALL

    def test_more_tiles_than_multiprocessors(self, dtype: str) -> None:
        check(Problem(8, 80, 80, (64,), 256, **SAME, activation="Relu", outputs=(64, 192)), dtype)
        check(Problem(8, 80, 80, (64,), 256, activation="HardSwish", outputs=(72, 56, 128)), dtype)

    @pytest.mark.skipif(emulated.EMULATED, reason="torch profiles no kernel of the emulator")
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
