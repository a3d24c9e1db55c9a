"""The first guess on Hopper: among the tiles within 10 % of the fastest, by times of an H200 (docs/measured.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutefuse import kernels
from cutefuse.ops import conv_call, conv_math
from cutefuse.ops.conv_form import Form, Source

HEAD, STAGE = (48, 96, 192, 384), (38, 19, 128)
CASES = {  # (images, height, width), channels, enlarged by, filters, taps, pre-activated, names
    "enlarged by 8, pointwise": ((1, 128, 256), HEAD, (1, 2, 4, 8), 720, 1, False, {"sm80_up_128x128x32_s4"}),
    "enlarged by 8, 3072 channels": (
        (2, 128, 128), (768,) * 4, (8, 4, 2, 1), 768, 1, False, {"sm80_up_128x128x32_s4"}),
    "enlarged by 2, 3x3": ((1, 512, 512), (64, 64), (2, 1), 64, 3, False, {"sm90_halo_64x16x32"}),
    "odd channels": (
        (1, 46, 46), STAGE, (1,) * 3, 128, 7, False, {"sm90_rows_64x224_split", "sm90_rows_64x192_split"}),
    "odd channels, 8 images": (
        (8, 46, 46), STAGE, (1,) * 3, 128, 7, False,
        {"sm90_halo_64x16x32", "sm90_rows_64x192_split", "sm90_halo_128x8x15"}),
    "pre-activated, 14 pixels": (
        (1, 14, 14), (256, 32, 32, 32), (1,) * 4, 128, 1, True, {"sm90_small_64x16", "sm90_small_64x32"}),
    "pre-activated, 7 pixels": (
        (1, 7, 7), (704, 224, 32, 32), (1,) * 4, 128, 1, True, {"sm90_small_64x16", "sm90_small_64x32"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_first_guess_is_near_the_fastest(name: str) -> None:
    (images, height, width), channels, factors, filters, taps, pre, near = CASES[name]
    enlarged = any(f > 1 for f in factors)
    sources = [
        Source((images, c, height // f, width // f), c, upsample=f) for c, f in zip(channels, factors, strict=True)
    ]
    geometry = conv_math.Geometry((taps, taps), pads=(taps // 2,) * 4)
    form = Form(len(channels), "Relu", view=enlarged, pre_activated=pre)
    call = replace(conv_call.make_call(form, sources, [filters], geometry, "float16", {}), sm=90, sm_count=132)
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
    assert names[kernels.configs(call)[0]] in near
