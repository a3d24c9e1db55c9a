"""Nsight Compute's metrics of the steps and of the library's kernels, side by side."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.ladder.steps import NORMS, label, norm_of
from cutefuse.errors import CutefuseError
from cutefuse.profilers.kernels import ncu
from cutefuse.profilers.kernels.metrics import Kernel, side_by_side

RANGE = "ladder "  # of NVTX, around one step


def explain(rows: int, columns: int, kept: Path, timeout_s: float = 600) -> dict[str, list[Kernel]]:
    """The kernels of one launch of each step, by the step's name; ncu's CSV stays in the file `kept`.

    Raises CutefuseError where ncu is missing or refuses.
    """
    tool = ncu.find()
    if tool is None:
        raise CutefuseError("ncu was not found; put Nsight Compute on the PATH, or leave --ncu out")
    command = [sys.executable, str(Path(__file__).parent), "--once", "--rows", str(rows), "--columns", str(columns)]
    run = ncu.Run(command, nvtx=f"regex:{RANGE}.+/")
    found: dict[str, list[ncu.Launch]] = {}
    for launch in ncu.profile(tool, run, kept, "the ladder", timeout_s):
        name = next((r.removeprefix(RANGE) for r in launch.ranges if r.startswith(RANGE)), "")
        found.setdefault(name, []).append(launch)
    return {name: ncu.kernels_of(launches) for name, launches in found.items()}


def tables(found: Mapping[str, Sequence[Kernel]], pair: Sequence[str] | None = None) -> str:
    """The metrics of every norm's steps, or of two steps of RMSNorm; the last column is the ratio of the last step to
    the first. Raises CutefuseError where the steps of a pair were not measured."""
    if pair:
        by_label = {label(name): kernels for name, kernels in found.items() if norm_of(name) == NORMS[0]}
        if missing := [step for step in pair if step not in by_label]:
            raise CutefuseError(f"--pair has {missing[0]}; the steps that ran are {', '.join(by_label)}")
        return side_by_side([(step, by_label[step]) for step in pair])
    parts = []
    for norm in NORMS:
        columns = [(label(name), kernels) for name, kernels in found.items() if norm_of(name) == norm]
        if columns:
            parts.append(f"{norm}\n{side_by_side(columns)}")
    return "\n\n".join(parts)
