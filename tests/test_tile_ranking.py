"""What the guess of a tile on Hopper depends on; `make calibrate` holds first guesses to the fastest tiles.

Hopper's float32 tiles are for twice the rate of mma.sync where that limits a filter of several taps; the Ampere tiles
serve wherever there is little to do or TMA cannot read the pixels.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutefuse import kernels
from cutefuse.operators import conv_call, conv_math
from cutefuse.operators.conv_form import Form, Source

FLOAT32 = {  # (images, height, width), channels, enlarged by, filters, taps, whether a patch tile of Hopper is guessed
    "8 images": ((8, 80, 80), (128, 128), (1, 1), 128, 3, True),
    "enlarged": ((1, 128, 128), (256, 256), (2, 1), 256, 3, True),
    "few filters": ((1, 512, 512), (64, 64), (1, 1), 64, 3, True),
    "small image": ((1, 14, 14), (256,), (1,), 256, 3, False),
    "pointwise": ((8, 80, 80), (128, 128), (1, 1), 256, 1, False),
    "odd channels": ((8, 46, 46), (38, 19, 128), (1,) * 3, 128, 7, False),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_is_given_to_tiles_of_hopper_where_they_multiply_faster(name: str) -> None:
    (images, height, width), channels, factors, filters, taps, patch = FLOAT32[name]
    sources = [
        Source((images, c, height // f, width // f), c, upsample=f) for c, f in zip(channels, factors, strict=True)
    ]
    geometry = conv_math.Geometry((taps, taps), pads=(taps // 2,) * 4)
    form = Form(len(channels), "Relu", view=max(factors) > 1)
    call = replace(conv_call.make_call(form, sources, [filters], geometry, "float32", {}), sm=90, sm_count=132)
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
    assert str(names[kernels.configs(call)[0]]).startswith("sm90_") == patch


@pytest.mark.parametrize("taps", [1, 3])
def test_im2col_is_slow_over_pixels_whose_stride_is_no_multiple_of_32_bytes(taps: int) -> None:
    """200 channels of float16 are 400 bytes, 208 are 416: both are four blocks. Plain matrices take no longer."""
    if reason := kernels.reject_device(90):
        pytest.skip(reason)

    def predicted_us(channels: int) -> float:
        geometry = conv_math.Geometry((taps, taps), pads=(taps // 2,) * 4)
        call = conv_call.make_call(Form(1), [Source((1, channels, 40, 40), channels)], [64], geometry, "float16", {})
        found = kernels.predicted_us(replace(call, sm=90, sm_count=132, config=158))  # small 64x104
        assert found is not None
        return found

    assert (predicted_us(200) > 1.2 * predicted_us(208)) == (taps > 1)


def test_an_ampere_tile_starts_early_only_where_its_blocks_spread_evenly() -> None:
    """100 blocks, of which three fit on a multiprocessor, would crowd onto some of 132; 25 leave enough free."""
    if reason := kernels.reject_device(90):
        pytest.skip(reason)

    def predicted_us(filters: int, sm: int) -> float:
        source = Source((1, 64, 40, 40), 64)
        call = conv_call.make_call(Form(1), [source], [filters], conv_math.Geometry((1, 1)), "float16", {})
        found = kernels.predicted_us(replace(call, sm=sm, sm_count=132, config=5))  # 64x64
        assert found is not None
        return found

    assert predicted_us(256, 90) - predicted_us(64, 90) == pytest.approx(2.3 - 1.2)
    assert predicted_us(256, 80) == predicted_us(64, 80), "code for 8.0 cannot wait"


def test_an_ampere_tile_takes_longer_over_sources_whose_last_k_tile_is_nearly_empty() -> None:
    """80 channels are one and a quarter of a k-tile, and take more than half as long again as one."""
    if reason := kernels.reject_device(90):
        pytest.skip(reason)

    def predicted_us(channels: int) -> float:
        geometry = conv_math.Geometry((5, 5), pads=(2,) * 4)
        sources = [Source((4, channels, 26, 26), channels)] * 4
        call = conv_call.make_call(Form(4), sources, [64], geometry, "float16", {})
        call = replace(call, sm=90, sm_count=132, config=43, workspace_bytes=0)  # 128x64x64_w8
        return kernels.predicted_us(call) or 0.0

    whole, over = predicted_us(64), predicted_us(80)
    assert 1.7 * whole > over > 1.4 * whole > 0
