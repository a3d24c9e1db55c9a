"""Kernels on the GPU: every tile against float64, with NaN in pad lanes and outputs, guards around every buffer."""

from __future__ import annotations

from dataclasses import replace

import emulated
import gpu
import gpu_checks
import problems
import pytest

from cutefuse import kernels

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32")


def check(problem: problems.Problem, dtype: str, seed: int = 0) -> None:
    problem = problems.affordable(problem)
    instance = problems.instantiate(problem, dtype, seed)
    gpu_checks.assert_every_tile_is_right(instance, kernels.configs(instance.call))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", problems.benchmark_shapes(), ids=lambda p: p.name)
def test_benchmark_shapes_match_float64(problem: problems.Problem, dtype: str) -> None:
    check(replace(problem, N=min(problem.N, 2)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(10))
def test_random_problems_match_float64(dtype: str, seed: int) -> None:
    for i, problem in enumerate(problems.random_problems(20, seed, channel_step=4 if dtype == "float32" else 1)):
        check(problem, dtype, seed=100 * seed + i)


SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1), "activation": "Relu"}
TAPS = [
    problems.Problem(1, 40, 17, (64,), 64, **SAME),  # a tile spans 16 image rows
    problems.Problem(5, 3, 19, (72, 8), 65, **SAME),  # several images in a tile, a vector of channels in a block
    problems.Problem(2, 33, 129, (16, 200), 136, **SAME),  # one, two and four mma steps in a source's last block
    problems.Problem(1, 64, 64, (512,), 256, **SAME),  # one source, no tail, splits
    problems.Problem(1, 30, 30, (24, 320, 8), 300, **SAME),  # splits that start inside a source
    problems.Problem(1, 50, 300, (64, 64), 19, 1, 3, pads=(0, 2, 0, 0)),  # one filter row, pads on one side
    problems.Problem(2, 31, 70, (40,), 64, 5, 3, pads=(2, 3, 1, 3), activation="Silu"),
    problems.Problem(1, 41, 45, (64, 48), 128, 3, 3, (2, 1), (2, 2, 2, 2), (2, 2)),  # rows strided, taps apart
    problems.Problem(1, 20, 130, (64,), 64, 2, 3, pads=(0, 4, 1, 4), dilations=(3, 4)),
    problems.Problem(1, 1, 700, (64, 64), 64, 3, 3, pads=(1, 1, 1, 1)),  # two of three filter rows are halo
]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("problem", TAPS, ids=lambda p: f"{p.H}x{p.W}")
def test_taps_that_share_pixels_match_float64(problem: problems.Problem, dtype: str) -> None:
    instance = problems.instantiate(problems.emulable(problem, wide=True), dtype)
    names = {c["id"]: c["name"] for c in kernels.operator_of(instance.call.op_type)["configs"]}
    sharing = [i for i in kernels.configs(instance.call) if "taps" in names[i]]
    gpu_checks.assert_every_tile_is_right(instance, sharing)
    gpu_checks.assert_replays_equal_eager(instance, sharing)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", problems.ACTIVATIONS)
def test_activations_pass_nan_on_and_keep_infinities(dtype: str, activation: str) -> None:
    import torch

    instance = problems.instantiate(problems.Problem(1, 3, 5, (8, 8), 8, activation=activation), dtype)
    instance.buffers[0].view.view(-1, 8)[0, 0] = float("nan")  # one pixel of source 0
    for config in gpu_checks.tiles_of(instance.call):
        instance.run(config)
        values, _ = instance.output()
        assert bool(values[0, :, 0, 0].isnan().all())
        assert not bool(torch.isnan(values[0, :, 1:]).any())


def test_permuting_sources_with_their_filter_slices_changes_nothing() -> None:
    import torch

    first = problems.instantiate(problems.Problem(2, 9, 11, (24, 72), 40, 3, 3, pads=(1, 1, 1, 1)), "float16")
    second = problems.instantiate(replace(first.problem, C=(72, 24)), "float16")
    for to, source in ((0, 1), (1, 0)):
        second.buffers[to].view.copy_(first.buffers[source].view)
    swapped = torch.cat([first.w[:, 24:], first.w[:, :24]], 1)
    second.buffers[2].view.copy_(problems.pack_filter(swapped, (72, 24)).reshape(-1))
    second.buffers[3].view.copy_(first.buffers[3].view)
    first.run(), second.run()
    torch.testing.assert_close(first.output()[0], second.output()[0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_replay_equals_eager_for_every_tile(dtype: str) -> None:
    gpu_checks.assert_replays_equal_eager(
        problems.instantiate(problems.Problem(1, 17, 23, (64, 40), 72, 3, 3, pads=(1, 1, 1, 1)), dtype)
    )


@pytest.mark.parametrize("size", [64, 14])  # a second kernel adds the parts of the small one's divided sums
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_of_launches_sees_each_result(dtype: str, size: int) -> None:
    """Programmatic dependent launch starts a kernel early; it must still wait for the one before."""
    same = {**SAME, "activation": "Tanh", "residual": "after"}
    shape = problems.emulable(problems.Problem(1, size, size, (64,), 64, **same))
    first = problems.instantiate(shape, dtype)
    for config in emulated.compiled(first, kernels.configs(first.call)):
        stages = [problems.instantiate(shape, dtype, seed) for seed in range(6)]
        for previous, stage in zip(stages, stages[1:], strict=False):
            stage.call.inputs[0] = stage.call.inputs[-1] = previous.call.outputs[0]
        gpu_checks.assert_dependent_launches_wait(stages, config)


def test_two_streams_at_once_give_the_serial_results() -> None:
    import torch

    shapes = [
        problems.Problem(1, 40, 56, (128, 64), 96, 3, 3, pads=(1, 1, 1, 1), activation=a) for a in ("Relu", "Silu")
    ]
    instances = [problems.instantiate(problems.emulable(p), "float16", seed) for seed, p in enumerate(shapes)]
    serial = []
    for instance in instances:
        instance.run()
        serial.append(instance.output()[0].clone())
        instance.buffers[-1].view.fill_(float("nan"))
    gpu.synchronize()
    streams = [gpu.new_stream() for _ in instances]
    launches = [kernels.Launcher(instance.call) for instance in instances]
    for _ in range(emulated.repeats(50)):
        for launch, stream in zip(launches, streams, strict=True):
            launch(stream.cuda_stream)
    gpu.synchronize()
    for instance, expected in zip(instances, serial, strict=True):
        assert torch.equal(instance.output()[0], expected)


def test_an_empty_batch_writes_nothing() -> None:
    instance = problems.instantiate(problems.Problem(0, 8, 8, (16, 16), 8), "float16")
    instance.run()
    assert instance.buffers[-1].guards_intact()


def test_misaligned_and_null_pointers_are_refused() -> None:
    instance = problems.instantiate(problems.Problem(1, 8, 8, (16, 16), 8), "float16")
    shifted = replace(instance.call.inputs[0], data=instance.call.inputs[0].data + 2)
    with pytest.raises(kernels.KernelError, match="aligned to 16 bytes"):
        kernels.run(replace(instance.call, inputs=[shifted, *instance.call.inputs[1:]]))
    null = replace(instance.call.outputs[0], data=0)
    with pytest.raises(kernels.KernelError, match="must be set"):
        kernels.run(replace(instance.call, outputs=[null]))


def test_a_tile_of_another_type_is_refused() -> None:
    instance = problems.instantiate(problems.Problem(1, 8, 8, (16, 16), 8), "float16")
    other = problems.instantiate(instance.problem, "float32")
    wrong = next(i for i in kernels.configs(other.call) if i not in kernels.configs(instance.call))
    with pytest.raises(kernels.KernelError, match="ask configs"):
        kernels.run(replace(instance.call, config=wrong))


def test_device_facts_are_those_of_a_supported_gpu() -> None:
    sm, multiprocessors = gpu.device_facts()
    assert sm >= 80 and multiprocessors > 0
