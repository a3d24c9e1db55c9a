"""ConcatConv's op_types with views, residuals and several outputs: names, legality and refusals, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cutefuse import kernels
from cutefuse.kernels import CHANNELS_LAST, Call, Tensor

FIRST = ("", "Relu", "LeakyRelu", "Clip", "Silu", "HardSwish", "Sigmoid", "Tanh")
LATER = ("Gelu",)  # op_types of these stand behind all others, so that no index changes
ACTIVATIONS = FIRST + LATER


def pixels(n: int, c: int, h: int, w: int, dtype: str = "float16", ld: int = 0) -> Tensor:
    return Tensor((n, c, h, w), dtype, CHANNELS_LAST, ld=ld)


def call(op_type: str, sources: list[Tensor], channels: list[int], filters: int = 32, **changes: Any) -> Call:
    """A 1x1 call on 20x20 pixels; `changes` are attributes, `outputs` and `z` (channels of the residual)."""
    dtype, columns = sources[0].dtype, [(c + 63) // 64 * 64 for c in channels]
    outputs = changes.pop("outputs", [filters])
    z = [pixels(2, c, 20, 20, dtype) for c in changes.pop("z", [])]
    attrs = {"channels": channels, "kernel_shape": (1, 1), "packed_sizes": columns, **changes}
    inputs = [*sources, Tensor((filters, sum(columns)), dtype), Tensor((filters,), "float32"), *z]
    return Call(op_type, inputs, [pixels(2, c, 20, 20, dtype) for c in outputs], attrs)


def view(dtype: str = "float16", **changes: Any) -> Call:
    """Channels 8..48 of 64 beside all 24 channels of a tensor half as large."""
    sources = [pixels(2, 64, 20, 20, dtype), pixels(2, 24, 10, 10, dtype)]
    attrs = {"channel_starts": [8, 0], "upsample": [1, 2], **changes}
    return call("CuteViewConcatConv2Relu", sources, [40, 24], **attrs)


PLAIN = [pixels(2, 64, 20, 20), pixels(2, 24, 20, 20)]


def test_op_types_follow_the_grammar_in_the_order_of_the_contract() -> None:
    kinds = ("{n}{a}", "{n}Add{a}", "{n}{a}Add", "{n}x2{a}", "{n}x3{a}", "{n}x4{a}")
    wanted = list[str]()
    for activations in (FIRST, LATER):
        wanted += [f"CuteConcatConv{n}{a}" for n in range(1, 9) for a in activations]
        wanted += [
            f"Cute{view}ConcatConv" + kind.format(n=n, a=a)
            for view in ("", "View") for kind in kinds for n in range(1, 9) for a in activations
            if (view or kind != kinds[0]) and (kind != kinds[2] or a)
        ]  # fmt: skip
        wanted += [f"CutePreConcatConv{n}{a}" for n in range(1, 9) for a in activations]
    wanted += [f"CuteImageConcatConv1{a}" for a in ACTIVATIONS]
    wanted += [f"CuteDepthwiseConcatConv{n}{a}" for n in range(1, 9) for a in ACTIVATIONS]
    wanted += [f"CuteSpread{s}ConcatConv{n}{a}" for s in (2, 3, 4) for n in range(1, 9) for a in ACTIVATIONS]
    variants = kernels.operator_of("CuteConcatConv1")["variants"]
    assert [v["op_type"] for v in variants] == wanted
    arity = {v["op_type"]: (v["inputs"], v["outputs"]) for v in variants}
    assert arity["CuteConcatConv2Relu"] == (4, 1) and arity["CuteViewConcatConv8x4Silu"] == (10, 4)
    assert arity["CutePreConcatConv3Relu"] == (7, 1) and arity["CuteImageConcatConv1Relu"] == (3, 1)
    assert arity["CuteDepthwiseConcatConv2Relu"] == (4, 1)
    assert arity["CuteConcatConv3Add"] == (6, 1) and arity["CuteViewConcatConv1SiluAdd"] == (4, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_legal_forms_are_accepted(dtype: str) -> None:
    plain = [pixels(2, c, 20, 20, dtype) for c in (64, 24)]
    assert kernels.reject(view(dtype)) is None
    assert kernels.reject(view(dtype, channel_starts=[0], upsample=[1, 2])) is None
    assert kernels.reject(call("CuteConcatConv2AddRelu", plain, [64, 24], z=[32])) is None
    assert kernels.reject(call("CuteConcatConv2SiluAdd", plain, [64, 24], 19, outputs=[19], z=[19])) is None
    three = call("CuteConcatConv2x3", plain, [64, 24], 29, outputs=[8, 16, 5], output_channels=[8, 16, 5])
    assert kernels.reject(three) is None


def test_one_tensor_may_be_several_sources() -> None:
    wide = pixels(2, 64, 20, 20)
    halves = call("CuteViewConcatConv2", [wide, wide], [32, 32], channel_starts=[32, 0], upsample=[1, 1])
    assert kernels.reject(halves) is None and kernels.configs(halves)


REFUSALS = {
    "range past the end": (view(channel_starts=[32, 0]), "from channel 32 on; they must be positive and lie inside"),
    "unaligned range": (view(channel_starts=[4, 0]), "a range must start at a multiple of 8 float16 channels"),
    "unaligned float32 range": (view("float32", channel_starts=[2, 0]), "at a multiple of 4 float32 channels"),
    "negative start": (view(channel_starts=[-8, 0]), "channel_starts[0] is -8, 0 to"),
    "three starts": (view(channel_starts=[8, 0, 0]), "attribute channel_starts has 3 values"),
    "one start": (view(channel_starts=[8]), "write one for each"),
    "sizes": (view(upsample=[1, 1]), "sizes must agree after upsampling"),
    "factor 0": (view(upsample=[0, 1]), "upsample[0] is 0, 1 to 64 are allowed"),
    "factor 65": (view(upsample=[65, 1]), "upsample[0] is 65"),
    "three factors": (view(upsample=[1, 2, 2]), "attribute upsample has 3 values"),
    "huge image": (
        call("CuteViewConcatConv1", [pixels(1, 8, 9000, 9000)], [8], channel_starts=[0], upsample=[2]),
        "18000x18000 enlarged pixels are more than 16384 a side",
    ),
    "range in a plain op_type": (call("CuteConcatConv2", PLAIN, [64, 24], channel_starts=[0, 8]), "only CuteView"),
    "factor in a plain op_type": (call("CuteConcatConv2", PLAIN, [64, 24], upsample=[1, 2]), "only CuteView"),
    "wide tensor in a plain op_type": (call("CuteConcatConv2", PLAIN, [56, 24]), "must be equal and positive"),
    "output_channels of one": (call("CuteConcatConv2", PLAIN, [64, 24], output_channels=[16]), "for 1 outputs of 32"),
    "one value for two": (call("CuteConcatConv2x2", PLAIN, [64, 24], outputs=[16, 16]), "has 1 values"),
    "sum": (
        call("CuteConcatConv2x2", PLAIN, [64, 24], outputs=[16, 8], output_channels=[16, 8]),
        "write one for each that add up",
    ),
    "past the end": (
        call("CuteConcatConv2x2", PLAIN, [64, 24], outputs=[16, 24], output_channels=[16, 24]),
        "write one for each that add up",
    ),
    "odd border": (
        call("CuteConcatConv2x2", PLAIN, [64, 24], outputs=[12, 20], output_channels=[12, 20]),
        "all but the last multiples of 8",
    ),
    "empty output": (
        call("CuteConcatConv2x2", PLAIN, [64, 24], outputs=[32, 0], output_channels=[32, 0]),
        "for 2 outputs of 32",
    ),
    "second output's shape": (
        call("CuteConcatConv2x2", PLAIN, [64, 24], outputs=[16, 8], output_channels=[16, 16]),
        "dimension 1 of the output is 8",
    ),
    "residual's shape": (call("CuteConcatConv2Add", PLAIN, [64, 24], z=[24]), "dimension 1 of the residual is 24"),
    "no residual": (call("CuteConcatConv2Add", PLAIN, [64, 24]), "takes 5 inputs"),
    "residual of a plain op_type": (call("CuteConcatConv2", PLAIN, [64, 24], z=[32]), "takes 4 inputs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_why(name: str) -> None:
    refused, words = REFUSALS[name]
    reason = kernels.reject(refused)
    assert reason is not None and words in reason, reason
    assert "\n" not in reason and kernels.configs(refused) == []


def test_a_residual_must_be_like_the_output() -> None:
    good = call("CuteConcatConv2Add", PLAIN, [64, 24], z=[32])
    for z, words in (
        (pixels(2, 32, 20, 20, "bfloat16"), "it is bfloat16"),
        (Tensor((2, 32, 20, 20), "float16"), "channels-last"),
        (pixels(2, 32, 20, 20, ld=24), "residual pixels of 24 elements cannot hold 32"),
        (pixels(2, 32, 20, 21), "dimension 3 of the residual"),
        (pixels(1, 32, 20, 20), "dimension 0 of the residual"),
    ):
        reason = kernels.reject(replace(good, inputs=[*good.inputs[:-1], z]))
        assert reason is not None and words in reason, reason


def test_the_hopper_tiles_leave_channels_beside_an_output_alone() -> None:
    # TMA stores whole vectors: the lanes after channel 20 of a 64-channel tensor are somebody else's.
    inside = replace(call("CuteConcatConv2", PLAIN, [64, 24], 20, outputs=[20]), sm=90)
    wide = replace(inside, outputs=[pixels(2, 20, 20, 20, ld=64)])
    table = {c["id"]: c["min_sm"] for c in kernels.operator_of("CuteConcatConv2")["configs"]}
    assert all(table[i] == 80 for i in kernels.configs(wide)) and kernels.configs(wide)
    whole = replace(call("CuteConcatConv2", PLAIN, [64, 24], 24, outputs=[24]), sm=90)
    assert (90 in {table[i] for i in kernels.configs(whole)}) == ("90a" in kernels.describe()["targets"])


HALO, BESIDE = {121, 124, 126, 129, 130, 176}, {167}


@pytest.mark.parametrize(
    ("factor", "filter_size", "stride", "tiles"),
    [
        (2, 1, 1, HALO),
        (2, 3, 1, HALO | BESIDE),
        (2, 3, 2, set()),
        (4, 7, 1, HALO),
        (3, 3, 1, HALO),
        (16, 1, 1, HALO),
        (64, 3, 1, set()),
        (64, 1, 1, set()),
    ],
)
def test_hopper_enlarges_by_factors_whose_repetitions_fit_into_shared_memory(
    factor: int, filter_size: int, stride: int, tiles: set[int]
) -> None:
    size, columns, pad = 192, 64 * filter_size**2, filter_size // 2
    sources = [pixels(2, 64, size // factor, size // factor)]
    filters, output = Tensor((128, columns), "float16"), pixels(2, 128, size // stride, size // stride)
    attrs = {
        "channels": [64], "kernel_shape": (filter_size,) * 2, "packed_sizes": [columns], "pads": (pad,) * 4,
        "strides": (stride,) * 2, "upsample": [factor],
    }  # fmt: skip
    call = Call("CuteViewConcatConv1Relu", [*sources, filters, Tensor((128,), "float32")], [output], attrs)
    assert {i for i in kernels.configs(call) if i > 100} == tiles
