"""What fusing a site saves and by whose word: one protocol for prices that are modelled, profiled or timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cutefuse.graph.read import Graph
from cutefuse.match.site import Site

# The bases of a price, as patch.json names them: the time model, a profile of the user's engine, times of this GPU.
MODELLED, PROFILED, TIMED = "model", "profile", "tuned"


@dataclass(frozen=True)
class Price:
    """What fusing a site saves by itself; what its output then costs its readers is the model's to add.

    saved_us: microseconds; None where that is not known, and then `note` says why. basis: MODELLED, PROFILED or TIMED.
    engine: against whose kernels, and on which GPU they were timed or what a model of them was fitted to.
    """

    saved_us: float | None
    basis: str
    engine: str
    note: str = ""


# Prices one site; and a source of prices, which is told all sites, because some share what they save.
Prices = Callable[[Site], Price]
Pricing = Callable[[Graph, Sequence[Site]], Prices]
