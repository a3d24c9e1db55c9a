"""Nsight Compute: finding it, its command line, and the CSV that it writes."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cutefuse.errors import CutefuseError
from cutefuse.output import write_text
from cutefuse.profilers.kernels.metrics import METRICS, Kernel, Metric
from cutefuse.profilers.kernels.program import first_program, reason, run_profiler

_NVTX = "Push/Pop_Range"  # in the title of the column that holds the ranges around a launch


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its metrics in base units, and the NVTX ranges around it, outermost first."""

    kernel: str
    values: dict[str, float]
    ranges: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """A program, and which of its launches are profiled. `kernel`: a regular expression on the demangled name. `nvtx`:
    an expression of --nvtx-include. `launches`: at most so many, 0 for all."""

    command: Sequence[str]
    metrics: Sequence[Metric] = METRICS
    kernel: str | None = None
    nvtx: str | None = None
    launches: int = 0


def find() -> str | None:
    return first_program("ncu", "/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")


def command_line(ncu: str, run: Run) -> list[str]:
    """Nsight Compute over a program: raw CSV in base units, caches flushed and clocks left alone.

    Clocks are not locked (--clock-control none): locked base clocks hide what a kernel does at boost.
    """
    filters = ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{run.kernel}"] if run.kernel else []
    filters += ["--nvtx", "--nvtx-include", run.nvtx] if run.nvtx else []
    filters += ["--launch-count", str(run.launches)] if run.launches else []
    metrics = ",".join(name for metric in run.metrics for name in metric.names)
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--cache-control", "all",
        "--target-processes", "all", "--metrics", metrics, *filters, *run.command,
    ]  # fmt: skip


def profile(ncu: str, run: Run, kept: Path, title: str, timeout_s: float) -> list[Launch]:
    """Run a program under ncu; its raw CSV is kept in the file `kept`. Raises CutefuseError with ncu's own reason."""
    text = run_profiler(command_line(ncu, run), f"profiling {title}", f"ncu failed for {title}", timeout_s)
    launches = read_csv(text, title)
    write_text(kept, text)
    return launches


def read_csv(text: str, where: str) -> list[Launch]:
    """The launches of ncu's raw CSV, in order. Raises CutefuseError for other text, and where it holds none."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    header = rows[0] if rows else []
    if "Kernel Name" not in header:
        if "No kernels were profiled" in text:
            raise CutefuseError(f"{where}: no kernel was launched that matches; check --kernel and the program")
        problem = reason(text) if "ERROR" in text else "it has no column 'Kernel Name'"
        raise CutefuseError(f"{where} is no result of ncu --csv --page raw: {problem}")
    nvtx = next((title for title in header if _NVTX in title), "")
    known = dict.fromkeys(name for metric in METRICS for name in metric.names)  # in the order of the panels
    found = []
    for row in rows[1:]:
        record = dict(zip(header, row, strict=False))
        if not record.get("ID", "").strip():
            continue  # the row of units
        values = {name: v for name in known if (v := _number(record.get(name, ""))) is not None}
        ranges = re.findall(r'"[^":]*:(.*?):none:', record.get(nvtx, ""))
        found.append(Launch(record["Kernel Name"], values, tuple(ranges)))
    if not found:
        raise CutefuseError(f"{where} holds no kernel; check --kernel and that the program launches it")
    return found


def _number(text: str) -> float | None:
    """A figure of the CSV; None for "n/a", which stands where this chip has no such counter."""
    try:
        value = float(text.replace(",", "").split(" ")[0])
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def kernels_of(launches: Sequence[Launch]) -> list[Kernel]:
    """Launches of one kernel together, each metric's mean, in the order of the first launch."""
    kernels: dict[str, Kernel] = {}
    sums: dict[tuple[str, str], list[float]] = {}
    for launch in launches:
        kernels.setdefault(launch.kernel, Kernel(launch.kernel)).launches += 1
        for metric, value in launch.values.items():
            sums.setdefault((launch.kernel, metric), []).append(value)
    for (name, metric), values in sums.items():
        kernels[name].values[metric] = sum(values) / len(values)
    return list(kernels.values())
