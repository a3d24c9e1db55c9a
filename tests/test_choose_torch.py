"""What torch.compile does by itself, in the predicted gains: norms, passes after a convolution, and our own finish."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph, run_patch, weights
from problems import Problem
from test_sm90 import SAME, call

from cutefuse import kernels
from cutefuse.sites.choose_engine import TORCH

KEPT = {"engine": TORCH, "sm": 90, "gpu": "H200", "dry_run": True}


def halves(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: value.astype("float16") for name, value in weights(**shapes).items()}


def gains(model: onnx.ModelProto, folder: Path, **options: object) -> tuple[list[str], float]:
    """The states of the sites, and what those that are fused gain together."""
    result, _ = run_patch(model, folder, **{**KEPT, "all_sites": False, **options})
    return [site["status"] for site in result.report["sites"]], result.report["summary"]["gain_us"]


@pytest.mark.parametrize(("rows", "status"), [(197, "left out"), (1576, "left out"), (65536, "fused")])
def test_norms_of_few_bytes_are_left_to_triton(rows: int, status: str, tmp_path: Path) -> None:
    """1576 rows of 768 took 3.9 us of ours and 2.4 of Triton's, inside a transformer."""
    model = graph("y = LayerNormalization<axis=-1>(b, g, t)", halves(g=(768,), t=(768,)), dtype="float16",
                  inputs={"b": f"1,1,{rows},768"})  # fmt: skip
    assert gains(model, tmp_path)[0] == [status]


def test_a_source_without_a_bias_has_no_pass_that_its_concat_could_save(tmp_path: Path) -> None:
    body = "p = Conv<group=16>(b, u{}) q = Neg(b) c = Concat<axis=1>(p, q) x = Conv(c, w, k) y = Relu(x)"
    values = halves(u=(16, 1, 1, 1), v=(16,), w=(64, 32, 1, 1), k=(64,))
    inputs = {"b": "1,16,160,160"}
    read = {name: v for name, v in values.items() if name != "v"}
    bare = gains(graph(body.format(""), read, dtype="float16", inputs=inputs), tmp_path, all_sites=True)
    (tmp_path / "biased").mkdir()
    biased = gains(
        graph(body.format(", v"), values, dtype="float16", inputs=inputs), tmp_path / "biased", all_sites=True
    )
    assert bare[0] == biased[0] == ["fused"] and bare[1] > biased[1] + 1, "the pass of 1.6 MB"


@pytest.mark.parametrize(("activation", "seen"), [("Silu", True), ("Sigmoid", True), ("Relu", False), ("Clip", False)])
def test_a_small_tile_shows_the_finish_of_exponentials_alone(activation: str, seen: bool) -> None:
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    plain = call(Problem(1, 40, 40, (128,), 128, **SAME))
    given = call(Problem(1, 40, 40, (128,), 128, **SAME, activation=activation))
    plain_us, us = (kernels.predicted_us(replace(c, config=154, _keep=[])) or 0 for c in (plain, given))
    assert 0.3 < us - plain_us < 1 if seen else us == plain_us
