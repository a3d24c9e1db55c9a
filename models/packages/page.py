"""The part of docs/models.md on published packages, from what `python -m models.packages` measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]
START, END = "<!-- packages: python -m models.packages -->\n", "<!-- /packages -->\n"
MOST = 3  # causes that a row names
WRONG, TRACEBACK, WHOLE, NOT_EXPORTED = "outputs that differ", "tracebacks", "refused as a whole", "not exported"

HEADER = """## Networks of published packages

Written by `python -m models.packages`, which fetches the packages by pip for that command alone and exports their
networks as users do, for one image, float32, at the size that they are deployed with (diffusion networks and video
smaller, language models with two layers). Weights are random. `models/packages/__init__.py` names the networks.

- `patch`: the sites that it takes by itself / leaves out, for TensorRT's newest version on an H200, since by the model
  of the engine they would not pay
- `--all`: candidates / fused nodes / merged with a neighbour on the same sources / refused
- error: as above, the largest of the package, over every output and every site that `--all` fuses
"""
HEADINGS = ("package", "exports", "`patch`", "`--all`", "most refused because of", "error")


def tail(text: str) -> str:
    """The part of the page between its marks, with them; empty where it has none."""
    start, found, rest = text.partition(START)
    return found + rest if found else ""


def whole(text: str, lines: Sequence[Line]) -> str:
    """The page with this part written anew, at its end."""
    return text.partition(START)[0].rstrip() + "\n\n" + part(lines)


def part(lines: Sequence[Line]) -> str:
    """The part itself: what all exports say together, then a line for each package."""
    table = f"\n| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}\n"
    for package in dict.fromkeys(line["package"] for line in lines):
        table += row([line for line in lines if line["package"] == package])
    return START + HEADER + summary(lines) + table + END


def failure(line: Line) -> str:
    """What went wrong with an export, if anything did."""
    if "not_exported" in line:
        return NOT_EXPORTED
    if "traceback" in line:
        return TRACEBACK
    if "refused_whole" in line:
        return WHOLE
    return WRONG if "differs" in line["error"] else ""


def row(lines: Sequence[Line]) -> str:
    """One package."""
    done = patched(lines)
    total = totals(done)
    causes = causes_of(done).most_common(MOST)
    errors = [line["error"] for line in done if line["error"] != "-"]
    cells = [
        f"{lines[0]['package'].replace('_', '-')} {lines[0]['version']}",
        str(sum(failure(line) != NOT_EXPORTED for line in lines)),
        f"{total['taken']}/{total['left_out']}",
        "/".join(str(total[key]) for key in ("candidates", "fused", "merged", "refused")),
        ", ".join(f"{count} {cause}" for cause, count in causes) or "-",
        max(errors, key=lambda e: float("inf") if "differs" in e else float(e), default="-"),
    ]
    return f"| {' | '.join(cells)} |\n"


def patched(lines: Sequence[Line]) -> list[Line]:
    """Those that were patched, whether or not their outputs are right."""
    return [line for line in lines if failure(line) in ("", WRONG)]


def totals(lines: Sequence[Line]) -> Counter[str]:
    """Sums of the counts."""
    total = Counter[str]()
    for line in lines:
        total.update({key: line[key] for key in ("candidates", "fused", "merged", "refused", "taken", "left_out")})
    return total


def causes_of(lines: Sequence[Line]) -> Counter[str]:
    """cause -> how many refusals have it."""
    return sum((Counter(line["refused_by"]) for line in lines), Counter[str]())


def summary(lines: Sequence[Line]) -> str:
    """Sums over all exports, every failure, and what was not exported."""
    failures = Counter(map(failure, lines))
    done = patched(lines)
    total = totals(done)
    bad = ", ".join(f"{failures[kind]} {kind}" for kind in (WRONG, TRACEBACK, WHOLE))
    text = (
        f"\n**{len(lines) - failures[NOT_EXPORTED]} exports: {bad}.** {total['candidates']} candidates; `--all` fuses "
        f"{total['fused']}, merges {total['merged']} and refuses {total['refused']}; by itself `patch` fuses "
        f"{total['taken']} and leaves out {total['left_out']}.\n"
    )
    if causes := causes_of(done):
        text += "\nRefused: " + ", ".join(f"{count} {cause}" for cause, count in causes.most_common()) + ".\n"
    if found := [line for line in lines if failure(line)]:
        text += "\n" + "".join(f"- {failure(line)}: {named(line)}{said(line)}\n" for line in found)
    return text


def named(line: Line) -> str:
    """Which export it is."""
    return f"{line['package']} {line['name']}{' (dynamo)' if line['dynamo'] else ''}"


def said(line: Line) -> str:
    """The words of a failure, if it has any."""
    words = next((line[key] for key in ("not_exported", "traceback", "refused_whole") if key in line), "")
    return f": {words}" if words else ""
