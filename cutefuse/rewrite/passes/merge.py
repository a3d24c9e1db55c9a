"""Sites on the same tensors, in one call."""

from __future__ import annotations

from collections.abc import Set

from cutefuse.match.parallel import merge_parallel
from cutefuse.rewrite.state import State


def run(state: State, apart: Set[int] = frozenset()) -> None:
    """Reads `sites`; lets one of those on the same tensors compute the others, but for the sites whose id is in
    `apart`."""
    if "parallel" not in state.options.without:
        merge_parallel(state.graph, [s for s in state.sites if id(s) not in apart], state.options.sm)
