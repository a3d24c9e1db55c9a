"""Graphs as PyTorch's dynamo exporter writes them: sizes from parts of a shape, constants in the type of a tensor, and
channel ranges in sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import FILTER, fused_types, graph, run_patch, weights
from onnx import numpy_helper

# ------------------------------------------------------------------------------------------------- enlarged sources
PARTS = (
    "p = Shape<start=-4, end=-2>(a) s2 = Shape<start=2, end=3>(a) s3 = Shape<start=3>(a) n2 = Squeeze(s2) "
    "n3 = Squeeze(s3) m2 = Mul(f, n2) m3 = Mul(f, n3) h = Reshape(m2, i) v = Reshape(m3, i) t = Concat<axis=0>(h, v) "
    "q = Concat<axis=0>(p, t) "
)
BATCH = "p = Shape<start=0, end=2>(a) q = Concat<axis=0>(p, e) "
UP = (
    'u = Resize<coordinate_transformation_mode="asymmetric", nearest_mode="floor">(a, , , q) '
    "c = Concat<axis=1>(u, b) x = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(x)"
)
NUMBERS = {"f": np.int64(2), "i": np.int64([-1]), "j": np.int64([1, 2]), "e": np.int64([8, 6])}
STATIC, MOVING = {"a": "n,8,4,3", "b": "n,16,8,6"}, {"a": "n,8,h,v", "b": "n,16,p,q"}


def enlarging(body: str, inputs: dict[str, str]) -> onnx.ModelProto:
    used = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    numbers = {name: value for name, value in NUMBERS.items() if name in used}
    return graph(body + UP, weights(w=FILTER, k=(12,)) | numbers, inputs=inputs, opset=18)


@pytest.mark.parametrize(
    ("body", "inputs"), [(BATCH, STATIC), (PARTS, STATIC), (PARTS, MOVING)], ids=["batch", "products", "all unknown"]
)
def test_sizes_from_parts_of_a_shape_are_followed(body: str, inputs: dict[str, str], tmp_path: Path) -> None:
    shapes = {"a": (2, 8, 4, 3), "b": (2, 16, 8, 6)}
    result, patched = run_patch(enlarging(body, inputs), tmp_path, shapes=shapes)
    assert fused_types(patched) == ["CuteViewConcatConv2Relu"] and result.report["verify"]["passed"]
    assert [n.op_type for n in patched.graph.node] == ["CuteViewConcatConv2Relu"]


OTHER_SIZES = {
    "columns before rows": (PARTS.replace("(h, v)", "(v, h)"), MOVING, (6, 8)),
    "rows of another tensor": (
        PARTS.replace("end=3>(a)", "end=3>(b)").replace("Reshape(m2", "Reshape(n2"), MOVING, (8, 6)),
    "channels in the place of the batch": (
        PARTS.replace("p = Shape<start=-4, end=-2>(a)", "p1 = Shape<start=1, end=2>(a) p = Concat<axis=0>(p1, p1)"),
        MOVING, (8, 6)),
    "a reshaped matrix": (
        "p = Shape<end=2>(a) s = Shape<start=2>(a) r = Reshape(s, j) v = Reshape(r, i) h = Mul(f, v) "
        "q = Concat<axis=0>(p, h) ", MOVING, (8, 6)),
    "sizes that do not divide": (BATCH, {"a": "n,8,5,4", "b": "n,16,8,6"}, (8, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_other_sizes_leave_the_resize_outside(name: str, tmp_path: Path) -> None:
    body, inputs, (rows, columns) = OTHER_SIZES[name]
    batch = 8 if "channels" in name else 2
    small = (5, 4) if "divide" in name else (4, 3)
    shapes = {"a": (batch, 8, *small), "b": (batch, 16, rows, columns)}
    result, patched = run_patch(enlarging(body, inputs), tmp_path, shapes=shapes)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
    (note,) = result.report["sites"][0]["notes"]
    assert "its factors are not known to be one whole number" in note


def test_sizes_stay_known_behind_a_part_of_a_shape(tmp_path: Path) -> None:
    """The names of axes pass a Resize, so that the sum behind it is a residual."""
    body = (
        'p = Shape<start=0, end=2>(a) q = Concat<axis=0>(p, e) u = Resize<mode="linear">(a, , , q) '
        "x = Conv(b, z) y = Add(x, u)"
    )
    values = weights(z=(8, 16, 1, 1)) | {"e": NUMBERS["e"]}
    result, patched = run_patch(graph(body, values, inputs=STATIC, opset=18), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv1Add"] and result.report["verify"]["passed"]


# ------------------------------------------------------------------------------------- constants in a tensor's type
BIAS = "s = Shape<start=0, end=1>(w) o = Expand(tenth, s) l = CastLike(o, b) "  # a convolution without a bias
FIRST = BIAS.replace("Expand(tenth, s) l = CastLike(o, b)", "CastLike(tenth, b) l = Expand(o, s)")
NORMAL = "r = Shape<start=0, end=1>(w) z = RandomNormal<shape=[12]>() l = CastLike(z, b) "


def biased(body: str, dtype: str) -> onnx.ModelProto:
    values = weights(dtype=dtype, w=(12, 16, 3, 3)) | ({"tenth": np.float32(0.1)} if "tenth" in body else {})
    return graph(body + " x = Conv(b, w, l) y = Relu(x)", values, dtype=dtype, inputs={"b": "n,16,9,7"}, opset=20)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("body", [BIAS, FIRST], ids=["last", "first"])
def test_a_constant_in_the_type_of_a_tensor_is_a_constant(body: str, dtype: str, tmp_path: Path) -> None:
    result, patched = run_patch(biased(body, dtype), tmp_path)
    assert [n.op_type for n in patched.graph.node] == ["CuteConcatConv1Relu"] and result.report["verify"]["passed"]
    stored = {t.name: t for t in patched.graph.initializer}
    bias = numpy_helper.to_array(stored[patched.graph.node[0].input[2]])
    assert np.array_equal(bias, np.full(12, np.float32(0.1)).astype(dtype).astype(np.float32))


COMPUTED = {
    "a random number": NORMAL,
    "a number of the input": "i = Constant<value_ints=[0,2,3]>() q = ReduceMean(b, i) s = Constant<value_ints=[12]>() "
    "o = Squeeze(q) m = ReduceMean<keepdims=0>(o) e = Expand(m, s) l = CastLike(e, w)",
    "a cast that is the input's": "e = Constant<value_ints=[12]>() m = ReduceMean<keepdims=0>(b) "
    "o = CastLike(m, w) l = Expand(o, e)",
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_depends_on_data_is_none_in_any_type(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(biased(COMPUTED[name], "float32"), tmp_path, verify=False)
    (site,) = result.report["sites"]
    assert patched is None and site["reason"] == "the bias 'l' is computed at run time; only constants can be packed"
