"""The pages beside that of one engine: a comparison, and a language model under the roof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cutefuse.engines.kinds import KINDS
from cutefuse.report.analyse.compare import Comparison
from cutefuse.report.draw import charts
from cutefuse.report.draw.page import device, middle, render, shares, tile
from cutefuse.roofline.peaks import Peaks

_LIMIT = 400  # rows of a comparison in the page; the CSV has all


def write_compare_page(comparison: Comparison, path: Path) -> None:
    """Engines side by side; the first is the baseline, the last the candidate."""
    engines = comparison.engines
    views = [
        {
            "name": e.name,
            "total": e.total_us,
            "count": len(e.layers),
            "source": f"{e.files['profile'].name} › {e.time_field}" if "profile" in e.files else "",
            "parts": shares(e, "kind", KINDS, None),
        }
        for e in engines
    ]
    rows = [
        {
            "label": r.label,
            "times": r.times_us,
            "mb": [b / 1e6 for b in r.copy_bytes],
            "copies": r.copies,
            "saved_mb": r.saved_bytes / 1e6,
            "saved": r.saved_us,
            "speedup": r.speedup,
            "change": r.change,
            "title": "\n".join(e.layers[i].name for e, own in zip(engines, r.layers, strict=True) for i in own),
            "sources": [
                "\n".join(e.layers[i].sources.get("time", "") for i in own)
                for e, own in zip(engines, r.layers, strict=True)
            ],
        }
        for r in comparison.rows[:_LIMIT]
    ]
    first_sections = [("kinds", "Time"), ("aligned", "Layers")] if comparison.timed else [("moved", "Copies")]
    render(
        "compare.html.j2",
        path,
        {"kinds": KINDS},
        title=" → ".join(middle(name, 48) for name in comparison.titles),
        brand="comparison",
        subtitle=device(engines[-1]),
        sections=[*first_sections, ("files", "Sources")],
        tiles=_compare_tiles(comparison),
        engines=views,
        widest=max([e.total_us for e in engines] + [1e-9]),
        kinds=[
            {"label": KINDS[k], "times": t, "change": t[-1] - t[0], "color": f"var(--k-{k})"}
            for k, t in comparison.by_kind.items()
        ],
        rows=rows,
        change=engines[-1].total_us - engines[0].total_us,
        caution=comparison.caution,
        timed=comparison.timed,
        moved=comparison.moved,
        most_mb=max([m.copy_bytes / 1e6 for m in comparison.moved] + [1e-9]),
        more=max(len(comparison.rows) - _LIMIT, 0),
        files=[(f"{e.name}: {k.replace('_', ' ')}", p.name) for e in engines for k, p in e.files.items()],
    )


def _tone(comparison: Comparison, ratio: float) -> str:
    return "" if comparison.caution else "good" if ratio > 1.005 else "bad" if ratio < 0.995 else ""


def _compare_tiles(comparison: Comparison) -> list[dict[str, str]]:
    first, last = comparison.engines[0], comparison.engines[-1]
    tiles = []
    for e in (first, last):
        if e.latency_ms:
            source = str(e.files.get("timing", ""))
            tiles.append(tile(f"median latency, {middle(e.name, 30)}", f"{e.latency_ms:.4g}", "ms", source))
    mixed = ", not of fusing alone" if comparison.unlike else ""
    speed = comparison.latency_speedup
    if speed:
        tone = _tone(comparison, speed)
        tiles.append(tile(f"speed-up of an inference{mixed}", f"{speed:.3g}", "×", "median latencies", tone))
    if first.total_us and last.total_us:
        ratio = first.total_us / last.total_us
        tone = _tone(comparison, ratio)
        tiles.append(
            tile(f"speed-up of the layers' sum{mixed}", f"{ratio:.3g}", "×", f"{last.time_field} of the profiles", tone)
        )
    tiles.append(tile("layers", f"{len(first.layers)} → {len(last.layers)}"))
    if comparison.copies_text:
        a, b = comparison.moved[0], comparison.moved[-1]
        tone = "good" if b.copy_bytes < a.copy_bytes else "bad" if b.copy_bytes > a.copy_bytes else ""
        tone = "" if comparison.unlike else tone
        tiles.append(tile("copies", f"{a.copies} → {b.copies}"))
        size = f"{a.copy_bytes / 1e6:.1f} → {b.copy_bytes / 1e6:.1f}"
        tiles.append(tile("read and written by copies", size, "MB", "shapes of the tensors", tone))
    fused = sum("plugin" in r.change for r in comparison.rows)
    if fused and not comparison.unlike:
        tiles.append(tile("groups fused into plugins", str(fused), tone="good"))
    return tiles


def write_llm_page(view: dict[str, Any], peaks: Peaks, path: Path) -> None:
    """Prefill and decode of a language model on one device."""
    length, batch = view["prefill_crossing_length"], view["decode_crossing_batch"]
    context = f"context {view['context']}"
    tiles = [
        tile(f"ridge, {view['precision']}", f"{view['ridge']:.0f}", "FLOP/byte", peaks.source),
        tile("prefill is compute-bound from", str(length) if length else "never", "tokens" if length else ""),
        tile(f"decode is compute-bound from ({context})", f"batch {batch}" if batch else "never"),
        tile("intensity of an endless decode batch", f"{view['decode_intensity_limit']:.1f}", "FLOP/byte"),
    ]
    render(
        "llm.html.j2",
        path,
        {"kinds": KINDS},
        title=f"{view['model']} on {peaks.device}",
        brand="roofline",
        sections=[],
        subtitle=f"{view['weight_type']} weights, {view['kv_type']} cache",
        tiles=tiles,
        view=view,
        peaks=peaks,
        chart=charts.curves(view, peaks),
    )
