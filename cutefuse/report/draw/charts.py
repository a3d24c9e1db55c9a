"""Charts as inline SVG: roofline, latency histogram, memory, and the intensity of language models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cutefuse.engines.layers import Layer
from cutefuse.report.analyse.tables import Analysis
from cutefuse.report.draw.svg import number, text
from cutefuse.report.read.cost import Placement
from cutefuse.roofline.peaks import Peaks
from cutefuse.table import time_text

_WIDTH, _HEIGHT = 860, 400
_LOW, _FOOT = 180, 26  # height of a chart of columns, and of what stands beneath them
_DOTS = 1000  # the heaviest layers are drawn, the rest would hide beneath them
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 18, 46
_LINE = 13  # height of a line of text


def short(value: float) -> str:
    """1234 -> 1.23k, 0.01 -> 0.01."""
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    return next((f"{value / limit:.3g}{unit}" for limit, unit in units if abs(value) >= limit), f"{value:.3g}")


def bytes_text(size_bytes: float) -> str:
    """Bytes in binary units."""
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((f"{size_bytes / n:.3g} {unit}" for n, unit in units if size_bytes >= n), f"{size_bytes:.0f} B")


def _open(width: int, height: int, label: str) -> str:
    box = f'class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{text(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'


def _label(kind: str, x: float, y: float, content: str, anchor: str = "middle", turn: float | None = None) -> str:
    place = f'x="{number(x)}" y="{number(y)}"'
    if turn is not None:
        place = f'transform="translate({number(x)} {number(y)}) rotate({number(turn)})"'
    return f'<text class="{kind}" {place} text-anchor="{anchor}">{text(content)}</text>'


def _columns(shares: Sequence[float], tips: Sequence[str], left: float, right: float, top: float) -> list[str]:
    """Columns side by side, each as tall as its share of the height."""
    step, most = (_WIDTH - left - right) / len(shares), _LOW - _FOOT - top
    wide = number(max(step - (0.6 if step > 2 else 0), 0.5))
    out = []
    for i, (share, tip) in enumerate(zip(shares, tips, strict=True)):
        box = f'x="{number(left + i * step)}" y="{number(top + most * (1 - share))}" width="{wide}"'
        if share > 0:
            out.append(f'<rect class="bin" {box} height="{number(most * share)}"><title>{text(tip)}</title></rect>')
    return out


def _dot(x: float, y: float, radius: float, kind: str, tip: str, more: str = "") -> str:
    at = f'cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" style="--c:var(--k-{kind})"'
    return f'<circle class="dot" {more}{at}><title>{text(tip)}</title></circle>'


class _LogPlane:
    """A log-log coordinate system with grid and axis titles."""

    def __init__(self, low_x: float, high_x: float, low_y: float, high_y: float) -> None:
        self.low_x, self.high_x, self.low_y, self.high_y = low_x, high_x, low_y, high_y

    def x(self, value: float) -> float:
        share = math.log(value / self.low_x) / math.log(self.high_x / self.low_x)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share

    def y(self, value: float) -> float:
        share = math.log(max(value, self.low_y) / self.low_y) / math.log(self.high_y / self.low_y)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    def grid(self, x_ticks: list[float], x_title: str, y_title: str) -> list[str]:
        out = []
        for t in x_ticks:
            out.append(f'<path class="grid" d="M{number(self.x(t))} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
            out.append(_label("tick", self.x(t), _HEIGHT - _BOTTOM + 18, short(t)))
        for t in decades(self.low_y, self.high_y):
            out.append(f'<path class="grid" d="M{_LEFT} {number(self.y(t))}H{_WIDTH - _RIGHT}"/>')
            out.append(_label("tick", _LEFT - 8, self.y(t) + 4, short(t), "end"))
        out.append(_label("axis", (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_title))
        out.append(_label("axis", 16, (_TOP + _HEIGHT - _BOTTOM) / 2, y_title, turn=-90))
        return out


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from low to high."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**e for e in range(first, last + 1)]


def roofline(analysis: Analysis) -> tuple[str, list[Placement]]:
    """Log-log roofline with one dot a layer (area: time); returns the SVG and the layers that it shows."""
    peaks = analysis.peaks
    assert peaks is not None  # nothing is placed without
    dots = [(la, p) for la, p in analysis.placed if p.intensity]
    rates = {p: rate for p in dict.fromkeys(d[0].precision for d in dots) if (rate := peaks.rate(p))}
    if not rates:
        return "", []
    ridges = [rate * 1000 / peaks.bandwidth_gbs for rate in rates.values()]
    dots = sorted(dots, key=lambda d: -(d[0].time_us or 0.0))[:_DOTS]
    low_x = min([p.intensity for _, p in dots] + [min(ridges) / 20]) / 1.6
    high_x = max([p.intensity for _, p in dots] + [max(ridges) * 2]) * 1.6
    high_y = max([*rates.values(), *(p.achieved_tflops for _, p in dots)]) * 2
    low_y = max(min([p.achieved_tflops for _, p in dots] + [low_x * peaks.bandwidth_gbs / 1000]) / 1.6, high_y / 1e7)
    plane = _LogPlane(low_x, high_x, low_y, high_y)
    out = [_open(_WIDTH, _HEIGHT, "roofline: performance against operational intensity")]
    out += plane.grid(decades(low_x, high_x), "operational intensity, FLOP per byte", "TFLOP/s")
    roofs, names = _roofs(plane, peaks, rates)
    most = max(d[0].time_us or 0.0 for d in dots)
    out += [*roofs, *(_placed(plane, layer, place, most) for layer, place in dots), *names]
    return "".join(out) + "</svg>", [place for _, place in dots]


def _roofs(plane: _LogPlane, peaks: Peaks, rates: dict[str, float]) -> tuple[list[str], list[str]]:
    """The lines, and their names, which are drawn last: dots lie on the lines."""
    merged: dict[float, list[str]] = {}
    for name, rate in sorted(rates.items(), key=lambda item: item[1]):
        merged.setdefault(rate, []).append(name or "other types")
    lines, titles = [], []
    above = math.inf
    start = max(plane.low_x, plane.low_y * 1000 / peaks.bandwidth_gbs)
    begin = f"M{number(plane.x(start))} {number(plane.y(start * peaks.bandwidth_gbs / 1000))}"
    for rate, names in merged.items():
        corner = f"L{number(plane.x(rate * 1000 / peaks.bandwidth_gbs))} {number(plane.y(rate))}"
        lines.append(f'<path class="roof" d="{begin}{corner}H{_WIDTH - _RIGHT}"/>')
        unit = "TOP/s" if all(n.startswith("INT") for n in names) else "TFLOP/s"
        title = f"{' / '.join(names)} {short(rate)} {unit}"
        above = min(plane.y(rate) - 6, above - _LINE)  # roofs that are near each other keep their names apart
        titles.append(_label("tick over", _WIDTH - _RIGHT, above, title, "end"))
    ridge = min(rates.values()) * 1000 / peaks.bandwidth_gbs
    at = math.sqrt(start * ridge)
    # One decade to the right goes one decade up.
    run, rise = plane.x(plane.low_x * 10) - plane.x(plane.low_x), plane.y(plane.low_y) - plane.y(plane.low_y * 10)
    x, y = plane.x(at), plane.y(at * peaks.bandwidth_gbs / 1000) - 7
    slope = -math.degrees(math.atan2(rise, run))
    titles.append(_label("tick over", x, y, f"{short(peaks.bandwidth_gbs)} GB/s", turn=slope))
    return lines, titles


def _placed(plane: _LogPlane, layer: Layer, place: Placement, most_us: float) -> str:
    time_us = layer.time_us or 0.0
    tip = (
        f"{layer.title}\n{time_text(time_us)}, {layer.precision}, {place.bound}-bound\n"
        f"{place.intensity:.1f} FLOP/byte, {place.achieved_tflops:.3g} of {place.attainable_tflops:.3g} TFLOP/s "
        f"({place.percent_of_roof:.0f} % of the roof)\ncould take {time_text(place.floor_us)}\n"
        f"time: {layer.sources.get('time', '')}"
    )
    x, y, radius = plane.x(place.intensity), plane.y(place.achieved_tflops), 2.5 + 11 * math.sqrt(time_us / most_us)
    return _dot(x, y, radius, layer.kind, tip, f'data-i="{layer.index}" ')


def histogram(values: list[float], percentiles: list[tuple[str, float]], source: str) -> str:
    """Distribution of latencies in ms with marked percentiles, lowest first; what lies beyond the last is cut off."""
    low, margin = min(values), 20
    high = max(percentiles[-1][1] * 1.02, low * 1.001 + 1e-9)
    counts, edges = np.histogram(values, 60, (low, high))
    tips = [
        f"{edges[i]:.4g} to {edges[i + 1]:.4g} ms: {count} of {len(values)} inferences\n{source}"
        for i, count in enumerate(counts)
    ]
    out = [_open(_WIDTH, _LOW, "latency histogram"), *_columns(counts / max(counts), tips, margin, margin, 34)]
    last = -100.0
    for name, p in percentiles:
        x = margin + (_WIDTH - 2 * margin) * (p - low) / (high - low)
        y = 14 if x - last > 90 else 27
        last = x if y == 14 else last
        anchor = "end" if x > _WIDTH - 60 else "start" if x < 60 else "middle"
        out.append(f'<path class="mark" d="M{number(x)} {y + 3}V{_LOW - _FOOT}"/>')
        out.append(_label("tick", x, y, f"{name} {p:.4g}", anchor))
    for i, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        x, value = margin + (_WIDTH - 2 * margin) * i / 4, low + (high - low) * i / 4
        out.append(_label("tick", x, _LOW - _FOOT + 18, f"{value:.4g} ms", anchor))
    return "".join(out) + "</svg>"


def area(values: list[float], names: list[str]) -> str:
    """Memory that is alive, layer by layer; at most 400 columns (the maximum of each)."""
    most = max(values, default=0.0)
    if most <= 0:
        return ""
    per, top = math.ceil(len(values) / 400), 16
    worst = [max(range(i, min(i + per, len(values))), key=values.__getitem__) for i in range(0, len(values), per)]
    tips = [f"{names[i]}\n{bytes_text(values[i])} of activations alive" for i in worst]
    out = [_open(_WIDTH, _LOW, "memory of activations")]
    for share in (0.5, 1.0):
        y = _LOW - _FOOT - (_LOW - _FOOT - top) * share
        out.append(f'<path class="grid" d="M{_LEFT} {number(y)}H{_WIDTH - 10}"/>')
        out.append(_label("tick", _LEFT - 8, y + 4, bytes_text(most * share), "end"))
    out += _columns([values[i] / most for i in worst], tips, _LEFT, 10, top)
    out.append(_label("axis", (_LEFT + _WIDTH) / 2, _LOW - 6, "layers in order of execution"))
    return "".join(out) + "</svg>"


def curves(view: dict[str, Any], peaks: Peaks) -> str:
    """Prefill and decode of a language model against the ridge of a device: intensity over size."""
    series = (
        ("prefill", "conv", "prompt of {} tokens", [(r["length"], r["intensity"]) for r in view["prefill"]]),
        ("decode", "copy", "batch of {}", [(r["batch"], r["intensity"]) for r in view["decode"]]),
    )
    sizes = [size for *_, points in series for size, _ in points]
    ridge = float(view["ridge"])
    heights = [ridge, *(intensity for *_, points in series for _, intensity in points)]
    plane = _LogPlane(min(sizes), max(sizes), min(heights) / 2, max(heights) * 2)
    out = [_open(_WIDTH, _HEIGHT, "operational intensity of prefill and decode")]
    out += plane.grid([2.0**i for i in range(0, 15, 2)], "prompt length (prefill), batch (decode)", "FLOP per byte")
    note = f"ridge of {peaks.device}, {view['precision']}: {ridge:.0f} FLOP/byte; above it compute-bound"
    out.append(f'<path class="roof" d="M{_LEFT} {number(plane.y(ridge))}H{_WIDTH - _RIGHT}"/>')
    out.append(_label("tick", _WIDTH - _RIGHT, plane.y(ridge) - 6, note, "end"))
    for phase, kind, what, points in series:
        places = [(plane.x(size), plane.y(intensity)) for size, intensity in points]
        d = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in places)
        out.append(f'<path class="curve" d="{d}" style="stroke:var(--k-{kind})"/>')
        for (x, y), (size, intensity) in zip(places, points, strict=True):
            out.append(_dot(x, y, 4, kind, f"{phase}, {what.format(size)}: {intensity:.2f} FLOP/byte"))
        x, y = places[len(places) // 2]
        out.append(_label("axis", x + 10, y + 20, phase, "start"))
    return "".join(out) + "</svg>"
