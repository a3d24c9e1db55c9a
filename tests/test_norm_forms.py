"""Norms that are scaled before they are divided, and those with PyTorch's `var`: which are fused and proven equal, and
which are almost one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch

C = 24
VALUES = {
    "g": np.linspace(0.5, 2, C, dtype=np.float32), "b": np.linspace(-1, 1, C, dtype=np.float32),
    "wide": np.linspace(0.5, 2, C, dtype=np.float32).reshape(1, 1, C), "rows": np.ones((5, 1), np.float32),
    "one": np.float32(1), "two": np.float32(2), "eps": np.float32(1e-5), "inverse": np.float32(-0.5),
    "last": np.int64([2]), "middle": np.int64([1]), "sizes": np.int64([2, 5, 1]), "turned": np.int64([5, 1, 1]),
    "end": np.int64([-1]), "five": np.int64([5]), "i1": np.int64([1]), "alone": np.int64([1, 1, 1]),
}  # fmt: skip
SQUARES = "p = Pow(x, two) m = ReduceMean(p, last) e = Add(m, eps) r = Sqrt(e) "
CENTRED = "u = ReduceMean(x, last) d = Sub(x, u) " + SQUARES.replace("Pow(x", "Pow(d")
SUM = "x = Add(a, c) "
VAR = (
    "u = ReduceMean(x, last) u2 = ReduceMean(x, last) d2 = Sub(x, u2) p = Mul(d2, d2) {} "
    "d = Sub(x, u) e = Add(v, eps) r = Sqrt(e) n = Div(d, r) s = Mul(n, g) y = Add(s, b)"
)
KEPT = "v = ReduceMean(p, last)"
RESHAPED = "m = ReduceMean<keepdims=0>(p, last) v = Reshape(m, {})"
MOVING = (  # as the dynamo exporter writes it for a dynamic batch: the sizes of the reshaped tensor are not inferred
    "m = ReduceMean<keepdims=0>(p, last) n0 = Shape<end=1>(m) n1 = Reshape(n0, end) q = Concat<axis=0>(n1, five, i1) "
    "t = Reshape(m, q) n2 = Shape<end=1>(x) q2 = Concat<axis=0>(n2, five, i1) v = Expand(t, q2)"
)


def make(body: str, inputs: str = f"n,5,{C}") -> onnx.ModelProto:
    used = set(re.findall(r"\w+", body))
    names = "ac" if body.startswith(SUM) else "x"
    stored = {k: v for k, v in VALUES.items() if k in used}
    return graph(body, stored, opset=18, inputs=dict.fromkeys(names, inputs), rank=3)


POSITIVE = {
    "rms, scaled before": (SQUARES + "h = Mul(g, x) y = Div(h, r)", "CuteRMSNorm"),
    "rms, scaled before the reciprocal": (SQUARES + "h = Mul(x, g) i = Reciprocal(r) y = Mul(i, h)", "CuteRMSNorm"),
    "rms, scaled before a power": (
        SQUARES.replace("Sqrt(e)", "Pow(e, inverse)") + "h = Mul(x, wide) y = Mul(h, r)", "CuteRMSNorm"),
    "rms, the reciprocal scaled": (SQUARES + "i = Reciprocal(r) h = Mul(i, g) y = Mul(x, h)", "CuteRMSNorm"),
    "rms, scale by root": (SQUARES + "h = Div(g, r) y = Mul(h, x)", "CuteRMSNorm"),
    "rms, a power scaled": (
        SQUARES.replace("Sqrt(e)", "Pow(e, inverse)") + "h = Mul(g, r) y = Mul(x, h)", "CuteRMSNorm"),
    "add and rms": (SUM + SQUARES + "h = Mul(g, x) z = Div(h, r) y = Mul(z, x)", "CuteAddRMSNorm"),
    "layer, scaled before": (CENTRED + "h = Mul(g, d) s = Div(h, r) y = Add(s, b)", "CuteLayerNorm"),
    "layer, scaled before, no bias": (CENTRED + "h = Mul(d, g) s = Div(h, r) y = Relu(s)", "CuteLayerNorm"),
    "layer, scale by root": (CENTRED + "h = Div(g, r) s = Mul(d, h) y = Add(b, s)", "CuteLayerNorm"),
    "rms, scaled twice": (SQUARES + "h = Mul(g, x) z = Div(h, r) y = Mul(z, b)", "CuteRMSNorm"),
    "var": (VAR.format(KEPT), "CuteLayerNorm"),
    "var, the axis put back": (VAR.format(RESHAPED.format("sizes")), "CuteLayerNorm"),
    "var, by Unsqueeze": (VAR.format(RESHAPED.replace("Reshape", "Unsqueeze").format("end")), "CuteLayerNorm"),
    "var of a dynamic batch": (VAR.format(MOVING), "CuteLayerNorm"),
    "add and var": (SUM + VAR.format(KEPT), "CuteAddLayerNorm"),
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIVE)
def test_a_norm_in_another_order_is_one_node_and_computes_the_same(name: str, tmp_path: Path) -> None:
    body, op_type = POSITIVE[name]
    model = make(body, f"2,5,{C}" if "put back" in name else f"n,5,{C}")
    if name == "var of a dynamic batch":
        model.graph.value_info.append(onnx.helper.make_tensor_value_info("v", 1, ["n", 5, 1]))
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == [op_type], [s.reason for s in result.sites]
    assert result.report["verify"]["passed"]
    after = {"add and rms": ["Mul"], "rms, scaled twice": ["Mul"], "layer, scaled before, no bias": ["Relu"]}
    assert [n.op_type for n in patched.graph.node if not n.domain] == after.get(name, [])


NEGATIVE = {
    "another tensor is scaled": SQUARES + "q = Relu(x) h = Mul(g, q) y = Div(h, r)",
    "a scale for each row": SQUARES + "h = Mul(rows, x) y = Div(h, r)",
    "scaled by one number": SQUARES + "h = Mul(two, x) y = Div(h, r)",
    "shifted before": SQUARES + "h = Add(g, x) y = Div(h, r)",
    "scaled before and by the reciprocal": SQUARES + "h = Mul(g, x) i = Div(b, r) y = Mul(h, i)",
    "the reciprocal scaled twice": SQUARES + "i = Reciprocal(r) h = Mul(i, g) k = Mul(h, b) y = Mul(x, k)",
    "the reciprocal of twice the root": SQUARES + "h = Div(two, r) y = Mul(x, h)",
    "the scaled reciprocal is used elsewhere": SQUARES + "h = Div(g, r) z = Mul(x, h) y = Add(z, h)",
    "divided by a power of -0.5": SQUARES.replace("Sqrt(e)", "Pow(e, inverse)") + "h = Mul(g, x) y = Div(h, r)",
    "x is scaled by x": SQUARES + "h = Mul(x, x) y = Div(h, r)",
    "scaled before is not centred": CENTRED + "h = Mul(g, x) y = Div(h, r)",
    "the root of the other quotient": SQUARES + "h = Mul(g, x) y = Div(r, h)",
    "another mean is subtracted": VAR.format(KEPT).replace("u = ReduceMean(x", "u = ReduceMax(x"),
    "the mean of another tensor": "z = Exp(x) " + VAR.format(KEPT).replace("u = ReduceMean(x", "u = ReduceMean(z"),
    "the variance of another tensor": "z = Exp(x) "
    + VAR.format(KEPT).replace("u2 = ReduceMean(x", "u2 = ReduceMean(z").replace("Sub(x, u2)", "Sub(z, u2)"),
    "var by n - 1": VAR.format(KEPT.replace("v =", "w =") + " v = Mul(w, two)"),
    "the axis put elsewhere": VAR.format(RESHAPED.format("turned")),
    "var of one value": VAR.format("m = ReduceMean<keepdims=0>(p, last) m2 = ReduceMean<keepdims=0>(m) "
                                   "v = Reshape(m2, alone)"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEGATIVE)
def test_what_is_almost_such_a_norm_stays(name: str, tmp_path: Path) -> None:
    size = f"1,5,{C}" if "put elsewhere" in name else f"2,5,{C}"
    result, patched = run_patch(make(NEGATIVE[name], size), tmp_path)
    assert patched is None and result.sites == []


def test_var_over_another_axis_is_refused_in_words(tmp_path: Path) -> None:
    body = VAR.format(KEPT).replace("u = ReduceMean(x, last)", "u = ReduceMean(x, middle)")
    result, patched = run_patch(make(body), tmp_path)
    (site,) = result.sites
    assert patched is None and "goes over axes [1]" in site.reason
