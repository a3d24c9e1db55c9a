"""The candidates of a graph, each fused or refused by itself."""

from __future__ import annotations

from cutefuse.match.find import sites_of
from cutefuse.match.gpu_support import judge_device
from cutefuse.operators.layouts import TORCH
from cutefuse.rewrite.state import State


def run(state: State) -> None:
    """Reads `cleaned`, `assumed` and `layout`; leaves `sites`, with what the GPU can run, and `forms`."""
    alone = state.options.engine == TORCH  # whose convolutions do not even add their bias
    state.sites = sites_of(state.cleaned, {**state.assumed, **state.options.shapes}, alone, state.layout)
    judge_device(state.sites, state.options.sm)
    state.forms = {form for s in state.sites if s.match for form in s.match.takes}
