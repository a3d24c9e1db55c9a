"""Which tiles dense NHWC pixels run on, and what is refused: every legal call has tiles that plan."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from problems import Problem

from cutefuse import kernels
from cutefuse.kernels import CHANNELS_LAST, LINEAR, Call, Tensor

SAME = {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}
VARIANTS = [v | {"op": op["name"]} for op in kernels.describe()["ops"] for v in op["variants"]
            if v["kind"] == "convolution"]  # fmt: skip
CHANNELS = (*range(1, 10), 16, 18, 24, 36, 48, 64, 80, 85, 128, 144, 255, 256)
NUMBERS = {1: "float32", 10: "float16", 16: "bfloat16"}


def call_of(variant: dict[str, Any], dtype: str, rng: random.Random, layout: int) -> Call:
    """A random call of an op_type: legal but for what the type, the device or a pre-activation forbid."""
    view, quantised, spread = variant["view"], variant["quantised"], variant["spread"]
    channels = [rng.randint(1, 8) if variant["image"] else rng.choice(CHANNELS) for _ in range(variant["sources"])]
    depthwise = variant["depthwise"]
    outputs = [sum(channels)] if depthwise else [rng.choice(CHANNELS) for _ in range(variant["outputs"])]
    if spread > 1 or (layout == 0 and len(outputs) > 1):
        outputs = [8 * k for k in outputs]
    step = 1 if layout == 1 else 8
    r, s = rng.choice([(1, 1), (3, 3), (1, 5), (7, 7), (2, 3)])
    strides, pads = [rng.choice([1, 1, 2]) for _ in range(2)], [rng.randint(0, 2) for _ in range(4)]
    factors = [rng.choice([1, 2]) if view else 1 for _ in channels]
    starts = [step * rng.randint(0, 3) if view else 0 for _ in channels]
    n, h, w = rng.choice([1, 3]), 2 * rng.randint(4, 30), 2 * rng.randint(4, 30)
    p, q = (h + pads[0] + pads[2] - r) // strides[0] + 1, (w + pads[1] + pads[3] - s) // strides[1] + 1
    packed = channels if depthwise else [-(-c // 64) * 64 * r * s for c in channels]
    filters, tail = sum(outputs) * spread**2, rng.randint(0, 9) if view else 0
    inputs = [Tensor((n, start + c + tail, h // f, w // f), dtype, CHANNELS_LAST)
              for c, f, start in zip(channels, factors, starts, strict=True)]  # fmt: skip
    if variant["image"]:
        inputs = [replace(inputs[0], dtype=rng.choice([dtype, "float32"]), layout=LINEAR)]
    inputs += [
        Tensor((r * s if depthwise else filters, sum(packed)), dtype, LINEAR),
        *[Tensor((filters,), "float32", LINEAR)] * (1 + quantised),
    ]
    inputs += [Tensor((sum(channels),), dtype, LINEAR)] * 2 if variant["pre_activated"] else []
    attrs: dict[str, Any] = {"channels": channels, "kernel_shape": [r, s], "strides": strides, "pads": pads,
                             "packed_sizes": packed, "layout": [layout]}  # fmt: skip
    first = step * rng.randint(0, 3) if view and variant["residual"] else 0
    inputs += [Tensor((n, first + filters + tail, p, q), dtype, CHANNELS_LAST)] if variant["residual"] else []
    number = rng.choice(list(NUMBERS))
    if quantised:
        attrs |= {"input_scales": [rng.choice([0.5, 0.25]) for _ in channels], "output_type": [number]}
    else:
        attrs |= {"output_channels": outputs if len(outputs) > 1 else [0], "residual_start": [first]}
        attrs |= {"channel_starts": starts, "upsample": factors} if view else {}
    kind = dtype if not quantised or "int8" in variant["output_types"] else NUMBERS[number]
    results = [Tensor((n, k, p * spread, q * spread), kind, CHANNELS_LAST) for k in outputs]
    return Call(variant["op_type"], inputs, results, attrs)


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_every_legal_call_has_tiles_that_plan_and_every_refusal_is_a_sentence(sm: int) -> None:
    if kernels.reject_device(sm) is not None:
        pytest.skip(f"this build holds no code for {sm}")
    rng = random.Random(sm)
    legal = refused = 0
    for _ in range(700):
        variant = rng.choice(VARIANTS)
        types = ("int8", "float8_e4m3fn") if variant["quantised"] else ("float16", "bfloat16", "float32")
        call = replace(call_of(variant, rng.choice(types), rng, rng.choice([0, 1, 1])), sm=sm, sm_count=100)
        if reason := kernels.reject(call):
            refused += 1
            expected = ("float8", "pre-activation", "an image of", "a depthwise source of", "float32 filters (output")
            assert any(words in reason for words in expected) and ". " not in reason, reason
            continue
        ids = kernels.configs(call)
        assert ids, call
        assert {kernels.Plan(replace(call, config=i, _keep=[])).config for i in (ids[0], ids[-1])} == {ids[0], ids[-1]}
        assert kernels.predicted_us(call) is not None and kernels.workspace_bytes(call) >= 0
        legal += 1
    assert legal > 400 and refused > 10


def plain(channels: tuple[int, ...], filters: int, dtype: str = "float16", layout: int = 1, **problem: Any) -> Call:
    p = Problem(1, 20, 20, channels, filters, **{**SAME, **problem})
    packed = [-(-c // 64) * 64 * p.R * p.S for c in channels]
    inputs = [Tensor((1, c, 20, 20), dtype, CHANNELS_LAST) for c in channels]
    inputs += [Tensor((filters, sum(packed)), dtype, LINEAR), Tensor((filters,), "float32", LINEAR)]
    attrs = {"channels": channels, "kernel_shape": (p.R, p.S), "pads": p.pads, "packed_sizes": packed, "layout": layout}
    return Call(p.op_type, inputs, [Tensor(p.output, dtype, CHANNELS_LAST)], attrs, sm=90, sm_count=132)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("channels", "filters"), [((64, 32), 128), ((8,), 8), ((72, 8), 24)])
def test_whole_vectors_run_the_tiles_of_padded_pixels(channels: tuple[int, ...], filters: int, dtype: str) -> None:
    assert kernels.configs(plain(channels, filters, dtype)) == kernels.configs(plain(channels, filters, dtype, 0))


def test_only_tiles_that_copy_small_pieces_take_pixels_between_vectors() -> None:
    names = {c["id"]: c["name"] for c in kernels.operator_of("CuteConcatConv1")["configs"]}
    for channels in ((3,), (85,), (64, 36), (255, 8)):
        assert all("_any_" in names[i] or "_image_" in names[i] for i in kernels.configs(plain(channels, 64)))
    last = kernels.configs(plain((64,), 255))
    assert last and not any("sm90" in names[i] or "_any_" in names[i] for i in last)


def test_layouts_are_judged() -> None:
    assert "layout is 2" in str(kernels.reject(plain((8,), 8, layout=2)))
    call = plain((3,), 8, layout=0)
    assert kernels.reject(replace(call, inputs=[replace(call.inputs[0], ld=3), *call.inputs[1:]])) is not None
    assert kernels.reject(replace(call, attrs={**call.attrs, "layout": 1})) is None
