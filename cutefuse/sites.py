"""Finds the sites of all operators in a model and asks the kernel library about each: fused, or refused and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph import Graph, label, subgraphs
from cutefuse.ops import operators
from cutefuse.ops.op import DOMAIN, Cost, FusedOp, Match, Refusal
from cutefuse.shapes import inferred

FUSED, REFUSED, EXCLUDED = "fused", "refused", "excluded"
CAST_LIKE_OPSET = 15


@dataclass
class Site:
    """One candidate: what was found, and what becomes of it."""

    op: FusedOp
    name: str
    status: str
    reason: str = ""
    match: Match | None = None
    nodes: list[NodeProto] = field(default_factory=list)
    bytes_saved: int = 0
    gain_us: float | None = None  # what a profile promises; None without one
    cast_from: str = ""  # the graph's type, when the site computes in another one

    @property
    def cost(self) -> Cost | None:
        return self.op.cost(self.match.call) if self.match else None

    def refuse(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason

    def as_json(self) -> dict[str, Any]:
        """The site as patch.json holds it; sizes are -1 where unknown, counts take unknown sizes as 1."""
        call = self.match.call if self.match else None
        return {
            "name": self.name,
            "operator": self.op.stem,
            "op_type": call.op_type if call else None,
            "status": self.status,
            "reason": self.reason,
            "title": self.op.title(call) if call else None,
            "nodes": [label(n) for n in self.nodes],
            "inputs": [i for i in self.match.inputs if isinstance(i, str)] if self.match else [],
            "outputs": list(self.match.outputs) if self.match else [],
            "shapes": {
                "inputs": [list(t.dims) for t in call.inputs] if call else [],
                "outputs": [list(t.dims) for t in call.outputs] if call else [],
            },
            "dtype": call.inputs[0].dtype if call else None,
            "flops": self.cost.flops if self.cost else None,
            "bytes_moved": self.cost.bytes_moved if self.cost else None,
            "bytes_saved": self.bytes_saved if self.status == FUSED else 0,
            "gain_us": self.gain_us,
        }


def find_sites(model: ModelProto, folder: Path) -> tuple[Graph, list[Site]]:
    """All candidates in graph order, each fused or refused, bodies of control flow and of local functions included.

    Raises CutefuseError for a graph that is no graph: a tensor defined twice, a cycle.
    """
    graph = Graph(model, folder, inferred(model))
    order = {id(n): i for i, n in enumerate(graph.nodes)}
    sites = list(_scan(graph, order))
    for title, body in _nested(model):
        inner = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, graph=body)
        try:
            found = list(_scan(Graph(inner, folder), {}))
        except CutefuseError:  # a body that shadows names is legal ONNX and simply not looked into
            continue
        for site in found:
            site.match = None
            site.refuse(REFUSED, f"inside {title}; only the main graph is rewritten, inline it first")
            sites.append(site)
    return graph, sites


def _scan(graph: Graph, order: dict[int, int]) -> Iterator[Site]:
    anchored = [(op, op.anchors) for op in operators()]
    for node in graph.nodes:
        for op, anchors in anchored:
            found = op.match(graph, node) if node.op_type in anchors else None
            if found is None:
                continue
            site = Site(op, label(node), FUSED, nodes=sorted(found.nodes or (node,), key=lambda n: order.get(id(n), 0)))
            if isinstance(found, Refusal):
                site.refuse(REFUSED, found.reason)
            else:
                site.match = found
                if reason := kernels.reject(found.call):
                    site.refuse(REFUSED, reason)
            yield site
            break


def _nested(model: ModelProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    def bodies(nodes: Iterable[NodeProto]) -> Iterator[tuple[str, onnx.GraphProto]]:
        for node in nodes:
            for body in subgraphs(node):
                yield f"the body of {node.op_type} '{label(node)}'", body
                yield from bodies(body.node)

    yield from bodies(model.graph.node)
    for function in model.functions:
        if function.domain != DOMAIN:
            yield f"the local function '{function.name}'", onnx.GraphProto(node=function.node)


def check_bodies(graph: Graph, sites: Sequence[Site]) -> None:
    """Refuse what function bodies cannot say in the model's opset; not asked for models without bodies."""
    written: dict[str, str] = {}
    for site in (s for s in sites if s.status == FUSED):
        assert site.match is not None
        call = site.match.call
        dtype = call.inputs[0].dtype
        # From opset 15 on one body serves float32 and float16; bfloat16 has its own.
        kind = dtype if graph.opset < CAST_LIKE_OPSET or dtype == "bfloat16" else "float"
        if graph.opset < site.op.min_body_opset:
            text = f"opset {graph.opset} is older than {site.op.min_body_opset}"
            site.refuse(REFUSED, f"{text}; convert the model, or use --no-functions")
        elif written.setdefault(call.op_type, kind) != kind:
            site.refuse(
                REFUSED,
                f"a site of another type than {dtype} has the same op_type, and one body cannot serve both in opset "
                f"{graph.opset}; convert the model to opset {CAST_LIKE_OPSET}, or use --no-functions",
            )


def check_overlaps(graph: Graph, sites: Sequence[Site]) -> None:
    """Refuse the later of two sites that would replace the same node; nodes that stay for others may be shared."""
    claimed: dict[int, Site] = {}
    for site in (s for s in sites if s.status == FUSED):
        assert site.match is not None
        own = {id(n) for n in site.match.nodes}
        rival = next((claimed[i] for i in own if i in claimed), None)
        if rival is not None:
            text = f"it overlaps with the {rival.op.stem} site '{rival.name}'; leave that out with --exclude-op"
            site.refuse(REFUSED, text)
            continue
        claimed.update((i, site) for i in _goes(graph, site.match))


def _goes(graph: Graph, match: Match) -> set[int]:
    """The ids of a match's nodes that nothing else needs once the fused node stands in their stead."""
    going = {id(n) for n in match.nodes}
    while True:  # what a node that stays needs stays too
        kept = {
            id(node)
            for node in match.nodes
            for o in node.output
            if o not in match.outputs and (graph.escapes(o) or any(id(u) not in going for u in graph.users(o)))
        }
        if not kept & going:
            return going
        going -= kept
