"""Engine JSON of TensorRT 8 to 11, trtexec, NVIDIA's engine explorer and our own backends, as plain data.

Only the standard library. The reader tolerates careless writers: control characters and unescaped
quotes in names, NaN, layers without outputs, object or list roots, layers that are only names. Anything that cannot
be an engine raises CutefuseError with one sentence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cutefuse.engines.artifacts import build_metadata, profile_metadata, read_json
from cutefuse.engines.kinds import kind_of
from cutefuse.engines.layers import Layer, read_layers
from cutefuse.engines.plugins import speaks_of
from cutefuse.errors import CutefuseError
from cutefuse.report.read import bodies
from cutefuse.report.read.engine import Engine
from cutefuse.report.read.sources import find_engines, stem_of

__all__ = ["Engine", "find_engines", "read_engine"]

T = TypeVar("T")

_LARGEST = 1e30  # of any figure of an engine, in any unit
# What a site of a patch report may leave out.
_SITE: dict[str, Any] = {"name": "", "status": "", "op_type": "", "operator": "", "reason": "", "dtype": "",
                         "nodes": [], "outputs": [], "notes": [], "gain_us": None, "bytes_saved": None,
                         "flops": None}  # fmt: skip
_TABLES = ("input", "output", "summary", "prediction", "conversion", "verify")  # of a patch report


def _finite(value: Any) -> float | None:
    """A number that figures can be made of: 0 for one that is next to nothing, None for a text or one beyond all."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= _LARGEST:
        return None
    return float(value) if abs(value) >= 1 / _LARGEST else 0.0


def _numbers(table: dict[str, Any]) -> dict[str, Any]:
    """A table without what is neither a number nor a list of numbers, whose places have meanings."""
    lists = {k: [_finite(v) for v in values] for k, values in table.items() if isinstance(values, list)}
    single = {k: _finite(v) for k, v in table.items() if not isinstance(v, list)}
    return {k: v for k, v in {**lists, **single}.items() if v is not None and not (isinstance(v, list) and None in v)}


# ------------------------------------------------------------------------------------------------- reading one engine
def read_engine(files: dict[str, Path]) -> Engine:
    """Read one engine from its files; only `graph` must be there."""
    graph_file = files["graph"]
    data = read_json(graph_file)
    layers = read_layers(data, graph_file.name)
    inputs, outputs = _bindings(data, layers)
    stem = stem_of(graph_file.name, "graph") or graph_file.stem
    name = stem.removesuffix(".engine") or graph_file.parent.name
    engine = Engine(name, graph_file.parent, layers, inputs, outputs, dict(files))
    if layers and all(not layer.inputs and not layer.outputs for layer in layers):
        engine.notes.append("the layers are names only; build with --profilingVerbosity=detailed for shapes")
    if "profile" in files:
        _add_profile(engine, read_json(files["profile"]), files["profile"].name)
    if "timing" in files:
        records = read_json(files["timing"])
        records = [r for r in records if isinstance(r, dict)] if isinstance(records, list) else []
        times_ms = (_finite(r.get("latencyMs", r.get("computeMs"))) for r in records)
        engine.latencies_ms = [t for t in times_ms if t is not None]
    _add_metadata(engine, files)
    if "engine" in files:
        engine.size_bytes = files["engine"].stat().st_size
    if "patch" in files:
        engine.patch = _patch_report(read_json(files["patch"]), f"{name}.onnx", name)
        if engine.patch is None:
            del engine.files["patch"]
    _add_origins(engine)
    return engine


def _bindings(data: Any, layers: list[Layer]) -> tuple[list[str], list[str]]:
    """Names of the engine's inputs and outputs, from TensorRT 11's list, the older one, or the graph itself."""
    made = {t.name for layer in layers for t in layer.outputs}
    used = {t.name for layer in layers for t in layer.inputs}
    if isinstance(data, dict):
        modern = data.get("I/O Tensors")
        if isinstance(modern, list) and all(isinstance(t, dict) for t in modern):
            names = [(str(t.get("Name", "")), str(t.get("IOMode", "")).lower()) for t in modern]
            return [n for n, m in names if "input" in m], [n for n, m in names if "output" in m]
        old = data.get("Bindings")
        if isinstance(old, list) and old:
            flat = [str(b.get("Name", "")) if isinstance(b, dict) else str(b) for b in old]
            return [n for n in flat if n not in made], [n for n in flat if n in made]
    return sorted(used - made), sorted(made - used)


def _add_profile(engine: Engine, data: Any, file: str) -> None:
    """Attach times. The k-th record of a name belongs to the k-th layer of that name."""
    if not isinstance(data, list):
        raise CutefuseError(f"{file} is no profile of trtexec (its root is no list); give a file of --exportProfile")
    by_name: dict[str, list[Layer]] = defaultdict(list)
    for layer in engine.layers:
        by_name[layer.name].append(layer)
    seen: Counter[str] = Counter()
    unknown = 0
    for position, record in enumerate(data):
        if not isinstance(record, dict) or "name" not in record:
            continue
        name = str(record["name"])
        same = by_name.get(name) or by_name.get(name.split(" [profile")[0], [])
        if seen[name] < len(same):
            layer = same[seen[name]]
        else:
            unknown += 1
            layer = Layer(len(engine.layers), name, "unknown", [], [], {}, sources={"layer": f"{file} › [{position}]"})
            layer.kind = kind_of("", {}, name)
            engine.layers.append(layer)
        seen[name] += 1
        mean, median = (_finite(record.get(key)) for key in ("averageMs", "medianMs"))
        field_name, time_ms = ("medianMs", median) if median else ("averageMs", mean)
        layer.time_us = time_ms * 1000 if time_ms is not None else None
        layer.mean_us = mean * 1000 if mean is not None else layer.time_us
        layer.sources["time"] = f"{file} › [{position}].{field_name}"
        engine.time_field = field_name
    if unknown:
        engine.notes.append(f"{unknown} profiled layers are not in the layer information; are both of one engine?")


def _metadata(files: dict[str, Path], step: str, parse: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What is known of a step, build or profile: its metadata file, or what its log says."""
    data: Any = None
    if f"{step}_metadata" in files:
        data = read_json(files[f"{step}_metadata"])
    elif f"{step}_log" in files:
        data = parse(files[f"{step}_log"].read_text(encoding="utf-8", errors="replace"))
    return data if isinstance(data, dict) else {}


def _of(kind: type[T], table: dict[str, Any], key: str) -> T:
    """A value of a table, if it is of that kind; else an empty one."""
    value = table.get(key)
    return value if isinstance(value, kind) else kind()


def _add_metadata(engine: Engine, files: dict[str, Path]) -> None:
    build, profile = _metadata(files, "build", build_metadata), _metadata(files, "profile", profile_metadata)
    engine.performance = _numbers(_of(dict, profile, "performance_summary"))
    engine.device = _of(dict, profile, "device_information") or _of(dict, build, "device_information")
    engine.inference = _of(dict, profile, "inference_options")
    engine.build = {**_of(dict, build, "model_options"), **_of(dict, build, "build_options")}
    engine.concats = [n for n in _of(list, build, "concats") if isinstance(n, dict)]
    engine.percentiles = [p for p in map(_finite, _of(list, profile, "percentiles")) if p is not None]
    engine.backend = str(profile.get("backend") or build.get("backend") or "tensorrt")
    engine.version = str(profile.get("tensorrt_version") or build.get("tensorrt_version") or "")
    engine.peaks = _of(dict, profile, "peaks") or None
    engine.notes += map(str, _of(list, profile, "warnings"))


def _patch_report(report: Any, *names: str) -> dict[str, Any] | None:
    """A patch report with its sites in one form; None for what is none, or of another model in the same folder."""
    if not (isinstance(report, dict) and isinstance(report.get("sites"), list) and speaks_of(report, *names)):
        return None
    sites = []
    for given in (s for s in report["sites"] if isinstance(s, dict)):
        site = {**_SITE, **given}
        for key, usual in _SITE.items():
            if usual is None:
                site[key] = _finite(site[key])
            elif isinstance(usual, list):
                site[key] = [str(n) for n in site[key]] if isinstance(site[key], list) else []
            else:
                site[key] = str(site[key] or "")
        sites.append(site)
    tables = {key: _of(dict, report, key) for key in _TABLES}
    tables["summary"] = {**tables["summary"], "gain_us": _finite(tables["summary"].get("gain_us"))}
    return {**report, **tables, "sites": sites}


def _add_origins(engine: Engine) -> None:
    """Say which ONNX nodes each layer computes: those that it names, and all that a fused node among them replaced."""
    nodes, made_by = bodies.replaced(engine.sites)
    inside = bodies.owners(engine.layers, made_by)
    for layer in engine.layers:
        own = layer.onnx
        if layer.index in inside and all(map(bodies.is_inside, own)):
            own = [inside[layer.index]]
        layer.onnx = list(dict.fromkeys(n for o in own for n in (o, *nodes.get(o, []))))
        layer.title = bodies.title(layer, own)
