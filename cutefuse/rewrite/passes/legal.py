"""Sites that are legal beside each other."""

from __future__ import annotations

from cutefuse.match.bodies import check_bodies
from cutefuse.match.gpu_support import suit_device
from cutefuse.match.overlaps import check_overlaps
from cutefuse.rewrite.state import State


def run(state: State) -> None:
    """Reads `sites`, `graph`; gives sites that want the same nodes or an own body smaller matches, or refuses them."""
    suit_device(state.sites, state.options.sm)
    if state.options.functions:
        check_bodies(state.graph, state.sites)
    chosen = [(s.status, s.match) for s in state.sites]
    check_overlaps(state.graph, state.sites)  # after the other checks: an excluded site must claim no nodes
    changed = [(s.status, s.match) for s in state.sites] != chosen
    if state.options.functions and changed:
        check_bodies(state.graph, state.sites)  # of the smaller matches that this left
