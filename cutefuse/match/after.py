"""What follows a convolution: affine steps, an activation and a residual, each exact or not used at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute
from cutefuse.match.activation import Activation, activation_after, near_miss
from cutefuse.match.explain import other_sum
from cutefuse.match.sizes import Shape, shape_of
from cutefuse.operators.conv_form import AFTER, BEFORE

MAX_STEPS = 4  # BatchNormalization, and the Mul and Add that exporters add to it or write in its place
JOINED = ("", "Relu", "Clip")  # activations that engines fuse with their convolutions


@dataclass(frozen=True)
class Affine:
    """One step y = x * scale + shift per channel (float64 vectors of K, made when asked for)."""

    node: NodeProto
    output: str
    make: Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Chain:
    """What follows a convolution and can be fused with it: affine steps, then at most one activation, and a tensor that
    is added `when` BEFORE or AFTER the activation ("" for none).

    stored: the tensor that engines write and read again, because the kernel after it is not part of their convolution;
    "" for none. note: what looks like a part of the chain and stays outside, and why.
    """

    steps: tuple[Affine, ...]
    suffix: str
    params: dict[str, float]
    nodes: tuple[NodeProto, ...]
    output: str
    residual: str = ""
    when: str = ""
    stored: str = ""
    note: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether the convolution stands alone: no activation, no residual."""
        return not self.suffix and not self.residual


def chains_after(
    graph: Graph, tensor: str, channels: int, shape: Callable[[], Shape] | None = None, most: float = math.inf
) -> list[Chain]:
    """The longest chain of at most `most` affine steps after the tensor whose inner tensors have no other reader,
    possibly empty. Where it has a residual, also the chain without it. `shape` tells the tensor's; without it no
    residual is looked for."""
    steps: list[Affine] = []
    while len(steps) < most and (step := affine_of(graph, graph.only_user(tensor), tensor, channels)):
        steps.append(step)
        tensor = step.output
    nodes = tuple(s.node for s in steps)
    act = activation_after(graph, tensor, len(steps) < most) or Activation("", (), tensor, {})
    if (act.scale, act.shift) != (1.0, 0.0):
        line = act.scale, act.shift
        steps.append(Affine(act.nodes[-1], tensor, lambda: (np.full(channels, line[0]), np.full(channels, line[1]))))
    plain = Chain(
        tuple(steps), act.suffix, act.params, (*nodes, *act.nodes), act.output,
        stored="" if act.suffix in JOINED else tensor, note="" if act.suffix else near_miss(graph, tensor),
    )  # fmt: skip
    if added := residual_after(graph, act.output, shape):
        add, other = added
        when = AFTER if act.suffix else BEFORE
        whole = replace(
            plain, nodes=(*plain.nodes, add), output=add.output[0], residual=other, when=when,
            stored=plain.stored or (act.output if when == AFTER else ""),
        )  # fmt: skip
        if when == BEFORE and (last := activation_after(graph, whole.output, False)):
            whole = replace(whole, suffix=last.suffix, params=last.params, nodes=(*whole.nodes, *last.nodes),
                            output=last.output, stored="" if last.suffix in JOINED else whole.output)  # fmt: skip
        elif when == BEFORE:
            whole = replace(whole, note=near_miss(graph, whole.output))
        return [whole, plain]
    note = plain.note or (other_sum(graph, act.output) if shape else "")
    return [plain if note == plain.note else replace(plain, note=note)]


def residual_after(graph: Graph, tensor: str, shape: Callable[[], Shape] | None) -> tuple[NodeProto, str] | None:
    """(Add, its other operand) where an Add, or a Sum of two, with a tensor of the same shape is the only reader.

    The other operand cannot depend on the tensor, because nothing but this Add reads the tensor.
    """
    node = graph.only_user(tensor)
    if not graph.is_op(node, "Add", "Sum") or len(node.input) != 2 or list(node.input).count(tensor) != 1:
        return None
    other = next(name for name in node.input if name != tensor)
    if not other or not shape or graph.partial_symbols(other) is None or graph.is_constant(other):
        return None
    sizes, own = shape_of(graph, other), shape()
    same = len(sizes) == len(own) and all(s & known for s, known in zip(sizes, own, strict=True))
    return (node, other) if same else None


def affine_before(graph: Graph, tensor: str, channels: int) -> tuple[Affine, str] | None:
    """The affine step that makes the tensor, and what it reads; None where anything else makes it."""
    node = graph.producer(tensor)
    moving = [t for t in node.input if t and not graph.is_constant(t)] if node is not None else []
    step = affine_of(graph, node, moving[0], channels) if len(moving) == 1 else None
    return (step, moving[0]) if step else None


def steps_before(graph: Graph, tensor: str, channels: int) -> tuple[list[Affine], str]:
    """The affine steps that make a tensor of N,C,H,W, in the order of computation, and what they read."""
    steps = list[Affine]()
    while len(steps) < MAX_STEPS and (found := affine_before(graph, tensor, channels)):
        dims = graph.dims(found[1]) or (-1,)
        if found[0].node.op_type != "BatchNormalization" and (len(dims) != 4 or dims[1] != channels):
            break  # the constants may make channels, or an axis
        steps.insert(0, found[0])
        tensor = found[1]
    return steps, tensor


def composed(steps: Sequence[Affine]) -> tuple[np.ndarray, np.ndarray]:
    """Scale and shift of every channel by all steps, given in the order of computation, float64; [1] without any."""
    scale, shift = np.ones(1), np.zeros(1)
    with np.errstate(all="ignore"):
        for step in steps:
            factor, offset = step.make()
            scale, shift = scale * factor, shift * factor + offset
    return scale, shift


def affine_of(graph: Graph, node: NodeProto | None, tensor: str, channels: int) -> Affine | None:
    """The affine step that a node makes of the tensor, as a BatchNormalization, or as a Mul, Div, Add or Sub with a
    constant; None for one that is no such step."""
    if graph.is_op(node, "BatchNormalization"):
        return _batch_norm(graph, node, tensor, channels)
    if graph.is_op(node, "Mul", "Div", "Add", "Sub") and list(node.input).count(tensor) == 1:
        other = next(name for name in node.input if name != tensor)
        first = node.input[0] == tensor
        if not _is_per_channel(graph, other, channels) or (node.op_type == "Div" and not first):
            return None

        def make() -> tuple[np.ndarray, np.ndarray]:
            vector = np.broadcast_to(_float64(graph, other).reshape(-1), (channels,))
            if node.op_type in ("Mul", "Div"):
                with np.errstate(divide="ignore"):
                    return vector if node.op_type == "Mul" else 1 / vector, np.zeros(channels)
            sign = np.full(channels, -1.0 if node.op_type == "Sub" else 1.0)
            return (np.ones(channels), sign * vector) if first else (sign, vector)

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


def _is_per_channel(graph: Graph, tensor: str, channels: int) -> bool:
    """Whether a constant is [K,1,1], [1,K,1,1] or one number, which broadcast along channels; [K] would along W."""
    value = graph.constant(tensor)
    if value is None or value.ndim > 4:
        return False
    return (1,) * (4 - value.ndim) + value.shape in ((1, channels, 1, 1), (1, 1, 1, 1))
