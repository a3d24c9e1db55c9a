"""Engine JSON with values of a wrong kind or size: what is unusable is left out, and the report is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cutefuse.cli import main

LAYER = {
    "Name": "conv", "LayerType": "CaskConvolution",
    "Inputs": [{"Name": "x", "Dimensions": [1, 64, 8, 8], "Format/Datatype": "Half"}],
    "Outputs": [{"Name": "y", "Dimensions": [1, 64, 8, 8], "Format/Datatype": "Half"}],
}  # fmt: skip
TIMES = [{"count": 1}, {"name": "conv", "timeMs": 1.0, "averageMs": 0.01, "medianMs": 0.01, "percentage": 100.0}]


def engine(folder: Path, metadata: dict[str, Any], dims: list[Any]) -> Path:
    layer = {**LAYER, "Outputs": [{**LAYER["Outputs"][0], "Dimensions": dims}]}
    for kind, data in (
        ("graph", {"Layers": [layer], "Bindings": []}), ("profile", TIMES), ("profile.metadata", metadata)
    ):  # fmt: skip
        (folder / f"m.engine.{kind}.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize(
    "metadata", [{"percentiles": 99}, {"percentiles": True}, {"percentiles": {"a": 1}}, {"warnings": 7}, {"concats": 1}]
)
def test_a_number_where_a_list_belongs_is_left_out(
    metadata: dict[str, Any], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    source = str(engine(tmp_path / "out", metadata, [1, 64, 8, 8]))
    assert main([command, source, *([source] if command == "compare" else [])]) == 0


@pytest.mark.parametrize("dim", [10**400, 1e308, -(10**400), "many", None])
def test_an_absurd_dimension_is_unknown(dim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert main(["report", str(engine(tmp_path / "out", {}, [1, dim, 8, 8]))]) == 0


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize("key", ["Latency", "GPU Compute Time", "Throughput", "Total Host Walltime"])
@pytest.mark.parametrize(
    "value", ["fast", None, [1, 2, 3, 4, 5, "slow"], [1, 2, 3, 4, 5, None], [1, 2, 3, "x", 5, 6], [[1]] * 6, {"a": 1},
              10**400, 1e-320, True, [1e-320] * 6, [10**400] * 6, []],
)  # fmt: skip
def test_a_text_where_a_figure_belongs_is_left_out(
    value: Any, key: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    source = str(engine(tmp_path / "out", {"performance_summary": {key: value}}, [1, 64, 8, 8]))
    assert main([command, source, *([source] if command == "compare" else [])]) == 0


@pytest.mark.parametrize("field", ["averageMs", "medianMs", "percentage", "timeMs"])
@pytest.mark.parametrize("value", [1e-320, 5e-324, 1e-200, 1e308, 10**400, "0.01", None, -1.0, 0, True, [0.01]])
def test_a_time_that_is_none_is_left_out(
    value: Any, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    monkeypatch.setitem(TIMES[1], field, value)
    peaks = {"device": "d", "bandwidth_gbs": 100.0, "tflops": {"FP16": 1.0}}
    source = engine(tmp_path / "out", {"peaks": peaks}, [1, 64, 8, 8])
    assert main(["report", str(source)]) == 0
    assert main(["compare", str(source), str(source)]) == 0
