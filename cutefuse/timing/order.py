"""Tiles of kernels that run one after the other.

On an H200 a launch took 1 to 2 us longer when the kernel before it was another one, more than most tiles differ by.
It waits for its code: a narrow tile for less, a wide one for more. YOLOv8n took 271 us instead of 302 with fewer
different tiles. So the fastest tile of each node by itself is not the fastest choice for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cutefuse import kernels
from cutefuse.kernels import Call
from cutefuse.timing.calls import Tiles

# Microseconds that a launch takes longer after another kernel. With 1.0 and with 1.6 eight networks took 0.94 of the
# time that the fastest tile of each node gave them, with 0.5 they took 0.95.
SWITCH_US = 1.3
LEAST_GAIN = 0.02  # of the first guess's time: less is within the noise of times that are taken quickly

Kernel = tuple[str, bool, str, int]  # operator, whether its sources are pre-activated, their type, id of the tile


def in_order(calls: Sequence[Call], times: Sequence[Tiles | None], switch_us: float = SWITCH_US) -> list[int]:
    """The tile of each call, for the least time of them all: its own, and `switch_us` wherever the kernel changes.

    Another tile than the first guess counts as slower by LEAST_GAIN. calls: in the order in which they run. times: of
    each call's tiles; None where they are not known: the first guess, 0, of a kernel of its own.
    """
    rows = [
        {_kernel(call, 0): 0.0} if own is None
        else {_kernel(call, tile): us if tile == own.guess else us / (1 - LEAST_GAIN)
              for tile, us in own.times_us.items()}
        for call, own in zip(calls, times, strict=True)
    ]  # fmt: skip
    return [kernel[-1] for kernel in cheapest_path(rows, switch_us)]


def cheapest_path(rows: Sequence[Mapping[Kernel, float]], switch_us: float) -> list[Kernel]:
    """One kernel of each row, for the least sum of their costs and of `switch_us` wherever neighbours differ: Viterbi's
    algorithm."""
    if not rows:
        return []
    costs, before = dict(rows[0]), list[dict[Kernel, Kernel]]()
    for row in rows[1:]:
        cheapest = min(costs, key=costs.__getitem__)
        changed = costs[cheapest] + switch_us
        came = {k: k if costs.get(k, changed) < changed or k == cheapest else cheapest for k in row}
        costs = {k: us + (costs[k] if came[k] == k else changed) for k, us in row.items()}
        before.append(came)
    path = [min(costs, key=costs.__getitem__)]
    for came in reversed(before):
        path.append(came[path[-1]])
    return path[::-1]


def _kernel(call: Call, tile: int) -> Kernel:
    pre_activated = bool(kernels.facts(call.op_type)["pre_activated"])
    return str(kernels.operator_of(call.op_type)["name"]), pre_activated, call.dtype, tile
