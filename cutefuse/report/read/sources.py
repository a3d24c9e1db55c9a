"""Finding the files of an engine, and reading JSON that was written carelessly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError

_MAX_FILE_BYTES = 512 * 2**20

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
        stem = stem_of(source.name, "graph")
        return [_siblings(source, stem if stem is not None else source.name)]
    graphs = sorted(p for p in source.iterdir() if p.is_file() and stem_of(p.name, "graph") is not None)
    graphs = graphs or sorted(p for p in source.iterdir() if p.suffix == ".json" and _holds_graph(p))
    if not graphs:
        raise CutefuseError(f"{source} holds no layer information (*.graph.json); profile with --exportLayerInfo first")
    return [_siblings(path, stem_of(path.name, "graph") or "") for path in graphs]


def stem_of(name: str, kind: str) -> str | None:
    for suffix in _SUFFIXES[kind]:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return None


def _holds_graph(path: Path) -> bool:
    try:
        data = read_json(path)
    except CutefuseError:
        return False
    if isinstance(data, dict):
        return "Layers" in data
    return isinstance(data, list) and any(isinstance(d, dict) and "LayerType" in d for d in data)


def _siblings(graph: Path, stem: str) -> dict[str, Path]:
    files = {"graph": graph}
    folder = sorted(p for p in graph.parent.iterdir() if p.is_file() and p != graph)
    alone = not any(stem_of(p.name, "graph") is not None for p in folder)
    for kind, suffixes in _SUFFIXES.items():
        if kind == "graph":
            continue
        named = [p for p in folder if any(p.name == stem + s for s in suffixes)]
        loose = [p for p in folder if stem_of(p.name, kind) is not None and "metadata" not in p.name]
        # A folder of one engine may name its files freely; with several engines only exact names belong together.
        if named or (len(loose) == 1 and not kind.endswith("metadata") and alone):
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
