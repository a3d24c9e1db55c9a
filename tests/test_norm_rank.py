"""Norms over the last axis of tensors of unknown rank, as decoders of text recognisers export them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch

from cutefuse.graph.read import Graph
from cutefuse.graph.shapes import inferred
from cutefuse.match.norm.read import last_size
from cutefuse.match.site import filled

C = 24
# No shape inference knows how many sizes a Compress keeps, so nothing knows the rank of t.
ANY = "h = Shape(a) s = Compress<axis=0>(h, mask) t = Reshape(a, s) "
VALUES = {
    "mask": np.array([True, True, True]), "k": np.linspace(-1, 1, C, dtype=np.float32), "two": np.float32(2),
    "one": np.ones(1, np.float32), "eps": np.float32(1e-5), "g": np.linspace(0.5, 1.5, C, dtype=np.float32),
    "b": np.linspace(-1, 1, C, dtype=np.float32), "W": np.full((C, C), 0.1, np.float32),
    "wide": np.ones((1, C), np.float32),
}  # fmt: skip
BIAS, PLAIN = "x = Add(t, k) ", "x = Relu(t) "
LAYER = ("u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) p = Pow(d, two) m = ReduceMean<axes=[-1]>(p) e = Add(m, eps) "
         "r = Sqrt(e) n = Div(d, r) w = Mul(n, g) z = Add(w, b) y = Relu(z)")  # fmt: skip
SINGLE = "z = LayerNormalization(x, g, b) y = Relu(z)"


def make(body: str) -> onnx.ModelProto:
    words = {w.strip("(),=") for w in body.replace("(", " ( ").split()}
    return graph(body, {k: v for k, v in VALUES.items() if k in words}, inputs={"a": f"n,5,{C}"}, rank=3)


@pytest.mark.parametrize(
    "body",
    [BIAS + LAYER, "q = MatMul(t, W) x = Gelu(q) ".replace("Gelu", "Tanh") + LAYER, BIAS + SINGLE, PLAIN + SINGLE],
    ids=["add of a vector", "product with a matrix", "single node", "by its scale alone"],
)
def test_the_last_axis_of_an_unknown_rank_is_taken(body: str, tmp_path: Path) -> None:
    result, patched = run_patch(make(ANY + body), tmp_path, shapes={"a": (2, 5, C)})
    assert fused_types(patched) == ["CuteLayerNorm"], [s.reason for s in result.sites]
    assert result.report["verify"]["passed"]
    (site,) = result.sites
    assert site.match is not None and site.match.call.inputs[0].dims == (-1, C)
    assert "ReduceMean" not in {n.op_type for n in patched.graph.node if not n.domain}
    assert all(v.name != "z" for v in patched.graph.value_info)  # no rank is claimed that is not known


@pytest.mark.parametrize(
    "body, words",
    [
        (PLAIN + LAYER, "the size of the last axis is unknown"),
        (BIAS + LAYER.replace("axes=[-1]", "axes=[2]"), "axes [2] of a tensor of unknown rank"),
        (BIAS + LAYER.replace("axes=[-1]", "axes=[-2]"), "axes [-2] of a tensor of unknown rank"),
        (BIAS + LAYER.replace("axes=[-1]", "axes=[-2,-1]"), "axes [-2, -1] of"),
        ("x = Add(t, one) " + LAYER, "the size of the last axis is unknown"),  # one column may become any number
        (BIAS + SINGLE.replace("Normalization(", "Normalization<axis=2>("), "axis 2 of a tensor of unknown rank"),
        (PLAIN + "z = LayerNormalization(x, one) y = Relu(z)", "the size of the last axis is unknown"),
    ],
    ids=["unknown size", "axis 2", "last but one", "two axes", "scalar", "single node, axis 2", "scale of one number"],
)
def test_what_may_be_another_axis_stays(body: str, words: str, tmp_path: Path) -> None:
    result, patched = run_patch(make(ANY + body), tmp_path)
    assert patched is None
    assert [words in s.reason for s in result.sites] == [True], [s.reason for s in result.sites]


def test_a_scale_with_more_axes_stays_behind_a_norm_of_unknown_rank(tmp_path: Path) -> None:
    body = BIAS + LAYER.replace("Mul(n, g)", "Mul(n, wide)")
    result, patched = run_patch(make(ANY + body), tmp_path, shapes={"a": (2, 5, C)})
    assert fused_types(patched) == ["CuteLayerNorm"] and result.report["verify"]["passed"]
    assert "Mul" in {n.op_type for n in patched.graph.node if not n.domain}


@pytest.mark.parametrize(
    "body, size",
    [
        ("y = Add(t, k)", C), ("y = Add(t, one)", -1), ("y = Relu(t)", -1), ("y = MatMul(t, W)", C),
        ("q = Add(t, k) y = Softmax(q)", C), ("q = Add(t, k) y = Transpose(q)", -1), ("y = Mul(t, wide)", C),
        ("q = Add(t, k) y = Concat<axis=0>(q, q)", -1), ("q = Add(t, k) y = Div(one, q)", C),
    ],
)  # fmt: skip
def test_the_last_size_is_known_only_where_it_must_be(body: str, size: int) -> None:
    model = make(ANY + body)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    view = Graph(model, Path())
    assert last_size(Graph(model, Path(), inferred(model, view.initializers, {})), "y") == size


@pytest.mark.parametrize(
    "dims, sizes, expected",
    [
        ((-1, C), (2, 5, C), (2, 5, C)), ((-1, C), (C,), (C,)), ((-1, C), (2, 5, 7), (-1, C)), ((-1,), (), ()),
        ((2, C), (2, 5, C), (2, C)), ((-1, C), None, (-1, C)), ((-1, C), (4, C), (4, C)),
    ],
)  # fmt: skip
def test_sizes_fill_an_unknown_rank_where_they_agree(
    dims: tuple[int, ...], sizes: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    assert filled(dims, sizes) == expected
