"""Recognises RMSNorm and LayerNorm in ONNX graphs: single nodes, and the forms into which exporters decompose them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from cutefuse.graph.numbers import HALVES
from cutefuse.graph.read import Graph, attribute, label
from cutefuse.match.answer import Refusal
from cutefuse.match.sizes import ALIKE

SINGLE = {"LayerNormalization": True, "RMSNormalization": False, "SimplifiedLayerNormalization": False}
MAX_DEPTH = 32  # operators that are looked through for a size
OF_PIXELS = {"InstanceNormalization": "channel", "GroupNormalization": "group of channels"}


@dataclass(frozen=True)
class Norm:
    """A norm of `x` over its last axis into `y`. gamma and beta are tensor names, "" where there is none.

    `total` is the Add that made x when it is part of the site. `nodes`: anchor first.
    """

    layer: bool
    x: str
    y: str
    epsilon: float
    gamma: str
    beta: str
    nodes: tuple[NodeProto, ...]
    total: NodeProto | None = None


def find(graph: Graph, node: NodeProto) -> Norm | Refusal | None:
    """The norm that an anchor (a single node, or the ReduceMean of squares) belongs to."""
    if graph.is_op(node, *OF_PIXELS):
        what = f"{node.op_type} goes over the pixels of each {OF_PIXELS[node.op_type]}"
        return Refusal(f"{what}; only the last axis is normalised over", (node,))
    norm = _single(graph, node) if node.op_type in SINGLE else _decomposed(graph, node)
    return _with_sum(graph, norm) if isinstance(norm, Norm) else norm


def _single(graph: Graph, node: NodeProto) -> Norm | Refusal | None:
    # SimplifiedLayerNormalization is ONNX Runtime's; its files carry it in the default domain.
    if node.domain not in ("", "ai.onnx", "com.microsoft") or len(node.input) < 2 or not node.input[1]:
        return None
    if node.op_type != "SimplifiedLayerNormalization" and not graph.is_op(node, node.op_type):
        return None
    x, dims = node.input[0], graph.dims(node.input[0])
    if any(node.output[1:]):
        return Refusal(f"{node.op_type} also gives its statistics; the fused norm has no such output", (node,))
    axis = attribute(node, "axis", -1)
    if axis != -1 and (dims is None or axis != len(dims) - 1):
        where = "a tensor of unknown rank" if dims is None else f"{dims}"
        return Refusal(f"axis {axis} of {where}: only the last axis is normalised over", (node,))
    if attribute(node, "stash_type", 1) != 1:
        return Refusal("stash_type is not float32, in which the fused norm computes", (node,))
    beta = node.input[2] if len(node.input) > 2 else ""
    epsilon = float(attribute(node, "epsilon", 1e-5))
    norm = Norm(SINGLE[node.op_type], x, node.output[0], epsilon, node.input[1], beta, (node,))
    return _narrow(graph, _cast_back(graph, norm))


def _decomposed(graph: Graph, mean: NodeProto) -> Norm | Refusal | None:
    square = graph.producer(mean.input[0]) if graph.is_op(mean, "ReduceMean") else None
    squared = _squared(graph, square)
    if square is None or not squared:
        return None
    kept, tail = _kept(graph, mean), None
    if kept:
        tail = _root(graph, kept[-1].output[0])
    if tail is None:
        return None
    root, epsilon, nodes = tail
    alike = _centred(graph, squared)
    ends = _scaled(graph, alike, root)
    if ends is None:
        return None
    divided, gamma, last = ends
    layer, x = bool(alike[squared]), squared
    if layer:
        x = alike[squared][0].input[0]
    inner = [*kept, square, *nodes, *last, *alike[squared]]
    inner += [n for n in alike[divided] if n not in alike[squared]]
    dims = graph.dims(x)
    for reduction in [n for n in inner if n.op_type == "ReduceMean"]:
        axes = _axes(graph, reduction)
        wanted = [-1] if dims is None else [len(dims) - 1]
        if axes is None or [a if dims is None else a % max(1, len(dims)) for a in axes] != wanted:
            whole = "a tensor of unknown rank" if dims is None else f"{dims}"
            where = f"the mean of '{label(reduction)}' goes over axes {axes} of {whole}"
            return Refusal(f"{where}; only the last axis is normalised over", (mean,))
        if reduction is not mean and attribute(reduction, "keepdims", 1) != 1:
            return None
    norm = Norm(layer, x, last[-1].output[0], epsilon, gamma, "", tuple(inner))
    norm = _shifted(graph, norm) if gamma else _affine(graph, norm)
    return _narrow(graph, _affine(graph, _cast_back(graph, norm)))


def _kept(graph: Graph, mean: NodeProto) -> list[NodeProto]:
    """A mean and the nodes that give it back the axis that it takes away; empty where that is not known."""
    before, nodes, kept = graph.symbols(mean.input[0]), [mean], list[NodeProto]()
    if attribute(mean, "keepdims", 1) == 1:
        return nodes
    while before:
        made = nodes[-1].output[0]
        users = [n for n in graph.users(made) if not graph.is_op(n, "Shape")]
        if len(users) != 1 or graph.escapes(made) or not graph.is_op(users[0], "Reshape", "Unsqueeze", "Expand"):
            break
        nodes.append(users[0])
        # As many numbers as the mean has, so whatever the sizes on the way, none of these nodes repeated one.
        if users[0].input[0] == made and graph.symbols(users[0].output[0]) == (*before[:-1], 1):
            kept = [*nodes]
    return kept


def _centred(graph: Graph, squared: str) -> dict[str, list[NodeProto]]:
    """The tensors that are x less its mean, where the squared one is, each with the nodes that make it; else the
    squared one alone, without nodes. PyTorch's `var` has a mean of its own."""
    subtraction = graph.producer(squared)
    if not graph.is_op(subtraction, "Sub") or not (own := _less_mean(graph, subtraction)):
        return {squared: []}
    twins = {n.output[0]: nodes for n in graph.users(subtraction.input[0]) if (nodes := _less_mean(graph, n))}
    return twins | {squared: own}


def _less_mean(graph: Graph, node: NodeProto) -> list[NodeProto]:
    """A node that subtracts from a tensor its mean, and that mean; empty for another node."""
    average = graph.producer(node.input[1]) if graph.is_op(node, "Sub") else None
    made = graph.is_op(average, "ReduceMean") and average.input[0] == node.input[0]
    return [node, average] if made and average is not None else []


def _squared(graph: Graph, node: NodeProto | None) -> str:
    """The tensor that the node squares, or ""."""
    if graph.is_op(node, "Mul") and node.input[0] == node.input[1]:
        return node.input[0]
    if graph.is_op(node, "Pow") and _scalar(graph, node.input[1]) == 2.0:
        return node.input[0]
    return ""


def _scalar(graph: Graph, tensor: str) -> float | None:
    """The value of a constant of one element and at most one axis, so that broadcasting never raises the rank."""
    value = graph.constant(tensor) if tensor else None
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 and value.ndim <= 1 else None


def _root(graph: Graph, mean: str) -> tuple[str, float, list[NodeProto]] | None:
    """(deviation, epsilon, nodes) of Sqrt(mean + epsilon); the root may be a power of 0.5, its inverse one of -0.5."""
    add = graph.only_user(mean)
    if not graph.is_op(add, "Add"):
        return None
    epsilon = _scalar(graph, add.input[1] if add.input[0] == mean else add.input[0])
    root = graph.only_user(add.output[0])
    if epsilon is None or not epsilon >= 0.0 or not math.isfinite(epsilon) or root is None:
        return None
    is_root = graph.is_op(root, "Sqrt") or _power(graph, root) in (0.5, -0.5)
    return (root.output[0], epsilon, [add, root]) if is_root else None


def _power(graph: Graph, node: NodeProto) -> float | None:
    """The constant exponent of a Pow; None for another node."""
    return _scalar(graph, node.input[1]) if graph.is_op(node, "Pow") else None


def _scaled(graph: Graph, alike: Collection[str], root: str) -> tuple[str, str, list[NodeProto]] | None:
    """(tensor, gamma, nodes) of tensor / root for one of these tensors: a Div, or a reciprocal and a Mul. Gamma is the
    vector by which tensor or reciprocal is multiplied before; "" where there is none."""
    nodes, gamma, at = list[NodeProto](), "", root
    inverted = _power(graph, maker) == -0.5 if (maker := graph.producer(root)) is not None else False
    user = graph.only_user(at)
    if not inverted and graph.is_op(user, "Div") and list(user.input).count(at) == 1 and user.input[1] == at:
        if found := _numerator(graph, alike, user.input[0], gamma):
            return found[0], found[1], [*found[2], user]
        gamma = _vector(graph, user.input[0], next(iter(alike)))
        inverted = bool(gamma) or _scalar(graph, user.input[0]) == 1.0
    elif not inverted:
        inverted = graph.is_op(user, "Reciprocal")
    if not inverted or user is None:
        return None
    if user.op_type != "Mul":
        nodes, at = [user], user.output[0]
        user = graph.only_user(at)
    while graph.is_op(user, "Mul") and list(user.input).count(at) == 1:
        other = user.input[1] if user.input[0] == at else user.input[0]
        nodes.append(user)
        if found := _numerator(graph, alike, other, gamma):
            return found[0], found[1], [*found[2], *nodes]
        if gamma or not (gamma := _vector(graph, other, next(iter(alike)))):
            return None
        at = user.output[0]
        user = graph.only_user(at)
    return None


def _numerator(
    graph: Graph, alike: Collection[str], tensor: str, gamma: str
) -> tuple[str, str, list[NodeProto]] | None:
    """(tensor, gamma, nodes) where a tensor is one of these, or one of these by a vector if there is no gamma yet."""
    if tensor in alike:
        return tensor, gamma, []
    product = graph.producer(tensor)
    if gamma or not graph.is_op(product, "Mul"):
        return None
    for own, other in (product.input, reversed(product.input)):
        if own in alike and (gamma := _vector(graph, other, own)):
            return own, gamma, [product]
    return None


def _axes(graph: Graph, node: NodeProto) -> list[int] | None:
    axes = attribute(node, "axes")
    if len(node.input) > 1 and node.input[1]:
        value = graph.constant(node.input[1])
        axes = None if value is None else value.reshape(-1).tolist()
    return None if axes is None else [int(a) for a in axes]


def _affine(graph: Graph, norm: Norm) -> Norm:
    """Adds the Mul by gamma and the Add of beta, where they are the only readers and their shapes allow it."""
    if norm.gamma:
        return norm
    mul = graph.only_user(norm.y)
    gamma = _parameter(graph, mul, norm, "Mul")
    if mul is None or not gamma:
        return norm
    return _shifted(graph, replace(norm, y=mul.output[0], gamma=gamma, nodes=(*norm.nodes, mul)))


def _shifted(graph: Graph, norm: Norm) -> Norm:
    """Adds the Add of beta."""
    add = graph.only_user(norm.y)
    beta = _parameter(graph, add, norm, "Add") if norm.layer else ""
    if add is None or not beta:
        return norm
    return replace(norm, y=add.output[0], beta=beta, nodes=(*norm.nodes, add))


def _parameter(graph: Graph, node: NodeProto | None, norm: Norm, op_type: str) -> str:
    """The other operand of the node when it is one value per column."""
    if not graph.is_op(node, op_type) or list(node.input).count(norm.y) != 1:
        return ""
    return _vector(graph, node.input[1] if node.input[0] == norm.y else node.input[0], norm.x)


def _vector(graph: Graph, tensor: str, x: str) -> str:
    """The tensor where it is one value for each column of x, else ""."""
    shape, rank = graph.dims(tensor), len(graph.dims(x) or (-1,))
    if not shape or len(shape) > rank or not math.prod(shape) == shape[-1] == last_size(graph, x):
        return ""
    return tensor if len(shape) == 1 or graph.is_constant(tensor) else ""


def columns(graph: Graph, norm: Norm) -> int:
    """The size of the axis that is normalised over; -1 where it is not known."""
    size = last_size(graph, norm.x)
    gamma = graph.dims(norm.gamma) if norm.gamma and norm.nodes[0].op_type == "LayerNormalization" else None
    if size < 0 and gamma is not None and len(gamma) == 1 and gamma[0] > 1:
        return gamma[0]  # its scale has the size of the axis, or is one number
    return size


def last_size(graph: Graph, tensor: str, depth: int = 0) -> int:
    """The size of the last axis, -1 where it is not known; operators before may tell it where not even the rank is."""
    dims, node = graph.dims(tensor), graph.producer(tensor)
    if dims is not None:
        return dims[-1] if dims else -1
    if node is None or depth > MAX_DEPTH:
        return -1
    if graph.is_op(node, *ALIKE):
        return last_size(graph, node.input[0], depth + 1)
    if graph.is_op(node, "MatMul"):
        weight = graph.dims(node.input[1]) or ()
        return weight[-1] if len(weight) > 1 else -1
    if graph.is_op(node, "Add", "Sub", "Mul", "Div"):  # one that is larger than 1 is the result's
        return max((size for name in node.input if (size := last_size(graph, name, depth + 1)) > 1), default=-1)
    if graph.is_op(node, "Reshape"):
        sizes = graph.size_values(node.input[1])
        return int(sizes.reshape(-1)[-1]) if sizes is not None and sizes.size and sizes.reshape(-1)[-1] > 0 else -1
    return -1


def _cast_back(graph: Graph, norm: Norm) -> Norm:
    """Adds the Cast to 16 bits that is the only reader, when the input was cast up from that type."""
    up, down = graph.producer(norm.x), graph.only_user(norm.y)
    if not graph.is_op(up, "Cast") or not graph.is_op(down, "Cast") or graph.dtype(norm.x) != "float32":
        return norm
    if graph.dtype(up.input[0]) not in HALVES or graph.dtype(down.output[0]) != graph.dtype(up.input[0]):
        return norm
    return replace(norm, x=up.input[0], y=down.output[0], nodes=(*norm.nodes, up, down))


def _narrow(graph: Graph, norm: Norm) -> Norm:
    """A gamma that was cast to float32 from the activation type is read in that type: half of the bytes."""

    def stored(tensor: str) -> str:
        cast = graph.producer(tensor) if tensor else None
        if graph.is_op(cast, "Cast") and graph.dtype(cast.input[0]) == graph.dtype(norm.x) in HALVES:
            return str(cast.input[0])
        return tensor

    gamma, beta = stored(norm.gamma), stored(norm.beta)
    same = not beta or graph.dtype(gamma) == graph.dtype(beta)
    return replace(norm, gamma=gamma, beta=beta) if same else norm


def _with_sum(graph: Graph, norm: Norm) -> Norm:
    """Adds the Add that made x when both of its operands have the shape of x."""
    add = graph.producer(norm.x)
    if not graph.is_op(add, "Add") or any(graph.is_constant(i) for i in add.input):
        return norm
    shapes = [graph.symbols(name) for name in (*add.input, norm.x)]
    if shapes[0] is None or not shapes[0] == shapes[1] == shapes[2]:
        return norm
    return replace(norm, total=add, nodes=(*norm.nodes, add))


def parameter_values(graph: Graph, tensor: str, columns: int, dtype: str, fill: float) -> np.ndarray:
    """gamma or beta as a vector of `columns` in a NumPy type; `fill` where there is none."""
    value = graph.constant(tensor) if tensor else None
    vector = np.full(columns, fill, np.float32) if value is None else value
    return np.ascontiguousarray(np.broadcast_to(vector.reshape(-1), (columns,)).astype(np.dtype(dtype)))
