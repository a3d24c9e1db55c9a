"""Least squares by numpy: constants that must stay above zero, refitted from where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

STEP = 0.02  # of a constant's logarithm, for its derivative
HELD_OUT = 5  # every fifth row is not fitted to


def errors(predicted: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """How far predictions are off, as logarithms of their ratios to what was recorded."""
    return np.log(predicted / recorded)


def held_out(count: int) -> np.ndarray:
    """Which of so many rows are kept from the fit."""
    return np.arange(count) % HELD_OUT == HELD_OUT - 1


def refit(
    predict: Callable[[Mapping[str, float]], np.ndarray], recorded: np.ndarray, now: Mapping[str, float],
    hold: float, rounds: int = 8,
) -> dict[str, float]:  # fmt: skip
    """Constants for which `predict` is nearest to what was recorded (Levenberg and Marquardt).

    Both errors and constants count by their logarithms, so that a kernel of 2 us weighs as one of 200. `hold`: what it
    costs a constant to leave its value, in errors of all rows; what the rows do not tell stays where it is.
    """
    names, origin = list(now), np.log([now[n] for n in now])
    pull = hold * np.sqrt(len(recorded))

    def residuals(x: np.ndarray) -> np.ndarray:
        own = errors(predict(dict(zip(names, np.exp(x), strict=True))), recorded)
        return np.concatenate([own, pull * (x - origin)])

    x, damping = origin.copy(), 1e-2
    best = residuals(x)
    for _ in range(rounds):
        jacobian = np.stack([(residuals(x + STEP * unit) - best) / STEP for unit in np.eye(len(x))], axis=1)
        normal = jacobian.T @ jacobian
        while damping < 1e3:
            move = np.linalg.solve(normal + damping * np.diag(normal.diagonal() + 1e-9), -jacobian.T @ best)
            tried = residuals(x + move)
            if tried @ tried < best @ best:
                break
            damping *= 4
        else:
            break
        gained = best @ best - tried @ tried
        x, best, damping = x + move, tried, damping / 4
        if gained < 1e-4 * (best @ best):
            break
    return dict(zip(names, np.exp(x), strict=True))


def outcome(
    predict: Callable[[Mapping[str, float], np.ndarray], np.ndarray], recorded: np.ndarray, now: Mapping[str, float],
    hold: float,
) -> Iterator[str]:  # fmt: skip
    """Refit constants to all but the rows held out; the errors of both as lines, and each constant as it is and
    refitted. `predict` takes constants and a mask of rows."""
    held = held_out(len(recorded))
    found = refit(lambda constants: predict(constants, ~held), recorded[~held], now, hold)
    for words, chosen in (("fitted to", ~held), ("held out", held)):
        for when, constants in (("now", now), ("refitted", found)):
            off = errors(predict(constants, chosen), recorded[chosen])
            yield f"  {when}, {chosen.sum()} rows {words}: {told(off)}"
    for name, value in now.items():
        yield f"  {name:<20} {value:>10.4g} -> {found[name]:.4g}"


def of_tiles(
    recorded: Sequence[Mapping[str, str]],
    work_of: Callable[[Mapping[str, str]], Mapping[str, float]],
    times_us: Callable[[Mapping[str, np.ndarray], Mapping[str, float]], np.ndarray],
    now: Mapping[str, float],
) -> Iterator[str]:
    """`outcome` for the price of a kind of tiles. work_of: what a row's tile has to do, by name; times_us: microseconds
    of such work, an array each, under some constants."""
    tiles = [work_of(row) for row in recorded]
    work = {name: np.array([tile[name] for tile in tiles]) for name in tiles[0]}

    def predict(constants: Mapping[str, float], chosen: np.ndarray) -> np.ndarray:
        return times_us({name: values[chosen] for name, values in work.items()}, constants)

    yield from outcome(predict, np.array([float(row["time_us"]) for row in recorded]), now, hold=0.02)


def told(found: np.ndarray) -> str:
    """Errors in words: the mean of all, and how many are within 25 %."""
    ratios = np.exp(found)
    near = np.mean((ratios > 0.8) & (ratios < 1.25))
    return (
        f"{np.exp(np.abs(found).mean()) - 1:.1%} off in the mean, {np.exp(found.mean()):.3f} of what was recorded, "
        f"{near:.0%} within 25 %, worst {ratios.min():.2f} and {ratios.max():.2f}"
    )
