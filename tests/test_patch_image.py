"""A convolution of the network's image: what reads it as it is given, what does not, and that it computes the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from devices import skip_without_code
from float64 import widened
from graphs import bn_weights, fused_types, graph, run_patch, weights
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from cutefuse.graph.body import DOMAIN
from cutefuse.graph.read import attribute
from cutefuse.graph.verify import verify
from cutefuse.operators.concat_conv import OPERATOR
from cutefuse.operators.conv_math import pack, unpacked
from cutefuse.rewrite.unpatch import unpatch
from cutefuse.select.compiled import Kernel, Record

INPUTS = {"i": "n,3,17,15"}
STEM = "x = Conv<pads=[1,1,1,1],strides=[2,2]>(i, w, k) y = Relu(x)"
CAST = "h = Cast<to=10>(i) x = Conv<pads=[1,1,1,1],strides=[2,2]>(h, w, k) y = Relu(x)"
AGAIN = " z = Conv(y, w2) u = Relu(z)"


def made(
    body: str, given: str = "float16", *, inputs: Mapping[str, str] = INPUTS, opset: int = 17,
    outputs: Sequence[str] = ("y",), more: Mapping[str, np.ndarray] | None = None,
) -> onnx.ModelProto:  # fmt: skip
    """A checked model in float16, its inputs of the `given` types: one for all, or one for each; `more` constants."""
    values = weights(dtype="float16", w=(12, 3, 3, 3), k=(12,), w2=(8, 12, 1, 1), w3=(8, 15, 1, 1), big=(12, 6, 3, 3))
    values |= more or {}
    read = set(re.split(r"[(), ]+", body))
    model = graph(body, {n: v for n, v in values.items() if n in read}, inputs=inputs, opset=opset, dtype="float16",
                  outputs=outputs)  # fmt: skip
    for value, kind in zip(model.graph.input, given.split() * len(inputs), strict=False):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("opset", [11, 17, 21])
@pytest.mark.parametrize(("body", "given"), [(STEM, "float16"), (CAST, "float32")])
def test_a_stem_reads_the_image_as_it_is_given(body: str, given: str, opset: int, layout: str, tmp_path: Path) -> None:
    model = made(body, given, opset=opset)
    result, patched = run_patch(model, tmp_path, layout=layout)
    assert result.report["verify"]["passed"] and patched is not None
    (node,) = [n for n in patched.graph.node if n.domain == DOMAIN]
    assert node.op_type == "CuteImageConcatConv1Relu" and node.input[0] == "i"
    assert [n.op_type for n in patched.graph.node] == [node.op_type, *(["Transpose"] if layout == "nhwc" else [])]
    (packed,) = (t for t in patched.graph.initializer if t.name == node.input[1])
    assert [*packed.dims] == [12, 3 * 3 * 4] and attribute(node, "packed_sizes") == [36]
    (site,) = [s for s in result.report["sites"] if s["status"] == "fused"]
    assert "image" in site["takes"] and site["dtype"] == "float16"
    assert site["shapes"]["inputs"][0] == [-1, 3, 17, 15]
    unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "u.onnx")
    plain = onnx.load(str(tmp_path / "u.onnx"))
    assert "Transpose" not in [n.op_type for n in plain.graph.node]
    tolerance = OPERATOR.tolerance("float16")
    assert verify(tmp_path / "model.onnx", plain, tmp_path, tolerance, {})["passed"]


def as_packed_before(patched: onnx.ModelProto) -> None:
    """Pack the filters of images as those of other sources, as models of older releases have them."""
    for node in (n for n in patched.graph.node if "Image" in n.op_type):
        (packed,) = (t for t in patched.graph.initializer if t.name == node.input[1])
        channels, kernel = attribute(node, "channels"), attribute(node, "kernel_shape")
        matrix = pack(unpacked(numpy_helper.to_array(packed), channels, kernel), channels)
        packed.CopyFrom(numpy_helper.from_array(matrix, packed.name))
        (sizes,) = (a for a in node.attribute if a.name == "packed_sizes")
        sizes.ints[:] = [matrix.shape[1]]


def test_a_model_with_the_packing_of_older_releases_runs_and_is_turned_back(tmp_path: Path) -> None:
    model = made(STEM)
    _, patched = run_patch(model, tmp_path)
    assert patched is not None
    as_packed_before(patched)
    assert attribute(patched.graph.node[0], "packed_sizes") == [576]
    tolerance = OPERATOR.tolerance("float16")
    assert verify(tmp_path / "model.onnx", patched, tmp_path, tolerance, {})["passed"]
    onnx.save(patched, str(tmp_path / "old.onnx"))
    unpatch(tmp_path / "old.onnx", tmp_path / "u.onnx")
    plain = onnx.load(str(tmp_path / "u.onnx"))
    assert verify(tmp_path / "model.onnx", plain, tmp_path, tolerance, {})["passed"]


def test_what_is_fused_beside_a_node_of_an_older_release_shares_its_body(tmp_path: Path) -> None:
    body = "x = Conv<strides=[2,2]>(i, w, k) y = Relu(x) v = Conv(j, w, k) z = Relu(v)"
    model = made(body, inputs=INPUTS | {"j": "n,3,17,15"}, outputs=("y", "z"))
    plain = tmp_path / "plain.onnx"
    onnx.save(model, str(plain))
    _, first = run_patch(model, tmp_path, exclude=["Conv_2"])
    assert first is not None and fused_types(first) == ["CuteImageConcatConv1Relu"]
    as_packed_before(first)
    result, second = run_patch(first, tmp_path)
    assert result.report["verify"]["passed"] and second is not None
    assert sorted(attribute(n, "packed_sizes") for n in second.graph.node) == [[36], [576]]
    assert len(second.functions) == 1
    assert verify(plain, second, tmp_path, OPERATOR.tolerance("float16"), {})["passed"]


def test_what_follows_it_in_nhwc_has_no_transpose_between(tmp_path: Path) -> None:
    result, patched = run_patch(made(STEM + AGAIN, outputs=("u",)), tmp_path, layout="nhwc")
    assert result.report["verify"]["passed"] and patched is not None
    kinds = [n.op_type for n in patched.graph.node]
    assert kinds == ["CuteImageConcatConv1Relu", "CuteConcatConv1Relu", "Transpose"]
    assert {attribute(n, "layout", 0) for n in patched.graph.node if n.domain == DOMAIN} == {1}


def test_what_reads_the_image_beside_it_is_transposed_where_it_has_fewer_bytes(tmp_path: Path) -> None:
    """The stem needs no Transpose of the float32 image, so that one of its Cast to float16 is the cheaper one."""
    body = "h = Cast<to=10>(i) x = Conv<pads=[1,1,1,1]>(h, w, k) y = Relu(x) c = Concat<axis=1>(y, h) z = Conv(c, w3)"
    result, patched = run_patch(made(body + " u = Relu(z)", "float32", outputs=("u",)), tmp_path, layout="nhwc")
    assert result.report["verify"]["passed"] and patched is not None
    assert fused_types(patched) == ["CuteImageConcatConv1Relu", "CuteConcatConv2Relu"]
    assert [n.input[0] for n in patched.graph.node if n.op_type == "Transpose"][0] == "h"


def test_a_model_is_turned_to_the_other_layout_and_back(tmp_path: Path) -> None:
    _, first = run_patch(made(STEM + AGAIN, outputs=("u",)), tmp_path, layout="nhwc")
    assert first is not None
    onnx.save(first, str(tmp_path / "model.onnx"))
    result, second = run_patch(first, tmp_path, layout="hwc8")
    assert result.report["verify"]["passed"] and second is not None
    assert [n.op_type for n in second.graph.node] == ["CuteImageConcatConv1Relu", "CuteConcatConv1Relu"]


def test_a_cast_that_others_read_stays(tmp_path: Path) -> None:
    model = made(CAST + " v = Neg(h)", "float32", outputs=("y", "v"))
    _, patched = run_patch(model, tmp_path)
    assert patched is not None
    assert sorted(n.op_type for n in patched.graph.node) == ["Cast", "CuteImageConcatConv1Relu", "Neg"]


def test_a_model_in_float32_is_converted_and_its_cast_goes(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    body = STEM + AGAIN
    values = weights(w=(12, 3, 3, 3), k=(12,), w2=(8, 12, 1, 1))
    result, patched = run_patch(graph(body, values, inputs=INPUTS, outputs=("u",)), tmp_path, dtype="float16")
    assert result.report["verify"]["passed"] and patched is not None
    assert patched.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    kinds = [n.op_type for n in patched.graph.node]
    assert kinds == ["CuteImageConcatConv1Relu", "CuteConcatConv1Relu", "Cast"]  # of the output alone


OTHERS = {
    "computed": ("v = Neg(i) x = Conv(v, w, k) y = Relu(x)", "CuteConcatConv1Relu"),
    "joined": ("c = Concat<axis=1>(i, i) x = Conv(c, big, k) y = Relu(x)", "CuteConcatConv2Relu"),
    "added to": ("x = Conv<pads=[1,1,1,1]>(i, w, k) s = Conv<pads=[1,1,1,1]>(i, w) y = Add(x, s)", None),
    "cast of something computed": (
        "v = Cast<to=1>(i) q = Neg(v) h = Cast<to=10>(q) x = Conv(h, w, k) y = Relu(x)", "CuteConcatConv1Relu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_the_networks_image_is_read_as_pixels(name: str, tmp_path: Path) -> None:
    body, op_type = OTHERS[name]
    result, patched = run_patch(made(body), tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    types = fused_types(patched)
    assert types == [op_type] if op_type else not any("Image" in t and "Add" in t for t in types)


@pytest.mark.parametrize(
    ("channels", "dtype"), [(9, "float16"), (3, "float32")], ids=["too many channels", "float32 filters"]
)
def test_what_the_kernels_cannot_read_so_is_read_as_pixels(channels: int, dtype: str, tmp_path: Path) -> None:
    values = weights(dtype=dtype, w=(12, channels, 3, 3), k=(12,))
    model = graph(STEM, values, inputs={"i": f"n,{channels},17,15"}, dtype=dtype)
    _, patched = run_patch(model, tmp_path)
    assert patched is not None and fused_types(patched) == ["CuteConcatConv1Relu"]


def test_without_image_it_is_read_as_pixels(tmp_path: Path) -> None:
    _, patched = run_patch(made(STEM), tmp_path, without=["image"])
    assert patched is not None and fused_types(patched) == ["CuteConcatConv1Relu"]


def test_without_image_is_idle_where_nothing_reads_one(tmp_path: Path) -> None:
    result, _ = run_patch(made(OTHERS["computed"][0]), tmp_path, without=["image"])
    assert any(
        "--without image does nothing: no candidate reads the network's image" in s
        for s in result.report["unused_options"]
    )


def test_two_types_of_image_share_one_body(tmp_path: Path) -> None:
    body = (
        "x = Conv<strides=[2,2]>(i, w, k) y = Relu(x) h = Cast<to=10>(j) v = Conv<strides=[2,2]>(h, w, k) z = Relu(v)"
    )
    model = made(body, "float16 float32", inputs=INPUTS | {"j": "n,3,17,15"}, outputs=("y", "z"))
    result, patched = run_patch(model, tmp_path)
    assert result.report["verify"]["passed"] and patched is not None
    assert fused_types(patched) == ["CuteImageConcatConv1Relu"] * 2 and len(patched.functions) == 1


@pytest.mark.parametrize("others", [False, True])
def test_the_copy_of_the_image_counts_where_no_other_needs_it(others: bool, tmp_path: Path) -> None:
    """TensorRT for RTX copies the image for a convolution of its own."""
    skip_without_code(89)
    body = STEM + (" v = Conv<strides=[16,16]>(i, w)" if others else "")
    model = made(body, inputs={"i": "1,3,640,640"}, outputs=("y", "v") if others else ("y",))
    result, _ = run_patch(model, tmp_path, engine="rtx", verify=False, include=["Relu*"])
    (site,) = [s for s in result.report["sites"] if "image" in s["takes"]]
    assert (site["gain_parts"].get("widened", 0.0) > 1.0) != others


CONSTANTS = bn_weights(3, "float16") | {
    name: np.asarray(value, np.float16)
    for name, value in {
        "s": 255, "p": [[[0.25]], [[0.004]], [[7]]], "m": [[[[0.4]], [[-0.5]], [[0.3]]]], "z": [[[0.5]], [[0]], [[2]]],
        "one": [[[1]], [[1]], [[2e-6]]], "none": 0, "nan": np.nan, "inf": np.inf, "small": 1e-4, "large": 6e4,
        "lines": np.arange(1, 18)[:, None], "columns": np.arange(1, 16), "p1": [[[[0.25]], [[0.004]], [[7]]]],
    }.items()
}  # fmt: skip
PADDED = " x = Conv<pads=[1,1,1,1],strides=[2,2]>(v, w, k) y = Relu(x)"
WITHOUT = " x = Conv(v, w, k) y = Relu(x)"
FOLDED = {
    "divided by a number": "v = Div(i, s)" + PADDED,
    "times a number, given first": "v = Mul(p, i)" + PADDED,
    "each channel by a number": "v = Div(i, p)" + PADDED,
    "one channel by zero": "v = Mul(i, z)" + PADDED,
    "twice": "u = Div(i, s) v = Div(u, p)" + PADDED,
    "less nothing": "v = Sub(i, none)" + PADDED,
    "less a mean, without padding": "u = Div(i, s) d = Sub(u, m) v = Div(d, p)" + WITHOUT,
    "taken from a mean, without padding": "d = Sub(m, i) v = Mul(d, p)" + WITHOUT,
    "added to a mean, without padding": "v = Add(m, i)" + WITHOUT,
    "normalised, without padding": "v = BatchNormalization(i, gamma, beta, mean, var)" + WITHOUT,
    "behind a Cast": "h = Cast<to=10>(i) v = Div(h, s)" + PADDED,
}


@pytest.mark.parametrize("name", FOLDED)
def test_what_scales_the_image_is_folded_into_the_filter(name: str, tmp_path: Path) -> None:
    """The rounded filter and the bias, in float64, against the model in float64."""
    model = made(FOLDED[name], "float32" if "Cast" in FOLDED[name] else "float16", more=CONSTANTS)
    result, patched = run_patch(model, tmp_path)
    assert result.report["verify"]["passed"] and patched is not None
    (node,) = patched.graph.node
    assert node.op_type == "CuteImageConcatConv1Relu" and node.input[0] == "i"
    stored = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in patched.graph.initializer}
    w = stored[node.input[1]].reshape(12, 9, -1)[:, :, :3].transpose(0, 2, 1).reshape(12, 3, 3, 3)
    body = f"x = Conv<pads={[*attribute(node, 'pads')]},strides={[*attribute(node, 'strides')]}>(i, w, k) y = Relu(x)"
    fused = graph(body, {"w": w, "k": stored[node.input[2]]}, inputs=INPUTS, dtype="float64")
    image = {"i": np.random.default_rng(0).uniform(-255, 255, (2, 3, 17, 15))}
    (got,), (expected,) = (ReferenceEvaluator(m).run(["y"], image) for m in (fused, widened(model)))
    assert np.abs(got - expected).max() <= 2.0**-10 * np.abs(expected).max()


LEFT = {  # name -> body, words of the note
    "a padded mean": ("u = Div(i, s) v = Sub(u, m)" + PADDED, "padded with zeros"),
    "a padded normalisation": ("v = BatchNormalization(i, gamma, beta, mean, var)" + PADDED, "padded with zeros"),
    "NaN": ("v = Mul(i, nan)" + PADDED, "NaN or infinity"),
    "infinity": ("v = Mul(i, inf)" + PADDED, "NaN or infinity"),
    "a division by zero": ("v = Div(i, none)" + PADDED, "NaN or infinity"),
    "a filter beyond float16": ("u = Mul(i, large) v = Mul(u, s)" + PADDED, "loses precision"),
    "a filter below float16": ("u = Mul(i, small) v = Div(u, s)" + PADDED, "loses precision"),
    "a channel below float16": ("v = Mul(i, one)" + PADDED, "loses precision"),
    "another axis": ("v = Mul(i, lines)" + PADDED, ""),
    "the last axis": ("v = Mul(i, columns)" + PADDED, ""),
    "a quotient": ("v = Div(s, i)" + PADDED, ""),
    "one channel for three": ("v = Mul(i, p)" + PADDED, ""),
    "an image without a batch": ("v = Mul(i, p1)" + PADDED, ""),
    "a square": ("v = Mul(i, i)" + PADDED, ""),
    "a scale of the run": ("v = Mul(i, j)" + PADDED, ""),
    "a scale that callers may replace": ("v = Mul(i, p)" + PADDED, ""),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_folded_stays_and_the_note_says_why(name: str, tmp_path: Path) -> None:
    body, words = LEFT[name]
    more = {} if "callers" in name else CONSTANTS
    given = {"scale of the run": {"j": "1,1,1,1"}, "callers": {"p": "3,1,1"}, "one channel for": {"i": "n,1,17,15"},
             "without a batch": {"i": "3,17,15"}}  # fmt: skip
    inputs = INPUTS | next((v for k, v in given.items() if k in name), {})
    model = made(body, inputs=inputs, more=more)
    if "callers" in name:
        model.graph.initializer.append(numpy_helper.from_array(CONSTANTS["p"], "p"))
    result, patched = run_patch(model, tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv1Relu"]
    (site,) = [s for s in result.report["sites"] if s["status"] == "fused"]
    assert len(site["notes"]) == bool(words) and all(words in note for note in site["notes"])


def test_a_scale_that_others_read_stays_for_them(tmp_path: Path) -> None:
    result, patched = run_patch(made(FOLDED["divided by a number"] + " u = Neg(v)", outputs=("y", "u"), more=CONSTANTS),
                                tmp_path)  # fmt: skip
    assert patched is not None and result.report["verify"]["passed"]
    assert sorted(n.op_type for n in patched.graph.node) == ["CuteImageConcatConv1Relu", "Div", "Neg"]


@pytest.mark.parametrize(("dtype", "folds"), [("float16", False), ("bfloat16", True)])
def test_a_float32_image_is_scaled_before_its_cast_where_float16_might_not_hold_it(
    dtype: str, folds: bool, tmp_path: Path
) -> None:
    kind = TensorProto.BFLOAT16 if folds else TensorProto.FLOAT16
    values = weights(dtype=dtype, w=(12, 3, 3, 3), k=(12,), s=())
    model = graph(f"u = Div(i, s) v = Cast<to={kind}>(u)" + PADDED, values, inputs=INPUTS, dtype=dtype, opset=22)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT
    model.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.float32(65535), "s"))
    onnx.checker.check_model(model, full_check=True)
    result, patched = run_patch(model, tmp_path, verify=False)
    assert fused_types(patched) == ["CuteImageConcatConv1Relu" if folds else "CuteConcatConv1Relu"]
    (site,) = [s for s in result.report["sites"] if s["status"] == "fused"]
    assert ["too large for float16" in note for note in site["notes"]] == [True] * (not folds)


def test_a_copy_of_the_image_that_the_compiler_told_of_counts_once(tmp_path: Path) -> None:
    skip_without_code(89)
    model = made(STEM, inputs={"i": "1,3,640,640"})
    record = Record((Kernel(("Conv_0",), 4 * 3 * 640 * 640, True),), frozenset({"Conv_0", "Relu_1"}))
    result, _ = run_patch(model, tmp_path, engine="rtx", verify=False, compiled=record)
    (site,) = result.report["sites"]
    assert site["gain_us"] == site["gain_parts"]["widened"] and "neighbours" not in site["gain_parts"]
    result, patched = run_patch(model, tmp_path, engine="rtx", verify=False, compiled=record, without=("image",))
    (site,) = result.report["sites"]
    assert site["gain_us"] == 0.0, (site, "a site that reads pixels leaves the copy where it is")


@pytest.mark.parametrize("engine", ["torch", "tensorrt"])
def test_the_kernel_of_its_cast_counts_where_no_other_needs_it(engine: str, tmp_path: Path) -> None:
    gains = []
    for name, body in {"none": STEM, "alone": CAST, "read": CAST + " v = Conv<strides=[16,16]>(h, w)"}.items():
        (tmp_path / name).mkdir()
        given, outputs = "float16" if name == "none" else "float32", ("y", "v") if name == "read" else ("y",)
        model = made(body, given, inputs={"i": "1,3,640,640"}, outputs=outputs)
        result, _ = run_patch(model, tmp_path / name, engine=engine, sm=90, verify=False, include=["Relu*"])
        gains += [s["gain_us"] for s in result.report["sites"] if s["status"] == "fused"]
    none, alone, read = gains
    assert alone > none + 1.3 and read == pytest.approx(none, abs=0.1)
