"""The line that a command ends with: the next command, with its paths filled in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

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
        (ROOT / "scripts/patch_onnx.py", "rank", "PYTHONPATH=. python -m cutefuse rank 'a b.onnx' out"),
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
    report = {"input": {"path": "m.onnx"}, "output": {"path": "p.onnx"}, "sites": []}
    (tmp_path / "p.patch.json").write_text(json.dumps(report))
    return tmp_path


def test_patch_leads_to_build_and_process_and_these_to_compare(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next_step.after_patch(Path("p.onnx"), {})
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
    assert said(capsys) == ["cutefuse patch m.onnx --verify"]  # without times there is nothing to rank by
    (folder / "out").mkdir()
    (folder / "out" / "m.onnx.engine.profile.json").touch()
    next_step.after_process(Path("m.onnx"), Path("out"))
    assert said(capsys) == ["cutefuse rank out m.onnx", "cutefuse patch m.onnx --verify"]


@pytest.mark.parametrize("report", ["no JSON", "[]", "{}", '{"input": 3, "output": {"path": "p.onnx"}, "sites": []}'])
def test_a_damaged_patch_report_is_passed_over(report: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "p.patch.json").write_text(report)
    next_step.after_process(Path("p.onnx"), Path("out"))
    assert said(capsys)[-1] == "cutefuse patch p.onnx --verify"


def test_after_an_engine_or_without_the_plain_model_nothing_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next_step.after_process(Path("p.engine"), Path("out"))
    (folder / "m.onnx").unlink()
    next_step.after_process(Path("p.onnx"), Path("out"))
    assert said(capsys) == []


def lowered(folder: Path, name: str = "p.cutefuse.onnx") -> Path:
    report = {
        "input": {"path": "m.onnx"},
        "output": {"path": name},
        "sites": [],
        "conversion": {"dtype": "float16", "changed": True},
    }
    (folder / "p.patch.json").write_text(json.dumps(report))
    return Path(name)


def engine_of(folder: Path, model: str, backend: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{model}.engine.graph.json").touch()
    (folder / f"{model}.engine.build.metadata.json").write_text(json.dumps({"backend": backend}))


def test_a_converted_model_is_compared_with_itself_undone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine of the float32 model before is no rival: it would credit fusing with what float16 gains."""
    patched = lowered(folder)
    next_step.after_patch(patched, json.loads((folder / "p.patch.json").read_text()))
    assert said(capsys)[-1] == "cutefuse unpatch p.cutefuse.onnx"
    engine_of(folder / "plain", "m.onnx", "onnxruntime")
    next_step.after_process(patched, Path("p.out"))
    steps = ["cutefuse process p.plain.onnx p.out_plain", "cutefuse compare p.out_plain p.out"]
    assert said(capsys) == ["cutefuse unpatch p.cutefuse.onnx -o p.plain.onnx", *steps]
    (folder / "p.plain.onnx").touch()
    next_step.after_process(patched, Path("p.out"))
    assert said(capsys) == steps
    engine_of(folder / "p.out_plain", "p.plain.onnx", "")
    next_step.after_process(patched, Path("p.out"))
    assert said(capsys) == ["cutefuse compare p.out_plain p.out"]


def test_a_conversion_that_changed_nothing_asks_for_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patched = lowered(folder)
    report = json.loads((folder / "p.patch.json").read_text())
    report["conversion"]["changed"] = False
    (folder / "p.patch.json").write_text(json.dumps(report))
    next_step.after_patch(patched, json.loads((folder / "p.patch.json").read_text()))
    assert not [line for line in said(capsys) if "unpatch" in line]
    next_step.after_process(patched, Path("p.out"))
    assert said(capsys) == ["cutefuse process m.onnx p.out_plain", "cutefuse compare p.out_plain p.out"]


def test_an_engine_of_another_back_end_is_no_rival(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine_of(folder / "p.out", "p.onnx", "rtx")
    engine_of(folder / "a_cpu", "m.onnx", "onnxruntime")
    next_step.after_process(Path("p.onnx"), Path("p.out"), ("--backend", "rtx", "--shapes=x:1x3x8x8"))
    assert said(capsys)[0] == "cutefuse process m.onnx p.out_plain --backend rtx --shapes=x:1x3x8x8"
    engine_of(folder / "b_rtx", "m.onnx", "rtx")
    next_step.after_process(Path("p.onnx"), Path("p.out"))
    assert said(capsys) == ["cutefuse compare b_rtx p.out"]


@pytest.mark.parametrize(
    ("kind", "option"), [("float32", " --dtype fp16"), ("float16", ""), ("quantised", ""), ("no model", "")]
)
def test_a_float32_model_is_patched_in_float16(
    kind: str, option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind != "no model":
        elem = TensorProto.FLOAT16 if kind == "float16" else TensorProto.FLOAT
        x, y = (helper.make_tensor_value_info(n, elem, [1]) for n in "xy")
        node = helper.make_node("DequantizeLinear" if kind == "quantised" else "Relu", ["x"], ["y"])
        onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y])), "m.onnx")
    next_step.after_process(Path("m.onnx"), Path("out"))
    assert said(capsys)[-1] == f"cutefuse patch m.onnx{option} --verify"
