"""What the tests of `cutefuse optimize` share: the model, the stand-in for trtexec, runs and their records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import TWO, graph
from trtexec_stub import STUB

from cutefuse.commands.optimize import main
from cutefuse.optimize import bench_tensorrt
from cutefuse.report.read.reader import find_engines, read_engine

# us of the nodes of TWO: the first site saves 70, the second loses 45.
COSTS = {"Concat_0": 40.0, "Conv_1": 60.0, "Relu_2": 10.0, "Concat_3": 5.0, "Conv_4": 50.0, "Tanh_5": 5.0,
         "fused Conv_1": 40.0, "fused Conv_4": 105.0}  # fmt: skip
BAD = {**COSTS, "fused Conv_1": 130.0}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(graph(TWO, outputs=("y1", "y2")), str(tmp_path / "two.onnx"))
    return tmp_path / "two.onnx"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcutefuse.so").write_bytes(b"")
    monkeypatch.setattr("cutefuse.plugin_path", lambda: tmp_path / "lib" / "libcutefuse.so")


@pytest.fixture
def trtexec(tmp_path: Path, library: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in. Every sample of a race is a process of its own."""
    path = tmp_path / "bin" / "trtexec"
    path.parent.mkdir()
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("TRTEXEC", str(path))
    monkeypatch.setenv("STUB_COSTS", str(tmp_path / "costs.json"))
    return path


@pytest.fixture
def stub(tmp_path: Path, trtexec: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, whose samples are taken without a process: dozens of them take a while."""
    random = np.random.default_rng(1)

    def sample(self: Any, engine: Path, libraries: list[Path]) -> float:
        costs = json.loads((tmp_path / "costs.json").read_text())
        nodes = json.loads(engine.read_text())
        return sum(costs.get(f"fused {n}" if own else n, 10.0) for n, own in nodes) * float(random.normal(1, 0.002))

    monkeypatch.setattr(bench_tensorrt.TensorRTBench, "_sample", sample)
    return trtexec


def run(model: Path, *words: str, costs: dict[str, float] | None = None) -> int:
    (model.parent / "costs.json").write_text(json.dumps(costs or COSTS))
    return main([str(model), "-o", str(model.parent / "out"), "--sm", "0", *words])


def record(model: Path) -> dict[str, Any]:
    return dict(json.loads((model.parent / "out" / "optimize.json").read_text()))


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def good(folder: Path) -> str:
    """The name of the engine in best/, whose files must be whole."""
    (found,) = find_engines(folder / "best")
    assert read_engine(found).profiled and found["engine"].is_file()
    assert not [p for p in folder.iterdir() if p.name.startswith(".")], "leftovers"
    return read_engine(found).name


def good_name(folder: Path) -> str:
    return read_engine(find_engines(folder / "best")[0]).name
