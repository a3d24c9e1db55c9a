"""How long patches on small tiles take: constants of patch_us, and of small_us for patches, in
cutlass_kernels/conv/sm90/cost.cpp.

data/patch_layers_h200.csv holds microseconds of 3x3 layers, operands in the L2 cache, by the tiles that were guessed
first and all patches. Here count patches whose reduction is not divided. They are priced as they are in a network, a
tenth longer than alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from calibration import fit, rows
from calibration.patch_rows import BYTES_PER_US

NOW = {"kChain": 0.393, "kTap": 0.039, "kPixel": 0.001, "kRow": 0.0017, "kFilterRow": 0.00114, "kFirst": 0.0007,
       "kPatchFinish": 0.57, "kPatchExponential": 0.7, "kShortcut": 0.41}  # fmt: skip
ENDS, HELD, LATER = 1.12, 0.49, 0.76  # kSmallEnds, kHeld and kLater of cost.cpp
IN_NETWORK = 1.1  # of the time alone
UNDIVIDED = 160  # tiles: fewer may divide the reduction
SHARED = 228 << 10  # bytes of a multiprocessor


def recorded() -> list[dict[str, str]]:
    """The rows of these tiles, as they would be in a network."""
    found = [row for row in rows.read("patch_layers_h200.csv") if row["tile"].count("x") == 2]
    found = [row for row in found if row["tile"].startswith("sm90_small_") and tile_work(row)["tiles"] > UNDIVIDED]
    return [row | {"time_us": str(IN_NETWORK * float(row["time_us"]))} for row in found]


def report() -> Iterator[str]:
    """The lines of the report: errors now and refitted."""
    found = recorded()
    yield f"patches on small tiles, {len(found)} times"
    yield from fit.of_tiles(found, tile_work, times_us, NOW)


def times_us(work: Mapping[str, np.ndarray], constants: Mapping[str, float]) -> np.ndarray:
    """As sm90_us of cost.cpp."""
    c = constants
    multiply = 3 * (c["kTap"] + c["kPixel"] * work["pixels"]) * work["multiplied"]
    load = 3 * work["filters"] * c["kFilterRow"] + c["kRow"] * work["patch"] / 3
    each = np.where(work["exponential"], c["kPatchExponential"], c["kPatchFinish"]) + c["kShortcut"] * work["shortcut"]

    def wave_us(tiles: np.ndarray) -> np.ndarray:
        resident = np.ceil(tiles / rows.MULTIPROCESSORS)
        k_tile = np.maximum(c["kChain"], np.maximum(multiply, load) * resident)
        return np.asarray(
            work["k_tiles"] * k_tile + (c["kFirst"] * work["patch"] + each * work["pixels"] / 64) * resident
        )

    at_once = rows.MULTIPROCESSORS * work["blocks"]
    waves, left = work["tiles"] // at_once, work["tiles"] % at_once
    alone = LATER * (work["blocks_at_most"] == 1)
    us = HELD * (2 * work["tiles"] > at_once) + waves * wave_us(at_once) + np.maximum(waves - 1, 0) * alone
    us += (left > 0) * (wave_us(left) + alone * (waves > 0))
    return np.asarray(ENDS + np.hypot(us, work["bytes"] / BYTES_PER_US))


def tile_work(row: Mapping[str, str]) -> dict[str, float]:
    """What a tile of a 3x3 layer of stride 1 has to do, as patch_us and small_launch count it."""
    _, a, b = (int(n) for n in row["tile"].removeprefix("sm90_small_").split("x"))
    N, H, W, K = (int(row[k]) for k in "NHWK")
    channels = [int(c) for c in row["C"].split("+")]
    blocks, shortcut = sum(math.ceil(c / 64) for c in channels), bool(row["residual"])
    count = N * min(math.ceil(p / a) * math.ceil(q / b) for p, q in ((H, W), (W, H))) * math.ceil(K / 64)
    patch, most = (a + 2) * (b + 2), 3 if a * b <= 64 else 2
    held = (2 if blocks > 1 else 1) * math.ceil(patch * 128 / 1024) * 1024 + 1024
    fit_in = [n for n in range(1, most + 1) if (SHARED // n - 1024 - held) // (3 * 64 * 128) >= 2]
    enough = next((n for n in fit_in if n * rows.MULTIPROCESSORS >= count), max(fit_in))
    return {
        "pixels": a * b,
        "patch": patch,
        "multiplied": sum(math.ceil(c / 32) for c in channels) / (2 * blocks),
        "filters": min(64, K),
        "k_tiles": 3 * blocks,
        "tiles": count,
        "blocks": enough,
        "blocks_at_most": most,
        "exponential": row["activation"] in ("silu", "sigmoid"),
        "shortcut": shortcut,
        "bytes": 2 * N * H * W * (K * (1 + shortcut) + sum(channels)) + 18 * K * sum(channels),
    }
