"""Wall time of calls as a script makes them: a loop that is synchronised at its end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def loop_us(step: Callable[[], Any], calls: int) -> float:
    """Microseconds of one of `calls` calls."""
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6 / calls


def in_turns(steps: dict[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a call of each, after a round that warms up; every other round runs backwards."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name in list(steps)[:: 1 - 2 * (i % 2)]:
            found = loop_us(steps[name], calls)
            if i:
                times[name].append(found)
    return {name: statistics.median(t) for name, t in times.items()}
