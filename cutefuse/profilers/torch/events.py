"""What torch.profiler recorded, by our names, and which module each step of a backward pass belongs to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

REGION = "module:"  # prefix of our regions; "<path> (<class>)" follows
BACKWARD = "autograd::engine::evaluate_function: "  # prefix of the steps of a backward pass
_OF_BACKWARD = re.compile(r"autograd::|\w+Backward\d*$")


@dataclass
class Event:
    """One operator or region on the host's time line, with all device time and memory inside it; times in
    microseconds, memory in bytes, negative where more was given back than taken. `self_`: without what it calls."""

    name: str
    start_us: float
    end_us: float
    device_us: float = 0.0
    self_device_us: float = 0.0
    self_cpu_us: float = 0.0
    shapes: list[Any] = field(default_factory=list)
    parent: int = -1  # index of the event that called it
    thread: int = 0
    cpu_bytes: int = 0
    self_cpu_bytes: int = 0
    device_bytes: int = 0
    self_device_bytes: int = 0
    sequence: int = -1  # autograd's number of the node that it made, or of the step that it is
    forward_thread: int = -1  # of a step of the backward pass: the thread of the operator that it belongs to

    @property
    def is_region(self) -> bool:
        return self.name.startswith(REGION)

    @property
    def is_backward(self) -> bool:
        return self.name.startswith(BACKWARD)

    @property
    def title(self) -> str:
        """The name as tables show it: a region's as "<path> (<class>)"."""
        return self.name.removeprefix(REGION)

    @property
    def module_class(self) -> str:
        """Of a region: the class of its module."""
        return self.name.rpartition(" (")[2].removesuffix(")")

    @property
    def cpu_us(self) -> float:
        return self.end_us - self.start_us


# field of an Event -> what torch.profiler calls it
_FIELDS = {
    "shapes": "input_shapes", "device_us": "device_time_total", "self_device_us": "self_device_time_total",
    "self_cpu_us": "self_cpu_time_total", "thread": "thread", "cpu_bytes": "cpu_memory_usage",
    "self_cpu_bytes": "self_cpu_memory_usage", "device_bytes": "device_memory_usage",
    "self_device_bytes": "self_device_memory_usage", "sequence": "sequence_nr", "forward_thread": "fwd_thread",
}  # fmt: skip


def events_of(found: Any) -> list[Event]:
    """torch.profiler's host events; a field that one does not have counts as its default."""
    host = [e for e in found if "CPU" in str(getattr(e, "device_type", "CPU")).upper()]
    index = {id(e): i for i, e in enumerate(host)}
    events = []
    for e in host:
        known = {field: value for field, name in _FIELDS.items() if (value := getattr(e, name, None)) is not None}
        parent = index.get(id(getattr(e, "cpu_parent", None)), -1)
        events.append(Event(str(e.name), float(e.time_range.start), float(e.time_range.end), parent=parent, **known))
    return events


def on_device(events: Sequence[Event]) -> bool:
    return any(e.device_us for e in events)


def regions_around(events: Sequence[Event], index: int) -> list[int]:
    """The regions that contain an event, the innermost first."""
    found = []
    while (index := events[index].parent) >= 0:
        if events[index].is_region:
            found.append(index)
    return found


def backward_of(events: Sequence[Event]) -> dict[int, list[int]]:
    """region -> the steps of the backward pass that its operators caused, as indices of events.

    Autograd numbers its nodes in a thread, and a step of the backward pass carries the number of its node.
    """
    makers: dict[tuple[int, int], int] = {}
    for i, e in enumerate(events):
        if e.sequence >= 0 and not e.is_region and not _OF_BACKWARD.match(e.name):
            maker = makers.get((e.thread, e.sequence), i)
            # Operators that call one another carry one number; the last to start made the node.
            makers[e.thread, e.sequence] = i if e.start_us >= events[maker].start_us else maker
    steps: dict[int, list[int]] = defaultdict(list)
    for i, e in enumerate(events):
        if e.is_backward and (e.forward_thread, e.sequence) in makers:
            for region in regions_around(events, makers[e.forward_thread, e.sequence]):
                steps[region].append(i)
    return steps
