"""Sums of convolutions of one tensor as one convolution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import bn_weights, fused_types, graph, run_patch, weights

from cutefuse.rewrite.passes import branches

VALUES = (
    weights(w=(8, 8, 3, 3), p=(8, 8, 1, 1), k=(8,), wide=(8, 8, 5, 5), across=(8, 8, 1, 3), down=(8, 8, 3, 1))
    | bn_weights(8)
    | {f"{n}2": v for n, v in bn_weights(8).items()}
    | {"scale": bn_weights(8)["gamma"].reshape(8, 1, 1), "huge": np.full((8, 8, 1, 1), 6e4, np.float32)}
)  # fmt: skip
X = {"x": "n,8,9,7"}


def folded(
    body: str, folder: Path, dtype: str = "float32", **options: object
) -> tuple[onnx.ModelProto, list[int], float]:
    """The model after folding, the convolutions of each sum, and its largest difference from the model before."""
    values = {n: v.astype(dtype) for n, v in VALUES.items()}
    used = {n: v for n, v in values.items() if n in body.replace("(", " ").replace(")", " ").replace(",", " ").split()}
    model = graph(body, used, inputs=X, dtype=dtype, **options)  # type: ignore[arg-type]
    x = np.random.default_rng(3).standard_normal((2, 8, 9, 7)).astype(dtype)
    results = []
    before = model.SerializeToString()
    found = branches.fold(model, folder)
    onnx.checker.check_model(model, full_check=True)
    for data in (before, model.SerializeToString()):
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        results.append(session.run(None, {"x": x})[0].astype(np.float64))
    return (
        model,
        [f.convolutions for f in found],
        float(np.abs(results[0] - results[1]).max() / np.abs(results[0]).max()),
    )


def ops(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


REPVGG = (
    "a = Conv<pads=[1,1,1,1]>(x, w, k) s = Conv(x, p) b = BatchNormalization(s, gamma, beta, mean, var) "
    "c = BatchNormalization(x, gamma2, beta2, mean2, var2) d = Add(a, b) e = Add(d, c) y = Relu(e)"
)


@pytest.mark.parametrize(
    ("body", "convolutions"),
    [
        (REPVGG, 2),
        (REPVGG.replace("Add(d, c)", "Sum(d, c)"), 2),
        ("a = Conv<pads=[1,1,1,1]>(x, w, k) b = Conv(x, p, k) d = Sum(a, b, x) y = Relu(d)", 2),
        ("a = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w) b = Conv<strides=[2,2]>(x, p, k) y = Add(b, a)", 2),
        ("a = Conv<pads=[2,2,2,2]>(x, wide) b = Conv<pads=[1,1,1,1]>(x, w) d = Add(a, b) y = Sigmoid(d)", 2),
        ('a = Conv<auto_pad="SAME_UPPER">(x, w) s = Mul(x, scale) y = Add(a, s)', 1),
        ("a = Conv<pads=[0,1,2,1]>(x, w) b = Conv(x, p) y = Add(a, b)", 2),
        ("a = Conv(x, p) b = Conv(x, p, k) y = Add(a, b)", 2),
    ],
)
def test_a_sum_of_branches_is_one_convolution(body: str, convolutions: int, tmp_path: Path) -> None:
    model, counts, error = folded(body, tmp_path)
    assert counts == [convolutions] and error < 1e-6
    assert sorted(ops(model)) in (["Conv"], ["Conv", "Relu"], ["Conv", "Sigmoid"])
    assert len(model.graph.initializer) == 2


@pytest.mark.parametrize(
    "body",
    [
        "a = Conv<pads=[1,1,1,1]>(x, w) y = Add(a, x)",  # a shortcut, which the fused convolution takes
        "a = Conv<pads=[1,1,1,1]>(x, w) r = Relu(x) b = Conv(r, p) y = Add(a, b)",  # not of one tensor
        "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv(x, p) r = Relu(b) y = Add(a, r)",  # not linear
        "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv(x, p) d = Add(a, b) e = Relu(b) y = Add(d, e)",  # b is read again
        "a = Conv<pads=[0,1,0,1]>(x, across) b = Conv<pads=[1,0,1,0]>(x, down) y = Add(a, b)",  # 9 taps for 6
        "a = Conv<pads=[2,2,2,2], dilations=[2,2]>(x, w) b = Conv(x, p) y = Add(a, b)",
        "y = Add(x, x)",
    ],
)
def test_what_is_no_sum_of_branches_stays(body: str, tmp_path: Path) -> None:
    model, counts, error = folded(body, tmp_path)
    assert counts == [] and error == 0


def test_of_nested_sums_the_part_that_is_linear_in_one_tensor_goes(tmp_path: Path) -> None:
    body = "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv(x, p) d = Add(a, b) r = Relu(x) y = Add(d, r)"
    model, counts, error = folded(body, tmp_path)
    assert counts == [2] and ops(model).count("Conv") == 1 and ops(model).count("Add") == 1 and error < 1e-6


def test_float16_branches_are_added_in_float64_and_rounded_once(tmp_path: Path) -> None:
    model, counts, error = folded(REPVGG, tmp_path, "float16")
    assert counts == [2] and error < 3e-3
    assert {t.data_type for t in model.graph.initializer} == {onnx.TensorProto.FLOAT16}


def test_a_filter_that_would_overflow_stays(tmp_path: Path) -> None:
    body = "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv(x, huge) c = Conv(x, huge) d = Add(b, c) y = Add(a, d)"
    values = {n: v.astype(np.float16) for n, v in VALUES.items() if n in ("w", "huge")}
    model = graph(body, values, inputs=X, dtype="float16")
    assert branches.fold(model, tmp_path) == []


def test_a_tensor_that_leaves_the_graph_stays(tmp_path: Path) -> None:
    body = "a = Conv<pads=[1,1,1,1]>(x, w) b = Conv(x, p) y = Add(a, b)"
    model = graph(body, {n: VALUES[n] for n in "wp"}, inputs=X, outputs=("y", "b"))
    assert branches.fold(model, tmp_path) == []


def repvgg() -> onnx.ModelProto:
    values = {
        n: v for n, v in VALUES.items() if n in REPVGG.replace("(", " ").replace(")", " ").replace(",", " ").split()
    }
    return graph(REPVGG, values, inputs=X)


def test_patch_folds_branches_and_fuses_what_they_became(tmp_path: Path) -> None:
    result, patched = run_patch(repvgg(), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv1Relu"] and ops(patched) == ["CuteConcatConv1Relu"]
    assert result.report["branches"] == [{"name": "Conv_0", "convolutions": 2, "tensor": "e"}]
    assert result.report["verify"]["passed"]


def test_folded_branches_alone_are_worth_a_file(tmp_path: Path) -> None:
    result, patched = run_patch(repvgg(), tmp_path, exclude_op=["concat_conv"])
    assert result.exit_code == 0 and patched is not None and ops(patched) == ["Conv", "Relu"]


def test_branches_can_be_left(tmp_path: Path) -> None:
    result, patched = run_patch(repvgg(), tmp_path, without=["branches"])
    assert result.report["branches"] == [] and ops(patched).count("BatchNormalization") == 2


def test_a_sum_that_no_site_takes_is_compared_by_itself(tmp_path: Path) -> None:
    """Where the rest amplifies rounding errors, as 100 times the sine of 100 times what the sum makes."""
    again = REPVGG.replace("y = ", "r = ") + " h = Mul(r, hundred) t = Sin(h) y = Relu(t)"
    used = set(again.replace("(", " ").replace(")", " ").replace(",", " ").split())
    values = {n: v.astype(np.float16) for n, v in VALUES.items() if n in used} | {"hundred": np.float16(100)}
    model = graph(again, values, inputs=X, dtype="float16")
    result, patched = run_patch(model, tmp_path, exclude_op=["concat_conv"])
    proof = result.report["verify"]
    assert proof["passed"] and patched is not None and "end_to_end" in proof
    ((name, error),) = [(s["tensor"], s["max_rel_error"]) for s in proof["sums"]]
    assert name == "e" and 0 < error < 0.01


def test_a_sum_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = branches.composed
    monkeypatch.setattr(branches, "composed", lambda steps: tuple(1.1 * v for v in right(steps)))
    result, patched = run_patch(repvgg(), tmp_path, exclude_op=["concat_conv"])
    proof = result.report["verify"]
    assert patched is None and not proof["passed"] and proof["first_wrong_site"] == "Conv_0"
