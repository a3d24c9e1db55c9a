"""Which of the legal sites pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cutefuse.kernels import Call
from cutefuse.rewrite.passes import legal, merge
from cutefuse.rewrite.state import State
from cutefuse.select.gain import Model
from cutefuse.select.policy import Choice, Policy, Saving
from cutefuse.select.price import Pricing

Tiles = Callable[[Sequence[Call | None]], Sequence[int]]  # of calls in the order of the graph; 0: none is known


def run(state: State, price: Pricing | None = None, tiles: Tiles | None = None) -> None:
    """Reads `sites` and `graph`; leaves out what does not pay, merges others, and leaves gains, tiles and `saving`.

    A site that goes may have kept another from its nodes: then all that never went are made legal and judged anew.
    price: figures to trust before the model's. tiles: what the kernels' first guess is replaced by.
    """
    options = state.options
    # Sites that were named one by one have been chosen already, but not what each of them takes in.
    policy = Policy(options.all_sites, options.min_gain_us if options.only is None else -math.inf)
    choice = Choice(Model(state.graph, state.engine, state.device, options.compiled), state.sites, policy)
    saving: Saving | None = None
    while saving is None:
        choice.restore()
        legal.run(state)
        merge.run(state, choice.apart)
        saving = choice.judge(price)
    state.saving = saving
    if tiles:
        for site, tile in zip(state.fused, tiles([site.sized_call for site in state.fused]), strict=True):
            site.tile = tile
