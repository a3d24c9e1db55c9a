"""Pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.convolution import same_pads, torch_pads
from cutefuse.engines.pytorch.onnx_ops.node import Node, Run, operator

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_LOOP = 25  # pixels of a window from which on Inductor loops over them, two to four times slower than both axes in turn
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@dataclass(frozen=True, eq=False)
class Windowed:
    """A pool, a linear Resize or, in windows of one pixel, a Concat of images as PyTorch runs it, beside the attributes
    with which our kernels do (cutlass_kernels/window); `windows` knows it by its class."""

    run: Run
    attrs: Mapping[str, Any]

    def __call__(self, *xs: Tensor) -> Tensor:
        y: Tensor = self.run(*xs)
        return y


MAX, MEAN, LINEAR = 0, 1, 2  # the attribute `mode`


class _Window:
    """Geometry of a pooling node: `pads` as given, `end` the rows beyond them that `ceil_mode` reaches into."""

    def __init__(self, node: Node) -> None:
        size = node.shape(0)[2:]
        self.rank = len(size)
        if self.rank not in _MAX:
            raise node.refuse(f"it has {self.rank} spatial axes; 1, 2 or 3 can be pooled")
        self.kernel = list(node.attr("kernel_shape", []))
        if len(self.kernel) != self.rank:
            raise node.refuse(f"kernel_shape {self.kernel} does not fit {self.rank} spatial axes; repair the model")
        self.stride, self.dilation = (list(node.attr(n, [1] * self.rank)) for n in ("strides", "dilations"))
        extent = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        self.pads = same_pads(node, size, extent, self.stride)
        self.beyond = [0] * self.rank
        for axis in range(self.rank):
            begin, end = self.pads[axis], self.pads[axis + self.rank]
            room, stride = size[axis] + begin + end - extent[axis], self.stride[axis]
            count = (-(-room // stride) if node.attr("ceil_mode", 0) else room // stride) + 1
            if (count - 1) * stride >= size[axis] + begin:  # a window wholly outside the image is none
                count -= 1
            self.beyond[axis] = max(0, (count - 1) * stride + extent[axis] - (size[axis] + begin + end))

    @property
    def plain(self) -> bool:
        """Whether PyTorch's own pads express it."""
        rank = self.rank
        small = all(2 * p <= k for p, k in zip(self.pads, self.kernel * 2, strict=True))
        return self.pads[:rank] == self.pads[rank:] and small and not any(self.beyond)

    def attrs(self, mode: int, counts_pads: bool = False) -> dict[str, Any]:
        """As our kernels take it."""
        shape = {"kernel_shape": self.kernel, "strides": self.stride, "pads": self.pads, "dilations": self.dilation}
        return {"mode": [mode], **shape, "count_include_pad": [int(counts_pads)]}

    @property
    def all_pads(self) -> list[int]:
        return self.pads[: self.rank] + [e + b for e, b in zip(self.pads[self.rank :], self.beyond, strict=True)]


@operator("MaxPool")
def max_pool(node: Node) -> Run:
    if node.outputs > 1:
        raise node.refuse("its second output (Indices) is not supported; leave it out")
    window = _Window(node)
    run = _max_run(node, window)
    return Windowed(run, window.attrs(MAX)) if window.rank == 2 else run


def _max_run(node: Node, window: _Window) -> Run:
    function, kernel, stride, dilation = _MAX[window.rank], window.kernel, window.stride, window.dilation
    if window.plain:
        begin = window.pads[: window.rank]
        if window.rank == 2 and math.prod(kernel) >= _LOOP and min(kernel) > 1:
            return lambda x: _max_by_axis(x, window) if torch.compiler.is_compiling() else function(
                x, kernel, stride, begin, dilation
            )  # fmt: skip
        return lambda x: function(x, kernel, stride, begin, dilation)
    dtype = node.tensor(0).dtype
    least = float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
    pads = torch_pads(window.all_pads)
    return lambda x: function(F.pad(x, pads, value=least), kernel, stride, 0, dilation)


def _max_by_axis(x: Tensor, window: _Window) -> Tensor:
    """The largest of a window is the largest of its rows' largest."""
    (r, s), (u, v), (top, left), (d, e) = window.kernel, window.stride, window.pads[:2], window.dilation
    rows = F.max_pool2d(x, [r, 1], [u, 1], [top, 0], [d, 1])
    return F.max_pool2d(rows, [1, s], [1, v], [0, left], [1, e])


@operator("AveragePool")
def average_pool(node: Node) -> Run:
    window, counts_pads = _Window(node), bool(node.attr("count_include_pad", 0))
    run = _average_run(node, window, counts_pads)
    return Windowed(run, window.attrs(MEAN, counts_pads)) if window.rank == 2 else run


def _average_run(node: Node, window: _Window, counts_pads: bool) -> Run:
    function, kernel, stride, begin = _AVERAGE[window.rank], window.kernel, window.stride, window.pads[: window.rank]
    dilated = any(d != 1 for d in window.dilation)
    if window.plain and not dilated:
        return lambda x: function(x, kernel, stride, begin, False, counts_pads)
    # Sums of the padded image over the number of pixels that count, which is known at load.
    x = node.tensor(0)
    ones = torch.ones(1, 1, *x.shape[2:])
    counted = F.pad(ones, torch_pads(window.pads), value=1.0) if counts_pads else ones
    rest = [0] * window.rank + window.beyond if counts_pads else window.all_pads
    counts = _sums(F.pad(counted, torch_pads(rest)), window)
    node.constant((1 / counts).to(x.dtype))
    pads = torch_pads(window.all_pads)
    return lambda x, inverse: _sums(F.pad(x, pads), window) * inverse


@operator("LpPool")
def lp_pool(node: Node) -> Run:
    window, p = _Window(node), node.attr("p", 2)
    if p < 1:
        raise node.refuse(f"p is {p}; give 1 or more")
    pads = torch_pads(window.all_pads)

    def run(x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # float16 ends at the square of 256
        powers = wide.abs() if p == 1 else wide.abs() ** p
        sums = _sums(F.pad(powers, pads), window)
        return (sums if p == 1 else sums ** (1 / p)).to(x.dtype)

    return run


def _sums(x: Tensor, window: _Window) -> Tensor:
    """The sum of each window of a padded image."""
    total: Tensor | None = None
    for tap in itertools.product(*(range(k) for k in window.kernel)):
        part = x
        for axis, (t, s, d, k) in enumerate(zip(tap, window.stride, window.dilation, window.kernel, strict=True)):
            count = (x.shape[axis + 2] - d * (k - 1) - 1) // s + 1
            part = part[(slice(None),) * (axis + 2) + (slice(t * d, t * d + (count - 1) * s + 1, s),)]
        total = part if total is None else total + part
    assert total is not None
    return total


@operator("GlobalAveragePool", "GlobalMaxPool")
def global_pool(node: Node) -> Run:
    axes = tuple(range(2, node.rank(0)))
    if node.op_type == "GlobalMaxPool":
        return lambda x: torch.amax(x, axes, keepdim=True)
    return mean_of_images(node, lambda x: torch.mean(x, axes, keepdim=True))


def mean_of_images(node: Node, run: Run) -> Run:
    """The mean of each channel over an image's rows and columns, both kept."""
    return Windowed(run, {"mode": [MEAN], "kernel_shape": node.shape(0)[2:]}) if node.rank(0) == 4 else run
