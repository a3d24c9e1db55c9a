"""Function bodies that mean the same to ONNX Runtime and to TensorRT's ONNX parser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from bodies import faults, literal_of, stranger
from graphs import fused_types, graph, run_patch, weights
from onnx import helper

from cutefuse.graph.verify import verify
from cutefuse.kernels import Call
from cutefuse.operators import operators
from cutefuse.operators.function import body_for
from cutefuse.rewrite.patch import Options, patch
from cutefuse.rewrite.unpatch import unpatch

pytestmark = pytest.mark.slow

NEWEST = min(24, onnx.defs.onnx_opset_version())
OPSETS = range(9, NEWEST + 1)
OPS = {op.stem: op for op in operators()}


def nodes_without_constants(body: onnx.FunctionProto) -> list[str]:
    return [n.op_type for n in body.node if n.op_type != "Constant"]


# ---- every op_type in every opset ----


def faults_in(opset: int, op_types: Callable[[str], object]) -> list[str]:
    """What the parser misreads in the bodies of op_types, each for one call and for two that differ in all they may."""
    bodies = []
    for op in OPS.values():
        for case in {c.op_type: c for c in op.cases()}.values():
            if op_types(case.op_type) and opset >= op.oldest_opset(case.op_type):
                call = op.call(case, case.dtypes[0])
                bodies += [body_for(calls, opset) for calls in ([call], [call, stranger(op, call, opset)])]
    assert bodies
    return faults(bodies)


@pytest.mark.long
@pytest.mark.parametrize("opset", [11, 17])
def test_the_parser_resolves_every_reference_of_every_op_type(opset: int) -> None:
    assert faults_in(opset, lambda op_type: True) == []


@pytest.mark.parametrize("opset", OPSETS)
def test_the_parser_resolves_every_reference_in_every_opset(opset: int) -> None:
    # More sources and other activations are more of the same nodes.
    assert faults_in(opset, lambda op_type: re.search(r"Norm|Conv[13](x3)?(Add)?(|Clip|LeakyRelu)Q?$", op_type)) == []


# ---- every geometry, alone and together, against the original model ----

GEOMETRIES = {  # attributes of the Conv, rows and columns of its filter
    "1x1": ("", 1, 1),
    "3x3": ("pads=[1,1,1,1]", 3, 3),
    "1x1 strided": ("strides=[2,3]", 1, 1),
    "strided": ("strides=[2,2], pads=[1,1,1,1]", 3, 3),
    "dilated": ("dilations=[2,3], pads=[2,3,2,3]", 3, 3),
    "dilated and strided": ("dilations=[2,1], strides=[1,2]", 3, 2),
    "asymmetric": ("pads=[0,1,2,0]", 2, 4),
}
CHANNELS = {"64+128": (64, 128), "8+16": (8, 16), "70+3": (70, 3)}
ANCHORS = {"Relu": "y{i} = Relu(x{i})", "LeakyRelu": "y{i} = LeakyRelu<alpha=0.{i}>(x{i})"}


def model_of(
    sites: list[tuple[str, str]], opset: int, dtype: str = "float32", activation: str = "Relu"
) -> onnx.ModelProto:
    """Sites (geometry, channels) side by side, each Concat -> Conv -> activation over inputs of its own."""
    text, inputs, shapes = "", {}, {}
    for i, (geometry, channels) in enumerate(sites, 1):
        attrs, rows, columns = GEOMETRIES[geometry]
        first, second = CHANNELS[channels]
        inputs |= {f"a{i}": f"n,{first},9,11", f"b{i}": f"n,{second},9,11"}
        shapes |= {f"w{i}": (5 + i, first + second, rows, columns), f"k{i}": (5 + i,)}
        text += f"c{i} = Concat<axis=1>(a{i}, b{i}) x{i} = Conv<{attrs}>(c{i}, w{i}, k{i}) ".replace("<>", "")
        text += ANCHORS[activation].format(i=i) + " "
    outputs = [f"y{i}" for i in range(1, len(sites) + 1)]
    return graph(text, weights(dtype=dtype, **shapes), opset=opset, dtype=dtype, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_one_geometry_is_written_as_numbers(geometry: str, channels: str, opset: int, tmp_path: Path) -> None:
    result, patched = run_patch(model_of([(geometry, channels)], opset), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
    assert patched is not None and faults(patched.functions) == []
    given = {a.name: a for n in patched.graph.node for a in n.attribute}
    for name in ("kernel_shape", "strides", "dilations"):
        assert literal_of(patched, name) == [list(given[name].ints)]


@pytest.mark.parametrize("opset", OPSETS)
def test_all_geometries_of_one_op_type_share_a_body_that_computes_each(opset: int, tmp_path: Path) -> None:
    kinds = [g for g in GEOMETRIES if opset >= 11 or ("strided" not in g and "dilated" not in g)]
    sites = [(g, list(CHANNELS)[i % 3]) for i, g in enumerate(kinds)]
    for activation in ANCHORS:
        model = model_of(sites, opset, "float16" if opset % 2 else "float32", activation)
        result, patched = run_patch(model, tmp_path)
        assert fused_types(patched) == [f"CuteConcatConv2{activation}"] * len(sites)
        assert result.report["verify"]["passed"], result.report["verify"]
        assert patched is not None and len(patched.functions) == 1
        assert faults(patched.functions) == []
        assert literal_of(patched, "kernel_shape") == [None]


@pytest.mark.parametrize(("what", "first", "second"), [
    ("filter", "1x1", "3x3"), ("stride", "3x3", "strided"), ("stride of 1x1", "1x1", "1x1 strided"),
    ("dilation", "3x3", "dilated"), ("channels", "1x1", "1x1"),
])  # fmt: skip
@pytest.mark.parametrize("opset", [11, 13, 17])
def test_what_differs_is_computed_and_the_rest_is_numbers(
    what: str, first: str, second: str, opset: int, tmp_path: Path
) -> None:
    sites = [(first, "8+16"), (second, "70+3" if what == "channels" else "8+16")]
    result, patched = run_patch(model_of(sites, opset), tmp_path)
    assert result.report["verify"]["passed"] and patched is not None
    assert fused_types(patched) == ["CuteConcatConv2Relu"] * 2 and faults(patched.functions) == []
    written = [literal_of(patched, name) != [None] for name in ("kernel_shape", "strides", "dilations")]
    expected = {"filter": [False, True, True], "dilation": [False, True, False], "channels": [True, True, True]}
    assert written == expected.get(what, [True, False, True])


@pytest.mark.parametrize(("opset", "geometry", "name"), [
    (9, "strided", "strides"), (9, "dilated", "dilations"), (10, "dilated", "dilations"),
])  # fmt: skip
def test_what_an_old_opset_cannot_compute_is_refused_in_words(
    opset: int, geometry: str, name: str, tmp_path: Path
) -> None:
    model = model_of([("3x3", "8+16"), (geometry, "8+16")], opset)
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
    reason = result.report["sites"][1]["reason"]
    assert name in reason and f"opset {opset}" in reason and "opset 11" in reason and "--no-functions" in reason
    result, patched = run_patch(model, tmp_path, verify=False, functions=False)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] * 2
    both = model_of([(geometry, "8+16"), (geometry, "70+3")], opset)
    result, patched = run_patch(both, tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] * 2 and result.report["verify"]["passed"]


def test_a_stride_of_ten_is_computed_from_opset_10_on(tmp_path: Path) -> None:
    result, patched = run_patch(model_of([("3x3", "8+16"), ("strided", "64+128")], 10), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] * 2 and result.report["verify"]["passed"]
    assert patched is not None and faults(patched.functions) == []


# ---- views, several outputs, residuals ----

VIEWS = """u1 = Resize(a, , s2) c1 = Concat<axis=1>(u1, b) x1 = Conv(c1, w, k) y1 = Relu(x1)
           p, q = Split<axis=1>(b, z) u2 = Resize(a, , s2) c2 = Concat<axis=1>(u2, q) x2 = Conv(c2, v, k) y2 = Relu(x2)
           u3 = Resize(e, , s4) c3 = Concat<axis=1>(b, u3) x3 = Conv<strides=[2,1]>(c3, g, k) y3 = Relu(x3)"""
VALUES = weights(w=(12, 24, 1, 1), v=(12, 16, 3, 3), g=(12, 24, 2, 2), k=(12,)) | {
    "s2": np.float32([1, 1, 2, 2]), "s4": np.float32([1, 1, 4, 4]), "z": np.int64([8, 8]),
}  # fmt: skip
WIDE = {"a": "n,8,4,8", "b": "n,16,8,16", "e": "n,8,2,4"}


@pytest.mark.parametrize("opset", [13, 15, 17, 19, 21, NEWEST])
def test_views_with_ranges_factors_and_strides_of_their_own_share_a_body(opset: int, tmp_path: Path) -> None:
    model = graph(VIEWS, VALUES, opset=opset, inputs=WIDE, outputs=("y1", "y2", "y3"))
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteViewConcatConv2Relu"] * 3 and result.report["verify"]["passed"]
    assert patched is not None and faults(patched.functions) == []


def test_a_view_alone_resizes_and_slices_only_what_it_must(tmp_path: Path) -> None:
    one, two, _ = VIEWS.split("\n")
    for text, resizes, slices in ((one, 1, 0), (two.replace("y2", "y1"), 1, 1)):
        _, patched = run_patch(graph(text, VALUES, inputs=WIDE, outputs=("y1",)), tmp_path)
        assert patched is not None
        kinds = [n.op_type for n in patched.functions[0].node]
        # One Slice more takes the pads off the packed filter, or a Gather does.
        assert (kinds.count("Resize"), kinds.count("Slice")) == (resizes, slices)


def test_views_of_whole_tensors_need_no_slice_whatever_their_channels(tmp_path: Path) -> None:
    text = ""
    for i in (1, 2):
        text += f"""u{i} = Resize(a{i}, , s2) c{i} = Concat<axis=1>(u{i}, b{i})
                    x{i} = Conv<pads=[1,1,1,1]>(c{i}, w{i}) y{i} = Relu(x{i}) """
    values = weights(w1=(12, 192, 3, 3), w2=(9, 320, 3, 3)) | {"s2": np.float32([1, 1, 2, 2])}
    inputs = {"a1": "n,64,4,8", "b1": "n,128,8,16", "a2": "n,256,2,3", "b2": "n,64,4,6"}
    result, patched = run_patch(graph(text, values, inputs=inputs, outputs=("y1", "y2")), tmp_path)
    assert fused_types(patched) == ["CuteViewConcatConv2Relu"] * 2 and result.report["verify"]["passed"]
    assert patched is not None
    kinds = ["Resize", "Reshape", "Transpose", "Reshape", "Concat", "Conv", "Relu"]
    assert nodes_without_constants(patched.functions[0]) == kinds


# ---- int8 ----


@pytest.mark.parametrize("opset", [13, 17, 19, 21, NEWEST])
def test_an_int8_body_has_no_scale_of_the_filter_in_a_dequantize_linear(opset: int, tmp_path: Path) -> None:
    text, values = "", {"z": np.int8(0), "sa": np.float32(0.03), "sb": np.float32(0.05), "z12": np.zeros(12, np.int8)}
    for i, (rows, attrs) in enumerate(((3, "pads=[1,1,1,1]"), (1, "strides=[2,2]")), 1):
        text += f"""qa{i} = QuantizeLinear(a, sa, z) da{i} = DequantizeLinear(qa{i}, sa, z)
                    qb{i} = QuantizeLinear(b, sb, z) db{i} = DequantizeLinear(qb{i}, sb, z)
                    c{i} = Concat<axis=1>(da{i}, db{i}) dw{i} = DequantizeLinear<axis=0>(w{i}, ws, z12)
                    x{i} = Conv<{attrs}>(c{i}, dw{i}, k)
                    n{i} = BatchNormalization(x{i}, gamma, beta, mean, var) y{i} = Relu(n{i}) """
        values[f"w{i}"] = np.random.default_rng(i).integers(-127, 128, (12, 24, rows, rows)).astype(np.int8)
    values |= {"ws": np.linspace(0.001, 0.003, 12, dtype=np.float32), "k": np.linspace(-1, 1, 12, dtype=np.float32)}
    values |= {"gamma": np.linspace(-1, 1, 12, dtype=np.float32), "beta": np.ones(12, np.float32)}
    values |= {"mean": np.zeros(12, np.float32), "var": np.full(12, 0.5, np.float32)}
    result, patched = run_patch(graph(text, values, opset=opset, outputs=("y1", "y2")), tmp_path)
    assert fused_types(patched) == ["CuteQConcatConv2Relu"] * 2 and result.report["verify"]["passed"]
    assert patched is not None and faults(patched.functions) == []
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in patched.graph.initializer}
    assert any(v.min() < 0 for n, v in stored.items() if "weight_scale" in n), "the case is one that was refused"
    unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "u.onnx")  # DequantizeLinear stays for positive scales only
    plain = onnx.load(str(tmp_path / "u.onnx"))
    # of two sources at each site, and of a filter's numbers, by 1
    assert [n.op_type for n in plain.graph.node].count("DequantizeLinear") == (6 if opset < 19 else 4)
    assert verify(tmp_path / "model.onnx", plain, tmp_path, 1e-4, {})["passed"]


# ---- how small ----


@pytest.mark.parametrize(("geometry", "channels", "most"), [
    ("1x1", "64+128", ["Reshape", "Concat", "Conv", "Relu"]),
    ("1x1", "70+3", ["Gather", "Reshape", "Concat", "Conv", "Relu"]),
    ("3x3", "64+128", ["Reshape", "Transpose", "Reshape", "Concat", "Conv", "Relu"]),
    ("strided", "70+3", ["Reshape", "Transpose", "Reshape", "Gather", "Concat", "Conv", "Relu"]),
])  # fmt: skip
def test_a_body_of_one_geometry_is_a_handful_of_nodes(
    geometry: str, channels: str, most: list[str], tmp_path: Path
) -> None:
    _, patched = run_patch(model_of([(geometry, channels)], 17), tmp_path, verify=False)
    assert patched is not None
    assert nodes_without_constants(patched.functions[0]) == most


# ---- bodies that are there already, and the way back ----


def test_a_second_patch_rewrites_the_body_for_the_sites_of_both(tmp_path: Path) -> None:
    onnx.save(model_of([("1x1", "64+128"), ("strided", "8+16")], 17), str(tmp_path / "m.onnx"))
    one, two = tmp_path / "one.onnx", tmp_path / "two.onnx"
    assert patch(tmp_path / "m.onnx", one, Options(all_sites=True, include=["Conv_1"])).exit_code == 0
    assert literal_of(onnx.load(str(one)), "kernel_shape") == [[1, 1]]
    older = onnx.load(str(one))
    for a in [a for a in older.graph.node[0].attribute if a.name in ("layout", "residual_start", "dilations")]:
        older.graph.node[0].attribute.remove(a)  # as releases wrote it that did not know them
    onnx.save(older, str(one))
    assert patch(one, two, Options(all_sites=True, verify=True)).exit_code == 0
    patched = onnx.load(str(two))
    first, second = ({a.name: helper.get_attribute_value(a) for a in n.attribute} for n in patched.graph.node)
    assert first.keys() == second.keys() and first["layout"] == 0 and list(first["dilations"]) == [1, 1]
    assert len(fused_types(patched)) == 2 and len(patched.functions) == 1
    assert verify(tmp_path / "m.onnx", patched, tmp_path, 1e-5, {})["passed"] and faults(patched.functions) == []
    assert literal_of(patched, "kernel_shape") == [None]


def test_a_second_patch_of_an_old_opset_leaves_out_what_the_first_body_cannot_serve(tmp_path: Path) -> None:
    onnx.save(model_of([("3x3", "64+128"), ("strided", "8+16")], 9), str(tmp_path / "m.onnx"))
    one, two = tmp_path / "one.onnx", tmp_path / "two.onnx"
    assert patch(tmp_path / "m.onnx", one, Options(all_sites=True, include=["Conv_1"])).exit_code == 0
    result = patch(one, two, Options(all_sites=True))
    assert result.exit_code == 3 and "strides" in result.report["sites"][0]["reason"]


@pytest.mark.parametrize("opset", [9, 11, 13, 17])
def test_unpatching_gives_every_site_its_own_convolution_back(opset: int, tmp_path: Path) -> None:
    kinds = [g for g in GEOMETRIES if opset >= 11 or ("strided" not in g and "dilated" not in g)]
    model = model_of([(g, "8+16") for g in kinds], opset)
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert patch(tmp_path / "m.onnx", tmp_path / "p.onnx", Options(all_sites=True)).exit_code == 0
    assert unpatch(tmp_path / "p.onnx", tmp_path / "u.onnx") == len(kinds)
    plain = onnx.load(str(tmp_path / "u.onnx"))
    assert [n.op_type for n in plain.graph.node] == ["Concat", "Conv", "Relu"] * len(kinds)
    defaults = {"strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0]}
    for before, after in zip(model.graph.node, plain.graph.node, strict=True):
        theirs, ours = ({a.name: helper.get_attribute_value(a) for a in n.attribute} for n in (before, after))
        for name, default in defaults.items() if before.op_type == "Conv" else ():
            assert ours[name] == theirs.get(name, default)
    assert verify(tmp_path / "m.onnx", plain, tmp_path, 1e-6, {})["passed"]


# ---- the check itself ----


def test_the_check_sees_what_the_parser_cannot_resolve() -> None:
    def body(*nodes: onnx.NodeProto, opset: int = 17) -> onnx.FunctionProto:
        return helper.make_function("cutefuse", "F", ["x", "s"], ["y"], nodes, [helper.make_opsetid("", opset)])

    def refers(op_type: str, name: str) -> onnx.NodeProto:
        node = helper.make_node(op_type, ["x"], ["y"])
        node.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=name, type=onnx.AttributeProto.INTS))
        return node

    assert faults([body(refers("Conv", "pads")), body(refers("Constant", "value_ints"), opset=12)]) == []
    for name in ("kernel_shape", "strides", "dilations"):
        assert faults([body(refers("Conv", name))]) == [f"F: Conv.{name}"]
    assert faults([body(refers("MaxPool", "kernel_shape"))]) == ["F: MaxPool.kernel_shape"]
    assert faults([body(refers("Constant", "value_ints"), opset=11)]) == ["F: Constant.value_ints"]
    assert faults([body(helper.make_node("DequantizeLinear", ["x", "s"], ["y"]))]) == ["F: s"]
    negative = helper.make_node("Constant", [], ["t"], value=onnx.numpy_helper.from_array(np.float32(-1)))
    assert faults([body(negative, helper.make_node("DequantizeLinear", ["x", "t"], ["y"]))]) == ["F: t"]


def test_a_stranger_shares_nothing_that_a_body_may_rely_on() -> None:
    op = OPS["concat_conv"]
    call = op.call(op.cases()[0], "float32")
    other: Call = stranger(op, call, 17)
    free = call.attrs.keys() - set(op.must_agree(17))
    assert free == call.attrs.keys() - {"layout"}
    assert all(list(call.attrs[n]) != list(other.attrs[n]) for n in free)  # type: ignore[arg-type]
    assert list(stranger(op, call, 9).attrs["strides"]) == list(call.attrs["strides"])  # type: ignore[arg-type]
