"""The line that a command ends with: the next command, with its paths filled in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
from graphs import graph, weights

from cutefuse.commands import next_step

ROOT = Path(__file__).resolve().parent.parent


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("next: ").split("  #")[0] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("started", "command", "line"),
    [
        ("/usr/bin/cutefuse", "process", "cutefuse process 'a b.onnx' out"),
        (ROOT / "scripts/patch_onnx.py", "process", "python scripts/process_engine.py 'a b.onnx' out"),
        (ROOT / "scripts/patch_onnx.py", "build", "scripts/build_engine.sh 'a b.onnx' out"),
        (ROOT / "scripts/patch_onnx.py", "rank", "cutefuse rank 'a b.onnx' out"),
        (ROOT / "cutefuse/cli.py", "process", "python scripts/process_engine.py 'a b.onnx' out"),
        (ROOT / "cutefuse/__main__.py", "process", "python -m cutefuse process 'a b.onnx' out"),
        ("/elsewhere/scripts/patch_onnx.py", "process", "cutefuse process 'a b.onnx' out"),
    ],
)
def test_a_command_is_shown_as_this_user_types_it(
    started: str | Path, command: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(started)])
    assert next_step.typed(command, Path("a b.onnx"), "out") == line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cutefuse"])
    (tmp_path / "m.onnx").touch()
    (tmp_path / "m.patch.json").write_text(json.dumps({"input": {"path": "m.onnx"}, "output": {"path": "p.onnx"}}))
    return tmp_path


def test_patch_leads_to_build_and_process_and_these_to_compare(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next_step.after_patch(Path("p.onnx"))
    assert said(capsys) == ["cutefuse build p.onnx", "cutefuse process p.onnx p.out"]
    next_step.after_build(Path("p.trt/p.onnx.engine"))
    assert said(capsys) == ["cutefuse process p.trt/p.onnx.engine p.trt"]
    next_step.after_process(Path("p.onnx"), Path("p.out"))
    assert said(capsys) == ["cutefuse process m.onnx p.out_plain", "cutefuse compare p.out_plain p.out"]
    for name in ("p.out_plain", "p.out"):
        (folder / name).mkdir()
    (folder / "p.out_plain" / "m.onnx.engine.graph.json").touch()
    next_step.after_process(Path("p.onnx"), Path("p.out"))
    assert said(capsys) == ["cutefuse compare p.out_plain p.out"]


def test_a_model_that_was_not_patched_is_ranked_and_patched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next_step.after_process(Path("m.onnx"), Path("out"))
    assert said(capsys) == ["cutefuse rank out m.onnx", "cutefuse patch m.onnx --verify"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_float32_model_is_patched_in_float16(dtype: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(graph("x = Conv(a, w) y = Relu(x)", weights(dtype=dtype, w=(12, 8, 3, 3)), dtype=dtype,
                    inputs={"a": "1,8,9,7"}), "m.onnx")  # fmt: skip
    next_step.after_process(Path("m.onnx"), Path("out"))
    assert ("--dtype fp16" in said(capsys)[-1]) == (dtype == "float32")


@pytest.mark.parametrize("report", ["no JSON", "[]", "{}", '{"input": 3, "output": {"path": "p.onnx"}}'])
def test_a_damaged_patch_report_is_passed_over(report: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "m.patch.json").write_text(report)
    next_step.after_process(Path("p.onnx"), Path("out"))
    assert said(capsys)[-1] == "cutefuse patch p.onnx --verify"


def test_after_an_engine_or_without_the_plain_model_nothing_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next_step.after_process(Path("p.engine"), Path("out"))
    (folder / "m.onnx").unlink()
    next_step.after_process(Path("p.onnx"), Path("out"))
    assert said(capsys) == []
