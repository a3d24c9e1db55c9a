"""The int8 ConcatConv without a GPU: bodies in ONNX Runtime, Q/DQ graphs fused or refused, formats of the plugin."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bodies import stranger
from graphs import fused_types, graph, run_patch
from onnx import helper, numpy_helper

from cutefuse import kernels
from cutefuse.graph.verify import Runner, verify
from cutefuse.host import Host, HostError, Input
from cutefuse.kernels import BLOCKS32, CHANNELS_LAST, LINEAR
from cutefuse.ops.conv_math import pack
from cutefuse.ops.function import body_for
from cutefuse.ops.quant_concat_conv import OPERATOR
from cutefuse.rewrite.unpatch import unpatch

CASES = {c.name: c for c in OPERATOR.cases()}
SMALL = ["2_sources_Clip", "1_sources_HardSwish", "8_sources_LeakyRelu", "strided", "odd_everything"]

# ---- bodies ----


def body_error(name: str, opset: int, dtype: str, folder: Path, shared: bool = False) -> float:
    """Largest difference between the body in ONNX Runtime and the float64 reference, over what it may be."""
    call = OPERATOR.call(CASES[name], dtype)
    calls = [call, *([stranger(OPERATOR, call, opset)] if shared else [])]
    operands = OPERATOR.operands(call, np.random.default_rng(1))
    values = [v.astype(t.dtype) for v, t in zip(operands, call.inputs, strict=True)]
    names = [f"x{i}" for i in range(len(values))]
    plain = {k: list(v) for k, v in call.attrs.items()}  # type: ignore[arg-type]
    attrs = {k: v[0] if k in ("alpha", "lo", "hi", "output_scale", "output_type") else v for k, v in plain.items()}
    node = helper.make_node(call.op_type, names, ["y"], domain="cutefuse", plugin_version="1",
                            plugin_namespace="cutefuse", **attrs)  # fmt: skip
    kinds = [helper.np_dtype_to_tensor_dtype(v.dtype) for v in values]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(call.outputs[0].dtype))
    sources = len(values) - 3
    infos = [helper.make_tensor_value_info(n, k, v.shape) for n, k, v in zip(names, kinds, values, strict=True)]
    stored = [numpy_helper.from_array(v, n) for v, n in zip(values[sources:], names[sources:], strict=True)]
    output = helper.make_tensor_value_info("y", kind, call.outputs[0].dims)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("cutefuse", 1)]
    model = helper.make_model(
        helper.make_graph([node], "one", infos[:sources], [output], stored), opset_imports=imports,
        functions=[body_for(calls, opset)], ir_version=8 if opset < 21 else 10,
    )  # fmt: skip
    onnx.checker.check_model(model, full_check=True)
    y = Runner(model, folder)(dict(zip(names[:sources], values, strict=False)))[0]
    exact = [v.astype(np.float64) for v in values]
    (truth,), (scale,) = OPERATOR.reference(call, exact), OPERATOR.magnitude(call, exact)
    assert y.shape == truth.shape and y.dtype == call.outputs[0].dtype
    if y.dtype == np.int8:  # half a step may round to either side
        return float((np.abs(y - truth) / (1e-6 * scale + (np.abs(y - truth) <= 1) + 1e-9)).max(initial=0))
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


# ---- the rewriter ----

CONST = {
    "sa": np.float32(0.03), "sb": np.float32(0.05), "sc": np.float32(0.04), "so": np.float32(0.07),
    "z": np.int8(0), "u": np.uint8(128), "one": np.int8(1), "many": np.full(24, 0.02, np.float32),
    "w": np.random.default_rng(0).integers(-127, 128, (12, 24, 3, 3)).astype(np.int8),
    "ws": np.linspace(0.001, 0.003, 12, dtype=np.float32), "ws1": np.float32(0.002),
    "z12": np.zeros(12, np.int8), "z24": np.zeros(24, np.int8), "ws24": np.full(24, 0.002, np.float32),
    "wf": np.random.default_rng(1).standard_normal((12, 24, 3, 3)).astype(np.float32) / 8,
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


def check_positive(text: str, op_type: str, folder: Path, opset: int = 17) -> onnx.ModelProto:
    result, patched = run_patch(graph(text, CONST, opset=opset), folder)
    assert [s["reason"] for s in result.report["sites"]] == [""]
    assert fused_types(patched) == [op_type] and patched is not None
    assert result.report["verify"]["passed"]
    kinds = [n.op_type for n in patched.graph.node]
    assert not {"Concat", "Conv"} & set(kinds)
    return patched


@pytest.mark.parametrize("name", POSITIVE)
def test_quantised_sites_are_fused_and_equal(name: str, tmp_path: Path) -> None:
    check_positive(*POSITIVE[name], tmp_path)


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


def test_a_source_that_is_dequantised_beside_a_float_filter_is_an_ordinary_site(tmp_path: Path) -> None:
    _, patched = run_patch(graph(SOURCES + "x = Conv(c, wf, k) y = Relu(x)", CONST), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"]


def test_filters_from_float_constants_round_as_the_standard_says() -> None:
    from cutefuse.sites.quant_facts import Weight

    scale = np.full(2, 0.5)

    class Constants:
        def constant(self, _: str) -> np.ndarray:
            return np.float32([0.25, 0.75, -0.25, 500]).reshape(2, 2, 1, 1)

    weight = Weight(Constants(), "w", (2, 2, 1, 1), scale, rounded=False)  # type: ignore[arg-type]
    assert weight.make().ravel().tolist() == [0, 2, 0, 127]


# ---- the host side ----


def good(variant: str = "CuteQConcatConv2Relu", layout: int = CHANNELS_LAST, **changes: Any) -> kernels.Call:
    attrs: dict[str, Any] = {"channels": (64, 24), "kernel_shape": (3, 3), "pads": (1, 1, 1, 1),
                             "packed_sizes": (576, 576), "input_scales": (0.1, 0.2), "output_scale": 0.5}  # fmt: skip
    inputs = [kernels.Tensor((2, c, 20, 20), "int8", layout) for c in (64, 24)]
    inputs += [kernels.Tensor((32, 1152), "int8", LINEAR), *[kernels.Tensor((32,), "float32", LINEAR)] * 2]
    y = kernels.Tensor((2, 32, 20, 20), "int8" if variant.endswith("Q") else "float32",
                       layout if variant.endswith("Q") else CHANNELS_LAST)  # fmt: skip
    return kernels.Call(variant, inputs, [y], attrs | changes)


def swapped(call: kernels.Call, index: int, **changes: Any) -> kernels.Call:
    inputs = [replace(t, **changes) if i == index else t for i, t in enumerate(call.inputs)]
    return replace(call, inputs=inputs)


def big_batch(images: int) -> kernels.Call:
    """Fewer than 2^31 pixels, but not in blocks of 32 channels, of which the first source has two."""
    call = good("CuteQConcatConv2ReluQ", BLOCKS32)
    call = replace(call, outputs=[replace(call.outputs[0], dims=(images, 32, 20, 20))])
    for i, channels in enumerate((64, 24)):
        call = swapped(call, i, dims=(images, channels, 20, 20))
    return call


@pytest.mark.parametrize("layout", [CHANNELS_LAST, BLOCKS32])
def test_good_calls_are_legal_and_tiles_depend_on_the_scales(layout: int) -> None:
    for variant in (
        "CuteQConcatConv2Relu",
        "CuteQConcatConv2ReluQ",
    ):  # to float32, which Hopper's do not write; to int8
        assert kernels.reject(good(variant, layout)) is None
        one_scale, takes_hopper = good(variant, layout, input_scales=(0.1, 0.1)), (variant[-1], layout) == ("Q", 1)
        drains, hopper = {12, 13, 14, 19}, {221, 222, 223, 224} if takes_hopper else set()
        assert set(kernels.configs(replace(good(variant, layout), sm=80))) == drains
        assert set(kernels.configs(replace(one_scale, sm=80))) == drains | {1, 15, 17}
        assert set(kernels.configs(good(variant, layout))) == drains | hopper
        own, one = (set(kernels.configs(c)) - drains for c in (good(variant, layout), one_scale))
        assert own < one and all(tile in {1, 15, 17} or (takes_hopper and tile > 200) for tile in one)


def of_width(width: int, **changes: Any) -> kernels.Call:
    """A good call on images of that width; -1: not known yet."""
    call = good(**changes)
    call = replace(call, outputs=[replace(call.outputs[0], dims=(2, 32, 20, width))])
    for i, channels in enumerate((64, 24)):
        call = swapped(call, i, dims=(2, channels, 20, width))
    return call


def test_tiles_over_filter_rows_need_wide_images_and_neighbouring_pixels() -> None:
    rows = {15, 16, 18, 19}
    same = {"input_scales": (0.1, 0.1)}
    for width, tiles in ((19, {15, 19}), (18, set()), (37, rows), (36, {15, 19}), (-1, rows)):
        assert rows & set(kernels.configs(of_width(width, **same))) == tiles, width
    for wrong in ({"strides": (1, 2)}, {"dilations": (1, 2), "pads": (1, 2, 1, 2)}):
        call = of_width(-1, **same, **wrong)
        assert kernels.reject(call) is None and not rows & set(kernels.configs(call))
    with pytest.raises(kernels.KernelError, match="tile 19 cannot run images this narrow"):
        call = of_width(17)
        data = [replace(t, data=4096) for t in (*call.inputs, *call.outputs)]
        kernels.run(replace(call, inputs=data[:-1], outputs=data[-1:], config=19))


def test_the_workspace_of_a_narrow_image_serves_a_wide_one() -> None:
    # TensorRT asks at a profile's corners; between them a tile may run that the narrow image does not allow.
    for narrow, wide in ((8, 43), (17, 64)):
        assert kernels.workspace_bytes(of_width(narrow)) >= kernels.workspace_bytes(of_width(wide)) > 0


REFUSED = {
    "scale 0": (good(input_scales=(0.1, 0.0)), "the scale of source 1 is 0"),
    "scale NaN": (good(input_scales=(float("nan"), 0.1)), "the scale of source 0 is nan"),
    "too few scales": (good(input_scales=(0.1,)), "input_scales has 1 values, there are 2 sources"),
    "output scale": (good("CuteQConcatConv2ReluQ", output_scale=-1.0), "output_scale is -1"),
    "output type": (good(output_type=7), "output_type 7 is none of"),
    "output in float16": (good(output_type=10), "the output must be a channels-last float16 tensor"),
    "float16 source": (swapped(good(), 0, dtype="float16"), "sources must be int8"),
    "linear source": (swapped(good(), 1, layout=LINEAR), "pass all in kHWC16 or all in kCHW32"),
    "mixed layouts": (swapped(good(), 1, layout=BLOCKS32), "all in kHWC16 or all in kCHW32"),
    "pixels of 24": (swapped(good(), 1, ld=24), "must be a multiple of 16"),
    "pixel stride of blocks": (swapped(good(layout=BLOCKS32), 1, ld=32), "kCHW32 has none"),
    "rank": (swapped(good(), 0, dims=(64, 20, 20)), "rank 3"),
    "height": (swapped(good(), 1, dims=(2, 24, 10, 20)), "source 1 is 2x10x20 (NHW) enlarged by 1, source 0 is"),
    "channels": (swapped(good(), 1, dims=(2, 32, 20, 20)), "source 1 has 32 channels, attribute channels says 24"),
    "packed size": (good(packed_sizes=(576, 64)), "packed_sizes[1] is 64"),
    "float filter": (swapped(good(), 2, dtype="float16"), "linear int8 matrix"),
    "filter columns": (swapped(good(), 2, dims=(32, 1151)), "is 32x1151, 1152 columns"),
    "filter scales": (swapped(good(), 3, dims=(31,)), "the scales of the filter must be a float32 vector of 32"),
    "bias in int8": (swapped(good(), 4, dtype="int8"), "the bias must be a float32 vector of 32"),
    "stride": (good(strides=(0, 1)), "strides[0] is 0"),
    "filter size": (good(kernel_shape=(17, 3)), "kernel_shape[0] is 17"),
    "clip": (good("CuteQConcatConv2Clip", lo=1.0, hi=0.0), "clip from 1 to 0 is empty"),
    "big filter": (good(kernel_shape=(16, 16), pads=(0, 0, 0, 0), packed_sizes=(16384, 16384), dilations=(2, 2)),
                   "does not fit into"),
    "dilation": (swapped(good(dilations=(1, 16)), 0, ld=1 << 28), "a dilation over 2^31 bytes"),
    "blocks": (big_batch(4_000_000), "more than 2^31 blocks of kCHW32"),
    "overflow": (swapped(good(channels=(131072, 24)), 0, dims=(2, 131072, 20, 20)), "overflow 32-bit sums"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_illegal_calls_are_refused_in_one_sentence(name: str) -> None:
    call, words = REFUSED[name]
    reason = kernels.reject(call) or ""
    assert reason.startswith("quant_concat_conv: ") and words in reason
    assert not re.search(r"\.\s", reason)


def test_long_reductions_of_several_sources_leave_the_tiles_that_drain() -> None:
    channels = (70000, 70000)
    call = good(channels=channels, kernel_shape=(1, 1), pads=(0, 0, 0, 0), packed_sizes=(70016, 70016),
                input_scales=(0.1, 0.1))  # fmt: skip
    inputs = [kernels.Tensor((2, c, 20, 20), "int8", CHANNELS_LAST) for c in channels]
    call = replace(call, inputs=[*inputs, kernels.Tensor((32, 140032), "int8", LINEAR), *call.inputs[3:]])
    assert kernels.reject(call) is None and set(kernels.configs(call)) == {12, 13, 14}


@pytest.mark.parametrize("name", ["2_sources_Relu", "8_sources_Silu", "2_sources_Relu_to_int8"])
def test_plugins_offer_both_int8_formats_and_never_mix_them(name: str) -> None:
    call = OPERATOR.call(CASES[name], CASES[name].dtypes[-1])
    plugin = Host().build((call.op_type, call.attrs), [Input(t.dims, t.dtype) for t in call.inputs]).check()
    floats = {"float32": "kHWC", "bfloat16": "kHWC8"}.get(call.outputs[0].dtype, "")
    assert plugin.findings == [] and [c["formats"] for c in plugin.report["combinations"]] == [
        [f] * (len(call.inputs) - 3) + ["kLINEAR"] * 3 + [f if call.op_type.endswith("Q") else floats]
        for f in ("kCHW32", "kHWC16")
    ]
    for i in range(2):
        plugin.context(combination=i).set_shapes([t.dims for t in call.inputs])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_float_sources_are_refused_at_type_inference(dtype: str) -> None:
    call = OPERATOR.call(CASES["2_sources_Relu"], "float32")
    inputs = [Input(t.dims, dtype if i < 2 else t.dtype) for i, t in enumerate(call.inputs)]
    with pytest.raises(HostError, match="getOutputDataTypes"):
        Host().build((call.op_type, call.attrs), inputs).check()


def test_packing_keeps_int8() -> None:
    assert pack(np.ones((2, 3, 1, 1), np.int8), [1, 2]).dtype == np.int8
