"""The library's plugins in the plugin host: every variant's life cycle, and what the library file exports and needs."""

from __future__ import annotations

import gc
import re
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from plugin_nodes import (
    ACTIVATIONS,
    CHANNELS,
    FILTERS,
    attributes,
    build,
    create,
    descs_of,
    good_node,
    has_layouts,
    in_layout,
    inputs_of,
    to_node,
)

from cutefuse import kernels, plugin_path
from cutefuse.operators import operators
from cutefuse.operators.op import Case, FusedOp
from cutefuse_host import RUNTIME, Field, Host, HostError, Input
from cutefuse_host.abi import CDims, dynamic_desc


@pytest.fixture(scope="module")
def host() -> Host:
    return Host()


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


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([], "0 input shapes"),
        ([(3, 64, 17, 9)], "1 input shapes were given"),
        ([(3, 64, 17, 9)] * 9, "9 input shapes were given"),
        ([(3, 64, 17, 9), (3, 24, 17), (32, 1), (32,)], "input 1 was given 3 axes"),
    ],
)
def test_a_context_refuses_shapes_that_are_not_the_nodes(
    host: Host, shapes: list[tuple[int, ...]], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin = build(host, 2, "float16", "Relu").check()
    with pytest.raises(HostError) as error:
        plugin.context().set_shapes(shapes)
    assert words in str(error.value) + capfd.readouterr().err


FORMS = {
    "views": ("CuteViewConcatConv2Relu", [(1, 80, 20, 12), (1, 24, 10, 6)], [],
              {"channels": [40, 24], "channel_starts": [8, 0], "upsample": [1, 2]}, [FILTERS]),
    "residual before": ("CuteConcatConv2AddRelu", [(1, 64, 20, 12), (1, 24, 20, 12)], [FILTERS], {}, [FILTERS]),
    "residual after": ("CuteConcatConv2SiluAdd", [(1, 64, 20, 12), (1, 24, 20, 12)], [FILTERS], {}, [FILTERS]),
    "three outputs": ("CuteConcatConv2x3Silu", [(1, 64, 20, 12), (1, 24, 20, 12)], [],
                      {"output_channels": [16, 8, 24]}, [16, 8, 24]),
    "views and outputs": ("CuteViewConcatConv1x2", [(1, 72, 5, 3)], [],
                          {"channels": [64], "channel_starts": [8], "upsample": [4], "output_channels": [8, 40]},
                          [8, 40]),
    "views and residual": ("CuteViewConcatConv1AddTanh", [(1, 72, 10, 6)], [FILTERS],
                           {"channels": [64], "channel_starts": [0], "upsample": [2]}, [FILTERS]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", FORMS)
def test_views_residuals_and_several_outputs_live_through_builder_and_runtime(
    host: Host, name: str, dtype: str
) -> None:
    op_type, sources, residual, changes, filters = FORMS[name]
    channels = changes.get("channels", [64, 24])
    attrs = attributes(tuple(channels), **{k: v for k, v in changes.items() if k != "channels"})

    def dynamic(c: int, h: int, w: int) -> Input:
        return Input((-1, c, -1, -1), dtype, (1, c, h, w), (2, c, h, w), (4, c, 2 * h, 2 * w))

    inputs = [dynamic(c, h, w) for _, c, h, w in sources]
    inputs += [Input((FILTERS, sum(attrs["packed_sizes"])), dtype), Input((FILTERS,), "float32")]
    inputs += [dynamic(c, 20, 12) for c in residual]
    plugin = host.build((op_type, attrs), inputs, outputs=len(filters)).check()
    assert plugin.findings == []
    [combination] = plugin.report["combinations"]
    pixel = "kHWC" if dtype == "float32" else "kHWC8"
    plain = ["kLINEAR", "kLINEAR", *[pixel] * (len(residual) + len(filters))]
    assert combination["formats"] == [pixel] * len(sources) + plain and combination["tactics"]
    assert plugin.report["compiled"] == combination
    context = plugin.context(tactic=combination["tactics"][0])
    tripled = [(3, c, h, w) for _, c, h, w in sources] + [i.dims for i in inputs[len(sources) :][:2]]
    context.set_shapes(tripled + [(3, c, 20, 12) for c in residual])
    assert [context.output_size(j) for j in range(len(filters))] == [(3, k, 20, 12) for k in filters]


@pytest.mark.parametrize(
    ("changes", "words"),
    {
        "count": ({"output_channels": [48]}, "output_channels has 1 values for 2 outputs"),
        "sum": ({"output_channels": [16, 16]}, "add up"),
        "border": ({"output_channels": [12, 36]}, "multiples of 8"),
    }.values(),
)
def test_output_channels_that_do_not_fit_are_refused(
    host: Host, capfd: pytest.CaptureFixture[str], changes: dict, words: str
) -> None:
    attrs = attributes((64, 24), **changes)
    with pytest.raises(HostError):
        host.build(("CuteConcatConv2x2Relu", attrs), inputs_of(attrs), outputs=2).check()
    assert words in capfd.readouterr().err


CASES = [(op, case) for op in operators() for case in op.cases()]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op.stem}-{case.name}" for op, case in CASES])
def test_every_case_of_every_operator_lives_through_builder_and_runtime(host: Host, op: FusedOp, case: Case) -> None:
    for dtype, layout in [
        *((d, 0) for d in case.dtypes),
        *([(case.dtypes[-1], 1)] if has_layouts(case.op_type) else []),
    ]:
        call = in_layout(op.call(case, dtype), layout)
        inputs = [Input(t.dims, t.dtype) for t in call.inputs]
        plugin = host.build((call.op_type, call.attrs), inputs, outputs=len(call.outputs)).check()
        assert plugin.findings == []
        assert layout == 0 or {f for c in plugin.report["combinations"] for f in c["formats"]} == {"kLINEAR"}
        assert plugin.report["output_types"] == [t.dtype for t in call.outputs]
        assert [tuple(dims) for dims in plugin.report["output_opt"]] == [tuple(t.dims) for t in call.outputs]
        context = plugin.context()
        context.set_shapes([t.dims for t in call.inputs])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("channels", [(3,), (64, 24), (85, 7, 255)])
def test_a_node_in_nhwc_takes_and_gives_linear_tensors_of_any_width(
    host: Host, channels: tuple[int, ...], dtype: str
) -> None:
    attrs = attributes(channels, strides=[2, 1], layout=[1])
    sources = [Input((-1, -1, -1, c), dtype, (1, 8, 8, c), (2, 40, 24, c), (4, 64, 64, c)) for c in channels]
    plugin = host.build(
        (f"CuteConcatConv{len(channels)}Silu", attrs), [*sources, *inputs_of(attrs, dtype)[-2:]]
    ).check()
    assert plugin.findings == []
    [combination] = plugin.report["combinations"]
    assert set(combination["formats"]) == {"kLINEAR"} and combination["tactics"]
    shape = plugin.report["output_shapes"][0]
    assert (shape[0], shape[3]) == ("in0[0]", str(FILTERS)) and "in0[1]" in shape[1] and "in0[2]" in shape[2]
    context = plugin.context(tactic=combination["tactics"][-1])
    context.set_shapes([(3, 17, 9, c) for c in channels] + [i.dims for i in plugin.inputs[-2:]])
    assert context.output_size(0) == (3, 9, 9, FILTERS)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantised_nodes_in_nhwc_take_linear_tensors(host: Host, dtype: str) -> None:
    attrs = {k: v for k, v in attributes((64, 21), layout=[1]).items()
             if k not in ("channel_starts", "upsample", "output_channels", "residual_start")}  # fmt: skip
    attrs |= {"input_scales": [0.5, 0.25], "output_scale": [0.5], "output_type": [1]}
    sources = [Input((2, 40, 24, c), dtype) for c in (64, 21)]
    packed = [Input((85, sum(attrs["packed_sizes"])), dtype), Input((85,), "float32"), Input((85,), "float32")]
    plugin = host.build(("CuteQConcatConv2ReluQ", attrs), [*sources, *packed]).check()
    assert plugin.findings == [] and plugin.report["output_opt"] == [[2, 40, 24, 85]]
    assert {f for c in plugin.report["combinations"] for f in c["formats"]} == {"kLINEAR"}


def test_a_residual_in_nhwc_may_be_a_range_of_a_wider_tensor(host: Host) -> None:
    attrs = attributes((64,), residual_start=[5], layout=[1], channel_starts=[3])
    wide = Input((2, 40, 24, FILTERS + 9), "float16")
    inputs = [Input((2, 40, 24, 70), "float16"), *inputs_of(attrs)[-2:], wide]
    plugin = host.build(("CuteViewConcatConv1SiluAdd", attrs), inputs).check()
    assert plugin.findings == [] and plugin.report["output_opt"] == [[2, 40, 24, FILTERS]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"layout": [2]}, "layout is 2"), ({"layout": [-1]}, "layout is -1"), ({"residual_start": [8]}, "residual_start")],
)
def test_layouts_and_ranges_that_do_not_exist_are_refused(
    host: Host, capfd: pytest.CaptureFixture[str], changes: dict, words: str
) -> None:
    attrs = attributes((64,), **changes)
    with pytest.raises(HostError):
        host.build(("CuteConcatConv1Relu", attrs), inputs_of(attrs)).check()
    assert words in capfd.readouterr().err


def test_a_node_in_nhwc_refuses_images_of_other_formats(host: Host) -> None:
    attrs, tensors, layouts = good_node()
    plugin = create(host, attrs | {"layout": [1]})
    nhwc = [Input(to_node(t.dims), t.dtype) for t in tensors]
    linear = [dynamic_desc(t) for t in nhwc]
    assert all(plugin.supports(pos, linear, 4, 1) for pos in range(5)) and plugin.configure(linear, 4, 1) == 0
    vectors = [dynamic_desc(t, layout) for t, layout in zip(nhwc, layouts, strict=True)]
    assert not plugin.supports(0, vectors, 4, 1) and plugin.configure(vectors, 4, 1) != 0
    assert not create(host, attrs).supports(0, linear, 4, 1)


def test_an_engine_from_before_layouts_and_ranges_loads(host: Host) -> None:
    old = {k: v for k, v in attributes(CHANNELS[:2]).items() if k not in ("layout", "residual_start")}
    fields = host.fields(host.find("CuteConcatConv2Relu"), old)
    assert {f.name for f in fields} == set(old)
    plugin = host.create("CuteConcatConv2Relu", fields, RUNTIME)
    assert plugin is not None
    _, tensors, layouts = good_node()
    assert plugin.shape_change(descs_of(tensors, layouts), 4, 1) == 0


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
    expected |= {"tile": [0], "workspace_bytes": [0]}  # nobody has configured it yet
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
    assert third.set_tactic(1) == 0 and fourth.set_tactic(3) == 0
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


@pytest.mark.slow
def test_ten_thousand_lives_leave_no_memory_behind(host: Host) -> None:
    node = ("CuteConcatConv3Silu", attributes(CHANNELS[:3]))
    assert host.soak(node, 1000) == 1000
    growth = []
    for _ in range(3):  # threads of other tests may take memory meanwhile; a leak takes it every time
        before = resident_bytes()
        assert host.soak(node, 10_000) == 10_000
        growth.append(resident_bytes() - before)
    assert min(growth) < 256 * 1024


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


def test_own_code_needs_no_newer_glibc_than_2_34() -> None:
    folder = Path(plugin_path()).parent
    for name in ("libcutefuse.so", "libcutefuse_host.so", "libcutefuse_register.so"):
        if "libstdc++" not in subprocess.check_output(["readelf", "-d", folder / name], text=True):
            pytest.skip("this compiler links libstdc++ into the libraries, which needs more of glibc than they do")
        symbols = subprocess.check_output(["nm", "-D", "--undefined-only", folder / name], text=True)
        newer = [s for s, minor in re.findall(r"(\S+)@GLIBC_2\.(\d+)", symbols) if int(minor) > 34]
        assert not newer, f"{name} calls {newer}, so a wheel does not install where glibc is 2.34"


def test_plugin_sources_never_call_logger_or_registry() -> None:
    folder = Path(__file__).resolve().parents[1] / "plugins"
    sources = list(folder.glob("*.[ch]*"))
    assert folder / "entry.cpp" in sources
    for source in sources:
        text = source.read_text()
        assert "findLogger(" not in text and "getPluginRegistry(" not in text, source
