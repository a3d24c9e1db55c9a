"""One engine analysed: costs, roofline, findings, candidates; and the same figures as CSV, JSON and terminal table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutefuse import table
from cutefuse.engines.layers import Layer, moved
from cutefuse.errors import CutefuseError
from cutefuse.report.analyse.compare import Comparison
from cutefuse.report.analyse.findings import Finding, findings
from cutefuse.report.analyse.rank import Candidate, candidates
from cutefuse.report.read.alike import types
from cutefuse.report.read.cost import Cost, Placement, layer_cost, place
from cutefuse.report.read.engine import Engine, format_of
from cutefuse.report.read.moves import moves
from cutefuse.roofline.peaks import Peaks


@dataclass
class Analysis:
    """Everything that the pages and tables show about one engine; `places` and `rows` go with `engine.layers`."""

    engine: Engine
    peaks: Peaks | None
    places: list[Placement | None]
    findings: list[Finding]
    candidates: list[Candidate] | None
    model: Path | None  # that the candidates are of
    rows: list[dict[str, Any]]

    @property
    def placed(self) -> list[tuple[Layer, Placement]]:
        """The layers that have a place under the roof, with it."""
        return [(la, p) for la, p in zip(self.engine.layers, self.places, strict=True) if p]

    @property
    def roof_percent(self) -> float | None:
        """Floor time over measured time of all layers that could be placed; None where most of the time could not."""
        measured = sum(la.time_us or 0.0 for la, _ in self.placed)
        floor_us = sum(p.floor_us for _, p in self.placed)
        return 100 * floor_us / measured if measured > max(self.engine.total_us / 2, 0) else None


def analyse(engine: Engine, peaks: Peaks | None, onnx_path: Path | None = None) -> Analysis:
    """Analyse one engine. A model that does not belong to it is noted, not an error."""
    costs = [layer_cost(engine, layer) for layer in engine.layers]
    places = [
        place(peaks, layer.precision, cost, layer.time_us) if peaks and layer.time_us else None
        for layer, cost in zip(engine.layers, costs, strict=True)
    ]
    ranked = None
    if onnx_path is not None and engine.profiled:
        try:
            ranked = candidates(engine, onnx_path, peaks)
        except CutefuseError as error:
            engine.notes.append(f"No ranking of what to fuse next: {error}.")
    rows = [_row(engine, *given) for given in zip(engine.layers, costs, places, strict=True)]
    return Analysis(engine, peaks, places, findings(engine, places), ranked, onnx_path, rows)


def _row(engine: Engine, layer: Layer, cost: Cost, placement: Placement | None) -> dict[str, Any]:
    total = engine.total_us
    out = layer.first[1]
    formats = filter(None, map(format_of, layer.first))
    known_us = layer.time_us or None
    return {
        "index": layer.index, "name": layer.name, "type": layer.type, "kind": layer.kind, "precision": layer.precision,
        "time_us": layer.time_us, "mean_us": layer.mean_us,
        "percent": 100 * layer.time_us / total if layer.time_us is not None and total else None,
        "output_shape": out.shape_text if out else "", "format": " → ".join(dict.fromkeys(formats)),
        "tactic": layer.tactic, "flops": cost.flops, "min_bytes": cost.size_bytes,
        "gb_per_s": cost.size_bytes / known_us / 1e3 if cost.size_bytes and known_us else None,
        "tflop_per_s": cost.flops / known_us / 1e6 if cost.flops and known_us else None,
        "percent_of_roof": placement.percent_of_roof if placement else None,
        "bound": placement.bound if placement else "", "floor_us": placement.floor_us if placement else None,
    }  # fmt: skip


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV; what is not known is empty."""
    out = io.StringIO()
    csv.writer(out).writerows(["" if value is None else value for value in row] for row in rows)
    return out.getvalue()


def layers_csv(analysis: Analysis) -> str:
    rows: list[list[Any]] = [[*analysis.rows[0], "onnx_nodes", "layer_source", "time_source"]]
    for row, layer in zip(analysis.rows, analysis.engine.layers, strict=True):
        rows.append([*row.values(), ";".join(layer.onnx), layer.sources.get("layer"), layer.sources.get("time")])
    return _csv(rows)


def report_json(analysis: Analysis) -> dict[str, Any]:
    """The report as data: overview, shares, findings, candidates, layers."""
    engine = analysis.engine
    ranked = None
    if analysis.candidates is not None:
        ranked = [{**vars(c), "measured_us": c.measured_us} for c in analysis.candidates]
    sums = moved(engine.layers)
    return {
        "schema": 1, "name": engine.name, "backend": engine.backend, "tensorrt_version": engine.version or None,
        "device": engine.device, "latency_ms": engine.latency_ms, "performance_summary": engine.performance,
        "layers_total_us": engine.total_us, "layers": len(engine.layers), "engine_bytes": engine.size_bytes,
        "percent_of_roof": analysis.roof_percent, "peaks": vars(analysis.peaks) if analysis.peaks else None,
        "time_us_by_kind": engine.by_kind_us, **vars(sums),
        "moves": [vars(move) for move in moves(engine)],
        "findings": [{**vars(f), "onnx": f.onnx(engine, 1000)} for f in analysis.findings],
        "fuse_next": ranked,
        "files": {k: p.name for k, p in engine.files.items()}, "notes": engine.notes,
        "rows": analysis.rows,
    }  # fmt: skip


def terminal(analysis: Analysis, limit: int = 10) -> str:
    """A few lines for the terminal: overview, heaviest layers, findings."""
    engine = analysis.engine
    lines = [f"{engine.name}: {len(engine.layers)} layers"]
    if engine.latency_ms:
        lines[0] += f", median latency {engine.latency_ms:.4g} ms"
    if engine.profiled:
        lines[0] += f", {table.time_text(engine.total_us)} in layers"
        heaviest = sorted((la for la in engine.layers if la.time_us), key=lambda la: -(la.time_us or 0.0))[:limit]
        cells = [
            (f"{la.time_us:.1f}", f"{100 * (la.time_us or 0.0) / engine.total_us:.1f}", la.kind, la.precision, la.label)
            for la in heaviest
        ]
        lines += table.aligned(("µs", "%", "kind", "math", "layer"), cells, numbers=(0, 1))
    elif sums := moved(engine.layers).text:
        lines[0] += f", {sums}"
    for f in analysis.findings[:6]:
        lines.append(f"{f.severity:>7}: {f.title}" + (f" ({table.time_text(f.cost_us)})" if f.cost_us else ""))
    return "\n".join(lines)


def compare_csv(comparison: Comparison) -> str:
    names = [e.name for e in comparison.engines]
    times, members, copies, sizes = (
        [f"{figure} {n}" for n in names] for figure in ("time_us", "names", "copies", "copy_bytes")
    )
    rows: list[list[Any]] = [["layers", *times, "saved_us", "speedup", "change", *members, *copies, *sizes]]
    for row in comparison.rows:
        own = [";".join(layer.name for layer in layers) for layers in row.layers]
        change = [row.saved_us, row.speedup, row.change]
        rows.append([row.label, *row.times_us, *change, *own, *row.copies, *row.copy_bytes])
    return _csv(rows)


def compare_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as data, times in microseconds; `speedup` is that of an inference, first over last."""
    keys = ("copies", "copy_bytes", "times_us", "saved_us", "speedup", "change")
    return {
        "schema": 1, "engines": [e.name for e in comparison.engines], "speedup": comparison.latency_speedup,
        "latency_ms": [e.latency_ms for e in comparison.engines], "caution": comparison.caution,
        "unlike": comparison.unlike, "types": [types(e) for e in comparison.engines],
        "layers_us": [e.total_us for e in comparison.engines], "time_us_by_kind": comparison.by_kind,
        **{key: [getattr(m, key) for m in comparison.moved] for key in ("copies", "copy_bytes", "all_bytes")},
        "rows": [{"layers": r.label, **{key: getattr(r, key) for key in keys}} for r in comparison.rows],
    }  # fmt: skip


def compare_terminal(comparison: Comparison) -> str:
    """A few lines for the terminal: headline, what became of the copies, the rows that changed most."""
    first, last = comparison.engines[0], comparison.engines[-1]
    lines = [f"{comparison.titles[0]} → {comparison.titles[-1]}"]
    if comparison.latency_speedup:
        lines[0] += f": {first.latency_ms:.4g} → {last.latency_ms:.4g} ms, {comparison.latency_speedup:.2f}×"
        lines[0] += ", not of fusing alone" if comparison.unlike else ""
    lines += filter(None, (comparison.caution, comparison.copies_text))
    heads = ("first µs", "last µs", "saved", "layers")
    if not comparison.timed:
        heads = ("first MB", "last MB", "change", "what the copies at these layers move")
    cells = []
    for row in comparison.rows[:12]:
        if comparison.timed:
            ends, change = (row.times_us[0], row.times_us[-1]), row.saved_us
        else:
            ends, change = (row.copy_bytes[0] / 1e6, row.copy_bytes[-1] / 1e6), -row.saved_bytes / 1e6
        figures = ["-" if f is None else f"{f:.1f}" for f in ends]
        cells.append((*figures, f"{change:+.1f}", row.label + (f"  [{row.change}]" if row.change else "")))
    return "\n".join([*lines, *table.aligned(heads, cells, numbers=(0, 1, 2))])
