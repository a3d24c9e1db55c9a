"""The int8 ConcatConv on the GPU: every tile against float64, garbage in pad lanes and outputs, guards."""

from __future__ import annotations

from dataclasses import replace

import gpu_checks
import problems
import pytest
import quant_problems

from cutefuse import kernels

pytestmark = pytest.mark.gpu

OUTPUTS = ("float16", "float32", "bfloat16", "int8")
DRAINS, ONE_SCALE = {11, 12, 13, 14}, {1, 2, 3}


def check(
    problem: problems.Problem, output_type: str, layout: str, one_scale: bool, seed: int = 0, split: bool = True
) -> None:
    instance = quant_problems.instantiate(problem, output_type, layout, one_scale, seed)
    if not split:
        instance.call = replace(instance.call, workspace=0)
    ids = kernels.configs(instance.call)
    assert set(ids) == (DRAINS | ONE_SCALE if one_scale or len(problem.C) == 1 else DRAINS)
    gpu_checks.assert_every_tile_is_right(instance, ids)


@pytest.mark.parametrize("problem", problems.benchmark_shapes(), ids=lambda p: p.name)
def test_benchmark_shapes_match_float64(problem: problems.Problem) -> None:
    small = problems.affordable(replace(problem, N=min(problem.N, 2), H=min(problem.H, 128), W=min(problem.W, 128)))
    check(small, "float16", "kHWC16", one_scale=True)
    check(small, "int8", "kCHW32", one_scale=False)


@pytest.mark.parametrize("output_type", OUTPUTS)
@pytest.mark.parametrize("layout", quant_problems.LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_random_problems_match_float64(seed: int, layout: str, output_type: str) -> None:
    for i, problem in enumerate(problems.random_problems(16, 40 + seed)):
        check(problem, output_type, layout, one_scale=i % 2 == 0, seed=i, split=i % 3 != 0)


def test_sums_are_exact_integers_where_scales_are_powers_of_two() -> None:
    import torch

    problem = problems.Problem(1, 9, 11, (48, 96, 20), 40, 3, 3, pads=(1, 1, 1, 1))
    instance = quant_problems.instantiate(problem, "float32")
    scales = (0.25, 2.0, 0.5)
    exact, before = instance.exact, instance.call.attrs["input_scales"]
    exact.x = [(x / old).round() * new for x, old, new in zip(exact.x, before, scales, strict=True)]
    exact.w = (exact.w / instance.buffers[4].view.double().view(-1, 1, 1, 1)).round() * 0.125
    exact.b.fill_(3.0)
    instance.buffers[4].view.fill_(0.125)
    instance.buffers[5].view.fill_(3.0)
    instance.call = replace(instance.call, attrs={**instance.call.attrs, "input_scales": scales})
    truth = problems.convolve(exact, torch.float64)
    for config in kernels.configs(instance.call):
        instance.run(config)
        assert torch.equal(instance.output()[0].double(), truth), f"tile {config}"


def test_graph_replay_equals_eager_for_every_tile() -> None:
    problem = problems.Problem(1, 17, 23, (64, 40), 72, 3, 3, pads=(1, 1, 1, 1))
    gpu_checks.assert_replays_equal_eager(quant_problems.instantiate(problem, one_scale=True))


@pytest.mark.parametrize("name", ["2_sources_Relu", "odd_everything", "strided_to_int8", "odd_everything_to_int8"])
def test_the_plugin_is_right_in_both_formats(name: str) -> None:
    import numpy as np

    from cutefuse import host_memory as memory
    from cutefuse.host import Host, Input
    from cutefuse.ops.quant_concat_conv import OPERATOR

    case = next(c for c in OPERATOR.cases() if c.name == name)
    call = OPERATOR.call(case, "float32")
    operands = OPERATOR.operands(call, np.random.default_rng(3))
    arrays = [v.astype(t.dtype) for v, t in zip(operands, call.inputs, strict=True)]
    (truth,) = OPERATOR.reference(call, [a.astype(np.float64) for a in arrays])
    plugin = Host().build((call.op_type, call.attrs), [Input(t.dims, t.dtype) for t in call.inputs]).check()
    assert [c["formats"][0] for c in plugin.report["combinations"]] == ["kCHW32", "kHWC16"]
    for combination in range(2):
        with memory.Session() as session:
            (y,) = plugin._bind(session, plugin.context(combination=combination), arrays).results()
        step = 1 if y.dtype == np.int8 else 1e-4  # float32 may fall on the other side of a tie
        assert y.shape == truth.shape and np.abs(y - truth).max() <= step


def test_an_empty_batch_writes_nothing() -> None:
    instance = quant_problems.instantiate(problems.Problem(0, 8, 8, (16, 16), 8))
    instance.run()
    assert instance.buffers[-1].guards_intact()


def test_a_tile_for_one_scale_is_refused_for_several() -> None:
    instance = quant_problems.instantiate(problems.Problem(1, 8, 8, (16, 16), 8))
    with pytest.raises(kernels.KernelError, match="other scales"):
        kernels.run(replace(instance.call, config=1))


def test_misaligned_pointers_are_refused() -> None:
    instance = quant_problems.instantiate(problems.Problem(1, 8, 8, (16, 16), 8))
    shifted = replace(instance.call.inputs[0], data=instance.call.inputs[0].data + 8)
    with pytest.raises(kernels.KernelError, match="aligned to 16 bytes"):
        kernels.run(replace(instance.call, inputs=[shifted, *instance.call.inputs[1:]]))
