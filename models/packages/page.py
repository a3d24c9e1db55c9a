"""The part of docs/models.md on published packages, from what `python -m models.packages` measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]
START, END = "<!-- packages: python -m models.packages -->\n", "<!-- /packages -->\n"
WRONG, TRACEBACK, WHOLE, NOT_EXPORTED = "outputs that differ", "tracebacks", "refused as a whole", "not exported"

HEADER = """## Networks of published packages

Written by `python -m models.packages`, which fetches the packages by pip for that command alone and exports their
networks as users do, for one image, float32, at the size that they are deployed with (diffusion networks and video
smaller, language models with two layers). Weights are random.

- sites: what `cutefuse patch` does by itself, for TensorRT's newest version on an H200: fused / left out, since the
  model of the engine says that they would not pay
- `--all`: candidates / fused nodes / merged with a neighbour on the same sources / refused; the last three add up to
  the first
- error: as above, of every output and of every site that `--all` fuses
"""
HEADINGS = ("network", "exporter", "input", "nodes", "sites", "`--all`", "refused because of", "error")


def tail(text: str) -> str:
    """The part of the page between its marks, with them; empty where it has none."""
    start, found, rest = text.partition(START)
    return found + rest if found else ""


def whole(text: str, lines: Sequence[Line], left: Sequence[str] = ()) -> str:
    """The page with this part written anew, at its end; `left`: exports that the command knows and did not measure."""
    own = text.partition(START)[0].rstrip() + "\n\n"
    above = sum(row.startswith("| ") and "float" in row for row in own.splitlines())
    missing = f"\nKnown to the command and not measured: {', '.join(left)}.\n" if left else ""
    return own + part(lines, above).removesuffix(END) + missing + END


def part(lines: Sequence[Line], above: int = 0) -> str:
    """The part itself: what all exports say together, then a table for each package; `above`: rows of the page's first
    table."""
    rows = ""
    for package in dict.fromkeys(line["package"] for line in lines):
        version = next(line["version"] for line in lines if line["package"] == package)
        rows += (
            f"\n### {package.replace('_', '-')} {version}\n\n| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}\n"
        )
        rows += "".join(row(line) for line in lines if line["package"] == package and failure(line) != NOT_EXPORTED)
    return START + HEADER + summary(lines, above) + rows + END


def failure(line: Line) -> str:
    """What went wrong with an export, if anything did."""
    if "not_exported" in line:
        return NOT_EXPORTED
    if "traceback" in line:
        return TRACEBACK
    if "refused_whole" in line:
        return WHOLE
    return WRONG if "differs" in line["error"] else ""


def row(line: Line) -> str:
    """One export."""
    shape = " ".join("x".join(map(str, dims)) for dims in line["inputs"])
    start = [line["name"], "dynamo" if line["dynamo"] else "tracing", shape]
    if failure(line) in (TRACEBACK, WHOLE):
        cells = [*start, "", "", "", line.get("traceback") or line["refused_whole"], ""]
    else:
        because = ", ".join(f"{count} {cause}" for cause, count in line["refused_by"].items())
        everything = f"{line['candidates']} / {line['fused']} / {line['merged']} / {line['refused']}"
        cells = [*start, f"{line['nodes_before']} -> {line['nodes_after']}", f"{line['taken']} / {line['left_out']}",
                 everything, because or why_none(line), line["error"]]  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def why_none(line: Line) -> str:
    """Why a network has no candidate at all; "-" where it has some."""
    if line["candidates"]:
        return "-"
    convs, norms = (sum(n for op, n in line["ops"].items() if key in op) for key in ("Conv", "Normalization"))
    if not convs and not norms:
        return "no convolution, no norm"
    return f"no candidate: {convs} convolutions and {norms} norms, none with an activation, a Concat or a sum beside it"


def summary(lines: Sequence[Line], above: int) -> str:
    """Sums over all exports, and what was not exported."""
    failures = Counter(map(failure, lines))
    patched = [line for line in lines if failure(line) in ("", WRONG)]
    total = Counter[str]()
    for line in patched:
        total.update({key: line[key] for key in ("candidates", "fused", "merged", "refused", "taken", "left_out")})
    bad = ", ".join(f"{failures[kind]} {kind}" for kind in (WRONG, TRACEBACK, WHOLE))
    exports = len(lines) - failures[NOT_EXPORTED]
    text = (
        f"\n**{exports} exports, {exports + above} with those above: {bad}.** {total['candidates']} candidates; "
        f"`--all` fuses {total['fused']}, merges {total['merged']} and refuses {total['refused']}; by itself "
        f"`patch` fuses {total['taken']} and leaves out {total['left_out']}.\n"
    )
    causes: Counter[str] = Counter()
    for line in patched:
        causes.update(line["refused_by"])
    if causes:
        text += "\nRefused: " + ", ".join(f"{count} {cause}" for cause, count in causes.most_common()) + ".\n"
    gone = [line for line in lines if failure(line) == NOT_EXPORTED]
    if gone:
        text += "\nNot exported, by PyTorch's or the package's own refusal:\n\n"
        text += "".join(f"- {g['package']} {g['name']}: {g['not_exported']}\n" for g in gone)
    return text
