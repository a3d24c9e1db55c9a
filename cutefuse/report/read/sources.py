"""Finding the files of an engine."""

from __future__ import annotations

from pathlib import Path

from cutefuse.engines.artifacts import read_json
from cutefuse.engines.plugins import report_path
from cutefuse.errors import CutefuseError

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


def one_engine(source: Path, model: Path | None = None) -> dict[str, Path]:
    """The files of the engine in a folder, that of `model` first, or around a graph JSON.

    Raises CutefuseError where several could be meant.
    """
    found = find_engines(source)
    named = [f for f in found if model and f["graph"].name.startswith(f"{model.name}.")]
    if not named and len(found) > 1:
        names = ", ".join(f["graph"].name for f in found[:4])
        lacking = f" and none of {model.name}" if model else ""
        raise CutefuseError(f"{source} holds {len(found)} engines ({names}){lacking}; give one *.graph.json file")
    return (named or found)[0]


def stem_of(name: str, kind: str) -> str | None:
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES[kind] if name.endswith(suffix)), None)


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
    if stem and (report := report_path(graph.parent / stem.removesuffix(".engine"))):
        files["patch"] = report
    return files
