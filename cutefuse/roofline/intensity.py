"""Arithmetic intensity: the sizes of element types, and where a rising intensity meets a roof."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

# bits of one element
DTYPE_BITS = {
    "FP64": 64, "FP32": 32, "TF32": 32, "FP16": 16, "BF16": 16, "FP8": 8, "FP4": 4, "INT64": 64, "INT32": 32,
    "INT16": 16, "INT8": 8, "INT4": 4, "UINT8": 8, "BOOL": 8, "E8M0": 8,
}  # fmt: skip


def crossing(intensity: Callable[[int], float], ridge: float, limit: int = 1 << 24) -> int | None:
    """The least size at which a rising intensity reaches the ridge; None when it never does up to `limit`."""
    found = bisect_left(range(1, limit + 1), ridge, key=intensity) + 1
    return found if found <= limit else None
