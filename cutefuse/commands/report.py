"""`cutefuse report`: an HTML page of every engine in a folder of JSON files."""

from __future__ import annotations

import argparse
from pathlib import Path

from cutefuse.engines.artifacts import read_json
from cutefuse.errors import command_line
from cutefuse.output import json_alone, parsed
from cutefuse.report.write import write


@command_line
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="cutefuse report", allow_abbrev=False, description=__doc__)
    parser.add_argument("source", type=Path, help="folder of engine JSON files, or one *.graph.json")
    parser.add_argument("-o", "--outdir", type=Path, help="folder of the report (the source's own)")
    parser.add_argument("--onnx", type=Path, help="the ONNX model, to rank what to fuse next")
    parser.add_argument("--peaks", default="auto", help="auto, measured, a board such as H200, or a JSON file")
    args = parsed(parser, argv)
    folder = args.source if args.source.is_dir() else args.source.parent
    with json_alone(args.json) as show:
        page = write(args.source, args.outdir or folder, args.onnx, args.peaks)
        show({"page": page, **read_json(page.with_suffix(".json"))})
        print(f"report: {page}")
