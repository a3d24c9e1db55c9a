"""benchmarks/measure_all.py: every step's command line is one that its program takes, and a failure is named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import measure_all  # noqa: E402
from benchmarks.measure_all import STEPS, Step, run  # noqa: E402
from cutefuse.errors import CutefuseError  # noqa: E402


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs in the place of the benchmarks."""
    (tmp_path / "good.py").write_text("import sys; open(sys.argv[-1], 'w').write('[]'); print('a table')")
    (tmp_path / "bad.py").write_text("import sys; sys.exit('first\\nno CUDA device; run it on a GPU')")
    (tmp_path / "mute.py").write_text("import sys; sys.exit(3)")
    monkeypatch.setattr(measure_all, "FOLDER", tmp_path)
    steps = {"bad": Step("bad.py", [], 1), "good": Step("good.py", [], 1), "mute": Step("mute.py", [], 9, json="")}
    monkeypatch.setattr(measure_all, "STEPS", steps)
    return tmp_path


def test_a_failed_step_is_named_and_the_others_run(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(programs / "a/b")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("bad: ") and "exit code 1" in said[0] and "no CUDA device" in said[0]
    assert re.fullmatch(r"good: \d+ s", said[1])
    assert said[2].startswith("mute: ") and "exit code 3" in said[2]
    assert (programs / "a/b/good.json").read_text() == "[]"
    assert (programs / "a/b/good.txt").read_text() == "a table\n"


def test_a_step_that_does_not_fit_is_left_out(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(programs / "out"), "--limit-s", "5", "--only", "mute", "good"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("mute: left out") and "9 s" in said[0]
    assert said[1].startswith("good: ")
    assert not (programs / "out/mute.txt").exists()


def test_an_unknown_step_and_a_folder_that_cannot_be_are_refused(programs: Path) -> None:
    with pytest.raises(CutefuseError, match="'nothing'; choose from bad"):
        run([str(programs / "out"), "--only", "nothing"])
    with pytest.raises(CutefuseError, match="choose a folder"):
        run([str(programs / "good.py/out")])
    assert not (programs / "out").exists()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", STEPS)
def test_the_programs_take_these_arguments(name: str, tmp_path: Path) -> None:
    """Without a GPU each of them says so; a wrong argument would be a usage error."""
    step = STEPS[name]
    command = [sys.executable, ROOT / "benchmarks" / step.program, *step.arguments]
    command += [step.json, tmp_path / "rows.json"] if step.json else []
    done = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin"})
    assert done.returncode != 0
    assert "usage:" not in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_programs_say_so_without_torch(name: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    command = [sys.executable, ROOT / "benchmarks" / STEPS[name].program, *STEPS[name].arguments]
    env = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode != 0 and done.stderr.startswith("error: "), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
