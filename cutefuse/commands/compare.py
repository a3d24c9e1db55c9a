"""`cutefuse compare`: two or more engines side by side, layer by layer."""

from __future__ import annotations

import argparse
from pathlib import Path

from cutefuse.errors import run_command
from cutefuse.output import add_json, json_alone
from cutefuse.report.sources import read_json
from cutefuse.report.write import write_compare


def main(argv: list[str] | None = None) -> int:
    """`cutefuse compare a/ b/`: engines side by side."""
    parser = argparse.ArgumentParser(prog="cutefuse compare", allow_abbrev=False, description="Compare engines.")
    parser.add_argument("sources", type=Path, nargs="+", help="folders or *.graph.json files, the baseline first")
    parser.add_argument("-o", "--output", type=Path, default=Path("compare.html"), help="page to write (compare.html)")
    add_json(parser)
    args = parser.parse_args(argv)

    def command() -> int:
        with json_alone(args.json) as show:
            page = write_compare(args.sources, args.output)
            show({"page": page, **read_json(page.with_suffix(".json"))})
            print(f"comparison: {page}")
        return 0

    return run_command(command)
