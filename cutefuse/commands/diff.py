"""`cutefuse diff`: what changed between two ONNX models. Exit codes: 0 the same, 1 different, 2 bad input."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cutefuse.errors import run_command
from cutefuse.graph.diff import compare
from cutefuse.graph.store import load_model


def main(argv: list[str] | None = None) -> int:
    """Entry point of `cutefuse diff`."""
    p = argparse.ArgumentParser(prog="cutefuse diff", description="Show what changed between two ONNX models.")
    p.add_argument("a", type=Path)
    p.add_argument("b", type=Path)
    p.add_argument("--json", action="store_true", help="print the differences as JSON")
    args = p.parse_args(argv)

    def command() -> int:
        changes = compare(load_model(args.a), load_model(args.b), args.a.parent, args.b.parent)
        different = any(changes.values())
        if args.json:
            print(json.dumps(changes, indent=1, default=str))
            return int(different)
        for part, rows in changes.items():
            if rows:
                print(f"{part}:")
            for row in rows:
                for sign, value in (("-", row["before"]), ("+", row["after"])):
                    if value is not None:
                        print(f"  {sign} {value}" if part == "nodes" else f"  {sign} {row['name']}: {value}")
        print("the models differ" if different else "the models are the same")
        return int(different)

    return run_command(command)
