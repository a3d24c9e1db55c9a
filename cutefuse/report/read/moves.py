"""What an engine only moves: its copies with their bytes and the reason for each."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from cutefuse.engines.kinds import KINDS, computing_words
from cutefuse.engines.layers import Layer, layer_bytes
from cutefuse.report.read.engine import Engine
from cutefuse.report.read.graph import edges
from cutefuse.table import some


@dataclass(frozen=True)
class Move:
    """One copy. `origin`: a word of `kinds.copy_origin`; `reason`: what it does, between which layers."""

    index: int
    origin: str
    size_bytes: int  # read and written
    reason: str


def moves(engine: Engine) -> list[Move]:
    """Every copy, the largest first."""
    sources: dict[int, list[str]] = defaultdict(list)
    targets: dict[int, list[str]] = defaultdict(list)
    for edge in edges(engine):
        source, target = (engine.layers[i] if i >= 0 else None for i in (edge.source, edge.target))
        if target and target.kind == "copy":
            sources[target.index].append(_called(source) if source else f"input {edge.tensor.name}")
        if source and source.kind == "copy":
            targets[source.index].append(_called(target) if target else f"output {edge.tensor.name}")
    makers = Counter(t.name for layer in engine.layers for t in layer.outputs)
    found = []
    for layer in engine.layers:
        if layer.kind == "copy":
            # A tensor that several layers write is a concatenation, whose convolutions write in place.
            origin = "concat" if any(makers[t.name] > 1 for t in layer.outputs) else layer.origin
            around = _list(" from ", sources[layer.index]) + _list(" for ", targets[layer.index])
            found.append(Move(layer.index, origin, layer_bytes(layer), _what(layer, origin) + around))
    return sorted(found, key=lambda move: -move.size_bytes)


_SINGULAR = {
    "conv": "convolution", "gemm": "matrix product", "pool": "pool", "plugin": "plugin", "norm": "normalisation",
    "foreign": "region", "noop": "no-op",
}  # fmt: skip


def _called(layer: Layer) -> str:
    if layer.kind == "copy":
        return "another copy"
    kind = _SINGULAR.get(layer.kind, KINDS[layer.kind])
    return f"{kind} {layer.onnx[0] if layer.onnx else layer.label}"


def _list(word: str, names: list[str]) -> str:
    return word + some(list(dict.fromkeys(names)), 2) if names else ""


def _what(layer: Layer, origin: str) -> str:
    """What a copy does with its tensors, and what it computes on the way."""
    before, after = layer.first
    if origin == "concat":
        count = len(layer.inputs)
        text = f"lays {count} tensors side by side" if count > 1 else "writes a part of a joint tensor"
    elif origin == "slice":
        text = "takes a part"
    elif before is None or after is None:
        text = "moves"
    elif before.dtype != after.dtype:
        text = f"{before.dtype} becomes {after.dtype}"
    elif before.layout != after.layout:
        text = f"{before.layout} becomes {after.layout}"
    elif before.dims != after.dims:
        text = f"{before.shape_text} becomes {after.shape_text}"
    else:
        text = f"the same again in {after.layout}"
    computed = computing_words(layer.name)
    return f"{text}, computes {', '.join(computed)} on the way," if computed else text
