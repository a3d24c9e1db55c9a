"""Rows of a benchmark as one SVG: time of every peer over ours, and a roofline scatter. Needs nothing but Python."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from benchmarks.lib.table import by_cache, by_shape
from benchmarks.lib.targets import PEAK_BYTES, PEAK_FLOPS
from cutefuse.errors import CutefuseError
from cutefuse.output import write_text

LABELS = {
    "ours": ("cutefuse", "#111111"),
    "ours_sm80": ("cutefuse, Ampere path", "#8c8c8c"),
    "eager": ("torch eager", "#d62728"),
    "cat_cudnn": ("cat + cuDNN", "#ff7f0e"),
    "compile": ("torch.compile", "#bcbd22"),
    "compile_max": ("torch.compile max-autotune", "#2ca02c"),
    "cudnn_precat": ("cuDNN, pre-concatenated", "#1f77b4"),
    "cudnn_bare": ("cuDNN's best plan, bare", "#aec7e8"),
    "cudnn_fused": ("cuDNN's best plan, fused", "#3b4cc0"),
    "cublaslt": ("cuBLASLt, pre-concatenated", "#8c564b"),
    "cutlass2": ("CUTLASS 2.x, pre-concatenated", "#9467bd"),
    "cat_cutlass2": ("cat + CUTLASS 2.x", "#c49cde"),
    "cutlass3": ("CUTLASS 3.x, pre-concatenated", "#17becf"),
    "cat_cutlass3": ("cat + CUTLASS 3.x", "#9edae5"),
}
WIDTH, LEFT, RIGHT = 1180, 70, 20
RATIO_TOP, RATIO_HEIGHT, ROOF_TOP, ROOF_HEIGHT = 105, 300, 570, 420
HEIGHT = ROOF_TOP + ROOF_HEIGHT + 60


class Axis:
    """A logarithmic scale from a range of values to pixels."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        self.low, self.high = min(values) / 1.15, max(values) * 1.15
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten inside the range."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
        return [tick for tick in every if self.low <= tick <= self.high]


def _text(x: float, y: float, words: str, anchor: str = "middle", turn: int = 0) -> str:
    rotation = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{rotation}>{html.escape(words)}</text>'


def _line(x0: float, y0: float, x1: float, y1: float, color: str = "#dddddd", dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{color}"{dashes}/>'


def _tip(row: dict[str, Any], label: str) -> str:
    tile = f", {row['tile']}" if "tile" in row else ""
    words = f"{row['shape']}: {label} {row['time_us']:.1f} us, {row['tflops']:.0f} TFLOP/s{tile}"
    return f"<title>{html.escape(words)}</title>"


def _ratios(shapes: dict[str, dict[str, dict[str, Any]]], variants: list[str]) -> list[str]:
    """Bars: time of a peer over ours, on a logarithmic scale that crosses at 1."""
    shapes = {name: found for name, found in shapes.items() if "ours" in found}
    peers = [v for v in variants if v != "ours"]
    values = [found[v]["time_us"] / found["ours"]["time_us"] for found in shapes.values() for v in peers if v in found]
    if not values:
        return []
    bottom = RATIO_TOP + RATIO_HEIGHT
    y = Axis([1.0, *values], bottom, RATIO_TOP)
    parts = [_text(LEFT, RATIO_TOP - 12, "time of the peer / time of cutefuse (above 1: cutefuse is faster)", "start")]
    for tick in y.ticks():
        parts += [_line(LEFT, y(tick), WIDTH - RIGHT, y(tick)), _text(LEFT - 6, y(tick) + 4, f"{tick:g}", "end")]
    group = (WIDTH - LEFT - RIGHT) / len(shapes)
    bar = 0.8 * group / len(peers)
    for i, (name, found) in enumerate(shapes.items()):
        for j, variant in enumerate(peers):
            if variant not in found:
                continue
            label, color = LABELS[variant]
            top = y(found[variant]["time_us"] / found["ours"]["time_us"])
            parts.append(
                f'<rect x="{LEFT + i * group + 0.1 * group + j * bar:.1f}" y="{min(top, y(1)):.1f}" width="{bar:.1f}"'
                f' height="{abs(y(1) - top):.1f}" fill="{color}">{_tip(found[variant], label)}</rect>'
            )
        parts.append(_text(LEFT + (i + 0.55) * group, bottom + 14, name, "end", -40))
    return [*parts, _line(LEFT, y(1), WIDTH - RIGHT, y(1), "#111111", "4 3")]


def _roofline(shapes: dict[str, dict[str, dict[str, Any]]], variants: list[str]) -> list[str]:
    """Points: TFLOP/s over FLOP per byte of the fused operator, under the device's roof."""
    rows = [found[v] for found in shapes.values() for v in variants if v in found]
    intensities = [r["gflop"] * 1e3 / r["mbytes"] for r in rows]
    ridge, roof = PEAK_FLOPS / PEAK_BYTES, PEAK_FLOPS / 1e12
    bottom = ROOF_TOP + ROOF_HEIGHT
    x = Axis([*intensities, ridge], LEFT, WIDTH - RIGHT)
    y = Axis([*(r["tflops"] for r in rows), roof], bottom, ROOF_TOP)
    parts = [_text(LEFT, ROOF_TOP - 12, "TFLOP/s over FLOP per byte of the fused operator", "start")]
    for tick in x.ticks():
        parts += [_line(x(tick), ROOF_TOP, x(tick), bottom), _text(x(tick), bottom + 18, f"{tick:g}")]
    for tick in y.ticks():
        parts += [_line(LEFT, y(tick), WIDTH - RIGHT, y(tick)), _text(LEFT - 6, y(tick) + 4, f"{tick:g}", "end")]
    start = max(x.low, y.low * ridge / roof)  # where the slope enters the drawing
    parts.append(_line(x(start), y(start / ridge * roof), x(ridge), y(roof), "#111111"))
    parts.append(_line(x(ridge), y(roof), WIDTH - RIGHT, y(roof), "#111111"))
    for found in shapes.values():
        for variant in (v for v in variants if v in found):
            row, (label, color) = found[variant], LABELS[variant]
            parts.append(
                f'<circle cx="{x(row["gflop"] * 1e3 / row["mbytes"]):.1f}" cy="{y(row["tflops"]):.1f}" r="4"'
                f' fill="{color}" fill-opacity="0.8">{_tip(row, label)}</circle>'
            )
    return parts


def _legend(variants: list[str]) -> list[str]:
    """One line or two."""
    parts, x, y = [], float(LEFT), 38
    for variant in variants:
        label, color = LABELS[variant]
        width = 34 + 7 * len(label)
        if x + width > WIDTH:
            x, y = float(LEFT), y + 18
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{color}"/>')
        parts.append(_text(x + 17, y + 11, label, "start"))
        x += width
    return parts


def svg(rows: list[dict[str, Any]]) -> str:
    """The drawing. Raises CutefuseError when no row holds a time."""
    shapes = by_shape(next(iter(by_cache(rows).values()), []))
    variants = [v for v in LABELS if any(v in found for found in shapes.values())]
    if not variants:
        raise CutefuseError("the rows hold no time to draw; measure at least one variant that runs")
    first = rows[0]
    title = f"ConcatConv, {first['dtype']}, {first['gpu']}, torch {first['torch']}, cuDNN {first['cudnn']}"
    parts = [_text(LEFT, 24, title, "start"), *_legend(variants)]
    parts += _ratios(shapes, variants) + _roofline(shapes, variants)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write an .svg, or an .html page that holds it. Raises CutefuseError where that is impossible."""
    drawing = svg(rows)
    if path.suffix == ".html":
        drawing = f'<!doctype html><meta charset="utf-8"><title>ConcatConv</title><body>{drawing}</body>\n'
    write_text(path, drawing)
