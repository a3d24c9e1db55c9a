"""What --verify asks of a norm whose channel is small by chance, and that a wrong one is still found.

A norm subtracts a row's mean. A value near the mean is small behind it, and has the rounding error of the whole row.
Where all rows are alike, as behind random weights, one channel may be so small everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import graph, run_patch

from cutefuse.graph.closeness import Judge
from cutefuse.rewrite.patch import Result

C, SMALL = 96, 7
NORM = "s = Mul(a, none) x = Add(s, row) y = LayerNormalization<axis=-1,epsilon=0.000001>(x, gamma, beta)"
CONV = "s = Mul(a, none) y = Conv(s, w, k)"


def alike(near: float, dtype: str = "float32") -> onnx.ModelProto:
    """A LayerNorm of rows that are all alike, of a mean of about 4; channel SMALL is `near` that mean."""
    kind = np.dtype(dtype)
    row = 4 + np.random.default_rng(3).standard_normal(C)
    row[SMALL] = (row.sum() - row[SMALL]) / (C - 1) + near
    values = {"row": row, "gamma": np.ones(C), "beta": np.zeros(C), "none": np.array(0.0)}
    stored = {name: np.asarray(value).astype(kind) for name, value in values.items()}
    return graph(NORM, stored, inputs={"a": f"2,9,{C}"}, rank=3, dtype=dtype)


def proven(model: onnx.ModelProto, folder: Path) -> tuple[Result, dict[str, Any]]:
    result, _ = run_patch(model, folder)
    return result, result.report["verify"]


@pytest.mark.parametrize("near", [1e-4, 3e-4, 1e-3, -2e-4])
def test_a_channel_that_is_small_by_chance_is_not_called_wrong(near: float, tmp_path: Path) -> None:
    result, proof = proven(alike(near), tmp_path)
    assert proof["passed"] and result.exit_code == 0
    assert proof["sites"][0]["max_abs_error"] < 1e-5 * proof["sites"][0]["max_abs_value"]


@pytest.mark.parametrize("wrong", [1e-3, -1e-3, 1.0])
def test_a_wrong_channel_of_a_norm_is_found(wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patched model's beta is wrong in one channel, by a thousandth of what is normal."""
    from cutefuse.rewrite import prove

    right = prove.verify

    def spoilt(source: Path, patched: onnx.ModelProto, *more: Any, **options: Any) -> dict[str, Any]:
        beta = next(t for t in patched.graph.initializer if t.name == "beta")
        value = onnx.numpy_helper.to_array(beta).copy()
        value[SMALL] += wrong
        beta.CopyFrom(onnx.numpy_helper.from_array(value, "beta"))
        return right(source, patched, *more, **options)

    monkeypatch.setattr(prove, "verify", spoilt)
    result, proof = proven(alike(3e-4), tmp_path)
    assert not proof["passed"] and result.exit_code == 1
    assert (proof["sites"][0]["axis"], proof["sites"][0]["channel"]) == (2, SMALL)


def judged(actual: np.ndarray, expected: np.ndarray, exact: np.ndarray | None, normed: bool) -> bool:
    def fetch(tensors: list[str]) -> list[Any]:
        return []

    names = ["z"] if normed else []
    judge = Judge(["y", "z"], 1, [expected] * 2, 1e-3, {"z": ()}, fetch, lambda tensor: exact, names)  # type: ignore[arg-type]
    return bool(judge([expected, actual])["z"]["passed"])


def test_only_norms_are_judged_by_the_unfused_models_own_error() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((40, 6))
    exact[:, 2] *= 1e-4
    expected, actual = exact + 1e-6, exact - 2e-6
    assert judged(actual, expected, exact, normed=True)
    assert not judged(actual, expected, exact, normed=False), "a convolution's channel has a scale of its own"
    assert not judged(exact - 4e-6, expected, exact, normed=True), "more than four times the unfused model's error"
    assert not judged(actual, expected, None, normed=True), "without exact values the verdict is the strict one"
    assert not judged(actual, expected, exact[:, :5], normed=True)
