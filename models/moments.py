"""Mean and variance of a tensor's values, as they pass through operators: what random filters are scaled by.

Values are taken as normal and independent of each other. That is good enough over dozens of layers, and needs no run
of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(64)  # E[f(z)] of a standard normal z is WEIGHTS @ f(NODES)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@dataclass(frozen=True)
class Moments:
    """Mean and variance."""

    mean: float = 0.0
    variance: float = 1.0

    @property
    def square(self) -> float:
        """The mean square."""
        return self.mean**2 + self.variance


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": _sigmoid,
    "SiLU": lambda x: x * _sigmoid(x),
    "Tanh": np.tanh,
}


def elementwise(name: str, x: Moments) -> Moments:
    """Of FUNCTIONS[name](x)."""
    values = FUNCTIONS[name](x.mean + math.sqrt(x.variance) * NODES)
    mean = float(WEIGHTS @ values)
    return Moments(mean, float(WEIGHTS @ values**2) - mean**2)


def total(xs: Sequence[Moments]) -> Moments:
    """Of a sum."""
    return Moments(sum(x.mean for x in xs), sum(x.variance for x in xs))


def product(xs: Sequence[Moments]) -> Moments:
    """Of a product."""
    mean = math.prod(x.mean for x in xs)
    return Moments(mean, math.prod(x.square for x in xs) - mean**2)


def joined(xs: Sequence[Moments], widths: Sequence[int]) -> Moments:
    """Of the channels of several tensors, so many of each."""
    shares = [width / sum(widths) for width in widths]
    mean = sum(s * x.mean for s, x in zip(shares, xs, strict=True))
    return Moments(mean, sum(s * x.square for s, x in zip(shares, xs, strict=True)) - mean**2)


def largest(x: Moments, count: int) -> Moments:
    """Of the largest of count neighbours; behind a ReLU, where most MaxPools lie, the variance hardly changes."""
    return Moments(x.mean + math.sqrt(x.variance * math.log(count)), x.variance)
