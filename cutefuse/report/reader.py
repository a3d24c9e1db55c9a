"""Engine JSON of TensorRT 8 to 11, trtexec, NVIDIA's engine explorer and our own backends, as plain data.

Only the standard library. Files are read as tolerantly as their writers are careless: control characters and unescaped
quotes in names, NaN, layers without outputs, object or list roots, layers that are only names. What cannot be an
engine at all raises CutefuseError with one sentence.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cutefuse.engine.files import build_metadata, profile_metadata
from cutefuse.engine.plugins import speaks_of
from cutefuse.errors import CutefuseError
from cutefuse.report.kinds import kind_of, precision_of
from cutefuse.report.tensors import Tensor, tensor_of

_MAX_FILE_BYTES = 512 * 2**20


@dataclass
class Layer:
    """One layer of an engine graph with its measured time.

    `time_us` is the mean of trtexec's `averageMs`; None when the layer was not profiled (no-ops, constants).
    `sources` names file and field of each figure, for tooltips.
    """

    index: int
    name: str
    type: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    raw: dict[str, Any]
    kind: str = "other"
    precision: str = ""
    time_us: float | None = None
    median_us: float | None = None
    percent: float | None = None
    onnx: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def tactic(self) -> str:
        return str(self.raw.get("TacticName", ""))

    @property
    def label(self) -> str:
        """A short name: the last ONNX node for long fused names, else the name itself."""
        return self.name if len(self.name) <= 60 else f"{self.name[:28]} … {self.name[-28:]}"


@dataclass
class Engine:
    """Everything that is known about one engine."""

    name: str
    folder: Path
    layers: list[Layer]
    inputs: list[str]
    outputs: list[str]
    files: dict[str, Path]
    performance: dict[str, Any] = field(default_factory=dict)
    percentiles: list[float] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)
    inference: dict[str, Any] = field(default_factory=dict)
    latencies_ms: list[float] = field(default_factory=list)
    concats: list[dict[str, str]] = field(default_factory=list)
    patch: dict[str, Any] | None = None
    peaks: dict[str, Any] | None = None
    backend: str = "tensorrt"
    version: str = ""
    size_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def total_us(self) -> float:
        """Sum of the layers' mean times. Larger than the latency: profiling adds an event per layer."""
        return sum(layer.time_us or 0.0 for layer in self.layers)

    @property
    def profiled(self) -> bool:
        return any(layer.time_us is not None for layer in self.layers)

    @property
    def latency_ms(self) -> float | None:
        """Median latency of one inference: timing file first, then the log's summary."""
        if self.latencies_ms:
            ordered = sorted(self.latencies_ms)
            return ordered[len(ordered) // 2]
        values = self.performance.get("Latency") or self.performance.get("GPU Compute Time")
        return float(values[3]) if isinstance(values, list) and len(values) > 3 and _is_number(values[3]) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _finite(value: Any) -> float | None:
    return float(value) if _is_number(value) and abs(value) != float("inf") else None


# ------------------------------------------------------------------------------------------------- JSON, tolerantly
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BARE_NAN = re.compile(r"(?<=[:\[,])(\s*)[-+]?(?:nan|inf)(?:\(ind\))?(?=\s*[,}\]])", re.IGNORECASE)
# Half of a surrogate pair is no character: it could be neither written nor printed later.
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_RAW_NAME = re.compile(r'("name" : ")(.*)(", "timeMs" :)')


def loads(text: str, where: Path) -> Any:
    """JSON as TensorRT's tools write it. Raises CutefuseError when the text is something else."""
    text = _LONE_SURROGATE.sub(r"\\ufffd", text.lstrip("\ufeff").strip())
    if not text:
        raise CutefuseError(f"{where} is empty; build or profile the engine again")
    repaired = _BARE_NAN.sub(r"\1null", text)
    attempts = (text, repaired, _RAW_NAME.sub(lambda m: m[1] + json.dumps(m[2])[1:-1] + m[3], repaired))
    problem: Exception | None = None
    for attempt in (*attempts, _BAD_ESCAPE.sub(r"\\\\", repaired)):
        try:
            return json.loads(attempt, strict=False)
        except (ValueError, RecursionError) as error:
            problem = problem or error
    raise CutefuseError(f"{where} is no JSON ({problem}); build or profile the engine again")


def read_json(path: Path) -> Any:
    """Read and parse one file."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise CutefuseError(f"{path} has more than {_MAX_FILE_BYTES >> 20} MiB; this is no engine JSON")
        return loads(path.read_text(encoding="utf-8", errors="replace"), path)
    except OSError as error:
        raise CutefuseError(f"{path} cannot be read ({error.strerror}); check the path") from None


# ------------------------------------------------------------------------------------------------- finding the files
_SUFFIXES = {
    "graph": (".graph.json", ".layers.json", "-layer-info.json", "layer_info.json", "layers.json", "graph.json"),
    "profile": (".profile.json", "-profile.json", "profile.json"),
    "timing": (".timing.json", ".times.json", "timing.json", "times.json"),
    "build_metadata": (".build.metadata.json",),
    "profile_metadata": (".profile.metadata.json",),
    "build_log": (".build.log", "build.log"),
    "profile_log": (".profile.log", "profile.log"),
}


def find_engines(source: Path) -> list[dict[str, Path]]:
    """The engines in a folder (or around one graph JSON): for each the files that belong to it, key -> path."""
    if not source.exists():
        raise CutefuseError(f"{source} does not exist; give a folder of engine JSON files or one *.graph.json")
    if source.is_file():
        stem = _stem(source.name, "graph")
        return [_siblings(source, stem if stem is not None else source.name)]
    graphs = sorted(p for p in source.iterdir() if p.is_file() and _stem(p.name, "graph") is not None)
    if not graphs:
        found = sorted(p for p in source.iterdir() if p.suffix == ".json")
        for path in found:
            try:
                if _looks_like_graph(read_json(path)):
                    graphs.append(path)
            except CutefuseError:
                continue
    if not graphs:
        raise CutefuseError(f"{source} holds no layer information (*.graph.json); profile with --exportLayerInfo first")
    return [_siblings(path, _stem(path.name, "graph") or "") for path in graphs]


def _stem(name: str, kind: str) -> str | None:
    for suffix in _SUFFIXES[kind]:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return None


def _looks_like_graph(data: Any) -> bool:
    if isinstance(data, dict):
        return "Layers" in data
    return isinstance(data, list) and any(isinstance(d, dict) and "LayerType" in d for d in data)


def _siblings(graph: Path, stem: str) -> dict[str, Path]:
    files = {"graph": graph}
    folder = sorted(p for p in graph.parent.iterdir() if p.is_file() and p != graph)
    for kind, suffixes in _SUFFIXES.items():
        if kind == "graph":
            continue
        named = [p for p in folder if any(p.name == stem + s for s in suffixes)]
        loose = [p for p in folder if _stem(p.name, kind) is not None and "metadata" not in p.name]
        # A folder of one engine may name its files freely; with several engines only exact names belong together.
        if named or (len(loose) == 1 and not kind.endswith("metadata") and _only_graph(folder, graph)):
            files[kind] = (named or loose)[0]
    engine = graph.parent / stem
    if stem and engine.is_file():
        files["engine"] = engine
    model = stem.removesuffix(".engine")
    bases = (model.removesuffix(".onnx"), model, model.removesuffix(".onnx").removesuffix(".cutefuse"))
    for name in dict.fromkeys(f"{base}.patch.json" for base in bases if base):
        if (graph.parent / name).is_file():
            files.setdefault("patch", graph.parent / name)
    return files


def _only_graph(folder: list[Path], graph: Path) -> bool:
    return not any(_stem(p.name, "graph") is not None for p in folder if p != graph)


# ------------------------------------------------------------------------------------------------- reading one engine
def read_engine(files: dict[str, Path]) -> Engine:
    """Read one engine from its files; only `graph` must be there."""
    graph_file = files["graph"]
    data = read_json(graph_file)
    layers = _layers(data, graph_file.name)
    inputs, outputs = _bindings(data, layers)
    stem = _stem(graph_file.name, "graph") or graph_file.stem
    name = stem.removesuffix(".engine") or graph_file.parent.name
    engine = Engine(name, graph_file.parent, layers, inputs, outputs, dict(files))
    if layers and all(not layer.inputs and not layer.outputs for layer in layers):
        engine.notes.append(
            "the layer information holds names only; build with --profilingVerbosity=detailed for shapes"
        )
    if "profile" in files:
        _add_profile(engine, read_json(files["profile"]), files["profile"].name)
    if "timing" in files:
        engine.latencies_ms = _latencies(read_json(files["timing"]))
    _add_metadata(engine, files)
    if "engine" in files:
        engine.size_bytes = files["engine"].stat().st_size
    if "patch" in files:
        report = read_json(files["patch"])
        # A plain model and its patched one may share a folder: the report speaks of the patched one alone.
        if (
            isinstance(report, dict)
            and isinstance(report.get("sites"), list)
            and speaks_of(report, f"{name}.onnx", name)
        ):
            engine.patch = report
        else:
            del engine.files["patch"]
    _add_origins(engine)
    return engine


def _layers(data: Any, file: str) -> list[Layer]:
    if isinstance(data, dict):
        found = data.get("Layers", data.get("layers"))
        path = "Layers"
    else:
        found, path = data, ""
    if not isinstance(found, list):
        raise CutefuseError(
            f"{file} is no layer information of TensorRT (no list 'Layers'); give trtexec's --exportLayerInfo"
        )
    layers: list[Layer] = []
    _collect(found, f"{file} › {path}", "", layers)
    if not layers:
        raise CutefuseError(f"{file} lists no layers; build the engine again with --profilingVerbosity=detailed")
    return layers


def _collect(found: list[Any], where: str, prefix: str, layers: list[Layer]) -> None:
    """Flatten a list of layers; sub-graphs of conditionals and loops follow their owner."""
    for position, item in enumerate(found):
        source = f"{where}[{position}]"
        if isinstance(item, str):
            item = {"Name": item}
        if not isinstance(item, dict) or not any(k in item for k in ("Name", "name", "LayerType", "Inputs", "Outputs")):
            continue
        name = str(item.get("Name", item.get("name", f"layer {len(layers)}")))
        layer = Layer(
            index=len(layers),
            name=prefix + name,
            type=str(item.get("LayerType", item.get("Type", ""))) or "unknown",
            inputs=_tensors(item.get("Inputs")),
            outputs=_tensors(item.get("Outputs")),
            raw={k: v for k, v in item.items() if k not in ("Inputs", "Outputs")},
            sources={"layer": source},
        )
        layer.kind = kind_of(layer.type, layer.raw, layer.name)
        layer.precision = precision_of(layer.kind, layer.inputs, layer.outputs, layer.tactic)
        layers.append(layer)
        for key in ("Layers", "TrueBranch", "FalseBranch", "Body", "Branches"):
            if isinstance(item.get(key), list):
                layer.raw.pop(key, None)
                _collect(item[key], f"{source}.{key}", f"{name}/", layers)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in map(tensor_of, value) if t] if isinstance(value, list) else []


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
        times = [_finite(record.get(key)) for key in ("averageMs", "medianMs", "percentage")]
        layer.time_us = times[0] * 1000 if times[0] is not None else None
        layer.median_us = times[1] * 1000 if times[1] is not None else layer.time_us
        layer.percent = times[2]
        layer.sources["time"] = f"{file} › [{position}].averageMs"
    if unknown:
        engine.notes.append(
            f"{unknown} profiled layers are not in the layer information; were both made from one engine?"
        )


def _latencies(data: Any) -> list[float]:
    records = data if isinstance(data, list) else []
    values = [_finite(r.get("latencyMs", r.get("computeMs"))) for r in records if isinstance(r, dict)]
    return [v for v in values if v is not None]


def _add_metadata(engine: Engine, files: dict[str, Path]) -> None:
    """Metadata files, and the logs themselves where no metadata was extracted from them."""
    parts: list[dict[str, Any]] = []
    for key, log, parse in (
        ("build_metadata", "build_log", build_metadata),
        ("profile_metadata", "profile_log", profile_metadata),
    ):
        data: Any = None
        if key in files:
            data = read_json(files[key])
        elif log in files:
            data = parse(files[log].read_text(encoding="utf-8", errors="replace"))
        parts.append(data if isinstance(data, dict) else {})
    build, profile = parts

    def table(part: dict[str, Any], key: str) -> dict[str, Any]:
        return part[key] if isinstance(part.get(key), dict) else {}

    engine.performance = table(profile, "performance_summary")
    engine.device = table(profile, "device_information") or table(build, "device_information")
    engine.inference = table(profile, "inference_options")
    engine.build = {**table(build, "model_options"), **table(build, "build_options")}
    engine.concats = [n for n in build.get("concats") or [] if isinstance(n, dict)]
    numbers = [_finite(p) for p in profile.get("percentiles") or []]
    engine.percentiles = [p for p in numbers if p is not None]
    engine.backend = str(profile.get("backend") or build.get("backend") or "tensorrt")
    engine.version = str(profile.get("tensorrt_version") or build.get("tensorrt_version") or "")
    engine.peaks = profile.get("peaks") if isinstance(profile.get("peaks"), dict) else None
    engine.notes += [str(w) for w in profile.get("warnings") or []]


# ------------------------------------------------------------------------------------------------- ONNX node names
_METADATA = re.compile(r"\[ONNX Layer: ([^\]\x1e\x1f]*)\]")
_COPY = re.compile(r"^Reformatting CopyNode for (?:Input|Output) Tensor \d+ to (.+)$")


def node_names(layer_name: str, raw: dict[str, Any]) -> list[str]:
    """ONNX node names of a layer: from its metadata (TensorRT 8.6+), else from the parts of its fused name."""
    marked = _METADATA.findall(str(raw.get("Metadata", "")))
    if marked:
        return list(dict.fromkeys(m.strip() for m in marked if m.strip()))
    copy = _COPY.match(layer_name)
    if copy:
        return []
    text = re.sub(r"\{ForeignNode\[(.*?)\.\.\.(.*?)\]\}", r"\1 + \2", layer_name)
    text = re.sub(r"\b(?:PWN|fusion)\(", "", text).replace(")", "")
    parts = re.split(r" \+ | \|\| |, ", text)
    return list(dict.fromkeys(p.strip() for p in parts if p.strip()))


def _add_origins(engine: Engine) -> None:
    sites: dict[str, list[str]] = {}
    for site in (engine.patch or {}).get("sites", []):
        if isinstance(site, dict) and site.get("status") == "fused" and isinstance(site.get("nodes"), list):
            sites[str(site.get("name"))] = [str(n) for n in site["nodes"]]
    for layer in engine.layers:
        own = node_names(layer.name, layer.raw)
        layer.onnx = list(dict.fromkeys(n for o in own for n in (o, *sites.get(o, []))))
