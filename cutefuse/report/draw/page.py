"""The page of one engine: one HTML file without outside parts."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import cutefuse
from cutefuse.engines.kinds import KINDS
from cutefuse.match.site import FUSED, LEFT_OUT, MERGED, REFUSED
from cutefuse.output import write_text
from cutefuse.report.analyse.tables import Analysis
from cutefuse.report.draw import charts, svg
from cutefuse.report.read.cost import Placement, weight_bytes
from cutefuse.report.read.graph import memory_profile
from cutefuse.report.read.moves import layer_bytes, moved, moves
from cutefuse.report.read.reader import Engine
from cutefuse.table import time_text

_COLORS = {
    "FP32": "pool",
    "TF32": "pointwise",
    "FP16": "conv",
    "BF16": "gemm",
    "INT8": "plugin",
    "FP8": "norm",
    "": "noop",
}
_ORIGIN_COLORS = {
    "concat": "copy",
    "reformat": "conv",
    "quantise": "plugin",
    "cast": "pointwise",
    "slice": "norm",
    "shuffle": "pool",
}
_DETAIL_LIMIT = 1500  # layers up to which every raw field travels in the page
_FOLDED = ("type", "kind", "precision", "tactic", "format", "shape", "bound")


@lru_cache(maxsize=1)
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["middle"] = middle
    environment.filters["time"] = time_text
    environment.filters["code"] = _code
    return environment


def _code(value: str) -> Any:
    """Words between backticks as code."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(value))))


def middle(value: str, length: int) -> str:
    """Shortened in the middle: the ends of fused names tell most."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length // 2 - 1]} … {text[-(length // 2 - 2) :]}"


def render(template: str, path: Path, data: Any, **context: Any) -> None:
    here = Path(__file__).parent
    # "<" must not end the script element that holds the data.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=str).replace("<", "\\u003c")
    page = _environment().get_template(template).render(
        version=cutefuse.__version__, css=(here / "page.css").read_text(), js=(here / "page.js").read_text(),
        graph_css=svg.GRAPH_STYLE, data=_printable(text), **context,
    )  # fmt: skip
    write_text(path, _printable(page))


def _printable(text: str) -> str:
    """Without control characters (TensorRT's metadata has them) and lone surrogates, which no page may hold."""
    clean = text.translate({c: " " for c in range(32) if c not in (9, 10, 13)})
    return clean.encode("utf-8", "replace").decode("utf-8")


def tile(label: str, value: str, unit: str = "", source: str = "", tone: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "unit": unit, "source": source, "tone": tone}


def device(engine: Engine) -> str:
    parts = [str(engine.device.get("Selected Device", ""))]
    if engine.backend == "onnxruntime":
        parts.append("profiled with ONNX Runtime, not with TensorRT")
    elif engine.backend == "torch":
        parts.append("profiled with PyTorch, not with TensorRT")
    elif engine.backend == "rtx":
        ran = "" if engine.profiled else ", built and not run"
        parts.append(f"TensorRT for RTX {engine.version} for {engine.build.get('Target', 'this GPU')}{ran}")
    elif engine.version:
        parts.append(f"TensorRT {engine.version}")
    shapes = engine.inference.get("Input inference shapes") or engine.inference.get("Input inference shape")
    if shapes and shapes != "model":
        parts.append(str(shapes))
    return " · ".join(p for p in parts if p) or "device not recorded"


def _tiles(analysis: Analysis) -> list[dict[str, str]]:
    engine = analysis.engine
    tiles = []
    files = {k: p.name for k, p in engine.files.items()}
    verify = (engine.patch or {}).get("verify")
    if isinstance(verify, dict):
        passed = bool(verify.get("passed"))
        where = f"{files.get('patch', '')} › verify"
        word = "equal" if passed else "not equal"
        tiles.append(tile("patched against original", word, "", where, "good" if passed else "bad"))
    where = files.get("timing", files.get("profile_metadata", ""))
    if engine.latency_ms:
        tiles.append(tile("median latency", f"{engine.latency_ms:.4g}", "ms", f"{where} › latencyMs"))
    if len(engine.latencies_ms) >= 20:
        ordered = sorted(engine.latencies_ms)
        tiles.append(
            tile("p99 latency", f"{ordered[int(0.99 * (len(ordered) - 1))]:.4g}", "ms", f"{where} › latencyMs")
        )
    elif isinstance(values := engine.performance.get("Latency"), list) and len(values) > 4:
        name = f"p{engine.percentiles[-1]:g}" if engine.percentiles else "highest percentile"
        source = f"{files.get('profile_metadata', '')} › performance_summary.Latency"
        tiles.append(tile(f"{name} latency", f"{values[-1]:.4g}", "ms", source))
    rate = engine.performance.get("Throughput")
    if isinstance(rate, (int, float)):
        source = f"{files.get('profile_metadata', '')} › performance_summary.Throughput"
        tiles.append(tile("throughput", f"{rate:.4g}", "/s", source))
    tiles.append(tile("layers", str(len(engine.layers)), "", f"{files['graph']} › Layers"))
    if engine.size_bytes:
        tiles.append(tile("engine file", charts.bytes_text(engine.size_bytes), "", files["engine"]))
    sums = moved(engine)
    if not engine.profiled and sums.all_bytes:
        share = 100 * sums.copy_bytes / sums.all_bytes
        source = f"{files['graph']} › tensors of copies, reformats and concats, of all layers"
        tiles.append(tile("copies", str(sums.copies), "", source))
        tiles.append(tile("read and written by copies", f"{sums.copy_bytes / 1e6:.1f}", "MB", source))
        tiles.append(tile("of the traffic only moves data", f"{share:.1f}", "%", source, "bad" if share >= 10 else ""))
    if engine.profiled and engine.total_us:
        copies = sum(la.time_us or 0.0 for la in engine.layers if la.kind == "copy")
        share = 100 * copies / engine.total_us
        source = f"{files.get('profile', '')} › {engine.time_field} of copies, reformats and concats"
        tiles.append(tile("of the time moves data", f"{share:.1f}", "%", source, "bad" if share >= 10 else ""))
    plugins = [la for la in engine.layers if la.kind == "plugin"]
    if plugins:
        tiles.append(tile("plugin layers", str(len(plugins)), "", f"{files['graph']} › LayerType", "good"))
    if analysis.roof_percent is not None and analysis.roof_percent <= 100:  # what all of it exceeds is no roof
        tiles.append(
            tile(
                "of the roof, over all placed layers", f"{analysis.roof_percent:.0f}", "%", "floor time / measured time"
            )
        )
    return tiles


def shares(engine: Engine, key: str, label: dict[str, str], colors: dict[str, str] | None) -> list[dict[str, Any]]:
    """Layers in groups, each with its time ("us"); of an engine without times, with the MB that it reads and writes."""
    us: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for layer in engine.layers:
        size = layer_bytes(layer) + weight_bytes(layer)
        us[getattr(layer, key)] += (layer.time_us or 0.0) if engine.profiled else size / 1e6
        count[getattr(layer, key)] += 1
    names = sorted(us, key=lambda n: (-us[n], n))
    return [
        {"kind": n, "label": label.get(n, n or "unknown"), "us": us[n], "count": count[n],
         "color": f"var(--k-{(colors or {}).get(n, n if colors is None else 'other')})"}
        for n in names
    ]  # fmt: skip


def _layer_data(analysis: Analysis) -> dict[str, Any]:
    """The layers as arrays, with strings that repeat held once."""
    engine = analysis.engine
    strings: dict[str, int] = {}
    rich = len(engine.layers) <= _DETAIL_LIMIT
    columns = list(analysis.rows[0]) if analysis.rows else []
    records = []
    for row, layer in zip(analysis.rows, engine.layers, strict=True):
        values: list[Any] = []
        for key in columns:
            value = layer.title if key == "name" else row[key]
            if key in _FOLDED:
                value = strings.setdefault(str(value or ""), len(strings))
            elif isinstance(value, float):
                value = float(f"{value:.5g}")
            values.append(value)
        tensors = (
            [[[t.name, t.shape_text, t.text] for t in side] for side in (layer.inputs, layer.outputs)]
            if rich
            else [[], []]
        )
        skip = ("Name", "LayerType", "TacticName", "Metadata")
        raw = {k: v for k, v in layer.raw.items() if k not in skip} if rich else {}
        if layer.title != layer.name:
            raw["name in the engine"] = layer.name
        where: list[Any] = []
        for key in ("layer", "time"):
            file, _, place = layer.sources.get(key, "").partition(" › ")
            where += [strings.setdefault(file, len(strings)), place]
        records.append([*values, layer.onnx[:40], *where, *tensors, raw])
    names = [*columns, "onnx", "at_file", "at", "from_file", "from", "ins", "outs", "raw"]
    folded = [*_FOLDED, "at_file", "from_file"]
    return {"columns": names, "layers": records, "strings": list(strings), "interned": folded, "kinds": KINDS}


def write_engine_page(analysis: Analysis, path: Path, graph_svg: str) -> None:
    """The report of one engine."""
    engine = analysis.engine
    context: dict[str, Any] = {
        "title": engine.name,
        "brand": "engine report",
        "subtitle": device(engine),
        "tiles": _tiles(analysis),
        "notes": engine.notes,
        "names": [layer.title for layer in engine.layers],
        "findings": [{**vars(f), "nodes": f.onnx(engine)} for f in analysis.findings],
        "graph": graph_svg,
        **_time(engine),
        **_roof(analysis),
        **_patch(engine),
        **_next(analysis),
        **_movement(analysis),
        **_memory(engine),
        **_latency(engine),
        **_sources(engine),
    }
    wanted = (
        ("overview", "Overview", True),
        ("time", "Time", engine.total_us),
        ("traffic", "Traffic", context["untimed"]),
        ("findings", "Findings", True),
        ("roofline", "Roofline", context["roofline"]),
        ("next", "Fuse next", context["candidates"] or analysis.candidates == []),
        ("fused", "Fused", context["sites"]),
        ("copies", "Copies", context["copies"]),
        ("memory", "Memory", context["memory"]),
        ("latency", "Latency", context["histogram"]),
        ("engine", "Graph", graph_svg),
        ("layers", "Layers", True),
        ("files", "Sources", True),
    )
    context["sections"] = [(i, n) for i, n, there in wanted if there]
    render("engine.html.j2", path, _layer_data(analysis), **context)


def _time(engine: Engine) -> dict[str, Any]:
    heaviest = sorted((la for la in engine.layers if la.time_us), key=lambda la: -(la.time_us or 0.0))[:15]
    return {
        "count": len(engine.layers),
        "total": engine.total_us,
        "latency_us": 1000 * engine.latency_ms if engine.latency_ms else None,
        "untimed": not engine.profiled and any(layer.outputs for layer in engine.layers),
        "time_source": f"{engine.files['profile'].name} › {engine.time_field}" if "profile" in engine.files else "",
        "kinds": shares(engine, "kind", KINDS, None),
        "precisions": shares(engine, "precision", {}, _COLORS),
        "formats": _formats(engine),
        "top": [
            {"i": la.index, "name": la.title, "us": la.time_us, "kind": la.kind, "source": la.sources.get("time", "")}
            for la in heaviest
        ],
    }


def _formats(engine: Engine) -> list[dict[str, Any]]:
    """Tensors between the layers by type and memory layout, in MB; each counts once."""
    tensors = {t.name: t for layer in engine.layers for t in (*layer.inputs, *layer.outputs) if t.dims}
    groups: dict[str, list[float]] = defaultdict(list)
    for tensor in tensors.values():
        groups[f"{tensor.dtype} {tensor.layout}".strip() or "unknown"].append((tensor.size_bytes or 0.0) / 1e6)
    colors = ("conv", "plugin", "pointwise", "pool", "norm", "gemm", "other")
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))
    return [{"label": label, "us": sum(sizes), "count": len(sizes), "color": f"var(--k-{colors[min(i, 6)]})"}
            for i, (label, sizes) in enumerate(ordered)]  # fmt: skip


def _roof(analysis: Analysis) -> dict[str, Any]:
    engine = analysis.engine
    everything = zip(engine.layers, analysis.places, analysis.costs, strict=True)
    placed = [(la, p, c) for la, p, c in everything if p and la.time_us]
    chart, shown = "", list[Placement]()
    if analysis.peaks and analysis.roof_percent is not None:
        chart, shown = charts.roofline(engine, analysis.peaks, analysis.costs, analysis.places)
    above = sorted(placed, key=lambda item: item[1].floor_us - (item[0].time_us or 0.0))[:10]
    return {
        "roofline": chart,
        "shown": len(shown),
        "peaks": analysis.peaks,
        "over": sum(p.percent_of_roof > 100 for p in shown),
        "roof_rows": [
            {
                "i": la.index,
                "us": la.time_us,
                "floor": p.floor_us,
                "roof": p.percent_of_roof,
                "bound": p.bound,
                "intensity": c.intensity or 0.0,
            }
            for la, p, c in above
        ],
    }


def _patch(engine: Engine) -> dict[str, Any]:
    """What the patch report says of each site, with the figures of it; sites that were judged stand here alone."""
    blank = {"name": "", "status": "", "op_type": "", "operator": "", "reason": "", "nodes": [], "dtype": ""}
    report = engine.patch or {}
    sites = [{**blank, **s} for s in report.get("sites", []) if isinstance(s, dict)]
    rows = [
        {
            **s,
            "nodes": [str(n) for n in s["nodes"] or []],
            "gain": _figure(s.get("gain_us")) if s["status"] in (FUSED, LEFT_OUT) else None,
            "megabytes": _figure(s.get("bytes_saved"), 1e6) if s["status"] == FUSED else None,
            "unknown": s["status"] == FUSED and _figure(s.get("gain_us")) is None,
        }
        for s in sites
    ]
    order = {FUSED: 0, MERGED: 1, LEFT_OUT: 2, REFUSED: 3}
    about, summary = (d if isinstance(d := report.get(key), dict) else {} for key in ("prediction", "summary"))
    target = " on ".join(str(about[k]) for k in ("engine", "gpu") if about.get(k))
    return {
        "sites": sorted(rows, key=lambda r: (order.get(r["status"], 4), -(r["gain"] or 0.0))),
        "fused": sum(r["status"] == FUSED for r in rows),
        "saved_us": _figure(summary.get("gain_us")),
        "target": target,
        "patch_file": engine.files["patch"].name if "patch" in engine.files else "",
    }


def _figure(value: Any, unit: float = 1.0) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
    return value / unit if known else None


def _next(analysis: Analysis) -> dict[str, Any]:
    """What to fuse next: sites that `patch` has judged already are in its own table, with its reasons."""
    judged = {str(s.get("name")) for s in (analysis.engine.patch or {}).get("sites", []) if isinstance(s, dict)}
    ranked = analysis.candidates
    left = None if ranked is None else [c for c in ranked if c.node not in judged]
    command = ""
    if analysis.model is not None and not analysis.engine.fused_nodes:
        words = ("cutefuse", "patch", analysis.model, "--profile", analysis.engine.folder, "--min-gain", "5us")
        command = " ".join(shlex.quote(str(word)) for word in words)
    return {
        "candidates": left, "judged": len(ranked or []) - len(left or []), "command": command,
        "on_cpu": analysis.engine.on_cpu,
    }  # fmt: skip


def _movement(analysis: Analysis) -> dict[str, Any]:
    copies = _copies(analysis)
    notes = [{"action": "", "node": "", "reason": "", **n} for n in analysis.engine.concats[:40]]
    moved_us = sum(c["us"] or 0.0 for c in copies)
    return {
        "copies": copies,
        "copy_us": moved_us,
        "moved": moved(analysis.engine),
        "origins": _origins(copies),
        "concats": notes,
    }


def _memory(engine: Engine) -> dict[str, Any]:
    alive = memory_profile(engine)
    weights = sorted(((weight_bytes(la), la.index) for la in engine.layers), reverse=True)
    return {
        "memory": charts.area(alive, [la.title for la in engine.layers], "memory of activations"),
        "peak_memory": charts.bytes_text(max(alive, default=0.0)),
        "weights": charts.bytes_text(total) if (total := sum(w for w, _ in weights)) else "",
        "engine_size": charts.bytes_text(engine.size_bytes) if engine.size_bytes else "",
        "weight_rows": [{"i": i, "bytes": w, "text": charts.bytes_text(w)} for w, i in weights[:8] if w],
    }


def _latency(engine: Engine) -> dict[str, Any]:
    ordered = sorted(engine.latencies_ms)
    file = engine.files["timing"].name if "timing" in engine.files else ""
    marks = [(f"p{q}", ordered[int(q / 100 * (len(ordered) - 1))]) for q in (50, 90, 99)] if ordered else []
    chart = charts.histogram(ordered, marks, "ms", file) if len(ordered) >= 20 else ""
    return {"histogram": chart, "latency_count": len(ordered), "timing_file": file}


def _sources(engine: Engine) -> dict[str, Any]:
    facts = [*engine.build.items(), *engine.inference.items(), *engine.device.items()]
    return {
        "files": [(k.replace("_", " "), p.name) for k, p in engine.files.items()],
        "facts": [(k, v) for k, v in facts if v not in ("", None)],
    }


def _copies(analysis: Analysis) -> list[dict[str, Any]]:
    """The copies, by their time, else by their bytes."""
    engine, rows = analysis.engine, []
    for move in moves(engine):
        layer, cost = engine.layers[move.index], analysis.costs[move.index]
        before, after = (side[0] if side else None for side in (layer.inputs, layer.outputs))
        rows.append(
            {
                "i": layer.index,
                "origin": move.origin,
                "reason": move.reason,
                "mb": move.size_bytes / 1e6,
                "us": layer.time_us,
                "gbs": cost.size_bytes / layer.time_us / 1e3 if cost.size_bytes and layer.time_us else None,
                "before": f"{before.dtype} {before.layout}" if before else "",
                "after": f"{after.dtype} {after.layout}" if after else "",
                "shape": after.shape_text if after else "",
                "source": layer.sources.get("time", ""),
            }
        )
    return sorted(rows, key=lambda r: (-(r["us"] or 0.0), -r["mb"]))


def _origins(copies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in copies:
        groups[row["origin"]].append(row)
    value = "us" if any(r["us"] for r in copies) else "mb"
    parts = [{"label": k, "us": sum(r[value] or 0.0 for r in v), "count": len(v),
              "color": f"var(--k-{_ORIGIN_COLORS.get(k, 'other')})"} for k, v in groups.items()]  # fmt: skip
    return sorted(parts, key=lambda p: -p["us"])
