"""Rows of a benchmark as a table for the terminal: one line per shape, then geometric means."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

LARGEST_ERROR = 1e-2  # of a whole output, |y - truth| / |truth|; a float16 result lies near 3e-4
UNFUSED = ("eager", "cat_cudnn", "compile", "compile_max")
# heading -> (numerator, the peers whose fastest is the denominator)
RATIOS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ours / best unfused peer": ("ours", UNFUSED),
    "ours / cuDNN on the pre-concatenated tensor": ("ours", ("cudnn_precat",)),
    "ours / cuBLASLt on the pre-concatenated tensor": ("ours", ("cublaslt",)),
    "ours / CUTLASS 3.x on the pre-concatenated tensor": ("ours", ("cutlass3",)),
    "ours on the Ampere path / CUTLASS 2.x on the pre-concatenated tensor": ("ours_sm80", ("cutlass2",)),
    "ours on the Ampere path / torch.cat + CUTLASS 2.x": ("ours_sm80", ("cat_cutlass2",)),
    "ours / cuDNN's best plan for the bare convolution": ("ours", ("cudnn_bare",)),
    "ours / cuDNN's best plan, fused": ("ours", ("cudnn_fused",)),
}
_HEADS = ("/unfused", "/precat", "/cublaslt", "/cutlass3", "sm80/cutlass2", "sm80/cat+c2", "/bare", "/fused")
SHORT = dict(zip(RATIOS, _HEADS, strict=True))

Shapes = dict[str, dict[str, dict[str, Any]]]


def by_cache(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """ "cold" and "warm", where there are such rows -> those whose operands came from DRAM, or from the L2 cache."""
    found = {"cold": [r for r in rows if not r.get("warm")], "warm": [r for r in rows if r.get("warm")]}
    return {cache: rows for cache, rows in found.items() if rows}


def by_shape(rows: Iterable[dict[str, Any]]) -> Shapes:
    """shape -> variant -> row; of our tiles the fastest is `ours`, the library's own choice `guess`."""
    shapes: Shapes = {}
    for row in rows:
        found = shapes.setdefault(row["shape"], {})
        if "time_us" not in row:
            continue
        if row.get("guess") and row["variant"] == "ours":
            found["guess"] = row
        old = found.get(row["variant"])
        if old is None or row["time_us"] < old["time_us"]:
            found[row["variant"]] = row
    return shapes


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def ratio(found: dict[str, dict[str, Any]], label: str) -> float:
    """One of RATIOS for one shape; NaN where a side was not measured."""
    ours, peers = RATIOS[label]
    fastest = min((found[name]["time_us"] for name in peers if name in found), default=math.nan)
    return float(found.get(ours, {}).get("time_us", math.nan) / fastest)


def ratios(shapes: Shapes, label: str) -> dict[str, float]:
    """shape -> ratio, for the shapes where both sides were measured."""
    every = {name: ratio(found, label) for name, found in shapes.items()}
    return {name: value for name, value in every.items() if not math.isnan(value)}


def guess_loss(found: dict[str, dict[str, Any]]) -> float:
    """Time of the library's own choice over that of the fastest tile; NaN where it was not measured."""
    return float(found["guess"]["time_us"] / found["ours"]["time_us"]) if "guess" in found else math.nan


def variants(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Variants in the order of the rows, ours first."""
    return ["ours", *(v for v in dict.fromkeys(r["variant"] for r in rows) if v != "ours")]


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Heading and one line per shape: times in microseconds, TFLOP/s and GB/s of ours, ratios, the fastest tile.

    Of a run with cold and warm caches, the columns of the cold ones, then those of the warm ones.
    """
    caches = list(by_cache(rows).values())
    if len(caches) < 2:
        return _cells(rows)
    cold, (heading, *warm) = _cells(caches[0]), _cells(caches[1])
    lines = {heading[0]: [f"warm {words}" for words in heading]} | {line[0]: line for line in warm}
    skipped = 1 + heading.index("GB/s")  # name, floor and rates; the time of ours is kept
    return [line + lines[line[0]][2:3] + lines[line[0]][skipped:] for line in cold if line[0] in lines]


def _cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    shapes = by_shape(rows)
    names = variants(rows)
    labels = [label for label in RATIOS if ratios(shapes, label)]
    table = [
        [
            "shape",
            "floor",
            names[0],
            "TFLOP/s",
            "GB/s",
            *names[1:],
            *(SHORT[label] for label in labels),
            "guess",
            "tile",
        ]
    ]
    for name, found in shapes.items():
        times = [f"{found[v]['time_us']:.1f}" if v in found else "-" for v in names]
        ours, any_row = found.get("ours", {}), next(iter(found.values()), {})
        quotients = [ratio(found, label) for label in labels] + [guess_loss(found)]
        table.append([
            name, f"{any_row.get('floor_us', math.nan):.1f}", times[0], f"{ours.get('tflops', 0):.0f}",
            f"{ours.get('gbytes_s', 0):.0f}", *times[1:],
            *("-" if math.isnan(q) else f"{q:.2f}" for q in quotients), ours.get("tile", "-"),
        ])  # fmt: skip
    return table


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """One sentence for each ratio that was measured."""
    lines = []
    for cache, part in by_cache(rows).items():
        shapes, words = by_shape(part), "" if cache == "cold" else ", warm"
        for label in RATIOS:
            if found := ratios(shapes, label):
                worst = max(found, key=lambda name: found[name])
                mean = geometric_mean(found.values())
                lines.append(f"{label}{words}: geometric mean {mean:.3f}, worst {found[worst]:.2f} ({worst})")
    return lines


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What could not be measured, why, and for which shapes."""
    shapes: dict[str, list[str]] = {}
    for row in rows:
        if "failure" in row:
            shapes.setdefault(f"{row.get('tile', row['variant'])}: {row['failure']}", []).append(row["shape"])
    return [f"{reason} ({', '.join(names)})" for reason, names in sorted(shapes.items())]


def text(rows: list[dict[str, Any]]) -> str:
    """The table with aligned columns, the geometric means, and what failed."""
    lines = cells(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    out = []
    for line in lines:
        columns = [
            c.ljust(w) if i in (0, len(widths) - 1) else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        out.append("  ".join(columns).rstrip())
    return "\n".join(out + summary(rows) + failures(rows))
