"""The int8 ConcatConv without a GPU: bodies in ONNX Runtime, Q/DQ graphs fused or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from bodies import as_given, given_dims, in_layout, stranger
from graphs import fused_types, graph, run_patch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from cutefuse.graph.numbers import FLOAT8, INT8, Number
from cutefuse.graph.runner import Runner
from cutefuse.graph.verify import verify
from cutefuse.match.quant.read import Weight
from cutefuse.operators.function import body_for
from cutefuse.operators.layouts import HWC8, NHWC
from cutefuse.operators.quant_concat_conv import OPERATOR
from cutefuse.rewrite.unpatch import unpatch

CASES = {c.name: c for c in OPERATOR.cases()}
SINGLE = ("alpha", "lo", "hi", "output_scale", "output_type", "sum_bound", "layout")  # attributes of one value
SMALL = ["2_sources_Clip", "1_sources_HardSwish", "8_sources_LeakyRelu", "strided", "odd_everything"]

# ---- bodies ----


def body_error(
    name: str, opset: int, dtype: str, folder: Path, shared: bool = False, number: Number = INT8, layout: int = HWC8
) -> float:  # fmt: skip
    """Largest difference between the body in ONNX Runtime and the float64 reference, over what it may be."""
    call = in_layout(OPERATOR.call(CASES[name], dtype, number), layout)
    calls = [call, *([stranger(OPERATOR, call, opset)] if shared else [])]
    operands = OPERATOR.operands(call, np.random.default_rng(1))
    logical = [v.astype(np.dtype(t.dtype)) for v, t in zip(operands, call.inputs, strict=True)]
    values = [as_given(v, layout) for v in logical]
    names = [f"x{i}" for i in range(len(values))]
    plain = {k: list(v) for k, v in call.attrs.items()}  # type: ignore[arg-type]
    attrs = {k: v[0] if k in SINGLE else v for k, v in plain.items()}
    node = helper.make_node(call.op_type, names, ["y"], domain="cutefuse", plugin_version="1",
                            plugin_namespace="cutefuse", **attrs)  # fmt: skip
    kinds = [helper.np_dtype_to_tensor_dtype(v.dtype) for v in values]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(call.outputs[0].dtype))
    sources = len(values) - 3
    infos = [helper.make_tensor_value_info(n, k, v.shape) for n, k, v in zip(names, kinds, values, strict=True)]
    stored = [numpy_helper.from_array(v, n) for v, n in zip(values[sources:], names[sources:], strict=True)]
    output = helper.make_tensor_value_info("y", kind, given_dims(call.outputs[0], layout))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("cutefuse", 1)]
    model = helper.make_model(
        helper.make_graph([node], "one", infos[:sources], [output], stored), opset_imports=imports,
        functions=[body_for(calls, opset)], ir_version=8 if opset < 21 else 10,
    )  # fmt: skip
    onnx.checker.check_model(model, full_check=True)
    y = Runner(model, folder)(dict(zip(names[:sources], values, strict=False)))[0]
    exact = [v.astype(np.float64) for v in logical]
    truth, scale = (as_given(*v, layout) for v in (OPERATOR.reference(call, exact), OPERATOR.magnitude(call, exact)))
    assert y.shape == truth.shape and y.dtype == call.outputs[0].dtype
    if y.dtype.name == number.name:  # half a step may round to either side
        error, step = np.abs(y.astype(np.float64) - truth), number.step(truth)
        return float((error / (1e-6 * scale + np.where(error <= step, step, 0) + 1e-9)).max(initial=0))
    unit = {"float32": 2e-6, "float16": 2e-3}[dtype]
    return float((np.abs(y - truth) / (unit * scale + unit)).max(initial=0))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_body_computes_the_reference(name: str, tmp_path: Path) -> None:
    assert body_error(name, 17, "float32", tmp_path, shared=True) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("opset", [13, 15, 19, 21, 24])
@pytest.mark.parametrize("name", [*SMALL, *(f"{n}_to_int8" for n in SMALL)])
def test_the_body_computes_the_reference_in_every_opset_and_type(name: str, opset: int, tmp_path: Path) -> None:
    for dtype in CASES[name].dtypes[:2]:
        assert body_error(name, opset, dtype, tmp_path, dtype == "float32") <= 1, dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "float16" in c.dtypes or n.endswith("_to_int8")])
def test_the_body_computes_the_reference_in_float8(name: str, tmp_path: Path) -> None:
    assert body_error(name, 19, "float16", tmp_path, shared=True, number=FLOAT8) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("opset", [13, 17, 19, 21, 24])
@pytest.mark.parametrize("name", ["strided", "2_sources_Silu", "odd_everything_to_int8", "asymmetric_pads_to_int8"])
def test_a_body_over_nhwc_tensors_computes_the_reference(name: str, opset: int, tmp_path: Path) -> None:
    for number in (INT8, FLOAT8)[: 1 + (opset >= FLOAT8.opset)]:
        assert body_error(name, opset, "float32", tmp_path, True, number, NHWC) <= 1
        assert body_error(name, opset, "float32", tmp_path, False, number, NHWC) <= 1


@pytest.mark.parametrize("opset", [19, 20, 21, 24])
@pytest.mark.parametrize("name", ["2_sources_Clip", "strided", "2_sources_Silu_to_int8", "odd_everything_to_int8"])
def test_the_float8_body_computes_the_reference_in_every_opset(name: str, opset: int, tmp_path: Path) -> None:
    for shared in (False, True):
        assert body_error(name, opset, "float16", tmp_path, shared, FLOAT8) <= 1


# ---- the rewriter ----

CONST = {
    "sa": np.float32(0.03), "sb": np.float32(0.05), "sc": np.float32(0.04), "so": np.float32(0.07),
    "z": np.int8(0), "u": np.uint8(128), "one": np.int8(1), "many": np.full(24, 0.02, np.float32),
    "w": np.random.default_rng(0).integers(-127, 128, (12, 24, 3, 3)).astype(np.int8),
    "ws": np.linspace(0.001, 0.003, 12, dtype=np.float32), "ws1": np.float32(0.002),
    "z12": np.zeros(12, np.int8), "z24": np.zeros(24, np.int8), "ws24": np.full(24, 0.002, np.float32),
    "wf": np.random.default_rng(1).standard_normal((12, 24, 3, 3)).astype(np.float32) / 8,
    "wn": np.where(np.arange(12 * 24 * 9) == 7, np.float32(np.nan), 0).astype(np.float32).reshape(12, 24, 3, 3),
    "w16": np.random.default_rng(2).integers(-127, 128, (12, 16, 3, 3)).astype(np.int8),
    "wd": np.ones((16, 1, 3, 3), np.int8),
    "k": np.linspace(-1, 1, 12, dtype=np.float32), "ki": np.arange(-6, 6, dtype=np.int32) * 900,
    "gamma": np.linspace(-1, 1, 12, dtype=np.float32), "beta": np.ones(12, np.float32),
    "mean": np.zeros(12, np.float32), "var": np.full(12, 0.5, np.float32), "w1": np.ones((12, 8, 3, 3), np.int8),
}  # fmt: skip
SOURCES = """qa = QuantizeLinear(a, sa, z) da = DequantizeLinear(qa, sa, z)
             qb = QuantizeLinear(b, sb, z) db = DequantizeLinear(qb, sb, z) c = Concat<axis=1>(da, db) """
FILTER = "dw = DequantizeLinear<axis=0>(w, ws, z12) "
CONV = "x = Conv<pads=[1,1,1,1]>(c, dw, k) "
WHOLE = "c0 = Concat<axis=1>(a, b) qc = QuantizeLinear(c0, sc, z) c = DequantizeLinear(qc, sc, z) "
RELU = "y = Relu(x)"
OUT = "q = QuantizeLinear(r, so, z) y = DequantizeLinear(q, so, z)"

POSITIVE = {
    "own scales": (SOURCES + FILTER + CONV + "y = Relu(x)", "CuteQConcatConv2Relu"),
    "int8 output": (SOURCES + FILTER + CONV + "r = Relu(x) " + OUT, "CuteQConcatConv2ReluQ"),
    "no activation, int8 output": (SOURCES + FILTER + "r = Conv(c, dw) " + OUT, "CuteQConcatConv2Q"),
    "silu": (SOURCES + FILTER + CONV + "g = Sigmoid(x) y = Mul(x, g)", "CuteQConcatConv2Silu"),
    "one scale of the filter": (SOURCES + "dw = DequantizeLinear(w, ws1) " + CONV + "y = Relu(x)",
                                "CuteQConcatConv2Relu"),
    "filter as a float constant": (
        SOURCES + "qw = QuantizeLinear<axis=0>(wf, ws, z12) dw = DequantizeLinear<axis=0>(qw, ws, z12) " + CONV
        + "y = Relu(x)", "CuteQConcatConv2Relu"),
    "bias as int32": (SOURCES + FILTER + "dk = DequantizeLinear(ki, ws1) x = Conv(c, dw, dk) y = Relu(x)",
                      "CuteQConcatConv2Relu"),
    "batch norm with negative factors": (
        SOURCES + FILTER + CONV + "n1 = BatchNormalization(x, gamma, beta, mean, var) y = Relu(n1)",
        "CuteQConcatConv2Relu"),
    "one pair behind the Concat": (WHOLE + FILTER + CONV + "y = Relu(x)", "CuteQConcatConv2Relu"),
    "pairs before and behind with one scale": (
        """qa = QuantizeLinear(a, sc, z) da = DequantizeLinear(qa, sc, z) c0 = Concat<axis=1>(da, b)
           qc = QuantizeLinear(c0, sc, z) c = DequantizeLinear(qc, sc, z) """ + FILTER + CONV + "y = Relu(x)",
        "CuteQConcatConv2Relu"),
    "Concat of integers": (
        "qa = QuantizeLinear(a, sc, z) qb = QuantizeLinear(b, sc, z) c0 = Concat<axis=1>(qa, qb) "
        "c = DequantizeLinear(c0, sc, z) " + FILTER + CONV + "y = Relu(x)", "CuteQConcatConv2Relu"),
    "an asymmetric output stays outside": (
        SOURCES + FILTER + CONV + "r = Relu(x) q = QuantizeLinear(r, so, u) y = DequantizeLinear(q, so, u)",
        "CuteQConcatConv2Relu"),
    "an output that others read too": (
        SOURCES + FILTER + CONV + "r = Relu(x) q = QuantizeLinear(r, so, z) d = DequantizeLinear(q, so, z) "
        "y = Add(d, r)", "CuteQConcatConv2Relu"),
    "strides and dilations": (
        SOURCES + FILTER + "x = Conv<strides=[2,1], dilations=[1,2], pads=[0,2,1,3]>(c, dw, k) y = Relu(x)",
        "CuteQConcatConv2Relu"),
}  # fmt: skip


def check_positive(text: str, op_type: str, folder: Path, opset: int = 17, layout: str = "hwc8") -> onnx.ModelProto:
    result, patched = run_patch(graph(text, CONST, opset=opset), folder, layout=layout)
    assert [s["reason"] for s in result.report["sites"]] == [""]
    assert fused_types(patched) == [op_type] and patched is not None
    assert result.report["verify"]["passed"]
    kinds = [n.op_type for n in patched.graph.node]
    assert not {"Concat", "Conv"} & set(kinds)
    return patched


@pytest.mark.parametrize("name", POSITIVE)
def test_quantised_sites_are_fused_and_equal(name: str, tmp_path: Path) -> None:
    check_positive(*POSITIVE[name], tmp_path)


@pytest.mark.parametrize("name", POSITIVE)
def test_quantised_sites_are_fused_and_equal_in_nhwc(name: str, tmp_path: Path) -> None:
    """Bytes are transposed rather than the floats before them."""
    patched = check_positive(*POSITIVE[name], tmp_path, layout="nhwc")
    transposed = {n.input[0] for n in patched.graph.node if n.op_type == "Transpose"}
    assert not {"a", "b"} & transposed and len(transposed) == 3
    assert unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "plain.onnx") == 1
    plain = onnx.load(str(tmp_path / "plain.onnx"))
    turned = [n.input[0] for n in plain.graph.node if n.op_type == "Transpose"]
    assert all("Reshape" in name for name in turned), "a packed filter alone is turned, where it is unpacked"
    assert verify(tmp_path / "model.onnx", plain, tmp_path, 2e-2, {})["passed"]


@pytest.mark.parametrize("opset", [13, 21, 23])
def test_other_opsets(opset: int, tmp_path: Path) -> None:
    check_positive(*POSITIVE["int8 output"], tmp_path, opset)


def test_a_pair_behind_the_concat_moves_to_its_sources_and_is_shared(tmp_path: Path) -> None:
    text = WHOLE + FILTER + CONV + "x2 = Conv<pads=[1,1,1,1]>(c, dw) r2 = Tanh(x2) r1 = Relu(x) y = Add(r1, r2)"
    result, patched = run_patch(graph(text, CONST), tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    assert sorted(fused_types(patched)) == ["CuteQConcatConv2Relu", "CuteQConcatConv2Tanh"]
    assert [n.op_type for n in patched.graph.node].count("QuantizeLinear") == 2


def test_a_model_in_float16_gives_float16(tmp_path: Path) -> None:
    halves = {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in CONST.items()}
    model = graph(SOURCES + FILTER + CONV + "y = Relu(x)", halves, opset=21, dtype="float16")
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteQConcatConv2Relu"] and result.report["verify"]["passed"]
    [node] = [n for n in patched.graph.node if n.domain == "cutefuse"]  # type: ignore[union-attr]
    assert {a.name: a.i for a in node.attribute}["output_type"] == 10


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("name", ["int8 output", "one pair behind the Concat", "filter as a float constant"])
def test_unpatching_gives_quantised_operators_back(name: str, functions: bool, tmp_path: Path) -> None:
    run_patch(graph(POSITIVE[name][0], CONST), tmp_path, functions=functions)
    assert unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "plain.onnx") == 1
    plain = onnx.load(str(tmp_path / "plain.onnx"))
    kinds = [n.op_type for n in plain.graph.node]
    assert kinds[:8] == ["QuantizeLinear"] * 2 + ["DequantizeLinear"] * 3 + ["Concat", "Conv", "Relu"]
    assert verify(tmp_path / "model.onnx", plain, tmp_path, 2e-2, {})["passed"]


def test_a_type_that_only_an_attribute_names_stays_what_it_is(tmp_path: Path) -> None:
    whole = WHOLE.replace("(c0, sc, z)", "<output_dtype=3>(c0, sc)").replace("(qc, sc, z)", "(qc, sc)")
    patched = check_positive(whole + FILTER + CONV + RELU, "CuteQConcatConv2Relu", tmp_path, 21)
    assert [n.op_type for n in patched.graph.node[:2]] == ["QuantizeLinear"] * 2


def test_a_single_number_added_behind_a_site_is_no_residual(tmp_path: Path) -> None:
    text = SOURCES + FILTER + CONV + "t = ReduceMax<keepdims=0>(b) y = Add(x, t)"
    result, patched = run_patch(graph(text, CONST), tmp_path)
    assert fused_types(patched) == ["CuteQConcatConv2"] and result.report["verify"]["passed"]


def test_an_opset_without_scales_along_an_axis_is_refused_with_bodies_only(tmp_path: Path) -> None:
    text = SOURCES + "dw = DequantizeLinear(w, ws1) " + CONV + RELU
    result, _ = run_patch(graph(text, CONST, opset=12), tmp_path)
    assert [s["reason"] for s in result.report["sites"]] == [
        "opset 12 is older than 13; convert the model, or use --no-functions"
    ]
    _, patched = run_patch(graph(text, CONST, opset=12), tmp_path, functions=False, verify=False)
    assert fused_types(patched) == ["CuteQConcatConv2Relu"]


NEGATIVE = {
    "asymmetric": (SOURCES.replace("z) da", "one) da").replace("(qa, sa, z)", "(qa, sa, one)") + FILTER + CONV + RELU,
                   "zero point 1; only symmetric"),
    "uint8": (SOURCES.replace("(a, sa, z)", "(a, sa, u)").replace("(qa, sa, z)", "(qa, sa, u)") + FILTER + CONV + RELU,
              "quantised to uint8"),
    "uint8 by default": (
        SOURCES.replace("(a, sa, z)", "(a, sa)").replace("(qa, sa, z)", "(qa, sa)") + FILTER + CONV + RELU,
        "quantised to uint8"),
    "NaN in a float filter": (
        SOURCES + "qw = QuantizeLinear(wn, ws1, z) dw = DequantizeLinear(qw, ws1, z) " + CONV + RELU, "holds NaN"),
    "NaN in a float filter under a Cast": (
        SOURCES + "h = Cast<to=10>(wn) f = Cast<to=1>(h) qw = QuantizeLinear(f, ws1, z) "
        "dw = DequantizeLinear(qw, ws1, z) " + CONV + RELU, "holds NaN"),
    "a filter that is quantised twice": (
        SOURCES + "d1 = DequantizeLinear(w, ws1) i = Identity(d1) qw = QuantizeLinear(i, ws1, z) "
        "dw = DequantizeLinear(qw, ws1, z) " + CONV + RELU, "made of constants by"),
    "a scale that is quantised itself": (
        SOURCES + "s2 = DequantizeLinear(one, ws1) dw = DequantizeLinear(w, s2, z) " + CONV + RELU,
        "the scale of the filter is made of constants by DequantizeLinear"),
    "dynamic": (
        "qa, ds, dz = DynamicQuantizeLinear(a) da = DequantizeLinear(qa, ds, dz) qb = QuantizeLinear(b, sb, z) "
        "db = DequantizeLinear(qb, sb, z) c = Concat<axis=1>(da, db) " + FILTER + CONV + RELU,
        "the scale of source 'da' is computed at run time"),
    "scales computed from data": (
        "m = ReduceMax<keepdims=0>(a) " + SOURCES.replace("(a, sa, z)", "(a, m, z)").replace("(qa, sa", "(qa, m")
        + FILTER + CONV + RELU, "computed at run time"),
    "an activation with a scale for each channel": (
        WHOLE.replace("QuantizeLinear(c0, sc, z)", "QuantizeLinear<axis=1>(c0, many, z24)").replace(
            "DequantizeLinear(qc, sc, z)", "DequantizeLinear<axis=1>(qc, many, z24)") + FILTER + CONV + RELU,
        "has 24 scales"),
    "two scales in one pair": (WHOLE.replace("(qc, sc, z)", "(qc, sb, z)") + FILTER + CONV + RELU,
                               "quantised with scale 0.04 and dequantised with 0.05"),
    "one source in float": (SOURCES.replace("Concat<axis=1>(da, db)", "Concat<axis=1>(da, b)") + FILTER + CONV + RELU,
                            "source 'b' is not dequantised"),
    "a float filter": (WHOLE + "x = Conv(c, wf, k) y = Relu(x)", "the filter is not quantised"),
    "a filter with scales for its inputs": (
        SOURCES + "dw = DequantizeLinear<axis=1>(w, ws24, z24) " + CONV + RELU, "24 scales along axis 1"),
    "an asymmetric filter": (SOURCES + "dw = DequantizeLinear(w, ws1, one) " + CONV + RELU, "the filter has zero"),
    "groups": (SOURCES + "dw = DequantizeLinear(w1, ws1) x = Conv<group=3>(c, dw) y = Relu(x)", "3 groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEGATIVE)
def test_other_quantisation_is_refused_in_words(name: str, tmp_path: Path) -> None:
    text, reason = NEGATIVE[name]
    result, patched = run_patch(graph(text, CONST), tmp_path)
    assert patched is None or "CuteQ" not in str(fused_types(patched))
    assert [s["operator"] for s in result.report["sites"]] == ["quant_concat_conv"]
    assert all(s["reason"].startswith("quantised site: ") for s in result.report["sites"])
    assert reason in result.report["sites"][0]["reason"]


ONE = "qb = QuantizeLinear(b, sb, z) db = DequantizeLinear(qb, sb, z) "
FILTER16 = "dw = DequantizeLinear<axis=0>(w16, ws, z12) "
SILU = "x = Conv<pads=[1,1,1,1]>(db, dw, k) g = Sigmoid(x) r = Mul(x, g) "
ALONE = {
    "int8 output": (ONE + FILTER16 + SILU + OUT, "CuteQConcatConv1SiluQ"),
    "read by another": (ONE + FILTER16 + SILU + "y = Neg(r)", "CuteQConcatConv1Silu"),
    "nothing behind it": (ONE + FILTER16 + "y = Conv(db, dw)", "CuteQConcatConv1"),
    "another axis joined": (
        ONE + "dc = Concat<axis=2>(db, db) " + FILTER16 + "x = Conv(dc, dw) y = Relu(x)", "",
    ),
    "a float activation": (FILTER16 + "x = Conv(b, dw) y = Relu(x)", ""),
    "groups": (ONE + "dw = DequantizeLinear(wd, ws1) x = Conv<group=16>(db, dw) y = Relu(x)", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_without_a_concat_they_are_fused_for_myelin(name: str, tmp_path: Path) -> None:
    text, op_type = ALONE[name]
    result, patched = run_patch(graph(text, CONST), tmp_path, layout="nhwc")
    assert fused_types(patched) == ([op_type] if op_type else [])
    if op_type:
        assert result.report["verify"]["passed"] and result.report["sites"][0]["takes"] == ["single"]
    else:
        assert [s["reason"].startswith("quantised site: ") for s in result.report["sites"]] == [True]
    options: dict[str, object]
    for options in ({"layout": "hwc8"}, {"layout": "nhwc", "without": ["single"]}):
        (folder := tmp_path / str(options["layout"])).mkdir()
        assert fused_types(run_patch(graph(text, CONST), folder, **options)[1]) == []


def test_two_in_a_row_pass_integers(tmp_path: Path) -> None:
    second = " d2 = DequantizeLinear(w12, ws1) x2 = Conv(y0, d2) y = Relu(x2)"
    text = ONE + FILTER16 + SILU + OUT.replace("y =", "y0 =") + second
    model = graph(text, CONST | {"w12": CONST["w16"][:, :12]})
    result, patched = run_patch(model, tmp_path, layout="nhwc")
    assert result.report["verify"]["passed"] and patched is not None
    assert fused_types(patched) == ["CuteQConcatConv1SiluQ", "CuteQConcatConv1Relu"]
    assert sorted({n.op_type for n in patched.graph.node if n.domain == ""}) == ["QuantizeLinear", "Transpose"]
    image = np.random.default_rng(0).uniform(-5, 5, (2, 16, 9, 7)).astype(np.float32)
    (got,) = Runner(patched, tmp_path)({"a": np.zeros((2, 8, 9, 7), np.float32), "b": image})

    def exact(body: str, x: np.ndarray, scale: str, **values: np.ndarray) -> np.ndarray:
        """In float64, of what x is quantised to."""
        step = CONST[scale].astype(np.float64)
        model = graph(body, values, inputs={"b": "n,c,9,7"}, dtype="float64")
        return np.asarray(ReferenceEvaluator(model).run(["y"], {"b": np.clip(np.rint(x / step), -128, 127) * step})[0])

    wide = {n: CONST[n].astype(np.float64) for n in ("w16", "ws", "ws1", "k")}
    w, v = wide["w16"] * wide["ws"][:, None, None, None], wide["w16"][:, :12] * wide["ws1"]
    body = "x = Conv<pads=[1,1,1,1]>(b, w, k) g = Sigmoid(x) y = Mul(x, g)"
    expected = exact("x = Conv(b, v) y = Relu(x)", exact(body, image, "sb", w=w, k=wide["k"]), "so", v=v)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_source_that_is_dequantised_beside_a_float_filter_is_an_ordinary_site(tmp_path: Path) -> None:
    _, patched = run_patch(graph(SOURCES + "x = Conv(c, wf, k) y = Relu(x)", CONST), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"]


@pytest.mark.parametrize(("number", "expected"), [(INT8, [0, 2, 0, 127]), (FLOAT8, [0.5, 1.5, -0.5, 448])])
def test_filters_from_float_constants_round_as_the_standard_says(number: Number, expected: list[float]) -> None:
    class Constants:
        def constant(self, _: str) -> np.ndarray:
            return np.float32([0.25, 0.75, -0.25, 500]).reshape(2, 2, 1, 1)

    scale = np.full(2, 0.5)
    weight = Weight(Constants(), "w", (2, 2, 1, 1), scale, scale, False, number, "float32")  # type: ignore[arg-type]
    assert weight.make().ravel().astype(float).tolist() == expected


def test_blocks_of_small_numbers_are_named_and_not_their_constant_scales(tmp_path: Path) -> None:
    text = SOURCES + "dw = DequantizeLinear<axis=1, block_size=8>(w, s3) " + CONV + RELU
    scales = {"s3": np.full((12, 3, 3, 3), 0.1, np.float32)}
    model = graph(text, CONST | scales, opset=23)
    model.graph.initializer.remove(next(t for t in model.graph.initializer if t.name == "w"))
    packed = helper.make_tensor("w", onnx.TensorProto.FLOAT4E2M1, (12, 24, 3, 3), bytes(12 * 24 * 9 // 2), raw=True)
    model.graph.initializer.append(packed)
    result, _ = run_patch(model, tmp_path, dry_run=True)
    (site,) = result.report["sites"]
    assert "float4_e2m1" in site["reason"] and "blocks of 8" in site["reason"] and "run time" not in site["reason"]


def test_a_sparse_filter_is_named(tmp_path: Path) -> None:
    plain = graph("c = Concat<axis=1>(a, b) x = Conv(c, wf) y = Relu(x)", {"wf": CONST["wf"]})
    (dense,) = plain.graph.initializer
    values = numpy_helper.from_array(np.ones(1, np.float32), "wf")
    places = numpy_helper.from_array(np.zeros(1, np.int64), "wf_places")
    plain.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, list(dense.dims)))
    plain.graph.initializer.remove(dense)
    result, _ = run_patch(plain, tmp_path, dry_run=True)
    (site,) = result.report["sites"]
    assert "sparse" in site["reason"] and "run time" not in site["reason"]
