"""Convolutions: one call of cuDNN each, pads of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.node import Node, Run, operator

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def same_pads(node: Node, size: list[int], extent: list[int], stride: list[int]) -> list[int]:
    """Pads of `auto_pad`: ONNX order, all beginnings before all ends. `extent`: filter size with its dilation."""
    kind = node.attr("auto_pad", "NOTSET")
    if kind == "NOTSET":
        return [int(p) for p in node.attr("pads", [0] * 2 * len(size))]
    if kind == "VALID":
        return [0] * 2 * len(size)
    if kind not in ("SAME_UPPER", "SAME_LOWER"):
        raise node.refuse(f"auto_pad {kind} is unknown; use NOTSET with pads")
    total = [max(0, (-(-i // s) - 1) * s + e - i) for i, e, s in zip(size, extent, stride, strict=True)]
    less, more = [t // 2 for t in total], [t - t // 2 for t in total]
    return less + more if kind == "SAME_UPPER" else more + less


def torch_pads(pads: list[int]) -> list[int]:
    """ONNX pads (all beginnings, then all ends) in the order of F.pad: last axis first, beginning and end."""
    rank = len(pads) // 2
    return [p for axis in reversed(range(rank)) for p in (pads[axis], pads[axis + rank])]


@dataclass(frozen=True, eq=False)
class Convolution:
    """A forward convolution; `merge` knows it by its class."""

    stride: list[int]
    pads: list[int]  # ONNX order
    dilation: list[int]
    groups: int
    filters: int

    @property
    def symmetric(self) -> bool:
        rank = len(self.stride)
        return self.pads[:rank] == self.pads[rank:]

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        rank = len(self.stride)
        padding: Any = self.pads[:rank]
        if not self.symmetric:
            x, padding = F.pad(x, torch_pads(self.pads)), [0] * rank
        return _CONVOLVE[rank](x, w, b, self.stride, padding, self.dilation, self.groups)


@operator("Conv", filters=(1,))
def convolution(node: Node) -> Run:
    rank = node.rank(0) - 2
    if rank not in _CONVOLVE:
        raise node.refuse(f"it has {rank} spatial axes; 1, 2 or 3 can be convolved")
    kernel = node.shape(1)[2:]
    stride, dilation = (list(node.attr(name, [1] * rank)) for name in ("strides", "dilations"))
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    pads = same_pads(node, node.shape(0)[2:], extent, stride)
    if any(p < 0 for p in pads):
        raise node.refuse(f"pads {pads} are negative; use a Slice in front of it")
    return Convolution(stride, pads, dilation, node.attr("group", 1), node.shape(1)[0])


@operator("ConvTranspose", filters=(1,))
def transposed_convolution(node: Node) -> Run:
    rank = node.rank(0) - 2
    if rank not in _TRANSPOSED:
        raise node.refuse(f"it has {rank} spatial axes; 1, 2 or 3 can be convolved")
    kernel, size = node.shape(1)[2:], node.shape(0)[2:]
    stride, dilation = (list(node.attr(name, [1] * rank)) for name in ("strides", "dilations"))
    extra, groups = list(node.attr("output_padding", [0] * rank)), node.attr("group", 1)
    full = [s * (i - 1) + d * (k - 1) + 1 for s, i, d, k in zip(stride, size, dilation, kernel, strict=True)]
    wanted, kind = node.attr("output_shape", None), node.attr("auto_pad", "NOTSET")
    if wanted is not None or kind.startswith("SAME"):
        sizes = wanted[-rank:] if wanted is not None else [i * s for i, s in zip(size, stride, strict=True)]
        extra = [max(e, w - f) for f, e, w in zip(full, extra, sizes, strict=True)]
        total = [f + e - w for f, e, w in zip(full, extra, sizes, strict=True)]
        less, more = [t // 2 for t in total], [t - t // 2 for t in total]
        pads = less + more if kind == "SAME_UPPER" else more + less
    else:
        pads = [0] * 2 * rank if kind == "VALID" else list(node.attr("pads", [0] * 2 * rank))
    function = _TRANSPOSED[rank]
    begin, end = pads[:rank], pads[rank:]
    if begin == end and all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        return lambda x, w, b=None: function(x, w, b, stride, begin, extra, groups, dilation)

    # Asymmetric: the whole result, then its middle. Output padding beyond it holds the bias alone.
    around = torch_pads([*(-b for b in begin), *(o - e for o, e in zip(extra, end, strict=True))])

    def run(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = F.pad(function(x, w, None, stride, 0, 0, groups, dilation), around)
        return y if b is None else y + b.reshape(-1, *[1] * rank)

    return run


# --------------------------------------------------------------------------------- what cuDNN computes in one kernel
@dataclass(frozen=True, eq=False)
class ConvolutionRelu:
    """relu(conv(x, w) + b [+ z]) in one call of cuDNN; in two or three elsewhere, and `apart`."""

    inner: Convolution
    apart: bool = False

    def __call__(self, x: Tensor, w: Tensor, b: Tensor, z: Tensor | None = None) -> Tensor:
        c = self.inner
        if x.is_cuda and not self.apart:
            padding = c.pads[: len(c.stride)]
            if z is None:
                return torch.cudnn_convolution_relu(x, w, b, c.stride, padding, c.dilation, c.groups)
            return torch.cudnn_convolution_add_relu(x, w, z, 1.0, b, c.stride, padding, c.dilation, c.groups)
        y = c(x, w, b)
        return torch.relu(y if z is None else y + z)
