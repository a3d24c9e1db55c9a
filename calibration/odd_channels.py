"""How much longer cuDNN takes where channels are no whole vectors: `ODD` of cutefuse/select/rules_torch.py.

data/odd_channels_h200.csv holds microseconds of float16 convolutions in PyTorch, stride 1, operands in no cache, over C
channels (odd_us) and over the next multiple of eight (whole_us).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from calibration import fit, rows
from cutefuse.select.rules_torch import ODD, odd_channels_us
from cutefuse.select.times import Convolution, device_of


def report() -> Iterator[str]:
    """The lines of the report: errors now and refitted."""
    recorded = rows.read("odd_channels_h200.csv")
    odd_us, whole_us = (np.array([float(row[key]) for row in recorded]) for key in ("odd_us", "whole_us"))
    convs, device = [convolution_of(row) for row in recorded], device_of(rows.SM, "H200")

    def predict(constants: Mapping[str, float], chosen: np.ndarray) -> np.ndarray:
        longer = [odd_channels_us(device, convs[i], constants) for i in np.flatnonzero(chosen)]
        return np.asarray(whole_us[chosen] + longer)

    yield f"channels that are no whole vectors, {len(recorded)} convolutions"
    yield from fit.outcome(predict, odd_us, ODD, hold=0.02)


def convolution_of(row: Mapping[str, str]) -> Convolution:
    """The convolution of a row, over its C channels."""
    N, H, W, C, K, R = (int(row[key]) for key in "NHWCKR")
    return Convolution(N, C, H, W, K, H, W, R * R, "float16")
