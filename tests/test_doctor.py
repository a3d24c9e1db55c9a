"""`cutefuse doctor`: every part is looked for, and what is missing comes with advice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cutefuse import kernels
from cutefuse.commands import doctor


def test_every_finding_is_one_line_and_what_is_not_ok_has_advice() -> None:
    found = doctor.findings()
    assert {"Python", "library", "trtexec", "tensorrt", "nvcc", "dot", "ncu", "onnx", "torch"} <= {
        f.name for f in found
    }
    for f in found:
        assert "\n" not in f.text and f.status in (doctor.OK, doctor.OPTIONAL, doctor.WARNING, doctor.MISSING)
        assert f.status == doctor.OK or f.advice, f


def test_json_and_exit_code_agree(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--json"])
    statuses = [f["status"] for f in json.loads(capsys.readouterr().out)]
    assert code == int(doctor.MISSING in statuses)


def test_a_missing_library_is_said_and_not_thrown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTEFUSE_LIBRARY_DIR", str(tmp_path))
    (found,) = doctor.check_library()
    assert found.status == doctor.MISSING and "make setup" in found.advice


@pytest.mark.parametrize(("capability", "built", "status"), [
    (90, True, doctor.OK), (86, True, doctor.OK), (90, False, doctor.MISSING), (75, True, doctor.MISSING),
    (61, False, doctor.MISSING), (130, True, doctor.MISSING),
])  # fmt: skip
def test_a_gpu_is_judged_by_the_library(
    monkeypatch: pytest.MonkeyPatch, capability: int, built: bool, status: str
) -> None:
    monkeypatch.setattr(kernels, "describe", lambda: {"cuda": built})
    if status == doctor.OK and kernels.reject_device(capability):
        pytest.skip("this build holds no code for it")
    found = doctor.judge_device("some GPU", capability // 10, capability % 10)
    assert found.status == status
    assert found.status == doctor.OK or found.advice


def test_a_gpu_without_a_library_is_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError

    monkeypatch.setattr(kernels, "reject_device", broken)
    assert doctor.judge_device("some GPU", 9, 0).status == doctor.MISSING


def test_a_program_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("no program\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = doctor.check_program("nvcc", "--version", "advice")
    assert found.status == doctor.MISSING and "does not start" in found.text
