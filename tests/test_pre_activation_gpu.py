"""Pre-activated sources on the GPU: every tile that has the form against float64, pads that stay zero, NaN around."""

from __future__ import annotations

import random
from dataclasses import replace

import gpu
import gpu_checks
import problems
import pytest
from problems import ACTIVATIONS, Problem

from cutefuse import kernels

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32")
SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}


def check(problem: Problem, dtype: str, seed: int = 0) -> set[int]:
    """Run every legal tile and return their ids."""
    instance = problems.instantiate(replace(problems.affordable(problem), pre_activated=True), dtype, seed)
    ids = kernels.configs(instance.call)
    gpu_checks.assert_every_tile_is_right(instance, ids)
    return set(ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("side", "channels"), [(56, (64, 32, 32)), (28, (320, 32)), (14, (448, 224, 32)), (7, (704, 224))]
)
def test_layers_of_densenet(side: int, channels: tuple[int, ...], batch: int, dtype: str) -> None:
    ids = check(Problem(batch, side, side, channels, 128, activation="Relu"), dtype)
    hopper = {i for i in ids if i > 100}
    assert bool(hopper) == (gpu.device_facts()[0] == 90 and dtype != "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [
    (32, 32), (8, 24), (32, 16, 8), (64, 32, 32), (72, 32, 8, 24, 32), (32, 160, 16, 32, 32), (8,) * 8,
    (448, *(32,) * 7),
])  # fmt: skip
@pytest.mark.parametrize("geometry", [{}, SAME, {"R": 2, "S": 3, "strides": (2, 1), "pads": (0, 2, 1, 0)}])
def test_narrow_sources(geometry: dict[str, tuple[int, ...]], channels: tuple[int, ...], dtype: str) -> None:
    """Parts of a divided sum begin at any of them."""
    check(Problem(2, 9, 11, channels, 72, **geometry, activation="Relu"), dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [1, 2])
def test_a_nan_of_one_narrow_source_stays_at_its_pixel(source: int) -> None:
    instance = problems.instantiate(Problem(1, 5, 6, (64, 32, 24), 8, pre_activated=True), "float16")
    instance.buffers[source].view.view(5, 6, -1)[2, 3, 23] = float("nan")
    for config in gpu_checks.tiles_of(instance.call):
        instance.run(config)
        values, _ = instance.output()
        assert bool(values[0, :, 2, 3].isnan().all()) and int(values.isnan().sum()) == 8, config


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_random_problems_match_float64(dtype: str, seed: int) -> None:
    rng = random.Random(seed)
    for i, problem in enumerate(problems.random_problems(12, seed + 900, channel_step=8)):
        channels = tuple(-(-c // 8) * 8 for c in problem.C)
        pads = problem.pads if rng.random() < 0.7 else (0, 0, 0, 0)
        problem = replace(problem, C=channels, pads=pads)
        if min(problem.output) >= 1:
            check(problem, dtype, seed=100 * seed + i)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_behind(dtype: str, activation: str) -> None:
    check(Problem(2, 13, 17, (40, 24), 75, **SAME, activation=activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", [
    SAME, {"pads": (2, 0, 1, 3)}, {"R": 5, "S": 1, "pads": (4, 0, 3, 0)}, {"strides": (2, 2)},
    {"R": 3, "S": 3, "pads": (2, 2, 2, 2), "dilations": (2, 2), "strides": (2, 1)},
])  # fmt: skip
def test_a_pad_stays_zero_whatever_the_shift(dtype: str, geometry: dict[str, tuple[int, ...]]) -> None:
    """A shift of 50 in every channel: a pad that became ReLU(50) would be far off."""

    problem = Problem(2, 9, 11, (24, 72, 8), 40, **geometry, pre_activated=True)  # type: ignore[arg-type]
    instance = problems.instantiate(problem, dtype)
    assert instance.vectors is not None
    instance.vectors[1].fill_(50.0)
    shift = instance.buffers[len(problem.C) + 3]
    shift.view.fill_(50.0)
    gpu_checks.assert_every_tile_is_right(instance, kernels.configs(instance.call))
    gpu.synchronize()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_at_its_pixel_and_is_not_hidden_by_relu(dtype: str) -> None:
    instance = problems.instantiate(Problem(1, 5, 6, (16, 8), 8, pre_activated=True), dtype)
    instance.buffers[0].view.view(5, 6, 16)[2, 3, 1] = float("nan")
    for config in gpu_checks.tiles_of(instance.call):
        instance.run(config)
        values, _ = instance.output()
        assert bool(values[0, :, 2, 3].isnan().all()) and int(values.isnan().sum()) == 8, config


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("height", "width"), [(3, 40000), (20001, 4)])
def test_images_of_more_than_2_to_the_14_pixels_a_side(height: int, width: int, dtype: str) -> None:
    problem = Problem(1, height, width, (40, 32), 64, activation="Relu", **SAME)
    ids = check(problem, dtype)
    assert any(i > 100 for i in ids) == (gpu.device_facts()[0] == 90 and dtype != "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_replay_equals_eager(dtype: str) -> None:
    instance = problems.instantiate(Problem(1, 7, 7, (704, 224, 32), 128, activation="Relu", pre_activated=True), dtype)
    gpu_checks.assert_replays_equal_eager(instance)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tiles_that_do_not_know_the_form_are_refused(dtype: str) -> None:
    plain = problems.instantiate(Problem(1, 16, 16, (64, 64), 128), dtype)
    formed = problems.instantiate(Problem(1, 16, 16, (64, 64), 128, pre_activated=True), dtype)
    unable = set(kernels.configs(plain.call)) - set(kernels.configs(formed.call))
    assert unable
    for config in unable:
        with pytest.raises(kernels.KernelError, match="ask configs"):
            kernels.run(replace(formed.call, config=config))


def test_missing_and_misaligned_vectors_are_refused() -> None:
    call = problems.instantiate(Problem(1, 8, 8, (16, 16), 8, pre_activated=True), "float16").call
    for data, words in ((0, "must be set"), (call.inputs[-1].data + 2, "aligned to 16 bytes")):
        with pytest.raises(kernels.KernelError, match=words):
            kernels.run(replace(call, inputs=[*call.inputs[:-1], replace(call.inputs[-1], data=data)]))
