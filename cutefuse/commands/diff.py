"""`cutefuse diff`: what changed between two ONNX models. Exit codes: 0 the same, 1 different, 2 bad input."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from cutefuse.errors import command_line
from cutefuse.graph.diff import Change, compare
from cutefuse.graph.store import load_model
from cutefuse.output import json_alone, parsed


@command_line
def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="cutefuse diff", description="Show what changed between two ONNX models.")
    p.add_argument("a", type=Path)
    p.add_argument("b", type=Path)
    args = parsed(p, argv)
    changes = compare(load_model(args.a), load_model(args.b), args.a.parent, args.b.parent)
    with json_alone(args.json) as show:
        show(changes)
    if not args.json:
        _print(changes)
    return int(any(changes.values()))


def _print(changes: Mapping[str, Sequence[Change]]) -> None:
    for part, rows in changes.items():
        if rows:
            print(f"{part}:")
        for row in rows:
            for sign, value in (("-", row["before"]), ("+", row["after"])):
                if value is not None:
                    print(f"  {sign} {value}" if part == "nodes" else f"  {sign} {row['name']}: {value}")
    print("the models differ" if any(changes.values()) else "the models are the same")
