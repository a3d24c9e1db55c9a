"""A convolution of the network's image: what reads it as it is given, what does not, and that it computes the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from devices import skip_without_code
from graphs import fused_types, graph, run_patch, weights
from onnx import TensorProto, helper

from cutefuse.graph.body import DOMAIN
from cutefuse.graph.read import attribute
from cutefuse.graph.verify import verify
from cutefuse.operators.concat_conv import OPERATOR
from cutefuse.rewrite.unpatch import unpatch
from cutefuse.select.compiled import Kernel, Record

INPUTS = {"i": "n,3,17,15"}
STEM = "x = Conv<pads=[1,1,1,1],strides=[2,2]>(i, w, k) y = Relu(x)"
CAST = "h = Cast<to=10>(i) x = Conv<pads=[1,1,1,1],strides=[2,2]>(h, w, k) y = Relu(x)"
AGAIN = " z = Conv(y, w2) u = Relu(z)"


def made(
    body: str, given: str = "float16", *, inputs: Mapping[str, str] = INPUTS, opset: int = 17,
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:  # fmt: skip
    """A checked model in float16, its inputs of the `given` types: one for all, or one for each."""
    values = weights(dtype="float16", w=(12, 3, 3, 3), k=(12,), w2=(8, 12, 1, 1), w3=(8, 15, 1, 1), big=(12, 6, 3, 3))
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
    (site,) = [s for s in result.report["sites"] if s["status"] == "fused"]
    assert "image" in site["takes"] and site["dtype"] == "float16"
    assert site["shapes"]["inputs"][0] == [-1, 3, 17, 15]
    unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "u.onnx")
    plain = onnx.load(str(tmp_path / "u.onnx"))
    assert "Transpose" not in [n.op_type for n in plain.graph.node]
    tolerance = OPERATOR.tolerance("float16")
    assert verify(tmp_path / "model.onnx", plain, tmp_path, tolerance, {})["passed"]


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


def test_a_copy_of_the_image_that_the_compiler_told_of_counts_once(tmp_path: Path) -> None:
    skip_without_code(89)
    model = made(STEM, inputs={"i": "1,3,640,640"})
    record = Record((Kernel(("Conv_0",), 4 * 3 * 640 * 640, True),), frozenset({"Conv_0", "Relu_1"}))
    result, _ = run_patch(model, tmp_path, engine="rtx", verify=False, compiled=record)
    (site,) = result.report["sites"]
    assert site["gain_us"] == site["gain_parts"]["widened"] and "neighbours" not in site["gain_parts"]


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
