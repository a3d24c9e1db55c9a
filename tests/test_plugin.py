"""The library's plugins in the plugin host: every variant's life cycle, and refusal of everything malformed."""

from __future__ import annotations

import gc
import re
import struct
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cutefuse import kernels, plugin_path
from cutefuse.host import RUNTIME, Field, Host, HostError, Input, Raw, field_of
from cutefuse.host_abi import DATA_TYPES, FORMATS, CDesc, CDims, CDynamicDesc, dynamic_desc
from cutefuse.ops import operators
from cutefuse.ops.op import Case, FusedOp

CHANNELS = (64, 24, 8, 72, 16, 40, 136, 32)
FILTERS = 48
ACTIVATIONS = ("", "Relu", "LeakyRelu", "Clip", "Silu", "HardSwish", "Sigmoid", "Tanh")


@pytest.fixture(scope="module")
def host() -> Host:
    return Host()


def attributes(channels: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    r, s = changes.get("kernel_shape", [3, 3])
    attrs: dict[str, Any] = {
        "channels": list(channels),
        "kernel_shape": [3, 3],
        "strides": [1, 1],
        "pads": [1, 1, 1, 1],
        "dilations": [1, 1],
        "packed_sizes": [-(-c // 64) * r * s * 64 for c in channels],
        "alpha": 0.01,
        "lo": 0.0,
        "hi": 6.0,
    }
    return attrs | changes


def inputs_of(attrs: dict[str, Any], dtype: str = "float16", dynamic: bool = True) -> list[Input]:
    """Sources, packed filter and bias of a ConcatConv node; N, H and W are dynamic unless told otherwise."""
    sources = [
        Input((-1, c, -1, -1), dtype, (1, c, 8, 8), (2, c, 40, 24), (4, c, 64, 64))
        if dynamic
        else Input((2, c, 40, 24), dtype)
        for c in attrs["channels"]
    ]
    return [*sources, Input((FILTERS, sum(attrs["packed_sizes"])), dtype), Input((FILTERS,), "float32")]


def build(host: Host, sources: int = 2, dtype: str = "float16", activation: str = "Relu", **changes: Any) -> Any:
    attrs = attributes(CHANNELS[:sources], **changes)
    return host.build((f"CuteConcatConv{sources}{activation}", attrs), inputs_of(attrs, dtype))


def descs_of(items: list[Input], layouts: list[str]) -> list[CDesc]:
    """Static descriptions, as onShapeChange and enqueue see them."""
    return [dynamic_desc(i, layout).desc for i, layout in zip(items, layouts, strict=True)]


def good_node(dtype: str = "float16") -> tuple[dict[str, Any], list[Input], list[str]]:
    """Attributes, tensors (the output last) and layouts of a legal static CuteConcatConv2Relu."""
    attrs = attributes(CHANNELS[:2])
    pixel = "kHWC" if dtype == "float32" else "kHWC8"
    tensors = [*inputs_of(attrs, dtype, dynamic=False), Input((2, FILTERS, 40, 24), dtype)]
    return attrs, tensors, [pixel, pixel, "kLINEAR", "kLINEAR", pixel]


def create(host: Host, attrs: dict[str, Any] | None = None) -> Raw:
    fields = host.fields(host.find("CuteConcatConv2Relu"), attrs or attributes(CHANNELS[:2]))
    made = host.create("CuteConcatConv2Relu", fields)
    assert made is not None
    return made


def refusal(capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a refusal leaves on stderr."""
    text = capfd.readouterr().err
    assert text.startswith("cutefuse: ") and text.count("\n") == 1, text
    return text


# -- the life of a plugin --------------------------------------------------------------------------------------------


def test_library_offers_one_creator_for_every_variant_of_every_operator(host: Host) -> None:
    plugins = [op for op in kernels.describe()["ops"] if op["name"] == "concat_conv"]
    variants = {v["op_type"] for op in plugins for v in op["variants"]}
    assert variants and variants <= {c["name"] for c in host.creators()}
    assert {(c["version"], c["namespace"]) for c in host.creators()} == {("1", "cutefuse")}
    assert host.findings == []


def test_creators_list_the_operators_attributes_so_that_the_parser_passes_them(host: Host) -> None:
    for creator in host.creators():
        names = [a["name"] for a in kernels.operator_of(creator["name"])["attributes"]]
        assert [f["name"] for f in creator["fields"]] == names


@pytest.mark.parametrize("sources", range(1, 9))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_variant_lives_through_builder_and_runtime(host: Host, sources: int, activation: str) -> None:
    for dtype, pixel in (("float16", "kHWC8"), ("bfloat16", "kHWC8"), ("float32", "kHWC")):
        plugin = build(host, sources, dtype, activation).check()
        assert plugin.findings == []
        [combination] = plugin.report["combinations"]
        assert combination["formats"] == [pixel] * sources + ["kLINEAR", "kLINEAR", pixel]
        assert combination["types"] == [dtype] * (sources + 1) + ["float32", dtype]
        assert len(combination["tactics"]) >= 4
        context = plugin.context(tactic=combination["tactics"][0])
        context.set_shapes([(3, c, 17, 9) for c in CHANNELS[:sources]] + [i.dims for i in plugin.inputs[-2:]])
        assert context.output_size(0) == (3, FILTERS, 17, 9)


CASES = [(op, case) for op in operators() for case in op.cases()]


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op.stem}-{case.name}" for op, case in CASES])
def test_every_case_of_every_operator_lives_through_builder_and_runtime(host: Host, op: FusedOp, case: Case) -> None:
    for dtype in case.dtypes:
        call = op.call(case, dtype)
        inputs = [Input(t.dims, t.dtype) for t in call.inputs]
        plugin = host.build((call.op_type, call.attrs), inputs, outputs=len(call.outputs)).check()
        assert plugin.findings == []
        assert plugin.report["output_types"] == [t.dtype for t in call.outputs]
        assert [tuple(dims) for dims in plugin.report["output_opt"]] == [tuple(t.dims) for t in call.outputs]
        context = plugin.context()
        context.set_shapes([t.dims for t in call.inputs])


def test_weakly_typed_builder_is_offered_all_three_types(host: Host) -> None:
    attrs = attributes((64, 32))
    plugin = host.build(("CuteConcatConv2", attrs), inputs_of(attrs, "float32"), strongly_typed=False).check()
    assert {c["types"][0] for c in plugin.report["combinations"]} == {"float32", "float16", "bfloat16"}
    for combination in plugin.report["combinations"]:
        assert len({combination["types"][i] for i in (0, 1, 2, 4)}) == 1 and combination["types"][3] == "float32"


def test_serialised_fields_are_the_attributes_under_their_own_names(host: Host) -> None:
    attrs = attributes(CHANNELS[:2], strides=[2, 1], lo=-1.5)
    plugin = host.build(("CuteConcatConv2Clip", attrs), inputs_of(attrs)).check()
    as_float32 = struct.unpack("f", struct.pack("f", 0.01))[0]
    expected = {k: v if isinstance(v, list) else [v] for k, v in attrs.items()} | {"alpha": [as_float32]}
    assert {f["name"]: f["values"] for f in plugin.report["serialized"]} == expected


def test_missing_optional_attributes_get_their_defaults(host: Host) -> None:
    attrs = attributes(CHANNELS[:2], pads=[0, 0, 0, 0])
    short = {k: v for k, v in attrs.items() if k in ("channels", "kernel_shape", "packed_sizes")}
    fields = {
        f["name"]: f["values"]
        for f in host.build(("CuteConcatConv2Relu", short), inputs_of(attrs)).check().report["serialized"]
    }
    assert fields["strides"] == [1, 1] and fields["pads"] == [0, 0, 0, 0] and fields["dilations"] == [1, 1]
    assert fields["lo"][0] < -3e38 and fields["hi"][0] > 3e38


def test_int64_fields_are_read_too(host: Host) -> None:
    fields = host.fields(host.find("CuteConcatConv2Relu"), attributes(CHANNELS[:2]))
    wide = [
        Field(
            f.name, 10, f.length, b"".join(v.to_bytes(8, "little", signed=True) for v in memoryview(f.data).cast("i"))
        )
        if f.type == 5
        else f
        for f in fields
    ]
    assert host.create("CuteConcatConv2Relu", wide) is not None
    assert host.create("CuteConcatConv2Relu", wide, RUNTIME) is not None


@pytest.mark.parametrize(
    ("changes", "size", "expected"),
    [
        ({}, (40, 24), (40, 24)),
        ({"strides": [2, 2]}, (40, 24), (20, 12)),
        ({"strides": [2, 3], "pads": [0, 0, 0, 0]}, (41, 25), (20, 8)),
        ({"pads": [0, 1, 2, 3]}, (9, 9), (9, 11)),
        ({"dilations": [2, 3], "pads": [2, 3, 2, 3]}, (16, 16), (16, 16)),
        ({"kernel_shape": [1, 1], "pads": [0, 0, 0, 0]}, (7, 5), (7, 5)),
        ({"kernel_shape": [7, 5], "strides": [4, 2], "pads": [3, 2, 3, 2]}, (33, 31), (9, 16)),
    ],
)
def test_output_sizes_stay_exact_for_dynamic_height_and_width(
    host: Host, changes: dict, size: tuple, expected: tuple
) -> None:
    plugin = build(host, 2, **changes).check()
    assert plugin.report["output_shapes"][0][:2] == ["in0[0]", str(FILTERS)]
    assert "in0[2]" in plugin.report["output_shapes"][0][2] and "in0[3]" in plugin.report["output_shapes"][0][3]
    context = plugin.context()
    context.set_shapes([(2, c, *size) for c in CHANNELS[:2]] + [i.dims for i in plugin.inputs[-2:]])
    assert context.output_size(0) == (2, FILTERS, *expected)


def test_timing_cache_id_tells_different_nodes_apart_and_equal_ones_not(host: Host) -> None:
    ids = [
        build(host, *a, **c).report["timing_cache_id"]
        for a, c in [((2,), {}), ((2,), {}), ((3,), {}), ((2,), {"strides": [2, 2]}), ((2,), {"lo": -1.0})]
    ]
    ids.append(build(host, 2, activation="Silu").report["timing_cache_id"])
    assert ids[0] == ids[1] and len(set(ids)) == 5


def test_a_profile_that_starts_with_an_empty_batch_is_served(host: Host) -> None:
    attrs = attributes((64,))
    source = Input((-1, 64, 16, 16), "float16", (0, 64, 16, 16), (4, 64, 16, 16), (8, 64, 16, 16))
    host.build(("CuteConcatConv1", attrs), [source, *inputs_of(attrs)[1:]]).check()


def test_sizes_that_tensorrt_may_leave_empty_are_not_held_against_the_node(host: Host) -> None:
    attrs, tensors, layouts = good_node()
    plugin = create(host, attrs)
    dynamic = [dynamic_desc(t, layout) for t, layout in zip(tensors, layouts, strict=True)]
    for d in dynamic:
        d.min, d.max, d.opt = CDims(), CDims(), CDims()
    assert plugin.configure(dynamic, 4, 1) == 0 and len(plugin.tactics()) >= 4
    dynamic[4].desc.dims = CDims()
    assert all(plugin.supports(pos, dynamic, 4, 1) for pos in range(5))


def test_clones_and_contexts_outlive_what_they_came_from(host: Host) -> None:
    attrs, tensors, layouts = good_node()
    first = create(host, attrs)
    second = first.clone()
    del first
    third, fourth = second.clone(attach=True), second.clone(attach=True)
    del second
    gc.collect()
    descs = descs_of(tensors, layouts)
    assert third.set_tactic(1) == 0 and fourth.set_tactic(2) == 0
    assert third.shape_change(descs, 4, 1) == 0 and fourth.shape_change(descs, 4, 1) == 0


def test_many_threads_may_create_build_and_destroy_at_once(host: Host) -> None:
    def life(i: int) -> int:
        plugin = build(host, 1 + i % 8, activation=ACTIVATIONS[i % 8]).check()
        contexts = [plugin.context() for _ in range(3)]
        for c in contexts:
            c.set_shapes(
                [(1 + i % 4, c_, 16, 16) for c_ in CHANNELS[: 1 + i % 8]] + [x.dims for x in plugin.inputs[-2:]]
            )
        return contexts[-1].output_size(0)[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(life, range(64))) == [1 + i % 4 for i in range(64)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_ten_thousand_lives_leave_no_memory_behind(host: Host) -> None:
    node = ("CuteConcatConv3Silu", attributes(CHANNELS[:3]))
    assert host.soak(node, 1000) == 1000
    before = resident_bytes()
    assert host.soak(node, 10_000) == 10_000
    assert resident_bytes() - before < 256 * 1024


# -- what must be refused --------------------------------------------------------------------------------------------


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
    assert words in refusal(capfd)
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
    assert plugin.enqueue(descs, addresses[:4], addresses[4:]) != 0
    assert f"tensor {tensor} is at address" in refusal(capfd)


@pytest.mark.parametrize("tactic", [-1, 99, 1 << 30])
def test_an_unknown_tactic_is_refused(host: Host, capfd: pytest.CaptureFixture[str], tactic: int) -> None:
    plugin = create(host)
    assert plugin.set_tactic(tactic) != 0
    assert f"tactic {tactic} is not in this library's table" in refusal(capfd)
    assert plugin.set_tactic(0) == 0


def test_float32_sources_that_cannot_be_loaded_in_16_bytes_are_refused_with_the_reason(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    attrs = attributes((3, 64))
    plugin = host.build(("CuteConcatConv2Relu", attrs), inputs_of(attrs, "float32"))
    with pytest.raises(HostError, match="no combination of types and formats is accepted"):
        plugin.check()
    assert "source 0 has 3 channels in pixels of 3 float32 elements" in capfd.readouterr().err
    host.build(("CuteConcatConv2Relu", attrs), inputs_of(attrs, "float16")).check()


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


# -- the library file ------------------------------------------------------------------------------------------------


def test_library_exports_only_tensorrts_entry_points_and_the_c_interface() -> None:
    lines = subprocess.check_output(["nm", "-D", "--defined-only", plugin_path()], text=True).splitlines()
    names = {line.split()[-1] for line in lines}
    header = (Path(__file__).resolve().parents[1] / "cutlass_kernels/c_api.h").read_text()
    functions = set(re.findall(r"^CUTEFUSE_EXPORT .*?\b(cutefuse_\w+)\(", header, re.M))
    assert len(functions) >= 6 and names == {"getCreators", "setLoggerFinder"} | functions


def test_library_needs_neither_tensorrt_nor_the_cuda_driver() -> None:
    dynamic = subprocess.check_output(["readelf", "-d", plugin_path()], text=True)
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    allowed = ("libstdc++", "libgcc_s", "libc.", "libm.", "libdl.", "librt.", "libpthread.", "ld-linux")
    assert needed and all(name.startswith(allowed) for name in needed), needed


def test_plugin_sources_never_call_logger_or_registry() -> None:
    folder = Path(__file__).resolve().parents[1] / "plugins"
    for source in folder.glob("*.[ch]*"):
        text = source.read_text()
        assert "findLogger(" not in text and "getPluginRegistry(" not in text, source
