"""The Dockerfile of `make trt-check`, as far as it can be tried without Docker: paths, make targets, its sed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_makefile import dry_run

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docker" / "trt-check.Dockerfile"
LINES = FILE.read_text().replace("\\\n", "").splitlines()


def steps(instruction: str) -> list[str]:
    return [line.split(" ", 1)[1].strip() for line in LINES if line.startswith(f"{instruction} ")]


def test_its_make_targets_exist_and_take_the_architecture_from_the_environment() -> None:
    targets = [step.split()[1] for step in steps("RUN") if step.startswith("make ")]
    (command,) = steps("CMD")
    assert targets == ["setup"] and shlex.split(command.strip("[]").replace(",", " ")) == ["make", "trt-check"]
    assert '-DCUTEFUSE_CUDA_ARCHS="89"' in dry_run("trt-check", ARCHS="89")
    assert "scripts/trt_check.py" in dry_run("trt-check", ARCHS="89")


@pytest.mark.slow
def test_the_environment_sees_the_packages_of_the_container_afterwards(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
    before = (tmp_path / ".venv/pyvenv.cfg").read_text()
    (change,) = [step for step in steps("RUN") if step.startswith("sed ")]
    subprocess.run(change, shell=True, cwd=tmp_path, check=True)
    after = (tmp_path / ".venv/pyvenv.cfg").read_text()
    assert before != after and re.search("^include-system-site-packages = true$", after, re.M)


def test_nothing_that_the_build_needs_is_left_out() -> None:
    """Docker's rules for names in the root folder, which is all that the file uses."""
    ignored = (FILE.parent / f"{FILE.name}.dockerignore").read_text().split()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no git repository")
    roots = {Path(name).parts[0] for name in tracked.stdout.splitlines()}
    assert {r for r in roots if any(Path(r).match(pattern) for pattern in ignored)} == set()
