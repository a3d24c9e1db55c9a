"""The ladder's steps: computed on the host thread by thread, against the formula; the command where it cannot run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ladder import __main__ as ladder
from benchmarks.ladder import ncu, steps
from benchmarks.ladder.problem import EPSILON, truth
from benchmarks.ladder.steps import STEPS, bytes_moved
from cutefuse.errors import CutefuseError
from cutefuse.profilers.kernels.metrics import DURATION, Kernel

ROOT = Path(__file__).resolve().parent.parent
SOURCE = steps.SOURCE.read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bool]:
    """ladder_run with every thread of a block a thread of the host."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("ladder")
    text = SOURCE.replace("#include <cuda_runtime.h>", '#include "cuda_on_host.h"')
    text = text.replace("extern __shared__ float tree[];", "")
    text, launches = re.subn(
        r"(\w+)<<<([^;]+?), ([^,;]+), [^,;]+, stream>>>\(([^;]*)\);", r"launch(\2, \3, [=] { \1(\4); });", text
    )
    assert launches == len(STEPS)
    (folder / "steps.cpp").write_text(text)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'tests/cpp'}"]
    done = subprocess.run(
        [*command, str(folder / "steps.cpp"), "-o", str(folder / "steps.so")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return steps.loaded(folder / "steps.so")


def computed(run: Callable[..., bool], name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(what a step computes, the truth) of random rows; None where it cannot take them."""
    rng = np.random.default_rng(columns)
    x, dy = (rng.standard_normal((rows, columns)).astype(np.float32) + 1 for _ in range(2))
    gamma = rng.standard_normal(columns).astype(np.float32)
    y = np.full((rows + 1, columns), np.nan, np.float32)  # a row behind the last must stay as it is
    other = dy if "backward" in name else gamma
    ran = run(STEPS[name], x.ctypes.data, other.ctypes.data, y.ctypes.data, rows, columns, EPSILON, None)
    assert np.isnan(y[rows if ran else 0 :]).all()
    return (y[:rows], truth(name, x.astype(np.float64), dy.astype(np.float64), gamma)) if ran else None


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("columns", [32, 100, 512])
def test_every_step_computes_its_norm(run: Callable[..., bool], name: str, columns: int) -> None:
    found = computed(run, name, 3, columns)
    assert found is not None and np.abs(found[0] - found[1]).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("part", "columns"), [("v2", 1025), ("v4", 30)])
def test_a_step_refuses_what_it_cannot_take(run: Callable[..., bool], part: str, columns: int) -> None:
    refused = [name for name in STEPS if computed(run, name, 1, columns) is None]
    assert all(part in name or "v4" in name for name in refused) and any(part in name for name in refused)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, len(STEPS) + 1, -1])
def test_a_step_that_there_is_not_does_not_run(run: Callable[..., bool], number: int) -> None:
    assert not run(number, None, None, None, 1, 32, EPSILON, None)


def test_the_truth_of_the_backward_is_the_derivative() -> None:
    rng = np.random.default_rng(0)
    x, dy, gamma = rng.standard_normal((2, 9)), rng.standard_normal((2, 9)), np.ones(9)
    dx = truth("LayerNorm backward", x, dy, gamma)
    for r, c in ((0, 0), (1, 4), (0, 8)):
        moved = np.zeros_like(x)
        moved[r, c] = 1e-6
        change = (truth("LayerNorm", x + moved, dy, gamma) - truth("LayerNorm", x - moved, dy, gamma)) / 2e-6
        assert dx[r, c] == pytest.approx((change * dy).sum(), rel=1e-6)


def test_every_step_of_the_source_has_a_name_and_a_place_on_the_page() -> None:
    assert sorted(STEPS.values()) == sorted(int(n) for n in re.findall(r"case (\d+):", SOURCE))
    page = (ROOT / "docs/ladder.md").read_text()
    assert [name for name in STEPS if name.removeprefix("RMSNorm ").removeprefix("RMSNorm: ") not in page] == []


def test_the_backward_moves_one_tensor_more() -> None:
    assert bytes_moved("RMSNorm: cutefuse", 4096, 512) == bytes_moved("LayerNorm: x", 4096, 512) == 2 * 4 * 4096 * 512
    assert bytes_moved("LayerNorm backward: cutefuse", 4096, 512) == 3 * 4 * 4096 * 512


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert ladder.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_without_torch_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install torch" in refusal([], capsys)


@pytest.mark.parametrize("option", ["--rows", "--columns", "--rounds"])
def test_sizes_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{option} is 0" in refusal([option, "0"], capsys)


@pytest.mark.torch
def test_without_a_gpu_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA device" in refusal([], capsys)


def test_the_command_starts_as_the_page_says() -> None:
    done = subprocess.run([sys.executable, "benchmarks/ladder", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--ncu" in done.stdout


def test_without_nvcc_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.shutil, "which", lambda name: str(tmp_path / "no_nvcc"))
    with pytest.raises(CutefuseError, match="no_nvcc was not found"):
        steps.build(tmp_path / "out", 90)


@pytest.mark.parametrize(("script", "why"), [("echo 'bad arch' >&2; exit 1", "bad arch"), ("exit 3", "exit code 3")])
def test_what_nvcc_says_is_one_sentence(script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(steps.shutil, "which", lambda name: str(nvcc))
    with pytest.raises(CutefuseError, match=f"nvcc refused steps.cu: {why}"):
        steps.build(tmp_path / "out", 90)
    assert not list((tmp_path / "out").iterdir())


def test_another_file_is_no_library_of_the_steps(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(CutefuseError, match="is no library of the steps"):
        steps.loaded(tmp_path / "x.so")


def test_without_ncu_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.ncu, "find", lambda: None)
    with pytest.raises(CutefuseError, match="leave --ncu out"):
        ncu.explain(1, 1, Path("never.csv"))


def kernels(times_ns: dict[str, float]) -> dict[str, list[Kernel]]:
    return {name: [Kernel(name, 1, {DURATION: time_ns})] for name, time_ns in times_ns.items()}


MEASURED = kernels(
    {"RMSNorm v1: block per row, one thread works": 4e5, "RMSNorm: four warps per row, each sums all of it": 2e4,
     "RMSNorm v3: block reduce by shuffles, strided loop": 1e4, "RMSNorm: cutefuse": 8e3,
     "LayerNorm backward: one thread per row": 9e5, "LayerNorm backward: cutefuse": 9e3}
)  # fmt: skip


def test_the_last_column_is_the_ratio_to_the_first_step() -> None:
    lines = ncu.tables(MEASURED).splitlines()
    assert lines[0] == "RMSNorm" and lines[1].split() == ["v1", "4", "warps", "v3", "cutefuse", "ratio"]
    times = [line.split() for line in lines if "time" in line]
    assert times[0][2:] == ["400.00", "20.00", "10.00", "8.00", "0.02×"] and times[1][-1] == "0.01×"


def test_two_steps_stand_alone_with_their_ratio() -> None:
    text = ncu.tables(MEASURED, ("4 warps", "v3"))
    assert text.splitlines()[-1].split() == ["time", "µs", "20.00", "10.00", "0.50×"]
    with pytest.raises(CutefuseError, match="--pair has v2.*v1, 4 warps"):
        ncu.tables(MEASURED, ("v3", "v2"))
