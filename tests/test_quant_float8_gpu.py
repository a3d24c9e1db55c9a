"""The float8 ConcatConv on Hopper: every tile against float64, NaN in pad lanes, guards."""

from __future__ import annotations

from dataclasses import replace

import gpu
import gpu_checks
import problems
import pytest
import quant_problems
from test_quant_gpu import HOPPER_PROBLEMS, possible_on_hopper

from cutefuse import kernels

pytestmark = pytest.mark.gpu


def check(problem: problems.Problem, output_type: str, one_scale: bool, seed: int) -> None:
    instance = quant_problems.instantiate(problem, output_type, one_scale=one_scale, seed=seed, dtype=gpu.FLOAT8)
    ids = kernels.configs(instance.call)
    whole = "int8" if output_type == gpu.FLOAT8 else output_type
    possible = possible_on_hopper(problem, whole, "kHWC16", one_scale)
    if possible:
        assert possible & {202, 203, 204, 221, 222} <= set(ids) <= possible
        gpu_checks.assert_every_tile_is_right(instance, ids)
    else:
        assert not ids


@pytest.mark.parametrize("one_scale", [True, False], ids=["one_scale", "own_scales"])
@pytest.mark.parametrize("output_type", ["float16", gpu.FLOAT8])
@pytest.mark.parametrize("name", HOPPER_PROBLEMS)
def test_tiles_match_float64(name: str, output_type: str, one_scale: bool) -> None:
    check(problems.affordable(HOPPER_PROBLEMS[name]), output_type, one_scale, seed=len(name))


@pytest.mark.parametrize("output_type", ["float16", gpu.FLOAT8])
@pytest.mark.parametrize("seed", range(2))
def test_random_problems_match_float64(seed: int, output_type: str) -> None:
    for i, problem in enumerate(problems.random_problems(12, 80 + seed)):
        check(problem, output_type, one_scale=i % 2 == 0, seed=i)


def test_small_integers_are_added_up_exactly() -> None:
    import torch

    problem = problems.Problem(1, 9, 39, (48, 96, 20), 40, 3, 3, pads=(1, 1, 1, 1))
    instance = quant_problems.instantiate(problem, dtype=gpu.FLOAT8)
    exact = instance.exact
    for i in range(4):  # sources and filter: -1, 0 or 1
        small = gpu.float8_of(gpu.from_float8(instance.buffers[i].view).nan_to_num().sign())
        instance.buffers[i].view.copy_(small)
    instance.buffers[4].view.fill_(0.125)
    instance.buffers[5].view.fill_(3.0)
    scales = (0.25, 2.0, 0.5)
    exact.x = [x.sign() * s for x, s in zip(exact.x, scales, strict=True)]
    exact.w = exact.w.sign() * 0.125
    exact.b.fill_(3.0)
    instance.call = replace(instance.call, attrs={**instance.call.attrs, "input_scales": scales})
    truth = problems.convolve(exact, torch.float64)
    for config in gpu_checks.tiles_of(instance.call):
        instance.run(config)
        assert torch.equal(instance.output()[0], truth.half()), f"tile {config}"


@pytest.mark.parametrize("output_type", ["float16", gpu.FLOAT8])
def test_nan_reaches_the_outputs_under_its_taps_and_no_other(output_type: str) -> None:
    problem = problems.Problem(1, 12, 20, (64, 32), 64, 3, 3, pads=(1, 1, 1, 1), activation="Relu")
    instance = quant_problems.instantiate(problem, output_type, dtype=gpu.FLOAT8)
    instance.buffers[1].view.view(12, 20, 32)[5, 7, 3] = gpu.FLOAT8_NAN
    for config in gpu_checks.tiles_of(instance.call):
        instance.run(config)
        nan = instance.output()[0].isnan().all(dim=1)[0]
        assert nan[4:7, 6:9].all() and instance.output()[0].isnan().sum() == 9 * 64, f"tile {config}"
