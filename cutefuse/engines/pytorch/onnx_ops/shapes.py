"""Operators that move or shape tensors without arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.convolution import torch_pads
from cutefuse.engines.pytorch.onnx_ops.node import Node, Run, dtype_of, elements, operator
from cutefuse.engines.pytorch.onnx_ops.pooling import MAX, Windowed

_MAX_KNOWN_ELEMENTS = 1 << 28  # a constant beyond 1 GiB of float32 is a mistake in the model


def tensor_of(proto: onnx.TensorProto, where: str) -> Tensor:
    """An ONNX tensor as a PyTorch tensor of the same type."""
    dtype = dtype_of(proto.data_type, where)
    if dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        wide = onnx.numpy_helper.to_array(proto).astype(np.float32)
        return torch.from_numpy(wide).to(dtype)
    return torch.from_numpy(np.array(onnx.numpy_helper.to_array(proto)))  # a copy: torch wants writable memory


@operator("Constant")
def constant(node: Node) -> Tensor:
    for name, value in node.attrs.items():
        if name == "value":
            return tensor_of(value, f"Constant '{node.name}'")
        if name in ("value_float", "value_floats"):
            return torch.tensor(value, dtype=torch.float32)
        if name in ("value_int", "value_ints"):
            return torch.tensor(value, dtype=torch.int64)
    raise node.refuse("it holds no dense tensor of numbers; repair the model")


@operator("ConstantOfShape")
def constant_of_shape(node: Node) -> Tensor:
    shape, value = node.ints(0), node.attr("value", None)
    if elements(shape) > _MAX_KNOWN_ELEMENTS or any(d < 0 for d in shape):
        raise node.refuse(f"its shape {shape} is negative or beyond {_MAX_KNOWN_ELEMENTS} elements; repair the model")
    fill = torch.zeros(1) if value is None else tensor_of(value, f"ConstantOfShape '{node.name}'")
    return fill.reshape(()).expand(shape).clone()


@operator("Shape")
def shape_of(node: Node) -> Tensor:
    return torch.tensor(node.shape(0)[node.attr("start", 0) : node.attr("end", None)], dtype=torch.int64)


@operator("Size")
def size_of(node: Node) -> Tensor:
    return torch.tensor(elements(node.shape(0)), dtype=torch.int64)


@operator("Range")
def number_range(node: Node) -> Tensor:
    start, limit, delta = (node.known(i).item() for i in range(3))
    if not delta or (limit - start) / delta > _MAX_KNOWN_ELEMENTS:
        raise node.refuse(f"its step is {delta} from {start} to {limit}; repair the model")
    dtype = node.tensor(0).dtype
    return torch.from_numpy(np.arange(start, limit, delta)).to(dtype)


@operator("EyeLike")
def eye_like(node: Node) -> Tensor:
    rows, columns = node.shape(0)
    dtype = dtype_of(node.attr("dtype", 0), f"EyeLike '{node.name}'") if "dtype" in node.attrs else node.tensor(0).dtype
    return torch.from_numpy(np.eye(rows, columns, node.attr("k", 0))).to(dtype)


@operator("Reshape", host=(1,))
def reshape(node: Node) -> Run:
    old, new = node.shape(0), node.ints(1) if node.opset >= 5 else list(node.attr("shape", []))
    if not node.attr("allowzero", 0):
        new = [old[i] if d == 0 and i < len(old) else d for i, d in enumerate(new)]
    known = elements([d for d in new if d != -1])
    if new.count(-1) > 1 or (known == 0 and -1 in new and 0 not in old):
        raise node.refuse(f"{old} cannot become {new}; repair the model")
    if -1 in new:
        new[new.index(-1)] = elements(old) // known if known else 0
    if elements(new) != elements(old):
        raise node.refuse(f"{old} cannot become {new}; repair the model, or give other input shapes")
    return lambda x: x.reshape(new)


@operator("Flatten")
def flatten(node: Node) -> Run:
    shape, axis = node.shape(0), node.attr("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    new = [elements(shape[:axis]), elements(shape[axis:])]
    return lambda x: x.reshape(new)


@operator("Squeeze", host=(1,))
def squeeze(node: Node) -> Run:
    shape = node.shape(0)
    axes = node.axes(1, None, len(shape), 13)
    axes = [i for i, d in enumerate(shape) if d == 1] if axes is None else axes
    if any(shape[a] != 1 for a in axes):
        raise node.refuse(f"axes {axes} of {shape} are not all 1; repair the model")
    return lambda x: x.squeeze(tuple(axes))


@operator("Unsqueeze", host=(1,))
def unsqueeze(node: Node) -> Run:
    given = node.ints(1) if node.opset >= 13 else list(node.attr("axes", []))
    rank = node.rank(0) + len(given)
    shape = node.shape(0)
    for axis in sorted(node.axis(a, rank) for a in given):
        shape.insert(axis, 1)
    return lambda x: x.reshape(shape)


@operator("Transpose")
def transpose(node: Node) -> Run:
    order = list(node.attr("perm", range(node.rank(0))[::-1]))
    return lambda x: x.permute(order)


@operator("Concat")
def concat(node: Node) -> Run:
    axis = node.axis(node.attr("axis", 1), node.rank(0))
    if len(node.inputs) == 1:
        return lambda x: x
    run: Run = lambda *xs: torch.cat(xs, axis)  # noqa: E731
    return Windowed(run, {"mode": [MAX]}) if axis == 1 and node.rank(0) == 4 else run


@operator("Split", host=(1,))
def split(node: Node) -> Run:
    axis = node.axis(node.attr("axis", 0), node.rank(0))
    size = node.shape(0)[axis]
    sizes = node.ints(1) if node.opset >= 13 and node.has(1) else list(node.attr("split", []))
    if not sizes:
        count = node.attr("num_outputs", node.outputs)
        step = -(-size // count)
        sizes = [max(0, min(step, size - i * step)) for i in range(count)]
    if sum(sizes) != size:
        raise node.refuse(f"parts {sizes} do not add up to axis {axis} of {size}; repair the model")
    return lambda x: torch.split(x, sizes, axis)


@operator("Slice", host=(1, 2, 3, 4))
def slice_of(node: Node) -> Run:
    shape = node.shape(0)
    if node.opset >= 10:
        starts, ends = node.ints(1), node.ints(2)
        axes = node.ints(3) if node.has(3) else list(range(len(starts)))
        steps = node.ints(4) if node.has(4) else [1] * len(starts)
    else:
        starts, ends = list(node.attr("starts", [])), list(node.attr("ends", []))
        axes, steps = list(node.attr("axes", range(len(starts)))), [1] * len(starts)
    cuts, backwards = [slice(None)] * len(shape), list[int]()
    for start, end, given, step in zip(starts, ends, axes, steps, strict=True):
        axis = node.axis(given, len(shape))
        if step == 0:
            raise node.refuse("its step is 0; repair the model")
        taken = range(shape[axis])[slice(start, end, step)]
        if step < 0:  # PyTorch has no such step: what is taken forwards is turned round
            taken = taken[::-1]
            backwards.append(axis)
        cuts[axis] = slice(taken.start, taken.stop, taken.step) if taken else slice(0, 0)
    index = tuple(cuts)
    return lambda x: x[index].flip(backwards) if backwards else x[index]


@operator("Pad", host=(1, 2, 3))
def pad(node: Node) -> Run:
    rank, mode = node.rank(0), node.attr("mode", "constant")
    if node.opset >= 11:
        pads, value = node.ints(1), node.number(2) if node.has(2) else 0.0
    else:
        pads, value = list(node.attr("pads", [])), node.attr("value", 0.0)
    if node.has(3):
        axes = [node.axis(a, rank) for a in node.ints(3)]
        full = [0] * 2 * rank
        for i, axis in enumerate(axes):
            full[axis], full[axis + rank] = pads[i], pads[i + len(axes)]
        pads = full
    if len(pads) != 2 * rank:
        raise node.refuse(f"{len(pads)} pads do not fit rank {rank}; repair the model")
    if mode == "constant":
        plain = torch_pads(pads)
        if node.tensor(0).dtype == torch.bool:
            return lambda x: F.pad(x.to(torch.uint8), plain, value=value).to(torch.bool)
        return lambda x: F.pad(x, plain, value=value)
    if mode not in ("reflect", "edge", "wrap"):
        raise node.refuse(f"mode {mode} is unknown; use constant, reflect, edge or wrap")
    changed: list[int] = []  # axes, whose orders are the constants
    for axis, size in enumerate(node.shape(0)):
        begin, end = pads[axis], pads[axis + rank]
        if begin or end:
            inside = np.arange(max(0, -begin), size - max(0, -end))
            order = np.pad(inside, (max(0, begin), max(0, end)), mode=mode)  # numpy has the same names
            changed.append(axis)
            node.constant(torch.from_numpy(order))

    def run(x: Tensor, *orders: Tensor) -> Tensor:
        for axis, order in zip(changed, orders, strict=True):
            x = x.index_select(axis, order)
        return x

    return run


@operator("Expand", host=(1,))
def expand(node: Node) -> Run:
    shape = list(torch.broadcast_shapes(tuple(node.shape(0)), tuple(node.ints(1))))
    return lambda x: x.expand(shape)


@operator("Tile", host=(1,))
def tile(node: Node) -> Run:
    repeats = node.ints(1)
    return lambda x: x.repeat(repeats)


@operator("DepthToSpace")
def depth_to_space(node: Node) -> Run:
    size, mode = node.attr("blocksize", 1), node.attr("mode", "DCR")
    if mode == "CRD":
        return lambda x: F.pixel_shuffle(x, size)
    n, c, h, w = node.shape(0)
    inner, outer = [n, size, size, c // size**2, h, w], [n, c // size**2, h * size, w * size]
    return lambda x: x.reshape(inner).permute(0, 3, 4, 1, 5, 2).reshape(outer)


@operator("SpaceToDepth")
def space_to_depth(node: Node) -> Run:
    size = node.attr("blocksize", 1)
    n, c, h, w = node.shape(0)
    inner, outer = [n, c, h // size, size, w // size, size], [n, c * size**2, h // size, w // size]
    return lambda x: x.reshape(inner).permute(0, 3, 5, 1, 2, 4).reshape(outer)


@operator("Trilu", host=(1,))
def triangle(node: Node) -> Run:
    k = int(node.number(1)) if node.has(1) else 0
    function: Any = torch.triu if node.attr("upper", 1) else torch.tril
    return lambda x: function(x, k)
