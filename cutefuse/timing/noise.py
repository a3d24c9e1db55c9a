"""Noise and gain: which of two engines is faster, from times taken in turns.

The statistic is the median of the paired ratios. Its interval is the one that the sign test gives (order statistics of
the ratios, exact for any distribution whose rounds are independent; W. J. Conover, Practical Nonparametric Statistics,
section 3.2): no engine is called faster when the interval reaches 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cutefuse.errors import CutefuseError

CONFIDENCE = 0.95
LEAST_GAIN = 0.01  # a share of the time: two builds of one graph differ by about so much in tactics and placement
LEAST_ROUNDS = 6  # fewer give no interval at this confidence


@dataclass(frozen=True)
class Verdict:
    """Time of an engine over that of its rival: the median of the paired ratios, and the interval of that median."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def faster(self) -> bool:
        """Whether the engine is faster by more than noise and by more than LEAST_GAIN."""
        return self.high < 1 and self.ratio <= 1 - LEAST_GAIN

    @property
    def text(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "confidence": CONFIDENCE, "faster": self.faster}


HOW = (
    f"median of the paired ratios over interleaved rounds, with the {CONFIDENCE:.0%} interval of the sign test; faster "
    f"means that the interval ends below 1 and the median is at most {1 - LEAST_GAIN:g}"
)


def compare(times_us: Sequence[float], rival_us: Sequence[float]) -> Verdict:
    """Judge two engines by their times in the same rounds, in any one unit.

    Raises CutefuseError for rounds that do not pair, for fewer than LEAST_ROUNDS and for times that are not positive.
    """
    count = len(times_us)
    if count != len(rival_us) or count < LEAST_ROUNDS:
        raise CutefuseError(
            f"{count} and {len(rival_us)} rounds were timed; a verdict needs equally many, {LEAST_ROUNDS} or more"
        )
    if not all(0 < t < math.inf for t in (*times_us, *rival_us)):
        raise CutefuseError("an engine was timed at zero or no time at all; profile it again")
    ratios = sorted(a / b for a, b in zip(times_us, rival_us, strict=True))
    skip = _beyond(count)
    return Verdict(statistics.median(ratios), ratios[skip], ratios[count - 1 - skip], count)


def _beyond(count: int) -> int:
    """How many of `count` ordered values lie outside of the median's interval at each end."""
    chance, skip = 0.0, 0
    for below in range(count):
        chance += math.comb(count, below) / 2**count
        if chance > (1 - CONFIDENCE) / 2:
            break
        skip = below
    return skip


def steady(sample_us: Callable[[int], float], length_us: float, most_runs: int = 1000) -> Callable[[], float]:
    """Samples of one length from `sample_us`, which takes the mean time of so many runs; it is warm then."""
    sample_us(3)
    runs = round(length_us / max(sample_us(3), 1e-3))
    return partial(sample_us, min(max(runs, 1), most_runs))


def interleave(samplers: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """The samples of each sampler, one in every round. Rounds alternate in direction, so that a drift of the clocks
    within a round favours nobody."""
    times: list[list[float]] = [[] for _ in samplers]
    for number in range(rounds):
        order = range(len(samplers)) if number % 2 == 0 else reversed(range(len(samplers)))
        for i in order:
            times[i].append(samplers[i]())
    return times


def spread(values: Sequence[float]) -> float:
    """A robust standard deviation about zero: 1.4826 times the median of the absolute values; 0 without values."""
    return 1.4826 * statistics.median(map(abs, values)) if values else 0.0
