"""`profile-kernels --beside`: work timed alone and beside another load; loads are processes of this machine here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cutefuse.commands import profile_kernels
from cutefuse.errors import CutefuseError
from cutefuse.profilers.kernels import contention
from cutefuse.profilers.kernels.contention import Load, Times, measure, records


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "_SETTLE_S", 0.3)


def busy(folder: Path) -> str:
    """A command that leaves its process id in `folder` and runs on."""
    script = f"import os, pathlib, time; pathlib.Path('{folder}/pid').write_text(str(os.getpid())); time.sleep(600)"
    return f'process:{sys.executable} -c "{script}"'


def alive(folder: Path) -> bool:
    """Whether that process still runs."""
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return True


def test_work_is_slower_while_the_load_is_there_and_the_load_ends(tmp_path: Path) -> None:
    def sample(runs: int) -> float:
        return 30.0 if alive(tmp_path) else 10.0

    times = measure(sample, [Load.of(busy(tmp_path))], rounds=4)
    assert [t.median_us for t in times] == [10.0, 30.0, 10.0] and not alive(tmp_path)
    assert [t.label for t in times][::2] == ["alone", "alone again"]
    assert [r["ratio"] for r in records(times)] == [1.0, 3.0, 1.0]


def test_a_failure_of_the_work_ends_the_load(tmp_path: Path) -> None:
    def sample(runs: int) -> float:
        if alive(tmp_path):
            raise CutefuseError("the work failed")
        return 1.0

    with pytest.raises(CutefuseError, match="the work failed"):
        measure(sample, [Load.of(busy(tmp_path))], rounds=2)
    assert not alive(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [("process:/no/such/program", "cannot be started"), ("process:false", "ended before the measurement did: exit")],
)
def test_a_load_that_does_not_run_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(CutefuseError, match=words):
        measure(lambda runs: 1.0, [Load.of(text)], rounds=2)


def test_a_load_of_ours_says_why_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(CutefuseError, match="process:copy ended.*PyTorch sees none"):
        measure(lambda runs: 1.0, [Load.of("process:copy")], rounds=1)


@pytest.mark.parametrize("text", ["", "copy", "stream:", "stream:python x.py", "thread:copy", "process:"])
def test_other_loads_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_kernels.main(["--beside", text, "--op", "row_norm", "--case", "large epsilon"]) == 2
    assert f"--beside is {text}; give stream:copy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--beside times one thing"),
        (["--command", "x"], "--beside times one thing"),
        (["--op", "row_norm", "--engine", "x"], "--beside times one thing"),
        (["--op", "row_norm"], "--op row_norm needs a --case"),
        (["--op", "row_norm", "--case", "large epsilon", "--config", "1", "--config", "2"], "--beside times one tile"),
    ],
)
def test_what_is_timed_is_one_thing(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_kernels.main(["--beside", "process:copy", *argv]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert words in line


def test_an_engine_without_what_runs_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.engine").write_bytes(b"ftrt")
    monkeypatch.setattr("cutefuse.profilers.kernels.engines.importlib.util.find_spec", lambda name: None)
    assert profile_kernels.main(["--beside", "process:copy", "--engine", str(tmp_path / "x.engine")]) == 2
    assert "is timed beside a load by its Python package" in capsys.readouterr().err


def test_the_figures_are_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_kernels, "launcher", lambda problem, config: None)
    monkeypatch.setattr(contention, "event_sampler", lambda launch: lambda runs: 2.0)
    argv = ["--op", "row_norm", "--case", "large epsilon", "--beside", busy(tmp_path), "-o", str(tmp_path / "out")]
    monkeypatch.setattr(contention, "_ROUNDS", 3)
    assert profile_kernels.main(argv) == 0
    data = json.loads((tmp_path / "out" / "contention.json").read_text())
    assert [r["median_us"] for r in data["loads"]] == [2.0, 2.0, 2.0]
    assert "alone again" in capsys.readouterr().out


def test_the_worst_of_a_hundred_is_what_five_exceed() -> None:
    assert Times("x", [float(i) for i in range(1, 101)]).worst_us == 95
    assert Times("x", [5.0]).worst_us == 5
