"""`cutefuse optimize` over the PyTorch engine on the CPU, and what its comparison of outputs lets pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import FILTER, graph, weights
from onnx import numpy_helper

from cutefuse.commands.optimize import main
from cutefuse.commands.process import main as process
from cutefuse.errors import CutefuseError
from cutefuse.report.read.reader import find_engines, read_engine

pytestmark = pytest.mark.torch
QUICK = ["--iterations=2", "--duration=0.02", "--warmUp=1", "--sm", "0"]
BODY = "c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(d)"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(graph(BODY, weights(w=FILTER, k=(12,))), str(tmp_path / "m.onnx"))
    return tmp_path / "m.onnx"


def run(model: Path, *words: str) -> int:
    return main([str(model), "-o", str(model.parent / "out"), "--backend", "torch", *QUICK, *words])


def fixed_times(monkeypatch: pytest.MonkeyPatch, patched_us: float) -> None:
    """Times that do not depend on this machine: 100 us for a plain engine."""
    from cutefuse.optimize.bench_torch import TorchBench

    def race(self: Any, engines: Sequence[Any]) -> list[list[float]]:
        assert all(e.runner is not None for e in engines)
        return [[(patched_us if e.graph.sites else 100.0) + i % 3 for i in range(15)] for e in engines]

    monkeypatch.setattr(TorchBench, "race", race)


def test_the_faster_engine_is_handed_over_and_opens_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(monkeypatch, 80.0)
    assert run(model, "--mode=cudnn", "--verify", "--input-shape", "a:2x8x9x7", "--input-shape", "b:2x16x9x7") == 0
    out = model.parent / "out"
    data = json.loads((out / "optimize.json").read_text())
    assert data["paid"] and data["backend"] == "torch" and data["verdict"]["ratio"] == pytest.approx(0.8, abs=0.01)
    best, plain = (read_engine(find_engines(out / folder)[0]) for folder in ("best", "plain"))
    assert best.patch and best.profiled and plain.profiled and not plain.patch
    made = json.loads((out / "best" / "m.cutefuse.onnx.engine").read_text())
    assert made["model"] == str(out / "best" / "m.cutefuse.onnx") and "--mode=cudnn" in made["options"]
    assert json.loads((out / "plain" / "m.onnx.engine").read_text())["model"] == str(model)
    again = [str(out / "best" / "m.cutefuse.onnx.engine"), str(out / "again"), "--backend", "torch", "-p", *QUICK[:3]]
    assert process(again) == 0
    assert "2x8x9x7" in best.inference["Input inference shapes"]
    assert (out / "compare.html").is_file()


def test_a_slower_one_is_not(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(monkeypatch, 120.0)
    assert run(model, "--mode=cudnn") == 3
    assert (model.parent / "out" / "best" / "m.onnx.engine").is_file()


def test_outputs_that_differ_end_it_before_anything_is_handed_over(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cutefuse.engines.pytorch.run import TorchEngine

    fixed_times(monkeypatch, 80.0)
    real = TorchEngine.__call__
    first: list[Any] = []  # the plain engine is called first

    def call(self: Any, feed: Any = None) -> Any:
        first.append(self)
        found = real(self, feed)
        return {k: t * 1.5 for k, t in found.items()} if self is not first[0] else found

    monkeypatch.setattr(TorchEngine, "__call__", call)
    assert run(model, "--mode=cudnn", "--verify") == 1
    error = capsys.readouterr().err
    assert "computes other outputs than the plain engine: output y: worst error" in error
    assert (model.parent / "out" / "best" / "m.onnx.engine").is_file()


def test_a_mode_that_cannot_take_the_model_is_left_out_with_a_note(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cutefuse.engines.pytorch.run import TorchEngine

    def refuse(self: Any) -> None:
        raise CutefuseError("torch.compile cannot take the model")

    fixed_times(monkeypatch, 80.0)
    monkeypatch.setattr(TorchEngine, "_compile", refuse)
    assert run(model) == 0
    assert "plain could not be built with compile: torch.compile cannot take the model" in capsys.readouterr().out


@pytest.mark.parametrize(
    "word, text",
    [("--device=cuda:7", "device cuda:7 does not exist"), ("--mode=fast", "--mode=fast is unknown"),
     ("--threads=2", "--threads means nothing to the PyTorch back end")],
)  # fmt: skip
def test_what_cannot_be_is_refused(model: Path, capsys: pytest.CaptureFixture[str], word: str, text: str) -> None:
    assert run(model, word) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_both_modes_really_run(model: Path) -> None:
    assert run(model, "--verify", "--builds=2") in (0, 3)  # function bodies on a CPU: either may be faster
    data = json.loads((model.parent / "out" / "optimize.json").read_text())
    assert [sorted(r["times_us"]) for r in data["rounds"]] == [["compile", "cudnn"]] * 2
    assert data["sites"][0]["measured_us"] is not None


# -------------------------------------------------------------------------------------- what the comparison lets pass
def engine_of(bias: float = 0.0, body: str = BODY) -> Any:
    from cutefuse.engines.pytorch.run import TorchEngine

    model = graph(body, weights(w=FILTER, k=(12,)))
    stored = next(i for i in model.graph.initializer if i.name == "k")
    stored.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(stored) + bias).astype(np.float32), "k"))
    return TorchEngine.build(model, device="cpu")


@pytest.mark.parametrize("bias, wrong", [(0.0, 0), (1e-5, 0), (0.5, 1), (float("nan"), 1)])
def test_outputs_may_differ_by_rounding_alone(bias: float, wrong: int) -> None:
    from cutefuse.optimize.bench_torch import differences

    assert len(differences(engine_of(), engine_of(bias))) == wrong


def test_a_network_that_amplifies_rounding_is_judged_by_its_own_amplification() -> None:
    from cutefuse.optimize.bench_torch import differences

    steep = BODY.replace("y = Relu(d)", "e = Mul(d, d) f = Mul(e, e) g = Mul(f, f) h = Mul(g, g) y = Mul(h, h)")
    chaotic = steep.replace("y = Mul(h, h)", "y = Sin(h)")  # an angle of many turns
    assert not differences(engine_of(body=chaotic), engine_of(1e-7, chaotic))
    assert differences(engine_of(body=steep), engine_of(0.3, steep))
