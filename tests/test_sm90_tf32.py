"""Hopper's tiles of float32 against float64: every form, images that are no multiples of a patch, wider outputs.

The bounds are those of problems.reference() for the Ampere tiles. TMA rounds both factors of a product to the 11 bits
of tf32, to nearest: 2^-11 of each factor, 2^-10 of the product. Cut off by wgmma they would be twice as wrong, and on
the side of zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpu
import gpu_checks
import problems
import pytest
from problems import Problem
from test_sm90 import CORNERS, TF32
from test_sm90_forms_gpu import ENLARGED, LARGE

from cutefuse import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}
SEVERAL_TAPS = [p for p in (*CORNERS, *LARGE) if p.R * p.S > 1 and p.strides == (1, 1)]


@pytest.fixture
def hopper_gpu() -> None:
    if gpu.device_facts()[0] != 90:
        pytest.skip("needs a Hopper GPU")


def of_vectors(problem: Problem) -> Problem:
    """The problem with channels that TMA reads: pixels of whole 16 bytes."""
    return replace(problem, C=tuple(c + -c % 4 for c in problem.C), tail=problem.tail + -problem.tail % 4)


def tiles(instance: problems.Instance) -> list[int]:
    return [i for i in kernels.configs(instance.call) if i in TF32]


def check(problem: Problem, seed: int = 0) -> set[int]:
    """Run these tiles alone and return their ids."""
    problem = of_vectors(problem if problem.upsample else problems.affordable(problem))
    instance = problems.instantiate(problem, "float32", seed)
    gpu_checks.assert_every_tile_is_right(instance, tiles(instance))
    return set(tiles(instance))


@pytest.mark.parametrize("residual", ["", "before", "after"])
@pytest.mark.parametrize("index", range(len(SEVERAL_TAPS)))
def test_corner_sizes_match_float64(index: int, residual: str) -> None:
    plain = SEVERAL_TAPS[index]
    activation = plain.activation or ("LeakyRelu" if residual == "after" else "")
    check(replace(plain, residual=residual, activation=activation), seed=index)


@pytest.mark.parametrize("activation", problems.ACTIVATIONS)
def test_every_activation_with_and_without_a_shortcut(activation: str) -> None:
    for residual in ("", "before", "after") if activation else ("", "before"):
        problem = Problem(2, 21, 37, (72,), 150, **SAME, activation=activation, residual=residual)
        assert check(problem) == set(TF32)


@pytest.mark.parametrize("name", ENLARGED)
def test_enlarged_sources_match_float64(name: str) -> None:
    problem = ENLARGED[name]
    assert check(problem)
    if problem.R * problem.S > 1:
        check(replace(problem, residual="after", activation="Relu"))


@pytest.mark.parametrize("outputs", [(64, 64), (128, 128), (8, 56, 13), (16, 8, 8, 96), (128, 1), (4, 12, 71)])
def test_several_outputs_match_float64(outputs: tuple[int, ...]) -> None:
    shape = Problem(2, 33, 37, (40, 24), sum(outputs), **SAME, activation="Silu", outputs=outputs)
    assert check(shape) == set(TF32)
    assert check(replace(shape, H=34, W=38, upsample=(1, 2))) == set(TF32)


@pytest.mark.parametrize(("K", "start", "tail"), [(64, 8, 8), (13, 8, 3), (130, 24, 30)])
def test_outputs_and_sources_in_wider_pixels(K: int, start: int, tail: int) -> None:
    import torch

    problem = Problem(2, 19, 35, (64, 72), K, **SAME, activation="Relu", starts=(4, 12), tail=8)
    instance = problems.instantiate(problem, "float32")
    wide = start + K + tail
    buffer = gpu.Buffer.of(2 * 19 * 35 * wide, "float32", 7.0)
    out = replace(instance.call.outputs[0], data=buffer.view.data_ptr() + 4 * start, ld=wide)
    call: Any = replace(instance.call, outputs=[out])
    truth, bound = problems.reference(instance)
    for config in TF32:
        buffer.view.fill_(7.0)
        kernels.run(replace(call, config=config))
        gpu.synchronize()
        pixels = buffer.view.view(2, 19, 35, wide)
        y = pixels[..., start : start + K].permute(0, 3, 1, 2).double()
        assert bool(((y - truth).abs() <= bound).all()), config
        beside = torch.cat([pixels[..., :start], pixels[..., start + K :]], -1)
        assert bool((beside == 7.0).all()) and bool(buffer.guards_intact()), config


def test_both_factors_are_rounded_to_nearest() -> None:
    """One product for each output: half a unit of tf32 from each factor, where cutting off loses up to a whole one."""
    instance = problems.instantiate(Problem(1, 20, 40, (32,), 64, **SAME), "float32")
    x, w, b = (buffer.view for buffer in instance.buffers[:3])
    nearest = 2.0**-11 * 1.001
    for fraction in (0.25, 0.4999, 0.5001, 0.75):
        odd = 1 + fraction * 2.0**-10
        for in_pixels in (True, False):
            x.fill_(odd if in_pixels else 1.0), b.fill_(0.0)
            w.fill_(0.0)
            w.view(64, 9, 64)[:, 4, 5] = 1.0 if in_pixels else odd  # the middle tap of one channel
            for config in TF32:
                instance.run(config)
                values, _ = instance.output()
                assert bool(((values - odd).abs() <= nearest).all()), (config, fraction, in_pixels, values.flatten()[0])


def test_nan_and_infinity_stay_at_their_pixels() -> None:
    instance = problems.instantiate(Problem(1, 24, 40, (32,), 64, **SAME), "float32")
    x = instance.buffers[0].view.view(24, 40, 32)
    x[5, 7, 3], x[15, 30, 3] = float("nan"), float("inf")
    for config in TF32:
        instance.run(config)
        values, _ = instance.output()
        finite = values.isfinite()[0].all(0)
        assert not bool(finite[4:7, 6:9].any()) and not bool(finite[14:17, 29:32].any()), config
        assert int((~finite).sum()) == 18, config


def test_launches_one_after_the_other_and_replays_give_the_same_bits() -> None:
    """Programmatic dependent launch starts a kernel early; its threads and TMA must wait for the one before."""
    shape = problems.emulable(Problem(1, 64, 64, (64,), 64, **SAME, activation="Tanh", residual="after"))
    for config in TF32:
        stages = [problems.instantiate(shape, "float32", seed) for seed in range(6)]
        for previous, stage in zip(stages, stages[1:], strict=False):
            stage.call.inputs[0] = stage.call.inputs[-1] = previous.call.outputs[0]
        gpu_checks.assert_dependent_launches_wait(stages, config)
        gpu_checks.assert_replays_equal_eager(stages[0], [config])
