"""Images as the kernels read and write them: NHWC pixels of whole 16-byte vectors under a tensor of NCHW dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
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
    pixel = pixel_in_place(x, pixel_stride(x) or _wide_pixel(x))
    return (x, pixel) if pixel else (widened(x), padded(x.shape[1], x.element_size()))


def as_given(x: Tensor) -> tuple[Tensor, int]:
    """An image as a network is given it: NCHW as it lies (0), or its elements from pixel to pixel."""
    pixel = 0 if x.is_contiguous() else pixel_stride(x)
    if x.data_ptr() % ALIGNMENT == 0 and (pixel or x.is_contiguous()):
        return x, pixel
    return x.clone(memory_format=torch.contiguous_format), 0


def pixel_in_place(x: Tensor, pixel: int | None = None) -> int:
    """Elements from pixel to pixel, by default those of the strides, of an image that the kernels can read as it lies;
    else 0."""
    pixel = pixel_stride(x) if pixel is None else pixel
    return 0 if pixel % (ALIGNMENT // x.element_size()) or x.data_ptr() % ALIGNMENT else pixel


def _wide_pixel(x: Tensor) -> int:
    """Elements of an image's only pixel whose memory goes on for a whole vector, as our outputs' does; else 0."""
    wide = padded(x.shape[1], x.element_size())
    end = (x.storage_offset() + wide) * x.element_size()
    return wide if _is_one_pixel(x) and end <= x.untyped_storage().nbytes() else 0


def _is_one_pixel(x: Tensor) -> bool:
    return x.shape[0] == x.shape[2] == x.shape[3] == 1 and x.stride(1) == 1


def is_narrow(x: Tensor) -> bool:
    """Whether an image has to be copied because its pixels are no whole vectors, or do not begin with one."""
    step = ALIGNMENT // x.element_size()
    return x.dim() == 4 and (pixel_stride(x) % step != 0 or x.storage_offset() % step != 0)


def fusible(x: Tensor) -> Tensor:
    """While torch.compile traces: the image as the kernels read it, laid out by PyTorch's own operators. What makes the
    image then writes it so, where a copy within our operator, which the compiler cannot see into, is a kernel more.
    Elsewhere the image itself.
    """
    if not torch.compiler.is_compiling() or x.dim() != 4 or _is_one_pixel(x):
        return x
    pixel = pixel_stride(x)
    return x if pixel and pixel % (ALIGNMENT // x.element_size()) == 0 else laid_out(x)


def laid_out(x: Tensor) -> Tensor:
    """What `widened` makes, by PyTorch's own operators."""
    C = x.shape[1]
    extra = padded(C, x.element_size()) - C
    wide = F.pad(x, (0, 0, 0, 0, 0, extra)) if extra else x
    return wide.contiguous(memory_format=torch.channels_last)[:, :C]


def widened(x: Tensor) -> Tensor:
    """A copy of an image as the kernels can read it. What its added channels hold has no effect on a result."""
    return empty_pixels(x.shape, x.dtype, x.device).copy_(x)


def empty_pixels(dims: Sequence[Any], dtype: torch.dtype, device: Any) -> Tensor:
    """An image of dims N, K, P, Q that a kernel can write: channels-last, its pixels whole vectors."""
    N, K, P, Q = dims
    wide = padded(K, dtype.itemsize)
    return torch.empty(N, P, Q, wide, dtype=dtype, device=device)[..., :K].permute(0, 3, 1, 2)
