"""Sums over recorded events: by operator, by module, by class of module, and two profiles of one model compared.

All figures are of one iteration; times in microseconds, memory in bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cutefuse.profilers.torch.events import Event, backward_of, on_device, regions_around

Row = dict[str, Any]


def by_operator(events: Sequence[Event], iterations: int) -> list[Row]:
    """Operators, the heaviest by their own device time (own CPU time without a device) first."""
    groups: dict[str, list[Event]] = defaultdict(list)
    for e in events:
        if not e.is_region:
            groups[e.name].append(e)
    rows = [_row(name, found, iterations) for name, found in groups.items()]
    return _shared(rows, ["self_device_us" if on_device(events) else "self_cpu_us"])


def by_region(events: Sequence[Event], iterations: int) -> list[Row]:
    """Modules by the whole time of their forward and backward passes; the share is that of the whole model."""
    steps = backward_of(events)
    groups: dict[str, list[int]] = defaultdict(list)
    for i, e in enumerate(events):
        if e.is_region:
            groups[e.title].append(i)
    return _with_backward(events, steps, groups, iterations)


def by_class(events: Sequence[Event], iterations: int) -> list[Row]:
    """The same by class of module, with the number of modules. A module inside one of its own class counts once."""
    steps = backward_of(events)
    calls: dict[str, list[Event]] = defaultdict(list)
    outer: dict[str, list[int]] = {}
    for i, e in enumerate(events):
        if e.is_region:
            calls[e.module_class].append(e)
            found = outer.setdefault(e.module_class, [])
            if all(events[r].module_class != e.module_class for r in regions_around(events, i)):
                found.append(i)
    rows = _with_backward(events, steps, outer, iterations)
    for row in rows:
        own = calls[row["name"]]
        row |= {"calls": len(own) / iterations, "modules": len({e.title for e in own})}
    return rows


def total(events: Sequence[Event], iterations: int) -> Row:
    """The whole model: its outermost regions and every step of the backward pass."""
    outer = (i for i, e in enumerate(events) if e.is_backward or (e.is_region and not regions_around(events, i)))
    return _row("(whole)", [events[i] for i in outer], iterations)


def compared(before: Sequence[Event], after: Sequence[Event], iterations: int) -> list[Row]:
    """Each class of the first profile: its time before, and that of the same modules, by their paths, after.

    The last row is the whole model.
    """
    key = _key(before)
    paths: dict[str, set[str]] = defaultdict(set)
    for e in before:
        if e.is_region:
            paths[e.module_class].add(_path(e))
    rows, steps = [], backward_of(after)
    for row in by_class(before, iterations):
        own = {i for i, e in enumerate(after) if e.is_region and _path(e) in paths[row["name"]]}
        outer = [i for i in own if own.isdisjoint(regions_around(after, i))]
        (then,) = _with_backward(after, steps, {row["name"]: outer}, iterations)
        rows.append(_pair(row["name"], row["calls"], row, then, key))
    return [*rows, _pair("(whole)", 1.0, total(before, iterations), total(after, iterations), key)]


def _pair(name: str, calls: float, before: Row, after: Row, key: str) -> Row:
    first, then = (r[key] + r.get("backward_" + key, 0.0) for r in (before, after))
    return {
        "name": name, "calls": calls, "before_us": first, "after_us": then, "ratio": then / first if first else None,
        "before_device_bytes": before["device_bytes"], "after_device_bytes": after["device_bytes"],
        "before_cpu_bytes": before["cpu_bytes"], "after_cpu_bytes": after["cpu_bytes"],
    }  # fmt: skip


def _path(e: Event) -> str:
    return e.title.rpartition(" (")[0]


def _key(events: Sequence[Event]) -> str:
    return "device_us" if on_device(events) else "cpu_us"


def _row(name: str, found: Sequence[Event], iterations: int) -> Row:
    sums = {
        key: sum(getattr(e, key) for e in found) / iterations
        for key in ("self_cpu_us", "cpu_us", "self_device_us", "device_us", "self_cpu_bytes", "cpu_bytes",
                    "self_device_bytes", "device_bytes")
    }  # fmt: skip
    calls = len(found) or 1
    averages = {f"{key}_avg": sums[key] * iterations / calls for key in ("cpu_us", "device_us")}
    return {"name": name, "calls": len(found) / iterations, **sums, **averages}


def _with_backward(
    events: Sequence[Event], steps: dict[int, list[int]], groups: dict[str, list[int]], iterations: int
) -> list[Row]:
    rows = []
    for name, found in groups.items():
        back = [events[s] for i in found for s in steps.get(i, ())]
        row = _row(name, [events[i] for i in found], iterations)
        row["backward_cpu_us"] = sum(e.cpu_us for e in back) / iterations
        row["backward_device_us"] = sum(e.device_us for e in back) / iterations
        rows.append(row)
    key = _key(events)
    return _shared(rows, [key, "backward_" + key], total(events, iterations)[key])


def _shared(rows: list[Row], keys: Sequence[str], whole: float | None = None) -> list[Row]:
    """The rows with their share of `whole` in percent (None: of the rows together), the heaviest first."""
    figures = [sum(row[k] for k in keys) for row in rows]
    whole = sum(figures) if whole is None else whole
    for row, figure in zip(rows, figures, strict=True):
        row["share"] = 100 * figure / whole if whole else 0.0
    return sorted(rows, key=lambda row: -row["share"])
