"""The cheapest cut of a directed graph: which nodes stay with the source."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping

SOURCE, SINK = "source", "sink"
Capacities = Mapping[tuple[Hashable, Hashable], float]


def source_side(capacities: Capacities) -> set[Hashable]:
    """The fewest nodes, SOURCE among them, whose outgoing edges have the least capacity of all sets without SINK."""
    left: defaultdict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    for (a, b), capacity in capacities.items():
        left[a][b] = left[a].get(b, 0.0) + capacity
        left[b].setdefault(a, 0.0)
    while True:
        parent = _reached(left)
        if SINK not in parent:
            return set(parent)
        path: list[Hashable] = [SINK]
        while path[-1] != SOURCE:
            path.append(parent[path[-1]])
        steps = list(zip(path[1:], path, strict=False))
        flow = min(left[a][b] for a, b in steps)
        for a, b in steps:
            left[a][b] -= flow
            left[b][a] += flow


def _reached(left: Mapping[Hashable, Mapping[Hashable, float]]) -> dict[Hashable, Hashable]:
    """Node -> the one before it on a shortest way from SOURCE along edges with capacity left, up to SINK."""
    parent: dict[Hashable, Hashable] = {SOURCE: SOURCE}
    waiting: deque[Hashable] = deque([SOURCE])
    while waiting and SINK not in parent:
        node = waiting.popleft()
        for other, capacity in left[node].items():
            if capacity > 0 and other not in parent:
                parent[other] = node
                waiting.append(other)
    return parent
