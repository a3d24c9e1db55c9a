"""Reductions, softmax, sums along an axis, the largest of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.node import Node, Run, elements, operator
from cutefuse.engines.pytorch.onnx_ops.pooling import mean_of_images


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _sum(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return torch.sum(x, axes, keep, dtype=x.dtype)


_REDUCE: dict[str, Callable[[Tensor, tuple[int, ...], bool], Tensor]] = {
    "ReduceSum": _sum,
    "ReduceMean": torch.mean,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: _sum(x * x, axes, keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: _sum(x, axes, keep).log(),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
}  # fmt: skip


@operator(*_REDUCE, host=(1,))
def reduce(node: Node) -> Run:
    function, rank, keep = _REDUCE[node.op_type], node.rank(0), bool(node.attr("keepdims", 1))
    axes = node.axes(1, None, rank, 13 if node.op_type == "ReduceSum" else 18)
    if not axes:
        if node.attr("noop_with_empty_axes", 0):
            return lambda x: x
        axes = list(range(rank))
    chosen = tuple(axes)
    if not chosen:
        return lambda x: function(x.reshape(1), (0,), False)
    if not elements(node.shape(0)) and node.op_type in ("ReduceMax", "ReduceMin"):
        raise node.refuse("it reduces a tensor without elements; give other input shapes")
    whole = not node.tensor(0).is_floating_point()
    if whole and node.op_type == "ReduceMean":
        dtype, count = node.tensor(0).dtype, elements([node.shape(0)[a] for a in chosen])
        return lambda x: torch.div(torch.sum(x, chosen, keep), count, rounding_mode="trunc").to(dtype)
    run: Run = lambda x: function(x, chosen, keep)  # noqa: E731
    return mean_of_images(node, run) if (node.op_type, chosen, keep) == ("ReduceMean", (2, 3), True) else run


_SOFTMAX: dict[str, Callable[[Tensor, int], Tensor]] = {
    "Softmax": lambda x, axis: torch.softmax(x, axis),
    "LogSoftmax": lambda x, axis: torch.log_softmax(x, axis),
    "Hardmax": lambda x, axis: torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1),
}


@operator(*_SOFTMAX)
def softmax(node: Node) -> Run:
    function, rank = _SOFTMAX[node.op_type], node.rank(0)
    axis = node.axis(node.attr("axis", 1 if node.opset < 13 else -1), rank)
    if node.opset >= 13 or axis == rank - 1:
        return lambda x: function(x, axis)
    return lambda x: function(x.flatten(axis), axis).reshape(x.shape)  # before opset 13 over all axes from there on


@operator("CumSum", "CumProd", host=(1,))
def cumulative(node: Node) -> Run:
    function, neutral = (torch.cumsum, 0) if node.op_type == "CumSum" else (torch.cumprod, 1)
    axis = node.axis(int(node.number(1)), node.rank(0))
    exclusive, reverse = node.attr("exclusive", 0), node.attr("reverse", 0)
    before = max(node.shape(0)[axis] - 1, 0)

    def run(x: Tensor) -> Tensor:
        x = x.flip(axis) if reverse else x
        if exclusive:
            first = torch.full_like(x.narrow(axis, 0, x.shape[axis] - before), neutral)
            x = torch.cat([first, x.narrow(axis, 0, before)], axis)
        y = function(x, axis, dtype=x.dtype)
        return y.flip(axis) if reverse else y

    return run


@operator("ArgMax", "ArgMin")
def arg_extreme(node: Node) -> Run:
    function: Any = torch.argmax if node.op_type == "ArgMax" else torch.argmin
    axis, keep = node.axis(node.attr("axis", 0), node.rank(0)), bool(node.attr("keepdims", 1))
    if not node.attr("select_last_index", 0):
        return lambda x: function(x, axis, keep)
    last = node.shape(0)[axis] - 1
    return lambda x: last - function(x.flip(axis), axis, keep)


@operator("TopK", host=(1,))
def top_k(node: Node) -> Run:
    axis = node.axis(node.attr("axis", -1), node.rank(0))
    k = int(node.number(1)) if node.opset >= 10 else node.attr("k", 1)
    if not 0 <= k <= node.shape(0)[axis]:
        raise node.refuse(f"k is {k}, axis {axis} has {node.shape(0)[axis]} elements; give a smaller k")
    largest, ordered = bool(node.attr("largest", 1)), bool(node.attr("sorted", 1))
    return lambda x: tuple(torch.topk(x, k, axis, largest, ordered))
