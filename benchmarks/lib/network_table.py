"""Rows of whole networks as a table: plain and patched times, ratios, sites, predictions; means and faults below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.markdown import grid
from benchmarks.lib.network_work import MODES, PLAIN, ROUNDING
from benchmarks.lib.table import geometric_mean

NOISE = 0.01  # a ratio of up to 1.01 is no loss
CLOSE = 0.05  # a prediction this near to the measured ratio holds
NAMES = {"cudnn": "cuDNN", "compile": "compile"}


def variants_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The patched variants that any row has, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.get("variants", {}) if name != PLAIN))


def ratios(rows: Sequence[dict[str, Any]], variant: str) -> dict[str, float]:
    """ "network batch" -> measured ratio of a variant."""
    found = {label(row): row.get("variants", {}).get(variant, {}).get("ratio") for row in rows}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def label(row: dict[str, Any]) -> str:
    return f"{row['network']} b{row['batch']}"


def worst_error(row: dict[str, Any], variant: str) -> float | None:
    """The largest error of a variant in any mode and tensor; infinity for a NaN; None where nothing was compared."""
    source = row.get("variants", {}).get(variant, {}).get("same_as", variant)
    found = [e for key, by in row.get("errors", {}).items() if key.split()[0] == source for e in by.values()]
    return max((math.inf if e is None else e for e in found), default=None)


def wrong(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each variant whose outputs are not those of the plain network."""
    found = []
    for row in rows:
        for variant in (PLAIN, *variants_of([row])):
            error = worst_error(row, variant)
            # The plain network rounds as well; one that amplifies that amplifies ours.
            limit = 2 * ((worst_error(row, PLAIN) or 0.0) + ROUNDING)
            if error is not None and error > limit or variant == PLAIN and error == math.inf:
                what = "has NaN where it should not" if error == math.inf else f"differs by {error:.1e}"
                found.append(f"{label(row)} {variant} {what}")
    return found


def _cells(row: dict[str, Any], variant: str) -> list[str]:
    own = row.get("variants", {}).get(variant, {})
    times = [_number(own.get(f"{mode}_us"), 0) for mode in MODES]
    error = worst_error(row, variant)
    shown = "-" if error is None else f"{error:.1e}"
    if variant == PLAIN:
        return [*times, shown]
    sites = f"{own['sites']}/{own['candidates']}" if "sites" in own else "-"
    return [*times, _number(own.get("ratio"), 3), _number(own.get("predicted"), 3), sites, shown]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The head and one line of cells for each row."""
    variants = variants_of(rows)
    head = ["network", "batch", *(f"plain {NAMES[m]}" for m in MODES), "error"]
    for name in variants:
        head += [f"{name} {NAMES[m]}" for m in MODES]
        head += [f"{name} ratio", "predicted", "sites", "error"]
    table = [head]
    for row in rows:
        cells = [cell for name in (PLAIN, *variants) for cell in _cells(row, name)]
        table.append([row["network"], str(row["batch"]), *cells])
    return [own + bare for own, bare in zip(table, bare_columns(rows, variants), strict=True)]


def bare_columns(rows: Sequence[dict[str, Any]], variants: Sequence[str]) -> list[list[str]]:
    """The last columns, head first: the sum of the bare convolutions, and each variant over it; n/a for what could not
    be measured. No columns where no row has them."""
    if not any("bare" in row for row in rows):
        return [[] for _ in (None, *rows)]
    table = [["bare", *("over bare" if len(variants) == 1 else f"{name} over bare" for name in variants)]]
    for row in rows:
        over = [row.get("variants", {}).get(name, {}).get("over_bare") for name in variants]
        cells = [_number(row.get("bare", {}).get("us"), 0), *(_number(ratio, 2) for ratio in over)]
        table.append(["n/a" if cell == "-" else cell for cell in cells])
    return table


def remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Means, losses, predictions that failed, wrong outputs and what could not be measured, a sentence each."""
    found = []
    for variant in variants_of(rows):
        measured = ratios(rows, variant)
        if not measured:
            continue
        worst = max(measured, key=lambda name: measured[name])
        slower = [f"{n} {r:.3f}" for n, r in measured.items() if r > 1 + NOISE]
        text = f"{variant}: geometric mean {geometric_mean(measured.values()):.3f} over {len(measured)}, worst "
        text += f"{measured[worst]:.3f} ({worst}), " + (f"slower: {', '.join(slower)}" if slower else "none slower")
        found.append(text)
        told = {label(row): row["variants"][variant].get("predicted") for row in rows if label(row) in measured}
        told = {name: p for name, p in told.items() if p is not None}
        if told:
            off = [f"{n} {p:.3f} for {measured[n]:.3f}" for n, p in told.items() if abs(p - measured[n]) > CLOSE]
            text = f"{variant}: {len(told) - len(off)} of {len(told)} predictions within {CLOSE * 100:.0f} points"
            found.append(text + (f"; off: {', '.join(off)}" if off else ""))
        over = {label(row): row["variants"].get(variant, {}).get("over_bare") for row in rows if "bare" in row}
        if known := {name: ratio for name, ratio in over.items() if ratio is not None}:
            worst = max(known, key=lambda name: known[name])
            text = f"{variant} over bare convolutions: geometric mean {geometric_mean(known.values()):.3f} over "
            found.append(text + f"{len(known)}, worst {known[worst]:.3f} ({worst})")
    found += _bare_remarks(rows)
    found += [f"wrong: {sentence}" for sentence in wrong(rows)]
    for row in rows:
        failures = {k: v for k, v in row.get("failures", {}).items()}
        if "failure" in row:
            found.append(f"{label(row)}: {row['failure']}")
        else:
            found += [f"{label(row)} {key}: {text}" for key, text in failures.items()]
    return found


def _bare_remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Why sums of bare convolutions are missing, each reason once, and what they leave out."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        bare = row.get("bare", {})
        if "reason" in bare:
            reasons.setdefault(f"no sum of bare convolutions: {bare['reason']}", []).append(label(row))
        elif bare.get("left_out"):
            reasons.setdefault(f"{bare['left_out']} Convs are not in the sum", []).append(label(row))
    return [f"{reason} ({', '.join(names)})" for reason, names in reasons.items()]


def machine(rows: Sequence[dict[str, Any]]) -> str:
    """GPU and versions of the first measured row."""
    row = next((r for r in rows if "gpu" in r), None)
    if row is None:
        return "CPU, whose times say nothing about a GPU"
    clock = f", {row['sm_mhz']:.0f} MHz" if "sm_mhz" in row else ""
    return (
        f"{row['gpu']}, driver {row.get('driver', 'unknown')}, torch {row['torch']}, cuDNN {row['cudnn']}, "
        f"{row['dtype']}{clock}, microseconds for one inference"
    )


def short(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the README: the better plain time, the better one of each variant, their ratio, means."""
    variants = variants_of(rows)
    table = [["network", PLAIN, *(c for v in variants for c in (v, "ratio"))]]
    measured = [row for row in rows if "variants" in row]
    for row in measured:
        found = row["variants"]
        plain_us = found.get(PLAIN, {}).get("best_us")
        cells = [row["network"] if row["batch"] == 1 else label(row), _number(plain_us, 0)]
        for name in variants:
            own = found.get(name, {})
            cells += [_number(own.get("best_us"), 0), _number(own.get("ratio"), 2)]
        table.append(cells)
    table = [own + bare for own, bare in zip(table, bare_columns(measured, variants), strict=True)]
    means = [f"- {sentence}" for sentence in remarks(rows) if "geometric mean" in sentence]
    return "\n".join([machine(rows), "", *grid(table), "", *means])


def text(rows: Sequence[dict[str, Any]], markdown: bool) -> str:
    """All of it, for the terminal or for a page."""
    table = lines(rows)
    if markdown:
        return "\n".join([machine(rows), "", *grid(table), "", *(f"- {s}" for s in remarks(rows))])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    shown = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
             for line in table]  # fmt: skip
    return "\n".join([machine(rows), *shown, *remarks(rows)])
