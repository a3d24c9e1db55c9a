"""Nodes that compute the same whatever the order of their axes, and how one is written for another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import NodeProto, helper

from cutefuse.graph.body import DOMAIN
from cutefuse.graph.read import Graph, attribute, remove
from cutefuse.kernels import facts
from cutefuse.match.qdq import kind_of
from cutefuse.operators.layouts import HWC8, LAYOUT, NHWC, TO_NCHW, TO_NHWC

RANK = 4
FLAT = 3  # rank of an image whose rows are one axis
_POINTWISE = frozenset(
    "Add Sub Mul Div Max Min Sum Mean Pow PRelu Relu LeakyRelu Clip Sigmoid HardSigmoid HardSwish Swish Tanh Elu Selu "
    "Celu Gelu Softplus Softsign Mish Erf Exp Log Sqrt Abs Neg Reciprocal Floor Ceil Round Cast Identity".split()
)
_ALONG_AXIS = {"Concat": 1, "Split": 0}  # default of the attribute `axis`
_BROADCAST_OPSET = 7  # before it operands were aligned by an attribute

Store = Callable[[str, np.ndarray], str]  # keeps a new constant under a name like the given one; returns its name


def fused_ports(node: NodeProto) -> list[int] | None:
    """The inputs of a fused convolution that have its layout; None for another node."""
    if node.domain != DOMAIN or (found := facts(node.op_type))["kind"] != "convolution":
        return None
    sources = 0 if found["image"] else found["sources"]  # an image stays NCHW
    return [*range(sources), *([len(node.input) - 1] if found["residual"] else [])]


def is_pointwise(node: NodeProto) -> bool:
    """Whether a node computes each element from those at its place."""
    return node.op_type in _POINTWISE


def is_nhwc(node: NodeProto) -> bool:
    """Whether a fused node takes and gives NHWC tensors."""
    return fused_ports(node) is not None and attribute(node, LAYOUT, HWC8) == NHWC


def turned_axes(perm: Sequence[int], rank: int) -> tuple[int, ...]:
    """The order of axes that images get: `perm`, and channels past pixels where the rows are one axis."""
    return (0, 2, 1) if rank == FLAT else tuple(perm)


def ports(graph: Graph, node: NodeProto, perm: Sequence[int] = TO_NHWC) -> list[int] | None:
    """The inputs that are images, where the node can be written for the order `perm` of their axes; None where not."""
    if graph.is_op(node, "Reshape"):
        return [0] if _flattens(graph, node, perm) else None
    if any(len(graph.dims(o) or ()) != RANK for o in node.output if o):
        return None
    if kind_of(node, graph):
        scale = graph.dims(node.input[1])
        return [0] if scale is not None and len(scale) <= 1 and _is_image(graph, node.input[0]) else None
    if graph.is_op(node, *_POINTWISE) and graph.opset >= _BROADCAST_OPSET:
        images = [i for i, name in enumerate(node.input) if name and _is_image(graph, name)]
        others = (name for i, name in enumerate(node.input) if name and i not in images)
        return images if images and all(_is_turnable(graph, name) for name in others) else None
    if graph.is_op(node, *_ALONG_AXIS):
        images = [i for i, name in enumerate(node.input) if _is_image(graph, name)]
        whole = len(images) == (len(node.input) if node.op_type == "Concat" else 1) and 0 in images
        return images if whole and attribute(node, "axis", _ALONG_AXIS[node.op_type]) in range(-RANK, RANK) else None
    if graph.is_op(node, "Slice"):
        return [0] if _is_image(graph, node.input[0]) and graph.slice_bounds(node) else None
    return None


def turn(graph: Graph, node: NodeProto, perm: Sequence[int], store: Store) -> None:
    """Write a node, whose `ports` are not None, for images whose axes were put into the order `perm`."""
    images = ports(graph, node, perm)
    assert images is not None
    if node.op_type == "Reshape":
        batch, *sizes = graph.dims(node.output[0]) or ()
        order = turned_axes(perm, 1 + len(sizes))[1:]
        node.input[1] = store(node.input[1], np.array([max(batch, -1), *(sizes[a - 1] for a in order)], np.int64))
        return
    if kind_of(node, graph):
        if graph.dims(node.input[1]) not in ((), (1,)):
            _set(node, "axis", _moved(attribute(node, "axis", 1), perm))
    elif node.op_type in _ALONG_AXIS:
        _set(node, "axis", _moved(attribute(node, "axis", _ALONG_AXIS[node.op_type]), perm))
    elif node.op_type == "Slice":
        _turn_slice(graph, node, perm, store)
    else:
        for i, name in enumerate(node.input):
            value = graph.constant(name) if name and i not in images else None
            if value is not None and value.size > 1:
                spread = value.reshape((1,) * (RANK - value.ndim) + value.shape)
                node.input[i] = store(name, np.ascontiguousarray(spread.transpose(perm)))


def _flattens(graph: Graph, node: NodeProto, perm: Sequence[int]) -> bool:
    """Whether a Reshape makes one axis of the rows and columns of an image, or two of one, and does nothing else."""
    ends = [graph.dims(t) or () for t in (node.input[0], node.output[0])]
    if sorted(map(len, ends)) != [3, RANK] or min(d for dims in ends for d in dims[1:]) < 1:
        return False
    flat, image = sorted(ends, key=len)
    if tuple(perm) == TO_NCHW:  # they are NHWC still
        return flat[2] == image[3] and flat[1] == image[1] * image[2]
    return flat[1] == image[1] and flat[2] == image[2] * image[3]


def _turn_slice(graph: Graph, node: NodeProto, perm: Sequence[int], store: Store) -> None:
    bounds = graph.slice_bounds(node)
    assert bounds is not None
    axes = [_moved(axis, perm) for axis in bounds[0]]
    if graph.opset < 10:
        _set(node, "axes", axes)
        return
    node.input.extend([""] * (4 - len(node.input)))
    # All bounds of a Slice have one type.
    kind = np.int32 if graph.dtype(node.input[1]) == "int32" else np.int64
    node.input[3] = store(node.input[3] or f"{node.output[0]}.axes", np.array(axes, kind))


def _moved(axis: int, perm: Sequence[int]) -> int:
    return list(perm).index(axis % RANK)


def _set(node: NodeProto, name: str, value: int | list[int]) -> None:
    remove(node.attribute, lambda a: a.name == name)
    node.attribute.append(helper.make_attribute(name, value))


def _is_image(graph: Graph, tensor: str) -> bool:
    return len(graph.dims(tensor) or ()) == RANK and not graph.is_constant(tensor)


def _is_turnable(graph: Graph, tensor: str) -> bool:
    """Whether a tensor that is no image can stand beside images of another order: as it is, or its constant turned."""
    dims = graph.dims(tensor)
    if dims is None or len(dims) > RANK:
        return False
    return all(d == 1 for d in dims) or graph.is_constant(tensor)
