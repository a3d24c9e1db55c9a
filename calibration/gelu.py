"""The polynomial of GELU in cutlass_kernels/conv/epilogue.cuh: `python -m calibration.gelu` prints it.

GELU is x times the normal distribution's function, which is sigmoid(x * Q(x^2)) for an even Q. Q of degree 4 is fitted
to the least largest error of the product, by least squares whose weights grow where the error is large.
"""

from __future__ import annotations

import math

import numpy as np

DEGREE = 4
LAST = 8.0  # beyond, the product is x or 0 to 1e-14


def coefficients() -> np.ndarray:
    """Of Q, the constant first."""
    x = np.linspace(1e-3, LAST, 6000)
    above, below = (np.array([math.erfc(sign * v / math.sqrt(2)) / 2 for v in x]) for sign in (-1, 1))
    powers = np.stack([x ** (2 * k) for k in range(DEGREE + 1)], 1)
    scale = np.abs(powers).max(0)
    wanted = np.log(above / below) / x
    steepness = x * x * above * below  # of the product over Q
    weight, found = np.ones_like(x), np.zeros(DEGREE + 1)
    for _ in range(300):
        w = steepness * weight
        found = np.linalg.lstsq(powers / scale * w[:, None], wanted * w, rcond=None)[0] / scale
        error = np.abs(x / (1 + np.exp(-x * (powers @ found))) - x * above)
        weight *= (1e-3 + error / error.max()) ** 0.3
        weight /= weight.max()
    return found


def largest_error(q: np.ndarray) -> float:
    """Of GELU by Q, over all x; it is the same for -x."""
    x = np.linspace(-LAST, LAST, 40001)
    exact = np.array([v * math.erfc(-v / math.sqrt(2)) / 2 for v in x])
    return float(np.abs(x / (1 + np.exp(-x * np.polyval(q[::-1], x * x))) - exact).max())


if __name__ == "__main__":
    q = coefficients()
    print("as powers of two:", ", ".join(f"{-c / math.log(2):.9g}f" for c in q))
    print(f"largest error {largest_error(q):.2g}")
