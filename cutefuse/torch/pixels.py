"""Images as the kernels read and write them: NHWC pixels of whole 16-byte vectors under a tensor of NCHW dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes that a kernel loads at once


def padded(channels: int, element_bytes: int) -> int:
    """Elements of a pixel that holds these channels in whole vectors."""
    step = ALIGNMENT // element_bytes
    return -(-channels // step) * step


def pixel_stride(x: Tensor) -> int:
    """Elements from pixel to pixel of an NCHW tensor that lies as NHWC pixels, perhaps in wider ones; 0 if it does not.

    An axis of one element has no stride that means anything.
    """
    (n, c, h, w), (sn, sc, sh, sw) = x.shape, x.stride()
    wide = padded(c, x.element_size())
    if x.numel() == 0:
        return wide
    if c > 1 and sc != 1:
        return 0
    pixel = sw if w > 1 else sh if h > 1 else sn if n > 1 else c if c == wide else 0
    fits = pixel >= c and (h == 1 or sh == w * pixel) and (n == 1 or sn == h * w * pixel)
    return int(pixel) if fits else 0


def as_pixels(x: Tensor) -> tuple[Tensor, int]:
    """The image as the kernels can read it, copied only where it does not lie so; its elements from pixel to pixel."""
    pixel = pixel_stride(x)
    if pixel and pixel % (ALIGNMENT // x.element_size()) == 0 and x.data_ptr() % ALIGNMENT == 0:
        return x, pixel
    return widened(x), padded(x.shape[1], x.element_size())


def is_narrow(x: Tensor) -> bool:
    """Whether an image has to be copied because its pixels are no whole vectors."""
    return x.dim() == 4 and pixel_stride(x) % (ALIGNMENT // x.element_size()) != 0


def widened(x: Tensor) -> Tensor:
    """A copy of an image as the kernels can read it. What its added channels hold has no effect on a result."""
    return empty_pixels(x.shape, x.dtype, x.device).copy_(x)


def empty_pixels(dims: Sequence[Any], dtype: torch.dtype, device: Any) -> Tensor:
    """An image of dims N, K, P, Q that a kernel can write: channels-last, its pixels whole vectors."""
    N, K, P, Q = dims
    wide = padded(K, dtype.itemsize)
    return torch.empty(N, P, Q, wide, dtype=dtype, device=device)[..., :K].permute(0, 3, 1, 2)
