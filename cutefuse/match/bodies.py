"""Function bodies: one serves all sites of an op_type; what it cannot serve takes a smaller match or stays outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cutefuse.graph.read import Graph
from cutefuse.kernels import Call
from cutefuse.match.answer import Match
from cutefuse.match.site import FUSED, Site
from cutefuse.operators.function import fused_nodes, graph_call
from cutefuse.operators.op import FusedOp

CAST_LIKE_OPSET = 15
OWN_BODY = frozenset({"bfloat16", "float8_e4m3fn"})  # types that no other one shares a body with
BODY_OPSET = 11  # from here on a body serves calls of every geometry


def check_bodies(graph: Graph, sites: Sequence[Site]) -> None:
    """Take a smaller match, or refuse the site, where no function body can be written in the model's opset.

    One body serves all sites of an op_type, so where they differ in what it cannot compute, it is that of the most.
    """
    before = {n.op_type: n for n in fused_nodes(graph.model)}
    fused = [s for s in sites if s.status == FUSED]
    votes: dict[str, Counter[Shared]] = {}
    for site in fused:
        call = site.chosen.call
        if node := before.get(call.op_type):
            call = graph_call(node, graph)
        votes.setdefault(call.op_type, Counter())[Shared.of(site.op, graph.opset, call)] += 1
    written = {op_type: count.most_common(1)[0][0] for op_type, count in votes.items()}
    for site in fused:
        if site.settle(partial(_no_body, graph, site.op, written)):
            call = site.chosen.call
            written.setdefault(call.op_type, Shared.of(site.op, graph.opset, call))


@dataclass(frozen=True)
class Shared:
    """What all calls that one body serves have in common."""

    kind: str  # of type: from opset 15 on one body serves float32 and float16, and int8 whatever its output
    attrs: tuple[tuple[str, tuple[Any, ...]], ...]

    @classmethod
    def of(cls, op: FusedOp, opset: int, call: Call) -> Shared:
        dtype = call.dtype
        attrs: Mapping[str, Any] = call.attrs
        return cls(
            dtype if opset < CAST_LIKE_OPSET or dtype in OWN_BODY else "float",
            tuple((name, tuple(attrs[name])) for name in op.must_agree(opset)),
        )


def _no_body(graph: Graph, op: FusedOp, written: Mapping[str, Shared], match: Match) -> str | None:
    call = match.call
    if graph.opset < (oldest := op.oldest_opset(call.op_type, call.dtype)):
        return f"opset {graph.opset} is older than {oldest}; convert the model, or use --no-functions"
    own = Shared.of(op, graph.opset, call)
    other = written.get(call.op_type, own)
    if other.kind != own.kind:
        remedy = f"convert the model to opset {CAST_LIKE_OPSET}, or " if graph.opset < CAST_LIKE_OPSET else ""
        return (
            f"a site of another type than {call.dtype} has the same op_type, and one body cannot "
            f"serve both in opset {graph.opset}; {remedy}use --no-functions"
        )
    for (name, values), (_, others) in zip(own.attrs, other.attrs, strict=True):
        if values != others:
            remedy = "unpatch the model first" if name == "layout" else f"convert the model to opset {BODY_OPSET}"
            return (
                f"its {name} are {list(values)}, those of another site of {call.op_type} {list(others)}, and one body "
                f"cannot serve both in opset {graph.opset}; {remedy}, or use --no-functions"
            )
    return None
