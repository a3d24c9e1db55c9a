"""scripts/sanitize.sh against a stand-in of compute-sanitizer: what counts as clean, and what each job is given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # runs pytest under a stand-in many times

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "passes": "import pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('i', range(5))\ndef test_it(i): pass\n",
    "fails": "import pytest\n@pytest.mark.gpu\ndef test_it(): assert False\n",
    "skips": "import pytest\n@pytest.mark.gpu\ndef test_it(): pytest.skip('no device')\n",
}
# Prints its arguments, runs the command behind them, and reports $FOUND errors the way the tool does.
STAND_IN = """#!/usr/bin/env bash
echo "ARGS $*"
echo "SEES $CUTEFUSE_SANITIZED $CUDA_VISIBLE_DEVICES"
while [ "$1" != -m ]; do python=$1; shift; done
"$python" "$@"; code=$?
echo "========= ERROR SUMMARY: ${FOUND:-0} errors"
[ "${FOUND:-0}" = 0 ] && exit $code || exit 3
"""


def sanitize(tmp_path: Path, kind: str, *arguments: str, found: int = 0) -> subprocess.CompletedProcess[str]:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    test = tmp_path / f"test_{kind}.py"
    test.write_text(TESTS[kind])
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text().replace("if has_gpu():", "if True:"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    settings = {"PATH": path, "PYTHON": sys.executable, "SANITIZE_FILES": str(test), "FOUND": str(found)}
    command = ["scripts/sanitize.sh", "-o", str(tmp_path / "logs"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=120)


def test_every_tool_runs_every_share_of_a_file(tmp_path: Path) -> None:
    done = sanitize(tmp_path, "passes", "-s", "2")
    assert done.returncode == 0, done.stdout
    lines = sorted(done.stdout.splitlines())
    tools = ("initcheck", "memcheck", "racecheck", "synccheck")
    assert [line.split()[:3] for line in lines] == [[t, "test_passes.py", f"{i}/2"] for t in tools for i in (1, 2)]
    assert sum(int(line.split(" s  ")[1].split()[0]) for line in lines) == 5 * len(tools)
    for tool in tools:
        log = (tmp_path / "logs" / f"{tool}_test_passes_1.log").read_text()
        assert f"--tool {tool} " in log and f"SEES {tool} " in log
        assert ("kernel_substring=cutefuse" in log) == (tool != "initcheck")


@pytest.mark.parametrize(("kind", "found"), [("passes", 2), ("fails", 0), ("skips", 0)])
def test_an_error_a_failure_and_a_file_that_ran_nothing_are_not_clean(kind: str, found: int, tmp_path: Path) -> None:
    done = sanitize(tmp_path, kind, "memcheck", found=found)
    assert done.returncode == 1 and "exit 0" not in done.stdout


def test_a_missing_tool_is_said_in_one_sentence(tmp_path: Path) -> None:
    path = os.pathsep.join(
        p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "compute-sanitizer").exists()
    )
    done = subprocess.run(["scripts/sanitize.sh"], cwd=ROOT, env={"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("sanitize: compute-sanitizer is not on PATH")


def test_files_of_kernels_are_taken_however_they_are_marked() -> None:
    listed = subprocess.run(["scripts/sanitize.sh", "-l"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    alone = {"tests/test_sm90.py", "tests/test_kernels_gpu.py"}  # marked test by test, or by one mark
    in_lists = {"tests/test_sm90_tf32.py", "tests/test_sm90_forms_gpu.py"}
    assert alone | in_lists <= set(listed)
    networks = {"tests/test_engine_torch_gpu.py", "tests/test_tune_gpu.py", "tests/test_optimize_gpu.py"}
    assert not networks & set(listed) and "tests/test_readme.py" not in listed
