"""Convolutions without any neighbour, candidates for PyTorch only, whose convolutions do not even add their bias."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import bn_weights, fused_types, graph, run_patch, weights

from cutefuse.operators.layouts import TENSORRT, TORCH

CONV = "x = Conv<pads=[1,1,1,1]>(b, w, k) "
VALUES = weights(w=(12, 16, 3, 3), v=(16, 12, 1, 1), k=(12,), vec=(12, 1, 1), slope=()) | bn_weights()


def model_of(body: str, opset: int = 17, size: int = 9, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    values = VALUES | weights(**shapes)
    read = {name: v for name, v in values.items() if f"{name})" in body or f"{name}," in body}
    return graph(body, read, inputs={"b": f"n,16,{size},7"}, opset=opset)


TAKEN = {
    "with a bias": "y = Conv(b, w, k)",
    "without one": "y = Conv<pads=[1,0,2,1], strides=[2,1]>(b, w)",
    "with a batch norm": CONV + "y = BatchNormalization(x, gamma, beta, mean, var)",
    "with a constant added": CONV + "y = Add(x, vec)",
    "before a pooling": CONV + "y = MaxPool<kernel_shape=[2,2]>(x)",
    "beside its own sum": CONV + "y = Add(x, x)",
    "before what is almost SiLU": CONV + "m = Mul(x, slope) g = Sigmoid(m) y = Mul(x, g)",
    "two in a row": CONV + "z = Neg(x) y = Conv(z, v)",
}


@pytest.mark.parametrize("name", TAKEN)
def test_they_are_fused_for_pytorch_and_stay_equal(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(model_of(TAKEN[name]), tmp_path, engine=TORCH)
    assert set(fused_types(patched)) == {"CuteConcatConv1"} and result.report["verify"]["passed"]
    assert all(site["takes"] == ["alone", "single"] for site in result.report["sites"])
    assert "Conv" not in {n.op_type for n in patched.graph.node}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", TAKEN)
def test_tensorrt_computes_them_in_one_kernel_and_keeps_them(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(model_of(TAKEN[name]), tmp_path, engine=TENSORRT, verify=False)
    assert patched is None and all(site["status"] == "refused" for site in result.report["sites"])


LEFT = {
    "a transposed one": ("y = ConvTranspose(b, w)", {"w": (16, 12, 3, 3)}),
    "a grouped one": ("y = Conv<group=16>(b, w)", {"w": (16, 1, 3, 3)}),
    "a computed filter": ("u = Relu(w) y = Conv(b, u)", {}),
    "a filter of 17 rows": ("y = Conv<pads=[8,0,8,0]>(b, w)", {"w": (12, 16, 17, 1)}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_no_kernel_runs_is_no_candidate(name: str, tmp_path: Path) -> None:
    body, shapes = LEFT[name]
    result, patched = run_patch(model_of(body, **shapes), tmp_path, engine=TORCH, verify=False)
    assert patched is None and not any(site["status"] == "fused" for site in result.report["sites"])


def test_another_domains_convolution_is_none(tmp_path: Path) -> None:
    model = model_of("y = Conv(b, w, k)")
    model.opset_import.append(onnx.helper.make_opsetid("com.mine", 1))
    model.graph.node[0].domain = "com.mine"
    result, patched = run_patch(model, tmp_path, engine=TORCH, verify=False)
    assert patched is None and result.report["sites"] == []


@pytest.mark.parametrize("without", ["alone", "single"])
def test_they_can_be_left_out(without: str, tmp_path: Path) -> None:
    model = model_of(CONV + "y = Exp(x)")
    result, patched = run_patch(model, tmp_path, engine=TORCH, without=[without], verify=False)
    (site,) = result.report["sites"]
    assert patched is None and (site["status"], site["reason"]) == ("excluded", f"--without {without}")


def test_without_its_residual_a_convolution_stands_alone(tmp_path: Path) -> None:
    model = model_of("x = Conv<pads=[1,1,1,1]>(b, w) y = Add(x, b)", w=(16, 16, 3, 3))
    _, whole = run_patch(model, tmp_path, engine=TORCH)
    assert fused_types(whole) == ["CuteConcatConv1Add"]
    _, patched = run_patch(model, tmp_path, engine=TORCH, without=["residual"])
    assert fused_types(patched) == ["CuteConcatConv1"]
    (tmp_path / "neither").mkdir()
    _, neither = run_patch(model, tmp_path / "neither", engine=TORCH, without=["residual", "alone"], verify=False)
    assert neither is None


def test_an_activation_is_taken_in_rather_than_left(tmp_path: Path) -> None:
    _, patched = run_patch(model_of(CONV + "y = Relu(x)"), tmp_path, engine=TORCH)
    assert fused_types(patched) == ["CuteConcatConv1Relu"]
    _, left = run_patch(model_of(CONV + "y = Relu(x)"), tmp_path, engine=TORCH, without=["alone"])
    assert fused_types(left) == ["CuteConcatConv1Relu"], "it does not stand alone"


def test_what_is_almost_an_activation_is_told(tmp_path: Path) -> None:
    result, _ = run_patch(model_of(CONV + "y = Elu(x)"), tmp_path, engine=TORCH)
    (site,) = result.report["sites"]
    assert site["takes"] == ["alone", "single"] and any("Elu" in note for note in site["notes"])


def test_an_option_about_them_that_does_nothing_says_so(tmp_path: Path) -> None:
    result, _ = run_patch(model_of(CONV + "y = Relu(x)"), tmp_path, engine=TORCH, without=["alone"])
    assert "--without alone does nothing: no candidate stands alone" in result.report["unused_options"]


def test_by_default_only_those_that_pay_are_fused(tmp_path: Path) -> None:
    """The first sums 16 channels of each pixel behind a kernel that is not ours, the second has work to do."""
    kept = {"engine": TORCH, "sm": 90, "gpu": "H200", "all_sites": False, "dry_run": True}
    for channels, pads, status in ((1, [0, 0], "left out"), (64, [1, 1], "fused")):
        values = weights(w=(channels, 16 * channels, *(2 * p + 1 for p in pads)), k=(channels,))
        halves = {n: v.astype("float16") for n, v in values.items()}
        model = graph(f"x = Conv<pads={2 * pads}>(b, w, k) y = Exp(x)", halves,
                      inputs={"b": f"1,{16 * channels},80,420"}, dtype="float16")  # fmt: skip
        result, _ = run_patch(model, tmp_path, **kept)
        (site,) = result.report["sites"]
        assert site["status"] == status and (site["gain_us"] > 0) == (status == "fused"), site["reason"]
