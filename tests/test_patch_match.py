"""Which graphs are fused and which are not: every positive graph is proven equal, every negative one says why."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import FILTER, bn_weights, fused_types, graph, run_patch, weights

NEWEST = onnx.defs.onnx_opset_version()
JOIN = "c = Concat<axis=1>(a, b) "
CONV = JOIN + "x = Conv<pads=[1,1,1,1]>(c, w, k) "
WITH_BN = weights(w=FILTER, k=(12,)) | bn_weights()
SCALE = {"s": np.linspace(0.5, 2, 12, dtype=np.float32).reshape(12, 1, 1), "t": np.float32([[[[0.25]]]])}
BOUNDS = {"lo": np.float32(-0.25), "hi": np.float32(0.5)}
WITH_ROOT = weights(w=FILTER, k=(12,)) | {
    "root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)
}  # fmt: skip

POSITIVE = {
    "conv alone": (CONV + "y = Identity(x)", None, "CuteConcatConv2"),
    "relu": (CONV + "y = Relu(x)", None, "CuteConcatConv2Relu"),
    "no bias": (JOIN + "x = Conv(c, w) y = Relu(x)", None, "CuteConcatConv2Relu"),
    "leaky relu": (CONV + "y = LeakyRelu<alpha=0.125>(x)", None, "CuteConcatConv2LeakyRelu"),
    "sigmoid": (CONV + "y = Sigmoid(x)", None, "CuteConcatConv2Sigmoid"),
    "tanh": (CONV + "y = Tanh(x)", None, "CuteConcatConv2Tanh"),
    "silu": (CONV + "g = Sigmoid(x) y = Mul(x, g)", None, "CuteConcatConv2Silu"),
    "gelu": (CONV + "d = Div(x, root) r = Erf(d) p = Add(r, one) h = Mul(x, p) y = Mul(h, half)", WITH_ROOT,
             "CuteConcatConv2Gelu"),
    "silu, gate first": (CONV + "g = Sigmoid(x) y = Mul(g, x)", None, "CuteConcatConv2Silu"),
    "hardsigmoid times x": (
        CONV + "g = HardSigmoid<alpha=0.16666667, beta=0.5>(x) y = Mul(x, g)", None, "CuteConcatConv2HardSwish",
    ),
    "batch norm": (CONV + "z = BatchNormalization(x, gamma, beta, mean, var) y = Relu(z)", WITH_BN,
                   "CuteConcatConv2Relu"),
    "batch norm without bias and activation": (
        JOIN + "x = Conv(c, w) y = BatchNormalization<epsilon=0.01>(x, gamma, beta, mean, var)", WITH_BN,
        "CuteConcatConv2"),
    "caffe2 batch norm": (
        CONV + "z = BatchNormalization(x, gamma, beta, mean, var) u = Mul(z, s) v = Add(t, u) y = Relu(v)",
        WITH_BN | SCALE, "CuteConcatConv2Relu"),
    "steps as Div and Sub": (CONV + "u = Div(x, s) v = Sub(u, s) z = Sub(t, v) y = Relu(z)",
                             weights(w=FILTER, k=(12,)) | SCALE, "CuteConcatConv2Relu"),
    "bias as Add": (JOIN + "x = Conv(c, w) u = Add(x, s) y = Relu(u)", weights(w=FILTER) | SCALE,
                    "CuteConcatConv2Relu"),
    "strides, dilations, asymmetric pads": (
        JOIN + "x = Conv<strides=[2,1], dilations=[1,2], pads=[0,2,1,3]>(c, w, k) y = Relu(x)", None,
        "CuteConcatConv2Relu"),
    "auto_pad VALID": (JOIN + 'x = Conv<auto_pad="VALID">(c, w, k) y = Relu(x)', None, "CuteConcatConv2Relu"),
    "auto_pad SAME_UPPER": (JOIN + 'x = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(c, w, k) y = Relu(x)', None,
                            "CuteConcatConv2Relu"),
    "auto_pad SAME_LOWER": (JOIN + 'x = Conv<auto_pad="SAME_LOWER", strides=[2,3]>(c, w, k) y = Relu(x)', None,
                            "CuteConcatConv2Relu"),
    "axis -3": ("c = Concat<axis=-3>(a, b) x = Conv(c, w, k) y = Relu(x)", None, "CuteConcatConv2Relu"),
    "one source": ("c = Concat<axis=1>(b) x = Conv(c, w, k) y = Relu(x)", weights(w=(12, 16, 3, 3), k=(12,)),
                   "CuteConcatConv1Relu"),
    "the same source twice": ("c = Concat<axis=1>(a, b, a) x = Conv(c, w, k) y = Relu(x)",
                              weights(w=(12, 32, 3, 3), k=(12,)), "CuteConcatConv3Relu"),
    "eight sources": ("c = Concat<axis=1>(a, a, a, a, b, b, a, a) x = Conv(c, w, k) y = Relu(x)",
                      weights(w=(12, 80, 1, 1), k=(12,)), "CuteConcatConv8Relu"),
    "nested concats": ("d = Concat<axis=1>(a, b) c = Concat<axis=1>(d, a) x = Conv(c, w, k) y = Relu(x)",
                       weights(w=(12, 32, 3, 3), k=(12,)), "CuteConcatConv3Relu"),
    "dropout and identity between": (JOIN + "d = Identity(c) e = Dropout(d) x = Conv(e, w, k) y = Relu(x)", None,
                                     "CuteConcatConv2Relu"),
    "filter behind a Transpose": (
        JOIN + "v = Transpose<perm=[3,2,0,1]>(w) x = Conv(c, v, k) y = Relu(x)",
        weights(w=(3, 3, 24, 12), k=(12,)), "CuteConcatConv2Relu"),
    "filter behind Cast and Identity": (
        JOIN + "u = Cast<to=1>(w) v = Identity(u) x = Conv(c, v, k) y = Relu(x)",
        {"w": np.ones(FILTER), "k": np.ones(12, np.float32)}, "CuteConcatConv2Relu"),
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIVE)
def test_a_legal_site_becomes_one_node_and_computes_the_same(name: str, tmp_path: Path) -> None:
    body, values, op_type = POSITIVE[name]
    result, patched = run_patch(graph(body, values), tmp_path)
    assert fused_types(patched) == [op_type]
    assert result.report["verify"]["passed"] and result.exit_code == 0
    kept = {n.op_type for n in patched.graph.node if n.domain == ""}
    assert not kept & {"Conv", "Concat", "BatchNormalization", "Relu", "Dropout", "Transpose", "Cast"}
    onnx.checker.check_model(patched, full_check=True)


CLIP = {
    9: CONV + "y = Clip<min=-0.25, max=0.5>(x)",
    11: CONV + "y = Clip(x, lo, hi)",
}


@pytest.mark.slow
@pytest.mark.parametrize("opset", sorted({9, 10, 11, 12, 13, 14, 15, 17, 18, 20, 21, 22, 23, NEWEST}))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_opset_has_a_body_that_computes_the_same(opset: int, dtype: str, tmp_path: Path) -> None:
    values = weights(dtype=dtype, w=FILTER, k=(12,))
    bounds = {k: v.astype(dtype) for k, v in BOUNDS.items()} if opset >= 11 else {}
    clip = CLIP[11 if opset >= 11 else 9]
    both = clip.replace("y =", "y1 =") + " d = Concat<axis=1>(b, a) z = Conv<strides=[2,2]>(d, w) y2 = LeakyRelu(z)"
    result, patched = run_patch(graph(both, values | bounds, opset=opset, dtype=dtype, outputs=("y1", "y2")), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Clip", "CuteConcatConv2LeakyRelu"]
    assert result.report["verify"]["passed"], result.report["verify"]
    onnx.checker.check_model(patched, full_check=True)


def test_the_default_domain_may_be_spelled_out(tmp_path: Path) -> None:
    model = graph(CONV + "y = Relu(x)")
    for node in model.graph.node:
        node.domain = "ai.onnx"
    _, patched = run_patch(model, tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2Relu"]


def test_operators_of_other_domains_are_not_taken_for_the_standards(tmp_path: Path) -> None:
    model = graph(CONV + "y = Relu(x)")
    model.opset_import.append(onnx.helper.make_opsetid("com.mine", 1))
    model.graph.node[2].domain = "com.mine"
    _, patched = run_patch(model, tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2"]
    model.graph.node[0].domain = "com.mine"
    (tmp_path / "model.cutefuse.onnx").unlink()
    (tmp_path / "model.patch.json").unlink()
    result, _ = run_patch(model, tmp_path, verify=False)
    assert result.report["sites"] == []


def test_hardswish_of_the_standard_is_fused(tmp_path: Path) -> None:
    _, patched = run_patch(graph(CONV + "y = HardSwish(x)", opset=14), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2HardSwish"]


@pytest.mark.parametrize("opset", [9, 13, 14, 20, NEWEST])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_opset_has_a_body_for_gelu(opset: int, dtype: str, tmp_path: Path) -> None:
    body, values, op_type = POSITIVE["gelu"]
    assert values is not None
    typed = {name: value.astype(dtype) for name, value in values.items()}
    result, patched = run_patch(graph(body, typed, opset=opset, dtype=dtype), tmp_path)
    assert fused_types(patched) == [op_type] and result.report["verify"]["passed"]
    onnx.checker.check_model(patched, full_check=True)


def gelu(op_type: str, domain: str = "", **attrs: str) -> onnx.ModelProto:
    """A Conv and an operator of this name."""
    model = graph(CONV + "y = Gelu(x)", opset=20)
    if domain:
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    model.graph.node[2].CopyFrom(onnx.helper.make_node(op_type, ["x"], ["y"], name="g", domain=domain, **attrs))
    return model


@pytest.mark.parametrize("model", [gelu("Gelu"), gelu("Gelu", approximate="none"), gelu("Gelu", "com.microsoft")])
def test_gelu_of_the_standard_and_of_onnx_runtime_is_fused(model: onnx.ModelProto, tmp_path: Path) -> None:
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Gelu"] and result.report["verify"]["passed"]


@pytest.mark.parametrize("model", [
    gelu("Gelu", approximate="tanh"), gelu("QuickGelu", "com.microsoft"), gelu("FastGelu", "com.microsoft"),
    gelu("Gelu", "com.mine"),
])  # fmt: skip
def test_a_gelu_that_is_another_function_stays(model: onnx.ModelProto, tmp_path: Path) -> None:
    _, patched = run_patch(model, tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2"]


@pytest.mark.skipif(NEWEST < 24, reason="Swish came with opset 24")
def test_swish_of_the_standard_is_fused_as_silu_only_with_alpha_one(tmp_path: Path) -> None:
    # ONNX Runtime has no kernel for Swish in every release: only the match is looked at.
    _, patched = run_patch(graph(CONV + "y = Swish(x)", opset=24), tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2Silu"]
    (tmp_path / "model.cutefuse.onnx").unlink()
    _, patched = run_patch(graph(CONV + "y = Swish<alpha=1.5>(x)", opset=24), tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2"]


def test_bfloat16_is_fused_and_proven_with_the_reference_evaluator(tmp_path: Path) -> None:
    values = weights(dtype="bfloat16", w=FILTER, k=(12,))
    for activation in ("y = Relu(x)", "y = LeakyRelu<alpha=0.125>(x)"):
        result, patched = run_patch(graph(CONV + activation, values, opset=22, dtype="bfloat16"), tmp_path)
        assert len(fused_types(patched)) == 1 and result.report["verify"]["passed"]
        assert "reference" in result.report["verify"]["backend"]
        (tmp_path / "model.cutefuse.onnx").unlink()
        (tmp_path / "model.patch.json").unlink()


QDQ = {"qs": np.float32(0.1), "qz": np.uint8(128), "ws": np.float32(0.1), "wz": np.int8(0)}
NEGATIVE = {
    "rows joined": ("c = Concat<axis=2>(a, a) y = Conv(c, w)", weights(w=(12, 8, 3, 3)), "axis 2; only"),
    "batches joined": ("c = Concat<axis=0>(a, a) y = Conv(c, w)", weights(w=(12, 8, 3, 3)), "axis 0; only"),
    "columns joined from the right": ("c = Concat<axis=-1>(a, a) y = Conv(c, w)",
                                      weights(w=(12, 8, 3, 3)), "axis -1; only"),
    "grouped": (JOIN + "x = Conv<group=2>(c, w, k) y = Relu(x)", weights(w=(24, 12, 3, 3), k=(24,)),
                "2 groups; only group=1"),
    "filter computed": (JOIN + "v = Relu(w) x = Conv(c, v, k) y = Relu(x)", None, "made of constants by Relu"),
    "bias computed": (JOIN + "v = RandomNormalLike(k) x = Conv(c, w, v) y = Relu(x)", None, "computed at run time"),
    "nine sources": ("c = Concat<axis=1>(a, a, a, a, a, a, a, a, a) y = Conv(c, w)",
                     weights(w=(12, 72, 1, 1)), "joins 9 tensors, at most 8"),
    "huge filter": (JOIN + "x = Conv<pads=[20,20,20,20]>(c, w) y = Relu(x)", weights(w=(4, 24, 33, 33)),
                    r"kernel_shape\[0\] is 33, it must lie within 1..16"),
    "huge pad": (JOIN + "x = Conv<pads=[4097,0,0,0]>(c, w) y = Relu(x)", weights(w=(4, 24, 1, 1)),
                 r"pads\[0\] is 4097, it must lie within 0..4096"),
    "quantised input": (
        JOIN + "q = QuantizeLinear(c, qs, qz) d = DequantizeLinear(q, qs, qz) x = Conv(d, w, k) y = Relu(x)",
        weights(w=FILTER, k=(12,)) | QDQ, "quantised site"),
    "quantised filter": (
        JOIN + "v = DequantizeLinear(q, ws, wz) x = Conv(c, v, k) y = Relu(x)",
        weights(k=(12,)) | QDQ | {"q": np.ones(FILTER, np.int8)}, "quantised site"),
    "negative variance": (
        CONV + "z = BatchNormalization(x, gamma, beta, mean, v) y = Relu(z)",
        WITH_BN | {"v": np.full(12, -1, np.float32)}, "NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEGATIVE)
def test_an_illegal_site_is_refused_with_its_reason_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    body, values, reason = NEGATIVE[name]
    result, patched = run_patch(graph(body, values), tmp_path)
    assert patched is None and result.exit_code == 3
    (site,) = result.report["sites"]
    judge = "quant_concat_conv" if name.startswith("quantised") else "concat_conv"
    assert site["status"] == "refused" and site["operator"] == judge
    assert re.search(reason, site["reason"]), site["reason"]
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


NO_CANDIDATE = {
    "conv without concat": "y = Conv(a, w)",
    "pooling between": JOIN.replace("c =", "d =") + "c = MaxPool<kernel_shape=[2,2]>(d) y = Conv(c, v)",
    "concat alone": JOIN + "y = Relu(c)",
    "pooling": JOIN + "y = MaxPool<kernel_shape=[2,2]>(c)",
}


@pytest.mark.parametrize("name", NO_CANDIDATE)
def test_a_graph_without_the_pattern_has_no_candidates(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(graph(NO_CANDIDATE[name], weights(w=(12, 8, 3, 3), v=(24, 24, 3, 3))), tmp_path)
    assert result.report["sites"] == [] and patched is None and result.exit_code == 3


# Where a chain must end: the nodes after the end stay in the graph.
STOPS = {
    "conv output read twice": (CONV + "y1 = Relu(x) y2 = Neg(x)", "CuteConcatConv2", {"Relu", "Neg"}),
    "conv output is a graph output": (
        CONV.replace("x =", "y1 =") + "y2 = Relu(y1)", "CuteConcatConv2", {"Relu"}),
    "conv output before a batch norm is a graph output": (
        CONV.replace("x =", "y1 =") + "y2 = BatchNormalization(y1, gamma, beta, mean, var)", "CuteConcatConv2",
        {"BatchNormalization"}),
    "batch norm output is a graph output": (
        CONV + "y1 = BatchNormalization(x, gamma, beta, mean, var) y2 = Relu(y1)", "CuteConcatConv2", {"Relu"}),
    "sigmoid is a graph output": (CONV + "y1 = Sigmoid(x) y2 = Mul(x, y1)", "CuteConcatConv2", {"Sigmoid", "Mul"}),
    "nested concat is a graph output": (
        "y1 = Concat<axis=1>(a) c = Concat<axis=1>(y1, b) x = Conv(c, w, k) y2 = Relu(x)", "CuteConcatConv2Relu",
        {"Concat"}),
    "batch norm read twice": (
        CONV + "z = BatchNormalization(x, gamma, beta, mean, var) y1 = Relu(z) y2 = Tanh(z)", "CuteConcatConv2",
        {"Relu", "Tanh"}),
    "erf read twice": (
        CONV + "d = Div(x, root) r = Erf(d) p = Add(r, one) h = Mul(x, p) y1 = Mul(h, half) y2 = Neg(r)",
        "CuteConcatConv2", {"Div", "Erf", "Add", "Mul", "Neg"}),
    "sigmoid read twice": (CONV + "g = Sigmoid(x) y1 = Mul(x, g) y2 = Neg(g)", "CuteConcatConv2",
                           {"Sigmoid", "Mul", "Neg"}),
    "sigmoid times another": (CONV + "g = Sigmoid(x) y1 = Mul(g, g) y2 = Neg(g)", "CuteConcatConv2Sigmoid",
                              {"Mul", "Neg"}),
    "hardsigmoid of another slope": (CONV + "g = HardSigmoid(x) y1 = Mul(x, g) y2 = Neg(y1)", "CuteConcatConv2",
                                     {"HardSigmoid", "Mul", "Neg"}),
    "clip between computed bounds": (CONV + "u = ReduceMean<keepdims=0>(a) y1 = Clip(x, lo, u) y2 = Neg(y1)",
                                     "CuteConcatConv2", {"ReduceMean", "Clip", "Neg"}),
    "clip of nothing": (CONV + "y1 = Clip(x, hi, lo) y2 = Neg(y1)", "CuteConcatConv2", {"Clip", "Neg"}),
    "clip bound is the data": (CONV + "s = ReduceMax<keepdims=0>(x) y1 = Clip(s, s, s) y2 = Neg(x)",
                               "CuteConcatConv2", {"ReduceMax", "Clip", "Neg"}),
    "add along columns": (CONV + "y1 = Add(x, row) y2 = Neg(y1)", "CuteConcatConv2", {"Add", "Neg"}),
    "add of a residual": (CONV + "u = Relu(x) y1 = Add(u, u) y2 = Neg(y1)", "CuteConcatConv2Relu", {"Add", "Neg"}),
    "training batch norm": (
        CONV + "y1, m1, v1 = BatchNormalization<training_mode=1>(x, gamma, beta, mean, var) y2 = Neg(y1)",
        "CuteConcatConv2", {"BatchNormalization", "Neg"}),
    "unknown activation": (CONV + "y1 = Softplus(x) y2 = Neg(y1)", "CuteConcatConv2", {"Softplus", "Neg"}),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_a_chain_ends_before_what_is_not_exactly_ours(name: str, tmp_path: Path) -> None:
    body, op_type, kept = STOPS[name]
    values = WITH_BN | BOUNDS | WITH_ROOT | {"row": np.arange(7, dtype=np.float32)}
    ranks = graph(body, values, outputs=("y1", "y2")) if "ReduceMax" not in body else _scalar_output(body, values)
    result, patched = run_patch(ranks, tmp_path, verify="training" not in name)
    assert fused_types(patched) == [op_type]
    assert {n.op_type for n in patched.graph.node if n.domain == ""} == kept


def _scalar_output(body: str, values: dict[str, np.ndarray]) -> onnx.ModelProto:
    model = graph(body.replace("ReduceMax<keepdims=0>", "Neg"), values, outputs=("y1", "y2"))
    next(n for n in model.graph.node if n.output[0] == "s").CopyFrom(
        onnx.helper.make_node("ReduceMax", ["x"], ["s"], keepdims=0, name="reduce")
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    return model


def test_a_concat_with_other_readers_stays_and_every_conv_fuses_on_its_own(tmp_path: Path) -> None:
    body = JOIN + "x1 = Conv(c, w, k) y1 = Relu(x1) x2 = Conv<dilations=[2,2]>(c, w) y2 = Tanh(x2) y3 = Neg(c)"
    shapes = {"a": (1, 8, 9, 7), "b": (1, 16, 9, 7)}
    result, patched = run_patch(graph(body, outputs=("y1", "y2", "y3")), tmp_path, shapes=shapes)
    assert fused_types(patched) == ["CuteConcatConv2Relu", "CuteConcatConv2Tanh"]
    assert [n.op_type for n in patched.graph.node if n.domain == ""] == ["Concat", "Neg"]
    assert [s["bytes_saved"] for s in result.report["sites"]] == [0, 2 * 12 * 5 * 3 * 4], "only what Tanh reads"
    stored = [t.name for t in patched.graph.initializer]
    assert len(stored) == 3, "the shared filter is packed once, the biases differ"


def test_the_traffic_of_a_concat_is_counted_once_and_only_when_it_goes(tmp_path: Path) -> None:
    body = JOIN + "x1 = Conv(c, w, k) y1 = Relu(x1) x2 = Conv(c, w) y2 = Tanh(x2)"
    shapes = {"a": (1, 8, 9, 7), "b": (1, 16, 9, 7)}
    result, patched = run_patch(graph(body, outputs=("y1", "y2")), tmp_path, shapes=shapes)
    assert "Concat" not in {n.op_type for n in patched.graph.node}
    assert [s["bytes_saved"] for s in result.report["sites"]] == [2 * 24 * 9 * 7 * 4, 2 * 12 * 7 * 5 * 4]


def test_a_concat_that_is_a_graph_output_stays(tmp_path: Path) -> None:
    _, patched = run_patch(graph("y2 = Concat<axis=1>(a, b) y1 = Conv(y2, w, k)", outputs=("y1", "y2")), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2"] and patched.graph.node[0].op_type == "Concat"


def test_a_nested_concat_read_elsewhere_is_a_source_of_its_own(tmp_path: Path) -> None:
    body = "d = Concat<axis=1>(a, b) c = Concat<axis=1>(d, a) y1 = Conv(c, w, k) y2 = Neg(d)"
    _, patched = run_patch(graph(body, weights(w=(12, 32, 3, 3), k=(12,)), outputs=("y1", "y2")), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2"]


def test_a_nested_concat_of_odd_float32_channels_is_flattened_too(tmp_path: Path) -> None:
    body = "d = Concat<axis=1>(a, b) c = Concat<axis=1>(d, e) x = Conv(c, w, k) y = Relu(x)"
    inputs = {"a": "n,7,9,7", "b": "n,1,9,7", "e": "n,16,9,7"}
    result, patched = run_patch(graph(body, inputs=inputs), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv3Relu"] and result.report["verify"]["passed"]
    assert [n.op_type for n in patched.graph.node] == ["CuteConcatConv3Relu"]


def test_one_unknown_channel_count_follows_from_the_filter(tmp_path: Path) -> None:
    _, patched = run_patch(graph(CONV + "y = Relu(x)", inputs={"a": "n,8,9,7", "b": "n,m,9,7"}), tmp_path, verify=False)
    fused = next(n for n in patched.graph.node if n.domain == "cutefuse")
    assert next(a for a in fused.attribute if a.name == "channels").ints == [8, 16]


def test_two_unknown_channel_counts_are_refused(tmp_path: Path) -> None:
    model = graph(CONV + "y = Identity(x)", inputs={"a": "n,l,9,7", "b": "n,m,9,7"})
    result, _ = run_patch(model, tmp_path)
    assert "channel count of source 'a' is unknown" in result.report["sites"][0]["reason"]


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    result, _ = run_patch(graph(CONV + "y = Relu(x)", inputs={"a": "0,8,9,7", "b": "n,16,9,7"}), tmp_path)
    assert "source 'a' is empty (0x8x9x7)" in result.report["sites"][0]["reason"]


HALVES = (
    "s = Shape(b) h = Gather(s, one) j = Add(h, p1) q = Div(j, two) i = Unsqueeze<axes=[0]>(q) "
    "v = Slice(b, zero, i, axis) f = Slice(b, i, all, axis) "
    "c = Concat<axis=1>(v, a, f) x = Conv(c, w, k) y = Relu(x)"
)
INDICES = {n: np.array(v, np.int64) for n, v in
           {"one": 1, "p1": 1, "two": 2, "zero": [0], "all": [2**31], "axis": [1]}.items()}  # fmt: skip


def test_channels_are_known_behind_the_shape_arithmetic_of_exporters(tmp_path: Path) -> None:
    result, patched = run_patch(graph(HALVES, weights(w=FILTER, k=(12,)) | INDICES, opset=11), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv3Relu"] and result.report["verify"]["passed"]
    assert result.report["sites"][0]["title"].startswith("8+8+8->12")
    assert [n.op_type for n in patched.graph.node].count("Slice") == 2, "only the fused nodes are replaced"


def test_shape_arithmetic_over_unknown_sizes_stays_unknown(tmp_path: Path) -> None:
    halves = HALVES.replace("Relu(x)", "Identity(x)")
    model = graph(halves, weights(w=FILTER, k=(12,)) | INDICES, opset=11, inputs={"a": "n,8,9,7", "b": "n,m,9,7"})
    result, _ = run_patch(model, tmp_path)
    assert "channel count of source 'v' is unknown" in result.report["sites"][0]["reason"]


def test_same_padding_with_a_stride_needs_a_static_size(tmp_path: Path) -> None:
    body = JOIN + 'x = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(c, w, k) y = Relu(x)'
    result, _ = run_patch(graph(body, inputs={"a": "n,8,h,q", "b": "n,16,h,q"}), tmp_path)
    assert "needs a static input size" in result.report["sites"][0]["reason"]


def test_same_padding_without_stride_works_on_dynamic_sizes(tmp_path: Path) -> None:
    body = JOIN + 'x = Conv<auto_pad="SAME_LOWER">(c, w, k) y = Relu(x)'
    result, patched = run_patch(graph(body, inputs={"a": "n,8,h,q", "b": "n,16,h,q"}), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]


@pytest.mark.parametrize("rank", [3, 5])
def test_one_and_three_dimensional_convolutions_are_refused(rank: int, tmp_path: Path) -> None:
    sizes = ",9" * (rank - 2)
    model = graph(JOIN + "x = Conv(c, w) y = Relu(x)", weights(w=(12, 24) + (3,) * (rank - 2)), rank=rank,
                  inputs={"a": f"n,8{sizes}", "b": f"n,16{sizes}"})  # fmt: skip
    result, _ = run_patch(model, tmp_path)
    assert f"rank {rank}; only 2-D" in result.report["sites"][0]["reason"]


def test_double_precision_is_refused(tmp_path: Path) -> None:
    values = weights(dtype="float64", w=FILTER, k=(12,))
    result, _ = run_patch(graph(CONV + "y = Relu(x)", values, dtype="float64"), tmp_path)
    assert "float64" in result.report["sites"][0]["reason"]


def test_a_filter_that_callers_may_replace_is_no_constant(tmp_path: Path) -> None:
    model = graph(CONV + "y = Relu(x)")
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, FILTER))
    result, _ = run_patch(model, tmp_path)
    assert "'w' is also a graph input" in result.report["sites"][0]["reason"]


def test_before_ir_4_listed_initializers_are_constants_and_stay_so(tmp_path: Path) -> None:
    model = graph(CONV + "y = Relu(x)", opset=9)
    model.ir_version = 3
    for name, shape in (("w", FILTER), ("k", (12,))):
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, 1, shape))
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
    assert [v.name for v in patched.graph.input] == ["a", "b"]


def test_a_normalisation_that_would_underflow_in_float16_stays_behind_the_site(tmp_path: Path) -> None:
    values = weights(dtype="float16", w=FILTER, k=(12,)) | bn_weights(dtype="float16")
    values["gamma"] = np.full(12, 1e-6, np.float16)
    body = CONV + "z = BatchNormalization(x, gamma, beta, mean, var) y = Relu(z)"
    result, patched = run_patch(graph(body, values, dtype="float16"), tmp_path)
    assert [n.op_type for n in patched.graph.node] == ["CuteConcatConv2", "BatchNormalization", "Relu"]
    assert "loses precision" in result.report["sites"][0]["notes"][0] and result.report["verify"]["passed"]


def test_two_types_under_one_op_type_need_cast_like(tmp_path: Path) -> None:
    body = (
        JOIN + "y1 = Conv(c, w, k) "
        "ha = Cast<to=10>(a) hb = Cast<to=10>(b) d = Concat<axis=1>(ha, hb) x = Conv(d, v) y2 = Cast<to=1>(x)"
    )
    values = weights(w=FILTER, k=(12,)) | weights(dtype="float16", v=FILTER)
    result, patched = run_patch(graph(body, values, opset=13, outputs=("y1", "y2")), tmp_path)
    assert len(fused_types(patched)) == 1 and "one body cannot serve both" in result.report["sites"][1]["reason"]
    (tmp_path / "model.cutefuse.onnx").unlink()
    result, patched = run_patch(graph(body, values, opset=15, outputs=("y1", "y2")), tmp_path)
    assert len(fused_types(patched)) == 2 and result.report["verify"]["passed"]
