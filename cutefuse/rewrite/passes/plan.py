"""What a patch will change, told before anything changes, so that a dry run reports the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from cutefuse.graph.faults import met
from cutefuse.match.answer import Joined, Quantized
from cutefuse.operators.layouts import TENSORRT
from cutefuse.rewrite import tanh_silu
from cutefuse.rewrite.apply import cast_tensors, plan
from cutefuse.rewrite.state import State


def run(state: State) -> None:
    """Reads the choice among `sites`; leaves `doomed`, the sites' `bytes_saved`, `silus`, `known_faults` and `after`,
    and counts the Casts in `conversion`."""
    graph, engine = state.graph, state.engine
    state.doomed = plan(graph, state.fused)
    state.silus = tanh_silu.find(graph, state.doomed)
    state.known_faults = met(graph, engine.version, state.doomed) if engine.name == TENSORRT else []
    casts = cast_tensors(graph, state.fused, state.doomed)
    state.after = _predicted(state, casts)
    if state.conversion:
        sizes = [graph.sizes(tensor) for tensor in casts]
        state.conversion.casts, state.conversion.cast_bytes = len(casts), total([_cast_bytes(s) for s in sizes])


def total(figures: Sequence[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    known = [f for f in figures if f is not None]
    return sum(known) if len(known) == len(figures) else None


def _cast_bytes(dims: Sequence[int] | None) -> int | None:
    """What the Cast of a float32 tensor to or from a type of 16 bits reads and writes."""
    return None if dims is None or min(dims, default=0) < 0 else (4 + 2) * math.prod(dims)


def _predicted(state: State, casts: Sequence[str]) -> Counter[str]:
    """The op_types after the rewrite."""
    counts = Counter(n.op_type for n in state.graph.nodes if id(n) not in state.doomed)
    matches = [s.chosen for s in state.fused]
    counts.update(match.call.op_type for match in matches)
    made = {i for match in matches for i in match.inputs if isinstance(i, Joined | Quantized)}  # sites share equal ones
    counts.update(kind for o in made for kind in (("Concat",) if isinstance(o, Joined) else o.op_types))
    return counts + Counter({"Cast": len(casts)})
