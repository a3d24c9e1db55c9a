"""The problems of benchmarks/row_norm.py: kinds of norms, directions, types and sizes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    kind: str  # rms, layer, add_rms, add_layer
    direction: str  # forward, backward
    dtype: str
    rows: int
    columns: int
    large: bool = False  # beside the grid of the geometric means

    @property
    def layer(self) -> bool:
        return self.kind.endswith("layer")

    @property
    def residual(self) -> bool:
        return self.kind.startswith("add")

    @property
    def bytes_moved(self) -> int:
        """x -> y, or x, residual -> y, sum, or dy, x [, dsum] -> dx; vectors of one row are left out."""
        size = 4 if self.dtype == "float32" else 2
        tensors = {("forward", False): 2, ("forward", True): 4, ("backward", False): 3, ("backward", True): 4}
        return tensors[self.direction, self.residual] * self.rows * self.columns * size


def problems(args: argparse.Namespace) -> list[Problem]:
    """The grid of the targets, then tensors of 256 MB."""
    grid = [(m, n) for n in args.columns for m in args.rows]
    result = [
        Problem(kind, direction, dtype, m, n)
        for direction in args.directions
        for dtype in args.dtypes
        for kind in args.kinds
        for m, n in grid
        if direction == "forward" or m >= 1024
    ]
    for direction in args.directions:
        for kind in args.kinds if args.large else []:
            for n in (2048, 4096, 8192, 16384, 32768, 65536):
                result.append(Problem(kind, direction, "bfloat16", (1 << 27) // n, n, True))
    return result
