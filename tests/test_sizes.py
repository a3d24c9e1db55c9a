"""Residuals in models of unknown rows and columns: two paths from one tensor with the same windows end in the same
sizes, and nothing else is taken for it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch, weights

from cutefuse.graph.read import Graph
from cutefuse.match.sizes import shape_of

VALUES = weights(w=(8, 8, 3, 3), v=(8, 8, 1, 1), five=(8, 8, 5, 5), squeeze=(4, 8, 1, 1), excite=(8, 4, 1, 1),
                 wide=(8, 16, 1, 1)) | {
    "six": np.float32(6), "zero": np.float32(0), "each": np.ones((8, 1, 1), np.float32),
    "halves": np.int64([0, 2, -1]), "ones": np.ones(2, np.float32), "nothing": np.zeros(2, np.float32),
    "around": np.int64([0, 0, 1, 2, 0, 0, 1, 0]), "more": np.int64([0, 0, 1, 2, 0, 0, 1, 2]),
    "back": np.int64([0, 8, 9, -1]), "columns": np.ones(7, np.float32), "image": np.ones((1, 1, 9, 7), np.float32),
}  # fmt: skip
INPUTS = {"a": "n,8,h,v"}
SE = "p = GlobalAveragePool(t) q = Conv(p, squeeze) r = Relu(q) o = Conv(r, excite) g = Sigmoid(o) e = Mul({}) "
STEM = "t = Conv<pads=[1,1,1,1]>(a, w) "
GROUPS = "f = Reshape(t, halves) i = InstanceNormalization(f, ones, nothing) "
TAIL = "x = Conv(e, v) y = Add(x, a)"


def make(body: str, inputs: dict[str, str]) -> onnx.ModelProto:
    used = set(re.findall(r"\w+", body))
    return graph(body, {k: VALUES[k] for k in VALUES if k in used and k != "v" or f", {k})" in body}, inputs=inputs)


def down(first: str, second: str) -> str:
    """Two paths from one tensor, as in the first block of a ResNet's stage."""
    return f"d = {first} u = Conv<pads=[1,1,1,1]>(a, w) s = Relu(u) x = {second} y = Add(x, d)"


HALF = "Conv<strides=[2,2]>(a, v)"
WIDE = "Conv<pads=[1,1,1,1], strides=[2,2]>(s, w)"
SAME = {
    "a ResNet's first block": down(HALF, WIDE),
    "a wider filter": down(HALF, "Conv<pads=[2,2,2,2], strides=[2,2]>(s, five)"),
    "a dilated filter": down(HALF, "Conv<pads=[2,2,2,2], dilations=[2,2], strides=[2,2]>(s, w)"),
    "other pads of the same sum": down(HALF, "Conv<pads=[0,2,2,0], strides=[2,2]>(s, w)"),
    "pads as many as are needed": down(
        'AveragePool<kernel_shape=[3,3], auto_pad="SAME_UPPER", strides=[2,2]>(a)', WIDE),
    "two steps and one": down(
        "Conv<strides=[4,4]>(a, v)",
        "Conv<pads=[1,1,1,1], strides=[2,2]>(z, w)").replace("x =", f"z = {WIDE} x ="),
    "a pooling": down("MaxPool<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(a)", WIDE),
    "an average": down("AveragePool<kernel_shape=[1,1], strides=[2,2]>(a)", WIDE),
    "squeeze and excitation": STEM + SE.format("t, g") + TAIL,
    "the gate first": STEM + SE.format("g, t") + TAIL,
    "ReLU6 by Max and Min": STEM + "m = Max(t, zero) e = Min(six, m) " + TAIL,
    "a GroupNorm": STEM + GROUPS + "o = Shape(t) e = Reshape(i, o) " + TAIL,
    "a Concat": STEM + "s = Conv<pads=[2,2,2,2]>(a, five) c = Concat<axis=1>(t, s) e = Conv(c, wide) " + TAIL,
    "GELU in steps": STEM + "d = Div(t, six) f = Erf(d) o = Add(f, six) m = Mul(t, o) e = Mul(m, six) " + TAIL,
    "a halved GELU": STEM + "m = Mul(t, six) d = Div(t, six) f = Erf(d) o = Add(f, six) e = Mul(m, o) " + TAIL,
    "Mish": STEM + "d = Softplus(t) f = Tanh(d) e = Mul(t, f) " + TAIL,
    "a number for each channel": STEM + "e = Mul(t, each) " + TAIL,
    "a Pad": down(HALF, "Conv<strides=[2,2]>(z, w)").replace("x =", "z = Pad(s, around) x ="),
    "a reflected Pad": down(HALF, "Conv<strides=[2,2]>(z, w)").replace("x =", 'z = Pad<mode="reflect">(s, around) x ='),
    "StarReLU": STEM + "r = Relu(t) p = Pow(r, six) m = Mul(p, six) e = Add(m, six) " + TAIL,
    "a slope for each channel": STEM + "e = PRelu(t, each) " + TAIL,
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_sizes_that_follow_from_one_tensor_are_those_of_a_residual(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(make(SAME[name], INPUTS), tmp_path, shapes={"a": (2, 8, 9, 7)})
    assert fused_types(patched)[-1].startswith("CuteConcatConv1") and fused_types(patched)[-1].endswith("Add")
    assert result.report["verify"]["passed"]


OTHER = {
    "no pads": down(HALF, WIDE.replace("1,1,1,1", "0,0,0,0")),
    "a wider Pad": down(HALF, "Conv<strides=[2,2]>(z, w)").replace("x =", "z = Pad(s, more) x ="),
    "a power of an image": STEM + "e = Pow(t, image) " + TAIL,
    "more pads": down(HALF, WIDE.replace("1,1,1,1", "1,1,1,2")),
    "pads of columns alone": down(HALF, WIDE.replace("1,1,1,1", "0,1,0,1")),
    "another step": down(HALF, WIDE.replace("[2,2]", "[2,1]")),
    "a dilated filter without its pads": down(HALF, WIDE.replace("strides", "dilations=[2,2], strides")),
    "one step of two": down("Conv<strides=[4,4]>(a, v)", WIDE),
    "a pooling rounded up": down("MaxPool<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2], ceil_mode=1>(a)", WIDE),
    "a pooling of twos": down("MaxPool<kernel_shape=[2,2], strides=[2,2]>(a)", WIDE),
    "another input": down(HALF, WIDE).replace("(a, v)", "(b, v)"),
    "a gate of another image": STEM + "g = Sigmoid(c) e = Mul(t, g) " + TAIL,
    "a gate of as many pixels": STEM + "g = Neg(b) e = Mul(t, g) " + TAIL,
    "a gate of another batch": STEM + "g = Neg(m) e = Mul(t, g) " + TAIL,
    "a number for each column": STEM + "e = Mul(t, columns) " + TAIL,
    "a constant image": STEM + "e = Mul(t, image) " + TAIL,
    "reshaped to given sizes": STEM + GROUPS + "e = Reshape(i, back) " + TAIL,
    "reshaped to the sizes of another": STEM + GROUPS + "o = Shape(b) e = Reshape(i, o) " + TAIL,
    "enlarged to the sizes at least": "o = Shape(a) e = Expand(c, o) " + TAIL,
    "one column": STEM + "p = ReduceMean<axes=[3]>(t) e = Relu(p) " + TAIL,
    "a transposed convolution": down(HALF, WIDE.replace("Conv<", "ConvTranspose<")),
}  # fmt: skip
MORE = {"b": "n,8,i,j", "m": "o,8,1,1", "c": "n,8,i,1"}


@pytest.mark.parametrize("name", OTHER)
def test_other_sizes_are_not(name: str, tmp_path: Path) -> None:
    body = OTHER[name]
    used = {k: v for k, v in MORE.items() if re.search(rf"[( ]{k}[,)]", body)}
    result, patched = run_patch(make(body, INPUTS | used), tmp_path, verify=False)
    assert not [t for t in fused_types(patched) if t.endswith("Add")]
    words = [s.reason for s in result.sites] + [n for s in result.sites for n in s.as_json()["notes"]]
    assert any("known to have the same sizes" in w or "ConvTranspose" in w for w in words)


@pytest.mark.parametrize("op_type", ["Conv", "Relu", "Mul", "Reshape"])
def test_damaged_nodes_before_a_convolution_end_the_search(op_type: str) -> None:
    model = make(STEM + "e = Relu(t) x = Conv(e, v) y = Relu(x)", INPUTS)
    node = model.graph.node[1]
    node.op_type = op_type
    node.attribute.append(onnx.helper.make_attribute("strides", 2))
    assert len(shape_of(Graph(model, Path()), "x")) == 4
    del node.input[:]
    assert len(shape_of(Graph(model, Path()), "x")) == 4


def test_a_line_of_windows_gives_the_sizes_of_the_standard() -> None:
    """The formula in shape_of against ONNX's own inference on numbers."""
    body = (
        "p = MaxPool<kernel_shape=[3,2], pads=[1,0,0,1], strides=[2,3]>(a) "
        "q = Conv<pads=[2,1,0,1], strides=[1,2], dilations=[2,1]>(p, w) y = Relu(q)"
    )
    for rows, columns in ((17, 23), (18, 24), (30, 41), (31, 29)):
        model = make(body, {"a": f"n,8,{rows},{columns}"})
        found = onnx.shape_inference.infer_shapes(model).graph
        sizes = [d.dim_value for d in next(v for v in found.value_info if v.name == "q").type.tensor_type.shape.dim]
        known = shape_of(Graph(model, Path(), found), "y")
        for axis, size in ((2, rows), (3, columns)):
            (text,) = (t for t in known[axis] if isinstance(t, str) and t.startswith("\0a,"))
            shift, step = map(int, re.findall(r"=(-?\d+)", text))
            assert (size + shift) // step == sizes[axis]
