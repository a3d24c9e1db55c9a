"""Gather and scatter, and the operators whose result size depends on the data."""

from __future__ import annotations

import torch
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.node import Node, Run, elements, operator


@operator("Gather")
def gather(node: Node) -> Run:
    shape, axis = node.shape(0), node.axis(node.attr("axis", 0), node.rank(0))
    indices, size = node.tensor(1), shape[axis]
    new = shape[:axis] + list(indices.shape) + shape[axis + 1 :]
    if indices.device.type == "meta":
        return lambda x, i: x.index_select(axis, _from_front(i.reshape(-1), size)).reshape(new)
    if indices.numel() == 1 and size:
        index = int(indices.item())
        if not -size <= index < size:
            raise node.refuse(f"index {index} is outside of axis {axis} of {size}; repair the model")
        return lambda x, _i: x.select(axis, index).reshape(new)
    node.constant(_from_front(indices.reshape(-1), size))  # once, not at every run
    return lambda x, _i, row: x.index_select(axis, row).reshape(new)


def _from_front(indices: Tensor, size: int) -> Tensor:
    """Indices of an axis, where ONNX counts negative ones from its end."""
    return torch.where(indices < 0, indices + size, indices)


@operator("GatherElements")
def gather_elements(node: Node) -> Run:
    axis = node.axis(node.attr("axis", 0), node.rank(0))
    size = node.shape(0)[axis]
    return lambda x, i: torch.gather(x, axis, _from_front(i, size).long())


def _flat(indices: Tensor, sizes: list[int]) -> Tensor:
    """Rows of a tensor whose axes `sizes` are one, out of index tuples along the last axis."""
    row, *others = (_from_front(indices[..., axis], size) for axis, size in enumerate(sizes))
    for i, size in zip(others, sizes[1:], strict=True):
        row = row * size + i
    return row.long()


@operator("GatherND")
def gather_nd(node: Node) -> Run:
    batch, shape, index = node.attr("batch_dims", 0), node.shape(0), node.shape(1)
    depth = index[-1]
    sizes, rest = shape[batch : batch + depth], shape[batch + depth :]
    outer, rows, new = elements(shape[:batch]), elements(sizes), index[:-1] + rest

    def run(x: Tensor, i: Tensor) -> Tensor:
        row = _flat(i, sizes).reshape(outer, -1)
        if outer > 1:
            row = row + torch.arange(outer, device=row.device).unsqueeze(1) * rows
        return x.reshape([outer * rows, *rest]).index_select(0, row.reshape(-1)).reshape(new)

    return run


_HOW = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _reduction(node: Node) -> str:
    """The name that PyTorch has for `reduction`; "" for none."""
    how = node.attr("reduction", "none")
    if how not in ("none", *_HOW):
        raise node.refuse(f"reduction {how} is unknown; use none, add, mul, max or min")
    return _HOW.get(how, "")


@operator("ScatterND")
def scatter_nd(node: Node) -> Run:
    shape, how = node.shape(0), _reduction(node)
    depth = node.shape(1)[-1]
    sizes, rest = shape[:depth], shape[depth:]
    flat = [elements(sizes), elements(rest)]

    def run(x: Tensor, i: Tensor, updates: Tensor) -> Tensor:
        row = _flat(i, sizes).reshape(-1)
        values, whole = updates.reshape(-1, flat[1]), x.reshape(flat)
        if not how:
            return whole.index_copy(0, row, values).reshape(shape)
        rows = row.unsqueeze(1).expand(-1, flat[1])
        return whole.scatter_reduce(0, rows, values, how).reshape(shape)

    return run


@operator("ScatterElements", "Scatter")
def scatter_elements(node: Node) -> Run:
    axis, how = node.axis(node.attr("axis", 0), node.rank(0)), _reduction(node)
    size = node.shape(0)[axis]

    def run(x: Tensor, i: Tensor, updates: Tensor) -> Tensor:
        i = _from_front(i, size).long()
        return x.scatter_reduce(axis, i, updates, how) if how else x.scatter(axis, i, updates)

    return run


@operator("OneHot", host=(1,))
def one_hot(node: Node) -> Run:
    depth, rank = int(node.number(1)), node.rank(0)
    axis = node.axis(node.attr("axis", -1), rank + 1)

    def run(i: Tensor, values: Tensor) -> Tensor:
        i = _from_front(i.long(), depth).unsqueeze(axis)
        steps = torch.arange(depth, device=i.device).reshape([-1] + [1] * (rank - axis))
        return torch.where(i == steps, values[1], values[0])

    return run


@operator("NonZero", "NonMaxSuppression", "Unique", "Compress")
def of_unknown_size(node: Node) -> Run:
    raise node.refuse(
        "the size of its output depends on the data, so no CUDA graph can hold it; "
        "cut the model in front of it, or use TensorRT or ONNX Runtime"
    )
