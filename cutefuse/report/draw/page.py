"""Pages: one HTML file without outside parts for an engine, a comparison, or a language model under the roof."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

import cutefuse
from cutefuse.engines.kinds import KINDS
from cutefuse.engines.layers import Layer, layer_bytes, moved, weight_bytes
from cutefuse.match.site import FUSED, LEFT_OUT, MERGED, REFUSED
from cutefuse.output import write_text
from cutefuse.report.analyse.compare import Comparison
from cutefuse.report.analyse.tables import Analysis
from cutefuse.report.draw import charts, svg
from cutefuse.report.read.alike import RUNNERS
from cutefuse.report.read.engine import ENOUGH_LATENCIES, Engine, format_of
from cutefuse.report.read.graph import memory_profile
from cutefuse.report.read.moves import moves
from cutefuse.roofline.peaks import Peaks
from cutefuse.table import time_text

_PRECISION_COLORS = {"FP32": "pool", "TF32": "pointwise", "FP16": "conv", "BF16": "gemm", "INT8": "plugin",
                     "FP8": "norm", "": "noop"}  # fmt: skip
_ORIGIN_COLORS = {"concat": "copy", "reformat": "conv", "quantise": "plugin", "cast": "pointwise", "slice": "norm",
                  "shuffle": "pool"}  # fmt: skip
_FORMAT_COLORS = ("conv", "plugin", "pointwise", "pool", "norm", "gemm", "other")  # the largest group first
_VERDICTS = (FUSED, MERGED, LEFT_OUT, REFUSED)  # in the order of their table
_COMPARED = 400  # rows of a comparison in its page; the CSV has all
_DETAIL_LIMIT = 1500  # layers up to which every raw field travels in the page


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"middle": middle, "time": time_text, "bytes": charts.bytes_text, "code": _code}
    environment.filters["sections"] = re.compile(r'<section [^>]*data-nav="([^"]+)" id="(\w+)"').findall
    environment.globals |= {
        "version": cutefuse.__version__, "css": svg.CSS + svg.GRAPH_STYLE,
        "js": (here / "page.js").read_text(), "KINDS": KINDS,
    }  # fmt: skip
    return environment


def _code(value: str) -> markupsafe.Markup:
    """Words between backticks as code."""
    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(value))))


def middle(value: str, length: int) -> str:
    """Shortened in the middle: the ends of fused names tell most."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length // 2 - 1]} … {text[-(length // 2 - 2) :]}"


def render(template: str, path: Path, data: dict[str, Any], **context: Any) -> None:
    """Write a page. `data` is what its script reads, `context` what its template reads."""
    # "<" must not end the script element that holds the data.
    text = json.dumps({"kinds": KINDS, **data}, ensure_ascii=False, separators=(",", ":"), default=str)
    page = _environment().get_template(template).render(data=_printable(text.replace("<", "\\u003c")), **context)
    write_text(path, _printable(page))


def _printable(text: str) -> str:
    """Without control characters (TensorRT's metadata has them) and lone surrogates, which no page may hold."""
    clean = text.translate({c: " " for c in range(32) if c not in (9, 10, 13)})
    return clean.encode("utf-8", "replace").decode("utf-8")


def device(engine: Engine) -> str:
    """What ran an engine, on what, and with which shapes."""
    parts = [str(engine.device.get("Selected Device", ""))]
    if engine.backend == "rtx":
        ran = "" if engine.profiled else ", built and not run"
        parts.append(f"{RUNNERS['rtx']} {engine.version} for {engine.build.get('Target', 'this GPU')}{ran}")
    elif engine.backend in RUNNERS:
        parts.append(f"profiled with {RUNNERS[engine.backend]}, not with TensorRT")
    elif engine.version:
        parts.append(f"TensorRT {engine.version}")
    shapes = engine.inference.get("Input inference shapes") or engine.inference.get("Input inference shape")
    if shapes and shapes != "model":
        parts.append(str(shapes))
    return " · ".join(p for p in parts if p) or "device not recorded"


def write_engine_page(analysis: Analysis, path: Path, graph_svg: str) -> None:
    engine = analysis.engine
    copies = _copies(analysis)
    files = {kind: path.name for kind, path in engine.files.items()}
    about = engine.patch["prediction"] if engine.patch else {}
    chart, shown = charts.roofline(analysis) if analysis.roof_percent is not None else ("", [])
    histogram = ""
    if len(engine.latencies_ms) >= ENOUGH_LATENCIES:
        marks = [(f"p{q}", engine.percentile_ms(q) or 0.0) for q in (50, 90, 99)]
        histogram = charts.histogram(engine.latencies_ms, marks, engine.files["timing"].name)
    context: dict[str, Any] = {
        "subtitle": device(engine),
        "e": engine,
        "analysis": analysis,
        "moved": moved(engine.layers),
        "graph": graph_svg,
        "untimed": not engine.profiled and any(layer.outputs for layer in engine.layers),
        "time_source": f"{engine.files['profile'].name} › {engine.time_field}" if "profile" in engine.files else "",
        "file": files,
        "measured": f"{files.get('profile_metadata', '')} › performance_summary",
        "kinds": by_kind(engine),
        "precisions": _precisions(engine),
        "formats": _formats(engine),
        "top": sorted((la for la in engine.layers if la.time_us), key=lambda la: -(la.time_us or 0.0))[:15],
        "roofline": chart,
        "shown": shown,
        "roof_rows": sorted(analysis.placed, key=lambda item: item[1].floor_us - (item[0].time_us or 0.0))[:10],
        "sites": _sites(engine),
        "target": " on ".join(str(about[k]) for k in ("engine", "gpu") if about.get(k)),
        **_next(analysis),
        "copies": copies,
        "origins": _origins(copies),
        **_memory(engine),
        "histogram": histogram,
        "facts": [*engine.build.items(), *engine.inference.items(), *engine.device.items()],
    }
    render("engine.html.j2", path, _layer_data(analysis), **context)


def write_compare_page(comparison: Comparison, path: Path) -> None:
    """Engines side by side; the first is the baseline, the last the candidate."""
    title = " → ".join(middle(name, 48) for name in comparison.titles)
    fused = sum("plugin" in row.change for row in comparison.rows)
    context = {"comparison": comparison, "parts_of": by_kind, "limit": _COMPARED, "fused": fused}
    render("compare.html.j2", path, {}, title=title, subtitle=device(comparison.engines[-1]), **context)


def write_llm_page(view: dict[str, Any], peaks: Peaks, path: Path) -> None:
    """Prefill and decode of a language model on one device."""
    subtitle = f"{view['weight_type']} weights, {view['kv_type']} cache"
    render("llm.html.j2", path, {}, subtitle=subtitle, view=view, peaks=peaks, chart=charts.curves(view, peaks))


def _layer_data(analysis: Analysis) -> dict[str, Any]:
    """The layers as arrays in the order of `columns`; those of `texts` are places in `strings`."""
    strings: dict[str, int] = {}

    def short(value: Any) -> Any:
        if isinstance(value, str):
            return strings.setdefault(value, len(strings))
        return float(f"{value:.5g}") if isinstance(value, float) else value

    rich = len(analysis.rows) <= _DETAIL_LIMIT
    records = []
    for row, layer in zip(analysis.rows, analysis.engine.layers, strict=True):
        figures = map(short, {**row, "name": layer.title}.values())
        sides = (layer.inputs, layer.outputs) if rich else ((), ())
        tensors = [[[t.name, t.shape_text, t.text] for t in side] for side in sides]
        skip = ("Name", "LayerType", "TacticName", "Metadata")
        raw = {k: v for k, v in layer.raw.items() if k not in skip} if rich else {}
        if layer.title != layer.name:
            raw["name in the engine"] = layer.name
        sources = [layer.sources.get("layer", ""), layer.sources.get("time", "")]
        records.append([*figures, layer.onnx[:40], *sources, *tensors, raw])
    columns = [*analysis.rows[0], "onnx", "at", "from", "ins", "outs", "raw"]
    texts = [key for key, value in analysis.rows[0].items() if isinstance(value, str)]
    return {"columns": columns, "layers": records, "texts": texts, "strings": list(strings)}


# ------------------------------------------------- groups of a bar: label, sum (microseconds or MB, "us"), count, color
def _groups(items: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for key, value in items:
        groups[key].append(value)
    return dict(sorted(groups.items(), key=lambda item: (-sum(item[1]), item[0])))


def _group(label: str, values: list[float], color: str) -> dict[str, Any]:
    return {"label": label, "us": sum(values), "count": len(values), "color": f"var(--k-{color})"}


def _weight(engine: Engine, layer: Layer) -> float:
    """Its time; of an engine without times, the MB that it reads and writes."""
    return (layer.time_us or 0.0) if engine.profiled else (layer_bytes(layer) + weight_bytes(layer)) / 1e6


def by_kind(engine: Engine) -> list[dict[str, Any]]:
    """The kinds of layers, each with its time or its MB."""
    found = _groups((la.kind, _weight(engine, la)) for la in engine.layers)
    return [{"kind": kind, **_group(KINDS[kind], values, kind)} for kind, values in found.items()]


def _precisions(engine: Engine) -> list[dict[str, Any]]:
    found = _groups((la.precision, _weight(engine, la)) for la in engine.layers)
    return [_group(p or "unknown", values, _PRECISION_COLORS.get(p, "other")) for p, values in found.items()]


def _formats(engine: Engine) -> list[dict[str, Any]]:
    """Tensors between the layers by type and memory layout, in MB; each counts once."""
    tensors = {t.name: t for layer in engine.layers for t in (*layer.inputs, *layer.outputs) if t.dims}
    found = _groups((format_of(t) or "unknown", (t.size_bytes or 0.0) / 1e6) for t in tensors.values())
    return [_group(label, sizes, _FORMAT_COLORS[min(i, 6)]) for i, (label, sizes) in enumerate(found.items())]


def _origins(copies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    key = "us" if any(c["us"] for c in copies) else "mb"
    found = _groups((c["origin"], c[key] or 0.0) for c in copies)
    return [_group(origin, values, _ORIGIN_COLORS.get(origin, "other")) for origin, values in found.items()]


# ------------------------------------------------------------------------------------------------------------- sections
def _sites(engine: Engine) -> list[dict[str, Any]]:
    """The sites of the patch report, with the gain of those that were priced."""
    rows = [{**s, "gain": s["gain_us"] if s["status"] in (FUSED, LEFT_OUT) else None} for s in engine.sites]
    order = {status: i for i, status in enumerate(_VERDICTS)}
    return sorted(rows, key=lambda r: (order.get(r["status"], len(order)), -(r["gain"] or 0.0)))


def _next(analysis: Analysis) -> dict[str, Any]:
    """What to fuse next: sites that `patch` has judged already are in its own table, with its reasons."""
    engine, ranked = analysis.engine, analysis.candidates
    judged = {s["name"] for s in engine.sites}
    left = None if ranked is None else [c for c in ranked if c.node not in judged]
    command = ""
    if analysis.model is not None and not engine.fused_nodes:
        words = ("cutefuse", "patch", analysis.model, "--profile", engine.folder, "--min-gain", "5us")
        command = shlex.join(map(str, words))
    return {"candidates": left, "judged": len(ranked or []) - len(left or []), "command": command}


def _copies(analysis: Analysis) -> list[dict[str, Any]]:
    """The copies, by their time, else by their bytes."""
    rows = []
    for move in moves(analysis.engine):
        layer = analysis.engine.layers[move.index]
        before, after = layer.first
        rows.append({
            "layer": layer, "origin": move.origin, "reason": move.reason, "mb": move.size_bytes / 1e6,
            "us": layer.time_us, "gbs": analysis.rows[move.index]["gb_per_s"], "before": format_of(before),
            "after": format_of(after), "shape": after.shape_text if after else "",
        })  # fmt: skip
    return sorted(rows, key=lambda r: (-(r["us"] or 0.0), -r["mb"]))


def _memory(engine: Engine) -> dict[str, Any]:
    alive = memory_profile(engine)
    weights = sorted(((weight_bytes(la), la.index) for la in engine.layers), reverse=True)
    return {
        "memory": charts.area(alive, [la.title for la in engine.layers]),
        "peak_bytes": max(alive, default=0.0),
        "weight_bytes": sum(size for size, _ in weights),
        "weights": [(size, engine.layers[i]) for size, i in weights[:8] if size],
    }
