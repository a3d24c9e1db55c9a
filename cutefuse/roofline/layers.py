"""Single layers under the roof, from their sizes alone: what they compute, and the least that they read and write.

Every tensor counts once: inputs and weights are read, outputs written, nothing twice. Real kernels move more, and a
layer too small to fill the chip is slower than any roof says. Formulas and the table of common layers:
https://docs.nvidia.com/deeplearning/performance/dl-performance-gpu-background/index.html
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from cutefuse.errors import CutefuseError
from cutefuse.roofline.peaks import DTYPE_BITS, Peaks

_LARGEST = 1 << 40  # of one size; beyond it something was mistyped


@dataclass(frozen=True)
class Layer:
    """One layer: `flops` operations over `elements` of tensors read or written once, all of type `dtype`."""

    name: str
    flops: float
    elements: float
    dtype: str = "FP16"

    @property
    def size_bytes(self) -> float:
        return self.elements * DTYPE_BITS[self.dtype] / 8


def matmul(m: int, k: int, n: int, batch: int = 1, *, dtype: str = "FP16", name: str = "") -> Layer:
    """[m, k] x [k, n] -> [m, n], `batch` times: 2*m*k*n operations over m*k + k*n + m*n elements each."""
    title = name or "matmul " + "x".join(str(d) for d in ([batch] if batch > 1 else []) + [m, k, n])
    return Layer(title, 2.0 * batch * m * k * n, float(batch * (m * k + k * n + m * n)), dtype)


def conv(n: int, c: int, h: int, w: int, k: int, r: int, s: int = 0, stride: int = 1, *, dtype: str = "FP16") -> Layer:
    """[n, c, h, w] and a filter [k, c, r, s] (s = r where it is 0), padded so that stride 1 keeps the image's size."""
    s = s or r
    p, q = math.ceil(h / stride), math.ceil(w / stride)
    title = f"conv {c}->{k} {r}x{s} @{h}x{w}" + (f" batch {n}" if n > 1 else "") + f" /{stride}" * (stride > 1)
    return Layer(title, 2.0 * n * k * p * q * c * r * s, float(n * c * h * w + k * c * r * s + n * k * p * q), dtype)


def common_layers(dtype: str = "FP16") -> list[Layer]:
    """The common layers of NVIDIA's guide to GPU performance, of any size where the size does not count."""
    each = 1e6  # elements of an image; it cancels
    return [
        matmul(512, 1024, 4096, dtype=dtype, name="Linear 1024 -> 4096, batch 512"),
        matmul(1, 1024, 4096, dtype=dtype, name="Linear 1024 -> 4096, batch 1"),
        Layer("MaxPool 3x3, stride 1", 9 * each, 2 * each, dtype),
        Layer("ReLU", each, 2 * each, dtype),
        # Mean 1, variance 3, centring and scaling 2, gamma and beta 2 operations an element.
        Layer("LayerNorm", 8 * each, 2 * each, dtype),
        Layer("Concat", 0.0, 2 * each, dtype),
    ]


def _sizes(text: str, option: str, counts: tuple[int, ...], form: str) -> list[int]:
    """The whole numbers of "512x1024x4096" or "512,1024,4096", as many as one of `counts`."""
    words = re.split(r"[x,]", text.strip())
    if len(words) not in counts or not all(re.fullmatch(r"[0-9]+", w) and 0 < int(w) <= _LARGEST for w in words):
        raise CutefuseError(f"{option} is {text}; give {form}, whole numbers above 0")
    return [int(w) for w in words]


def matmul_from(text: str, dtype: str) -> Layer:
    """The product of `--matmul MxKxN` or `BxMxKxN`. Raises CutefuseError for another form."""
    *batch, m, k, n = _sizes(text, "--matmul", (3, 4), "MxKxN such as 512x1024x4096, or BxMxKxN")
    return matmul(m, k, n, *batch, dtype=dtype)


def conv_from(text: str, dtype: str) -> Layer:
    """The convolution of `--conv N,C,H,W,K,R[,S[,stride]]`. Raises CutefuseError for another form."""
    form = "N,C,H,W,K,R such as 1,128,64,64,64,3, with S and the stride behind where they are not R and 1"
    return conv(*_sizes(text, "--conv", (6, 7, 8), form), dtype=dtype)


def layer_view(layer: Layer, peaks: Peaks) -> dict[str, Any]:
    """A layer under a device's roof: operations, bytes, FLOP per byte, its bound, TFLOP/s at most, least us.

    Raises CutefuseError where the device has no peak for the layer's type.
    """
    return {
        "layer": layer.name, "type": layer.dtype, "device": peaks.device, "flops": layer.flops,
        "bytes": layer.size_bytes, **vars(peaks.known_roof(layer.dtype, layer.flops, layer.size_bytes)),
    }  # fmt: skip
