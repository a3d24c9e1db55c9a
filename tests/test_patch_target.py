"""The GPU that `cutefuse patch` fuses for: this machine's, a named one, one that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from devices import skip_without_code
from graphs import TWO, graph

from cutefuse import kernels
from cutefuse.commands.patch import main

ROOT = Path(__file__).parent.parent


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(graph(TWO, outputs=("y1", "y2")), str(path))
    return path


def test_the_target_is_this_machines_gpu_unless_it_is_given(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutefuse.commands.choices.local_sm", lambda: 89)
    for options, sm in (([], 89), (["--sm", "90"], 90), (["--sm", "0"], 0)):
        assert main([str(source), "--all", *options]) == 0
        assert json.loads(source.with_name("model.patch.json").read_text())["sm"] == sm


@pytest.mark.parametrize("words", ["9.0", "sm_90", "-1", ""])
def test_a_capability_in_other_words_is_refused_with_how_to_write_it(
    words: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(source), f"--sm={words}"])
    assert stop.value.code == 2 and "90 for 9.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sm", "gpu"),
    [
        (["--gpu", "H200"], 90, "H200"),
        (["--gpu", "rtx4090"], 89, "RTX 4090"),
        (["--gpu", "Orin"], 87, "Jetson AGX Orin 64GB"),
        (["--gpu", "A100 80GB PCIe", "--sm", "80"], 80, "A100 80GB PCIe"),
        (["--gpu", "A30", "--sm", "0"], 0, "A30"),
    ],
)
def test_a_named_gpu_is_the_target_in_everything(
    options: list[str], sm: int, gpu: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_code(sm)
    assert main([str(source), "--all", "--dry-run", "--json", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["sm"], report["prediction"]["gpu"], report["prediction"]["gpu_assumed"]) == (sm, gpu, False)


def test_a_gpu_name_that_several_boards_share_says_which_was_taken(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("A100", True), ("A100 SXM4 80GB", False)):
        assert main([str(source), "--all", "--dry-run", "--gpu", name]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "on A100 SXM4 80GB" in out
        assert ("(the name fits A100 80GB PCIe, A100 40GB too: --gpu takes the whole one)" in out) == said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--gpu", "H200", "--sm", "80"],
            "--gpu H200 has compute capability 9.0, and --sm 80 is 8.0; give one of them",
        ),
        (["--gpu", "Foo"], "the peak rates of a GPU 'Foo' are not known; choose one of"),
        (["--gpu", "T4"], "compute capability 7.5 is asked for"),
    ],
)
def test_a_gpu_that_cannot_be_the_target_is_a_sentence(
    options: list[str], words: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), "--dry-run", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("sm", ["75", "100", "61"])
def test_a_gpu_without_kernels_is_refused_before_anything_is_written(
    source: Path, capsys: pytest.CaptureFixture[str], sm: str
) -> None:
    if kernels.reject_device(int(sm)) is None:
        pytest.skip(f"this build holds code for {sm}")
    before = sorted(source.parent.iterdir())
    assert main([str(source), "--sm", sm]) == 2
    said = capsys.readouterr().err
    assert f"compute capability {sm[:-1]}.{sm[-1]} is asked for" in said and "--sm 0 takes any" in said
    assert sorted(source.parent.iterdir()) == before
