"""The pages beside that of one engine: a comparison, and a language model under the roof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cutefuse.report.analyse.compare import Comparison
from cutefuse.report.draw import charts
from cutefuse.report.draw.page import by_kind, device, middle, render
from cutefuse.roofline.peaks import Peaks

_LIMIT = 400  # rows of a comparison in the page; the CSV has all


def write_compare_page(comparison: Comparison, path: Path) -> None:
    """Engines side by side; the first is the baseline, the last the candidate."""
    engines = comparison.engines
    render(
        "compare.html.j2",
        path,
        {},
        title=" → ".join(middle(name, 48) for name in comparison.titles),
        subtitle=device(engines[-1]),
        comparison=comparison,
        caution=comparison.caution,
        engines=engines,
        first=engines[0],
        last=engines[-1],
        parts_of=by_kind,
        widest=max([e.total_us for e in engines] + [1e-9]),
        rows=comparison.rows[:_LIMIT],
        more=max(len(comparison.rows) - _LIMIT, 0),
        change=engines[-1].total_us - engines[0].total_us,
        moved=comparison.moved,
        most_bytes=max([m.copy_bytes for m in comparison.moved] + [1e-3]),
        fused=sum("plugin" in r.change for r in comparison.rows),
    )


def write_llm_page(view: dict[str, Any], peaks: Peaks, path: Path) -> None:
    """Prefill and decode of a language model on one device."""
    subtitle = f"{view['weight_type']} weights, {view['kv_type']} cache"
    render("llm.html.j2", path, {}, subtitle=subtitle, view=view, peaks=peaks, chart=charts.curves(view, peaks))
