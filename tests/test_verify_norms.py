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
from cutefuse.rewrite.passes import verify
from cutefuse.rewrite.patch import Result

C, SMALL = 96, 7
NORM = "s = Mul(a, none) x = Add(s, row) y = LayerNormalization<axis=-1,epsilon=0.000001>(x, gamma, beta)"


def alike(near: float, dtype: str = "float32", gain: float = 1.0) -> onnx.ModelProto:
    """A LayerNorm of rows that are all alike, of a mean of about 4; channel SMALL is `near` that mean, times `gain`."""
    row = 4 + np.random.default_rng(3).standard_normal(C)
    row[SMALL] = (row.sum() - row[SMALL]) / (C - 1) + near
    values = {"row": row, "gamma": np.ones(C), "beta": np.zeros(C), "none": np.array(0.0)}
    values["gamma"][SMALL] = gain
    stored = {name: value.astype(dtype) for name, value in values.items()}
    return graph(NORM, stored, inputs={"a": f"2,9,{C}"}, rank=3, dtype=dtype)


def proven(model: onnx.ModelProto, folder: Path) -> tuple[Result, dict[str, Any]]:
    result, _ = run_patch(model, folder)
    return result, result.report["verify"]


@pytest.mark.parametrize("near", [1e-4, 3e-4, 1e-3, -2e-4])
def test_a_channel_that_is_small_by_chance_is_not_called_wrong(near: float, tmp_path: Path) -> None:
    result, proof = proven(alike(near), tmp_path)
    assert proof["passed"] and result.exit_code == 0
    assert proof["sites"][0]["max_abs_error"] < 1e-5 * proof["sites"][0]["max_abs_value"]


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, factor: float, more: float) -> None:
    """Makes one channel of a weight wrong in the patched model that is judged."""
    right = verify.verify

    def spoilt(source: Path, patched: onnx.ModelProto, *rest: Any, **options: Any) -> dict[str, Any]:
        weight = next(t for t in patched.graph.initializer if t.name == name)
        value = onnx.numpy_helper.to_array(weight).copy()
        value[SMALL] = value[SMALL] * factor + more
        weight.CopyFrom(onnx.numpy_helper.from_array(value, name))
        return right(source, patched, *rest, **options)

    monkeypatch.setattr(verify, "verify", spoilt)


@pytest.mark.parametrize("wrong", [1e-3, -1e-3, 1.0])
def test_a_wrong_channel_of_a_norm_is_found(wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "beta", 1.0, wrong)
    result, proof = proven(alike(3e-4), tmp_path)
    assert not proof["passed"] and result.exit_code == 1
    assert (proof["sites"][0]["axis"], proof["sites"][0]["channel"]) == (2, SMALL)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_wrong_channel_of_a_small_gain_is_found(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are a hundredth of the others', and wrong by a fifth."""
    assert proven(alike(1.0, dtype, gain=0.01), tmp_path)[1]["passed"]
    (tmp_path / "model.cutefuse.onnx").unlink()
    spoil(monkeypatch, "gamma", 1.2, 0.0)
    proof = proven(alike(1.0, dtype, gain=0.01), tmp_path)[1]
    assert not proof["passed"] and proof["sites"][0]["channel"] == SMALL


def test_the_gain_is_a_floor_of_the_last_axis_and_of_norms_alone() -> None:
    exact = np.random.default_rng(0).standard_normal((40, 6))
    exact[:, 2] *= 1e-4

    def judged(error: float, gains: Any) -> bool:
        judge = Judge(["y", "z"], 1, [exact] * 2, 1e-3, {"z": ()}, lambda tensors: [], gains=gains)
        return bool(judge([exact, exact + error])["z"]["passed"])

    assert judged(5e-6, {"z": np.ones(6)}) and judged(5e-6, {"z": np.ones((1, 6))})
    assert not judged(5e-6, {}), "another site's channel has a scale of its own"
    assert not judged(2e-3, {"z": np.ones(6)}), "an error is one still"
    assert not judged(5e-6, {"z": np.full(6, 1e-4)}), "a channel of a small gain has small errors"
    assert not judged(5e-6, {"z": np.ones(5)}), "factors of other channels"
