"""A depthwise Conv with its affine steps and activation as one node: what is taken, what stays, and what it pays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from devices import skip_without_code
from graphs import bn_weights, fused_types, graph, run_patch, weights

from cutefuse.graph.body import DOMAIN
from cutefuse.graph.read import attribute
from cutefuse.graph.verify import verify
from cutefuse.operators.concat_conv import OPERATOR
from cutefuse.rewrite.patch import Result
from cutefuse.rewrite.unpatch import unpatch

INPUTS = {"i": "n,24,9,11"}
CONV = "x = Conv<group=24,pads=[1,1,1,1]>(i, w, k) "
VALUES = {"w": (24, 1, 3, 3), "k": (24,), "w2": (24, 1, 5, 5), "w3": (23, 1, 3, 3),
          "m": (24, 1, 1), "u": (16, 24, 1, 1), "v": (16, 1, 3, 3),
          "twice": (48, 1, 3, 3), "four": (24, 6, 3, 3),
          "tall": (24, 1, 17, 1), "point": (24, 1, 1, 1), "full": (24, 24, 1, 1)}  # fmt: skip


def made(
    body: str, dtype: str = "float16", opset: int = 17, inputs: Mapping[str, str] = INPUTS,
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:  # fmt: skip
    """A checked model of the nodes in `body`."""
    values = weights(dtype=dtype, **VALUES) | bn_weights(24, dtype)
    read = set(re.split(r"[(), ]+", body))
    stored = {n: v for n, v in values.items() if n in read}
    return graph(body, stored, inputs=inputs, opset=opset, dtype=dtype, outputs=outputs)


def site_of(result: Result) -> dict[str, Any]:
    (site,) = result.report["sites"]
    return dict(site)


TAKEN = {
    "ReLU": (CONV + "y = Relu(x)", "Relu"),
    "SiLU": (CONV + "s = Sigmoid(x) y = Mul(x, s)", "Silu"),
    "HardSwish": (CONV + "y = HardSwish(x)", "HardSwish"),
    "a slope": (CONV + "y = LeakyRelu<alpha=0.125>(x)", "LeakyRelu"),
    "without a bias": ("x = Conv<group=24>(i, w) y = Tanh(x)", "Tanh"),
    "five by five with strides": ("x = Conv<group=24,pads=[2,1,2,3],strides=[2,1]>(i, w2, k) y = Relu(x)", "Relu"),
    "dilated": ("x = Conv<group=24,dilations=[2,3],pads=[2,3,2,3]>(i, w, k) y = Sigmoid(x)", "Sigmoid"),
    "normalised": (CONV + "z = BatchNormalization(x, gamma, beta, mean, var) y = Relu(z)", "Relu"),
    "scaled": (CONV + "z = Mul(x, m) y = Relu(z)", "Relu"),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("name", TAKEN)
def test_a_depthwise_convolution_is_one_node_that_computes_the_same(name: str, layout: str, tmp_path: Path) -> None:
    body, activation = TAKEN[name]
    model = made(body)
    result, patched = run_patch(model, tmp_path, layout=layout)
    assert result.report["verify"]["passed"] and patched is not None
    (node,) = [n for n in patched.graph.node if n.domain == DOMAIN]
    assert node.op_type == f"CuteDepthwiseConcatConv1{activation}"
    assert {n.op_type for n in patched.graph.node} - {node.op_type} <= {"Transpose"}
    rows, columns = attribute(node, "kernel_shape")
    (packed,) = [t for t in patched.graph.initializer if t.name == node.input[1]]
    assert [*packed.dims] == [rows * columns, 24] and attribute(node, "packed_sizes") == [24]
    assert {"depthwise", "single"} <= set(site_of(result)["takes"])
    unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "u.onnx")
    plain = onnx.load(str(tmp_path / "u.onnx"))
    assert [attribute(n, "group", 1) for n in plain.graph.node if n.op_type == "Conv"] == [24]
    assert verify(tmp_path / "model.onnx", plain, tmp_path, OPERATOR.tolerance("float16"), {})["passed"]


@pytest.mark.parametrize("opset", [11, 13, 21])
def test_one_body_serves_other_channels_sizes_and_strides(opset: int, tmp_path: Path) -> None:
    body = CONV + (
        "a = Relu(x) b = Conv(a, u) c = Conv<group=16,strides=[2,2]>(b, v) d = Relu(c)"
        "e = Conv<group=24,pads=[2,2,2,2]>(a, w2) y = Relu(e)"
    )
    result, patched = run_patch(made(body, opset=opset, outputs=("d", "y")), tmp_path)
    assert result.report["verify"]["passed"] and patched is not None
    types = fused_types(patched)
    assert types.count("CuteDepthwiseConcatConv1Relu") == 3 and len(patched.functions) == 1
    groups = [attribute(n, "group", 0) for n in patched.graph.node if "Depthwise" in n.op_type]
    assert sorted(groups) == [16, 24, 24]


def test_bfloat16_is_fused_and_proven_with_the_reference_evaluator(tmp_path: Path) -> None:
    result, patched = run_patch(made(CONV + "y = Relu(x)", "bfloat16", 22), tmp_path)
    assert fused_types(patched) == ["CuteDepthwiseConcatConv1Relu"] and result.report["verify"]["passed"]


def test_dynamic_sizes_stay_open(tmp_path: Path) -> None:
    result, patched = run_patch(made(CONV + "y = Relu(x)", inputs={"i": "n,24,h,v"}), tmp_path,
                                shapes={"i": (2, 24, 13, 6)})  # fmt: skip
    assert result.report["verify"]["passed"] and fused_types(patched) == ["CuteDepthwiseConcatConv1Relu"]
    assert site_of(result)["shapes"]["inputs"][0] == [-1, 24, -1, -1]


def test_a_float32_model_is_converted_first(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    result, patched = run_patch(made(CONV + "y = Relu(x)", "float32"), tmp_path, dtype="float16")
    assert fused_types(patched) == ["CuteDepthwiseConcatConv1Relu"] and result.report["verify"]["passed"]


# ------------------------------------------------------------------------------------------------ what stays outside
KEPT = {
    "a residual behind the activation": (CONV + "z = Relu(x) y = Add(z, i)", ["CuteDepthwiseConcatConv1Relu"], "Add"),
    "an enlarged source": ("e = Resize(i, , scales) x = Conv<group=24>(e, w) y = Relu(x)",
                           ["CuteDepthwiseConcatConv1Relu"], "Resize"),
    "a range of channels": ("p, q = Split<axis=1>(j) x = Conv<group=24>(p, w) z = Relu(x) t = Neg(q) y = Add(z, z)",
                            ["CuteDepthwiseConcatConv1Relu"], "Split"),
    "a Concat whose vectors are no source's": ("c = Concat<axis=1>(o, r) x = Conv<group=24>(c, w) y = Relu(x)",
                                               ["CuteDepthwiseConcatConv1Relu"], "Concat"),
    "an inner Concat": ("a = Concat<axis=1>(g, g) c = Concat<axis=1>(a, g) x = Conv<group=24>(c, w) y = Relu(x)",
                        ["CuteDepthwiseConcatConv2Relu"], "Concat"),
    "a Concat of rows": ("c = Concat<axis=2>(i, i) x = Conv<group=24>(c, w) y = Relu(x)",
                         ["CuteDepthwiseConcatConv1Relu"], "Concat"),
    "a Concat that others read": ("c = Concat<axis=1>(g, h) x = Conv<group=24,pads=[1,1,1,1]>(c, w) z = Relu(x)"
                                  "y = Add(z, c)", ["CuteDepthwiseConcatConv2Relu"], "Concat"),
    "an activation that the kernels lack": (CONV + "y = Elu(x)", [], "Elu"),
    "what others read too": (CONV + "z = Relu(x) t = Neg(x) y = Add(z, t)", [], "Relu"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_part_of_it_is_kept(name: str, tmp_path: Path) -> None:
    body, types, kept = KEPT[name]
    inputs = {"i": "n,24,9,11", "j": "n,48,9,11", "g": "n,8,9,11", "h": "n,16,9,11", "o": "n,4,9,11",
              "r": "n,20,9,11"}  # fmt: skip
    used = {n: s for n, s in inputs.items() if re.search(rf"[(, ]{n}[,)]", body)}
    model = made(body, inputs=used) if "scales" not in body else resized(body, used)
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == types
    left = (patched or model).graph.node
    assert kept in [n.op_type for n in left]
    assert patched is None or result.report["verify"]["passed"]


def resized(body: str, inputs: Mapping[str, str]) -> onnx.ModelProto:
    values = weights(dtype="float16", w=(24, 1, 3, 3)) | {"scales": onnx.numpy_helper.to_array(
        onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [4], [1, 1, 2, 2]))}  # fmt: skip
    return graph(body, values, inputs=inputs, dtype="float16")


REFUSED = {
    "two filters a channel": ("x = Conv<group=24>(i, twice) y = Relu(x)", "24 groups; only group=1 and"),
    "four groups": ("x = Conv<group=4>(i, four) y = Relu(x)", "4 groups; only group=1 and"),
    "a filter computed at run time": ("f = RandomNormalLike(w) x = Conv<group=24>(i, f) y = Relu(x)", "at run time"),
    "a huge filter": ("x = Conv<group=24,pads=[8,0,8,0]>(i, tall) y = Relu(x)", r"kernel_shape\[0\] is 17"),
    "rank 3": ("x = Conv<group=24>(r, line) y = Relu(x)", "only 2-D convolutions"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fused_says_why(name: str, tmp_path: Path) -> None:
    body, reason = REFUSED[name]
    if name == "rank 3":
        model = graph(body, weights(dtype="float16", line=(24, 1, 3)), inputs={"r": "n,24,9"}, dtype="float16", rank=3)
    else:
        model = made(body)
    result, patched = run_patch(model, tmp_path)
    assert patched is None and site_of(result)["status"] == "refused"
    assert re.search(reason, site_of(result)["reason"]), site_of(result)


def test_nothing_is_said_of_a_concat_that_is_further_off(tmp_path: Path) -> None:
    """As MixNet's, behind which a Split stands: no depthwise Conv is fused with one."""
    body = (
        "c = Concat<axis=1>(g, h) r = Relu(c) p, q = Split<axis=1>(r) x = Conv<group=24>(p, w) y = Concat<axis=1>(x, x)"
    )
    result, patched = run_patch(made(body, inputs={"g": "n,24,9,11", "h": "n,24,9,11"}), tmp_path)
    assert patched is None and result.report["sites"] == []


def test_a_float32_model_is_told_to_convert(tmp_path: Path) -> None:
    result, patched = run_patch(made(CONV + "y = Relu(x)", "float32"), tmp_path)
    assert patched is None and "convert the model" in site_of(result)["reason"]
    assert result.report["summary"]["refused_by"] == {"types": 1}


def test_a_concat_of_odd_sources_is_read_as_it_is_for_pytorch_alone(tmp_path: Path) -> None:
    sources = {"g": "n,6,9,11", "h": "n,18,9,11"}
    model = made("c = Concat<axis=1>(g, h) y = Conv<group=24>(c, w, k)", inputs=sources)
    result, patched = run_patch(model, tmp_path)
    assert patched is None and "a depthwise source of 6 channels" in site_of(result)["reason"]
    result, patched = run_patch(model, tmp_path, engine="torch")
    assert fused_types(patched) == ["CuteDepthwiseConcatConv1"] and result.report["verify"]["passed"]
    assert any("'c' is read as it is" in note for note in site_of(result)["notes"])


JOINED = {
    "linear": ("c = Concat<axis=1>(g, h) y = Conv<group=24,pads=[1,1,1,1]>(c, w)", "2"),
    "with a bias and an activation": ("c = Concat<axis=1>(g, h) x = Conv<group=24>(c, w, k) y = HardSwish(x)",
                                      "2HardSwish"),
    "dilated": ("c = Concat<axis=1>(g, h) x = Conv<group=24,dilations=[2,3],pads=[2,3,2,3]>(c, w) y = Relu(x)",
                "2Relu"),
    "normalised": ("c = Concat<axis=1>(g, e, f) x = Conv<group=24,strides=[2,2]>(c, w, k)"
                   "z = BatchNormalization(x, gamma, beta, mean, var) y = Sigmoid(z)", "3Sigmoid"),
    "one tensor twice": ("c = Concat<axis=1>(g, g, g) x = Conv<group=24,pads=[1,1,1,1]>(c, w) y = Tanh(x)", "3Tanh"),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("name", JOINED)
def test_the_sources_of_a_concat_are_read_where_they_are(name: str, layout: str, tmp_path: Path) -> None:
    body, form = JOINED[name]
    inputs = {"g": "n,8,9,11", "h": "n,16,9,11", "e": "n,8,9,11", "f": "n,8,9,11"}
    used = {n: s for n, s in inputs.items() if re.search(rf"[(, ]{n}[,)]", body)}
    result, patched = run_patch(made(body, inputs=used), tmp_path, layout=layout)
    assert result.report["verify"]["passed"] and patched is not None
    (node,) = [n for n in patched.graph.node if n.domain == DOMAIN]
    assert node.op_type == f"CuteDepthwiseConcatConv{form}"
    assert attribute(node, "group") == sum(attribute(node, "channels"))
    assert {n.op_type for n in patched.graph.node} - {node.op_type} <= {"Transpose"}
    unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "u.onnx")
    plain = onnx.load(str(tmp_path / "u.onnx"))
    assert verify(tmp_path / "model.onnx", plain, tmp_path, OPERATOR.tolerance("float16"), {})["passed"]


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
def test_the_last_source_may_end_within_a_vector_of_padded_pixels(layout: str, tmp_path: Path) -> None:
    body = "c = Concat<axis=1>(h, q) x = Conv<group=23>(c, w3) y = Relu(x)"
    result, patched = run_patch(made(body, inputs={"h": "n,16,9,11", "q": "n,7,9,11"}), tmp_path, layout=layout)
    if layout == "nhwc":
        assert patched is None and "whole vectors" in site_of(result)["reason"]
    else:
        assert fused_types(patched) == ["CuteDepthwiseConcatConv2Relu"] and result.report["verify"]["passed"]


def test_one_with_a_batch_normalization_is_fused_for_pytorch(tmp_path: Path) -> None:
    body = "x = Conv<group=24,pads=[1,1,1,1]>(i, w) y = BatchNormalization(x, gamma, beta, mean, var)"
    result, patched = run_patch(made(body), tmp_path, engine="torch")
    assert fused_types(patched) == ["CuteDepthwiseConcatConv1"] and result.report["verify"]["passed"]


@pytest.mark.parametrize("engine", ["tensorrt", "torch"])
def test_one_with_nothing_to_add_is_a_site_for_pytorch_alone(engine: str, tmp_path: Path) -> None:
    result, patched = run_patch(made("y = Conv<group=24,pads=[1,1,1,1]>(i, w)"), tmp_path, engine=engine)
    if engine == "tensorrt":
        assert patched is None and result.report["sites"] == []
    else:
        assert fused_types(patched) == ["CuteDepthwiseConcatConv1"] and "alone" in site_of(result)["takes"]
        assert result.report["verify"]["passed"]


def test_without_depthwise_it_stays(tmp_path: Path) -> None:
    result, patched = run_patch(made(CONV + "y = Relu(x)"), tmp_path, without=["depthwise"])
    assert patched is None and site_of(result)["reason"] == "--without depthwise"


def test_without_depthwise_is_idle_where_none_is(tmp_path: Path) -> None:
    result, _ = run_patch(made("x = Conv(i, u) y = Relu(x)"), tmp_path, without=["depthwise"])
    assert any("--without depthwise does nothing" in s for s in result.report["unused_options"])


def test_parallel_ones_are_not_merged(tmp_path: Path) -> None:
    body = "p = Conv<group=24>(i, w) a = Relu(p) q = Conv<group=24>(i, w) b = Relu(q) y = Add(a, b)"
    _, patched = run_patch(made(body), tmp_path)
    assert fused_types(patched) == ["CuteDepthwiseConcatConv1Relu"] * 2


REP = CONV + "p = BatchNormalization(x, gamma, beta, mean, var) q = Conv<group=24>(i, {}) r = Add(p, q) "


@pytest.mark.parametrize("more", ["y = Relu(r)", "t = Add(r, i) y = Relu(t)"])
def test_branches_of_one_tensor_become_one_depthwise_convolution(more: str, tmp_path: Path) -> None:
    """As RepViT and MobileOne train them: 3x3, 1x1 and the tensor itself."""
    result, patched = run_patch(made(REP.format("point") + more), tmp_path)
    assert result.report["verify"]["passed"] and patched is not None
    assert [n.op_type for n in patched.graph.node] == ["CuteDepthwiseConcatConv1Relu"]


def test_branches_are_one_depthwise_convolution_in_float32_too(tmp_path: Path) -> None:
    """Which then stays, since the kernels have no such type."""
    result, patched = run_patch(made(REP.format("point") + "y = Relu(r)", "float32"), tmp_path)
    assert result.report["verify"]["passed"] and patched is not None
    assert [n.op_type for n in patched.graph.node] == ["Conv", "Relu"]


def test_a_branch_over_all_channels_is_no_depthwise_one(tmp_path: Path) -> None:
    body = CONV + "q = Conv(i, full) r = Add(x, q) y = Relu(r)"
    result, patched = run_patch(made(body), tmp_path)
    assert result.report["verify"]["passed"] and not any("Depthwise" in t for t in fused_types(patched))


def test_one_group_of_one_channel_is_a_plain_convolution(tmp_path: Path) -> None:
    model = graph("x = Conv<group=1>(i, w) y = Relu(x)", weights(dtype="float16", w=(1, 1, 3, 3)),
                  inputs={"i": "n,1,9,11"}, dtype="float16")  # fmt: skip
    _, patched = run_patch(model, tmp_path, without=["image"])
    assert fused_types(patched) == ["CuteConcatConv1Relu"]


# ---------------------------------------------------------------------------------------------------------- its price
DEEP = (
    "a = Conv(i, u, k) b = Relu(a) x = Conv<group=64,pads=[1,1,1,1]>(b, w, k) "
    "s = Sigmoid(x) t = Mul(x, s) y = Conv(t, u)"
)


def priced(tmp_path: Path, body: str = DEEP, **options: Any) -> list[dict[str, Any]]:
    values = weights(dtype="float16", u=(64, 64, 1, 1), w=(64, 1, 3, 3), k=(64,))
    model = graph(body, values, inputs={"i": "1,64,80,80"}, dtype="float16")
    result, _ = run_patch(model, tmp_path, verify=False, all_sites=False, **options)
    return [s for s in result.report["sites"] if "depthwise" in s["takes"]]


def test_pytorch_gains_by_it_with_and_without_an_activation(tmp_path: Path) -> None:
    bare = "x = Conv<group=64,pads=[1,1,1,1]>(i, w, k) y = Conv(x, u)"
    for name, body in {"silu": DEEP, "alone": bare}.items():
        (tmp_path / name).mkdir()
        (site,) = priced(tmp_path / name, body, engine="torch")
        assert site["status"] == "fused" and site["gain_us"] > 1 and ("alone" in site["takes"]) == (name == "alone")


def test_a_dilated_one_gains_most_by_it(tmp_path: Path) -> None:
    """cuDNN has a slow kernel for these."""
    gains = {}
    for dilation in (1, 12):
        (tmp_path / str(dilation)).mkdir()
        body = f"x = Conv<group=64,pads={[dilation] * 4},dilations={[dilation] * 2}>(i, w) y = Conv(x, u)"
        (site,) = priced(tmp_path / str(dilation), body, engine="torch", sm=90)
        gains[dilation] = site["gain_us"]
    assert gains[12] > 15 + gains[1]


@pytest.mark.parametrize("activation", ["s = Sigmoid(x) t = Mul(x, s)", "t = Relu(x)", "t = HardSwish(x)"])
def test_tensorrt_for_rtx_computes_all_of_it_in_one_kernel(activation: str, tmp_path: Path) -> None:
    """As its compiler does: `__myl_CorrSilu` and its like."""
    skip_without_code(89)
    body = DEEP.replace("s = Sigmoid(x) t = Mul(x, s)", activation)
    (site,) = priced(tmp_path, body, engine="rtx", sm=89)
    assert site["status"] == "left out" and abs(site["gain_us"]) < 0.3


def test_a_kernel_of_tensorrt_is_never_taken_for_slower_than_ours(tmp_path: Path) -> None:
    """TensorRT computes ReLU inside, and SiLU in a kernel of its own, before TensorRT 11."""
    relu = DEEP.replace("s = Sigmoid(x) t = Mul(x, s)", "t = Relu(x)")
    parts = []
    for name, body in {"relu": relu, "silu": DEEP}.items():
        (tmp_path / name).mkdir()
        (site,) = priced(tmp_path / name, body, trt_version="10.3", sm=90, include=["Relu_3", "Mul*"])
        parts.append(site["gain_parts"])
    (inside, apart) = parts
    assert inside["engine_kernels"] <= -inside["our_kernels"] and apart["engine_kernels"] > inside["engine_kernels"] + 1
