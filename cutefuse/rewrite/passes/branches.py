"""Sums of convolutions of one tensor, as RepVGG trains them, as one convolution."""

from __future__ import annotations

from cutefuse.rewrite import branches
from cutefuse.rewrite.state import State

FORM = "branches"  # of --without


def run(state: State) -> None:
    """Reads `model`, and writes its sums of branches as convolutions; leaves `branches`. `converted` stays."""
    asked = FORM not in state.options.without
    state.branches = branches.fold(state.model, state.source.parent) if asked else []
