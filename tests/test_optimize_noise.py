"""Which of two engines is faster: the statistic, and how often it takes noise for gain."""

from __future__ import annotations

import numpy as np
import pytest

from cutefuse.errors import CutefuseError
from cutefuse.timing.noise import LEAST_GAIN, compare, interleave, spread


def test_the_interval_is_that_of_the_sign_test() -> None:
    ratios = [0.80, 0.81, 0.82, 0.83, 0.84, 0.85, 0.86, 0.87, 0.88]
    found = compare(ratios, [1.0] * 9)
    # Of nine values the second and the eighth: 1 - 2 * (1 + 9) / 2^9 = 0.961; the third would give 0.82.
    assert (found.ratio, found.low, found.high, found.rounds) == (0.84, 0.81, 0.87, 9) and found.faster
    assert found.text == "0.840 (0.810 to 0.870)"


@pytest.mark.parametrize("count", [6, 15, 31])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    random = np.random.default_rng(3)
    skewed = np.exp(random.normal(0, 0.05, (4000, count)))  # its median is 1
    found = [compare(list(row), [1.0] * count) for row in skewed]
    assert 0.95 <= np.mean([v.low <= 1 <= v.high for v in found]) <= 0.99


def test_equal_engines_are_hardly_ever_called_faster_and_drift_favours_nobody() -> None:
    random = np.random.default_rng(4)
    wrong = 0
    for _ in range(2000):
        drift = np.linspace(1.0, 1.3, 15)  # of the clocks, over the rounds
        a, b = (drift * random.normal(100, 2, 15) for _ in range(2))
        wrong += compare(list(a), list(b)).faster
    assert wrong <= 2000 * 0.025


def test_a_real_gain_is_seen_through_the_same_noise() -> None:
    random = np.random.default_rng(5)
    seen = [
        compare(list(random.normal(90, 2, 15)), list(random.normal(100, 2, 15))).faster for _ in range(200)
    ]  # fmt: skip
    assert np.mean(seen) > 0.99


def test_a_gain_that_is_certain_but_tiny_is_none() -> None:
    tiny = compare([100 * (1 - LEAST_GAIN / 2)] * 15, [100.0] * 15)
    assert tiny.high < 1 and not tiny.faster


def test_a_slower_engine_is_not_faster() -> None:
    assert not compare([110.0] * 15, [100.0] * 15).faster


@pytest.mark.parametrize(
    "times, rival", [([1.0] * 5, [1.0] * 5), ([1.0] * 7, [1.0] * 8), ([0.0] * 9, [1.0] * 9), ([1.0] * 9, [0.0] * 9),
                     ([float("nan")] * 9, [1.0] * 9), ([], [])]
)  # fmt: skip
def test_times_that_give_no_verdict_are_refused(times: list[float], rival: list[float]) -> None:
    with pytest.raises(CutefuseError, match="rounds were timed|timed at zero"):
        compare(times, rival)


def test_rounds_alternate_in_direction() -> None:
    order: list[str] = []

    def sampler(name: str, us: float) -> float:
        order.append(name)
        return us

    times = interleave([lambda: sampler("a", 1.0), lambda: sampler("b", 2.0)], 3)
    assert times == [[1.0] * 3, [2.0] * 3] and "".join(order) == "abbaab"


def test_the_spread_is_robust() -> None:
    values = np.random.default_rng(6).normal(0, 3, 999)
    assert spread(list(values)) == pytest.approx(3, rel=0.1)
    assert spread([*values[:900], *[1000.0] * 99]) == pytest.approx(3, rel=0.25)
    assert spread([]) == 0.0
