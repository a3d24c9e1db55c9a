"""How wide number types are; of those that tensors are quantised to, how values are rounded to them, and how far their
neighbours are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Number:
    """A number type with an explicit, symmetric quantisation: `q = round(x / scale)`, nearest, ties to even.

    name: as NumPy and the kernel library call it. word: in titles and names. lowest, highest: what larger values
    become. opset: the first whose QuantizeLinear and DequantizeLinear know it, the latter along an axis.
    ir_version: the first of a file that may store it. mantissa: stored bits of it; None for integers.
    """

    name: str
    word: str
    lowest: float
    highest: float
    opset: int
    ir_version: int
    mantissa: int | None = None

    def round(self, values: Any) -> np.ndarray:
        """The nearest numbers, in this type; float8 keeps NaN."""
        limited = np.clip(np.asarray(values), self.lowest, self.highest)
        step = self.step(limited)  # a power of two: dividing by it is exact, and a cast alone would round twice
        return (np.rint(limited / step) * step).astype(np.dtype(self.name))

    def step(self, values: Any) -> np.ndarray:
        """From each number to the next larger one in magnitude (float64)."""
        if self.mantissa is None:
            return np.ones(np.shape(values))
        tiny = float(ml_dtypes.finfo(self.name).smallest_normal)
        _, exponents = np.frexp(np.maximum(np.abs(np.asarray(values, np.float64)), tiny))
        return np.ldexp(1.0, exponents - 1 - self.mantissa)


HALVES = ("float16", "bfloat16")
FLOATS = ("float32", *HALVES)
LARGEST = {name: float(ml_dtypes.finfo(name).max) for name in HALVES}
INT8 = Number("int8", "int8", -128.0, 127.0, opset=13, ir_version=3)
FLOAT8 = Number("float8_e4m3fn", "float8", -448.0, 448.0, opset=19, ir_version=9, mantissa=3)
NUMBERS = {n.name: n for n in (INT8, FLOAT8)}
ELEMENT_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, INT8.name: 1, FLOAT8.name: 1, "int32": 4, "int64": 8, "float64": 8,
    "bool": 1,
}  # fmt: skip
