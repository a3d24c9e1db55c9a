"""Nsight Compute's metrics of the steps and of the library's kernels."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path

from cutefuse.errors import CutefuseError

METRICS = {
    "gpu__time_duration.sum": "duration us",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
    "sm__warps_active.avg.per_cycle_active": "warps/SM",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 %",
    "l1tex__t_sector_hit_rate.pct": "L1 hit %",
}


def explain(rows: int, columns: int) -> dict[str, dict[str, float]]:
    """The metrics of one launch of each, by the kernel's name. Raises CutefuseError where ncu is missing or refuses."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CutefuseError("ncu was not found; put Nsight Compute on the PATH, or leave --ncu out")
    command = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--metrics", ",".join(METRICS)]
    command += ["--kernel-name", "regex:^rms_|^layer_|row_norm_", sys.executable, str(Path(__file__).parent), "--once"]
    done = subprocess.run([*command, "--rows", str(rows), "--columns", str(columns)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode != 0 or len(lines) < 3:
        raise CutefuseError(f"ncu gave no metrics: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    header, units, *records = csv.reader(io.StringIO("\n".join(lines)))
    found: dict[str, dict[str, float]] = {}
    for fields in records:
        record = dict(zip(header, fields, strict=False))
        values = {METRICS[m]: float(record[m].replace(",", "")) for m in METRICS}
        if dict(zip(header, units, strict=False))["gpu__time_duration.sum"] in ("ns", "nsecond"):
            values["duration us"] /= 1000
        name = record["Kernel Name"].split("(")[0]
        found[name if name not in found else f"{name} (LayerNorm)"] = values
    return found
