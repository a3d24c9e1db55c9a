"""The float8 ConcatConv without a GPU: Q/DQ graphs as NVIDIA ModelOpt and PyTorch write them, fused or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from devices import skip_without_code
from graphs import fused_types, graph, run_patch
from onnx import helper

from cutefuse.errors import CutefuseError
from cutefuse.graph.numbers import FLOAT8
from cutefuse.graph.read import Graph
from cutefuse.graph.runner import Runner
from cutefuse.graph.shapes import inferred
from cutefuse.graph.verify import verify
from cutefuse.rewrite.unpatch import unpatch

E4M3, E5M2, FNUZ = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz
RNG = np.random.default_rng(0)
HALVES = {
    "sa": 0.012, "sb": 0.02, "sc": 0.016, "so": 0.009, "ws": np.linspace(0.0005, 0.0015, 16), "ws1": 0.001,
    "ws24": np.full(24, 0.001), "many": np.full(24, 0.01), "wf": RNG.standard_normal((16, 24, 3, 3)) / 8,
    "k": np.linspace(-1, 1, 16), "gamma": np.linspace(-1, 1, 16), "beta": np.ones(16), "mean": np.zeros(16),
    "var": np.full(16, 0.5), "k12": np.linspace(-1, 1, 12), "huge": 200.0,
    "w8": RNG.standard_normal((8, 8, 1, 1)) / 4,
}  # fmt: skip
CODES = {
    "z": np.zeros((), E4M3), "z16": np.zeros(16, E4M3), "z24": np.zeros(24, E4M3), "one": np.ones((), E4M3),
    "zi": np.int8(0), "z5": np.zeros((), E5M2), "zu": np.zeros((), FNUZ),
    "w": (RNG.standard_normal((16, 24, 3, 3)) * 100).astype(E4M3),
    "wi": RNG.integers(-127, 128, (16, 24, 3, 3)).astype(np.int8), "w5": np.ones((16, 24, 3, 3), E5M2),
    "w12": (RNG.standard_normal((12, 24, 3, 3)) * 100).astype(E4M3), "w1": np.ones((12, 8, 3, 3), E4M3),
    "f_sa": np.float32(0.012), "f_sc": np.float32(0.016), "f_so": np.float32(0.009), "f_ws1": np.float32(0.001),
}  # fmt: skip


def values(dtype: str = "float16") -> dict[str, np.ndarray]:
    """The constants of the graphs below, floats in one type."""
    return {k: np.asarray(v, dtype) for k, v in HALVES.items()} | CODES


def model_of(text: str, dtype: str = "float16", opset: int = 19, **options: Any) -> onnx.ModelProto:
    return graph(text, values(dtype), opset=opset, dtype=dtype, ir=9 if opset < 21 else 10, **options)


SOURCES = """qa = QuantizeLinear(a, sa, z) da = DequantizeLinear(qa, sa, z)
             qb = QuantizeLinear(b, sb, z) db = DequantizeLinear(qb, sb, z) c = Concat<axis=1>(da, db) """
FILTER = "dw = DequantizeLinear<axis=0>(w, ws, z16) "
CONV = "x = Conv<pads=[1,1,1,1]>(c, dw, k) "
WHOLE = "c0 = Concat<axis=1>(a, b) qc = QuantizeLinear(c0, sc, z) c = DequantizeLinear(qc, sc, z) "
RELU = "y = Relu(x)"
OUT = "r = Relu(x) q = QuantizeLinear(r, so, z) y = DequantizeLinear(q, so, z)"
# Quantisers in float32 inside a model in float16, as ModelOpt's exporter writes for trt_high_precision_dtype "Float".
CAST_WHOLE = """c0 = Concat<axis=1>(a, b) up = Cast<to=1>(c0) qc = QuantizeLinear(up, f_sc, z)
                low = DequantizeLinear(qc, f_sc, z) c = Cast<to=10>(low) """
CAST_SOURCES = """ua = Cast<to=1>(a) qa = QuantizeLinear(ua, f_sa, z) la = DequantizeLinear(qa, f_sa, z)
                  da = Cast<to=10>(la) qb = QuantizeLinear(b, sb, z) db = DequantizeLinear(qb, sb, z)
                  c = Concat<axis=1>(da, db) """
CAST_FILTER = """uw = Cast<to=1>(wf) qw = QuantizeLinear(uw, f_ws1, z) lw = DequantizeLinear(qw, f_ws1, z)
                 dw = Cast<to=10>(lw) """
CAST_OUT = "r = Relu(x) u = Cast<to=1>(r) q = QuantizeLinear(u, f_so, z) y0 = DequantizeLinear(q, f_so, z) "

POSITIVE = {
    "own scales": (SOURCES + FILTER + CONV + RELU, "CuteQConcatConv2Relu"),
    "float8 output": (SOURCES + FILTER + CONV + OUT, "CuteQConcatConv2ReluQ"),
    "no activation": (SOURCES + FILTER + "r = Conv(c, dw) q = QuantizeLinear(r, so, z) y = DequantizeLinear(q, so)",
                      "CuteQConcatConv2Q"),
    "silu": (SOURCES + FILTER + CONV + "g = Sigmoid(x) y = Mul(x, g)", "CuteQConcatConv2Silu"),
    "one scale of the filter": (SOURCES + "dw = DequantizeLinear(w, ws1, z) " + CONV + RELU, "CuteQConcatConv2Relu"),
    "filter as floats": (
        SOURCES + "qw = QuantizeLinear<axis=0>(wf, ws, z16) dw = DequantizeLinear<axis=0>(qw, ws, z16) " + CONV + RELU,
        "CuteQConcatConv2Relu"),
    "batch norm with negative factors": (
        SOURCES + FILTER + CONV + "n1 = BatchNormalization(x, gamma, beta, mean, var) y = Relu(n1)",
        "CuteQConcatConv2Relu"),
    "one pair behind the Concat": (WHOLE + FILTER + CONV + OUT, "CuteQConcatConv2ReluQ"),
    "pairs before and behind with one scale": (
        """qa = QuantizeLinear(a, sc, z) da = DequantizeLinear(qa, sc, z) c0 = Concat<axis=1>(da, b)
           qc = QuantizeLinear(c0, sc, z) c = DequantizeLinear(qc, sc, z) """ + FILTER + CONV + RELU,
        "CuteQConcatConv2Relu"),
    "a pair of another scale before": (
        """qa = QuantizeLinear(a, sa, z) da = DequantizeLinear(qa, sa, z) c0 = Concat<axis=1>(da, b)
           qc = QuantizeLinear(c0, sc, z) c = DequantizeLinear(qc, sc, z) """ + FILTER + CONV + RELU,
        "CuteQConcatConv2Relu"),
    "a pair of int8 before": (
        """qa = QuantizeLinear(a, sc, zi) da = DequantizeLinear(qa, sc, zi) c0 = Concat<axis=1>(da, b)
           qc = QuantizeLinear(c0, sc, z) c = DequantizeLinear(qc, sc, z) """ + FILTER + CONV + RELU,
        "CuteQConcatConv2Relu"),
    "an int8 output stays outside": (
        SOURCES + FILTER + CONV + "r = Relu(x) q = QuantizeLinear(r, so, zi) y = DequantizeLinear(q, so, zi)",
        "CuteQConcatConv2Relu"),
    "an output that does not saturate stays outside": (
        SOURCES + FILTER + CONV + "r = Relu(x) q = QuantizeLinear<saturate=0>(r, so, z) y = DequantizeLinear(q, so)",
        "CuteQConcatConv2Relu"),
    "strides and dilations": (
        SOURCES + FILTER + "x = Conv<strides=[2,1], dilations=[1,2], pads=[0,2,1,3]>(c, dw, k) y = Relu(x)",
        "CuteQConcatConv2Relu"),
    "casts around the pair": (CAST_WHOLE + CAST_FILTER + CONV + CAST_OUT + "y = Cast<to=10>(y0)",
                              "CuteQConcatConv2ReluQ"),
    "a Cast behind the Concat": (
        """ua = Cast<to=1>(a) qa = QuantizeLinear(ua, f_sc, z) da = DequantizeLinear(qa, f_sc, z)
           ub = Cast<to=1>(b) qb = QuantizeLinear(ub, f_sa, z) db = DequantizeLinear(qb, f_sa, z)
           c0 = Concat<axis=1>(da, db) c = Cast<to=10>(c0) """ + FILTER + CONV + RELU, "CuteQConcatConv2Relu"),
    "casts around one source": (CAST_SOURCES + CAST_FILTER + CONV + RELU, "CuteQConcatConv2Relu"),
}  # fmt: skip


def check_positive(model: onnx.ModelProto, op_type: str, folder: Path) -> onnx.ModelProto:
    result, patched = run_patch(model, folder)
    assert [s["reason"] for s in result.report["sites"]] == [""]
    assert fused_types(patched) == [op_type] and patched is not None
    assert result.report["verify"]["passed"], result.report["verify"]
    assert not {"Concat", "Conv"} & {n.op_type for n in patched.graph.node}
    onnx.checker.check_model(patched, full_check=True)
    [node] = [n for n in patched.graph.node if n.domain == "cutefuse"]
    stored = {t.name: t.data_type for t in patched.graph.initializer}
    assert stored[node.input[2]] == onnx.TensorProto.FLOAT8E4M3FN
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert op_type.endswith("Q") or attrs["output_type"] == onnx.TensorProto.FLOAT16
    return patched


@pytest.mark.parametrize("name", POSITIVE)
def test_float8_sites_are_fused_and_equal(name: str, tmp_path: Path) -> None:
    text, op_type = POSITIVE[name]
    check_positive(model_of(text), op_type, tmp_path)


def test_casts_stand_around_int8_too(tmp_path: Path) -> None:
    text = POSITIVE["casts around the pair"][0].replace(", z)", ", zi)")
    result, patched = run_patch(model_of(text), tmp_path)
    assert fused_types(patched) == ["CuteQConcatConv2ReluQ"] and result.report["verify"]["passed"]
    assert result.report["sites"][0]["dtype"] == "int8"


@pytest.mark.parametrize("opset", [20, 21, 23])
def test_other_opsets(opset: int, tmp_path: Path) -> None:
    check_positive(model_of(POSITIVE["float8 output"][0], opset=opset), "CuteQConcatConv2ReluQ", tmp_path)


def test_a_type_that_only_an_attribute_names_stays_what_it_is(tmp_path: Path) -> None:
    whole = WHOLE.replace("(c0, sc, z)", "<output_dtype=17>(c0, sc)").replace("(qc, sc, z)", "(qc, sc)")
    patched = check_positive(model_of(whole + FILTER + CONV + RELU, opset=21), "CuteQConcatConv2Relu", tmp_path)
    made = [n for n in patched.graph.node if n.op_type == "QuantizeLinear"]
    assert [{a.name: a.i for a in n.attribute}["output_dtype"] for n in made] == [17, 17]


@pytest.mark.parametrize("name", ["float8 output", "one pair behind the Concat", "filter as floats"])
def test_a_model_in_float32_is_equal_where_its_output_is_quantised(name: str, tmp_path: Path) -> None:
    text = POSITIVE[name][0].replace(RELU, OUT)
    patched = check_positive(model_of(text, "float32"), "CuteQConcatConv2ReluQ", tmp_path)
    feeds = {n: RNG.standard_normal((2, c, 9, 7)).astype(np.float32) for n, c in (("a", 8), ("b", 16))}
    whole, ours = (Runner(m, tmp_path)(feeds)[0] for m in (model_of(text, "float32"), patched))
    steps = np.abs(whole - ours) / (np.float32(0.009) * FLOAT8.step(whole / np.float32(0.009)))
    # float32 sums in another order: a value at a tie may fall on its other side, every other one is the same.
    assert steps.max() <= 1.01 and np.mean(steps > 0) < 2e-3


def test_a_cast_of_a_float32_convolution_to_float16_ends_the_site(tmp_path: Path) -> None:
    patched = check_positive(
        model_of(SOURCES + FILTER + CONV + "r = Relu(x) l = Cast<to=10>(r) y = Cast<to=1>(l)", "float32"),
        "CuteQConcatConv2Relu", tmp_path,
    )  # fmt: skip
    assert [n.op_type for n in patched.graph.node][-1] == "Cast"


def test_a_model_in_float32_is_converted_on_request(tmp_path: Path) -> None:
    result, patched = run_patch(model_of(POSITIVE["own scales"][0], "float32"), tmp_path, dtype="float16")
    assert fused_types(patched) == ["CuteQConcatConv2Relu"] and result.report["verify"]["passed"]


def test_filters_that_are_no_multiple_of_sixteen_give_float8_too(tmp_path: Path) -> None:
    text = SOURCES + "dw = DequantizeLinear(w12, ws1, z) x = Conv<pads=[1,1,1,1]>(c, dw, k12) " + OUT
    result, patched = run_patch(model_of(text), tmp_path)
    assert fused_types(patched) == ["CuteQConcatConv2ReluQ"] and result.report["verify"]["passed"]


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("name", ["float8 output", "one pair behind the Concat", "filter as floats"])
def test_unpatching_gives_quantised_operators_back(name: str, functions: bool, tmp_path: Path) -> None:
    run_patch(model_of(POSITIVE[name][0].replace(RELU, OUT), "float32"), tmp_path, functions=functions)
    assert unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "plain.onnx") == 1
    plain = onnx.load(str(tmp_path / "plain.onnx"))
    kinds = [n.op_type for n in plain.graph.node]
    assert kinds == ["QuantizeLinear"] * 2 + ["DequantizeLinear"] * 3 + [
        "Concat", "Conv", "Relu", "QuantizeLinear", "DequantizeLinear"
    ]  # fmt: skip
    assert verify(tmp_path / "model.onnx", plain, tmp_path, 2e-2, {})["passed"]


# ---- NHWC: a Transpose takes float8 from opset 21 on ----


@pytest.mark.parametrize("opset", [19, 20, 21])
@pytest.mark.parametrize("front", ["", "t = Conv(a, w8) ", "t = MaxPool<kernel_shape=[1,1]>(a) ", "t = Tanh(a) "])
def test_float8_is_turned_where_the_opset_can(front: str, opset: int, tmp_path: Path) -> None:
    text = front + (SOURCES.replace("(a,", "(t,") if front else SOURCES) + FILTER + CONV + OUT
    model = model_of(text, "float32", opset)
    result, patched = run_patch(model, tmp_path, layout="nhwc")
    assert patched is not None and result.report["verify"]["passed"]
    onnx.checker.check_model(patched, full_check=True)
    seen = Graph(patched, tmp_path, inferred(patched))
    turned = {seen.dtype(n.input[0]) for n in patched.graph.node if n.op_type == "Transpose"}
    assert ("float8_e4m3fn" in turned) == (opset >= 21)


@pytest.mark.parametrize(("opset", "layout"), [(19, "nhwc"), (20, "nhwc"), (19, "hwc8"), (21, "nhwc")])
def test_a_float8_input_of_a_model_is_turned_where_the_opset_can(opset: int, layout: str, tmp_path: Path) -> None:
    model = model_of(SOURCES + FILTER + CONV + OUT, "float32", opset)
    first = next(n for n in model.graph.node if n.output[0] == "qa")
    model.graph.node.remove(first)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("qa", onnx.TensorProto.FLOAT8E4M3FN, (2, 8, 9, 7)))
    if opset < 21 and layout == "nhwc":
        with pytest.raises(CutefuseError, match=r"float8.* opset 21 .*hwc8"):
            run_patch(model, tmp_path, layout=layout)
        assert not (tmp_path / "model.cutefuse.onnx").exists()
    else:
        result, patched = run_patch(model, tmp_path, layout=layout)
        assert fused_types(patched) == ["CuteQConcatConv2ReluQ"] and result.report["verify"]["passed"]


# ---- refusals ----

NEGATIVE = {
    "e5m2 sources": (SOURCES.replace("sa, z)", "sa, z5)") + FILTER + CONV + RELU,
                     "source 'da' is quantised to float8_e5m2; only int8 and float8_e4m3fn"),
    "an e5m2 filter": (SOURCES + "dw = DequantizeLinear(w5, ws1, z5) " + CONV + RELU,
                       "the filter is quantised to float8_e5m2"),
    "fnuz": (WHOLE.replace(", z)", ", zu)") + FILTER + CONV + RELU, "is quantised to float8_e4m3fnuz"),
    "a zero point": (SOURCES.replace("sb, z)", "sb, one)") + FILTER + CONV + RELU,
                     "source 'db' has zero point 1; only symmetric"),
    "a zero point of the filter": (SOURCES + "dw = DequantizeLinear(w, ws1, one) " + CONV + RELU,
                                   "the filter has zero point 1"),
    "an int8 source": (SOURCES.replace("sb, z)", "sb, zi)") + FILTER + CONV + RELU,
                       "source 'db' is int8, the filter float8_e4m3fn; sources and filter must be of one type"),
    "an int8 filter": (SOURCES + "dw = DequantizeLinear(wi, ws1, zi) " + CONV + RELU,
                       "source 'da' is float8_e4m3fn, the filter int8"),
    "an int8 pair behind the Concat": (WHOLE.replace(", z)", ", zi)") + FILTER + CONV + RELU, "is int8, the filter"),
    "no saturation": (WHOLE.replace("Linear(c0", "Linear<saturate=0>(c0") + FILTER + CONV + RELU,
                      "is quantised without saturation"),
    "a scale at run time": (
        "m = ReduceMax<keepdims=0>(a) " + SOURCES.replace("sa, z)", "m, z)") + FILTER + CONV + RELU,
        "the scale of source 'da' is computed at run time"),
    "a scale for each channel": (
        WHOLE.replace("Linear(c0, sc, z)", "Linear<axis=1>(c0, many, z24)").replace(
            "Linear(qc, sc, z)", "Linear<axis=1>(qc, many, z24)") + FILTER + CONV + RELU, "has 24 scales"),
    "scales along the filter's inputs": (SOURCES + "dw = DequantizeLinear<axis=1>(w, ws24, z24) " + CONV + RELU,
                                         "24 scales along axis 1"),
    "two scales in one pair": (WHOLE.replace("(qc, sc, z)", "(qc, sb, z)") + FILTER + CONV + RELU,
                               "is quantised with scale 0.0160065 and dequantised with 0.0200043"),
    "two scales of the filter": (
        SOURCES + "qw = QuantizeLinear(wf, ws1, z) dw = DequantizeLinear(qw, sa, z) " + CONV + RELU,
        "quantised and dequantised with different scales"),
    "a source in float": (SOURCES.replace("(da, db)", "(da, b)") + FILTER + CONV + RELU,
                          "source 'b' is not dequantised"),
    "a filter in float": (WHOLE + "x = Conv(c, wf, k) y = Relu(x)", "the filter is not quantised"),
    "a Cast that overflows": (
        """qa = QuantizeLinear(a, sa, z) da = DequantizeLinear(qa, sa, z) ub = Cast<to=1>(b) hb = Cast<to=1>(huge)
           qb = QuantizeLinear(ub, hb, z) lb = DequantizeLinear(qb, hb, z) db = Cast<to=10>(lb)
           c = Concat<axis=1>(da, db) """ + FILTER + CONV + RELU, "source 'db' is cast to float16, which cannot hold"),
    "a Cast behind the Concat that overflows": (
        """ua = Cast<to=1>(a) hb = Cast<to=1>(huge) qa = QuantizeLinear(ua, hb, z) da = DequantizeLinear(qa, hb, z)
           ub = Cast<to=1>(b) qb = QuantizeLinear(ub, f_sa, z) db = DequantizeLinear(qb, f_sa, z)
           c0 = Concat<axis=1>(da, db) c = Cast<to=10>(c0) """ + FILTER + CONV + RELU,
        "source 'da' is cast to float16, which cannot hold"),
    "two Casts before the quantiser": (
        """ua = Cast<to=1>(a) ub = Cast<to=1>(b) c0 = Concat<axis=1>(ua, ub) l = Cast<to=10>(c0) u = Cast<to=1>(l)
           qc = QuantizeLinear(u, f_sc, z) d = DequantizeLinear(qc, f_sc, z) c = Cast<to=10>(d) """
        + FILTER + CONV + RELU, "is cast 2 times before it is quantised"),
    "groups": (SOURCES + "dw = DequantizeLinear(w1, ws1, z) x = Conv<group=3>(c, dw) y = Relu(x)", "3 groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEGATIVE)
def test_other_float8_is_refused_in_words(name: str, tmp_path: Path) -> None:
    text, reason = NEGATIVE[name]
    result, patched = run_patch(model_of(text), tmp_path, dry_run=True)
    assert patched is None
    [site] = result.report["sites"]
    assert site["operator"] == "quant_concat_conv" and site["reason"].startswith("quantised site: ")
    assert reason in site["reason"], site["reason"]


@pytest.mark.parametrize(
    ("name", "dtype"), [("own scales", "float32"), ("silu", "float32"), ("own scales", "bfloat16")]
)
def test_outputs_are_of_every_float_type(name: str, dtype: str, tmp_path: Path) -> None:
    model = model_of(POSITIVE[name][0], dtype, opset=22)  # the first with bfloat16 convolutions
    result, _ = run_patch(model, tmp_path, dry_run=True)
    [site] = result.report["sites"]
    assert site["status"] == "fused"


@pytest.mark.parametrize("sm", [80, 86, 87])
def test_gpus_without_float8_are_refused_by_name(sm: int, tmp_path: Path) -> None:
    skip_without_code(sm)
    result, _ = run_patch(model_of(POSITIVE["float8 output"][0]), tmp_path, sm=sm, dry_run=True)
    [site] = result.report["sites"]
    assert site["status"] == "refused" and "quantise to int8 for it" in site["reason"]
    assert f"compute capability {sm // 10}.{sm % 10} does not multiply float8" in site["reason"]
    assert result.exit_code == 3


def test_hopper_takes_them_and_any_gpu_does_with_a_note(tmp_path: Path) -> None:
    skip_without_code(90)
    model = model_of(POSITIVE["own scales"][0])
    for sm, said in ((90, False), (0, True)):
        result, _ = run_patch(model, tmp_path, sm=sm, dry_run=True)
        [site] = result.report["sites"]
        assert site["status"] == "fused"
        assert ("float8_e4m3fn has kernels for sm_89 and newer" in " ".join(site["notes"])) == said


# ---- int8 and float8 in one model ----


def mixed(activation: str) -> onnx.ModelProto:
    text = SOURCES + FILTER + CONV + "r1 = Relu(x) q1 = QuantizeLinear(r1, so, z) y1 = DequantizeLinear(q1, so) "
    text += """ia = QuantizeLinear(a, sa, zi) ja = DequantizeLinear(ia, sa, zi) ib = QuantizeLinear(b, sb, zi)
               jb = DequantizeLinear(ib, sb, zi) c2 = Concat<axis=1>(ja, jb) dv = DequantizeLinear(wi, ws1, zi) """
    text += f"x2 = Conv(c2, dv) r2 = {activation}(x2) q2 = QuantizeLinear(r2, so, zi) y2 = DequantizeLinear(q2, so)"
    return model_of(text, outputs=("y1", "y2"))


def test_int8_and_float8_stand_beside_each_other_and_share_no_body(tmp_path: Path) -> None:
    result, _ = run_patch(mixed("Relu"), tmp_path, dry_run=True)
    assert sum("use --no-functions" in s["reason"] for s in result.report["sites"]) == 1
    assert not any("opset 15" in s["reason"] for s in result.report["sites"])
    result, _ = run_patch(mixed("Relu"), tmp_path, functions=False, dry_run=True)
    assert [s["status"] for s in result.report["sites"]] == ["fused", "fused"]
    result, patched = run_patch(mixed("Tanh"), tmp_path)
    assert fused_types(patched) == ["CuteQConcatConv2ReluQ", "CuteQConcatConv2TanhQ"]
    assert result.report["verify"]["passed"]
