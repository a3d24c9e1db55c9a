"""`cutefuse doctor`: every part is looked for, and what is missing comes with advice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cutefuse.commands import doctor


def test_every_finding_is_one_line_and_what_is_not_ok_has_advice() -> None:
    found = doctor.findings()
    assert {"Python", "library", "trtexec", "tensorrt", "nvcc", "dot", "ncu", "onnx", "torch"} <= {
        f.name for f in found
    }
    for f in found:
        assert "\n" not in f.text and f.status in (doctor.OK, doctor.OPTIONAL, doctor.MISSING)
        assert f.status == doctor.OK or f.advice, f


def test_json_and_exit_code_agree(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--json"])
    statuses = [f["status"] for f in json.loads(capsys.readouterr().out)]
    assert code == int(doctor.MISSING in statuses)


def test_a_missing_library_is_said_and_not_thrown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTEFUSE_LIBRARY_DIR", str(tmp_path))
    (found,) = doctor.check_library()
    assert found.status == doctor.MISSING and "make setup" in found.advice


@pytest.mark.parametrize(
    ("major", "minor", "archs", "status"),
    [
        (9, 0, ["80", "90a"], doctor.OK),
        (8, 6, ["80", "90a"], doctor.OK),
        (8, 0, ["86"], doctor.MISSING),
        (9, 0, ["80"], doctor.MISSING),
        (10, 0, ["80", "90a"], doctor.MISSING),
        (7, 5, ["80", "90a"], doctor.MISSING),
        (8, 9, [], doctor.MISSING),
    ],
)
def test_machine_code_runs_on_its_own_major_version_alone(
    major: int, minor: int, archs: list[str], status: str
) -> None:
    found = doctor.judge_device("some GPU", major, minor, archs)
    assert found.status == status
    assert found.status == doctor.OK or found.advice


def test_a_program_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("no program\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = doctor.check_program("nvcc", "--version", "advice")
    assert found.status == doctor.MISSING and "does not start" in found.text
