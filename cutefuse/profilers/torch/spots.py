"""What our operators would take over: concatenations that feed convolutions, and row norms."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cutefuse.profilers.torch.events import Event, on_device

_NORM = re.compile(r"\((?!.*Batch)(?!.*Instance)(?!.*Group)\w*(?:RMS|Layer)\w*Norm\w*\)$")
_CONVS = ("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution")
_ACTIVATIONS = frozenset(
    f"aten::{name}{place}"
    for name in "relu silu leaky_relu hardswish sigmoid tanh clamp hardtanh".split()
    for place in ("", "_")
)


@dataclass
class HotSpot:
    """A pattern that one of our operators replaces: its measured `time_us`, and what fusing saves, `removable_us`."""

    operator: str
    where: str
    time_us: float
    removable_us: float
    count: int
    text: str


def hot_spots(events: Sequence[Event], iterations: int) -> list[HotSpot]:
    """Concatenations that feed convolutions, and row norms, with what fusing them would remove."""
    device = on_device(events)

    def cost(e: Event) -> float:
        return e.device_us if device else e.cpu_us

    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    top = _sequence(events)
    for position, e in enumerate(top):
        if e.name == "aten::cat":
            following = top[position + 1 : position + 5]
            conv = next((n for n in following if n.name in _CONVS and _reads(n, e)), None)
            if conv is not None:
                after = top[top.index(conv) + 1 : top.index(conv) + 3]
                tail = [n for n in after if n.name in _ACTIVATIONS or n.name == "aten::batch_norm"]
                extra = sum(map(cost, tail))
                found[("ConcatConv", _where(events, conv))].append((cost(e) + cost(conv) + extra, cost(e) + extra))
        # A norm in a module of its own counts with that.
        elif e.name in ("aten::layer_norm", "aten::rms_norm") and not _NORM.search(_where(events, e)):
            found[("LayerNorm" if "layer" in e.name else "RMSNorm", _where(events, e))].append((cost(e), 0.0))
    children: dict[int, list[Event]] = defaultdict(list)
    for e in events:
        if not e.is_region:
            children[e.parent].append(e)
    for index, e in enumerate(events):
        if e.is_region and _NORM.search(e.name):
            inside = children[index]
            several = sum(cost(c) > 0 for c in inside) > 1
            # Each kernel of an unfused norm reads and writes the rows; the fused kernel does so once.
            removable = cost(e) * (1 - 1 / len(inside)) if several else 0.0
            kind = "RMSNorm" if "RMS" in e.name else "LayerNorm"
            found[(kind, e.title)].append((cost(e), removable))
    spots = []
    for (operator, where), costs in found.items():
        whole, gone = (sum(c[i] for c in costs) / iterations for i in (0, 1))
        text = "one kernel reads and writes the rows once" if gone else "already one kernel; ours adds the residual"
        if operator == "ConcatConv":
            text = "torch.cat copies every source before the convolution reads it back"
        spots.append(HotSpot(operator, where, whole, gone, round(len(costs) / iterations), text))
    return sorted(spots, key=lambda s: (-s.removable_us, -s.time_us))


def _sequence(events: Sequence[Event]) -> list[Event]:
    """Operators that the modules themselves call, in order: those not called by another operator."""
    outer = [e for e in events if not e.is_region and (e.parent < 0 or events[e.parent].is_region)]
    return sorted(outer, key=lambda e: e.start_us)


def _reads(conv: Event, cat: Event) -> bool:
    """Whether the convolution's channels are those of the concatenation, as far as shapes were recorded."""
    shape = conv.shapes[0] if conv.shapes and isinstance(conv.shapes[0], list) else None
    given = cat.shapes[0] if cat.shapes and isinstance(cat.shapes[0], list) else []
    sources = [s for s in given if isinstance(s, list)]
    if not shape or len(shape) < 3 or not sources or any(len(s) < 2 for s in sources):
        return True
    return sum(int(s[1]) for s in sources) == int(shape[1])


def _where(events: Sequence[Event], e: Event) -> str:
    while e.parent >= 0 and not events[e.parent].is_region:
        e = events[e.parent]
    return events[e.parent].title if e.parent >= 0 else "(top level)"
