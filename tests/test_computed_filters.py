"""Filters that a graph computes from constants: standardised or normalised weights, as PyTorch's exporter writes them.

They are evaluated when the filter is packed. A site whose filter depends on a run is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from float64 import widened
from graphs import graph, run_patch, weights
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

K, C = 128, 64  # more values than are folded before sites are sought
CONV = "y_ = Conv<pads=[1,1,1,1]>(a, w, bias) y = Relu(y_)"
# BatchNormalization over one "image" whose channels are the filters: their mean becomes 0, their variance 1 / gain^2.
STANDARDISED = (
    "r = Reshape(v, rows) m = ReduceMean<axes=[2],keepdims=1>(r) d = Sub(r, m) q = Mul(d, d) "
    "var_ = ReduceMean<axes=[0,2],keepdims=0>(q) mean_ = ReduceMean<axes=[0,2],keepdims=0>(r) "
    "n, running_mean, running_var = BatchNormalization<training_mode=1>(r, gain, zeros, mean_, var_) "
    "w = Reshape(n, whole)"
)
COMPUTED = {  # name -> nodes from the stored v to the filter w
    "standardised by batch norm": STANDARDISED,
    "standardised by hand": (
        "m = ReduceMean<axes=[1,2,3],keepdims=1>(v) d = Sub(v, m) p = Pow(d, two) s = ReduceMean<axes=[1,2,3],"
        "keepdims=1>(p) e = Add(s, small) t = Sqrt(e) w = Div(d, t)"
    ),
    "normalised by length": "l = ReduceL2<axes=[1,2,3],keepdims=1>(v) u = Div(v, l) w = Mul(u, two)",
    "normalised by a sum of squares": (
        "p = Pow(v, two) s = ReduceSum<keepdims=1>(p, axes) t = Sqrt(s) w = Div(v, t)"
    ),
}  # fmt: skip
REFUSED = {
    "a scale that callers give": (STANDARDISED, {"gain": f"{K}"}),
    "a random filter": ("u = RandomNormalLike(v) w = Mul(u, two)", {}),
    "another function": ("w = Relu(v)", {}),
    "lengths of the input": ("l = ReduceL2<axes=[0,1,2,3],keepdims=1>(a) w = Mul(v, l)", {}),
}


def model(body: str, inputs: dict[str, str] | None = None, dtype: str = "float32") -> onnx.ModelProto:
    given = {"a": f"2,{C},9,7"} | (inputs or {})
    kind = np.dtype(dtype)
    stored = weights(dtype=dtype, v=(K, C, 3, 3), bias=(K,))
    more = {"gain": np.linspace(0.5, 2, K), "zeros": np.zeros(K), "two": np.array(2.0), "small": np.array(1e-3)}
    stored |= {name: value.astype(kind) for name, value in more.items() if name not in given}
    ints = {"rows": [1, K, -1], "whole": [K, C, 3, 3], "axes": [1, 2, 3]}
    stored |= {name: np.array(value, dtype=np.int64) for name, value in ints.items()}
    return graph(f"{body} {CONV}", stored, inputs=given, dtype=dtype)


def filter_of(plain: onnx.ModelProto) -> np.ndarray:
    """w in float64."""
    wide = widened(plain, TensorProto.DOUBLE)
    wide.graph.output.append(helper.make_tensor_value_info("w", TensorProto.DOUBLE, [K, C, 3, 3]))
    (value,) = ReferenceEvaluator(wide).run(["w"], {"a": np.zeros((2, C, 9, 7))})
    return np.asarray(value)


@pytest.mark.parametrize("dtype, error", [("float32", 1e-5), ("float16", 4e-3)])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_filter_computed_from_constants_is_packed(name: str, dtype: str, error: float, tmp_path: Path) -> None:
    plain = model(COMPUTED[name], dtype=dtype)
    result, patched = run_patch(plain, tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    (node,) = patched.graph.node
    packed = next(numpy_helper.to_array(t) for t in patched.graph.initializer if t.name == node.input[1])
    got = packed.reshape(K, 9, C).transpose(0, 2, 1).reshape(K, C, 3, 3).astype(np.float64)  # one block of channels
    expected = filter_of(plain)
    assert np.abs(got - expected).max() <= error * np.abs(expected).max()


@pytest.mark.parametrize("name", REFUSED)
def test_a_filter_that_is_no_constant_is_refused(name: str, tmp_path: Path) -> None:
    body, inputs = REFUSED[name]
    result, patched = run_patch(model(body, inputs), tmp_path)
    (site,) = result.report["sites"]
    assert patched is None
    words = "made of constants by" if name == "another function" else "computed at run time"
    assert "the filter 'w'" in site["reason"] and words in site["reason"]


def test_a_later_result_of_a_batch_norm_makes_no_filter(tmp_path: Path) -> None:
    body = STANDARDISED.replace("w = Reshape(n, whole)", "x = ReduceSum(running_var) w = Mul(v, x)")
    result, patched = run_patch(model(body), tmp_path)
    assert patched is None and "made of constants by Mul" in result.report["sites"][0]["reason"]
