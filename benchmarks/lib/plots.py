"""Rows of a benchmark as one self-contained HTML page: time of every variant over ours, and a roofline scatter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.lib.table import by_shape

PEAK_TFLOPS, PEAK_TBYTES = 790.0, 4.3  # measured on an H200; see docs/measured.md
LABELS = {
    "ours": "cutefuse",
    "eager": "torch eager",
    "cat_cudnn": "cat + cuDNN",
    "compile": "torch.compile",
    "compile_max": "torch.compile max-autotune",
    "cudnn_precat": "cuDNN, pre-concatenated",
}


def figure(rows: list[dict[str, Any]]) -> go.Figure:
    """Left: speed-up of ours over each peer per shape. Right: FLOP/s of ours and the peers over FLOP/byte."""
    shapes = by_shape(rows)
    variants = [v for v in LABELS if any(v in found for found in shapes.values())]
    page = make_subplots(
        rows=2,
        cols=1,
        vertical_spacing=0.16,
        subplot_titles=("time of the peer / time of cutefuse (above 1: cutefuse is faster)", "roofline"),
    )
    for variant in variants:
        if variant == "ours":
            continue
        both = {s: f for s, f in shapes.items() if variant in f and "ours" in f}
        ratio = [f[variant]["time_us"] / f["ours"]["time_us"] for f in both.values()]
        page.add_bar(x=list(both), y=ratio, name=LABELS[variant], legendgroup=variant, row=1, col=1)
    page.add_hline(y=1, line_dash="dot", row=1, col=1)

    ridge = PEAK_TFLOPS / PEAK_TBYTES
    page.add_scatter(
        x=[1, ridge, 10 * ridge], y=[PEAK_TBYTES, PEAK_TFLOPS, PEAK_TFLOPS], mode="lines", name="roof", row=2, col=1
    )
    for variant in variants:
        points = [f[variant] for f in shapes.values() if variant in f]
        page.add_scatter(
            x=[r["gflop"] * 1e3 / r["mbytes"] for r in points],
            y=[r["tflops"] for r in points],
            text=[f"{r['shape']}: {r['time_us']:.1f} us" for r in points],
            mode="markers",
            name=LABELS[variant],
            legendgroup=variant,
            showlegend=variant == "ours",
            row=2,
            col=1,
        )
    page.update_xaxes(type="log", title="FLOP per byte of the fused operator", row=2, col=1)
    page.update_yaxes(type="log", title="TFLOP/s", row=2, col=1)
    first = rows[0]
    page.update_layout(
        title=f"ConcatConv, {first['dtype']}, {first['gpu']}, torch {first['torch']}, cuDNN {first['cudnn']}",
        height=1100,
        barmode="group",
    )
    return page


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the page beside its final place, then rename."""
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(figure(rows).to_html(include_plotlyjs=True, full_html=True))
    os.replace(partial, path)
