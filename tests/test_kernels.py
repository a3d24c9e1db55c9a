"""The C interface without a GPU: every refusal has its sentence, and every legal call its tiles."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from devices import SHARED_KIB, skip_without_code
from hypothesis import given, settings
from hypothesis import strategies as st

from cutefuse import kernels
from cutefuse.kernels import CHANNELS_LAST, LINEAR, Call, Tensor


def concat_conv(dtype: str = "float16", channels: tuple[int, ...] = (64, 40), **changes: object) -> Call:
    """A legal 3x3 call on 20x20 pixels with 32 filters; `changes` overwrite attributes."""
    columns = [(c + 63) // 64 * 64 * 9 for c in channels]
    attrs = {"channels": channels, "kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "packed_sizes": columns, **changes}
    inputs = [Tensor((2, c, 20, 20), dtype, CHANNELS_LAST) for c in channels]
    inputs += [Tensor((32, sum(columns)), dtype), Tensor((32,), "float32")]
    return Call(f"CuteConcatConv{len(channels)}Relu", inputs, [Tensor((2, 32, 20, 20), dtype, CHANNELS_LAST)], attrs)


def with_input(call: Call, index: int, tensor: Tensor) -> Call:
    inputs = list(call.inputs)
    inputs[index] = tensor
    return replace(call, inputs=inputs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("sm", SHARED_KIB)
def test_a_legal_call_has_tiles_on_every_architecture(dtype: str, sm: int) -> None:
    call = replace(concat_conv(dtype), sm=sm)
    skip_without_code(sm)
    table = {c["id"]: c for c in kernels.operator_of(call.op_type)["configs"]}
    assert kernels.reject(call) is None
    ids = kernels.configs(call)
    assert len(ids) >= 4 and len(set(ids)) == len(ids)
    assert all(table[i]["min_sm"] <= sm for i in ids)
    assert set(ids) <= set(kernels.configs(replace(call, sm=0))), "an unknown architecture is offered every tile"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_only_a_reduction_that_is_split_needs_a_workspace(dtype: str) -> None:
    few = replace(concat_conv(dtype), sm=80, sm_count=108)
    one_share = 2 * 32 * 20 * 20 * 4  # float32 sums of every output
    assert kernels.workspace_bytes(few) >= 2 * one_share
    inputs = [replace(t, dims=(64, *t.dims[1:])) for t in few.inputs[:2]]
    outputs = [replace(few.outputs[0], dims=(64, 32, 20, 20))]
    many = replace(few, inputs=[*inputs, *few.inputs[2:]], outputs=outputs)
    assert kernels.reject(many) is None and kernels.workspace_bytes(many) == 0


def test_dynamic_sizes_are_not_refused_before_they_are_known() -> None:
    call = concat_conv()
    unknown = [Tensor((-1, c, -1, -1), "float16", CHANNELS_LAST) for c in (64, 40)]
    output = Tensor((-1, 32, -1, -1), "float16", CHANNELS_LAST)
    call = replace(call, inputs=[*unknown, *call.inputs[2:]], outputs=[output])
    assert kernels.reject(call) is None
    with pytest.raises(kernels.KernelError, match="still dynamic"):
        kernels.run(call)


REFUSALS = {
    "another type": (lambda c: with_input(c, 1, Tensor((2, 40, 20, 20), "float32", CHANNELS_LAST)), "insert a Cast"),
    "int8": (lambda c: with_input(c, 0, Tensor((2, 64, 20, 20), "int8", CHANNELS_LAST)), "use float32"),
    "rank 3": (lambda c: with_input(c, 0, Tensor((2, 64, 20), "float16", CHANNELS_LAST)), "rank 3"),
    "linear source": (lambda c: with_input(c, 0, Tensor((2, 64, 20, 20), "float16", LINEAR)), "not channels-last"),
    "unequal size": (lambda c: with_input(c, 1, Tensor((2, 40, 20, 21), "float16", CHANNELS_LAST)), "sizes must agree"),
    "wrong channels": (
        lambda c: with_input(c, 1, Tensor((2, 48, 20, 20), "float16", CHANNELS_LAST)),
        "attribute channels",
    ),
    "odd pixel stride": (
        lambda c: with_input(c, 0, Tensor((2, 64, 20, 20), "float16", CHANNELS_LAST, ld=70)),
        "multiple of 8",
    ),
    "short pixel stride": (
        lambda c: with_input(c, 0, Tensor((2, 64, 20, 20), "float16", CHANNELS_LAST, ld=56)),
        "pixel stride",
    ),
    "empty image": (
        lambda c: replace(
            c,
            inputs=[*(Tensor((2, k, 0, 20), "float16", CHANNELS_LAST) for k in (64, 40)), *c.inputs[2:]],
            outputs=[Tensor((2, 32, 0, 20), "float16", CHANNELS_LAST)],
        ),
        "pixels a side",
    ),
    "filter of another type": (lambda c: with_input(c, 2, Tensor((32, 1152), "float32")), "packed filter"),
    "filter of another width": (lambda c: with_input(c, 2, Tensor((32, 1088), "float16")), "repack"),
    "short bias": (lambda c: with_input(c, 3, Tensor((31,), "float32")), "bias"),
    "bias of another type": (lambda c: with_input(c, 3, Tensor((32,), "float16")), "float32 vector"),
    "packed_sizes": (lambda c: replace(c, attrs={**c.attrs, "packed_sizes": (576, 512)}), "packed_sizes"),
    "one channel count": (lambda c: replace(c, attrs={**c.attrs, "channels": (104,)}), "write one for each"),
    "stride 0": (lambda c: replace(c, attrs={**c.attrs, "strides": (0, 1)}), "within 1..1024"),
    "negative pad": (lambda c: replace(c, attrs={**c.attrs, "pads": (1, 1, -1, 1)}), "pads[2] is -1"),
    "three pads": (lambda c: replace(c, attrs={**c.attrs, "pads": (1, 1, 1)}), "4 to 4 are allowed"),
    "dilation 0": (lambda c: replace(c, attrs={**c.attrs, "dilations": (1, 0)}), "dilation"),
    "filter 17": (
        lambda c: replace(c, attrs={**c.attrs, "kernel_shape": (17, 1)}),
        "kernel_shape[0] is 17, it must lie within 1..16",
    ),
    "filter larger than image": (
        lambda c: replace(c, attrs={**c.attrs, "dilations": (30, 30)}),
        "does not fit",
    ),
    "output size": (
        lambda c: replace(c, outputs=[Tensor((2, 32, 10, 20), "float16", CHANNELS_LAST)]),
        "dimension 2 of the output is 10",
    ),
    "output channels": (
        lambda c: replace(c, outputs=[Tensor((2, 40, 20, 20), "float16", CHANNELS_LAST)]),
        "dimension 1",
    ),
    "linear output": (lambda c: replace(c, outputs=[Tensor((2, 32, 20, 20), "float16", LINEAR)]), "channels-last"),
    "missing input": (lambda c: replace(c, inputs=c.inputs[:3]), "takes 4 inputs"),
    "too many pixels": (
        lambda c: replace(
            c,
            inputs=[*(Tensor((3000, k, 1000, 1000), "float16", CHANNELS_LAST) for k in (64, 40)), *c.inputs[2:]],
            outputs=[Tensor((3000, 32, 1000, 1000), "float16", CHANNELS_LAST)],
        ),
        "split the batch",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_why(name: str) -> None:
    change, words = REFUSALS[name]
    call = change(concat_conv())
    reason = kernels.reject(call)
    assert reason is not None and re.search(re.escape(words), reason), reason
    assert "\n" not in reason
    assert kernels.configs(call) == [] and kernels.workspace_bytes(call) == -1


def test_float32_pixels_of_any_stride_have_tiles_of_their_own() -> None:
    odd, even, whole = (set(kernels.configs(concat_conv("float32", (64, c)))) for c in (41, 42, 44))
    assert odd and whole and odd == even and not even & whole


def taps_tiles(
    q: int,
    sm: int = 80,
    dtype: str = "float16",
    channels: int = 64,
    s: int = 3,
    strides: tuple[int, int] = (1, 1),
    dilations: tuple[int, int] = (1, 1),
) -> set[str]:
    """The tiles whose taps share pixels, of those that a 3 x s filter may use for 20 x q outputs."""
    columns = -(-channels // 64) * 64 * 3 * s
    w = -1 if q < 0 else (q - 1) * strides[1] + dilations[1] * (s - 1) + 1
    attrs = {"channels": (channels,), "kernel_shape": (3, s), "pads": (1, 0, 1, 0), "packed_sizes": [columns]}
    attrs |= {"strides": strides, "dilations": dilations}
    h = 20 * strides[0] + 1 - strides[0]
    inputs = [
        Tensor((1, channels, h, w), dtype, CHANNELS_LAST),
        Tensor((32, columns), dtype),
        Tensor((32,), "float32"),
    ]
    call = Call("CuteConcatConv1Relu", inputs, [Tensor((1, 32, 20, q), dtype, CHANNELS_LAST)], attrs, sm=sm)
    assert kernels.reject(call) is None
    names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
    return {names[i].removeprefix("sm80_taps_") for i in kernels.configs(call) if "taps" in names[i]}


def test_taps_share_pixels_where_a_stage_holds_what_a_tile_reads() -> None:
    one = {"256x64x64_s3"}
    assert taps_tiles(128) == taps_tiles(128, dtype="bfloat16") == one
    assert taps_tiles(17) == one and not taps_tiles(16)  # 256 outputs in up to 16 image rows, two pixels beyond each
    assert taps_tiles(37, dilations=(1, 2)) == one and not taps_tiles(36, dilations=(1, 2))  # 8 rows, four pixels each
    assert taps_tiles(-1) == one  # not known yet: asked again when it is
    assert taps_tiles(128, strides=(2, 1)) == one and not taps_tiles(128, strides=(1, 2))
    assert not taps_tiles(128, s=1) and not taps_tiles(128, s=2) and not taps_tiles(128, s=5)
    assert not taps_tiles(128, channels=60) and not taps_tiles(128, dtype="float32")


@pytest.mark.parametrize("sm", SHARED_KIB)
def test_taps_share_pixels_where_the_shared_memory_holds_the_tile(sm: int) -> None:
    skip_without_code(sm)
    assert taps_tiles(128, sm=sm) == {"256x64x64_s3"}


@pytest.mark.parametrize(
    ("dtype", "channels", "refused"),
    [
        ("float32", 2**27, True),
        ("float32", 2**27 - 64, False),
        ("float16", 2**28, True),
        ("bfloat16", 2**28 - 64, False),
    ],
)
def test_rows_of_the_packed_filter_stay_below_2_gib(dtype: str, channels: int, refused: bool) -> None:
    columns = 4 * channels
    attrs = {"channels": (channels,), "kernel_shape": (2, 2), "packed_sizes": [columns]}
    inputs = [Tensor((1, channels, 2, 2), dtype, CHANNELS_LAST), Tensor((32, columns), dtype), Tensor((32,), "float32")]
    call = Call("CuteConcatConv1Relu", inputs, [Tensor((1, 32, 1, 1), dtype, CHANNELS_LAST)], attrs)
    reason = kernels.reject(call)
    words = f"a row of the packed filter has {columns * (4 if dtype == 'float32' else 2)} bytes, fewer than 2^31"
    assert words in (reason or "") if refused else reason is None, reason


def test_a_layer_of_many_tiles_is_priced_at_once() -> None:
    attrs = {"channels": (16,), "kernel_shape": (1, 1), "packed_sizes": [64]}
    inputs = [Tensor((1000, 16, 1000, 2000), "float16", CHANNELS_LAST), Tensor((65536, 64), "float16")]
    inputs.append(Tensor((65536,), "float32"))
    output = Tensor((1000, 65536, 1000, 2000), "float16", CHANNELS_LAST)
    call = Call("CuteConcatConv1Relu", inputs, [output], attrs, sm=90, sm_count=132)
    started = time.perf_counter()
    ids = kernels.configs(call)
    times = [kernels.predicted_us(replace(call, config=i)) for i in ids]
    assert ids and time.perf_counter() - started < 3  # wave by wave it takes 9 s
    floor = 2 * 2e9 * 65536 * 16 / 2e9  # us at 2 PFLOP/s, more than any GPU does
    assert all(t is not None and t > floor for t in times), times


def test_an_empty_clip_range_is_refused() -> None:
    call = replace(concat_conv(lo=1.0, hi=-1.0), op_type="CuteConcatConv2Clip")
    assert "lo must not exceed hi" in (kernels.reject(call) or "")


@pytest.mark.parametrize("attr", ["kernel_shape", "channels", "packed_sizes"])
def test_a_missing_attribute_is_named(attr: str) -> None:
    call = concat_conv()
    with pytest.raises(kernels.KernelError, match=f"'{attr}' is required"):
        kernels.reject(replace(call, attrs={k: v for k, v in call.attrs.items() if k != attr}))


def test_an_unknown_attribute_and_op_type_are_named() -> None:
    with pytest.raises(kernels.KernelError, match="'group' does not exist"):
        kernels.reject(concat_conv(group=2))
    with pytest.raises(kernels.KernelError, match="CuteNothing is not in the library"):
        kernels.reject(replace(concat_conv(), op_type="CuteNothing"))


INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@settings(max_examples=300, deadline=None)
@given(
    dims=st.lists(INT64, min_size=0, max_size=8),
    ld=INT64,
    kernel=st.lists(INT64, min_size=0, max_size=6),
    pads=st.lists(INT64, min_size=0, max_size=6),
    strides=st.lists(INT64, min_size=0, max_size=3),
    dilations=st.lists(INT64, min_size=0, max_size=3),
    index=st.integers(0, 3),
)
def test_any_numbers_get_an_answer(
    dims: list[int], ld: int, kernel: list[int], pads: list[int], strides: list[int], dilations: list[int], index: int
) -> None:
    call = with_input(
        concat_conv(), index, Tensor(tuple(dims), "float16", CHANNELS_LAST if index < 2 else LINEAR, ld=ld)
    )
    attrs = {**call.attrs, "kernel_shape": kernel, "pads": pads, "strides": strides, "dilations": dilations}
    reason = kernels.reject(replace(call, attrs=attrs))
    assert reason is None or reason.startswith("concat_conv: ")
