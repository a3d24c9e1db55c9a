"""Everything malformed that a plugin may be given: non-zero or null, one line on stderr, never a crash."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugin_nodes import CHANNELS, FILTERS, attributes, create, descs_of, good_node, inputs_of

from cutefuse_host import Field, Host, HostError, field_of
from cutefuse_host.abi import DATA_TYPES, FORMATS, CDesc, CDims, CDynamicDesc, dynamic_desc


@pytest.fixture(scope="module")
def host() -> Host:
    return Host()


def refusal(capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a refusal leaves on stderr."""
    text = capfd.readouterr().err
    assert text.startswith("cutefuse: ") and text.count("\n") == 1, text
    return text


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "missing channels": (lambda f: f.pop("channels"), "attribute 'channels' is required"),
        "missing kernel_shape": (lambda f: f.pop("kernel_shape"), "attribute 'kernel_shape' is required"),
        "missing packed_sizes": (lambda f: f.pop("packed_sizes"), "attribute 'packed_sizes' is required"),
        "unknown": (lambda f: f.update(group=field_of("group", 1)), "attribute 'group' does not exist"),
        "misspelt": (lambda f: f.update(Alpha=field_of("Alpha", 0.1)), "attribute 'Alpha' does not exist"),
        "float for ints": (
            lambda f: f.update(strides=field_of("strides", [1.0, 1.0])),
            "attribute 'strides' has plugin field type 1; write it as INT or INTS",
        ),
        "int for float": (
            lambda f: f.update(alpha=field_of("alpha", 1)),
            "attribute 'alpha' has plugin field type 5; write it as FLOAT or FLOATS",
        ),
        "text for ints": (lambda f: f.update(pads=field_of("pads", "SAME_UPPER")), "has plugin field type 6"),
        "unknown type": (lambda f: f.update(hi=Field("hi", 99, 1, b"\0" * 4)), "has plugin field type 99"),
        "too few": (lambda f: f.update(pads=field_of("pads", [1, 1])), "'pads' has 2 values, 4 to 4 are allowed"),
        "too many": (lambda f: f.update(strides=field_of("strides", [1, 1, 1])), "'strides' has 3 values"),
        "nine sources": (lambda f: f.update(channels=field_of("channels", [8] * 9)), "has 9 values, 1 to 8"),
        "empty": (lambda f: f.update(channels=Field("channels", 5, 0, b"")), "'channels' has 0 values"),
        "null data": (lambda f: f.update(pads=Field("pads", 5, 4, b"")), "'pads' has 4 values"),
        "negative length": (lambda f: f.update(pads=Field("pads", 5, -4, b"")), "'pads' has -4 values"),
        "twice": (lambda f: f.update(again=f["strides"]), "attribute 'strides' is given twice"),
        "past 32 bits": (
            lambda f: f.update(strides=Field("strides", 10, 2, (1 << 40).to_bytes(8, "little") * 2)),
            "attribute 'strides' holds 1099511627776, which is outside of 32 bits",
        ),
    }.values(),
)
@pytest.mark.parametrize("phase", [0, 1])
def test_malformed_fields_make_no_plugin_and_one_line(
    host: Host, capfd: pytest.CaptureFixture[str], change: Callable, words: str, phase: int
) -> None:
    fields = {f.name: f for f in host.fields(host.find("CuteConcatConv2Relu"), attributes(CHANNELS[:2]))}
    change(fields)
    assert host.create("CuteConcatConv2Relu", list(fields.values()), phase) is None
    assert words in refusal(capfd)


def test_a_missing_field_collection_makes_no_plugin(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    assert host.create("CuteConcatConv2Relu", None) is None
    assert "no field collection" in refusal(capfd)


def with_dims(items: list[CDesc], index: int, dims: tuple[int, ...]) -> None:
    items[index].dims = CDims.of(dims)


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "rank 3": (lambda d: with_dims(d, 0, (2, 64, 40)), "rank"),
        "rank 5": (lambda d: with_dims(d, 0, (2, 64, 40, 24, 1)), "rank"),
        "rank 9": (lambda d: setattr(d[1].dims, "rank", 9), "rank 9"),
        "rank -1": (lambda d: setattr(d[1].dims, "rank", -1), "rank -1"),
        "other batch": (lambda d: with_dims(d, 1, (3, 24, 40, 24)), "sizes must agree"),
        "other height": (lambda d: with_dims(d, 1, (2, 24, 20, 24)), "sizes must agree"),
        "other channels": (lambda d: with_dims(d, 1, (2, 32, 40, 24)), "attribute channels says 24"),
        "zero height": (lambda d: [with_dims(d, i, (2, c, 0, 24)) for i, c in ((0, 64), (1, 24))], "0x24"),
        "huge batch": (
            lambda d: [with_dims(d, i, (1 << 40, c, 40, 24)) for i, c in ((0, 64), (1, 24))],
            "is not within 2^31 images",
        ),
        "huge height": (
            lambda d: [with_dims(d, i, (2, c, (1 << 62), 24)) for i, c in ((0, 64), (1, 24))],
            "pixels a side",
        ),
        "product past 64 bits": (
            lambda d: [with_dims(d, i, (2**31 - 1, c, 2**24, 2**24)) for i, c in ((0, 64), (1, 24))],
            "has more than 2^31 pixels",
        ),
        "huge output": (lambda d: with_dims(d, 4, (2, FILTERS, 1 << 62, 24)), "dimension 2 of the output"),
        "wrong output": (lambda d: with_dims(d, 4, (2, FILTERS, 39, 24)), "dimension 2 of the output is 39"),
        "filter rank": (lambda d: with_dims(d, 2, (FILTERS, 64, 3, 3)), "packed filter"),
        "filter columns": (lambda d: with_dims(d, 2, (FILTERS, 1151)), "packed filter"),
        "bias length": (lambda d: with_dims(d, 3, (FILTERS + 1,)), "bias"),
        "int8 source": (lambda d: setattr(d[0], "type", DATA_TYPES.index("int8")), "never offered"),
        "bias in float16": (lambda d: setattr(d[3], "type", DATA_TYPES.index("float16")), "never offered"),
        "mixed sources": (lambda d: setattr(d[1], "type", DATA_TYPES.index("bfloat16")), "never offered"),
        "unknown type": (lambda d: setattr(d[0], "type", 77), "never offered"),
        "linear source": (lambda d: setattr(d[0], "format", FORMATS.index("kLINEAR")), "never offered"),
        "channels-last filter": (lambda d: setattr(d[2], "format", FORMATS.index("kHWC8")), "never offered"),
        "unknown format": (lambda d: setattr(d[4], "format", -1), "never offered"),
    }.values(),
)
def test_wrong_tensors_are_refused_in_every_method(
    host: Host, capfd: pytest.CaptureFixture[str], change: Callable, words: str
) -> None:
    attrs, tensors, layouts = good_node()
    plugin, descs = create(host, attrs), descs_of(tensors, layouts)
    assert plugin.shape_change(descs, 4, 1) == 0
    change(descs)
    assert capfd.readouterr().err == ""
    assert plugin.shape_change(descs, 4, 1) != 0
    assert words in refusal(capfd)
    assert plugin.enqueue(descs, [4096] * 4, [4096]) != 0
    assert "enqueue has no plan" in refusal(capfd)
    dynamic = [CDynamicDesc(d, d.dims, d.dims, d.dims) for d in descs]
    assert plugin.configure(dynamic, 4, 1) != 0
    assert words in refusal(capfd)
    assert not all(plugin.supports(pos, dynamic, 4, 1) for pos in range(5))


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 2), (4, 0), (0, 1), (5, 0), (-1, 1), (4, 2), (1 << 30, 1)])
def test_wrong_numbers_of_tensors_are_refused(
    host: Host, capfd: pytest.CaptureFixture[str], inputs: int, outputs: int
) -> None:
    attrs, tensors, layouts = good_node()
    plugin, descs = create(host, attrs), descs_of(tensors, layouts)
    assert plugin.shape_change(descs, inputs, outputs) != 0
    assert "it takes 4 and 1" in refusal(capfd)
    dynamic = [dynamic_desc(t, layout) for t, layout in zip(tensors, layouts, strict=True)]
    assert plugin.configure(dynamic, inputs, outputs) != 0
    assert "it takes 4 and 1" in refusal(capfd)
    assert not plugin.supports(0, dynamic, inputs, outputs)
    assert "it takes 4 and 1" in refusal(capfd)


@pytest.mark.parametrize("pos", [-1, 5, 1 << 30])
def test_a_position_outside_of_the_tensors_is_refused(host: Host, capfd: pytest.CaptureFixture[str], pos: int) -> None:
    attrs, tensors, layouts = good_node()
    dynamic = [dynamic_desc(t, layout) for t, layout in zip(tensors, layouts, strict=True)]
    assert not create(host, attrs).supports(pos, dynamic, 4, 1)
    assert "does not exist" in refusal(capfd)


@pytest.mark.parametrize("address", [0, 4097, 4100, 8, (1 << 47) + 2])
@pytest.mark.parametrize("tensor", range(5))
def test_null_and_misaligned_pointers_are_refused_before_any_kernel_runs(
    host: Host, capfd: pytest.CaptureFixture[str], address: int, tensor: int
) -> None:
    attrs, tensors, layouts = good_node()
    plugin, descs = create(host, attrs), descs_of(tensors, layouts)
    assert plugin.shape_change(descs, 4, 1) == 0
    addresses = [4096] * 5
    addresses[tensor] = address
    assert plugin.enqueue(descs, addresses[:4], addresses[4:], workspace=4096) != 0
    assert f"tensor {tensor} is at address" in refusal(capfd)


@pytest.mark.parametrize("tactic", [-1, 99, 1 << 30])
def test_an_unknown_tactic_is_refused(host: Host, capfd: pytest.CaptureFixture[str], tactic: int) -> None:
    plugin = create(host)
    assert plugin.set_tactic(tactic) != 0
    assert f"tactic {tactic} is not in this library's table" in refusal(capfd)
    assert plugin.set_tactic(0) == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_range_that_starts_between_vectors_is_refused_with_the_reason(
    host: Host, capfd: pytest.CaptureFixture[str], dtype: str
) -> None:
    attrs = attributes((24, 64), channel_starts=[2, 0], upsample=[1, 1])
    plugin = host.build(("CuteViewConcatConv2Relu", attrs), inputs_of(attrs, dtype))
    with pytest.raises(HostError, match="no combination"):
        plugin.check()
    assert "source 0 starts at channel 2" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", ["int8", "int32", "fp8", "int64"])
def test_types_without_a_kernel_are_refused_at_type_inference(host: Host, dtype: str) -> None:
    attrs = attributes(CHANNELS[:2])
    plugin = host.build(("CuteConcatConv2Relu", attrs), inputs_of(attrs, dtype))
    assert [f.step for f in plugin.findings] == ["getOutputDataTypes"]


def test_the_wrong_number_of_onnx_inputs_is_refused_and_not_read_past_the_end(host: Host) -> None:
    attrs = attributes(CHANNELS[:2])
    for count in (0, 1, 3):
        with pytest.raises(HostError, match="failure in getOutput"):
            host.build(("CuteConcatConv2Relu", attrs), inputs_of(attrs)[:count]).check()
