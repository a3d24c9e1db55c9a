"""`cutefuse compare`: two or more engines side by side, layer by layer."""

from __future__ import annotations

import argparse
from pathlib import Path

from cutefuse.commands import next_step
from cutefuse.engines.artifacts import read_json
from cutefuse.errors import command_line
from cutefuse.output import json_alone, parsed
from cutefuse.report.write import write_compare


@command_line
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="cutefuse compare", allow_abbrev=False, description="Compare engines.")
    parser.add_argument("sources", type=Path, nargs="+", help="folders or *.graph.json files, the baseline first")
    parser.add_argument("-o", "--output", type=Path, help="page to write (compare.html in the last engine's folder)")
    args = parsed(parser, argv)
    with json_alone(args.json) as show:
        last = args.sources[-1] if args.sources[-1].is_dir() else args.sources[-1].parent
        page = args.output or last / "compare.html"
        comparison = write_compare(args.sources, page)
        show({"page": page, **read_json(page.with_suffix(".json"))})
        print(f"comparison: {page}")
        next_step.after_compare(comparison.engines)
