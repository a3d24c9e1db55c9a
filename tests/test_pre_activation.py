"""Pre-activated sources without a GPU: what is legal, which tiles take them, the plugin's tensors, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plugin_nodes
import pytest

from cutefuse import kernels
from cutefuse.kernels import Call, Tensor
from cutefuse.operators import concat_conv, conv_call, conv_math
from cutefuse.operators.conv_form import Form, Source
from cutefuse_host import Host, HostError, Input

OPERATOR = concat_conv.OPERATOR


@pytest.fixture(scope="module")
def host() -> Host:
    return Host()


def pre_activated(dtype: str = "float16", channels: tuple[int, ...] = (64, 40), side: int = 20, taps: int = 1) -> Call:
    """A legal call with 32 filters, padded where they have 3x3 taps."""
    geometry = conv_math.Geometry((taps, taps), pads=(taps // 2,) * 4)
    sources = [Source((2, c, side, side), c) for c in channels]
    return conv_call.make_call(Form(len(channels), "Relu", pre_activated=True), sources, [32], geometry, dtype, {})


def with_input(call: Call, index: int, **changes: object) -> Call:
    inputs = list(call.inputs)
    inputs[index] = replace(inputs[index], **changes)  # type: ignore[arg-type]
    return replace(call, inputs=inputs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("sm", [80, 86, 89, 90])
@pytest.mark.parametrize("taps", [1, 3])
def test_tiles_of_every_type_and_architecture_take_it(dtype: str, sm: int, taps: int) -> None:
    call = replace(pre_activated(dtype, taps=taps), sm=sm)
    assert kernels.reject(call) is None
    plain = replace(call, op_type=Form(2, "Relu").op_type, inputs=call.inputs[:-2], _keep=[])
    ids, others = kernels.configs(call), kernels.configs(plain)
    assert ids and set(ids) - {160} < set(others)  # 160 takes pre-activated sources alone
    hopper = [i for i in ids if i > 100]
    assert bool(hopper) == (sm == 90 and dtype != "float32") and ids[: len(hopper)] == hopper


def test_wide_images_keep_hoppers_tiles() -> None:
    narrow, wide = (
        set(kernels.configs(replace(pre_activated(side=side, taps=3), sm=90, sm_count=132))) for side in (64, 17000)
    )
    assert {i for i in narrow if i > 100} <= wide


@pytest.mark.parametrize(("channels", "small"), [((2048, 2048), {152, 154, 160}), ((2048, 2048, 8), set())])
def test_small_hopper_tiles_have_room_for_the_vectors_of_4096_channels(
    channels: tuple[int, ...], small: set[int]
) -> None:
    ids = kernels.configs(replace(pre_activated(channels=channels), sm=90))
    assert {i for i in ids if 150 < i < 170} == small and {i for i in ids if 100 < i < 150}


def test_a_tile_for_pre_activated_sources_alone_refuses_others() -> None:
    call = replace(pre_activated(), sm=90, sm_count=132)
    plain = replace(call, op_type=Form(2, "Relu").op_type, inputs=call.inputs[:-2], _keep=[])
    assert 160 in kernels.configs(call) and 160 not in kernels.configs(plain)
    with pytest.raises(kernels.KernelError, match="cannot run sources without a pre-activation"):
        kernels.Launcher(replace(plain, config=160))


REFUSED = {
    "a channel count": (pre_activated(channels=(64, 12)), "source 1 of a pre-activation has 12 channels"),
    "in float32": (pre_activated("float32", channels=(64, 6)), "float32 takes multiples of 4"),
    "a short scale": (with_input(pre_activated(), 4, dims=(96,)), "scale must be a float16 vector of 104"),
    "a wide shift": (with_input(pre_activated(), 5, dims=(1, 104)), "shift must be a float16 vector of 104"),
    "another type": (with_input(pre_activated(), 5, dtype="float32"), "it is float32 of rank 1"),
    "another layout": (with_input(pre_activated(), 4, layout=kernels.CHANNELS_LAST), "pre-activation's scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_why(name: str) -> None:
    call, words = REFUSED[name]
    assert words in (kernels.reject(call) or "")


def test_views_residuals_and_several_outputs_have_no_such_form() -> None:
    for form in (Form(2, view=True), Form(2, residual="before"), Form(2, outputs=2), Form(2, quantised=True), Form(9)):
        with pytest.raises(kernels.KernelError, match="no op_type for"):
            _ = replace(form, pre_activated=True).op_type


def test_without_its_vectors_or_with_a_residual_the_call_is_refused() -> None:
    call = pre_activated()
    for inputs in (call.inputs[:-1], call.inputs[:-2], [*call.inputs, call.outputs[0]]):
        with pytest.raises(kernels.KernelError, match="takes 6 inputs"):
            kernels.Plan(replace(call, inputs=inputs, _keep=[]))


def test_the_reference_activates_channels_and_pads_with_zeros() -> None:
    call = pre_activated("float32", channels=(4, 8), side=3, taps=3)
    rng = np.random.default_rng(0)
    operands = OPERATOR.operands(call, rng)
    operands[4], operands[5] = -np.ones(12), np.full(12, 5.0)
    operands[0][:], operands[1][:] = 0.0, 7.0  # 5 after it, and 0
    w = conv_math.unpacked(operands[2], (4, 8), (3, 3))
    (y,) = OPERATOR.reference(call, operands)
    corner = 5 * w[:, :4, 1:, 1:].sum(axis=(1, 2, 3)) + operands[3]
    assert np.allclose(y[0, :, 0, 0], np.maximum(corner, 0))
    (size,) = OPERATOR.magnitude(call, operands)
    assert (size >= np.abs(y) - 1e-9).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("sources", [1, 2, 8])
def test_it_lives_through_builder_and_runtime(host: Host, sources: int, dtype: str) -> None:
    attrs = plugin_nodes.attributes(plugin_nodes.CHANNELS[:sources])
    vectors = [Input((sum(attrs["channels"]),), dtype)] * 2
    op_type, inputs = f"CutePreConcatConv{sources}Silu", [*plugin_nodes.inputs_of(attrs, dtype), *vectors]
    plugin = host.build((op_type, attrs), inputs).check()
    assert plugin.findings == []
    [combination] = plugin.report["combinations"]
    pixel = "kHWC" if dtype == "float32" else "kHWC8"
    assert combination["formats"] == [pixel] * sources + ["kLINEAR"] * 4 + [pixel]
    assert combination["types"] == [dtype] * (sources + 1) + ["float32"] + [dtype] * 3 and combination["tactics"]
    context = plugin.context(tactic=combination["tactics"][0])
    pixels = [(3, c, 17, 9) for c in attrs["channels"]]
    context.set_shapes(pixels + [i.dims for i in inputs[sources:]])
    assert context.output_size(0) == (3, plugin_nodes.FILTERS, 17, 9)


def test_the_plugin_refuses_a_vector_of_another_length(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    attrs = plugin_nodes.attributes((64, 24))
    vectors = [Input((88,), "float16"), Input((80,), "float16")]
    with pytest.raises(HostError):
        host.build(("CutePreConcatConv2Relu", attrs), [*plugin_nodes.inputs_of(attrs), *vectors]).check()
    assert "shift must be a float16 vector of 88" in capfd.readouterr().err


def test_the_title_says_it() -> None:
    assert OPERATOR.title(pre_activated()) == "relu 64+40->32 1x1 @20x20 Relu"
    assert Tensor((104,), "float16") == pre_activated().inputs[-1]
