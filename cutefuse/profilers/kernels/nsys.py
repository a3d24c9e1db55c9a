"""Nsight Systems: finding it, its command lines, and the sums of kernels by NVTX range that it prints."""

from __future__ import annotations

import csv
import glob
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cutefuse.errors import CutefuseError
from cutefuse.output import write_text
from cutefuse.profilers.kernels.program import first_program, run_profiler

_REPORT = "nvtx_kern_sum"  # kernels by the ranges that their launches lie in
_COLUMNS = ("NVTX Range", "NVTX Inst", "Kern Inst", "Total Time (ns)", "Kernel Name")


@dataclass(frozen=True)
class KernelSum:
    """A kernel in a range. `ranges`: how often the range occurred with this kernel; `total_us`: of all launches."""

    range: str
    kernel: str
    ranges: int
    launches: int
    total_us: float


def find() -> str | None:
    places = ["nsys", "/usr/local/cuda/bin/nsys", *sorted(glob.glob("/opt/nvidia/nsight-systems/*/bin/nsys"))]
    return first_program(*places)


def commands(nsys: str, command: Sequence[str], report: Path) -> list[list[str]]:
    """Record a program on the time line with its NVTX ranges, and sum the kernels by range."""
    capture = [nsys, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
    stats = [nsys, "stats", "--report", _REPORT, "--format", "csv", "--force-export=true", str(report)]
    return [[*capture, f"--output={report}", *command], stats]


def profile(nsys: str, command: Sequence[str], report: Path, title: str, timeout_s: float) -> list[KernelSum]:
    """Record a program; the report and its CSV stay in the report's folder. Raises CutefuseError where nsys fails."""
    record, stats = commands(nsys, command, report)
    run_profiler(record, f"recording {title} with Nsight Systems", "nsys profile failed", timeout_s)
    if not report.is_file():
        raise CutefuseError(f"nsys ended well but wrote no {report.name}; see its .qdstrm beside it")
    text = run_profiler(stats, f"reading {report.name}", "nsys stats failed", timeout_s)
    found = read_csv(text, f"nsys stats of {report.name}")
    write_text(report.with_suffix(f".{_REPORT}.csv"), text)
    return found


def read_csv(text: str, where: str) -> list[KernelSum]:
    """The rows of the report `nvtx_kern_sum`. Raises CutefuseError for other text, and where it holds no kernel."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if all(c in line for c in _COLUMNS)), None)
    if start is None:
        raise CutefuseError(f"{where} holds no table {_REPORT}; use Nsight Systems 2023.1 or newer")
    found = []
    for record in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        try:
            ranges, launches, total_ns = (float(record[c].replace(",", "")) for c in _COLUMNS[1:4])
        except (AttributeError, TypeError, ValueError):
            break  # the table ends at the first line that is none of its rows
        found.append(KernelSum(record["NVTX Range"], record["Kernel Name"], int(ranges), int(launches), total_ns / 1e3))
    if not found:
        raise CutefuseError(f"{where} holds no kernel inside of a range; was the engine built with layer names?")
    return found
