"""What the quantised ConcatConv knows of its sums before it sees a source."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LARGEST_BOUND = 2**31 - 1
LARGEST = 128  # magnitude of an int8 number
ROUNDING = 2  # by which a sum may be off after its unit was changed, and more


def order_of(scales: Sequence[float]) -> list[int]:
    """The sources in the order of their scales, smallest first: sources of one scale are neighbours, so that units
    change less often, and no change makes a sum larger."""
    return sorted(range(len(scales)), key=lambda i: scales[i])


def in_order(w: np.ndarray, channels: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """Filter [K, sum(channels), R, S] over sources in another order; `channels` are those of the order before."""
    parts = np.split(w, np.cumsum(channels)[:-1], axis=1)
    return np.concatenate([parts[i] for i in order], axis=1)


def sum_bound(w: np.ndarray, channels: Sequence[int], scales: Sequence[float]) -> int:
    """The largest magnitude that int8's sum of products can have, whatever the sources hold, where it is brought from
    the unit of one source's scale to the next one's, in either unit; 0 where all scales are equal, or where an ONNX
    parser, which keeps attributes in 32 bits, would change it.

    w: int8 filter [K, sum(channels), R, S].
    """
    steps = np.asarray(scales, np.float32).astype(np.float64)
    magnitudes = np.abs(w.astype(np.float64)).sum(axis=(2, 3))
    sums, worst = np.zeros(len(w)), 0.0
    for i, part in enumerate(np.split(magnitudes, np.cumsum(channels)[:-1], axis=1)):
        if i > 0 and steps[i] != steps[i - 1]:
            before, sums = sums, sums * (steps[i - 1] / steps[i]) + ROUNDING
            worst = max(worst, float(before.max(initial=0)), float(sums.max(initial=0)))
        sums = sums + LARGEST * part.sum(axis=1)
    return math.ceil(worst) if worst <= LARGEST_BOUND else 0
