"""A cleaned copy of the graph, in which sites are found."""

from __future__ import annotations

from cutefuse.graph.clean import clean as cleaned_copy
from cutefuse.graph.clean import tidy
from cutefuse.rewrite.state import State


def clean(state: State) -> None:
    """Reads `model`; leaves `cleaned` and `cleaning`. With --clean the model itself is cleaned too."""
    folder, cleaned = state.source.parent, cleaned_copy(state.model, state.source.parent)
    state.cleaning = {
        "written": state.options.clean, "folded": sorted(cleaned.folded), "no_ops": sorted(cleaned.no_ops),
        "left": cleaned.note, "stale_sizes": cleaned.stale,
    }  # fmt: skip
    if state.options.clean:
        tidy(state.model, cleaned)
        cleaned = cleaned_copy(state.model, folder)
    state.cleaned = cleaned
