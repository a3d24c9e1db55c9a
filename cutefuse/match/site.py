"""A site: a place of a graph where an operator may stand, what was found there, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnx import NodeProto

from cutefuse.graph.read import Graph, label
from cutefuse.kernels import Call
from cutefuse.match.answer import Finder, Match, tensors_of
from cutefuse.operators.op import Cost, FusedOp

FUSED, REFUSED, EXCLUDED, MERGED, LEFT_OUT = "fused", "refused", "excluded", "merged", "left out"


@dataclass
class Site:
    """One candidate: what was found, and what becomes of it."""

    finder: Finder
    name: str
    graph: Graph  # that it stands in, which knows the sizes of tensors
    status: str = FUSED
    reason: str = ""
    match: Match | None = None
    nodes: list[NodeProto] = field(default_factory=list)  # in graph order
    around: list[NodeProto] = field(default_factory=list)  # the nodes of all its matches, in graph order
    bytes_saved: int | None = 0  # None where sizes are not known
    gain_us: float | None = None  # what fusing it should save while the other sites stay as they are; None: not known
    gain_parts: dict[str, float] = field(default_factory=dict)  # what gain_us is the sum of
    basis: str = ""  # of gain_us: "profile", "tuned" or "model"
    priced_by: str = ""  # what gain_us was timed against or its model was fitted to, and on which GPU
    tile: int = 0  # id of the tile that was chosen here, which the node asks for; 0 for the kernels' first guess
    cast_from: str = ""  # the graph's type, when the site computes in another one

    @property
    def op(self) -> FusedOp:
        return self.finder.op

    @property
    def chosen(self) -> Match:
        """The match of a site that has one, as all that are FUSED have."""
        assert self.match is not None
        return self.match

    @property
    def sized_call(self) -> Call | None:
        """The call on inputs of the given sizes; None where a size is not known."""
        return self.call_of(self.match) if self.match else None

    def call_of(self, match: Match) -> Call | None:
        """The call of one of its matches on inputs of the given sizes; None where a size is not known."""
        call = match.call
        if all(min(t.dims, default=0) >= 0 for t in (*call.inputs, *call.outputs)):
            return call
        sizes = self.graph.sizes
        known = next((sizes(name) for name in match.outputs if name), None)
        inputs = [
            replace(t, dims=filled(t.dims, next(map(sizes, tensors_of(o)), None)))
            for t, o in zip(call.inputs, match.inputs, strict=True)
        ]
        outputs = [
            replace(t, dims=filled(t.dims, sizes(name) if name else known))
            for t, name in zip(call.outputs, match.outputs, strict=True)
        ]
        if any(d < 0 for t in (*inputs, *outputs) for d in t.dims):
            return None
        return replace(call, inputs=inputs, outputs=outputs, _keep=[])

    @property
    def cost(self) -> Cost | None:
        """What the call does on inputs of the given sizes; None where a size is not known."""
        call = self.sized_call
        return None if call is None else self.op.cost(call)

    def refuse(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason

    def take(self, match: Match) -> None:
        """Choose one of this site's matches."""
        inside = {id(n) for n in match.nodes}
        self.match, self.nodes = match, [n for n in self.around if id(n) in inside]

    def fall_back(self, reason: str = "") -> bool:
        """Take the next smaller match, with a note on what it leaves outside and the reason; whether there is one."""
        larger, smaller = self.match, self.match.otherwise if self.match else None
        if larger is not None and smaller is not None:
            left = ", ".join(sorted(larger.takes - smaller.takes)) if reason else ""
            note = (f"{left} left outside: {reason}",) if left else ()
            self.take(replace(smaller, notes=(*smaller.notes, *note)))
        return smaller is not None

    def settle(self, against: Callable[[Match], str | None]) -> bool:
        """Take the first smaller match that nothing is said against, or refuse the site; whether a match is left."""
        while reason := against(self.chosen):
            if not self.fall_back(reason):
                self.refuse(REFUSED, reason)
                return False
        return True

    def as_json(self) -> dict[str, Any]:
        """The site as patch.json holds it; sizes are -1 where unknown, figures that need them None."""
        call, cost = self.match.call if self.match else None, self.cost
        sized = self.sized_call or call
        return {
            "name": self.name,
            "operator": self.op.stem,
            "op_type": call.op_type if call else None,
            "status": self.status,
            "reason": self.reason,
            "takes": sorted(self.match.takes) if self.match else [],
            "notes": list(self.match.notes) if self.match else [],
            "title": self.op.title(sized) if sized else None,
            "nodes": [label(n) for n in self.nodes],
            "inputs": list(self.match.read) if self.match else [],
            "outputs": list(self.match.outputs) if self.match else [],
            "shapes": {
                "inputs": [list(t.dims) for t in call.inputs] if call else [],
                "outputs": [list(t.dims) for t in call.outputs] if call else [],
            },
            "dtype": call.dtype if call else None,
            "flops": cost.flops if cost else None,
            "bytes_moved": cost.bytes_moved if cost else None,
            "bytes_saved": self.bytes_saved if self.status == FUSED else 0,
            "gain_us": self.gain_us,
            "gain_parts": {part: round(us, 3) for part, us in self.gain_parts.items()},
            "tile": self.tile,
            "basis": self.basis,
            "priced_by": self.priced_by,
        }


def filled(dims: Sequence[int], sizes: Sequence[int] | None) -> tuple[int, ...]:
    """`dims` with the unknown ones (-1) taken from `sizes`, where that has them."""
    own = tuple(dims)
    if sizes is not None and len(sizes) == len(own):
        return tuple(s if d < 0 else d for d, s in zip(own, sizes, strict=True))
    if sizes is None or own[:1] != (-1,):
        return own
    tail = tuple(sizes[len(sizes) - len(own) + 1 :])
    return tuple(sizes) if tail == own[1:] else own  # not even the rank was known
