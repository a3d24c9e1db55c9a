"""The calls of the int8 and float8 ConcatConv without a GPU: which are legal, why not, and the formats of plugins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from quant_problems import SMALL

from cutefuse import kernels
from cutefuse.kernels import BLOCKS32, CHANNELS_LAST, LINEAR
from cutefuse.operators.conv_math import pack
from cutefuse.operators.quant_concat_conv import OPERATOR
from cutefuse_host import Host, HostError, Input

CASES = {c.name: c for c in OPERATOR.cases()}


def good(variant: str = "CuteQConcatConv2Relu", layout: int = CHANNELS_LAST, **changes: Any) -> kernels.Call:
    attrs: dict[str, Any] = {"channels": (64, 24), "kernel_shape": (3, 3), "pads": (1, 1, 1, 1),
                             "packed_sizes": (576, 576), "input_scales": (0.1, 0.2), "output_scale": 0.5}  # fmt: skip
    inputs = [kernels.Tensor((2, c, 20, 20), "int8", layout) for c in (64, 24)]
    inputs += [kernels.Tensor((32, 1152), "int8", LINEAR), *[kernels.Tensor((32,), "float32", LINEAR)] * 2]
    y = kernels.Tensor((2, 32, 20, 20), "int8" if variant.endswith("Q") else "float32",
                       layout if variant.endswith("Q") else CHANNELS_LAST)  # fmt: skip
    return kernels.Call(variant, inputs, [y], attrs | changes)


def swapped(call: kernels.Call, index: int, **changes: Any) -> kernels.Call:
    inputs = [replace(t, **changes) if i == index else t for i, t in enumerate(call.inputs)]
    return replace(call, inputs=inputs)


def big_batch(images: int) -> kernels.Call:
    """Fewer than 2^31 pixels, but not in blocks of 32 channels, of which the first source has two."""
    call = good("CuteQConcatConv2ReluQ", BLOCKS32)
    call = replace(call, outputs=[replace(call.outputs[0], dims=(images, 32, 20, 20))])
    for i, channels in enumerate((64, 24)):
        call = swapped(call, i, dims=(images, channels, 20, 20))
    return call


@pytest.mark.parametrize("layout", [CHANNELS_LAST, BLOCKS32])
def test_good_calls_are_legal_and_tiles_depend_on_the_scales(layout: int) -> None:
    for variant in (
        "CuteQConcatConv2Relu",
        "CuteQConcatConv2ReluQ",
    ):  # to float32, which Hopper's do not write; to int8
        assert kernels.reject(good(variant, layout)) is None
        one_scale, takes_hopper = good(variant, layout, input_scales=(0.1, 0.1)), (variant[-1], layout) == ("Q", 1)
        drains, hopper = {12, 13, 14, 19, 41}, HOPPER if takes_hopper else set()
        assert set(kernels.configs(replace(good(variant, layout), sm=80))) == drains
        assert set(kernels.configs(replace(one_scale, sm=80))) == drains | {1, 17}
        assert set(kernels.configs(good(variant, layout))) == drains | hopper
        own, one = (set(kernels.configs(c)) - drains for c in (good(variant, layout), one_scale))
        assert own < one and one - own == {1, 17}


@pytest.mark.parametrize(("scales", "kept"), [
    ((0.1, 0.1), True), ((1e-4, 100.0), True), ((10.0, 0.1), True), ((100.0, 1e-4), False), ((1e30, 1e-30), False),
])  # fmt: skip
def test_hopper_keeps_one_sum_where_it_fits_into_32_bits(scales: tuple[float, float], kept: bool) -> None:
    """576 products of 2^14 fit in units of a scale that is a hundredth of theirs, not of a millionth."""
    call = on(good("CuteQConcatConv2ReluQ", input_scales=scales), 90)
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    assert set(kernels.configs(call)) == {12, 13, 14, 19, 41} | SMALL | (ONE_SUM if kept else set()) | (
        {1, 17} if scales[0] == scales[1] else set()
    )
    if not kept:
        with pytest.raises(kernels.KernelError, match="tile 204 cannot run sums beyond 32 bits"):
            kernels.Plan(replace(call, config=204, _keep=[]))
    in_floats = set(kernels.configs(in_float8(call)))
    assert in_floats == FLOAT8 | SMALL | (ONE_SUM if scales[0] < 1e30 else set()), "float8's stay within float32"


def strided(call: kernels.Call, stride: int, dims: tuple[int, ...]) -> kernels.Call:
    """The same call with a stride in both directions, and the dims of its output."""
    attrs = {**call.attrs, "strides": (stride, stride)}
    return replace(call, attrs=attrs, outputs=[replace(call.outputs[0], dims=dims)])


def of_filters(call: kernels.Call, K: int) -> kernels.Call:
    """The same call with another number of filters."""
    *sources, w, scales, b = call.inputs
    inputs = [*sources, replace(w, dims=(K, w.dims[1])), *(replace(t, dims=(K,)) for t in (scales, b))]
    y = call.outputs[0]
    return replace(call, inputs=inputs, outputs=[replace(y, dims=(y.dims[0], K, *y.dims[2:]))])


def in_float8(call: kernels.Call) -> kernels.Call:
    """The same call over float8."""

    def typed(tensors: Sequence[kernels.Tensor]) -> list[kernels.Tensor]:
        return [replace(t, dtype="float8_e4m3fn") if t.dtype == "int8" else t for t in tensors]

    return replace(call, inputs=typed(call.inputs), outputs=typed(call.outputs))


FLOAT8 = {31, 32, 33, 34}
# In 201 two blocks share their pixels, which needs more filters than these calls have.
ONE_SUM = {204, 211, 237, 243, 245, 246}
HOPPER = ONE_SUM | SMALL


def to_type(call: kernels.Call, dtype: str, number: int) -> kernels.Call:
    """The same call with a float output."""
    return replace(
        call, outputs=[replace(call.outputs[0], dtype=dtype)], attrs={**call.attrs, "output_type": number}, _keep=[]
    )


def test_float8_runs_on_tiles_of_its_own_and_on_hoppers() -> None:
    to_float8 = in_float8(good("CuteQConcatConv2ReluQ"))
    assert set(kernels.configs(to_float8)) == FLOAT8 | HOPPER
    one_scale = in_float8(good("CuteQConcatConv2ReluQ", input_scales=(0.1, 0.1)))
    assert set(kernels.configs(one_scale)) == FLOAT8 | HOPPER
    to_float32 = in_float8(good())
    assert set(kernels.configs(to_type(to_float32, "float16", 10))) == FLOAT8 | HOPPER
    for call in (to_float32, to_type(to_float32, "bfloat16", 16)):  # which Hopper's do not write
        assert set(kernels.configs(call)) == FLOAT8
    part = replace(to_float8, inputs=[*to_float8.inputs[:2], *good().inputs[2:]])
    assert "the packed filter must be a linear float8_e4m3fn matrix" in (kernels.reject(part) or "")
    assert "not channels-last" in (kernels.reject(in_float8(good("CuteQConcatConv2ReluQ", BLOCKS32))) or "")
    mixed = replace(to_float8, outputs=good("CuteQConcatConv2ReluQ").outputs)
    assert "must be a channels-last float8_e4m3fn tensor" in (kernels.reject(mixed) or "")


def on(call: kernels.Call, sm: int, **changes: Any) -> kernels.Call:
    return replace(call, sm=sm, sm_count=20, _keep=[], **changes)


@pytest.mark.parametrize("sm", [80, 86, 87])
def test_gpus_without_float8_refuse_it_in_one_sentence(sm: int) -> None:
    if kernels.reject_device(sm) is not None:
        pytest.skip("the library holds no code for this GPU at all")
    for call in (in_float8(good()), in_float8(good("CuteQConcatConv2ReluQ"))):
        refused = on(call, sm)
        assert kernels.reject(on(good(), sm)) is None, "int8 is legal there"
        assert kernels.reject(refused) == (
            f"quant_concat_conv: compute capability {sm // 10}.{sm % 10} does not multiply float8, only 8.9 and newer "
            "do; quantise to int8 for it"
        )
        assert kernels.configs(refused) == [] and kernels.workspace_bytes(refused) == -1
        for tile in (0, 31, 204):
            with pytest.raises(kernels.KernelError, match="does not multiply float8"):
                kernels.Plan(replace(refused, config=tile, _keep=[]))


@pytest.mark.parametrize("sm", [89, 90, 100, 103, 110, 120, 121])
def test_gpus_with_float8_run_its_tiles_if_the_library_has_code_for_them(sm: int) -> None:
    call = on(in_float8(good("CuteQConcatConv2ReluQ")), sm)
    if kernels.reject_device(sm) is not None:
        assert kernels.reject(call) == kernels.reject_device(sm)
        return
    built_for = str(kernels.describe()["targets"]).split()
    if sm == 89 and "89" not in built_for:
        assert "with code that is older than 8.9 and without float8" in (kernels.reject(call) or "")
        return
    wgmma = HOPPER if sm == 90 and "90a" in built_for else set()
    ids = kernels.configs(call)
    assert set(ids) == FLOAT8 | wgmma and kernels.workspace_bytes(call) >= 0
    assert set(ids[: len(wgmma)]) == wgmma, "Hopper's own come first"
    assert all(kernels.Plan(replace(call, config=i, _keep=[])).config == i for i in ids)
    assert kernels.made_for(call, sm) and not kernels.made_for(good(), 89)
    if not wgmma:
        with pytest.raises(kernels.KernelError, match="tile 204 cannot run this call"):
            kernels.Plan(replace(call, config=204, _keep=[]))


@pytest.mark.parametrize("tile", [1, 13, 19])
def test_tiles_of_int8_refuse_float8(tile: int) -> None:
    with pytest.raises(kernels.KernelError, match=f"tile {tile} cannot run float8_e4m3fn"):
        kernels.Plan(on(in_float8(good("CuteQConcatConv2ReluQ")), 90, config=tile))


@pytest.mark.parametrize("tile", sorted(FLOAT8))
def test_tiles_of_float8_refuse_int8(tile: int) -> None:
    assert tile not in kernels.configs(good())
    with pytest.raises(kernels.KernelError, match=f"tile {tile} cannot run int8"):
        kernels.Plan(on(good(), 90, config=tile))


def test_tiles_of_float8_are_ranked_by_the_size_of_the_problem() -> None:
    def first(images: int, size: int, filters: int) -> int:
        channels, taps = (64, 24), (images, filters, size, size)
        call = in_float8(good("CuteQConcatConv2ReluQ"))
        inputs = [replace(t, dims=(images, c, size, size)) for t, c in zip(call.inputs, channels, strict=False)]
        filter_ = replace(call.inputs[2], dims=(filters, 1152))
        vectors = [replace(t, dims=(filters,)) for t in call.inputs[3:]]
        call = replace(call, inputs=[*inputs, filter_, *vectors], outputs=[replace(call.outputs[0], dims=taps)])
        return next(i for i in kernels.configs(replace(call, sm_count=128)) if i in FLOAT8)

    assert first(16, 80, 256) == 31 and first(16, 80, 32) == 34 and first(1, 10, 64) in (33, 34)


def test_many_channels_of_float8_do_not_overflow() -> None:
    call = REFUSED["overflow"][0]
    assert kernels.reject(in_float8(call)) != kernels.reject(call)


def of_width(width: int, **changes: Any) -> kernels.Call:
    """A good call on images of that width; -1: not known yet."""
    call = good(**changes)
    call = replace(call, outputs=[replace(call.outputs[0], dims=(2, 32, 20, width))])
    for i, channels in enumerate((64, 24)):
        call = swapped(call, i, dims=(2, channels, 20, width))
    return call


def test_tiles_over_filter_rows_need_wide_images_and_neighbouring_pixels() -> None:
    rows = {16, 18, 19}
    same = {"input_scales": (0.1, 0.1)}
    for width, tiles in ((19, {19}), (18, set()), (37, rows), (36, {19}), (-1, rows)):
        assert rows & set(kernels.configs(of_width(width, **same))) == tiles, width
    for wrong in ({"strides": (1, 2)}, {"dilations": (1, 2), "pads": (1, 2, 1, 2)}):
        call = of_width(-1, **same, **wrong)
        assert kernels.reject(call) is None and not rows & set(kernels.configs(call))
    with pytest.raises(kernels.KernelError, match="tile 19 cannot run images this narrow"):
        call = of_width(17)
        data = [replace(t, data=4096) for t in (*call.inputs, *call.outputs)]
        kernels.run(replace(call, inputs=data[:-1], outputs=data[-1:], config=19))


def test_the_workspace_of_a_narrow_image_serves_a_wide_one() -> None:
    # TensorRT asks at a profile's corners; between them a tile may run that the narrow image does not allow.
    for narrow, wide in ((8, 43), (17, 64)):
        told = [kernels.workspace_bytes(replace(of_width(width), sm=80, sm_count=108)) for width in (narrow, wide)]
        assert told[0] >= told[1] > 0


REFUSED = {
    "scale 0": (good(input_scales=(0.1, 0.0)), "the scale of source 1 is 0"),
    "scale NaN": (good(input_scales=(float("nan"), 0.1)), "the scale of source 0 is nan"),
    "too few scales": (good(input_scales=(0.1,)), "input_scales has 1 values, there are 2 sources"),
    "output scale": (good("CuteQConcatConv2ReluQ", output_scale=-1.0), "output_scale is -1"),
    "sum bound": (good(sum_bound=-1), "sum_bound is -1; write a magnitude of at most 2147483647, or 0 where none is"),
    "sum bound of 32 bits": (good(sum_bound=2**31), "sum_bound is 2147483648; write a magnitude of at most"),
    "output type": (good(output_type=7), "output_type 7 is none of"),
    "output in float16": (good(output_type=10), "the output must be a channels-last float16 tensor"),
    "float16 source": (swapped(good(), 0, dtype="float16"), "use int8 or float8_e4m3fn"),
    "linear source": (swapped(good(), 1, layout=LINEAR), "pass all in kHWC16 or all in kCHW32"),
    "mixed layouts": (swapped(good(), 1, layout=BLOCKS32), "all in kHWC16 or all in kCHW32"),
    "pixels of 24": (swapped(good(), 1, ld=24), "must be a multiple of 16"),
    "pixel stride of blocks": (swapped(good(layout=BLOCKS32), 1, ld=32), "kCHW32 has none"),
    "rank": (swapped(good(), 0, dims=(64, 20, 20)), "rank 3"),
    "height": (swapped(good(), 1, dims=(2, 24, 10, 20)), "source 1 is 2x10x20 (NHW) enlarged by 1, source 0 is"),
    "channels": (swapped(good(), 1, dims=(2, 32, 20, 20)), "source 1 has 32 channels, attribute channels says 24"),
    "packed size": (good(packed_sizes=(576, 64)), "packed_sizes[1] is 64"),
    "float filter": (swapped(good(), 2, dtype="float16"), "linear int8 matrix"),
    "filter columns": (swapped(good(), 2, dims=(32, 1151)), "is 32x1151, 1152 columns"),
    "filter scales": (swapped(good(), 3, dims=(31,)), "the scales of the filter must be a float32 vector of 32"),
    "bias in int8": (swapped(good(), 4, dtype="int8"), "the bias must be a float32 vector of 32"),
    "stride": (good(strides=(0, 1)), "strides[0] is 0"),
    "filter size": (good(kernel_shape=(17, 3)), "kernel_shape[0] is 17"),
    "clip": (good("CuteQConcatConv2Clip", lo=1.0, hi=0.0), "clip from 1 to 0 is empty"),
    "big filter": (good(kernel_shape=(16, 16), pads=(0, 0, 0, 0), packed_sizes=(16384, 16384), dilations=(2, 2)),
                   "does not fit into"),
    "dilation": (swapped(good(dilations=(1, 16)), 0, ld=1 << 28), "a dilation over 2^31 bytes"),
    "blocks": (big_batch(4_000_000), "more than 2^31 blocks of kCHW32"),
    "overflow": (swapped(good(channels=(131072, 24)), 0, dims=(2, 131072, 20, 20)), "overflow 32-bit sums"),
}  # fmt: skip


TO_FLOAT8 = in_float8(good("CuteQConcatConv2ReluQ"))


@pytest.mark.parametrize(
    "call", [in_float8(good()), of_filters(TO_FLOAT8, 24), strided(TO_FLOAT8, 9, (2, 32, 3, 3))],
    ids=["to float32", "24 filters", "strides of 9"],
)  # fmt: skip
def test_what_hoppers_tiles_do_not_run_in_float8_runs_by_mma_sync(call: kernels.Call) -> None:
    assert kernels.reject(call) is None and set(kernels.configs(call)) == FLOAT8


@pytest.mark.parametrize("name", REFUSED)
def test_illegal_calls_are_refused_in_one_sentence(name: str) -> None:
    call, words = REFUSED[name]
    reason = kernels.reject(call) or ""
    assert reason.startswith("quant_concat_conv: ") and words in reason
    assert not re.search(r"\.\s", reason)


@pytest.mark.parametrize("blocks", [65535, 65536])
def test_small_tiles_count_blocks_of_channels_in_16_bits(blocks: int) -> None:
    channels = (64 * (blocks - 1), 64)
    call = good(channels=channels, kernel_shape=(1, 1), pads=(0, 0, 0, 0), packed_sizes=channels, output_type=10)
    inputs = [kernels.Tensor((2, c, 20, 20), "int8", CHANNELS_LAST) for c in channels]
    inputs += [kernels.Tensor((32, 64 * blocks), "int8", LINEAR), *call.inputs[3:]]
    outputs = [replace(t, dtype="float16") for t in call.outputs]
    call = in_float8(replace(call, inputs=inputs, outputs=outputs, sm=90, sm_count=132, _keep=[]))
    assert kernels.reject(call) is None
    assert ({231, 234} <= set(kernels.configs(call))) == (blocks < 65536)


def test_long_reductions_of_several_sources_leave_the_tiles_that_drain() -> None:
    channels = (70000, 70000)
    call = good(channels=channels, kernel_shape=(1, 1), pads=(0, 0, 0, 0), packed_sizes=(70016, 70016),
                input_scales=(0.1, 0.1))  # fmt: skip
    inputs = [kernels.Tensor((2, c, 20, 20), "int8", CHANNELS_LAST) for c in channels]
    call = replace(call, inputs=[*inputs, kernels.Tensor((32, 140032), "int8", LINEAR), *call.inputs[3:]])
    assert kernels.reject(call) is None and set(kernels.configs(call)) == {12, 13, 14, 41}


@pytest.mark.parametrize("name", ["2_sources_Relu", "8_sources_Silu", "2_sources_Relu_to_int8"])
def test_plugins_offer_both_int8_formats_and_never_mix_them(name: str) -> None:
    call = OPERATOR.call(CASES[name], CASES[name].dtypes[-1])
    plugin = Host().build((call.op_type, call.attrs), [Input(t.dims, t.dtype) for t in call.inputs]).check()
    floats = {"float32": "kHWC", "bfloat16": "kHWC8"}.get(call.outputs[0].dtype, "")
    assert plugin.findings == [] and [c["formats"] for c in plugin.report["combinations"]] == [
        [f] * (len(call.inputs) - 3) + ["kLINEAR"] * 3 + [f if call.op_type.endswith("Q") else floats]
        for f in ("kCHW32", "kHWC16")
    ]
    for i in range(2):
        plugin.context(combination=i).set_shapes([t.dims for t in call.inputs])


def test_plugins_offer_float8_in_one_format() -> None:
    call = good("CuteQConcatConv2ReluQ")
    inputs = [Input(t.dims, "fp8" if t.dtype == "int8" else t.dtype) for t in call.inputs]
    plugin = Host().build((call.op_type, call.attrs), inputs).check()
    formats = [c["formats"] for c in plugin.report["combinations"]]
    assert plugin.findings == [] and formats == [["kHWC16"] * 2 + ["kLINEAR"] * 3 + ["kHWC16"]]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_float_sources_are_refused_at_type_inference(dtype: str) -> None:
    call = OPERATOR.call(CASES["2_sources_Relu"], "float32")
    inputs = [Input(t.dims, dtype if i < 2 else t.dtype) for i, t in enumerate(call.inputs)]
    with pytest.raises(HostError, match="getOutputDataTypes"):
        Host().build((call.op_type, call.attrs), inputs).check()


def test_packing_keeps_int8() -> None:
    assert pack(np.ones((2, 3, 1, 1), np.int8), [1, 2]).dtype == np.int8
