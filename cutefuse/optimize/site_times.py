"""What each site is worth by times taken on this GPU: what its nodes cost without it, less its best tile.

A Concat costs little where its sources are written in place: the nodes that make the sources are timed with it, and
their own time is taken off again. Sites that remove a node together are judged together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx import NodeProto

from cutefuse.errors import CutefuseError
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.cut import cut
from cutefuse.graph.read import Graph, attribute
from cutefuse.kernels import Call, operator_of
from cutefuse.match.site import FUSED, Site
from cutefuse.progress import track
from cutefuse.rewrite.apply import plan
from cutefuse.select.price import TIMED, Price, Prices, Pricing
from cutefuse.timing.calls import Replaced, Tiles, Tuner
from cutefuse.timing.order import in_order

NAMES = {"cudnn": "cuDNN", "compile": "torch.compile"}
MOST_AROUND = 16  # nodes before a Concat that are timed with it
# A library computes these, so that their results are not written into the Concat for free.
_BY_LIBRARY = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Concat", "LSTM", "GRU", "RNN", "Loop", "If", "Scan")


def pricing(tuner: Tuner) -> Pricing:
    """Prices sites by times of this machine."""

    def priced(graph: Graph, sites: Sequence[Site]) -> Prices:
        doomed = plan(graph, sites)
        groups = _groups(sites, doomed)
        found: dict[int, Price] = {}
        try:
            for group in track(groups, "timing sites on the GPU", len(groups)):
                found |= dict(zip(map(id, group), _price(tuner, graph, group, doomed), strict=True))
        finally:
            tuner.cache.save()  # what was timed before an interruption is kept as well
        return lambda site: found[id(site)]

    return priced


def best_tiles(tuner: Tuner, calls: Sequence[Call | None]) -> list[int]:
    """The tiles that are fastest together, of calls in the graph's order; 0, the kernels' guess, for one not known."""
    known = [call for call in calls if call is not None]
    try:
        chosen = iter(in_order(known, [_tiles_of(tuner, call) for call in known]))
    finally:
        tuner.cache.save()
    return [0 if call is None else next(chosen) for call in calls]


def _tiles_of(tuner: Tuner, call: Call) -> Tiles | None:
    try:
        return tuner.tiles(call)
    except CutefuseError:
        return None


def _groups(sites: Sequence[Site], dead: set[int]) -> list[list[Site]]:
    """Sites that remove a node together, in one list; else each alone."""
    groups: list[tuple[set[int], list[Site]]] = []
    for site in sites:
        own = {id(n) for n in site.nodes if id(n) in dead} if site.status == FUSED else set()
        joined = [g for g in groups if g[0] & own]
        groups = [g for g in groups if not g[0] & own]
        groups.append((own.union(*(g[0] for g in joined)), [*(s for g in joined for s in g[1]), site]))
    return [members for _, members in groups]


def _price(tuner: Tuner, graph: Graph, group: Sequence[Site], dead: set[int]) -> list[Price]:
    against = f"PyTorch's {' and '.join(NAMES[mode] for mode in tuner.modes)} on {gpu_of(tuner)}, not TensorRT"
    unpriced = Price(None, TIMED, against)
    unknown = [_unknown(site) for site in group]
    if reason := next(filter(None, unknown), ""):
        return [replace(unpriced, note=own or reason) for own in unknown]
    try:
        tiles = [tuner.tiles(site.sized_call) for site in group if site.sized_call]
        replaced = _replaced(tuner, graph, group, dead)
    except CutefuseError as error:
        return [replace(unpriced, note=f"it cannot be timed: {error}") for _ in group]
    if replaced.best_us is None:
        reason = "; ".join(replaced.failures.values())
        return [replace(unpriced, note=f"what it replaces cannot be timed: {reason}") for _ in group]
    saved_us = (replaced.best_us - sum(t.best_us for t in tiles)) / len(group)
    prices = []
    for site, own in zip(group, tiles, strict=True):
        tiles_of_op = operator_of(site.chosen.call.op_type)["configs"]
        name = next(str(c["name"]) for c in tiles_of_op if c["id"] == own.best)
        note = f"{NAMES[replaced.mode]} takes {saved_us + own.best_us:.3g} us, tile {name} {own.best_us:.3g} us"
        if len(group) > 1:
            note += f"; it shares what goes with {len(group) - 1} other sites, which are judged together"
        prices.append(replace(unpriced, saved_us=saved_us, note=note))
    return prices


def gpu_of(tuner: Tuner) -> str:
    """The GPU that a tuner's times are of."""
    return tuner.timer.tiles_machine.split(", cutefuse")[0]


def _unknown(site: Site) -> str:
    if site.status != FUSED or site.match is None:
        return f"it is not fused: {site.reason}"
    if site.sized_call:
        return ""
    return "its sizes are not known; where an input's are open, --input-shape NAME:1x3x640x640 gives them"


def _replaced(tuner: Tuner, graph: Graph, group: Sequence[Site], dead: set[int]) -> Replaced:
    """The time of the nodes that go, with what stands around their Concats and without it."""
    going = {id(n): n for site in group for n in site.nodes if id(n) in dead}
    outputs = list(dict.fromkeys(o for site in group if site.match for o in site.match.outputs if o))
    around = _around(graph, list(going.values()))
    inside = going.keys() | {id(n) for n in around}
    read_outside = [
        o for n in around for o in n.output
        if o and (graph.escapes(o) or any(id(user) not in inside for user in graph.users(o)))
    ]  # fmt: skip
    plain = cut(graph, [*around, *going.values()], [*outputs, *read_outside])
    if not around:
        return tuner.replaced(plain)
    kept = {id(n) for n in around}
    read_here = [
        o for n in around for o in n.output if o and any(id(user) not in kept for user in graph.users(o))
    ]  # fmt: skip
    return tuner.replaced(plain, cut(graph, around, [*read_here, *read_outside]))


def _around(graph: Graph, going: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes that make what the Concats among these read, up to the next convolution or product; [] for too many."""
    inside = {id(n) for n in going}
    pending = [name for n in going if n.op_type == "Concat" for name in n.input]
    found: dict[int, NodeProto] = {}
    while pending:
        node = graph.producer(pending.pop())
        if node is None or id(node) in inside or id(node) in found or _is_far(graph, node):
            continue
        found[id(node)] = node
        pending += node.input
    return list(found.values()) if len(found) <= MOST_AROUND else []


def _is_far(graph: Graph, node: NodeProto) -> bool:
    if node.domain == DOMAIN or node.op_type in _BY_LIBRARY or graph.is_constant(node.output[0]):
        return True
    return any(attribute(node, a.name) is not None and a.HasField("g") for a in node.attribute)
