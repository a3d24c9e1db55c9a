"""The float8 ConcatConv, by mma.sync and on Hopper by wgmma: every tile against float64, NaN in pad lanes, guards."""

from __future__ import annotations

from dataclasses import replace

import emulated
import gpu
import gpu_checks
import problems
import pytest
import quant_problems
from test_quant_gpu import HOPPER_PROBLEMS, SMALL, possible_on_hopper

from cutefuse import kernels

pytestmark = pytest.mark.gpu

MMA = {31, 32, 33, 34}  # by mma.sync


@pytest.fixture(autouse=True)
def has_float8() -> None:
    """Skip where the GPU, or the library's code that runs there, has no float8, and say which."""
    instance = quant_problems.instantiate(problems.Problem(1, 4, 4, (16,), 16), dtype=gpu.FLOAT8)
    if reason := kernels.reject(instance.call):
        assert "float8" in reason
        pytest.skip(reason)


def check(problem: problems.Problem, output_type: str, one_scale: bool, seed: int, split: bool = True) -> None:
    instance = quant_problems.instantiate(problem, output_type, one_scale=one_scale, seed=seed, dtype=gpu.FLOAT8)
    if not split:
        instance.call = replace(instance.call, workspace=0, workspace_bytes=0)
    ids = kernels.configs(instance.call)
    whole = "int8" if output_type == gpu.FLOAT8 else output_type
    possible = possible_on_hopper(problem, whole, "kHWC16")
    own = possible & ({204, 245, 246} | SMALL)
    assert MMA | own <= set(ids) <= MMA | possible
    assert not possible or ids[0] in possible, "wgmma comes first where there is such a tile"
    gpu_checks.assert_every_tile_is_right(instance, ids)


@pytest.mark.parametrize("one_scale", [True, False], ids=["one_scale", "own_scales"])
@pytest.mark.parametrize("output_type", ["float16", gpu.FLOAT8])
@pytest.mark.parametrize("name", HOPPER_PROBLEMS)
def test_tiles_match_float64(name: str, output_type: str, one_scale: bool) -> None:
    check(problems.affordable(HOPPER_PROBLEMS[name]), output_type, one_scale, seed=len(name))


@pytest.mark.parametrize("output_type", ["float16", "float32", "bfloat16", gpu.FLOAT8])
@pytest.mark.parametrize("seed", range(2))
def test_random_problems_match_float64(seed: int, output_type: str) -> None:
    for i, problem in enumerate(problems.random_problems(12, 80 + seed)):
        check(problem, output_type, one_scale=i % 2 == 0, seed=i, split=i % 3 != 0)


@pytest.mark.parametrize("tail", [1, 15, 16, 17, 31, 33, 63])
def test_tails_of_channels_match_float64(tail: int) -> None:
    """Pad lanes hold NaN, and the last mma of a source may have half of its channels."""
    problem = problems.Problem(1, 9, 13, (tail, 64 + tail, tail), 24, 3, 3, pads=(1, 1, 1, 1))
    check(problem, "float32", one_scale=False, seed=tail)


@pytest.mark.parametrize("filters", [1, 31, 32, 33, 64, 127, 129])
def test_filters_beside_a_tile_match_float64(filters: int) -> None:
    check(problems.Problem(1, 11, 13, (96,), filters, 1, 1, activation="Silu"), gpu.FLOAT8, True, seed=filters)


@pytest.mark.parametrize("one_scale", [True, False], ids=["one_scale", "own_scales"])
def test_long_sums_of_one_sign_go_on_in_float32(one_scale: bool) -> None:
    """Where the tensor cores keep 14 bits, a product loses 2^-14 of the sum that it is added to, on the average.

    In one such sum, 9216 products would lose 2^-7 of it or more; 128 at a time lose some 2^-10.
    """
    import torch

    problem = problems.Problem(1, 6, 7, (512, 512), 32, 3, 3, pads=(1, 1, 1, 1))
    instance = quant_problems.instantiate(problem, "float32", one_scale=one_scale, seed=3, dtype=gpu.FLOAT8)
    for buffer in instance.buffers[:3]:  # sources and filter
        buffer.view.bitwise_and_(0x7F)
    exact = instance.exact
    exact.x, exact.w = [x.abs() for x in exact.x], exact.w.abs()
    truth = problems.convolve(exact, torch.float64)
    for call in (instance.call, replace(instance.call, workspace=0, workspace_bytes=0)):  # in parts, and whole
        instance.call = call
        for config in emulated.compiled(instance, kernels.configs(call)):
            instance.run(config)
            error = ((instance.output()[0] - truth).abs() / truth).max().item()
            assert error < 2**-9, f"tile {config}: {error:.2g}"


def test_graph_replay_equals_eager_for_every_tile() -> None:
    problem = problems.Problem(1, 17, 43, (64, 40), 72, 3, 3, pads=(1, 1, 1, 1))
    instance = quant_problems.instantiate(problem, dtype=gpu.FLOAT8)
    tiles = [i for i in kernels.configs(instance.call) if i in MMA]
    gpu_checks.assert_replays_equal_eager(instance, emulated.compiled(instance, tiles))


def test_an_empty_batch_writes_nothing() -> None:
    instance = quant_problems.instantiate(problems.Problem(0, 8, 8, (16, 16), 8), dtype=gpu.FLOAT8)
    instance.run()
    assert instance.buffers[-1].guards_intact()


@pytest.mark.parametrize("config", [1, 13])
def test_a_tile_of_int8_is_refused(config: int) -> None:
    instance = quant_problems.instantiate(problems.Problem(1, 8, 8, (16, 16), 8), dtype=gpu.FLOAT8)
    with pytest.raises(kernels.KernelError, match=f"tile {config} cannot run float8_e4m3fn"):
        kernels.run(replace(instance.call, config=config))


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
    for config in emulated.compiled(instance, gpu_checks.tiles_of(instance.call)):
        instance.run(config)
        assert torch.equal(instance.output()[0], truth.half()), f"tile {config}"


@pytest.mark.parametrize("output_type", ["float16", gpu.FLOAT8])
def test_nan_reaches_the_outputs_under_its_taps_and_no_other(output_type: str) -> None:
    problem = problems.Problem(1, 12, 20, (64, 32), 64, 3, 3, pads=(1, 1, 1, 1), activation="Relu")
    instance = quant_problems.instantiate(problem, output_type, dtype=gpu.FLOAT8)
    instance.buffers[1].view.view(12, 20, 32)[5, 7, 3] = gpu.FLOAT8_NAN
    for config in emulated.compiled(instance, gpu_checks.tiles_of(instance.call)):
        instance.run(config)
        nan = instance.output()[0].isnan().all(dim=1)[0]
        assert nan[4:7, 6:9].all() and instance.output()[0].isnan().sum() == 9 * 64, f"tile {config}"
