"""`--json`: every command prints one JSON document on stdout and nothing else there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_files as ef
import numpy as np
import onnx
import pytest
from graphs import graph

from cutefuse import cli
from cutefuse.output import indented, json_alone, printable

DATA = Path(__file__).parent / "data" / "engines"


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    assert cli.main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    body = "c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(d)"
    onnx.save(graph(body, inputs={"a": "1,8,9,7", "b": "1,16,9,7"}), "m.onnx")
    return tmp_path


Case = Callable[[Path, pytest.CaptureFixture[str]], None]


def patched_and_back(_: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "patch", "m.onnx", "--all")["summary"]["fused"] == 1
    assert run(capsys, "unpatch", "m.cutefuse.onnx") == {"output": "m.plain.onnx", "fused_nodes": 1}
    assert run(capsys, "diff", "m.onnx", "m.cutefuse.onnx", code=1)["nodes"]


def profiled(_: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("process", "m.onnx", "out", "--backend=onnxruntime", "--iterations=5", "--duration=0.01")
    data = run(capsys, *words)
    assert data["backend"] == "onnxruntime" and data["layers"] > 0 and Path(data["page"]).is_file()
    assert run(capsys, "process", "m.onnx", "dry", "--print-only", "--backend=onnxruntime") == {"page": None}
    assert isinstance(run(capsys, "rank", "out", "m.onnx"), list)
    assert run(capsys, "report", "out")["name"] == "m.onnx"


def planned(_: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run(capsys, "build", "m.onnx", "out", "--dry-run", "--trt-version=10.3")
    assert data == {"engine": "out/m.onnx.engine", "written": False}


def compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run(capsys, "compare", *ef.write_pair(folder), "-o", "c.html")
    assert len(data["engines"]) == 2 and data["rows"][0]["times_us"] and data["speedup"] > 1
    assert json.loads(Path("c.json").read_text())["rows"] == data["rows"]


def roofs(_: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [r["device"] for r in run(capsys, "roofline", "--peaks", "H200")] == ["H200"]
    assert run(capsys, "roofline", "--llm", "llama-3-8b")["decode"]


def listed(_: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {op["op"]: op for op in run(capsys, "profile-kernels", "--list")}
    assert data["concat_conv"]["cases"] and {"name", "text"} == set(data["row_norm"]["cases"][0])


def doctored(_: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) in (0, 1)
    assert {"name", "status"} <= set(json.loads(capsys.readouterr().out)[0])


@pytest.mark.parametrize("case", [patched_and_back, profiled, planned, compared, roofs, listed, doctored])
def test_a_command_prints_json_and_nothing_else(case: Case, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case(folder, capsys)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_the_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "--json" in capsys.readouterr().out


def test_an_error_is_no_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "nowhere", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: nowhere does not exist")


def test_without_the_option_nothing_is_redirected(capsys: pytest.CaptureFixture[str]) -> None:
    with json_alone(False) as show:
        show({"a": 1})
        print("a line")
    assert capsys.readouterr().out == "a line\n"


def test_what_json_has_no_word_for_is_null() -> None:
    given = {"a": [math.inf, 1.5, (math.nan, "x")], "b": {"c": -math.inf}, "d": np.float64("nan")}
    assert printable(given) == {"a": [None, 1.5, [None, "x"]], "b": {"c": None}, "d": None}


def test_a_page_does_not_overwrite_the_data_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *map(str, ef.write_pair(folder)), "-o", "c.json"]) == 2
    assert "name it *.html" in capsys.readouterr().err and not Path("c.json").exists()


@pytest.mark.parametrize("data", [
    {}, [], None, 1.5, "a\n\"b", [1, 2.0, None, True], {"a": []}, {"a": {}, "b": [[]], "c": [{}]}, [[1, 2], [3]],
    {"a": 1, "b": {"c": [1, {"d": "\udc80\u00e9"}], "e": (1, 2)}, "f": math.nan}, ({"x": ()},), {"a\"b": {"c": [0]}},
])  # fmt: skip
def test_indented_writes_what_json_writes(data: object) -> None:
    assert json.dumps(json.loads(indented(data))) == json.dumps(data)
    items = isinstance(data, (dict, list, tuple))  # each takes a line of its own, and numbers one together
    assert indented({"sites": [data, data], "more": 1}).count("\n") == (6 if items else 3)
