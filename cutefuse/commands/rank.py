"""`cutefuse rank`: what to fuse next, by the profile of an engine."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from cutefuse import table
from cutefuse.errors import command_line
from cutefuse.output import json_alone, parsed
from cutefuse.report.analyse.rank import Candidate, candidates, engine_peaks
from cutefuse.report.read.reader import read_engine
from cutefuse.report.read.sources import one_engine


@command_line
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="cutefuse rank", allow_abbrev=False, description="What to fuse next.")
    parser.add_argument("profile", type=Path, help="folder that `cutefuse process` wrote, or a *.graph.json")
    parser.add_argument("model", type=Path, help="the ONNX model of that profile")
    args = parsed(parser, argv)
    engine = read_engine(one_engine(args.profile, args.model))
    rows = candidates(engine, args.model, engine_peaks(engine))
    with json_alone(args.json) as show:
        show([{**vars(c), "measured_us": c.measured_us} for c in rows])
        if rows:
            _print(rows, engine.total_us)
        else:
            print("nothing to fuse: no site was found; `cutefuse patch --dry-run` says what is looked for")


def _print(rows: Sequence[Candidate], total_us: float) -> None:
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
    share = 100 * gain_us / total_us if total_us else 0.0
    print(f"in all {gain_us:.1f} µs, {share:.1f} % of {total_us:.1f} µs in layers")
