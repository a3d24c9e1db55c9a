"""Rows of a benchmark as a table for the terminal: one line per shape, then geometric means."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

UNFUSED = ("eager", "cat_cudnn", "compile", "compile_max")


def by_shape(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """shape -> variant -> row; of our tiles the fastest is `ours`, the library's own choice `guess`."""
    shapes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found = shapes.setdefault(row["shape"], {})
        if "time_us" not in row:
            continue
        if row.get("guess"):
            found["guess"] = row
        old = found.get(row["variant"])
        if old is None or row["time_us"] < old["time_us"]:
            found[row["variant"]] = row
    return shapes


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def ratios(found: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """(ours / best unfused peer, ours / cuDNN on the pre-concatenated tensor); NaN where a side is missing."""
    ours = found.get("ours", {}).get("time_us", math.nan)
    unfused = min((found[n]["time_us"] for n in UNFUSED if n in found), default=math.nan)
    return ours / unfused, ours / found.get("cudnn_precat", {}).get("time_us", math.nan)


def text(rows: list[dict[str, Any]]) -> str:
    """The table: times in microseconds, TFLOP/s of ours, and what the guess loses against the best tile."""
    shapes = by_shape(rows)
    peers = list(dict.fromkeys(r["variant"] for r in rows if r["variant"] != "ours"))
    header = ["shape", "floor", "ours", "TFLOP/s", "GB/s", *peers, "/unfused", "/precat", "guess", "tile"]
    lines = [header]
    for name, found in shapes.items():
        cell = {n: f"{r['time_us']:.1f}" for n, r in found.items()}
        ours = found.get("ours", {})
        ratio = ["-" if math.isnan(r) else f"{r:.2f}" for r in ratios(found)]
        loss = found["guess"]["time_us"] / ours["time_us"] if "guess" in found else math.nan
        any_row = next(iter(found.values()), {})
        lines.append([
            name, f"{any_row.get('floor_us', math.nan):.1f}", cell.get("ours", "-"), f"{ours.get('tflops', 0):.0f}",
            f"{ours.get('gbytes_s', 0):.0f}", *[cell.get(p, "-") for p in peers], *ratio,
            "-" if math.isnan(loss) else f"{loss:.2f}", ours.get("tile", "-"),
        ])  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    out = []
    for line in lines:
        cells = [
            c.ljust(w) if i in (0, len(header) - 1) else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        out.append("  ".join(cells).rstrip())
    for i, label in enumerate(("best unfused peer", "cuDNN on the pre-concatenated tensor")):
        values = [r for r in (ratios(found)[i] for found in shapes.values()) if not math.isnan(r)]
        if values:
            out.append(f"ours / {label}: geometric mean {geometric_mean(values):.3f}, worst {max(values):.2f}")
    failures = {f"{r['shape']} {r.get('tile', r['variant'])}: {r['failure']}" for r in rows if "failure" in r}
    return "\n".join(out + sorted(failures))
