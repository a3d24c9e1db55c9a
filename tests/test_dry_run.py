"""`cutefuse build --dry-run` on a machine without TensorRT: the newest version is assumed, and said."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import pytest
from graphs import graph

from cutefuse.commands import patch, process
from cutefuse.commands.build import main
from cutefuse.select.engines import NEWEST

VERSION = ".".join(map(str, NEWEST))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model, where neither trtexec nor TensorRT's or PyTorch's package is to be found."""
    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    onnx.save(graph("y = Relu(a)", {}, inputs={"a": "2"}, rank=1), str(tmp_path / "m.onnx"))
    return str(tmp_path / "m.onnx")


def test_the_newest_version_is_assumed_and_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model, "--dry-run"]) == 0
    said, command = capsys.readouterr().out.splitlines()
    assert f"{VERSION} is assumed" in said and "--trt-version" in said
    assert command.startswith(f"trtexec --onnx={model} --saveEngine=")


def test_its_options_are_those_of_that_version(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model, "--dry-run", "--fp16"]) == 2
    assert f"TensorRT {VERSION}.0 builds strongly typed" in capsys.readouterr().err


def test_a_given_version_is_taken_without_a_word(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model, "--dry-run", "--fp16", "--trt-version", "10.3"]) == 0
    assert "is assumed" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--dry-run", "--backend", "tensorrt"]])
def test_a_real_build_and_another_backend_assume_nothing(
    words: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "pip install tensorrt" in printed.err


def test_an_installed_trtexec_is_asked(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: "/no/such/trtexec")
    assert main([model, "--dry-run"]) == 2


def test_options_that_do_nothing_say_so(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main([model, "--dry-run", "--no-plugins", "--trt-version", "10.3"])
    out = capsys.readouterr().out
    assert f"--no-plugins does nothing: {model} holds no fused node" in out and "--trt-version" not in out
    process.main([model, str(tmp_path), "--backend", "onnxruntime", "--trt-version", "10.3", "-b"])
    assert "--trt-version does nothing without --print-only" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "said"), [("tensorrt", True), ("torch", True), ("trtexec", False)])
def test_a_time_limit_without_trtexec_says_that_it_does_nothing(
    kind: str, said: bool, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cutefuse.commands.build.choose_backend", lambda *_: kind)
    for words in ([], ["--timeout", "5"]):
        main([model, "--dry-run", "--backend", "tensorrt", *words])
        words_of_kind = f"--timeout does nothing with the back end {kind}"
        assert (words_of_kind in capsys.readouterr().out) == (said and bool(words))


def test_a_time_limit_is_idle_in_onnx_runtime_and_unjudged_without_any_engine(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, "--timeout", "9"]) == 2
    assert "--timeout" not in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "onnxruntime")
    process.main([model, str(tmp_path), "--backend", "onnxruntime", "--timeout", "9", "-b"])
    assert "--timeout does nothing" in capsys.readouterr().out
    process.main([str(tmp_path), str(tmp_path), "--timeout", "9"])
    assert "--timeout" not in capsys.readouterr().out


def test_a_model_with_fused_nodes_can_do_without_plugins(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole, patched = str(tmp_path / "whole.onnx"), str(tmp_path / "patched.onnx")
    onnx.save(graph("c = Concat<axis=1>(a, b) x = Conv(c, w, k) y = Relu(x)"), whole)
    assert patch.main([whole, "-o", patched, "--all"]) == 0
    main([patched, "--dry-run", "--no-plugins", "--trt-version", "10.3"])
    assert "does nothing" not in capsys.readouterr().out
