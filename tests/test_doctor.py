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
    assert {"Python", "library", "trtexec", "tensorrt", "nvcc", "ncu", "onnx", "torch"} <= {f.name for f in found}
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
    (61, False, doctor.MISSING), (120, True, doctor.OK), (121, False, doctor.MISSING),
])  # fmt: skip
def test_a_gpu_is_judged_by_the_library(
    monkeypatch: pytest.MonkeyPatch, capability: int, built: bool, status: str
) -> None:
    table = kernels.describe()["architectures"]
    monkeypatch.setattr(kernels, "describe", lambda: {"cuda": built, "architectures": table})
    if status == doctor.OK and kernels.reject_device(capability):
        pytest.skip("this build holds no code for it")
    found = doctor.judge_device("some GPU", capability // 10, capability % 10)
    assert found.status == status
    assert found.status == doctor.OK or found.advice


@pytest.mark.parametrize(("inside", "major", "status"), [
    ("13.0", 13, doctor.OK), ("13.0", 14, doctor.OK), ("13.0", 12, doctor.MISSING), ("12.9", 11, doctor.MISSING),
    ("", 11, doctor.OK),
])  # fmt: skip
def test_a_driver_older_than_the_runtime_inside_is_said(
    monkeypatch: pytest.MonkeyPatch, inside: str, major: int, status: str
) -> None:
    monkeypatch.setattr(kernels, "describe", lambda: {"cuda_version": inside})
    found = doctor.judge_driver(major, 4)
    assert found.status == status and (status == doctor.OK or f"CUDA {inside}" in found.text)


@pytest.mark.parametrize(("archs", "words"), [
    ("86", "machine code for compute capability 8.6"), ("100-virtual", "PTX of 10.0 for newer GPUs"),
    ("80 90a 120 100-virtual", "machine code for compute capability 8.0, 9.0, 12.0; PTX of 10.0 for newer GPUs"),
])  # fmt: skip
def test_the_code_inside_is_said_in_words(monkeypatch: pytest.MonkeyPatch, archs: str, words: str) -> None:
    facts = {"cuda": True, "archs": archs, "version": "0", "ops": [{"name": "row_norm"}]}
    monkeypatch.setattr(kernels, "describe", lambda: facts)
    assert kernels.code_inside() == words
    assert f"row_norm; {words}" in [f.text for f in doctor.check_library()]
    monkeypatch.setattr(kernels, "describe", lambda: facts | {"cuda": False, "archs": "none"})
    assert kernels.code_inside() == ""


def test_a_gpu_that_runs_ptx_is_told_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "reject_device", lambda _: None)
    monkeypatch.setattr(
        kernels, "describe", lambda: {"cuda": True, "architectures": [{"sm": 90, "code": "machine code"}]}
    )
    assert doctor.judge_device("new GPU", 13, 0).text.endswith(
        ": PTX, which the driver compiles when a kernel is first used"
    )
    assert doctor.judge_device("H200", 9, 0).text.endswith("9.0: machine code")


def test_a_gpu_without_a_library_is_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError

    monkeypatch.setattr(kernels, "describe", broken)
    assert doctor.judge_device("some GPU", 9, 0).status == doctor.MISSING


def test_a_program_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("no program\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = doctor.check_program("nvcc", "advice")
    assert found.status == doctor.MISSING and "does not start" in found.text
