"""What a command writes destroys nothing that it reads, and the model comes with its report or not at all."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import onnx
import pytest
from graphs import graph

from cutefuse.cli import main

BODY = "c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(d)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(name: str, weights: str) -> None:
    """A model whose weights lie in the file `weights`."""
    model = graph(BODY, inputs={"a": "1,8,9,7", "b": "1,16,9,7"})
    onnx.save(model, name, save_as_external_data=True, location=weights, size_threshold=0)


def hashes() -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path().iterdir()}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    before = hashes()
    assert main(list(argv)) == 2
    assert hashes() == before
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    return error[0]


@pytest.mark.parametrize(
    ("weights", "argv"),
    [
        ("out.onnx.data", ["-o", "out.onnx"]),
        ("m.cutefuse.onnx.data", []),
        ("m.patch.json", []),
        ("out.onnx", ["-o", "out.onnx"]),
    ],
)
def test_patch_never_overwrites_the_weights_that_it_reads(
    weights: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    save("m.onnx", weights)
    words = refused(capsys, "patch", "m.onnx", "--all", *argv)
    assert "would be written, and it holds weights of m.onnx; choose another -o" in words


def test_a_link_to_the_weights_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    save("m.onnx", "weights")
    Path("out.onnx.data").symlink_to("weights")
    assert "it holds weights of m.onnx" in refused(capsys, "patch", "m.onnx", "--all", "-o", "out.onnx")


def test_unpatch_never_overwrites_the_weights_that_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    save("m.onnx", "m.data")
    assert main(["patch", "m.onnx", "--all"]) == 0
    Path("m.cutefuse.onnx").rename("renamed.onnx")
    assert Path("m.cutefuse.onnx.data").is_file()
    capsys.readouterr()
    words = refused(capsys, "unpatch", "renamed.onnx", "-o", "m.cutefuse.onnx")
    assert "m.cutefuse.onnx.data would be written, and it holds weights of renamed.onnx" in words
    assert main(["unpatch", "renamed.onnx", "-o", "plain.onnx"]) == 0


def test_weights_of_another_name_are_no_obstacle() -> None:
    save("m.onnx", "m.onnx.data")
    before = hashes()
    assert main(["patch", "m.onnx", "--all", "--verify"]) == 0
    assert before.items() <= hashes().items() and Path("m.cutefuse.onnx.data").is_file()


def test_no_model_without_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(graph(BODY), "m.onnx")
    Path("m.patch.json").mkdir()
    assert main(["patch", "m.onnx", "--all"]) == 2
    assert "m.patch.json is a folder, and would be written; choose another output path" in capsys.readouterr().err
    assert sorted(p.name for p in Path().iterdir()) == ["m.onnx", "m.patch.json"]


@pytest.mark.parametrize("path", ["", ".", "/"])
@pytest.mark.parametrize(
    "command", ["patch {}", "patch m.onnx -o {}", "unpatch {}", "unpatch m.onnx -o {}", "build {}", "roofline -o {}"]
)
def test_a_path_without_a_file_name_is_one_sentence(
    command: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(graph(BODY), "m.onnx")
    assert main([a.format(path) for a in command.split()]) == 2
    printed = capsys.readouterr().err
    assert "is a folder; give the path of a file" in printed and printed.count("\n") == 1
    assert [p.name for p in Path().iterdir()] == ["m.onnx"]


def test_names_that_the_terminal_cannot_show_are_escaped(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    onnx.save(graph(BODY), "\u00fc.onnx")
    for argv in (["patch", "\u00fc.onnx", "--all"], ["patch", "\u00fc.onnx", "--all", "--json"]):
        with (folder / "printed").open("w", encoding="ascii") as out:
            monkeypatch.setattr(sys, "stdout", out)
            assert main(argv) == 0
        monkeypatch.undo()
        monkeypatch.chdir(folder)
        printed = Path("printed").read_text(encoding="ascii")
        assert "\\" in printed
    assert json.loads(printed)["output"]["path"] == "\u00fc.cutefuse.onnx"
