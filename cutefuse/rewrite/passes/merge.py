"""Sites on the same tensors, in one call."""

from __future__ import annotations

from collections.abc import Hashable, Set

from cutefuse import kernels
from cutefuse.match.bodies import CAST_LIKE_OPSET, Shared
from cutefuse.match.site import MERGED, Site
from cutefuse.rewrite.state import State


def run(state: State, apart: Set[int] = frozenset()) -> None:
    """Reads `sites`; lets one call compute those that an operator can merge, but for the sites whose id is in `apart`:
    the first of them gets it, the others are MERGED.

    Sites with tiles of the GPU's own generation stay alone when their merged call has none.
    """
    graph, sm = state.graph, state.options.sm
    fused = [s for s in state.fused if id(s) not in apart] if "parallel" not in state.options.without else []
    shared: dict[str, set[Shared]] = {}
    for site in fused:
        call = site.chosen.call
        shared.setdefault(call.op_type, set()).add(Shared.of(site.op, graph.opset, call))
    if graph.opset < CAST_LIKE_OPSET:  # one body could not serve the merged op_types of calls that differ
        fused = [s for s in fused if len(shared[s.chosen.call.op_type]) == 1]
    order = {id(n): i for i, n in enumerate(graph.nodes)}
    groups: dict[Hashable, list[Site]] = {}
    for site in fused:
        if (key := site.finder.merge_key(site.chosen)) is not None:
            groups.setdefault((site.op.stem, site.cast_from, key), []).append(site)
    for group in groups.values():
        finder = group[0].finder
        alone = [s.chosen for s in group]
        for positions, match in finder.merge(alone):
            if finder.own_tiles_first and kernels.made_for(alone[0].call, sm) > kernels.made_for(match.call, sm):
                continue
            head = group[min(positions)]
            head.match, head.nodes = match, sorted(match.nodes, key=lambda n: order[id(n)])
            for other in (group[i] for i in positions if group[i] is not head):
                other.refuse(MERGED, f"'{head.name}' computes it too")
