"""What follows a convolution: recognisers for affine steps and activations, each exact or not used at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute
from cutefuse.ops.conv_call import FLOAT_MAX
from cutefuse.ops.conv_form import AFTER, BEFORE

Shape = tuple[frozenset[int | str], ...]  # of each axis the numbers and names that its size is known by


@dataclass(frozen=True)
class Activation:
    """An activation after `tensor`: its suffix in op_types, its nodes, its output and its parameters."""

    suffix: str
    nodes: tuple[NodeProto, ...]
    output: str
    params: dict[str, float]


@dataclass(frozen=True)
class Affine:
    """One step y = x * scale + shift per channel (float64 vectors of K, made when asked for)."""

    node: NodeProto
    output: str
    make: Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Chain:
    """What follows a convolution and can be fused with it: affine steps, then at most one activation, and a tensor that
    is added `when` BEFORE or AFTER the activation ("" for none)."""

    steps: tuple[Affine, ...]
    suffix: str
    params: dict[str, float]
    nodes: tuple[NodeProto, ...]
    output: str
    residual: str = ""
    when: str = ""


def chains_after(graph: Graph, tensor: str, channels: int, shape: Shape = ()) -> list[Chain]:
    """The longest chain after the tensor whose inner tensors have no other reader, possibly empty. Where it has a
    residual, also the chain without it. Without the tensor's shape no residual is looked for."""
    steps: list[Affine] = []
    while step := affine_after(graph, tensor, channels):
        steps.append(step)
        tensor = step.output
    nodes = tuple(s.node for s in steps)
    act = activation_after(graph, tensor) or Activation("", (), tensor, {})
    plain = Chain(tuple(steps), act.suffix, act.params, (*nodes, *act.nodes), act.output)
    if added := residual_after(graph, act.output, shape):
        add, other = added
        when = AFTER if act.suffix else BEFORE
        whole = replace(plain, nodes=(*plain.nodes, add), output=add.output[0], residual=other, when=when)
        if when == BEFORE and (last := activation_after(graph, whole.output)):
            whole = replace(whole, suffix=last.suffix, params=last.params, nodes=(*whole.nodes, *last.nodes),
                            output=last.output)  # fmt: skip
        return [whole, plain]
    return [plain]


def residual_after(graph: Graph, tensor: str, shape: Shape) -> tuple[NodeProto, str] | None:
    """(Add, its other operand) where the tensor's only reader is an Add with a tensor of the same shape.

    The other operand cannot depend on the tensor, because nothing but this Add reads the tensor.
    """
    node = graph.only_user(tensor)
    if not graph.is_op(node, "Add") or list(node.input).count(tensor) != 1:
        return None
    other = next(name for name in node.input if name != tensor)
    sizes = graph.symbols(other)
    if not other or not shape or sizes is None or len(sizes) != len(shape) or graph.is_constant(other):
        return None
    return (node, other) if all(s in known for s, known in zip(sizes, shape, strict=True)) else None


def affine_after(graph: Graph, tensor: str, channels: int) -> Affine | None:
    """The BatchNormalization, Mul or Add with constants that is the only reader of the tensor."""
    node = graph.only_user(tensor)
    if graph.is_op(node, "BatchNormalization"):
        return _batch_norm(graph, node, tensor, channels)
    if graph.is_op(node, "Mul", "Add") and list(node.input).count(tensor) == 1:
        other = next(name for name in node.input if name != tensor)
        dims = _channel_dims(graph, other, channels)
        if dims is None:
            return None

        def make() -> tuple[np.ndarray, np.ndarray]:
            vector = np.broadcast_to(_float64(graph, other).reshape(-1), (channels,))
            return (vector, np.zeros(channels)) if node.op_type == "Mul" else (np.ones(channels), vector)

        return Affine(node, node.output[0], make)
    return None


def _batch_norm(graph: Graph, node: NodeProto, tensor: str, channels: int) -> Affine | None:
    inference = not attribute(node, "training_mode", 0) and attribute(node, "spatial", 1) == 1
    modern = graph.opset >= 7  # older opsets mark training by is_test
    extra_outputs = any(node.output[1:])
    params = list(node.input[1:])
    if not inference or not modern or extra_outputs or node.input[0] != tensor or len(params) != 4:
        return None
    values = [graph.constant(p) for p in params]
    if any(v is None or v.shape != (channels,) for v in values):
        return None
    epsilon = float(np.float32(attribute(node, "epsilon", 1e-5)))

    def make() -> tuple[np.ndarray, np.ndarray]:
        gamma, beta, mean, var = (_float64(graph, p) for p in params)
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = gamma / np.sqrt(var + epsilon)
            return scale, beta - mean * scale

    return Affine(node, node.output[0], make)


def _float64(graph: Graph, tensor: str) -> np.ndarray:
    value = graph.constant(tensor)
    assert value is not None, "callers ask is_constant first"
    return np.asarray(value, dtype=np.float64)


def _channel_dims(graph: Graph, tensor: str, channels: int) -> tuple[int, ...] | None:
    value = graph.constant(tensor)
    if value is None or value.size not in (1, channels):
        return None
    # [K,1,1] and [1,K,1,1] broadcast along channels; a plain [K] would broadcast along W.
    right = (1,) * (4 - value.ndim) + value.shape if value.ndim <= 4 else ()
    return value.shape if right in ((1, channels, 1, 1), (1, 1, 1, 1)) else None


def activation_after(graph: Graph, tensor: str) -> Activation | None:
    """The activation that is the tensor's only reader; None unless it is exactly one of ours."""
    if graph.escapes(tensor):
        return None
    users = {id(n): n for n in graph.users(tensor)}
    if len(users) == 1:
        return _single(graph, next(iter(users.values())), tensor)
    if len(users) == 2:
        return _gated(graph, list(users.values()), tensor)
    return None


def _single(graph: Graph, node: NodeProto, tensor: str) -> Activation | None:
    if not graph.is_op(node, "Relu", "Sigmoid", "Tanh", "HardSwish", "LeakyRelu", "Swish", "Clip"):
        return None
    output = node.output[0]
    if graph.is_op(node, "Relu", "Sigmoid", "Tanh", "HardSwish"):
        return Activation(node.op_type, (node,), output, {})
    if graph.is_op(node, "LeakyRelu"):
        return Activation("LeakyRelu", (node,), output, {"alpha": float(attribute(node, "alpha", 0.01))})
    if graph.is_op(node, "Swish") and attribute(node, "alpha", 1.0) == 1.0:
        return Activation("Silu", (node,), output, {})
    if graph.is_op(node, "Clip") and node.input[0] == tensor and list(node.input).count(tensor) == 1:
        lo, hi = _bound(graph, node, 1, "min", -FLOAT_MAX), _bound(graph, node, 2, "max", FLOAT_MAX)
        if lo is not None and hi is not None and lo <= hi:  # false for NaN
            return Activation("Clip", (node,), output, {"lo": lo, "hi": hi})
    return None


def _bound(graph: Graph, node: NodeProto, index: int, name: str, default: float) -> float | None:
    if graph.opset < 11:
        return float(attribute(node, name, default))
    if len(node.input) <= index or not node.input[index]:
        return default
    value = graph.constant(node.input[index])
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


def _gated(graph: Graph, users: list[NodeProto], tensor: str) -> Activation | None:
    """x * gate(x): SiLU with a Sigmoid, HardSwish with a HardSigmoid of slope 1/6 and offset 1/2."""
    gates = [n for n in users if graph.is_op(n, "Sigmoid", "HardSigmoid")]
    if len(gates) != 1:
        return None
    gate, product = gates[0], next(n for n in users if n is not gates[0])
    if not graph.is_op(product, "Mul") or set(product.input) != {tensor, gate.output[0]}:
        return None
    if graph.only_user(gate.output[0]) is not product:
        return None
    if gate.op_type == "Sigmoid":
        return Activation("Silu", (gate, product), product.output[0], {})
    slope, offset = attribute(gate, "alpha", 0.2), attribute(gate, "beta", 0.5)
    if np.float32(slope) == np.float32(1 / 6) and offset == 0.5:
        return Activation("HardSwish", (gate, product), product.output[0], {})
    return None
