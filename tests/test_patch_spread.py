"""ConvTranspose with filters as large as their strides, and DepthToSpace behind a Conv, as one node: what is taken,
what stays and why, and what it pays."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from devices import skip_without_code
from graphs import bn_weights, fused_types, graph, run_patch, weights

from cutefuse import kernels
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.read import attribute
from cutefuse.graph.verify import verify
from cutefuse.operators.concat_conv import OPERATOR
from cutefuse.rewrite.patch import Options, Result, patch
from cutefuse.rewrite.unpatch import unpatch

INPUTS = {"i": "n,24,9,11"}
# t: a ConvTranspose's filters by the size of the square, c: a Conv's by the number of filters.
VALUES = {
    "t1": (24, 16, 1, 1), "t2": (24, 16, 2, 2), "t3": (24, 16, 3, 3), "t4": (24, 16, 4, 4), "t5": (24, 16, 5, 5),
    "tw": (24, 16, 2, 4), "tg": (24, 8, 2, 2), "tj": (48, 16, 2, 2), "tl": (24, 16, 2), "t16": (16, 8, 2, 2),
    "c64": (64, 24, 3, 3), "c36": (36, 24, 1, 1), "c144": (144, 24, 1, 1), "c200": (200, 24, 1, 1),
    "cj": (64, 48, 1, 1), "d128": (128, 144, 1, 1), "u": (8, 16, 1, 1), "k": (16,), "k64": (64,), "m": (16, 1, 1),
    "s64": (64, 1, 1),
}  # fmt: skip
T = "x = ConvTranspose<strides=[2,2]>(i, t2, k) "
BN = "BatchNormalization(x, gamma, beta, mean, var) "
C = "x = Conv<pads=[1,1,1,1]>(i, c64, k64) "


def made(
    body: str, dtype: str = "float16", opset: int = 17, inputs: Mapping[str, str] = INPUTS,
    outputs: Sequence[str] = ("y",), rank: int = 4, scales: Sequence[float] = (),
) -> onnx.ModelProto:  # fmt: skip
    """A checked model of the nodes in `body`. `scales`: of a Resize."""
    read = set(re.split(r"[(), ]+", body))
    values = weights(dtype=dtype, **VALUES) | bn_weights(16, dtype) | {"scales": np.float32(scales)}
    stored = {n: v for n, v in values.items() if n in read}
    used = {n: s for n, s in inputs.items() if n in read}
    return graph(body, stored, inputs=used, opset=opset, dtype=dtype, outputs=outputs, rank=rank)


def site_of(result: Result) -> dict[str, Any]:
    (site,) = result.report["sites"]
    return dict(site)


TAKEN = {
    "a deconvolution": (T.replace("x =", "y ="), "Spread2", ""),
    "with ReLU": (T + "y = Relu(x)", "Spread2", "Relu"),
    "normalised": (T + f"z = {BN} y = Relu(z)", "Spread2", "Relu"),
    "scaled, shifted": (T + "z = Mul(x, m) b = Add(z, m) y = LeakyRelu(b)", "Spread2", "LeakyRelu"),
    "without a bias": ("x = ConvTranspose<strides=[3,3]>(i, t3) s = Sigmoid(x) y = Mul(x, s)", "Spread3", "Silu"),
    "up by four": (f"x = ConvTranspose<strides=[4,4]>(i, t4) z = {BN} y = Tanh(z)", "Spread4", "Tanh"),
    "of one pixel": (f"x = ConvTranspose(i, t1, k) z = {BN} y = Relu(z)", "", "Relu"),
    "told of no pads": ('x = ConvTranspose<strides=[2,2],auto_pad="SAME_UPPER",output_padding=[0,0],dilations=[1,1],'
                        'kernel_shape=[2,2]>(i, t2, k) y = Relu(x)', "Spread2", "Relu"),
    "a shuffle": (C + 'y = DepthToSpace<blocksize=2,mode="CRD">(x)', "Spread2", ""),
    "a shuffle by places": (C + "y = DepthToSpace<blocksize=2>(x)", "Spread2", ""),
    "an activation, then a shuffle": (C + 'z = Relu(x) y = DepthToSpace<blocksize=2,mode="CRD">(z)', "Spread2", "Relu"),
    "a shuffle, then an activation": (C + 'z = DepthToSpace<blocksize=2,mode="CRD">(x) y = HardSwish(z)', "Spread2",
                                      "HardSwish"),
    "scaled before and after": (
        C + 'a = Mul(x, s64) z = DepthToSpace<blocksize=2,mode="CRD">(a) b = Add(z, m) y = Tanh(b)', "Spread2", "Tanh"),
    "with strides, over squares of three": (
        'x = Conv<strides=[2,1]>(i, c144) z = Relu(x) y = DepthToSpace<blocksize=3,mode="CRD">(z)', "Spread3", "Relu"),
    "over squares of four": ("x = Conv(i, c144) z = Conv(x, d128) y = DepthToSpace<blocksize=4>(z)", "Spread4", ""),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("name", TAKEN)
def test_outputs_over_squares_of_pixels_are_one_node_that_computes_the_same(
    name: str, layout: str, tmp_path: Path
) -> None:
    body, spread, activation = TAKEN[name]
    model = made(body)
    result, patched = run_patch(model, tmp_path, layout=layout)
    assert result.report["verify"]["passed"] and patched is not None
    node = [n for n in patched.graph.node if n.domain == DOMAIN][-1]
    assert node.op_type == f"Cute{spread}ConcatConv1{activation}"
    assert {n.op_type for n in patched.graph.node if n.domain != DOMAIN} <= {"Transpose", "Conv"}
    assert {"spread", "single"} <= set(result.report["sites"][-1]["takes"])
    unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "u.onnx")
    plain = onnx.load(str(tmp_path / "u.onnx"))
    assert [n.op_type for n in plain.graph.node].count("DepthToSpace") == (spread != "")
    assert verify(tmp_path / "model.onnx", plain, tmp_path, OPERATOR.tolerance("float16"), {})["passed"]


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("transposed", [False, True])
def test_packed_filters_and_biases_stand_in_the_order_of_their_places(
    mode: str, transposed: bool, tmp_path: Path
) -> None:
    """Filter (i * 2 + j) * channels + k makes channel k of row i and column j: of the standard's own formulas, element
    by element."""
    values = weights(dtype="float16", **VALUES)
    body = T if transposed else C + f'z = DepthToSpace<blocksize=2,mode="{mode}">(x) '
    _, patched = run_patch(made(body + f"y = Relu({'x' if transposed else 'z'})"), tmp_path)
    assert patched is not None
    packed, bias = (
        onnx.numpy_helper.to_array(next(t for t in patched.graph.initializer if t.name == name))
        for name in patched.graph.node[0].input[1:]
    )
    for i, j, k, c in ((0, 0, 0, 0), (0, 1, 5, 23), (1, 0, 15, 7), (1, 1, 3, 11)):
        row = (i * 2 + j) * 16 + k
        if transposed:
            assert packed[row, c] == values["t2"][c, k, i, j] and bias[row] == values["k"][k]
            continue
        own = k * 4 + i * 2 + j if mode == "CRD" else row
        for r, s in ((0, 0), (2, 1)):
            assert packed[row, (r * 3 + s) * 64 + c] == values["c64"][own, c, r, s]
        assert bias[row] == values["k64"][own]


def test_a_concat_in_front_goes_with_it(tmp_path: Path) -> None:
    for name, body in {
        "up": "j = Concat<axis=1>(i, i) x = ConvTranspose<strides=[2,2]>(j, tj, k) y = Relu(x)",
        "shuffle": 'j = Concat<axis=1>(i, i) x = Conv(j, cj) y = DepthToSpace<blocksize=2,mode="CRD">(x)',
    }.items():
        (tmp_path / name).mkdir()
        result, patched = run_patch(made(body), tmp_path / name)
        assert fused_types(patched) == [f"CuteSpread2ConcatConv2{'Relu' if name == 'up' else ''}"]
        assert result.report["verify"]["passed"] and "single" not in site_of(result)["takes"]


def test_squares_of_two_sizes_in_one_network_have_bodies_of_their_own(tmp_path: Path) -> None:
    body = "a = ConvTranspose<strides=[2,2]>(i, t2) x = Relu(a) b = ConvTranspose<strides=[4,4]>(i, t4) y = Relu(b)"
    result, patched = run_patch(made(body, outputs=("x", "y")), tmp_path)
    assert fused_types(patched) == ["CuteSpread2ConcatConv1Relu", "CuteSpread4ConcatConv1Relu"]
    assert result.report["verify"]["passed"] and patched is not None and len(patched.functions) == 2


@pytest.mark.parametrize("opset", [9, 11, 13, 21])
def test_one_body_serves_other_channels_and_filters(opset: int, tmp_path: Path) -> None:
    body = T + "a = Relu(x) b = ConvTranspose<strides=[2,2]>(a, t16) y = Relu(b)"
    result, patched = run_patch(made(body, opset=opset), tmp_path)
    assert fused_types(patched) == ["CuteSpread2ConcatConv1Relu"] * 2 and result.report["verify"]["passed"]
    assert patched is not None and len(patched.functions) == 1


def test_bfloat16_is_fused_and_proven_with_the_reference_evaluator(tmp_path: Path) -> None:
    result, patched = run_patch(made(T + "y = Relu(x)", "bfloat16", 22), tmp_path)
    assert fused_types(patched) == ["CuteSpread2ConcatConv1Relu"] and result.report["verify"]["passed"]


def test_dynamic_sizes_stay_open(tmp_path: Path) -> None:
    model = made(T + "y = Relu(x)", inputs={"i": "n,24,h,v"})
    result, patched = run_patch(model, tmp_path, shapes={"i": (2, 24, 13, 6)})
    assert result.report["verify"]["passed"] and fused_types(patched) == ["CuteSpread2ConcatConv1Relu"]
    assert site_of(result)["shapes"]["outputs"] == [[-1, 16, -1, -1]]


def test_a_float32_model_is_converted_first(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    result, patched = run_patch(made(T + "y = Relu(x)", "float32"), tmp_path, dtype="float16")
    assert fused_types(patched) == ["CuteSpread2ConcatConv1Relu"] and result.report["verify"]["passed"]


def test_in_nhwc_no_transpose_stands_behind_it(tmp_path: Path) -> None:
    """Its readers are in the same island."""
    result, patched = run_patch(made(T + "a = Relu(x) b = Conv(a, u) y = Relu(b)"), tmp_path, layout="nhwc")
    assert result.report["verify"]["passed"] and patched is not None
    assert [n.op_type for n in patched.graph.node] == [
        "Transpose", "CuteSpread2ConcatConv1Relu", "CuteConcatConv1Relu", "Transpose",
    ]  # fmt: skip
    (info,) = (v for v in patched.graph.value_info if v.name == patched.graph.node[1].output[0])
    assert [d.dim_value for d in info.type.tensor_type.shape.dim[1:]] == [18, 22, 16]


# ------------------------------------------------------------------------------------------------ what stays outside
KEPT = {
    "an activation that the kernels lack": (T + "y = Elu(x)", ["CuteSpread2ConcatConv1"], "Elu"),
    "a residual": (T + "z = Relu(x) y = Add(z, g)", ["CuteSpread2ConcatConv1Relu"], "Add"),
    "a residual before the activation": (T + "z = Add(x, g) y = Relu(z)", ["CuteSpread2ConcatConv1"], "Add"),
    "a second activation": (C + "a = Relu(x) z = DepthToSpace<blocksize=2>(a) y = Tanh(z)",
                            ["CuteSpread2ConcatConv1Relu"], "Tanh"),
    "a normalisation behind an activation": (
        C + "a = Relu(x) b = DepthToSpace<blocksize=2>(a) z = Mul(b, m) y = Tanh(z)",
        ["CuteSpread2ConcatConv1Relu"], "Mul"),
    "a shuffle that others read around": (C + "a = Relu(x) z = DepthToSpace<blocksize=2>(a) b = Neg(a) "
                                          "d = DepthToSpace<blocksize=2>(b) y = Add(z, d)",
                                          ["CuteConcatConv1Relu"], "DepthToSpace"),
    "a shuffle behind another operator": (C + "a = Relu(x) b = Neg(a) y = DepthToSpace<blocksize=2>(b)",
                                          ["CuteConcatConv1Relu"], "DepthToSpace"),
    "three channels": ("x = Conv(i, c36) a = Relu(x) y = DepthToSpace<blocksize=2>(a)", ["CuteConcatConv1Relu"],
                       "DepthToSpace"),
    "squares of five": ("x = Conv(i, c200) a = Relu(x) y = DepthToSpace<blocksize=5>(a)", ["CuteConcatConv1Relu"],
                        "DepthToSpace"),
    "an enlarged source": ("e = Resize(i, , scales) x = ConvTranspose<strides=[2,2]>(e, t2) y = Relu(x)",
                           ["CuteSpread2ConcatConv1Relu"], "Resize"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_part_of_it_is_kept(name: str, tmp_path: Path) -> None:
    body, types, kept = KEPT[name]
    model = made(body, inputs={**INPUTS, "g": "n,16,18,22"}, scales=[1, 1, 2, 2])
    result, patched = run_patch(model, tmp_path)
    assert patched is not None and fused_types(patched) == types
    assert kept in [n.op_type for n in patched.graph.node] and result.report["verify"]["passed"]


def test_a_shuffle_that_stays_says_why(tmp_path: Path) -> None:
    for name, words in {"three channels": "DepthToSpace behind it stays: concat_conv: 36 float16 filters",
                        "squares of five": "blocksize is 5 of 200 channels"}.items():  # fmt: skip
        (tmp_path / name).mkdir()
        result, _ = run_patch(made(KEPT[name][0]), tmp_path / name)
        assert any(words in note for note in site_of(result)["notes"]), site_of(result)


REFUSED = {
    "overlapping filters": ("x = ConvTranspose<strides=[2,2]>(i, t3) y = Relu(x)", "filter is 3x3 with strides 2x2"),
    "gaps between filters": ("x = ConvTranspose<strides=[3,3]>(i, t2) y = Relu(x)", "filter is 2x2 with strides 3x3"),
    "pads": ("x = ConvTranspose<strides=[2,2],pads=[0,1,0,0]>(i, t2) y = Relu(x)", "without padding"),
    "output_padding": ("x = ConvTranspose<strides=[2,2],output_padding=[1,0]>(i, t2) y = Relu(x)", "without padding"),
    "a dilation": ("x = ConvTranspose<strides=[2,2],dilations=[2,1]>(i, t2) y = Relu(x)", "dilation"),
    "output_shape": ("x = ConvTranspose<strides=[2,2],output_shape=[18,22]>(i, t2) y = Relu(x)", "output_shape"),
    "rectangles": ("x = ConvTranspose<strides=[2,4]>(i, tw) y = Relu(x)", "its filter is 2x4 with strides 2x4"),
    "squares of five": ("x = ConvTranspose<strides=[5,5]>(i, t5) y = Relu(x)", "up to 4x4"),
    "groups": ("x = ConvTranspose<strides=[2,2],group=2>(i, tg) y = Relu(x)", "2 groups"),
    "a filter computed at run time": ("f = RandomNormalLike(t2) x = ConvTranspose<strides=[2,2]>(i, f) y = Relu(x)",
                                      "at run time"),
    "rank 3": ("x = ConvTranspose<strides=[2]>(r, tl) y = Relu(x)", "only 2-D convolutions"),
    "channels in no whole vectors": ("x = Conv(i, c36) y = DepthToSpace<blocksize=2>(x)", "multiple of 8 channels"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fused_says_why(name: str, tmp_path: Path) -> None:
    body, reason = REFUSED[name]
    rank = 3 if name == "rank 3" else 4
    result, patched = run_patch(made(body, inputs={**INPUTS, "r": "n,24,9"}, rank=rank), tmp_path)
    assert patched is None and site_of(result)["status"] == "refused"
    assert reason in site_of(result)["reason"] and ". " not in site_of(result)["reason"], site_of(result)
    assert body.startswith("x = Conv(") or site_of(result)["reason"].startswith("this is a ConvTranspose: ")


@pytest.mark.parametrize("body", [T + "y = Relu(x)", C + "z = Relu(x) y = DepthToSpace<blocksize=2>(z)"])
def test_a_float32_model_is_told_to_convert(body: str, tmp_path: Path) -> None:
    result, patched = run_patch(made(body, "float32"), tmp_path)
    words = [site_of(result)["reason"], *site_of(result)["notes"]]
    assert any("outputs are spread in float16 and bfloat16, convert the model" in w for w in words)
    assert fused_types(patched) == ([] if "Transpose" in body else ["CuteConcatConv1Relu"])


def test_a_fold_that_loses_precision_is_refused(tmp_path: Path) -> None:
    model = made(T + f"z = {BN} y = Relu(z)")
    (var,) = (t for t in model.graph.initializer if t.name == "var")
    values = onnx.numpy_helper.to_array(var).copy()
    values[3] = 6e-8
    var.CopyFrom(onnx.numpy_helper.from_array(values, "var"))
    (gamma,) = (t for t in model.graph.initializer if t.name == "gamma")
    gamma.CopyFrom(onnx.numpy_helper.from_array(np.full(16, 6e4, np.float16), "gamma"))
    result, patched = run_patch(model, tmp_path)
    assert patched is None and "overflows or loses precision" in site_of(result)["reason"]


def test_without_spread_a_conv_keeps_its_activation_and_a_deconvolution_stays(tmp_path: Path) -> None:
    for name, body, types in (
        ("up", T + "y = Relu(x)", []),
        ("shuffle", C + "z = Relu(x) y = DepthToSpace<blocksize=2>(z)", ["CuteConcatConv1Relu"]),
    ):
        (tmp_path / name).mkdir()
        result, patched = run_patch(made(body), tmp_path / name, without=["spread"])
        assert fused_types(patched) == types
        assert not result.report["unused_options"] and (types or site_of(result)["reason"] == "--without spread")


def test_without_spread_is_idle_where_none_is(tmp_path: Path) -> None:
    result, _ = run_patch(made("x = Conv(i, c144) y = Relu(x)"), tmp_path, without=["spread"])
    assert any("--without spread does nothing" in s for s in result.report["unused_options"])


# ---------------------------------------------------------------------------------------------------------- its price
NECK = "x = ConvTranspose<strides=[2,2]>(i, w) z = BatchNormalization(x, gamma, beta, mean, var) y = Relu(z)"


def priced(tmp_path: Path, body: str, channels: int = 256, **options: Any) -> dict[str, Any]:
    filters = {"w": (channels, channels, 2, 2), "c": (4 * channels, channels, 3, 3), "b": (4 * channels,)}
    values = weights(dtype="float16", **{n: s for n, s in filters.items() if re.search(rf"[(, ]{n}[,)]", body)})
    values |= bn_weights(channels, "float16") if "gamma" in body else {}
    model = graph(body, values, inputs={"i": f"1,{channels},90,90"}, dtype="float16")
    result, _ = run_patch(model, tmp_path, verify=False, all_sites=False, **options)
    return site_of(result)


def test_pytorch_gains_what_bevfusions_neck_was_measured_to_lose(tmp_path: Path) -> None:
    """Its ConvTranspose 18.6 us, BatchNormalization and ReLU 16.7 us, the plain convolution of ours 10.2 us, H200."""
    skip_without_code(90)
    site = priced(tmp_path, NECK, engine="torch", sm=90)
    assert site["status"] == "fused" and 10 < site["gain_us"] < 25.1
    assert 13 < site["gain_parts"]["engine_kernels"] - 9.2 < 18.6 and 8 < -site["gain_parts"]["our_kernels"] < 14


@pytest.mark.parametrize("engine", ["torch", "tensorrt"])
@pytest.mark.parametrize("tail", ["x", "z"])
def test_a_shuffle_is_a_pass_which_pytorch_shares_with_the_activation(engine: str, tail: str, tmp_path: Path) -> None:
    body = "x = Conv<pads=[1,1,1,1]>(i, c, b) z = Relu(x) " + f"y = DepthToSpace<blocksize=2>({tail})"
    body = body if tail == "z" else body.replace("z = Relu(x) ", "")
    alone = "x = Conv<pads=[1,1,1,1]>(i, c, b) y = Relu(x)"
    (tmp_path / "alone").mkdir()
    with_it, without = (
        priced(folder, text, 64, engine=engine, sm=90, min_gain_us=0)
        for folder, text in ((tmp_path, body), (tmp_path / "alone", alone))
    )
    more = with_it["gain_parts"]["engine_kernels"] - without["gain_parts"]["engine_kernels"]
    assert with_it["status"] == "fused"
    assert math.isclose(more, 0, abs_tol=1e-3) if engine == "torch" else more > 3


def test_tensorrt_for_rtx_computes_all_of_a_neck_in_one_kernel(tmp_path: Path) -> None:
    """As its compiler does: `__myl_DecoMulAddRelu`."""
    skip_without_code(89)
    site = priced(tmp_path, NECK, engine="rtx", sm=89)
    assert site["status"] == "left out" and abs(site["gain_us"]) < 0.3


# ------------------------------------------------------------------------------------------------------ from PyTorch
def modules() -> dict[str, tuple[Any, list[tuple[int, ...]], list[str]]]:
    """name -> (module in eval mode with random weights, input shapes, op_types that must appear once patched)."""
    import torch
    from torch import nn

    def block(c: int, k: int, act: Any) -> Any:
        return nn.Sequential(nn.Conv2d(c, k, 3, padding=1, bias=False), nn.BatchNorm2d(k), act)

    class UNetUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.conv = nn.ConvTranspose2d(32, 16, 2, stride=2), block(32, 16, nn.ReLU(inplace=True))

        def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
            return self.conv(torch.cat([skip, self.up(x)], 1))

    proto = nn.Sequential(block(24, 32, nn.SiLU()), nn.ConvTranspose2d(32, 32, 2, 2), block(32, 16, nn.SiLU()))
    neck = nn.Sequential(nn.ConvTranspose2d(32, 24, 4, stride=4, bias=False), nn.BatchNorm2d(24), nn.ReLU())
    tail = nn.Sequential(
        nn.Conv2d(32, 128, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(32, 16, 3, padding=1), nn.ReLU()
    )
    espcn = nn.Sequential(nn.Conv2d(16, 72, 3, padding=1), nn.LeakyReLU(0.1), nn.PixelShuffle(3))
    found = {
        "unet": (UNetUp(), [(1, 32, 6, 5), (1, 16, 12, 10)], ["CuteSpread2ConcatConv1", "CuteConcatConv2Relu"]),
        "proto": (proto, [(1, 24, 6, 5)], ["CuteConcatConv1Silu", "CuteSpread2ConcatConv1", "CuteConcatConv1Silu"]),
        "second": (neck, [(1, 32, 6, 5)], ["CuteSpread4ConcatConv1Relu"]),
        "edsr": (tail, [(1, 32, 6, 5)], ["CuteSpread2ConcatConv1", "CuteConcatConv1Relu"]),
        "espcn": (espcn, [(1, 16, 6, 5)], ["CuteSpread3ConcatConv1LeakyRelu"]),
    }
    for module, _, _ in found.values():
        for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2.0)
    return {name: (module.eval(), shapes, types) for name, (module, shapes, types) in found.items()}


@pytest.mark.torch
@pytest.mark.parametrize(("opset", "dynamo"), [(11, False), (17, False), (20, True)])
@pytest.mark.parametrize("name", ["unet", "proto", "second", "edsr", "espcn"])
def test_exports_of_pytorch_are_fused(name: str, opset: int, dynamo: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if dynamo:
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    module, shapes, types = modules()[name]
    inputs = tuple(torch.randn(s).half() for s in shapes)
    more: dict[str, Any] = {"external_data": False, "verbose": False} if dynamo else {}
    path = tmp_path / "m.onnx"
    torch.onnx.export(module.half(), inputs, str(path), opset_version=opset, dynamo=dynamo, **more)
    result = patch(path, tmp_path / "out.onnx", Options(all_sites=True, verify=True))
    assert result.report["verify"]["passed"] and fused_types(onnx.load(str(tmp_path / "out.onnx"))) == types


def test_every_factor_of_the_library_is_taken_here() -> None:
    known = {v["spread"] for op in kernels.describe()["ops"] for v in op["variants"] if v["kind"] == "convolution"}
    assert known == {1, 2, 3, 4} and {f"Spread{s}" if s > 1 else "" for s in known} == {t[1] for t in TAKEN.values()}


def test_the_node_says_no_factor_beside_its_op_type(tmp_path: Path) -> None:
    """So that a node of one op_type is always spread alike."""
    _, patched = run_patch(made(T + "y = Relu(x)"), tmp_path)
    assert patched is not None
    node = patched.graph.node[0]
    assert attribute(node, "kernel_shape") == [1, 1] and not any("spread" in a.name for a in node.attribute)
