"""A layered drawing of the engine graph, top to bottom, without Graphviz.

Ranks by longest path, dummy nodes along long edges, barycentre sweeps against crossings, then each rank is pulled
towards the medians of its neighbours. All steps are close to linear, so ten thousand layers take seconds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from cutefuse.report.read.graph import Edge

NODE_WIDTH, NODE_HEIGHT = 204, 46
_GAP_X, _GAP_Y, _LANE = 28, 48, 18
_MAX_DUMMIES = 60_000
_SWEEPS, _PULLS = 6, 8


@dataclass
class Drawing:
    """Top-left corners of the nodes and the points of the edges, in pixels."""

    x: list[float]
    y: list[float]
    width: float
    height: float
    paths: list[list[tuple[float, float]]] = field(default_factory=list)


def layout(count: int, edges: list[Edge]) -> Drawing:
    """Place `count` nodes; `paths[i]` belongs to `edges[i]` and is empty for edges from or to the outside."""
    inner = [e for e in edges if e.source >= 0 and e.target >= 0 and e.source != e.target]
    forward = [(min(e.source, e.target), max(e.source, e.target)) for e in inner]
    rank = _ranks(count, forward)
    chains = _chains(forward, rank)
    ranks: dict[int, list[int]] = defaultdict(list)
    for node in range(count):
        ranks[rank[node]].append(node)
    up: dict[int, list[int]] = defaultdict(list)
    down: dict[int, list[int]] = defaultdict(list)
    for chain in chains:
        for node in chain[1:-1]:
            ranks[rank[node]].append(node)
        for a, b in zip(chain, chain[1:], strict=False):
            down[a].append(b)
            up[b].append(a)
    order = [ranks[r] for r in sorted(ranks)]
    _untangle(order, up, down)
    x = _coordinates(order, up, down, count)
    left = min((x[n] - _width(n, count) / 2 for row in order for n in row), default=0.0)
    right = max((x[n] + _width(n, count) / 2 for row in order for n in row), default=0.0)
    step = NODE_HEIGHT + _GAP_Y
    drawing = Drawing(
        [x[n] - left - NODE_WIDTH / 2 + _GAP_X for n in range(count)],
        [rank[n] * step + _GAP_Y for n in range(count)],
        right - left + 2 * _GAP_X,
        (max(rank[:count], default=0) + 1) * step + _GAP_Y,
    )
    found = {(e.source, e.target): chain for e, chain in zip(inner, chains, strict=True)}
    for edge in edges:
        route = found.get((edge.source, edge.target), [])
        points: list[tuple[float, float]] = []
        for node in route:
            px, top = x[node] - left + _GAP_X, rank[node] * step + _GAP_Y
            if node >= count:
                points += [(px, top), (px, top + NODE_HEIGHT)]
            else:
                points.append((px, top + (NODE_HEIGHT if node == route[0] else 0)))
        drawing.paths.append(points)
    return drawing


def _ranks(count: int, forward: list[tuple[int, int]]) -> list[int]:
    """Longest path from the top. Layers are listed in execution order, so one pass in that order is enough."""
    rank = [0] * count
    for a, b in sorted(forward):
        rank[b] = max(rank[b], rank[a] + 1)
    # Sources sink to just above their first consumer instead of all crowding the top.
    fed = {b for _, b in forward}
    for a, b in sorted(forward, key=lambda edge: -rank[edge[1]]):
        if a not in fed:
            rank[a] = rank[b] - 1
    return rank


def _chains(forward: list[tuple[int, int]], rank: list[int]) -> list[list[int]]:
    """Each edge as nodes of consecutive ranks; `rank` grows by the dummies. Beyond a limit edges stay straight."""
    budget = _MAX_DUMMIES
    chains = []
    shared: dict[tuple[int, int], int] = {}
    for a, b in forward:
        chain = [a]
        span = rank[b] - rank[a]
        if 1 < span and span - 1 <= budget:
            for r in range(rank[a] + 1, rank[b]):
                # One lane serves all edges that leave the same node: they carry the same tensor more often than not.
                if (a, r) not in shared:
                    shared[(a, r)] = len(rank)
                    rank.append(r)
                    budget -= 1
                chain.append(shared[(a, r)])
        chains.append([*chain, b])
    return chains


def _untangle(order: list[list[int]], up: dict[int, list[int]], down: dict[int, list[int]]) -> None:
    position = {n: i for row in order for i, n in enumerate(row)}
    for sweep in range(_SWEEPS):
        rows, near = (order[1:], up) if sweep % 2 == 0 else (order[-2::-1], down)
        for row in rows:
            if len(row) > 1:
                key = {n: (sum(position[m] for m in near[n]) / len(near[n]) if near[n] else position[n]) for n in row}
                row.sort(key=lambda n, key=key: key[n])  # type: ignore[misc]
                for i, n in enumerate(row):
                    position[n] = i


def _width(node: int, count: int) -> float:
    return NODE_WIDTH if node < count else _LANE


def _coordinates(
    order: list[list[int]], up: dict[int, list[int]], down: dict[int, list[int]], count: int
) -> dict[int, float]:
    """The middle of each node: each rank is centred first, then pulled to the medians of the ranks beside it."""
    x: dict[int, float] = {}
    for row in order:
        _settle(row, [0.0] * len(row), x, count)
    for pull in range(_PULLS):
        rows, near = (order, up) if pull % 2 == 0 else (order[::-1], down)
        for row in rows:
            _settle(row, [median(x[m] for m in near[n]) if near[n] else x[n] for n in row], x, count)
    return x


def _settle(row: list[int], wish: list[float], x: dict[int, float], count: int) -> None:
    """The positions nearest to the wished ones that keep order and distances.

    Less the offsets that touching nodes would have, positions may not fall: neighbours that do share their mean.
    """
    offsets = [0.0]
    for a, b in zip(row, row[1:], strict=False):
        offsets.append(offsets[-1] + (_width(a, count) + _width(b, count)) / 2 + _GAP_X)
    blocks: list[tuple[float, int]] = []  # mean, size
    for wished, offset in zip(wish, offsets, strict=True):
        mean, size = wished - offset, 1
        while blocks and blocks[-1][0] > mean:
            other, more = blocks.pop()
            mean, size = (mean * size + other * more) / (size + more), size + more
        blocks.append((mean, size))
    means = [mean for mean, size in blocks for _ in range(size)]
    for n, mean, offset in zip(row, means, offsets, strict=True):
        x[n] = mean + offset
