"""Paths that a user may mistake: folders as files, and outputs whose reports would overwrite each other."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import onnx
import pytest
from graphs import graph

from cutefuse.cli import main
from cutefuse.engines import plugins
from cutefuse.graph.store import Writer
from cutefuse.report.read.sources import find_engines

BODY = "c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(d)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(graph(BODY, inputs={"a": "1,8,9,7", "b": "1,16,9,7"}), "m.onnx")
    (tmp_path / "folder").mkdir()
    return tmp_path


def one_sentence(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    return printed


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["patch", "folder"], "folder is a folder; give an ONNX file"),
        (
            ["patch", "m.onnx", "--all", "-o", "folder"],
            "folder is a folder; name the ONNX file to write, as folder/model.onnx",
        ),
        (["patch", "m.onnx", "--all", "-o", "none/m.onnx"], "none/m.onnx cannot be written"),
        (["unpatch", "folder"], "folder is a folder; give an ONNX file"),
        (["diff", "m.onnx", "folder"], "folder is a folder; give an ONNX file"),
        (["process", "m.onnx", "m.onnx", "--backend=onnxruntime"], "output folder m.onnx cannot be made"),
        (["process", "folder", "out"], "folder holds no layer information"),
        (["report", "folder"], "folder holds no layer information"),
        (["rank", "folder", "m.onnx"], "folder holds no layer information"),
        (["compare", "folder", "folder"], "folder holds no layer information"),
        (["roofline", "-o", "folder"], "folder cannot be written (Is a directory)"),
        (["roofline", "--llm", "folder"], "--llm is folder"),
        (["build", "folder"], "folder is a folder; give an ONNX file"),
    ],
)
def test_a_folder_for_a_file_is_one_sentence(
    argv: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in one_sentence(capsys, *argv)
    assert sorted(p.name for p in folder.iterdir()) in (["folder", "m.onnx"], ["folder", "m.onnx", "out"])


def test_unpatch_into_a_folder_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "m.onnx", "--all"]) == 0
    capsys.readouterr()
    assert "name the ONNX file to write" in one_sentence(capsys, "unpatch", "m.cutefuse.onnx", "-o", "folder")
    assert list(Path("folder").iterdir()) == []


def reported(path: str) -> str:
    return str(json.loads(Path(path).read_text())["output"]["path"])


def test_patching_an_output_again_keeps_both_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "m.onnx", "--all", "-o", "x.onnx"]) == 0
    first = Path("x.patch.json").read_text()
    onnx.save(graph(BODY, inputs={"a": "1,8,9,7", "b": "1,16,9,7"}), "x.onnx")  # as if it were patched further
    assert main(["patch", "x.onnx", "--all"]) == 0
    assert Path("x.patch.json").read_text() == first and reported("x.cutefuse.patch.json") == "x.cutefuse.onnx"
    assert "wrote x.cutefuse.onnx and x.cutefuse.patch.json" in capsys.readouterr().out
    for model in ("x.onnx", "x.cutefuse.onnx"):
        report = plugins.patch_report(Path(model))
        assert report is not None
    Path("out").mkdir()
    Path("out/x.cutefuse.onnx.engine.graph.json").write_text('{"Layers": ["a"]}')
    plugins.keep_report(Path("x.cutefuse.onnx"), Path("out"))
    assert find_engines(Path("out"))[0]["patch"].name == "x.cutefuse.patch.json"


def test_patching_twice_overwrites_its_own_report() -> None:
    for _ in range(2):
        assert main(["patch", "m.onnx", "--all"]) == 0
    assert sorted(p.name for p in Path().glob("*.patch.json")) == ["m.patch.json"]


def test_an_output_whose_report_would_overwrite_another_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "m.onnx", "--all"]) == 0
    Path("m.onnx").rename("other.onnx")
    capsys.readouterr()
    words = one_sentence(capsys, "patch", "other.onnx", "--all", "-o", "m.onnx")
    assert "m.patch.json is the report of m.cutefuse.onnx; choose another -o" in words
    assert not Path("m.onnx").exists() and reported("m.patch.json") == "m.cutefuse.onnx"
    assert main(["patch", "other.onnx", "--all", "-o", "m.onnx", "--dry-run"]) == 0


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"output": null}'])
def test_a_damaged_report_is_overwritten(content: str) -> None:
    Path("m.patch.json").write_text(content)
    assert main(["patch", "m.onnx", "--all"]) == 0
    assert reported("m.patch.json") == "m.cutefuse.onnx"


@pytest.mark.parametrize("argv", [["patch", "m.onnx", "--all", "-o", "{}"], ["roofline", "-o", "{}"]])
def test_a_device_or_a_pipe_is_never_replaced(
    argv: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    words = one_sentence(capsys, *(a.format(pipe) for a in argv))
    assert f"{pipe} is no file that can be replaced; choose another output path" in words
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "argv",
    [
        ["patch", "m.onnx", "--all", "-o", "{}"],
        ["patch", "{}"],
        ["unpatch", "{}"],
        ["process", "m.onnx", "{}"],
        ["report", "{}"],
        ["roofline", "-o", "{}"],
    ],
)
def test_a_name_that_is_too_long_is_one_sentence(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "File name too long" in one_sentence(capsys, *(a.format("n" * 300 + ".onnx") for a in argv))


def test_a_disk_that_fills_up_beside_outside_weights_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Writer, proto: onnx.TensorProto, chunks: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = onnx.load("m.onnx")
    onnx.save(model, "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=100)
    before = sorted(p.name for p in folder.iterdir())
    monkeypatch.setattr(Writer, "_append", full)
    words = one_sentence(capsys, "patch", "m.onnx", "--all")
    assert "m.cutefuse.onnx cannot be written (No space left on device)" in words
    assert sorted(p.name for p in folder.iterdir()) == before


@pytest.mark.parametrize("argv", [["patch", "m.onnx", "--all"], ["unpatch", "m.cutefuse.onnx", "-o", "plain.onnx"]])
def test_sigterm_leaves_nothing_behind(argv: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: Writer, *args: object) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return folder

    assert main(["patch", "m.onnx", "--all"]) == 0
    before = sorted(p.name for p in folder.iterdir())
    monkeypatch.setattr(Writer, "save", end)
    own = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            main(argv)
    finally:
        signal.signal(signal.SIGTERM, own)
    assert ended.value.code == 143 and sorted(p.name for p in folder.iterdir()) == before
