"""Convolutions that read one tensor: which neighbours make them a site, in every form that exporters write, which do
not, and what is said of those that are almost one. Every positive graph is proven equal."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from float64 import widened
from graphs import bn_weights, fused_types, graph, run_patch, weights
from onnx.reference import ReferenceEvaluator

from cutefuse import kernels
from cutefuse.match.answer import Constant
from cutefuse.match.find import find_sites
from cutefuse.operators.concat_conv import OPERATOR

NEWEST = onnx.defs.onnx_opset_version()
ALONE = "x = Conv<pads=[1,1,1,1]>(b, w, k) "
JOINED = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, v, k) "
FILTERS = weights(w=(12, 16, 3, 3), v=(12, 24, 3, 3), k=(12,))
NUMBERS = {
    "half": np.float32(0.5), "two": np.float32([2]), "one": np.float32(1), "three": np.float32([[[[3]]]]),
    "six": np.float32(6), "sixth": np.float32(1 / 6), "zero": np.float32(0), "ln": np.float32(0.4),
    "off": np.float32(0.1667), "root": np.float32(2**0.5), "unroot": np.float32(0.5**0.5),
    "vec": np.full((12, 1, 1), 0.5, np.float32), "r5": np.full((1,) * 5, 0.5, np.float32),
    "lo": np.float32(-0.25), "hi": np.float32(0.5), "minus": np.float32(-1),
    "nan": np.float32(np.nan), "inf": np.float32(np.inf),
}  # fmt: skip
BN = bn_weights()


def small(body: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values that a body reads."""
    return {name: value for name, value in values.items() if re.search(rf"\b{name}\b", body.split("=", 1)[1])}


def model_of(body: str, *, dtype: str = "float32", **options: object) -> onnx.ModelProto:
    values = small(body, FILTERS | NUMBERS | BN)
    return graph(body, {n: v.astype(dtype) for n, v in values.items()}, dtype=dtype, **options)  # type: ignore[arg-type]


ACTIVATIONS = {
    "Relu": ("y = Relu(x)", "Relu"),
    "LeakyRelu": ("y = LeakyRelu<alpha=0.125>(x)", "LeakyRelu"),
    "Clip": ("y = Clip(x, lo, hi)", "Clip"),
    "ReLU6": ("y = Clip(x, zero, six)", "Clip"),
    "ReLU6 by Max and Min": ("m = Max(x, zero) y = Min(m, six)", "Clip"),
    "ReLU6 by Min and Max, constants first": ("m = Min(six, x) y = Max(zero, m)", "Clip"),
    "ReLU6 by Relu and Min": ("m = Relu(x) y = Min(m, six)", "Clip"),
    "ReLU6 by Relu and Clip": ("m = Relu(x) y = Clip(m, , six)", "Clip"),
    "cut off above": ("y = Min(x, hi)", "Clip"),
    "cut off below": ("y = Max(lo, x)", "Clip"),
    "Max above Min": ("m = Min(x, lo) y = Max(m, hi)", "Clip"),  # 0.5 everywhere
    "LeakyRelu by Max": ("m = Mul(x, half) y = Max(m, x)", "LeakyRelu"),
    "Relu twice": ("m = Relu(x) y = Relu(m)", "Relu"),
    "Sigmoid": ("y = Sigmoid(x)", "Sigmoid"),
    "Tanh": ("y = Tanh(x)", "Tanh"),
    "HardSwish": ("y = HardSwish(x)", "HardSwish"),
    "SiLU": ("g = Sigmoid(x) y = Mul(x, g)", "Silu"),
    "SiLU, gate first": ("g = Sigmoid(x) y = Mul(g, x)", "Silu"),
    "SiLU as a quotient": ("n = Neg(x) e = Exp(n) d = Add(e, one) y = Div(x, d)", "Silu"),
    "SiLU as a quotient, one first": ("n = Mul(minus, x) e = Exp(n) d = Add(one, e) y = Div(x, d)", "Silu"),
    "HardSwish by two clamps": (
        "p = Add(x, three) q = Clip(p, zero) r = Clip(q, , six) g = Div(r, six) y = Mul(x, g)", "HardSwish"),
    "SiLU by tanh": ("m = Mul(x, half) t = Tanh(m) h = Mul(t, half) g = Add(h, half) y = Mul(x, g)", "Silu"),
    "SiLU by tanh, constants first": (
        "m = Mul(half, x) t = Tanh(m) h = Mul(half, t) g = Add(half, h) y = Mul(g, x)", "Silu"),
    "SiLU by tanh, halved by Div": ("m = Div(x, two) t = Tanh(m) h = Div(t, two) g = Add(h, half) y = Mul(x, g)",
                                    "Silu"),
    "SiLU by tanh, one added first": ("m = Mul(x, half) t = Tanh(m) h = Add(t, one) g = Mul(h, half) y = Mul(x, g)",
                                      "Silu"),
    "HardSwish by HardSigmoid": ("g = HardSigmoid<alpha=0.16666667, beta=0.5>(x) y = Mul(x, g)", "HardSwish"),
    "HardSwish by ReLU6, divided last": ("s = Add(x, three) e = Clip(s, zero, six) p = Mul(x, e) y = Div(p, six)",
                                         "HardSwish"),
    "HardSwish by ReLU6, divided first": ("s = Add(three, x) e = Clip(s, zero, six) g = Div(e, six) y = Mul(g, x)",
                                          "HardSwish"),
    "HardSwish by ReLU6, times a sixth": ("s = Add(x, three) e = Clip(s, zero, six) g = Mul(sixth, e) y = Mul(x, g)",
                                          "HardSwish"),
    "HardSwish by ReLU6, times a sixth last": (
        "s = Add(x, three) e = Clip(s, zero, six) p = Mul(e, x) y = Mul(p, sixth)", "HardSwish"),
    "HardSwish by Max and Min": (
        "s = Add(x, three) m = Max(s, zero) e = Min(six, m) p = Mul(x, e) y = Div(p, six)", "HardSwish"),
    "HardSwish by Relu and Min": (
        "s = Add(x, three) m = Relu(s) e = Min(m, six) g = Div(e, six) y = Mul(x, g)", "HardSwish"),
    "GELU": ("d = Div(x, root) r = Erf(d) p = Add(r, one) h = Mul(x, p) y = Mul(h, half)", "Gelu"),
    "GELU, constants first": ("d = Mul(unroot, x) r = Erf(d) p = Add(one, r) h = Mul(p, x) y = Mul(half, h)", "Gelu"),
    "GELU, halved by Div": ("d = Div(x, root) r = Erf(d) p = Add(r, one) h = Mul(x, p) y = Div(h, two)", "Gelu"),
    "GELU, x halved": ("h = Mul(x, half) d = Mul(x, unroot) r = Erf(d) p = Add(r, one) y = Mul(h, p)", "Gelu"),
    "GELU, x halved last": ("d = Div(x, root) r = Erf(d) p = Add(r, one) h = Div(x, two) y = Mul(p, h)", "Gelu"),
    "GELU, its gate halved": ("d = Div(x, root) r = Erf(d) p = Add(r, one) g = Mul(p, half) y = Mul(x, g)", "Gelu"),
    "HardSigmoid": ("y = HardSigmoid(x)", "Clip"),
    "HardSigmoid that falls": ("y = HardSigmoid<alpha=-0.3, beta=0.4>(x)", "Clip"),
    "HardSigmoid by ReLU6": ("s = Add(x, three) e = Clip(s, zero, six) y = Div(e, six)", "Clip"),
    "HardSigmoid by ReLU6, in parts": ("s = Add(three, x) e = Min(six, s) m = Relu(e) y = Mul(sixth, m)", "Clip"),
    "Relu, doubled": ("m = Relu(x) y = Mul(two, m)", "Relu"),
    "ReLU6, shifted and halved": ("m = Clip(x, zero, six) n = Sub(m, three) y = Div(n, two)", "Clip"),
    "PRelu of one slope": ("y = PRelu(x, half)", "LeakyRelu"),
    "PRelu of a negative slope": ("y = PRelu(x, minus)", "LeakyRelu"),
    "PRelu of equal slopes": ("y = PRelu(x, vec)", "LeakyRelu"),
    "HardSwish by a unit Clip": ("m = Mul(x, sixth) s = Add(m, half) g = Clip(s, zero, one) y = Mul(x, g)",
                                 "HardSwish"),
}  # fmt: skip


def test_every_activation_of_the_library_has_a_form_here() -> None:
    assert {"", *(suffix for _, suffix in ACTIVATIONS.values())} == set(kernels.describe()["activations"])


@pytest.mark.parametrize("front", ["alone", "joined"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_form_of_an_activation_is_fused_with_and_without_a_concat(name: str, front: str, tmp_path: Path) -> None:
    body, suffix = ACTIVATIONS[name]
    says_something = name != "Max above Min"  # else nothing is proven, see test_verify_nothing.py
    model = model_of((ALONE if front == "alone" else JOINED) + body)
    result, patched = run_patch(model, tmp_path, verify=says_something)
    assert fused_types(patched) == [f"CuteConcatConv{1 if front == 'alone' else 2}{suffix}"]
    assert [n.domain for n in patched.graph.node] == ["cutefuse"]
    assert not says_something or result.report["verify"]["passed"]
    (site,) = result.report["sites"]
    assert site["takes"] == (["single"] if front == "alone" else []) and "Concat" not in "".join(site["notes"])
    onnx.checker.check_model(patched, full_check=True)


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n.startswith(("SiLU", "GELU", "HardSwish by"))])
def test_the_forms_of_gates_are_known_in_float16_too(name: str, tmp_path: Path) -> None:
    body, suffix = ACTIVATIONS[name]
    _, patched = run_patch(model_of(ALONE + body, dtype="float16"), tmp_path)
    assert fused_types(patched) == [f"CuteConcatConv1{suffix}"] and len(patched.graph.node) == 1


TANH = "m = Mul(x, {}) t = Tanh(m) h = Mul(t, {}) g = Add(h, {}) y = Mul(x, g)"
ALMOST = {
    "two clamps at other bounds": "p = Add(x, three) q = Clip(p, lo) r = Clip(q, , six) g = Div(r, six) y = Mul(x, g)",
    "a quotient the other way round": "n = Neg(x) e = Exp(n) d = Add(e, one) y = Div(d, x)",
    "a half added in a quotient": "n = Neg(x) e = Exp(n) d = Add(e, half) y = Div(x, d)",
    "tanh of 0.4 x": TANH.format("ln", "half", "half"),
    "0.4 times tanh": TANH.format("half", "ln", "half"),
    "0.4 added": TANH.format("half", "half", "ln"),
    "a factor for each channel": TANH.format("vec", "half", "half"),
    "a factor of rank 5": TANH.format("half", "half", "r5"),
    "subtracted": TANH.format("half", "half", "half").replace("Add(h, half)", "Sub(h, half)"),
    "divided by the tensor": TANH.format("half", "half", "half").replace("Mul(x, half)", "Div(half, x)"),
    "a gate of a gate": "s = Sigmoid(x) g = Sigmoid(s) y = Mul(x, g)",
    "Max with a number for each channel": "y = Max(x, vec)",
    "Max with two numbers": "y = Max(x, zero, one)",
    "Max with itself": "y = Max(x, x)",
    "Max of one": "y = Max(x)",
    "Max with a number of rank 5": "y = Max(x, r5)",
    "Max with what is no number": "y = Max(x, nan)",
    "Min with infinity": "y = Min(x, inf)",
    "Max with another tensor": "p = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(b) q = ReduceMean(p) y = Max(x, q)",
    "LeakyRelu of a slope above 1": "m = Mul(x, two) y = Max(x, m)",
    "LeakyRelu of a negative slope": "m = Mul(x, minus) y = Max(x, m)",
    "LeakyRelu of a slope of 0": "m = Mul(x, zero) y = Max(x, m)",
    "LeakyRelu with a shift": "m = Add(x, half) y = Max(x, m)",
    "LeakyRelu by Min": "m = Mul(x, half) y = Min(x, m)",
    "relu6 of x + 2 by Max and Min": "s = Add(x, two) m = Max(s, zero) e = Min(m, six) p = Mul(x, e) y = Div(p, six)",
    "Max and Min at 3": "s = Add(x, three) m = Max(s, zero) e = Min(m, three) p = Mul(x, e) y = Div(p, six)",
    "Max alone in a gate": "s = Add(x, three) m = Max(s, zero) p = Mul(x, m) y = Div(p, six)",
    "gate added": "g = Sigmoid(x) y = Add(x, g)",
    "divided by the gate": "g = Sigmoid(x) y = Div(x, g)",
    "gate of another tensor": "z = Neg(b) r = ReduceMean<axes=[1]>(z) g = Sigmoid(r) n = Neg(x) y = Mul(n, g)",
    "relu6 of x + 2": "s = Add(x, two) e = Clip(s, zero, six) p = Mul(x, e) y = Div(p, six)",
    "clipped at 3": "s = Add(x, three) e = Clip(s, zero, three) p = Mul(x, e) y = Div(p, six)",
    "divided by 3": "s = Add(x, three) e = Clip(s, zero, six) p = Mul(x, e) y = Div(p, three)",
    "times 0.1667": "s = Add(x, three) e = Clip(s, zero, six) p = Mul(x, e) y = Mul(p, off)",
    "divided by nothing": "s = Add(x, three) e = Clip(s, zero, six) p = Mul(x, e) y = Neg(p)",
    "gelu added": "d = Div(x, root) r = Erf(d) p = Add(r, one) h = Mul(x, half) y = Add(h, p)",
    "hard sigmoid of the default slope": "g = HardSigmoid(x) y = Mul(x, g)",
}  # fmt: skip


@pytest.mark.parametrize("name", ALMOST)
def test_what_is_almost_an_activation_is_none(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(model_of(ALONE + ALMOST[name], rank=5 if "rank 5" in name else 4), tmp_path)
    assert patched is None and result.report["sites"] == [] and result.exit_code == 3


ALMOST_GELU = {
    "without its half": "d = Div(x, root) r = Erf(d) p = Add(r, one) y = Mul(x, p)",
    "of another root": "d = Div(x, two) r = Erf(d) p = Add(r, one) h = Mul(x, p) y = Mul(h, half)",
    "of 0.4 more": "d = Div(x, root) r = Erf(d) p = Add(r, ln) h = Mul(x, p) y = Mul(h, half)",
    "shifted": "s = Add(x, one) d = Div(s, root) r = Erf(d) p = Add(r, one) h = Mul(x, p) y = Mul(h, half)",
    "whose half is shifted": (
        "s = Sub(x, half) d = Div(x, root) r = Erf(d) p = Add(r, one) h = Mul(s, p) y = Mul(h, half)"
    ),
    "of each channel": "d = Div(x, vec) r = Erf(d) p = Add(r, one) h = Mul(x, p) y = Mul(h, half)",
}  # fmt: skip


@pytest.mark.parametrize("name", ALMOST_GELU)
def test_what_is_almost_a_gelu_stays_and_is_told(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(model_of(ALONE + ALMOST_GELU[name]), tmp_path)
    (site,) = result.report["sites"]
    assert patched is None and "it is not x * (1 + erf(" in site["reason"]


SLOPES = {
    "a fast GELU": ("m = Mul(x, {}) g = Sigmoid(m) y = Mul(x, g)", 1.702, "it is x * sigmoid(1.702 * x), and"),
    "constants first": ("m = Mul({}, x) g = Sigmoid(m) y = Mul(g, x)", 0.5, "it is x * sigmoid(0.5 * x), and"),
    "by Div": ("m = Div(x, {}) g = Sigmoid(m) y = Mul(x, g)", 2, "it is x * sigmoid(0.5 * x), and"),
    "a shift": ("m = Sub(x, {}) g = Sigmoid(m) y = Mul(x, g)", 0.5, "it is x * sigmoid(1 * x - 0.5), and"),
}


@pytest.mark.parametrize("name", SLOPES)
def test_a_sigmoid_of_another_slope_is_no_silu_and_is_told(name: str, tmp_path: Path) -> None:
    body, number, words = SLOPES[name]
    values = {n: FILTERS[n] for n in "wk"} | {"a": np.float32(number)}
    result, patched = run_patch(graph(ALONE + body.format("a"), values, inputs={"b": "n,16,9,7"}), tmp_path)
    (site,) = result.report["sites"]
    assert patched is None and site["reason"].startswith(f"Mul 'Mul_3' stays: {words} SiLU is x * sigmoid(x); only")


def test_a_slope_of_one_is_silu_without_a_word(tmp_path: Path) -> None:
    result, patched = run_patch(model_of(ALONE + "m = Mul(x, one) g = Sigmoid(m) y = Mul(x, g)"), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv1Silu"] and result.report["sites"][0]["notes"] == []


@pytest.mark.parametrize("special", [0.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n.startswith(("HardSigmoid", "PRelu", "ReLU6,", "Relu,"))])
def test_what_a_filter_takes_of_an_activation_is_the_same_function_of_every_number(name: str, special: float) -> None:
    model = model_of(ALONE + ACTIVATIONS[name][0], inputs={"b": "2,16,9,7"})
    (site,) = find_sites(model, Path())[1]
    assert site.match is not None and len(site.nodes) == len(model.graph.node)
    image = np.random.default_rng(7).standard_normal((2, 16, 9, 7))
    image[1, 2, 3, 4] = special
    operands = [np.asarray(o.make(), np.float64) if isinstance(o, Constant) else image for o in site.match.inputs]
    with np.errstate(invalid="ignore"):  # infinity times zero
        (got,) = OPERATOR.reference(site.match.call, operands)
        (expected,) = ReferenceEvaluator(widened(model)).run(["y"], {"b": image})
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_cuts_are_fused_up_to_the_first_that_is_none(tmp_path: Path) -> None:
    result, patched = run_patch(model_of(ALONE + "m = Relu(x) n = Min(m, six) y = Max(n, vec)"), tmp_path)
    assert [n.op_type for n in patched.graph.node] == ["CuteConcatConv1Clip", "Max"]
    assert result.report["verify"]["passed"]


USED = {  # shared intermediates: whoever else reads one of them still gets it
    "the convolution": ("g = Sigmoid(x) y1 = Mul(x, g) y2 = Neg(x)", []),
    "the gate": ("g = Sigmoid(x) y1 = Mul(x, g) y2 = Neg(g)", []),
    "the gate as a result": ("y2 = Sigmoid(x) y1 = Mul(x, y2)", []),
    "the inner product": ("m = Mul(x, half) t = Tanh(m) h = Mul(t, half) g = Add(h, half) y1 = Mul(x, g) y2 = Neg(m)",
                          []),
    "the inner product as a result": (
        "y2 = Mul(x, half) t = Tanh(y2) h = Mul(t, half) g = Add(h, half) y1 = Mul(x, g)", []),
    "the tanh": ("m = Mul(x, half) t = Tanh(m) h = Mul(t, half) g = Add(h, half) y1 = Mul(x, g) y2 = Neg(t)", []),
    "the lower cut": ("m = Max(x, zero) y1 = Min(m, six) y2 = Neg(m)", ["CuteConcatConv1Relu"]),
    "the product before it is divided": (
        "s = Add(x, three) e = Clip(s, zero, six) p = Mul(x, e) y1 = Div(p, six) y2 = Neg(p)", []),
    "the activation": ("z = Relu(x) y1 = Neg(z) y2 = Abs(z)", ["CuteConcatConv1Relu"]),
    "the convolution as a result": ("y2 = Identity(x) y1 = Relu(x)", []),
}  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_what_others_read_too_is_kept(name: str, tmp_path: Path) -> None:
    body, types = USED[name]
    _, patched = run_patch(model_of(ALONE + body, outputs=("y1", "y2")), tmp_path)
    assert fused_types(patched) == types


NO_SITE = {
    "alone": ("y = Conv(b, w, k)", {}),
    "a batch norm alone": (ALONE + "y = BatchNormalization(x, gamma, beta, mean, var)", {}),
    "a pooling": (ALONE + "y = MaxPool<kernel_shape=[2,2]>(x)", {}),
    "a constant added": (ALONE + "y = Add(x, vec)", {}),
    "itself twice": (ALONE + "y = Add(x, x)", {}),
    "a transposed convolution alone": ("y = ConvTranspose(b, w)", {"w": (16, 12, 3, 3)}),
    "a grouped convolution alone": ("y = Conv<group=16>(b, w)", {"w": (16, 1, 3, 3)}),
    "a computed filter alone": ("u = Relu(w) y = Conv(b, u)", {}),
    "a split of rows": ("p, q = Split<axis=2, num_outputs=2>(b) r = Conv(p, w, k) t = Neg(q) y = Concat<axis=2>(r, t)",
                        {}),
    "another domain": (ALONE + "y = Relu(x)", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_SITE)
def test_a_convolution_without_such_a_neighbour_is_no_candidate(name: str, tmp_path: Path) -> None:
    body, shapes = NO_SITE[name]
    values = small(body, FILTERS | NUMBERS | BN | weights(**shapes))
    inputs = {"b": "n,16,9,7"}
    if name == "a split of rows":
        inputs, body = {"b": "n,16,10,7"}, body.replace("y = Concat<axis=2>(r, t)", "y = Exp(r)")
    model = graph(body, values, inputs=inputs, opset=18 if "Split" in body else 17)
    if name == "another domain":
        model.opset_import.append(onnx.helper.make_opsetid("com.mine", 1))
        model.graph.node[0].domain = "com.mine"
    result, patched = run_patch(model, tmp_path, verify=False)
    assert patched is None and result.report["sites"] == []


REFUSED = {
    "depthwise": ("x = Conv<group=16>(b, w) y = Relu(x)", {"w": (16, 1, 3, 3)}, "the filter is float32; depth"),
    "grouped before a residual": ("x = Conv<group=4, pads=[1,1,1,1]>(b, w) y = Add(x, b)", {"w": (16, 4, 3, 3)},
                                  "the Conv has 4 groups"),
    "depthwise before SiLU by tanh": (
        "x = Conv<group=16>(b, w) m = Mul(x, half) t = Tanh(m) h = Mul(t, half) g = Add(h, half) y = Mul(x, g)",
        {"w": (16, 1, 3, 3)}, "the filter is float32"),
    "depthwise over an enlarged input": ("u = Resize(b, , s) y = Conv<group=16>(u, w)", {"w": (16, 1, 3, 3)},
                                         "the filter is float32"),
    "two filters a channel": ("x = Conv<group=16>(b, w) y = Relu(x)", {"w": (32, 1, 3, 3)},
                              "16 groups; only group=1 and one"),
    "transposed": ("x = ConvTranspose(b, w) y = Relu(x)", {"w": (16, 12, 3, 3)},
                   "this is a ConvTranspose: its filter is 3x3 with strides 1x1"),
    "transposed and normalised": (
        "x = ConvTranspose(b, w) z = BatchNormalization(x, gamma, beta, mean, var) y = Relu(z)", {"w": (16, 12, 3, 3)},
        "ConvTranspose"),
    "a computed filter": ("u = Relu(w) x = Conv(b, u) y = Relu(x)", {"w": (12, 16, 3, 3)}, "made of constants by Relu"),
    "a computed bias": ("u = RandomNormalLike(k) x = Conv(b, w, u) y = Relu(x)", {"w": (12, 16, 3, 3), "k": (12,)},
                        "the bias 'u' is computed at run time"),
    "a huge filter": ("x = Conv<pads=[20,20,20,20]>(b, w) y = Relu(x)", {"w": (4, 16, 33, 33)},
                      r"kernel_shape\[0\] is 33"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fused_beside_such_a_neighbour_says_why(name: str, tmp_path: Path) -> None:
    body, shapes, reason = REFUSED[name]
    values = small(body, NUMBERS | BN) | weights(**shapes)
    values |= {"s": np.float32([1, 1, 2, 2])} if "Resize" in body else {}
    result, patched = run_patch(graph(body, values, inputs={"b": "n,16,9,7"}), tmp_path)
    (site,) = result.report["sites"]
    assert patched is None and site["status"] == "refused" and re.search(reason, site["reason"]), site
    assert "Concat joins" not in site["reason"] and "source" not in site["reason"]


SCALES = {"ws": np.float32(0.1), "wz": np.int8(0), "q": np.ones((12, 16, 3, 3), np.int8), "k": FILTERS["k"]}


def test_a_quantised_convolution_of_one_tensor_is_left_to_the_engine(tmp_path: Path) -> None:
    body = "u = DequantizeLinear(q, ws, wz) x = Conv(b, u, k) y = Relu(x)"
    result, patched = run_patch(graph(body, SCALES), tmp_path)
    (site,) = result.report["sites"]
    assert patched is None and site["reason"].startswith("quantised site: the filter is dequantised in the graph")


def test_a_dequantised_input_of_a_float_convolution_is_read(tmp_path: Path) -> None:
    body = "p = QuantizeLinear(b, ws, wz) d = DequantizeLinear(p, ws, wz) x = Conv(d, w, k) y = Relu(x)"
    values = {n: v for n, v in SCALES.items() if n != "q"} | {"w": FILTERS["w"]}
    result, patched = run_patch(graph(body, values), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv1Relu"] and result.report["verify"]["passed"]


@pytest.mark.parametrize("rank", [3, 5])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("tail", ["y = Relu(x)", "y = Add(x, b)"])
def test_one_and_three_dimensional_convolutions_are_refused(rank: int, op: str, tail: str, tmp_path: Path) -> None:
    sizes = ",9" * (rank - 2)
    model = graph(f"x = {op}(b, w) {tail}", weights(w=(16, 16) + (1,) * (rank - 2)), rank=rank,
                  inputs={"b": f"n,16{sizes}"})  # fmt: skip
    result, patched = run_patch(model, tmp_path)
    (site,) = result.report["sites"]
    wanted = f"rank {rank}; only 2-D" if op == "Conv" else "this is a ConvTranspose"
    assert patched is None and wanted in site["reason"]


def test_a_normalisation_is_folded(tmp_path: Path) -> None:
    body = ALONE + "z = BatchNormalization(x, gamma, beta, mean, var) g = Sigmoid(z) y = Mul(z, g)"
    result, patched = run_patch(model_of(body), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv1Silu"] and result.report["verify"]["passed"]


def test_a_normalisation_that_cannot_be_folded_is_refused(tmp_path: Path) -> None:
    body = ALONE + "z = BatchNormalization(x, huge, beta, mean, var) y = Relu(z)"
    values = small(body, FILTERS | BN) | {"huge": np.full(12, 1e36, np.float32)}
    result, _ = run_patch(graph(body, values), tmp_path)
    assert "overflows or loses precision" in result.report["sites"][0]["reason"]


def test_identity_and_inference_dropout_in_front_are_passed(tmp_path: Path) -> None:
    result, patched = run_patch(model_of("d = Dropout(b) e = Identity(d) x = Conv(e, w, k) y = Relu(x)"), tmp_path)
    assert [n.op_type for n in patched.graph.node] == ["CuteConcatConv1Relu"] and result.report["verify"]["passed"]
    assert list(patched.graph.node[0].input)[:1] == ["b"]


def test_the_wrong_channel_count_is_said_of_one_input(tmp_path: Path) -> None:
    model = model_of(ALONE + "y = Relu(x)", inputs={"b": "n,m,9,7"})
    _, patched = run_patch(model, tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv1Relu"]
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 15
    (tmp_path / "model.cutefuse.onnx").unlink()
    (tmp_path / "model.patch.json").unlink()
    result, _ = run_patch(model, tmp_path)
    reason = result.report["sites"][0]["reason"]
    assert reason == "the input has 15 channels, the filter takes 16; repair the model"


@pytest.mark.skipif(NEWEST < 24, reason="Swish came with opset 24")
def test_swish_is_silu_with_alpha_one_and_stays_in_words_with_another(tmp_path: Path) -> None:
    # ONNX Runtime has no kernel for Swish in every release: only the match is looked at.
    _, patched = run_patch(model_of(ALONE + "y = Swish(x)", opset=24), tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv1Silu"]
    (tmp_path / "model.cutefuse.onnx").unlink()
    (tmp_path / "model.patch.json").unlink()
    words = "Swish 'Swish_1' stays: its alpha is 1.5; only alpha=1, which is SiLU, can be fused"
    result, patched = run_patch(model_of(ALONE + "y = Swish<alpha=1.5>(x)", opset=24), tmp_path, verify=False)
    assert patched is None and result.report["sites"][0]["reason"] == words
    body = JOINED + "y = Swish<alpha=1.5>(x)"
    result, patched = run_patch(model_of(body, opset=24), tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2"]
    assert result.report["sites"][0]["notes"] == [words.replace("Swish_1", "Swish_2")]


BEHIND = {
    "rows joined": ("c = Concat<axis=2>(b, b) x = Conv(c, w, k) y = Relu(x)", "Concat joins axis 2; only"),
    "nine sources": (
        "c = Concat<axis=1>(b, b, b, b, b, b, b, b, b) x = Conv(c, u) y = Relu(x)",
        "Concat joins 9 tensors, at most 8",
    ),
}


@pytest.mark.parametrize("name", BEHIND)
def test_a_concat_that_cannot_be_fused_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    body, reason = BEHIND[name]
    values = small(body, FILTERS | weights(u=(12, 144, 1, 1)))
    result, patched = run_patch(graph(body, values), tmp_path)
    assert [n.op_type for n in patched.graph.node] == ["Concat", "CuteConcatConv1Relu"]
    (note,) = result.report["sites"][0]["notes"]
    assert note.startswith(f"'c' is read as it is: {reason}") and result.report["verify"]["passed"]


def test_a_source_of_one_concat_stays_a_site_of_that_concat(tmp_path: Path) -> None:
    body = "c = Concat<axis=1>(b) y = Conv(c, w, k)"
    result, patched = run_patch(model_of(body), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv1"] and result.report["sites"][0]["takes"] == []


def test_sites_of_one_tensor_can_be_left_out(tmp_path: Path) -> None:
    body = JOINED.replace("x =", "z =") + "n = Relu(z) x = Conv(n, u) y = Relu(x)"
    model = graph(body, small(body, FILTERS | weights(u=(4, 12, 1, 1))))
    result, patched = run_patch(model, tmp_path, without=["single"])
    assert fused_types(patched) == ["CuteConcatConv2Relu"]
    assert [(s["status"], s["reason"]) for s in result.report["sites"]] == [
        ("fused", ""), ("excluded", "--without single"),
    ]  # fmt: skip


def test_the_tensor_before_an_activation_of_its_own_is_counted_and_before_a_relu_not(tmp_path: Path) -> None:
    body = "x = Conv(b, w, k) g = Sigmoid(x) z = Mul(x, g) r = Conv(z, u) y = Relu(r)"
    model = graph(body, small(body, FILTERS | weights(u=(4, 12, 1, 1))), inputs={"b": "1,16,9,7"})
    result, _ = run_patch(model, tmp_path)
    assert [s["bytes_saved"] for s in result.report["sites"]] == [2 * 12 * 7 * 5 * 4, 0]


def test_parallel_convolutions_of_one_tensor_become_one(tmp_path: Path) -> None:
    body = "x1 = Conv(b, w, k) y1 = Relu(x1) x2 = Conv(b, w) y2 = Relu(x2)"
    result, patched = run_patch(model_of(body, outputs=("y1", "y2"), inputs={"b": "n,16,9,7"}), tmp_path)
    assert [s["status"] for s in result.report["sites"]] == ["fused", "merged"]
    assert fused_types(patched) == ["CuteConcatConv1x2Relu"] and result.report["verify"]["passed"]


def test_inside_a_body_of_control_flow_it_is_told_so(tmp_path: Path) -> None:
    model = model_of(
        "i = Constant<value = bool {1}>() "
        "y = If(i) <then_branch = t () => (float[n,12,9,7] p) { q = Conv<pads=[1,1,1,1]>(b, w, k) p = Relu(q) }, "
        "else_branch = e () => (float[n,12,9,7] r) { r = Conv<pads=[1,1,1,1]>(b, w, k) }>"
    )
    result, _ = run_patch(model, tmp_path)
    (site,) = result.report["sites"]
    assert site["status"] == "refused" and "body of If" in site["reason"] and "inline" not in site["reason"]
