"""Int8 sums that a node bounds, on the GPU: Hopper's tiles keep them as float32, and must not notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated
import gpu
import gpu_checks
import problems
import pytest
import quant_problems
from problems import Problem

from cutefuse import kernels

pytestmark = pytest.mark.gpu

SMALL = 2**22
PROBLEMS = {
    "four sources, several tiles of a block": Problem(9, 61, 67, (48, 130, 16, 64), 328, 1, 1, activation="Silu"),
    "strides": Problem(2, 47, 93, (33, 65), 176, 3, 3, strides=(2, 3), pads=(1, 0, 2, 1), activation="Sigmoid"),
    "eight sources": Problem(4, 12, 64, (8, 70, 8, 129, 8, 8, 64, 8), 160, 1, 1, activation="Tanh"),
    "1x1 with pads": Problem(2, 13, 29, (80, 24, 40), 64, 1, 1, pads=(1, 2, 0, 1), activation="LeakyRelu"),
    "few filters": Problem(3, 40, 40, (32, 32, 32, 32), 64, 1, 1, activation="Relu"),
    "patches": Problem(1, 20, 20, (32, 48), 128, 3, 3, pads=(1, 1, 1, 1), activation="Relu"),
    "divided": Problem(1, 13, 13, (256, 128, 256), 128, 1, 1, activation="Silu"),
}  # fmt: skip


def bounded(problem: Problem, output_type: str = "float16", seed: int = 0) -> quant_problems.Instance:
    instance = quant_problems.instantiate(problems.emulable(problem), output_type, seed=seed, trained=True)
    assert 0 < instance.call.attrs["sum_bound"] <= SMALL
    return instance


@pytest.mark.parametrize("output_type", ["float16", "int8"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_bounded_sums_match_float64(name: str, output_type: str) -> None:
    instance = bounded(PROBLEMS[name], output_type, len(name))
    gpu_checks.assert_every_tile_is_right(instance, kernels.configs(instance.call))


def extreme(bound: int) -> tuple[quant_problems.Instance, Any]:
    """Sums of +-(2^22 - 2^15) in the unit of the second source, whose scale is half of the first one's, before its own
    products come; and the outputs, exactly."""
    import torch

    problem = Problem(1, 16, 20, (128, 512), 128, 1, 1)
    instance = quant_problems.instantiate(problem)
    signs = 1.0 - 2.0 * (torch.arange(128, device=gpu.DEVICE) % 2)
    for buffer in instance.buffers[:2]:
        buffer.view.fill_(-128)
    columns = instance.buffers[2].view.view(128, -1)
    columns.copy_((127 * signs).to(torch.int8)[:, None].expand_as(columns))
    instance.buffers[3].view.fill_(2.0**-9)
    instance.buffers[4].view.fill_(0.0)
    attrs = {**instance.call.attrs, "input_scales": (1.0, 0.5), "sum_bound": bound}
    instance.call = replace(instance.call, attrs=attrs)
    return instance, -127 * 128 * (128 + 512 * 0.5) * 2.0**-9 * signs


@pytest.mark.parametrize("bound", [0, 127 * 128 * 256 + 2, SMALL + 1])
def test_sums_at_the_bound_are_exact(bound: int) -> None:
    instance, truth = extreme(bound)
    hopper = sorted(set(kernels.configs(instance.call)) & quant_problems.ON_HOPPER)
    for config in emulated.compiled(instance, hopper):
        instance.run(config)
        y = instance.output()[0]
        assert (y == truth.half().view(1, -1, 1, 1)).all(), f"tile {config}"


def test_a_bound_that_does_not_hold_shows_and_one_beyond_2_22_is_ignored() -> None:
    """So the tests above see sums that are kept as float32, where they are to be."""
    instance = quant_problems.instantiate(Problem(1, 16, 20, (512, 64), 128, 1, 1))
    instance.buffers[0].view.fill_(-128)
    instance.buffers[1].view.fill_(-128)
    instance.buffers[2].view.fill_(127)
    attrs = {**instance.call.attrs, "input_scales": (1.0, 0.5)}
    outputs = {}
    for bound in (0, SMALL, SMALL + 1):
        instance.call = replace(instance.call, attrs={**attrs, "sum_bound": bound})
        instance.run(245)
        outputs[bound] = instance.output()[0].clone()
    assert (outputs[SMALL] != outputs[0]).any()
    assert (outputs[SMALL + 1] == outputs[0]).all()
