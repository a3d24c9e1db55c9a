"""Views, residuals, several outputs and ranges of wider outputs on the GPU: every tile against float64, NaN around."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

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
    instance = problems.instantiate(problem, dtype, seed)
    ids = kernels.configs(instance.call)
    gpu_checks.assert_every_tile_is_right(instance, ids)
    return set(ids)


def form(problem: Problem, rng: random.Random, dtype: str) -> Problem:
    """A random form over a random problem."""
    vector = 4 if dtype == "float32" else 8
    sources = len(problem.C)
    if rng.random() < 0.6:
        factors = tuple(rng.choice([1, 2, 2, 3, 4]) for _ in problem.C) if rng.random() < 0.6 else (1,) * sources
        step = 12 if set(factors) != {1} else 1
        problem = replace(
            problem, H=problem.H * step, W=problem.W * step, N=1 if step > 1 else problem.N, upsample=factors,
            C=tuple(min(c, 72) if step > 1 else c for c in problem.C),
            starts=tuple(vector * rng.randint(0, 3) for _ in problem.C), tail=rng.choice([0, 3, 8]),
        )  # fmt: skip
        problem = replace(
            problem,
            H=min(problem.H, 24 if problems.SANITIZED else 48),
            W=min(problem.W, 24 if problems.SANITIZED else 96),
        )
    kind = rng.choice(["", "before", "after", "outputs"])
    if kind == "outputs" and problem.K > vector:
        borders = sorted({vector * rng.randint(1, (problem.K - 1) // vector) for _ in range(rng.randint(1, 3))})
        widths = tuple(b - a for a, b in zip([0, *borders], [*borders, problem.K], strict=True))
        return replace(problem, outputs=widths)
    if kind == "after" and problem.activation == "":
        kind = "before"
    return replace(problem, residual=kind) if kind != "outputs" else problem


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_random_forms_match_float64(dtype: str, seed: int) -> None:
    rng = random.Random(1000 + seed)
    for i, problem in enumerate(problems.random_problems(16, seed + 50)):
        formed = form(problem, rng, dtype)
        if min(formed.output) >= 1:
            check(formed, dtype, seed=100 * seed + i)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", ["before", "after"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_residuals_of_every_activation(dtype: str, residual: str, activation: str) -> None:
    if residual == "after" and activation == "":
        pytest.skip("one op_type stands for both")
    check(Problem(2, 13, 17, (40, 24), 75, **SAME, activation=activation, residual=residual), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [(64, 64), (8, 56, 13), (16, 8, 8, 96), (128, 1)])
def test_several_outputs(dtype: str, outputs: tuple[int, ...]) -> None:
    ids = check(Problem(2, 13, 17, (40, 24), sum(outputs), **SAME, activation="Silu", outputs=outputs), dtype)
    hopper = {i for i in ids if i > 100}
    assert bool(hopper) == (gpu.device_facts()[0] == 90), "each output is a launch of its own"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(2, 26, 34, (64, 40), 72, **SAME, activation="Relu", upsample=(2, 1)),
        Problem(1, 24, 36, (72, 8, 16), 40, **SAME, upsample=(1, 3, 4), starts=(8, 0, 16), tail=5),
        Problem(1, 128, 64, (64, 16), 24, 1, 1, activation="Silu", upsample=(64, 1)),
        Problem(3, 10, 14, (128,), 130, 5, 3, (2, 1), (3, 0, 1, 2), (1, 2), upsample=(2,)),
        Problem(1, 12, 20, (64, 64), 256, **SAME, upsample=(2, 2), residual="after", activation="Relu"),
        Problem(1, 20, 20, (256, 256), 64, **SAME, upsample=(2, 1), outputs=(16, 48), activation="Silu"),
    ],
    ids=["2+1", "mixed", "64", "strided", "residual", "split_reduction"],
)
def test_upsampled_sources(problem: Problem, dtype: str) -> None:
    ids = check(problem, dtype)
    table = {c["id"]: c["name"] for c in kernels.operator_of("CuteConcatConv1")["configs"]}
    assert all("_up_" in table[i] or table[i].startswith(("sm90_halo", "sm90_rows", "sm90_two")) for i in ids)


def test_an_enlarged_image_of_the_largest_size() -> None:
    check(Problem(1, 16384, 4, (8,), 8, **SAME, upsample=(2,)), "float16")
    check(Problem(1, 4, 16384, (8,), 8, **SAME, upsample=(4,)), "float16")


@pytest.mark.parametrize("channels", [(2, 126), (18, 36, 72, 144), (38, 19, 128), (1, 1, 3), (66,), (20, 34)])
def test_float32_channels_that_are_no_multiple_of_4(channels: tuple[int, ...]) -> None:
    table = {c["id"]: c["name"] for c in kernels.operator_of("CuteConcatConv1")["configs"]}
    ids = check(Problem(2, 13, 17, channels, 37, **SAME, activation="Relu"), "float32")
    assert {table[i].split("_")[1] for i in ids} == {"any"}
    check(Problem(1, 14, 18, channels, 37, **SAME, upsample=(2,) * len(channels)), "float32")
    check(Problem(1, 14, 18, channels, 138, residual="after", activation="Tanh"), "float32")


def test_float32_channels_of_wider_pixels_are_copied_in_pieces_of_both() -> None:
    for channels, starts, tail in (((6, 5), (4, 8), 2), ((64, 18), (4, 0), 6), ((3, 12), (0, 4), 1)):
        check(Problem(2, 9, 11, channels, 70, **SAME, starts=starts, tail=tail), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "start", "tail"), [(64, 8, 8), (20, 16, 4), (20, 0, 44), (13, 8, 3), (130, 24, 30)])
@pytest.mark.parametrize("shape", [(9, 11, 1), (40, 40, 3)])
def test_an_output_may_be_a_range_of_a_wider_tensor(
    dtype: str, K: int, start: int, tail: int, shape: tuple[int, int, int]
) -> None:
    import torch

    h, w, r = shape
    problem = Problem(2, h, w, (64, 72), K, r, r, pads=(r // 2,) * 4, activation="Relu")
    instance = problems.instantiate(problem, dtype)
    wide = gpu.padded(start + K + tail, dtype)
    buffer = gpu.Buffer.of(2 * h * w * wide, dtype, 7.0)
    out = replace(instance.call.outputs[0], data=buffer.view.data_ptr() + start * buffer.view.element_size(), ld=wide)
    aligned = out.data % 16 == 0
    call: Any = replace(instance.call, outputs=[out])
    truth, bound = problems.reference(instance)
    for config in gpu_checks.tiles_of(call):
        buffer.view.fill_(7.0)
        if not aligned:
            with pytest.raises(kernels.KernelError, match="aligned to 16 bytes"):
                kernels.run(replace(call, config=config))
            continue
        kernels.run(replace(call, config=config))
        gpu.synchronize()
        pixels = buffer.view.view(2, h, w, wide)
        y = pixels[..., start : start + K].permute(0, 3, 1, 2).double()
        assert bool(((y - truth).abs() <= bound).all()), f"tile {config}"
        beside = torch.cat([pixels[..., :start], pixels[..., start + K :]], -1)
        if wide == gpu.padded(K, dtype):
            beside = beside[..., :0]  # pad lanes of its own
        assert bool((beside == 7.0).all()), f"tile {config} wrote beside its range"
        assert buffer.guards_intact()


@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_replay_equals_eager_with_residual_and_split_reduction(dtype: str) -> None:
    problem = Problem(1, 10, 12, (256, 128), 72, **SAME, activation="Relu", residual="before")
    instance = problems.instantiate(problem, dtype)
    assert kernels.workspace_bytes(instance.call) > 0
    gpu_checks.assert_replays_equal_eager(instance)


def test_nan_of_a_residual_stays_at_its_pixel() -> None:
    instance = problems.instantiate(Problem(1, 5, 6, (16, 8), 8, activation="Relu", residual="after"), "float16")
    instance.buffers[4].view.view(5, 6, 8)[2, 3, 1] = float("nan")  # x0, x1, w, b, z
    for config in gpu_checks.tiles_of(instance.call):
        instance.run(config)
        values, _ = instance.output()
        assert bool(values[0, 1, 2, 3].isnan()) and int(values.isnan().sum()) == 1


def test_null_and_misaligned_residuals_and_second_outputs_are_refused() -> None:
    residual = problems.instantiate(Problem(1, 8, 8, (16, 16), 8, residual="before"), "float16").call
    for data, words in ((0, "must be set"), (residual.inputs[-1].data + 2, "aligned to 16 bytes")):
        with pytest.raises(kernels.KernelError, match=words):
            kernels.run(replace(residual, inputs=[*residual.inputs[:-1], replace(residual.inputs[-1], data=data)]))
    several = problems.instantiate(Problem(1, 8, 8, (16, 16), 24, outputs=(8, 16)), "float16").call
    with pytest.raises(kernels.KernelError, match="must be set"):
        kernels.run(replace(several, outputs=[several.outputs[0], replace(several.outputs[1], data=0)]))


def test_tiles_that_do_not_know_a_form_are_refused() -> None:
    plain = problems.instantiate(Problem(1, 16, 16, (64, 64), 128, **SAME), "float16")
    formed = problems.instantiate(Problem(1, 16, 16, (64, 64), 128, **SAME, upsample=(2, 1)), "float16")
    unable = set(kernels.configs(plain.call)) - set(kernels.configs(formed.call))
    assert unable
    for config in unable:
        with pytest.raises(kernels.KernelError, match="ask configs"):
            kernels.run(replace(formed.call, config=config))
