"""How long patches whose pixels are rows take: constants of rows_clocks in cutlass_kernels/conv/sm90/cost.cpp.

data/patch_rows_h200.csv holds microseconds of layers of few filters, operands in no cache, by every tile of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from calibration import fit, rows

NOW = {"kStep": 18.3, "kRow": 2.26, "kTile": 771.0, "kTap": 95.4, "kOutput": 0.0967, "kRowsEnds": 3.77}
CLOCKS_PER_US, BYTES_PER_US = 1700, 2700 * 1700  # kClocksPerUs and memory_us of cost.cpp
CHANNELS, SHARED, HEAD = 32, 228 << 10, 1024  # of a patch; bytes of a multiprocessor, and of a block's barriers


def recorded() -> list[dict[str, str]]:
    """The rows of these tiles."""
    return rows.read("patch_rows_h200.csv")


def report() -> Iterator[str]:
    """The lines of the report: errors now and refitted."""
    found = recorded()
    yield f"patches whose pixels are rows, {len(found)} times"
    yield from fit.of_tiles(found, tile_work, times_us, NOW)


def times_us(work: Mapping[str, np.ndarray], constants: Mapping[str, float]) -> np.ndarray:
    """As sm90_us of cost.cpp."""
    c = constants
    shared = np.maximum(work["steps"] * c["kStep"], work["loads"] * c["kRow"]) + work["outputs"] * c["kOutput"]
    alone = c["kTile"] + work["taps"] * c["kTap"] + shared
    at_once = rows.MULTIPROCESSORS * work["blocks"]
    computing = np.ceil(work["tiles"] / at_once) * np.maximum(alone, work["blocks"] * shared) / CLOCKS_PER_US
    return np.asarray(c["kRowsEnds"] + np.hypot(computing, work["bytes"] / BYTES_PER_US))


def tile_work(row: Mapping[str, str]) -> dict[str, float]:
    """What a tile of a layer has to do, as rows_clocks and keep_filters count it."""
    filters, a, b = (int(n) for n in row["tile"].removeprefix("sm90_rows_").split("x"))
    N, H, W, K, R, S, stride = (int(row[k]) for k in ("N", "H", "W", "K", "R", "S", "stride"))
    channels = [int(c) for c in row["C"].split("+")]
    P, Q = ((size + 2 * (taps // 2) - taps) // stride + 1 for size, taps in ((H, R), (W, S)))

    def tiles(rows_: int, columns: int) -> int:
        return math.ceil(rows_ / a) * math.ceil(columns / b)

    turned = tiles(P, Q) < tiles(Q, P)
    pitch, height = ((n - 1) // stride for n in ((R, S) if turned else (S, R)))
    patch = (a + pitch) * (b + height)
    chunks, taps = sum(math.ceil(c / CHANNELS) for c in channels), R * S
    block = HEAD + 2 * math.ceil(patch * 2 * CHANNELS / 1024) * 1024 + chunks * taps * filters * 2 * CHANNELS
    count = N * tiles(*((P, Q) if turned else (Q, P)))
    most = min(SHARED // (block + 1024), 4 if filters == 16 else 3)
    return {
        "steps": sum(math.ceil(c / 16) for c in channels) * taps * a * b / 64,
        "loads": chunks * min(stride, R) * min(stride, S) * patch,
        "outputs": a * b * filters,
        "taps": chunks * taps,
        "tiles": count,
        "blocks": min(max(math.ceil(count / rows.MULTIPROCESSORS), 1), most),
        "bytes": 2 * N * P * Q * K + sum(2 * c * (N * H * W + K * taps) for c in channels),
    }  # fmt: skip
