"""A cleaned copy of the graph, in which sites are found."""

from __future__ import annotations

from cutefuse.graph.clean import clean, tidy
from cutefuse.rewrite.state import State


def run(state: State) -> None:
    """Reads `model`; leaves `cleaned` and `cleaning`. With --clean the model itself is cleaned too."""
    folder = state.source.parent
    cleaned = clean(state.model, folder)
    state.cleaning = {
        "written": state.options.clean, "folded": sorted(cleaned.folded), "no_ops": sorted(cleaned.no_ops),
        "left": cleaned.note, "stale_sizes": cleaned.stale,
    }  # fmt: skip
    if state.options.clean:
        tidy(state.model, cleaned)
        cleaned = clean(state.model, folder)
    state.cleaned = cleaned
