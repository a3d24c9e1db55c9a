"""How long tiles take whose four warpgroups take turns: constants of four_clocks in cutlass_kernels/conv/sm90/cost.cpp.

data/short_layers_h200.csv holds microseconds of 1x1 layers, operands in no cache, by every tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from calibration import fit, rows
from calibration.patch_rows import BYTES_PER_US, CLOCKS_PER_US

NOW = {"kTile": 1500.0, "kExponential": 4700.0, "kNext": 125.0, "kLast": 0.3, "kTurnEnds": 2.4}
LOAD_BYTES, TURN, BETWEEN = 60, 550, 25  # kLoadBytes, kTurn and kBetween of cost.cpp


def recorded() -> list[dict[str, str]]:
    """The rows of these tiles."""
    return [row for row in rows.read("short_layers_h200.csv") if "_four_" in row["tile"]]


def report() -> Iterator[str]:
    """The lines of the report: errors now and refitted."""
    found = recorded()
    yield f"tiles whose four warpgroups take turns, {len(found)} times"
    yield from fit.of_tiles(found, tile_work, times_us, NOW)


def times_us(work: Mapping[str, np.ndarray], constants: Mapping[str, float]) -> np.ndarray:
    """As sm90_us of cost.cpp."""
    c = constants
    finish = c["kExponential"] * work["exponentials"]
    turn = np.maximum(work["loop"] + c["kNext"], (work["loop"] + finish + c["kTile"]) / work["turns"])
    computing = (work["waves"] * turn + c["kLast"] * finish) / CLOCKS_PER_US
    return np.asarray(c["kTurnEnds"] + np.hypot(computing, work["bytes"] / BYTES_PER_US))


def tile_work(row: Mapping[str, str]) -> dict[str, float]:
    """What a tile of a 1x1 layer has to do, as loop_clocks and four_clocks count it."""
    filters, width = (int(n) for n in row["tile"].removeprefix("sm90_four_").split("x"))
    N, H, W, K = (int(row[k]) for k in "NHWK")
    channels, pixels = [int(c) for c in row["C"].split("+")], N * H * W
    multiply = filters * width / 128 * (1.09 if width == 128 else 1.04)
    blocks = sum(math.ceil(c / 64) for c in channels)
    step = max(multiply, 32 * (filters + width) / LOAD_BYTES)
    return {
        "loop": sum(max(math.ceil(c / 16) * step, math.ceil(c / 64) * TURN) for c in channels) + blocks * BETWEEN,
        "exponentials": filters * width / 32768 * (row["activation"] in ("silu", "sigmoid")),
        "turns": 256 / filters,
        "waves": math.ceil(math.ceil(pixels / width) * math.ceil(K / filters) / rows.MULTIPROCESSORS),
        "bytes": 2 * pixels * K + sum(2 * c * (pixels + K) for c in channels),
    }
