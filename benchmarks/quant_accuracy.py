"""What a scale for every source is worth: int8 ConcatConv with own scales against one common scale. Needs no GPU.

    python benchmarks/quant_accuracy.py

Two sources of 64 channels whose ranges differ by a ratio, 64 filters of 3x3 with a scale for each output channel, no
activation. `even`: the filter makes both sources count alike in the output, as trained layers tend to; `flat`: all
weights alike, so that the wider source dominates. Figures are root mean square errors over that of the output, against
float64.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutefuse.operators import (
    concat_conv,  # noqa: E402
    quant_concat_conv,  # noqa: E402
)
from cutefuse.operators.conv_math import Geometry, pack  # noqa: E402

CHANNELS, FILTERS, SIZE = (64, 64), 64, 24


def rounded(x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """int8 steps of the scale, as float64."""
    return np.clip(np.rint(x / scale), -128, 127)


def error(xs: list[np.ndarray], w: np.ndarray, scales: list[float]) -> float:
    """Relative error of the int8 operator with these source scales against the float64 convolution."""
    dims = [(1, c, SIZE, SIZE) for c in CHANNELS]
    plain = quant_concat_conv.plain_of(dims, FILTERS, Geometry((3, 3), pads=(1, 1, 1, 1)), "", {})
    zeros = np.zeros(FILTERS)
    (truth,) = concat_conv.OPERATOR.reference(plain, [*xs, pack(w, CHANNELS), zeros])
    w_scale = np.abs(w).max(axis=(1, 2, 3)) / 127
    operands = [rounded(x, s) for x, s in zip(xs, scales, strict=True)]
    filters = pack(rounded(w, w_scale[:, None, None, None]), CHANNELS)
    call = quant_concat_conv.make_call(plain, scales, "float32", None)
    (y,) = quant_concat_conv.OPERATOR.reference(call, [*operands, filters, w_scale, zeros])
    return float(np.sqrt(np.mean((y - truth) ** 2) / np.mean(truth**2)))


def main() -> int:
    rng = np.random.default_rng(0)
    print("| ratio of ranges | even: own | even: common | flat: own | flat: common |\n|---|---|---|---|---|")
    for ratio in (1, 2, 4, 8, 16, 32, 64):
        cells = []
        for even in (True, False):
            xs = [rng.standard_normal((1, c, SIZE, SIZE)) for c in CHANNELS]
            xs[1] /= ratio
            w = rng.standard_normal((FILTERS, sum(CHANNELS), 3, 3))
            if even:  # per-channel scales of the filter do not see the sources: keep the weights' range equal too
                keep = rng.random((FILTERS, CHANNELS[0], 3, 3)) < 1 / ratio**2
                w[:, : CHANNELS[0]] *= keep
            own = [float(np.abs(x).max()) / 127 for x in xs]
            cells += [error(xs, w, own), error(xs, w, [max(own)] * 2)]
        print(f"| {ratio} | " + " | ".join(f"{100 * c:.2f} %" for c in cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
