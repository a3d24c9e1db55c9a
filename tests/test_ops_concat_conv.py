"""ConcatConv's Python half: packing, bodies in every opset, and the float64 reference against ONNX's own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from bodies import as_given, given_dims, in_layout, operands_given, stranger
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph.runner import Runner
from cutefuse.kernels import Tensor
from cutefuse.operators.concat_conv import OPERATOR
from cutefuse.operators.conv_call import make_call
from cutefuse.operators.conv_form import Form, Source, form_of
from cutefuse.operators.conv_math import Geometry, pack, pack_depthwise, packed_sizes, unpacked
from cutefuse.operators.function import body_for, call_of, node_attributes
from cutefuse.operators.layouts import HWC8, NHWC
from cutefuse.operators.op import Case

CASES = {c.name: c for c in OPERATOR.cases() if "float32" in c.dtypes}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)
)  # fmt: skip
def test_packing_loses_nothing_and_pads_with_zeros(channels: list[int], K: int, R: int, S: int) -> None:
    w = np.arange(1, K * sum(channels) * R * S + 1, dtype=np.float64).reshape(K, sum(channels), R, S)
    matrix = pack(w, channels)
    assert matrix.shape == (K, sum(packed_sizes(channels, (R, S))))
    assert np.array_equal(unpacked(matrix, channels, (R, S)), w)
    assert np.count_nonzero(matrix) == w.size


def test_packed_columns_stand_where_the_kernel_reads_them() -> None:
    # problem.h: [K][source][ceil(C/64)][R][S][64], written out here independently of the code under test.
    channels, (K, R, S) = [70, 8], (2, 3, 2)
    w = np.random.default_rng(0).standard_normal((K, 78, R, S))
    matrix = pack(w, channels)
    for k, c, r, s in ((0, 0, 0, 0), (1, 63, 2, 1), (0, 64, 1, 0), (1, 69, 2, 1), (0, 70, 0, 1), (1, 77, 2, 0)):
        source, local = (0, c) if c < 70 else (1, c - 70)
        block = local // 64
        column = (0, 2 * R * S * 64)[source] + ((block * R + r) * S + s) * 64 + local % 64
        assert matrix[k, column] == w[k, c, r, s]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 8), st.integers(1, 8))
def test_an_images_compact_packing_has_a_row_of_whole_fours_for_each_tap(c: int, K: int, R: int, S: int) -> None:
    w = np.arange(1, K * c * R * S + 1, dtype=np.float64).reshape(K, c, R, S)
    matrix, width = pack(w, [c], Form(1, image=True)), (c + 3) // 4 * 4
    assert matrix.shape == (K, R * S * width) and packed_sizes([c], (R, S), Form(1, image=True)) == [R * S * width]
    assert np.array_equal(unpacked(matrix, [c], (R, S)), w) and np.array_equal(unpacked(pack(w, [c]), [c], (R, S)), w)
    assert np.count_nonzero(matrix) == w.size
    k, r, s = K // 2, R - 1, S // 2
    assert np.array_equal(matrix[k, (r * S + s) * width :][:c], w[k, :, r, s])


def model_of(
    case: Case, opset: int, dtype: str = "float32", shared: bool = False, layout: int = HWC8, common: bool = False
) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list, list]:
    """One fused node with its body, its inputs, the float64 truths and their scales.

    A `shared` body serves another call as well, which differs in everything that it may differ in. `common`: the filter
    of an image is packed as that of any other source.
    """
    call = in_layout(OPERATOR.call(case, dtype), layout)
    values = OPERATOR.operands(call, np.random.default_rng(1))
    if common:
        call = in_common_packing(call)
        values[1] = pack(unpacked(values[1], case.sizes["C"], call.attrs["kernel_shape"]), case.sizes["C"])
    values = [v.astype(np.float32).astype(t.dtype) for v, t in zip(values, call.inputs, strict=True)]
    bias = form_of(case.op_type).sources + 1
    names, results = [f"x{i}" for i in range(len(values))], [f"y{i}" for i in range(len(call.outputs))]
    node = helper.make_node(call.op_type, names, results, domain="cutefuse", **node_attributes(call))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    images = operands_given(call, values, layout)
    feeds = {n: v for i, (n, v) in enumerate(zip(names, images, strict=True)) if i not in (bias - 1, bias)}
    graph = helper.make_graph(
        [node], "one",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()],
        [helper.make_tensor_value_info(n, kind, given_dims(t, layout))
         for n, t in zip(results, call.outputs, strict=True)],
        [numpy_helper.from_array(values[i], names[i]) for i in (bias - 1, bias)],
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("cutefuse", 1)]
    body = body_for([call, *([stranger(OPERATOR, call, opset)] if shared else [])], opset)
    model = helper.make_model(graph, opset_imports=imports, functions=[body], ir_version=8 if opset < 21 else 10)
    onnx.checker.check_model(model, full_check=True)
    doubles = [v.astype(np.float64) for v in values]
    truths, scales = OPERATOR.reference(call, doubles), OPERATOR.magnitude(call, doubles)
    return model, feeds, [as_given(v, layout) for v in truths], [as_given(v, layout) for v in scales]


def in_common_packing(call: kernels.Call) -> kernels.Call:
    """An image's call whose filter is packed as that of any other source."""
    image, w, bias = call.inputs
    sizes = packed_sizes(call.attrs["channels"], call.attrs["kernel_shape"])
    inputs = [image, replace(w, dims=(w.dims[0], *sizes)), bias]
    return replace(call, attrs={**call.attrs, "packed_sizes": sizes}, inputs=inputs, _keep=[])


def check(
    case: Case, opset: int, dtype: str, shared: bool, folder: Path, layout: int = HWC8, common: bool = False
) -> None:
    model, feeds, truths, scales = model_of(case, opset, dtype, shared, layout, common)
    unit = {"float32": 2e-6, "float16": 2e-3}[dtype]
    for y, truth, scale in zip(Runner(model, folder)(feeds), truths, scales, strict=True):
        assert y.shape == truth.shape and y.dtype == dtype
        assert np.all(np.abs(y - truth) <= unit * scale + unit), (dtype, shared)


# Bodies differ by their form and their activation, not by every pair of them.
PLAIN = [n for n, c in CASES.items() if n != c.op_type]
FORMS = [n for n, c in CASES.items() if n not in PLAIN and (form_of(c.op_type).sources, form_of(c.op_type).suffix)
         in ((1, "Clip"), (2, "Silu"), (8, ""), (8, "Relu"))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN + FORMS)
def test_the_body_computes_the_reference(name: str, tmp_path: Path) -> None:
    for shared in (False, True):
        check(CASES[name], 17, "float32", shared, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN + FORMS)
def test_a_body_over_nhwc_tensors_computes_the_reference(name: str, tmp_path: Path) -> None:
    for shared in (False, True):
        check(CASES[name], 17, "float32", shared, tmp_path, NHWC)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13, 15, 21, 24])
@pytest.mark.parametrize("name", ["strided", "inception", "CuteConcatConv3ClipAdd", "densenet", "c2f_residual",
                                  "CuteViewConcatConv2x3Silu"])  # fmt: skip
def test_a_body_over_nhwc_tensors_computes_the_reference_in_every_opset(name: str, opset: int, tmp_path: Path) -> None:
    if opset < OPERATOR.oldest_opset(CASES[name].op_type):
        return
    check(CASES[name], opset, "float32", True, tmp_path, NHWC)
    check(CASES[name], opset, "float16", opset % 2 == 0, tmp_path, NHWC)


def test_one_body_serves_one_layout() -> None:
    call = OPERATOR.call(CASES["c2f_residual"], "float32")
    with pytest.raises(CutefuseError, match=r"layouts \[0, 1\].*one layout"):
        body_for([call, in_layout(call, NHWC)], 17)
    ours, theirs = (body_for([in_layout(call, layout)] * 2, 17) for layout in (HWC8, NHWC))
    images = [*(f"__cutefuse_{name}" for name in ("x0", "x1", "z"))]
    assert [[n.op_type for n in theirs.node if name in n.input] for name in images] == [["Transpose"]] * 3
    assert sum(n.op_type == "Transpose" for n in theirs.node) == sum(n.op_type == "Transpose" for n in ours.node) + 4


@pytest.mark.parametrize("layout", [HWC8, NHWC])
def test_the_call_of_a_node_has_logical_sizes_in_either_layout(layout: int) -> None:
    call = in_layout(OPERATOR.call(CASES["c2f_residual"], "float32"), layout)
    given = [Tensor(given_dims(t, layout), t.dtype) for t in call.inputs]
    found = call_of(helper.make_node(call.op_type, [], [], **node_attributes(call)), given)
    assert [t.dims for t in found.inputs] == [t.dims for t in call.inputs]
    assert found.attrs["layout"] == [layout] and found.attrs["residual_start"] == [32]


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13, 14, 15, 18, 21, 24])
@pytest.mark.parametrize("name", ["2_sources_Clip", "1_sources_HardSwish", "strided", "asymmetric_pads", "inception",
                                  "bottleneck", "CuteConcatConv3ClipAdd"])  # fmt: skip
def test_the_body_computes_the_reference_in_every_opset(name: str, opset: int, tmp_path: Path) -> None:
    check(CASES[name], opset, "float32", True, tmp_path)
    check(CASES[name], opset, "float16", opset % 2 == 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [12, 13, 15, 18, 19, 21, 24])
@pytest.mark.parametrize(
    "name", ["enlarged_apart", "c2f", "middle_of_a_residual", "CuteViewConcatConv2x3Silu", "CuteViewConcatConv3TanhAdd"]
)
def test_the_body_of_a_view_computes_the_reference_from_opset_12_on(name: str, opset: int, tmp_path: Path) -> None:
    check(CASES[name], opset, "float32", True, tmp_path)
    check(CASES[name], opset, "float16", opset % 2 == 0, tmp_path)
    assert OPERATOR.oldest_opset(CASES[name].op_type) == 12


@pytest.mark.parametrize("layout", [HWC8, NHWC])
@pytest.mark.parametrize("name", ["CuteViewConcatConv3x2Silu", "CuteViewConcatConv2AddRelu", "odd_residual"])
def test_bodies_in_bfloat16_compute_in_float32(name: str, layout: int) -> None:
    case = next(c for c in OPERATOR.cases() if c.name == name)
    for shared in (False, True):
        model, feeds, truths, scales = model_of(case, 22, "bfloat16", shared, layout)
        results = ReferenceEvaluator(inline_local_functions(model)).run(None, feeds)
        for y, truth, scale in zip(results, truths, scales, strict=True):
            assert y.dtype == ml_dtypes.bfloat16
            assert np.all(np.abs(y.astype(np.float64) - truth) <= 2.0**-8 * np.abs(truth) + 1e-5 * scale + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13, 15, 18, 21, 24])
@pytest.mark.parametrize(
    "name", ["mobilenet", "dilated_depthwise", "depthwise_of_several", "CuteDepthwiseConcatConv1Clip"]
)
def test_the_body_of_a_depthwise_node_reads_its_group(name: str, opset: int, tmp_path: Path) -> None:
    case = next(c for c in OPERATOR.cases() if c.name == name)
    for layout in (HWC8, NHWC):
        for shared in (False, True):
            check(case, opset, "float16", shared, tmp_path, layout)
    body, node = body_for([OPERATOR.call(case, "float16")], opset), node_attributes(OPERATOR.call(case, "float16"))
    (conv,) = (n for n in body.node if n.op_type == "Conv")
    assert [a.i for a in conv.attribute if a.name == "group"] == [node["group"]] == [np.sum(case.sizes["C"])]


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry((3, 3), (1, 1), (12, 12, 12, 12), (12, 12)),
        Geometry((2, 5), (2, 1), (0, 3, 4, 1), (1, 3)),
        Geometry((7, 1), (1, 3), (9, 0, 0, 0), (4, 9)),
    ],
)
def test_taps_inside_of_an_image_are_counted(geometry: Geometry) -> None:
    size = (25, 14)
    found, outputs = 0, [geometry.output_size(axis, size[axis]) for axis in range(2)]
    for at in np.ndindex(*outputs, *geometry.kernel_shape):
        places = [at[i] * geometry.strides[i] - geometry.pads[i] + at[2 + i] * geometry.dilations[i] for i in range(2)]
        found += all(0 <= place < extent for place, extent in zip(places, size, strict=True))
    assert geometry.dilated_taps(size) == pytest.approx(found / math.prod(outputs))


@pytest.mark.parametrize("kernel", [(3, 3), (1, 5), (1, 1)])
def test_no_taps_are_counted_without_a_dilation(kernel: tuple[int, int]) -> None:
    """A single tap has no neighbour to keep a distance from."""
    assert Geometry(kernel, dilations=(1 if kernel[0] > 1 else 9, 1)).dilated_taps((25, 14)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13, 15, 18, 21, 24])
@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("name", ["image", "float32_image", "image_of_one_tap", "CuteImageConcatConv1Clip"])
def test_the_body_of_an_image_unpacks_either_packing(name: str, common: bool, opset: int, tmp_path: Path) -> None:
    case = next(c for c in OPERATOR.cases() if c.name == name)
    for layout in (HWC8, NHWC):
        for shared in (False, True):
            check(case, opset, "float16", shared, tmp_path, layout, common)


@pytest.mark.parametrize("opset", [9, 13, 17])
def test_one_body_serves_images_of_both_packings(opset: int) -> None:
    call = OPERATOR.call(next(c for c in OPERATOR.cases() if c.name == "image"), "float16")
    bodies = [body_for(calls, opset) for calls in ([call], [call, in_common_packing(call)])]
    assert [[n.op_type for n in b.node] for b in bodies[:1]] == [[n.op_type for n in b.node] for b in bodies[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 10, 11, 13, 17, 21, 24])
@pytest.mark.parametrize("name", ["deconvolution", "pixel_shuffle", "CuteSpread4ConcatConv3Clip"])
def test_the_body_of_spread_outputs_computes_the_reference_in_every_opset(
    name: str, opset: int, tmp_path: Path
) -> None:
    case = next(c for c in OPERATOR.cases() if c.name == name)
    for layout in (HWC8, NHWC):
        for shared in (False, True):
            check(case, opset, "float16", shared, tmp_path, layout)


def test_spread_outputs_cost_what_their_filters_do_and_say_the_size_of_the_square() -> None:
    call = make_call(Form(1, "Relu", spread=2), [Source((2, 24, 8, 8), 24)], [16], Geometry((1, 1)), "float16", {})
    assert call.outputs[0].dims == (2, 16, 16, 16) and call.inputs[1].dims == (64, 64)
    assert OPERATOR.cost(call).flops == 2 * 2 * 64 * 64 * 24
    assert OPERATOR.cost(call).bytes_moved == 2 * (2 * 24 * 64 + 64 * 64 + 2 * 16 * 256) + 4 * 64
    assert OPERATOR.title(call) == "24->16 over 2x2 1x1 @16x16 Relu"


def test_a_depthwise_filter_is_packed_tap_by_tap_and_costs_its_own_channel() -> None:
    w = np.random.default_rng(0).standard_normal((24, 1, 3, 5))
    matrix = pack_depthwise(w)
    assert matrix.shape == (15, 24) and all(matrix[r * 5 + s, c] == w[c, 0, r, s] for c, r, s in ((0, 0, 0), (7, 2, 3)))
    form = Form(1, "Silu", depthwise=True)
    call = make_call(form, [Source((2, 24, 8, 8), 24)], [24], Geometry((3, 3), pads=(1, 1, 1, 1)), "float16", {})
    assert OPERATOR.cost(call).flops == 2 * 2 * 24 * 64 * 9
    assert OPERATOR.cost(call).bytes_moved == 2 * (2 * 2 * 24 * 64 + 9 * 24) + 4 * 24
    assert OPERATOR.title(call) == "depthwise 24->24 3x3 @8x8 Silu" and call.attrs["packed_sizes"] == [24]


def test_every_op_type_has_its_form_and_back() -> None:
    forms = {form_of(c.op_type) for c in OPERATOR.cases()}
    assert len(forms) == 1217 and {f.op_type for f in forms} == {c.op_type for c in OPERATOR.cases()}
    assert form_of("CuteViewConcatConv3AddSilu") == Form(3, "Silu", True, 1, "before")
    assert form_of("CuteConcatConv8x4") == Form(8, "", False, 4, "")


OTHERS = """CuteConcatConv9 CuteConcatConv2x1 CuteConcatConv2x5Relu CuteConcatConv2AddAdd CuteConcatConv2x2Add
CuteConcatConv2AddReluAdd CuteConcatConv ConcatConv2 CuteConcatConv2Mish CuteConcatConv2ReluAdd1""".split()


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_no_op_types(name: str) -> None:
    with pytest.raises(kernels.KernelError, match=name):
        form_of(name)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_reference_agrees_with_the_standards_own_convolution(data: st.DataObject) -> None:
    channels = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    R, S = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    pair, quad = st.tuples(*[st.integers(1, 3)] * 2), st.tuples(*[st.integers(0, 3)] * 4)
    geometry = Geometry((R, S), data.draw(pair), data.draw(quad), data.draw(pair))
    H, W = (data.draw(st.integers(g, g + 5)) for g in ((R - 1) * 3 + 1, (S - 1) * 3 + 1))
    sources = [Source((2, c, H, W), c) for c in channels]
    call = make_call(Form(len(channels)), sources, [3], geometry, "float32", {})
    rng = np.random.default_rng(0)
    operands = OPERATOR.operands(call, rng)
    w = unpacked(operands[-2], channels, (R, S))
    conv = helper.make_node("Conv", ["x", "w", "b"], ["y"], **geometry.attrs())
    infos = [helper.make_tensor_value_info(n, 11, None) for n in "xwb"]
    graph = helper.make_graph([conv], "conv", infos, [helper.make_tensor_value_info("y", 11, None)])
    expected = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])).run(
        None, {"x": np.concatenate(operands[:-2], axis=1), "w": w, "b": operands[-1]}
    )[0]
    (y,) = OPERATOR.reference(call, operands)
    assert y.shape == expected.shape == tuple(call.outputs[0].dims)
    assert np.allclose(y, expected, rtol=1e-12, atol=1e-12)


def test_the_cost_counts_multiply_adds_twice_and_every_operand_once() -> None:
    sources = [Source((2, 64, 8, 8), 64), Source((2, 32, 8, 8), 32)]
    call = make_call(Form(2, "Relu"), sources, [16], Geometry((1, 1)), "float16", {})
    cost = OPERATOR.cost(call)
    assert cost.flops == 2 * 2 * 8 * 8 * 96 * 16
    assert cost.bytes_moved == 2 * (2 * 96 * 64 + 16 * 128 + 2 * 16 * 64) + 4 * 16


def test_a_view_costs_what_it_reads_and_a_residual_is_read_too() -> None:
    sources = [Source((2, 64, 4, 4), 32, 16, 2), Source((2, 32, 8, 8), 32)]
    cost = OPERATOR.cost(make_call(Form(2, "", True), sources, [16], Geometry((1, 1)), "float16", {}))
    assert cost.flops == 2 * 2 * 8 * 8 * 64 * 16
    assert cost.bytes_moved == 2 * (2 * 32 * 16 + 2 * 32 * 64 + 16 * 128 + 2 * 16 * 64) + 4 * 16
    added = OPERATOR.cost(make_call(Form(2, "", True, 1, "before"), sources, [16], Geometry((1, 1)), "float16", {}))
    assert added.bytes_moved == cost.bytes_moved + 2 * 2 * 16 * 64 and added.flops == cost.flops


def test_several_outputs_cost_as_one_of_all_filters() -> None:
    sources = [Source((2, 64, 8, 8), 64)]
    one, two = (
        OPERATOR.cost(make_call(Form(1, "", outputs=len(k)), sources, k, Geometry((3, 3)), "float32", {}))
        for k in ([48], [16, 32])
    )
    assert one == two


def test_unknown_sizes_cost_as_one_and_show_as_question_marks() -> None:
    sources = [Source((-1, 64, -1, -1), 64), Source((-1, 32, -1, -1), 32)]
    call = make_call(Form(2), sources, [16], Geometry((3, 3)), "float32", {})
    assert OPERATOR.cost(call).flops == 2 * math.prod((96, 16, 9))
    assert OPERATOR.title(call) == "64+32->16 3x3 @?x? linear"


def test_the_title_shows_ranges_factors_outputs_and_residuals() -> None:
    by_name = {c.name: OPERATOR.title(OPERATOR.call(c, "float16")) for c in OPERATOR.cases()}
    assert by_name["c2f"] == "32+[0:16]+[16:32]->32 1x1 @20x20 Silu"
    assert by_name["enlarged_apart"] == "[8:24]up4+16+[16:24]up2->19 3x3 @9x11 linear"
    assert by_name["inception"] == "48+16->24|16|40 1x1 @7x9 Relu"
    assert by_name["bottleneck"].endswith("add Relu") and by_name["odd_residual"].endswith("Silu add")
    assert by_name["CuteConcatConv1Add"].endswith("@4x8 add")
