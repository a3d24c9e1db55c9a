"""Sites that want the same nodes: every node is replaced by one site alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import NodeProto

from cutefuse.graph.read import Graph, label
from cutefuse.match.answer import Match
from cutefuse.match.site import FUSED, REFUSED, Site


def check_overlaps(graph: Graph, sites: Sequence[Site]) -> None:
    """Let every node be replaced by one site alone; sites may share nodes that stay for others.

    The later of two sites that want a node takes a smaller match. Where it has none, the earlier one takes a smaller
    match; where that has none either, the later one is refused.
    """
    claimed: dict[int, Site] = {}
    for site in (s for s in sites if s.status == FUSED):
        largest = site.chosen
        while contested := _contested(site, claimed):
            rival, node = contested
            wanted = {id(n) for n in site.chosen.nodes}
            smaller = next((m for m in rival.chosen.chain[1:] if not wanted & _goes(graph, m)), None)
            if smaller is None:
                site.refuse(REFUSED, _lost(site, rival, node))
                break
            for i in _goes(graph, rival.chosen):
                del claimed[i]
            rival.take(smaller)
            claimed |= dict.fromkeys(_goes(graph, smaller), rival)
            site.take(largest)
        else:
            claimed |= dict.fromkeys(_goes(graph, site.chosen), site)


def _contested(site: Site, claimed: Mapping[int, Site]) -> tuple[Site, NodeProto] | None:
    """Take the largest match whose nodes nobody claims; without one the smallest, and who claims which of its nodes."""
    while True:
        found = next(((claimed[id(n)], n) for n in site.chosen.nodes if id(n) in claimed), None)
        if found is None or not site.fall_back(_claimed(*found)):
            return found


def _lost(site: Site, rival: Site, node: NodeProto) -> str:
    if rival.op is not site.op:
        return f"it overlaps with the {rival.op.stem} site '{rival.name}'; leave that out with --exclude-op"
    return f"{_claimed(rival, node)}, and nothing else around this Conv can be fused; --exclude '{rival.name}' frees it"


def _claimed(rival: Site, node: NodeProto) -> str:
    return f"{node.op_type} '{label(node)}' is fused into the site '{rival.name}'"


def _goes(graph: Graph, match: Match) -> set[int]:
    """The ids of a match's nodes that nothing else needs once the fused node replaces them."""
    going = {id(n) for n in match.nodes}
    while True:  # a node that stays keeps the nodes that it needs
        kept = {
            id(node)
            for node in match.nodes
            if any(
                o not in match.outputs and (graph.escapes(o) or any(id(u) not in going for u in graph.users(o)))
                for o in node.output
            )
        }
        if not kept & going:
            return going
        going -= kept
