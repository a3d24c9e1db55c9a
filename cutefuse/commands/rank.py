"""`cutefuse rank`: what to fuse next, by the profile of an engine."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from cutefuse import table
from cutefuse.errors import command_line
from cutefuse.output import json_alone, write_json
from cutefuse.report.analyse.rank import candidates, engine_of, engine_peaks


@command_line
def main(argv: list[str] | None = None) -> int:
    """`cutefuse rank outdir model.onnx`: the ranking as a table."""
    parser = argparse.ArgumentParser(prog="cutefuse rank", allow_abbrev=False, description="What to fuse next.")
    parser.add_argument("profile", type=Path, help="folder that `cutefuse process` wrote, or a *.graph.json")
    parser.add_argument("model", type=Path, help="the ONNX model of that profile")
    parser.add_argument("--json", type=Path, nargs="?", const=Path("-"), metavar="FILE",
                        help="print the ranking as JSON, or write it into a file beside the table")  # fmt: skip
    args = parser.parse_args(argv)
    engine = engine_of(args.profile, args.model)
    rows = candidates(engine, args.model, engine_peaks(engine))
    data = [{**vars(c), "measured_us": c.measured_us} for c in rows]
    if args.json == Path("-"):
        with json_alone(True) as show:
            show(data)
        return 0
    if args.json:
        write_json(args.json, data)
    if not rows:
        print("nothing to fuse: no site was found; `cutefuse patch --dry-run` says what is looked for")
        return 0
    cells = []
    for c in rows:
        roof = f"{c.roof_gain_us:.1f}" if c.roof_gain_us is not None and math.isfinite(c.roof_gain_us) else "-"
        note = f"  ({c.note})" if c.note else ""
        gain = "?" if c.gain_us is None else f"{c.gain_us:.1f}"
        times = [f"{time:.1f}" for time in (c.copy_us, c.compute_us, c.separate_us)]
        cells.append((gain, *times, roof, c.operator, c.node + note))
    headings = ("gain µs", "copy", "compute", "separate", "roof", "operator", "node")
    print("\n".join(table.aligned(headings, cells, numbers=range(5))))
    gain_us = sum(c.gain_us or 0.0 for c in rows)
    share = 100 * gain_us / engine.total_us if engine.total_us else 0.0
    print(f"in all {gain_us:.1f} µs, {share:.1f} % of {engine.total_us:.1f} µs in layers")
    return 0
