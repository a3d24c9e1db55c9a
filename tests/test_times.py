"""What the predicted times depend on, and what has no prediction; `make calibrate` holds them to recorded ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from calibration.rows import call_of, shapes
from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.kernels import Call
from cutefuse.operators.conv_call import make_call
from cutefuse.operators.conv_form import Form, Source
from cutefuse.operators.conv_math import Geometry
from cutefuse.select.engines import engine_of
from cutefuse.select.rules_torch import turn_us
from cutefuse.select.times import Convolution, convolution_us, device_of, fused_us

SHAPES = shapes("conv")


def test_a_tile_that_is_named_is_the_one_predicted() -> None:
    call = call_of(SHAPES["unet_up4_b1"])
    tiles = kernels.configs(call)
    times = [kernels.predicted_us(replace(call, config=t, _keep=[])) for t in tiles]
    assert times[0] == kernels.predicted_us(call) and len(set(times)) > 5


@pytest.mark.parametrize("pre_activated", [False, True])
@pytest.mark.parametrize("channels", [(64, 32, 32, 32, 32), (24, 8), (96, 32, 32), (64, 40, 40), (64, 32)])
def test_a_narrow_source_of_16_bits_takes_a_k_tile_of_its_own(channels: tuple[int, ...], pre_activated: bool) -> None:
    def us(channels: tuple[int, ...], tile: int) -> float | None:
        sources = [Source((1, c, 56, 56), c) for c in channels]
        form = Form(len(sources), "Relu", pre_activated=pre_activated)
        call = make_call(form, sources, (128,), Geometry((1, 1)), "float16", {})
        return kernels.predicted_us(replace(call, config=tile, sm=90, sm_count=132, _keep=[]))

    blocks = sum(-(-c // 64) for c in channels)
    for tile in (152, 154):
        one_less = us((64,) * (blocks - 1), tile)
        assert us(channels, tile) == pytest.approx(us((64,) * blocks, tile), rel=0.02) != one_less


@pytest.mark.parametrize("change", [{"config": 9999}, {"sm": 60}])
def test_nothing_is_predicted_for_what_cannot_run(change: dict[str, int]) -> None:
    assert kernels.predicted_us(replace(call_of(SHAPES["unet_up4_b1"]), _keep=[], **change)) is None


def test_nothing_is_predicted_for_unknown_sizes_or_norms() -> None:
    assert kernels.predicted_us(call_of(SHAPES["unet_up4_b1"], batch=-1)) is None
    assert kernels.predicted_us(call_of(SHAPES["unet_up4_b1"], batch=0)) == 0
    x, gamma = kernels.Tensor((64, 512), "float16"), kernels.Tensor((512,), "float16")
    assert kernels.predicted_us(Call("CuteRMSNorm", [x, gamma], [x], {"epsilon": 1e-5})) is None


def test_more_work_takes_longer_and_nothing_takes_no_time() -> None:
    small = Convolution(1, 64, 40, 40, 64, 40, 40, 9, "float16")
    large = replace(small, N=64)
    device = device_of(90)
    assert 2.0 < convolution_us(small, device) < convolution_us(large, device)
    assert device.pass_us(0) > 1.0
    assert device.pass_us(4_000_000) - device.pass_us(0) == pytest.approx(device.move_us(4_000_000))
    assert device.pass_us(8_000_000) < device.copy_us(8_000_000)


def test_a_concat_costs_more_with_more_sources_and_on_a_slower_gpu() -> None:
    """Recorded on an H200: 67 MB of two sources 35 us, 101 MB of five 82 us; a Concat of planes of 67 MB whose half is
    enlarged 108 us beside the enlargement's own 10."""
    device, torch = device_of(90, "H200"), engine_of("torch")
    assert torch.join_us(device, 67e6, 2) == pytest.approx(35, rel=0.2)
    assert torch.join_us(device, 101e6, 5) == pytest.approx(82, rel=0.2)
    assert turn_us(device, 67e6, 33.5e6) == pytest.approx(108, rel=0.2)
    assert turn_us(device, 67e6) < turn_us(device, 67e6, 33.5e6)
    assert torch.join_us(device_of(80), 67e6, 2) > 1.5 * torch.join_us(device, 67e6, 2)


def test_filters_that_are_no_whole_vectors_are_padded_in_kernels_of_their_own() -> None:
    device, odd = device_of(90), Convolution(1, 64, 128, 128, 2, 128, 128, 9, "float16")
    assert convolution_us(odd, device) == pytest.approx(11.6, rel=0.2)  # recorded
    assert convolution_us(odd, device) - convolution_us(replace(odd, K=8), device) > 3
    pointwise = replace(odd, taps=1)
    assert convolution_us(pointwise, device) == pytest.approx(convolution_us(replace(pointwise, K=8), device), rel=0.1)


def test_a_product_with_one_pixel_is_one_with_a_vector() -> None:
    """Recorded with the pass of their activation, in squeeze-and-excite blocks: 20 filters of up to 64 channels 3.2 us
    in the mean, three of 480 channels 4.3, and 16 of up to 512 on 7 x 7 pixels 5.0."""
    device, one = device_of(90, "H200"), Convolution(1, 48, 1, 1, 1152, 1, 1, 1, "float16")
    pass_us = device.pass_us(2 * one.output_bytes)
    assert convolution_us(one, device) + pass_us == pytest.approx(3.2, rel=0.1)
    longer = replace(one, C=480, K=20)
    assert convolution_us(longer, device) + device.pass_us(80) == pytest.approx(4.3, rel=0.1)
    several = replace(one, H=7, W=7, P=7, Q=7)
    assert convolution_us(several, device) + pass_us == pytest.approx(5.0, rel=0.15)
    assert convolution_us(replace(one, N=2), device) > convolution_us(one, device) + 1


@pytest.mark.parametrize(
    ("batch", "channels", "side", "filters", "recorded_us"),
    [(8, 64, 512, 2, 99), (1, 64, 512, 2, 19.4), (8, 32, 512, 1, 58), (8, 256, 128, 4, 29)],
)
def test_few_pointwise_filters_take_cudnn_longer_than_their_bytes(
    batch: int, channels: int, side: int, filters: int, recorded_us: float
) -> None:
    conv = Convolution(batch, channels, side, side, filters, side, side, 1, "float16")
    assert convolution_us(conv, device_of(90, "H200")) == pytest.approx(recorded_us, rel=0.25)


def test_the_prediction_is_that_of_the_fastest_tile_that_an_engine_tries() -> None:
    """UNet++'s first level, 32 to 32 channels on 512 x 512 pixels: 16.5 to 18 us with the tile that is fastest when
    timed, and 61 us with the library's first guess."""
    form, geometry = Form(1, "Relu", False, 1, ""), Geometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    call = make_call(form, [Source((1, 32, 512, 512), 32)], (32,), geometry, "float16", {})
    device = device_of(90, "H200")
    found = fused_us(call, device, 0) or math.nan
    asked = replace(call, sm=90, sm_count=132, _keep=[])
    assert 15 < found < 25
    times = {tile: kernels.predicted_us(replace(asked, config=tile, _keep=[])) for tile in kernels.configs(asked)}
    slowest = max(times, key=lambda tile: times[tile] or 0.0)
    named = replace(asked, config=slowest, _keep=[])
    assert fused_us(named, device, 0) == times[slowest] and (times[slowest] or 0.0) > 2 * found


@pytest.mark.parametrize(("dilation", "us"), {12: (23, 172), 24: (18, 124), 36: (15, 104)}.items())
def test_cudnn_takes_long_over_dilated_depthwise_filters(dilation: int, us: tuple[float, float]) -> None:
    """Those of DeepLabV3+ on an H200, one image and eight: of taps outside of the image it makes less."""
    geometry = Geometry((3, 3), (1, 1), (dilation,) * 4, (dilation,) * 2)
    for batch, recorded in zip((1, 8), us, strict=True):
        size = batch * 512 * 32 * 32 * 2
        assert device_of(90).depthwise_us(size, 9, geometry.dilated_taps((32, 32))) == pytest.approx(recorded, rel=0.03)
        plain = Geometry((3, 3), pads=(1,) * 4)
        assert device_of(90).depthwise_us(size, 9, plain.dilated_taps((32, 32))) == device_of(90).depthwise_us(size, 9)


def test_other_gpus_are_scaled_by_their_peaks() -> None:
    conv = Convolution(8, 256, 80, 80, 256, 80, 80, 9, "float16")
    times = [convolution_us(conv, device_of(sm)) for sm in (90, 80, 86, 87)]
    assert times == sorted(times) and times[1] > 2 * times[0]
    ours = [fused_us(call_of(SHAPES["unet_up2_b1"]), device_of(sm), 5e7) or math.nan for sm in (90, 80, 87)]
    assert ours == sorted(ours)


def test_a_gpu_goes_by_its_name_or_by_its_capability() -> None:
    assert device_of(0).name == device_of(90).name == "H200" and device_of(0).sm == 90 and device_of(90).assumed
    assert device_of(0, "RTX 4090").sm == 89 and not device_of(89, "NVIDIA L4").assumed
    with pytest.raises(CutefuseError, match="peak rates of a GPU 'Voodoo 2' are not known; choose one of"):
        device_of(90, "Voodoo 2")


@pytest.mark.parametrize(("name", "taken", "others"), [
    ("A100", "A100 SXM4 80GB", ["A100 80GB PCIe", "A100 40GB"]), ("H100", "H100 SXM", ["H100 PCIe", "H100 NVL"]),
    ("4070", "RTX 4070", ["RTX 4070 Ti SUPER", "RTX 4070 Ti", "RTX 4070 SUPER"]), ("V100", "V100 PCIe", ["V100 SXM2"]),
    ("Orin", "Jetson AGX Orin 64GB", ["Jetson AGX Orin 32GB", "Jetson Orin NX 16GB"]),
    ("A100 40GB", "A100 40GB", []), ("NVIDIA H100 80GB HBM3", "H100 SXM", []), ("H200", "H200", []), ("", "H200", []),
])  # fmt: skip
def test_a_name_that_several_boards_share_takes_the_usual_one_and_names_the_others(
    name: str, taken: str, others: list[str]
) -> None:
    device = device_of(0, name)
    assert device.name == taken and list(device.others) == others and device.assumed == (not name)


def test_a_capability_without_peaks_of_its_own_takes_those_of_a_near_board() -> None:
    rates = [device_of(sm).peaks.device for sm in (103, 110, 121)]
    assert rates == ["B200", *["Jetson AGX Orin 64GB"] * 2]
    names = [device_of(sm).name for sm in (103, 110, 121)]  # no board of another capability stands there
    assert names == [f"compute capability {sm / 10}" for sm in (103, 110, 121)]
    assert [device_of(sm).near for sm in (0, 80, 86, 87, 89, 90, 100, 120)] == [False] * 8
    assert device_of(110).assumed and device_of(110).sm == 110
