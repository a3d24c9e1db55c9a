"""Finds the sites of all operators in a model and asks the kernel library about each: fused, or refused and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.clean import Cleaned, clean, unchanged
from cutefuse.graph.read import Graph, label, nodes_of, subgraphs
from cutefuse.graph.shapes import check_shapes
from cutefuse.kernels import Call
from cutefuse.ops.function import fused_nodes, graph_call
from cutefuse.ops.layouts import HWC8
from cutefuse.ops.op import Cost, FusedOp
from cutefuse.sites import conv, norm, quant
from cutefuse.sites.match import Finder, Match, Operand, Refusal, filled, tensors_of

FUSED, REFUSED, EXCLUDED, MERGED, LEFT_OUT = "fused", "refused", "excluded", "merged", "left out"
CAST_LIKE_OPSET = 15
OWN_BODY = frozenset({"bfloat16", "float8_e4m3fn"})  # types that no other one shares a body with
BODY_OPSET = 11  # from here on a body serves calls of every geometry


def finders(alone: bool = False, layout: int = HWC8) -> tuple[Finder, ...]:
    """One finder for each operator. `alone`: convolutions without any neighbour are sites too. `layout`: of the nodes
    that convolutions become."""
    return conv.ConvSites(alone, layout), quant.QuantSites(layout), norm.NormSites()


@dataclass
class Site:
    """One candidate: what was found, and what becomes of it."""

    finder: Finder
    name: str
    status: str
    reason: str = ""
    match: Match | None = None
    nodes: list[NodeProto] = field(default_factory=list)  # in graph order
    around: list[NodeProto] = field(default_factory=list)  # the nodes of all its matches, in graph order
    bytes_saved: int | None = 0  # None where sizes are not known
    sizes: Callable[[str], tuple[int, ...] | None] = lambda tensor: None  # of tensors, on inputs of the given sizes
    gain_us: float | None = None  # what fusing it should save while the other sites stay as they are; None: not known
    gain_parts: dict[str, float] = field(default_factory=dict)  # what gain_us is the sum of
    basis: str = ""  # of gain_us: "profile", "tuned" or "model"
    tile: int = 0  # id of the tile that was chosen here, which the node asks for; 0 for the kernels' first guess
    cast_from: str = ""  # the graph's type, when the site computes in another one

    @property
    def op(self) -> FusedOp:
        return self.finder.op

    @property
    def sized_call(self) -> Call | None:
        """The call on inputs of the given sizes; None where a size is not known."""
        return self.call_of(self.match) if self.match else None

    def call_of(self, match: Match) -> Call | None:
        """The call of one of its matches on inputs of the given sizes; None where a size is not known."""
        call = match.call
        if all(d >= 0 for t in (*call.inputs, *call.outputs) for d in t.dims):
            return call
        known = next((self.sizes(name) for name in match.outputs if name), None)
        inputs = [
            replace(t, dims=filled(t.dims, self._known(o))) for t, o in zip(call.inputs, match.inputs, strict=True)
        ]
        outputs = [
            replace(t, dims=filled(t.dims, self.sizes(name) if name else known))
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

    def _known(self, operand: Operand) -> tuple[int, ...] | None:
        return next((self.sizes(name) for name in tensors_of(operand)), None)

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
            "inputs": [t for i in self.match.inputs for t in tensors_of(i)] if self.match else [],
            "outputs": list(self.match.outputs) if self.match else [],
            "shapes": {
                "inputs": [list(t.dims) for t in call.inputs] if call else [],
                "outputs": [list(t.dims) for t in call.outputs] if call else [],
            },
            "dtype": call.inputs[0].dtype if call else None,
            "flops": cost.flops if cost else None,
            "bytes_moved": cost.bytes_moved if cost else None,
            "bytes_saved": self.bytes_saved if self.status == FUSED else 0,
            "gain_us": self.gain_us,
            "gain_parts": {part: round(us, 3) for part, us in self.gain_parts.items()},
            "tile": self.tile,
            "basis": self.basis,
        }


def find_sites(
    model: ModelProto, folder: Path, shapes: Mapping[str, Sequence[int]] | None = None, alone: bool = False,
    layout: int = HWC8,
) -> tuple[Cleaned, list[Site]]:  # fmt: skip
    """All candidates in graph order, each fused or refused, bodies of control flow and of local functions included.

    They are found in a cleaned copy of the graph; their nodes are those of the model, its no-ops between them included.
    `shapes` are sizes of inputs with dynamic axes: figures need them, what is legal must hold for every size. `alone`
    and `layout`: see `finders`.

    Raises CutefuseError for a broken graph: a tensor defined twice, a cycle; and for shapes that contradict the model.
    """
    check_shapes(model, shapes or {})
    cleaned = clean(model, folder)
    order = {id(n): i for i, n in enumerate(cleaned.whole.nodes)}
    sites = list(_scan(cleaned, order, finders(alone, layout)))
    if shapes:
        sized = cleaned.sized(shapes)
        for site in sites:
            site.sizes = sized.dims
    else:
        for site in sites:
            site.sizes = cleaned.graph.dims
    for title, body in _nested(model):
        inner = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, graph=body)
        try:
            found = list(_scan(unchanged(Graph(inner, folder)), {}, finders()))
        except CutefuseError:  # a body that shadows names is legal ONNX; it is skipped
            continue
        for site in found:
            site.match = None
            site.refuse(REFUSED, f"inside {title}")
            sites.append(site)
    return cleaned, sites


def _scan(cleaned: Cleaned, order: dict[int, int], finders: Sequence[Finder]) -> Iterator[Site]:
    graph = cleaned.graph
    alive = graph.reaching_outputs()
    for node in graph.nodes:
        for finder in finders if id(node) in alive else ():
            found = finder.match(graph, node) if node.op_type in finder.anchors else None
            if found is None:
                continue
            site = Site(finder, label(node), FUSED)
            if isinstance(found, Refusal):
                nodes = cleaned.originals(found.nodes or (node,))
                site.nodes = sorted(nodes, key=lambda n: order.get(id(n), 0))
                site.refuse(REFUSED, found.reason)
            else:
                found = _in_model(cleaned, found)
                site.around = sorted(_all_nodes(found), key=lambda n: order.get(id(n), 0))
                site.take(found)
                if reason := kernels.reject(found.call):
                    site.refuse(REFUSED, reason)
            yield site
            break


def _in_model(cleaned: Cleaned, match: Match) -> Match:
    """A match in the cleaned copy as one in the model: tensors have the same names, the nodes are the model's."""
    smaller = _in_model(cleaned, match.otherwise) if match.otherwise else None
    return replace(match, nodes=cleaned.originals(match.nodes), otherwise=smaller)


def _all_nodes(match: Match | None) -> list[NodeProto]:
    nodes: dict[int, NodeProto] = {}
    while match is not None:
        nodes |= {id(n): n for n in match.nodes}
        match = match.otherwise
    return list(nodes.values())


def _nested(model: ModelProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    def bodies(nodes: Iterable[NodeProto]) -> Iterator[tuple[str, onnx.GraphProto]]:
        for node in nodes:
            for body in subgraphs(node):
                yield f"the body of {node.op_type} '{label(node)}'; only the main graph is rewritten", body
                yield from bodies(body.node)

    yield from bodies(model.graph.node)
    for function in model.functions:
        if function.domain != DOMAIN:
            yield (
                f"the local function '{function.name}'; only the main graph is rewritten, inline it first",
                _body_of(function),
            )


def _body_of(function: onnx.FunctionProto) -> onnx.GraphProto:
    """The nodes of a local function as a graph. What a caller gives as an attribute has the function's own default, or
    the operator's."""
    given = {a.name: a for a in function.attribute_proto}
    body = onnx.GraphProto(node=function.node)
    for node in nodes_of(body):
        for i in reversed(range(len(node.attribute))):
            name, own = node.attribute[i].ref_attr_name, node.attribute[i].name
            if name in given:
                node.attribute[i].CopyFrom(given[name])
                node.attribute[i].name = own
            elif name:
                del node.attribute[i]
    return body


def check_bodies(graph: Graph, sites: Sequence[Site]) -> None:
    """Take a smaller match, or refuse the site, where no function body can be written in the model's opset.

    One body serves all sites of an op_type, so where they differ in what it cannot compute, it is that of the most.
    """
    before = {n.op_type: n for n in fused_nodes(graph.model)}
    fused = [s for s in sites if s.status == FUSED]
    votes: dict[str, Counter[_Shared]] = {}
    for site in fused:
        assert site.match is not None
        call = site.match.call
        if node := before.get(call.op_type):
            call = graph_call(node, graph)
        votes.setdefault(call.op_type, Counter())[_Shared.of(site.op, graph.opset, call)] += 1
    written = {op_type: count.most_common(1)[0][0] for op_type, count in votes.items()}
    for site in fused:
        while reason := _no_body(graph, site, written):
            if not site.fall_back(reason):
                site.refuse(REFUSED, reason)
                break
        else:
            assert site.match is not None
            written.setdefault(site.match.call.op_type, _Shared.of(site.op, graph.opset, site.match.call))


@dataclass(frozen=True)
class _Shared:
    """What all calls that one body serves have in common."""

    kind: str  # of type: from opset 15 on one body serves float32 and float16, and int8 whatever its output
    attrs: tuple[tuple[str, tuple[Any, ...]], ...]

    @classmethod
    def of(cls, op: FusedOp, opset: int, call: Call) -> _Shared:
        dtype = call.inputs[0].dtype
        attrs: Mapping[str, Any] = call.attrs
        return cls(
            dtype if opset < CAST_LIKE_OPSET or dtype in OWN_BODY else "float",
            tuple((name, tuple(attrs[name])) for name in op.must_agree(opset)),
        )


def _no_body(graph: Graph, site: Site, written: Mapping[str, _Shared]) -> str | None:
    assert site.match is not None
    call = site.match.call
    if graph.opset < (oldest := site.op.oldest_opset(call.op_type, call.inputs[0].dtype)):
        return f"opset {graph.opset} is older than {oldest}; convert the model, or use --no-functions"
    own = _Shared.of(site.op, graph.opset, call)
    other = written.get(call.op_type, own)
    if other.kind != own.kind:
        remedy = f"convert the model to opset {CAST_LIKE_OPSET}, or " if graph.opset < CAST_LIKE_OPSET else ""
        return (
            f"a site of another type than {call.inputs[0].dtype} has the same op_type, and one body cannot "
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


def check_overlaps(graph: Graph, sites: Sequence[Site]) -> None:
    """Let every node be replaced by one site alone; sites may share nodes that stay for others.

    The later of two sites that want a node takes a smaller match. Where it has none, the earlier one takes a smaller
    match; where that has none either, the later one is refused.
    """
    claimed: dict[int, Site] = {}
    for site in (s for s in sites if s.status == FUSED):
        largest = site.match
        assert largest is not None
        while contested := _contested(site, claimed):
            rival, node = contested
            smaller = _spared(graph, rival, site)
            if smaller is None:
                site.refuse(REFUSED, _lost(site, rival, node))
                break
            _claim(graph, rival, claimed, smaller)
            site.take(largest)
        else:
            _claim(graph, site, claimed)


def _contested(site: Site, claimed: Mapping[int, Site]) -> tuple[Site, NodeProto] | None:
    """Take the largest match whose nodes nobody claims; without one the smallest, and who claims which of its nodes."""
    while True:
        assert site.match is not None
        found = next(((claimed[id(n)], n) for n in site.match.nodes if id(n) in claimed), None)
        if found is None or not site.fall_back(_claimed(*found)):
            return found


def _spared(graph: Graph, rival: Site, site: Site) -> Match | None:
    """The rival's largest match that claims none of the site's nodes."""
    assert rival.match is not None and site.match is not None
    wanted = {id(n) for n in site.match.nodes}
    smaller = rival.match.otherwise
    while smaller is not None and wanted & _goes(graph, smaller):
        smaller = smaller.otherwise
    return smaller


def _claim(graph: Graph, site: Site, claimed: dict[int, Site], instead: Match | None = None) -> None:
    """Claim what goes with a site's match, or let the site take and claim another one `instead`."""
    assert site.match is not None
    if instead is not None:
        for i in _goes(graph, site.match):
            del claimed[i]
        site.take(instead)
    claimed.update((i, site) for i in _goes(graph, instead or site.match))


def _lost(site: Site, rival: Site, node: NodeProto) -> str:
    if rival.op is not site.op:
        return f"it overlaps with the {rival.op.stem} site '{rival.name}'; leave that out with --exclude-op"
    return (
        f"{_claimed(rival, node)}, and nothing else around this Conv can be fused; --exclude '{rival.name}' gives it "
        "to this one"
    )


def _claimed(rival: Site, node: NodeProto) -> str:
    return f"{node.op_type} '{label(node)}' is fused into the site '{rival.name}'"


def _goes(graph: Graph, match: Match) -> set[int]:
    """The ids of a match's nodes that nothing else needs once the fused node replaces them."""
    going = {id(n) for n in match.nodes}
    while True:  # a node that stays keeps the nodes that it needs
        kept = {
            id(node)
            for node in match.nodes
            for o in node.output
            if o not in match.outputs and (graph.escapes(o) or any(id(u) not in going for u in graph.users(o)))
        }
        if not kept & going:
            return going
        going -= kept


def merge_parallel(graph: Graph, sites: Sequence[Site], sm: int) -> None:
    """Let one call compute the sites that an operator can merge: the first of them gets it, the others MERGED.

    Sites with tiles of the GPU's own generation stay alone when their merged call has none.
    """
    fused = [s for s in sites if s.status == FUSED and s.match]
    shared: dict[str, set[_Shared]] = {}
    for site in fused:
        assert site.match is not None
        shared.setdefault(site.match.call.op_type, set()).add(_Shared.of(site.op, graph.opset, site.match.call))
    if graph.opset < CAST_LIKE_OPSET:  # one body could not serve the merged op_types of calls that differ
        fused = [s for s in fused if s.match and len(shared[s.match.call.op_type]) == 1]
    order = {id(n): i for i, n in enumerate(graph.nodes)}
    groups: dict[Hashable, list[Site]] = {}
    for site in fused:
        assert site.match is not None
        if (key := site.finder.merge_key(site.match)) is not None:
            groups.setdefault((site.op.stem, site.cast_from, key), []).append(site)
    for group in groups.values():
        finder = group[0].finder
        alone = [s.match for s in group if s.match]
        for positions, match in finder.merge(alone):
            if finder.own_tiles_first and kernels.made_for(alone[0].call, sm) > kernels.made_for(match.call, sm):
                continue
            head = group[min(positions)]
            head.match, head.nodes = match, sorted(match.nodes, key=lambda n: order[id(n)])
            for other in (group[i] for i in positions if group[i] is not head):
                other.refuse(MERGED, f"'{head.name}' computes it too")
