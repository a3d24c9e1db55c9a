"""Two or more engines of one model side by side: what was fused, what got faster, where the time moved."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from cutefuse.engines.kinds import KINDS
from cutefuse.engines.layers import Layer, Moved, layer_bytes, moved
from cutefuse.report.read.alike import lowered, types, unlike
from cutefuse.report.read.engine import Engine
from cutefuse.report.read.graph import neighbours

T = TypeVar("T")


class Union:
    """Groups of keys that grow together (union-find); a key that was never joined is a group of its own."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, key: str) -> str:
        """The key that stands for the group."""
        root = key
        while self._parent.setdefault(root, root) != root:
            root = self._parent[root]
        while self._parent[key] != root:
            self._parent[key], key = root, self._parent[key]
        return root

    def join(self, first: str, *others: str) -> None:
        """Make one group of the groups of all these keys."""
        for other in others:
            self._parent[self.find(other)] = self.find(first)


@dataclass
class Row:
    """Layers of each engine that compute the same ONNX nodes, with their times (None: not known) and copies."""

    layers: list[list[Layer]]

    @property
    def label(self) -> str:
        """That of the heaviest layer."""
        members = [la for own in self.layers for la in own]
        return max(members, key=lambda la: (la.time_us or 0.0, la.kind not in ("copy", "noop"))).label

    @cached_property
    def times_us(self) -> list[float | None]:
        known = [[la.time_us for la in own if la.time_us is not None] for own in self.layers]
        return [sum(times) if times else None for times in known]

    @property
    def copies(self) -> list[int]:
        return [sum(la.kind == "copy" for la in own) for own in self.layers]

    @cached_property
    def copy_bytes(self) -> list[int]:
        return [sum(layer_bytes(la) for la in own if la.kind == "copy") for own in self.layers]

    @cached_property
    def change(self) -> str:
        """What became of the first engine's layers in the last one, in words."""
        return _change(*([la for la in own if la.kind != "noop"] for own in (self.layers[0], self.layers[-1])))

    @property
    def speedup(self) -> float | None:
        """Time of the first engine over that of the last."""
        first, last = self.times_us[0], self.times_us[-1]
        return first / last if first and last else None

    @property
    def saved_us(self) -> float:
        return (self.times_us[0] or 0.0) - (self.times_us[-1] or 0.0)

    @property
    def saved_bytes(self) -> int:
        """What the copies of the first engine move more than those of the last."""
        return self.copy_bytes[0] - self.copy_bytes[-1]


@dataclass
class Comparison:
    """Aligned rows, largest change first; `by_kind`: kind -> time of each engine in microseconds.

    Where an engine has no times, rows are ordered by what copies move, and hold those that changed alone.
    """

    engines: list[Engine]
    rows: list[Row]
    by_kind: dict[str, list[float]]

    @cached_property
    def unlike(self) -> str:
        """What besides fusing makes the first engine and the last differ; empty where nothing is known to."""
        return unlike(self.engines[0], self.engines[-1])

    @property
    def caution(self) -> str:
        """What the times must not be taken for; empty where they are what they seem."""
        found = []
        if self.unlike:
            found.append(f"not like with like: {self.unlike}; no part of the difference is credited to fusing")
        if names := ", ".join(e.name for e in self.engines if e.runs_bodies):
            found.append(f"fused nodes of {names} run as function bodies on a CPU: no measure of the kernels on a GPU")
        return "; ".join(found)

    @property
    def titles(self) -> list[str]:
        """The engines' names, with the type that each computes in where they differ."""
        if not self.unlike:
            return [e.name for e in self.engines]
        named = [lowered(e) or next(iter(types(e)), "") for e in self.engines]
        return [f"{e.name} ({t})" if t else e.name for e, t in zip(self.engines, named, strict=True)]

    @property
    def timed(self) -> bool:
        """Whether every engine was profiled."""
        return all(engine.profiled for engine in self.engines)

    @cached_property
    def moved(self) -> list[Moved]:
        return [moved(engine.layers) for engine in self.engines]

    @property
    def copies_text(self) -> str:
        """What became of the copies from the first engine to the last; empty where neither has one."""
        first, last = self.moved[0], self.moved[-1]
        if not first.copies and not last.copies:
            return ""
        mb = [m.copy_bytes / 1e6 for m in (first, last)]
        return (
            f"copies: {first.copies} → {last.copies} ({last.copies - first.copies:+d}), {mb[0]:.1f} → {mb[1]:.1f} MB "
            f"({mb[1] - mb[0]:+.1f})"
        )

    @property
    def latency_speedup(self) -> float | None:
        a, b = self.engines[0].latency_ms, self.engines[-1].latency_ms
        return a / b if a and b else None


def compare(engines: list[Engine]) -> Comparison:
    """Align the layers of several engines through the ONNX nodes that they compute."""
    union = Union()
    fused = {name for engine in engines for name in engine.fused_nodes}
    owners: list[dict[int, str]] = []
    for number, engine in enumerate(engines):
        keys = {layer.index: layer.onnx for layer in engine.layers if layer.onnx and not is_helper(layer)}
        for index, names in keys.items():
            for name in names:
                site = name.rpartition("/")[0]  # `unpatch` names the nodes of a fused node so
                of_site = [f"node {site}"] if site in fused else []
                union.join(f"layer {number} {index}", f"node {name}", *of_site)
        owners.append(adopt(engine, {index: f"layer {number} {index}" for index in keys}))
    groups: dict[str, list[list[Layer]]] = defaultdict(lambda: [[] for _ in engines])  # in the order of the layers
    for number, (engine, owner) in enumerate(zip(engines, owners, strict=True)):
        for layer in engine.layers:
            root = union.find(owner[layer.index]) if layer.index in owner else f"only {number} {layer.name}"
            groups[root][number].append(layer)
    rows = [Row(members) for members in groups.values()]
    timed = all(e.profiled for e in engines)
    rows = [r for r in rows if (any(r.times_us) if timed else r.saved_bytes or r.change)]
    found = {kind for e in engines for kind in e.by_kind_us}
    by_kind = {kind: [e.by_kind_us.get(kind, 0.0) for e in engines] for kind in KINDS if kind in found}
    return Comparison(engines, sorted(rows, key=lambda r: -abs(r.saved_us if timed else r.saved_bytes)), by_kind)


def is_helper(layer: Layer) -> bool:
    """A copy or no-op belongs to the layer that it serves, not to the tensor that its name mentions."""
    return layer.kind in ("copy", "noop") and (not layer.raw.get("Metadata") or layer.name.endswith(" copy"))


def adopt(engine: Engine, owner: dict[int, T]) -> dict[int, T]:
    """Give each helper to the layer that it feeds, else to the one that feeds it."""
    producers, consumers = neighbours(engine)
    for near, order in ((consumers, reversed(engine.layers)), (producers, iter(engine.layers))):
        for layer in order:
            if layer.index not in owner:
                hit = next((n for n in near[layer.index] if n in owner), None)
                if hit is not None:
                    owner[layer.index] = owner[hit]
    return owner


def _change(a: list[Layer], b: list[Layer]) -> str:
    if not a or not b:
        return "only in the first" if a else "only in the last" if b else ""
    if any(la.kind == "plugin" for la in b) and not any(la.kind == "plugin" for la in a):
        return (
            f"{_words(a)} fused into a plugin"
            + (f" and {_words([la for la in b if la.kind != 'plugin'])}" if len(b) > 1 else "")
            + _lower(a, b)
        )
    if len(a) != len(b):
        return f"{_words(a)} became {_words(b)}{_lower(a, b)}"
    kinds = [(x.precision, y.precision) for x, y in zip(a, b, strict=True) if x.precision != y.precision]
    if kinds:
        return f"{kinds[0][0]} became {kinds[0][1]}"
    tiles = [(x.tactic, y.tactic) for x, y in zip(a, b, strict=True) if x.kind == y.kind == "plugin"]
    if tile := next(((x, y) for x, y in tiles if x != y and x and y), None):
        return f"tile {tile[0]} became {tile[1]}"
    if any(x.tactic != y.tactic for x, y in zip(a, b, strict=True)):
        return "another tactic"
    return ""


def _lower(a: list[Layer], b: list[Layer]) -> str:
    """The change of type between what computes before and after; empty where there is none."""
    kinds = [next((la.precision for la in side if la.kind in ("conv", "gemm", "plugin")), "") for side in (a, b)]
    return f"; {kinds[0]} became {kinds[1]}" if all(kinds) and kinds[0] != kinds[1] else ""


_NOUNS = {
    "copy": ("copy", "copies"), "noop": ("noop", "no-ops"), "conv": ("convolution", "convolutions"),
    "gemm": ("matrix product", "matrix products"),
}  # fmt: skip


def _words(layers: list[Layer]) -> str:
    counts = Counter(layer.kind for layer in layers)
    nouns = {kind: _NOUNS.get(kind, (kind, kind if kind.endswith("s") else f"{kind}s")) for kind in counts}
    return " + ".join(f"{n} {nouns[kind][1]}" if n > 1 else nouns[kind][0] for kind, n in counts.items())
