"""Scalar steps behind a cut (ReLU, Clip, HardSigmoid) go into the filter and the bounds; steps that the filter's type
cannot hold stay behind the site. Every positive graph is proven equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import bn_weights, fused_types, graph, run_patch, weights

CONV = "x = Conv<pads=[1,1,1,1]>(b, w, k) "
JOINED = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, v, k) "
NORM = "n = BatchNormalization(x, gamma, beta, mean, var) "
NUMBERS = {
    "half": [0.5], "minus": -1.5, "shift": 0.3, "three": [[[[3]]]], "six": 6, "one": 1, "zero": 0, "tiny": 1e-7,
    "inf": np.inf, "nan": np.nan, "huge": 1e38, "vec": np.full((12, 1, 1), 0.5), "r5": np.full((1,) * 5, 0.5),
    "lo": -0.25, "hi": 0.5,
}  # fmt: skip
VALUES = weights(w=(12, 16, 3, 3), v=(12, 24, 3, 3), k=(12,)) | bn_weights()

# What follows a convolution of random values -> the bounds of the one node that it becomes.
SCALED = {
    "a learnable affine block": ("r = Relu(x) s = Mul(half, r) y = Add(s, shift)", 0.3, np.inf),
    "behind a norm": (NORM + "r = Relu(n) s = Mul(r, half) y = Add(s, shift)", 0.3, np.inf),
    "a negative factor": ("r = Relu(x) s = Mul(r, minus) y = Add(s, shift)", -np.inf, 0.3),
    "subtracted from a number": ("r = Relu(x) y = Sub(one, r)", -np.inf, 1),
    "a shift alone": ("r = Relu(x) y = Sub(r, shift)", -0.3, np.inf),
    "both bounds": ("q = Clip(x, lo, hi) y = Mul(q, minus)", -0.75, 0.375),
    "HardSigmoid": ("y = HardSigmoid(x)", 0, 1),
    "HardSigmoid of a slope": ("h = HardSigmoid<alpha=-0.5, beta=0.25>(x) y = Mul(h, three)", 0, 3),
    "HardSigmoid in steps": ("p = Add(x, three) q = Clip(p, zero, six) y = Div(q, six)", 0, 1),
    "Max, then steps": ("m = Max(shift, x) s = Div(m, half) y = Add(s, one)", 1.6, np.inf),
}


def model_of(body: str, dtype: str = "float32", **options: object) -> onnx.ModelProto:
    values = VALUES | {name: np.asarray(v, np.float32) for name, v in NUMBERS.items()}
    words = set(body.replace("(", " ").replace(")", " ").replace(",", " ").split())
    with np.errstate(over="ignore"):
        stored = {n: v.astype(dtype) for n, v in values.items() if n in words}
    return graph(body, stored, dtype=dtype, **options)  # type: ignore[arg-type]


def types_of(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("front", [CONV, JOINED], ids=["alone", "joined"])
@pytest.mark.parametrize("name", SCALED)
def test_steps_behind_a_cut_are_part_of_it(name: str, front: str, dtype: str, tmp_path: Path) -> None:
    body, lo, hi = SCALED[name]
    result, patched = run_patch(model_of(front + body, dtype), tmp_path)
    assert types_of(patched) == [f"CuteConcatConv{1 + (front == JOINED)}Clip"] and result.report["verify"]["passed"]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in patched.graph.node[0].attribute}
    assert (attrs["lo"], attrs["hi"]) == pytest.approx((lo, hi), rel=2e-3)


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
def test_steps_behind_the_cut_of_a_depthwise_convolution(layout: str, tmp_path: Path) -> None:
    body = "x = Conv<group=24, pads=[1,1,1,1]>(a, d, e) r = Relu(x) s = Mul(r, half) y = Add(s, shift)"
    values = weights(dtype="float16", d=(24, 1, 3, 3), e=(24,))
    values |= {"half": np.float16(0.5), "shift": np.float16(0.3)}
    model = graph(body, values, dtype="float16", inputs={"a": "n,24,9,7"})
    result, patched = run_patch(model, tmp_path, layout=layout)
    assert fused_types(patched) == ["CuteDepthwiseConcatConv1Clip"] and result.report["verify"]["passed"]
    assert not {"Relu", "Mul", "Add"} & set(types_of(patched))


@pytest.mark.parametrize("name", SCALED)
def test_infinite_sums_are_cut_and_scaled_alike(name: str, tmp_path: Path) -> None:
    """Filters of ones and twos: sums of infinite pixels are infinite, as long as no two have opposite signs."""
    body = SCALED[name][0]
    model = model_of("x = Conv(b, w, k) " + body)
    for tensor in model.graph.initializer:
        if tensor.name in ("w", "gamma"):
            shape = (12, 16, 1, 1) if tensor.name == "w" else (12,)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(shape, 2, np.float32), tensor.name))
    _, patched = run_patch(model, tmp_path, verify=False)
    x = np.random.default_rng(3).standard_normal((1, 16, 9, 7)).astype(np.float32)
    x[0, 2, 1, 1:4], x[0, 5, 4] = np.inf, -np.inf
    given = {"a": np.zeros((1, 8, 9, 7), np.float32), "b": x}
    plain, fused = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, given)[0]
        for m in (model, patched)
    )
    assert np.isinf(plain).any() or "Clip" in body or "HardSigmoid" in body
    np.testing.assert_allclose(fused, plain, rtol=1e-5, atol=1e-5)


# What follows a convolution -> the nodes of the patched graph: the steps stay.
OUTSIDE = {
    "0 times infinity is NaN": ("r = Relu(x) y = Mul(r, zero)", ["CuteConcatConv1Relu", "Mul"]),
    "an infinite factor": ("r = Relu(x) y = Mul(r, inf)", ["CuteConcatConv1Relu", "Mul"]),
    "a shift that is no number": ("r = Relu(x) y = Add(r, nan)", ["CuteConcatConv1Relu", "Add"]),
    "a factor that a second one makes infinite": (
        "r = Relu(x) s = Mul(r, huge) y = Mul(s, huge)", ["CuteConcatConv1Relu", "Mul", "Mul"]),
    "a factor for each channel": ("r = Relu(x) y = Mul(r, vec)", ["CuteConcatConv1Relu", "Mul"]),
    "a number of rank 5": ("r = Relu(x) y = Mul(r, r5)", ["CuteConcatConv1Relu", "Mul"]),
    "divided by the cut": ("r = Relu(x) y = Div(half, r)", ["CuteConcatConv1Relu", "Div"]),
    "itself": ("r = Relu(x) y = Add(r, r)", ["CuteConcatConv1Relu", "Add"]),
    "no cut, sigmoid": ("r = Sigmoid(x) y = Mul(r, half)", ["CuteConcatConv1Sigmoid", "Mul"]),
    "no cut, a slope": ("r = LeakyRelu(x) y = Mul(r, half)", ["CuteConcatConv1LeakyRelu", "Mul"]),
    "the sum with a residual is cut": (
        "z = Tanh(x0) t = Add(x, z) r = Relu(t) y = Mul(r, half)", ["Tanh", "CuteConcatConv1AddRelu", "Mul"]),
    "HardSigmoid of the sum with a residual": (
        "z = Tanh(x0) t = Add(x, z) y = HardSigmoid(t)", ["Tanh", "CuteConcatConv1Add", "HardSigmoid"]),
}  # fmt: skip

UNPROVEN = ("an infinite factor", "a shift that is no number", "divided by the cut")  # no output is finite everywhere


@pytest.mark.parametrize("name", OUTSIDE)
def test_other_steps_stay_behind_the_site(name: str, tmp_path: Path) -> None:
    body, types = OUTSIDE[name]
    residual = {"x0": "n,12,9,7"} if "x0" in body else {"a": "n,8,9,7"}
    model = model_of(CONV + body, inputs={"b": "n,16,9,7", **residual}, rank=5 if "rank 5" in name else 4)
    result, patched = run_patch(model, tmp_path, verify=name not in UNPROVEN)
    assert sorted(types_of(patched)) == sorted(types)


def test_a_step_whose_input_something_else_reads_stays(tmp_path: Path) -> None:
    model = model_of(CONV + "r = Relu(x) y = Mul(r, half) z = Neg(r)", outputs=("y", "z"))
    result, patched = run_patch(model, tmp_path)
    assert types_of(patched) == ["CuteConcatConv1Relu", "Mul", "Neg"] and result.report["verify"]["passed"]


def test_a_hard_sigmoid_of_slope_0_is_a_constant_that_stays(tmp_path: Path) -> None:
    result, patched = run_patch(model_of(JOINED + "y = HardSigmoid<alpha=0.0>(x)"), tmp_path, verify=False)
    assert types_of(patched) == ["CuteConcatConv2", "HardSigmoid"]
    assert "HardSigmoid 'HardSigmoid_2' stays" in result.report["sites"][0]["notes"][0]


LOST = {  # in float16: what follows -> the nodes that are left
    "of a cut": ("r = Relu(x) y = Mul(r, tiny)", ["CuteConcatConv1Relu", "Mul"]),
    "of a cut behind a norm": (NORM + "r = Relu(n) y = Mul(r, tiny)", ["CuteConcatConv1Relu", "Mul"]),
    "a scale of a layer before a residual": (
        "t = Mul(x, tiny) z = Tanh(x0) y = Add(t, z)", ["Conv", "Mul", "Tanh", "Add"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_what_the_type_of_the_filter_cannot_hold_stays_behind_the_site(name: str, tmp_path: Path) -> None:
    body, types = LOST[name]
    model = model_of(CONV + body, "float16", inputs={"b": "n,16,9,7", "x0": "n,12,9,7"})
    result, patched = run_patch(model, tmp_path)
    (site,) = result.report["sites"]
    assert "loses precision" in (site["reason"] or site["notes"][0])
    assert types_of(patched) == types if patched else types[0] == "Conv"


def test_a_scale_that_is_lost_leaves_the_convolution_to_an_engine_that_takes_any(tmp_path: Path) -> None:
    model = model_of(CONV + LOST["a scale of a layer before a residual"][0], "float16",
                     inputs={"b": "n,16,9,7", "x0": "n,12,9,7"})  # fmt: skip
    result, patched = run_patch(model, tmp_path, engine="torch")
    assert sorted(types_of(patched)) == ["Add", "CuteConcatConv1", "Mul", "Tanh"]
    assert result.report["verify"]["passed"] and "loses precision" in result.report["sites"][0]["notes"][0]
