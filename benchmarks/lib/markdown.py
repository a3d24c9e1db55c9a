"""Rows of a benchmark as the tables of docs/measured.md: the machine, one line per shape, means, targets."""

from __future__ import annotations

from typing import Any

from benchmarks.lib import table, targets

ANSWERS = {True: "yes", False: "**no**", None: "-"}


def grid(lines: list[list[str]]) -> list[str]:
    """A Markdown table; the first line is its heading, the first column is aligned left, the rest right."""
    rule = ["---", *("---:" for _ in lines[0][1:])]
    return [f"|{'|'.join(line)}|" for line in [lines[0], rule, *lines[1:]]]


def machine(rows: list[dict[str, Any]]) -> str:
    """One sentence: GPU, versions, and the clocks that were seen right after each shape."""
    first = rows[0]
    words = [f"{first['gpu']}, driver {first.get('driver', 'unknown')}, CUDA {first['cuda']}, torch {first['torch']}"]
    words.append(f"cuDNN {first['cudnn']}, {first['dtype']}")
    for key, unit in (("sm_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "C")):
        seen = [float(row[key]) for row in rows if key in row]
        if seen:
            words.append(f"{min(seen):.0f} to {max(seen):.0f} {unit}")
    return ", ".join(words) + "."


def text(rows: list[dict[str, Any]]) -> str:
    """The whole section."""
    judged = [["target", "measured", "reached"]]
    judged += [[v.target, v.measured, ANSWERS[v.reached]] for v in targets.verdicts(rows)]
    parts = [[machine(rows)], grid(table.cells(rows)), [f"- {line}" for line in table.summary(rows)], grid(judged)]
    if failed := table.failures(rows):
        parts.append(["Not measured:", *(f"- {line}" for line in failed)])
    return "\n\n".join("\n".join(part) for part in parts)
