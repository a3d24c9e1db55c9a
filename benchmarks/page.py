"""Writes the tables of docs/measured.md from the rows in benchmarks/results/.

    python benchmarks/networks.py --json benchmarks/results/networks.json
    python benchmarks/concat_conv.py --set latency --warm --tiles all --json benchmarks/results/latency.json
    python benchmarks/page.py             # writes every table anew; --check only says whether one would change

A table stands between `<!-- results: NAME -->` and `<!-- /results -->`; TABLES says which rows it is made of. A file of
rows has the name of its step in measure_all.py. tables.json holds short tables of runs whose rows were not kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import launch_cost  # noqa: E402
from benchmarks.lib import network_table, table, targets  # noqa: E402
from benchmarks.lib import rows as table_rows  # noqa: E402
from benchmarks.lib.markdown import grid  # noqa: E402
from benchmarks.lib.network_work import PLAIN  # noqa: E402
from benchmarks.lib.table import geometric_mean  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.output import write_text  # noqa: E402

PAGE = ROOT / "docs" / "measured.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- /results -->)", re.S)
SETS = ("conv", "latency", "single_source", "few_filters", "odd_filters", "few_channels")
LAYER_COLUMNS = ("shape", "floor", "ours", "compile", "cudnn_precat", "cudnn_bare", "/unfused", "/precat", "/bare")
TITLES = {"compile": "torch.compile", "cudnn_precat": "cuDNN", "cudnn_bare": "cuDNN, best plan"}
DEFAULT = "default"

Rows = list[dict[str, Any]]


def machine(rows: Rows) -> str:
    """Every GPU of the rows, with the date, the versions, and the number types and batches of its runs, in one line."""
    types: dict[tuple[str, ...], dict[str, None]] = {}
    for row in (r for r in rows if "gpu" in r):
        versions = f"torch {row['torch']}, cuDNN {version(row['cudnn'])}"
        seen = types.setdefault((row["gpu"], row.get("date", "no date"), versions), {})
        seen |= dict.fromkeys([row.get("dtype", ""), f"batch {row['batch']}" if "batch" in row else ""])
    return "; ".join(", ".join([*run, *filter(None, seen)]) for run, seen in types.items())


def version(cudnn: int) -> str:
    """cuDNN's version as people write it: 91900 is 9.19.0."""
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


def networks(rows: Rows) -> list[str]:
    """One line a network: for each number of images the better plain time, the better patched one, their ratio, and the
    sum of the bare convolutions where the rows have it."""
    names = dict.fromkeys(row["network"] for row in rows)
    lines, remarks = [["network"], *([name] for name in names)], list[str]()
    for batch in sorted({row["batch"] for row in rows}):
        part = [row for row in rows if row["batch"] == batch]
        head, *bare = network_table.bare_columns(part, [DEFAULT])
        lines[0] += [f"{what}, {batch}" for what in ("plain", "patched", "ratio", *head)]
        cells = {}
        for row, more in zip(part, bare, strict=True):
            plain, own = (row.get("variants", {}).get(name, {}) for name in (PLAIN, DEFAULT))
            shown = [_shown(plain, "best_us", 0), _shown(own, "best_us", 0), _shown(own, "ratio", 3)]
            cells[row["network"]] = shown + more
        for line in lines[1:]:
            line += cells.get(line[0], ["-"] * (3 + len(head)))
        remarks += [f"- {text}" for text in network_table.remarks(part)]
    return [*grid(lines), "", *remarks]


def packages(rows: Rows) -> list[str]:
    """One line a package: how many networks, their mean, the best and the worst, and how many were predicted well."""
    lines = [["package", "networks", "mean", "best", "worst", "within 5 points"]]
    for name in [*dict.fromkeys(row["package"] for row in rows), "all"]:
        part = [row for row in rows if name in (row["package"], "all")]
        ratio = {row["network"]: row["variants"][DEFAULT]["ratio"] for row in part}
        best, worst = min(ratio, key=lambda n: ratio[n]), max(ratio, key=lambda n: ratio[n])
        told = [row["variants"][DEFAULT] for row in part if "predicted" in row["variants"][DEFAULT]]
        near = sum(abs(own["predicted"] - own["ratio"]) <= network_table.CLOSE for own in told)
        lines.append([
            name, str(len(part)), f"{geometric_mean(ratio.values()):.3f}", f"{best} {ratio[best]:.3f}",
            f"{worst} {ratio[worst]:.3f}", f"{near} of {len(told)}",
        ])  # fmt: skip
    return grid(lines)


def layers(rows: Rows) -> list[str]:
    """The shapes of a run from memory, a line each."""
    head, *lines = table.cells(rows)
    chosen = [head.index(name) for name in LAYER_COLUMNS if name in head]
    return grid([[TITLES.get(line[i], line[i]) for i in chosen] for line in (head, *lines)])


def verdicts(rows: Rows) -> list[str]:
    """How many targets of those shapes are reached, and those that are not."""
    judged = [v for v in targets.verdicts(rows) if v.reached is not None]
    missed = [v for v in judged if not v.reached]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets are reached."]
    if missed:
        lines += ["", *grid([["missed target", "measured"], *([v.target, v.measured] for v in missed)])]
    return lines


def sets(*runs: Rows) -> list[str]:
    """One line a set of shapes: means over peers, what is above 1.00, and the first guesses."""
    lines = [["set", "shapes", "operands", "/ cuDNN", "above 1.00", "/ cuBLASLt", "guess within 10 %"]]
    precat, cublaslt = list(table.RATIOS)[1:3]
    for name, rows in zip(SETS, runs, strict=True):
        # The 21 shapes are judged from memory, the others as a network leaves their operands, wherever a run has both.
        caches = table.by_cache(rows)
        cache = "cold" if "cold" in caches and (name == SETS[0] or len(caches) == 1) else "warm"
        shapes = table.by_shape(caches[cache])
        operands = "memory" if cache == "cold" else "L2"
        cudnn, cublas = table.ratios(shapes, precat), table.ratios(shapes, cublaslt)
        above = ", ".join(f"{n} {r:.2f}" for n, r in cudnn.items() if r > 1.005) or "none"
        losses = [table.guess_loss(found) for found in shapes.values() if "guess" in found]
        lines.append([
            name, str(len(shapes)), operands, f"{geometric_mean(cudnn.values()):.3f}", above,
            f"{geometric_mean(cublas.values()):.3f}" if cublas else "-",
            f"{sum(loss <= 1.1 for loss in losses)} of {len(losses)}",
        ])  # fmt: skip
    return grid(lines)


def calls(rows: Rows) -> list[str]:
    """One line a norm, type and direction: the mean ratio over the shapes, and the longest and shortest call."""
    lines = [["norm", "type", "direction", "ours us", "torch us", "mean ratio"]]
    for key in dict.fromkeys((r["norm"], r["dtype"], r["direction"]) for r in rows):
        part = [r for r in rows if (r["norm"], r["dtype"], r["direction"]) == key]
        ours, torch = ([row[side] for row in part] for side in ("ours_us", "torch_us"))
        spans = [f"{min(times):.0f} to {max(times):.0f}" for times in (ours, torch)]
        lines.append([*key, *spans, f"{geometric_mean(r['ratio'] for r in part):.2f}"])
    return grid(lines)


# name of a table -> (files of rows, what makes lines of them)
TABLES: dict[str, tuple[tuple[str, ...], Callable[..., list[str]]]] = {
    "networks": (("networks",), networks),
    "packages": (("networks_packages",), packages),
    "layers": (("conv",), layers),
    "targets": (("conv",), verdicts),
    "sets": (SETS, sets),
    "launches": (("launch_cost",), lambda rows: launch_cost.text(rows).splitlines()),
    "calls": (("torch_calls",), calls),
}


def section(name: str, results: Path = RESULTS) -> str:
    """The text of one table. Raises CutefuseError for a name that there is not, and for rows that are missing."""
    if name in TABLES:
        files, made = TABLES[name]
        runs = [table_rows.read(results / f"{file}.json") for file in files]
        return "\n".join([f"{machine([row for rows in runs for row in rows])}.", "", *made(*runs)])
    kept = json.loads((results / "tables.json").read_text(encoding="utf-8"))
    if name not in kept:
        raise CutefuseError(f"there is no table '{name}'; choose from {', '.join([*TABLES, *kept])}")
    lines = [list(kept[name][0]), *([str(v) for v in row.values()] for row in kept[name])]
    return "\n".join(grid(lines))


def written(page: str, results: Path = RESULTS) -> str:
    """The page with every table made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{section(found[2], results)}\n{found[4]}", page)


def run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, default=PAGE, help="default: docs/measured.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is out of date")
    args = parser.parse_args(argv)
    try:
        old = args.page.read_text(encoding="utf-8")
    except OSError as error:
        raise CutefuseError(f"{args.page}: {error.strerror}; give a page that can be read") from None
    new = written(old)
    if args.check:
        print("up to date" if new == old else f"{args.page} is out of date; run python benchmarks/page.py")
        return int(new != old)
    write_text(args.page, new)
    return 0


def _shown(found: dict[str, Any], key: str, digits: int) -> str:
    return f"{found[key]:.{digits}f}" if key in found else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python benchmarks/page.py`."""
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
