"""`cutefuse optimize` over the stand-in for TensorRT's Python API, and what its arguments may be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_tensorrt
import onnx
import pytest
from optimize_runs import BAD, COSTS, good, record, run

from cutefuse.commands.optimize import seconds
from cutefuse.engines import build as engine
from cutefuse.engines import cuda_memory as device
from cutefuse.engines.tensorrt import api as tensorrt_api
from cutefuse.errors import CutefuseError
from cutefuse.optimize import bench

pytest_plugins = ("optimize_runs",)


# ---------------------------------------------------------------------------------------------------- Python API
class Clock(device.Device):
    """A device whose time is what the engine's layers take."""

    name = "clock"

    def _open(self) -> None:
        self.used = 0

    def call(self, name: str, *args: Any) -> Any:
        self.used += 1
        return 4096 * self.used

    def time_ms(self, work: Callable[[], None]) -> float:
        before = fake_tensorrt.elapsed_ms
        work()
        return (fake_tensorrt.elapsed_ms - before) * (1 + 0.001 * (self.used % 5))


@pytest.fixture
def api(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr(fake_tensorrt, "__version__", "10.16.0")
    monkeypatch.setattr(fake_tensorrt, "costs", {})
    found = engine.importlib.util.find_spec
    monkeypatch.setattr(
        engine.importlib.util, "find_spec", lambda n: SimpleNamespace() if n == "tensorrt" else found(n)
    )
    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: None)
    monkeypatch.setattr(tensorrt_api, "open_device", Clock)


@pytest.mark.parametrize("costs, code, kept", [(COSTS, 0, "two.cutefuse.onnx"), (BAD, 3, "two.onnx")])
def test_the_python_api_gives_the_same(
    model: Path, api: None, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float], code: int, kept: str
) -> None:
    monkeypatch.setattr(fake_tensorrt, "costs", {k: v / 1000 for k, v in costs.items()})
    assert run(model, "--iterations=3", "--duration=0.01", "--warmUp=1") == code
    data = record(model)
    assert data["backend"] == "tensorrt" and good(model.parent / "out") == kept
    assert [s["status"] for s in data["sites"]] == ["kept" if not code else "taken back", "taken back"]


def test_an_older_python_package_gets_no_function_bodies(
    model: Path, api: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt, "__version__", "10.3.0")
    monkeypatch.setattr(fake_tensorrt, "costs", {k: v / 1000 for k, v in COSTS.items()})
    assert run(model, "--iterations=3", "--duration=0.01", "--warmUp=1") == 0
    assert not onnx.load(str(model.parent / "out" / "best" / "two.cutefuse.onnx")).functions


# ----------------------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize("text, want", [("300", 300.0), ("300s", 300.0), ("5min", 300.0), ("1.5min", 90.0)])
def test_time_limits(text: str, want: float) -> None:
    assert seconds(text) == want


@pytest.mark.parametrize("text", ["", "0", "5h", "min", "-3s"])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(Exception, match="no time limit"):
        seconds(text)


def test_an_output_folder_that_is_a_file_is_refused(model: Path, stub: Path) -> None:
    (model.parent / "out").write_text("")
    with pytest.raises(CutefuseError, match="cannot be made"), bench.Shelf(model.parent / "out").open():
        pass
