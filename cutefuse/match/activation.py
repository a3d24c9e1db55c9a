"""Recognises the activations that a convolution of ours can end with, in every form that exporters write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute, label
from cutefuse.operators.conv_call import FLOAT_MAX

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place, relative; else float32's
FUSED = "only Relu, LeakyRelu, Clip, Sigmoid, Tanh, HardSwish, SiLU and GELU by erf"
_OTHERS = ("PRelu", "Elu", "Selu", "Celu", "Mish", "Softplus", "Softsign", "HardSigmoid", "ThresholdedRelu")
MAX_STEPS = 4  # scalar steps on one side of a gate; exporters write at most two
# Activations without an operator of their own before opset 18 and 20, by what only they are written with.
_WRITTEN = {"Softplus": "Mish", "Erf": "GELU", "Pow": "GELU"}
_BETWEEN = (*_WRITTEN, "Tanh", "Mul", "Div", "Add")
MAX_GATE = 8  # nodes of such an activation; GELU's tanh form has seven


@dataclass(frozen=True)
class Activation:
    """An activation of `scale * x + shift`: its suffix in op_types, its nodes, its output and its parameters."""

    suffix: str
    nodes: tuple[NodeProto, ...]
    output: str
    params: dict[str, float]
    scale: float = 1.0
    shift: float = 0.0


def activation_after(graph: Graph, tensor: str, scaled: bool) -> Activation | None:
    """The activation that alone reads the tensor, if it is exactly one of ours. `scaled`: also of a multiple of it."""
    if graph.escapes(tensor):
        return None
    users = list({id(n): n for n in graph.users(tensor)}.values())
    if len(users) == 1:
        return _single(graph, users[0], tensor, scaled)
    if len(users) == 2:
        for first, last in (users, reversed(users)):
            for form in (_gated, _divided, _leaky, _gelu):
                if found := form(graph, tensor, first, last):
                    return found
    return None


def near_miss(graph: Graph, tensor: str) -> str:
    """Why the tensor's only reader is almost one of our activations and not one; "" where it is nothing like them."""
    node = graph.only_user(tensor)
    if graph.is_op(node, "Swish") and (alpha := attribute(node, "alpha", 1.0)) != 1.0:
        return f"Swish '{label(node)}' stays: its alpha is {alpha:g}; only alpha=1, which is SiLU, can be fused"
    if graph.is_op(node, "Gelu") and node.input[0] == tensor:
        return f"Gelu '{label(node)}' stays: its approximate is tanh; {FUSED} can be fused"
    if graph.is_op(node, *_OTHERS) and node.input[0] == tensor:
        return f"{node.op_type} '{label(node)}' stays: {FUSED} can be fused"
    if graph.is_op(node, "BatchNormalization") and attribute(node, "training_mode", 0):
        return f"BatchNormalization '{label(node)}' stays: it is in training mode; export the model for inference"
    if graph.is_op(node, "InstanceNormalization", "GroupNormalization") and node.input[0] == tensor:
        return f"{node.op_type} '{label(node)}' stays: it depends on the image; only a BatchNormalization can be fused"
    return _slope(graph, tensor) or _written_out(graph, tensor)


def _slope(graph: Graph, tensor: str) -> str:
    """The same for x * sigmoid(a * x), which is SiLU for a = 1 alone; 1.702 is a fast GELU."""
    for first in graph.users(tensor):
        line = _Line()
        _, _, function = _steps(graph, tensor, first, line)
        gate = function.output[0] if graph.is_op(function, "Sigmoid") else ""
        product = graph.only_user(gate) if gate and (line.scale, line.shift) != (1.0, 0.0) else None
        if graph.is_op(product, "Mul") and sorted(product.input) == sorted((tensor, gate)):
            shift = f" {'+' if line.shift > 0 else '-'} {abs(line.shift):.6g}" if line.shift else ""
            found = f"it is x * sigmoid({line.scale:.6g} * x{shift}), and SiLU is x * sigmoid(x)"
            return f"{product.op_type} '{label(product)}' stays: {found}; {FUSED} can be fused"
    return ""


def _written_out(graph: Graph, tensor: str) -> str:
    """The same for an x * f(x) that is a GELU or Mish written in steps."""
    for first in graph.users(tensor):
        nodes: list[NodeProto] = []
        at, node = tensor, first
        while graph.is_op(node, *_BETWEEN) and node.output and len(nodes) < MAX_GATE:
            nodes.append(node)
            others = [i for i in node.input if i and i != at and not graph.is_constant(i)]
            names = [_WRITTEN[n.op_type] for n in nodes if n.op_type in _WRITTEN]
            if names and others and node.op_type == "Mul":
                scaled = graph.producer(others[0])
                same = others == [tensor] or _scalar_step(graph, scaled, tensor) is not None
                why = "it is not x * (1 + erf(x / sqrt(2))) / 2; " if any(n.op_type == "Erf" for n in nodes) else ""
                return f"{names[0]} '{label(node)}' stays: {why}{FUSED} can be fused" if same else ""
            at, following = node.output[0], graph.only_user(node.output[0])
            if following is None:
                break
            node = following
    return ""


def _single(graph: Graph, node: NodeProto, tensor: str, scaled: bool) -> Activation | None:
    # ONNX Runtime's own has no other form than that by erf.
    of_runtime = (node.domain, node.op_type, len(node.input), len(node.output)) == ("com.microsoft", "Gelu", 1, 1)
    if of_runtime or (graph.is_op(node, "Gelu") and attribute(node, "approximate", "none") == "none"):
        return Activation("Gelu", (node,), node.output[0], {})
    if cut := _cut(graph, node, tensor, scaled):
        return cut
    output = node.output[0] if node.output else ""
    if graph.is_op(node, "PRelu"):
        slopes = graph.constant(node.input[1]) if node.input[0] == tensor else None
        alpha = float(slopes.flat[0]) if slopes is not None and slopes.size else math.nan
        shared = math.isfinite(alpha) and slopes is not None and bool((slopes == slopes.flat[0]).all())
        return Activation("LeakyRelu", (node,), output, {"alpha": alpha}) if shared else None
    if graph.is_op(node, "Sigmoid", "Tanh", "HardSwish"):
        return Activation(node.op_type, (node,), output, {})
    if graph.is_op(node, "LeakyRelu"):
        return Activation("LeakyRelu", (node,), output, {"alpha": float(attribute(node, "alpha", 0.01))})
    if graph.is_op(node, "Swish") and attribute(node, "alpha", 1.0) == 1.0:
        return Activation("Silu", (node,), output, {})
    return None


def _cut(graph: Graph, node: NodeProto, tensor: str, scaled: bool) -> Activation | None:
    """The tensor cut off, and where it may be scaled, the scalar steps behind that: max(x, 0) * s + t is the same as
    max(s * x + t, t), and as min(s * x + t, t) where s is negative."""
    inner, outer = _Line(), _Line()
    cuts, output, bounds = _cuts(graph, node, tensor, inner)
    if not cuts or not inner.scale or not (scaled or inner == _Line()):  # 0 times infinity is NaN
        return None
    steps, last, _ = _steps(graph, output, graph.only_user(output), outer) if scaled else ([], output, None)
    with np.errstate(over="ignore"):
        if not outer.scale or not np.isfinite(np.array([outer.scale, outer.shift], np.float32)).all():
            steps, last, outer = [], output, _Line()
        lo, hi = sorted(float(np.float32(b * outer.scale + outer.shift)) for b in bounds)
    inner.then(outer.scale, outer.shift, outer.rounding)
    suffix, params = ("Relu", {}) if (lo, hi) == (0.0, math.inf) else ("Clip", {"lo": lo, "hi": hi})
    return Activation(suffix, (*cuts, *steps), last, params, inner.scale, inner.shift)


def _cuts(
    graph: Graph, node: NodeProto | None, tensor: str, line: _Line
) -> tuple[list[NodeProto], str, tuple[float, float]]:
    """The nodes from `node` on that cut the tensor off, as clamp(clamp(x, min=0), max=6), or a HardSigmoid, which goes
    on with the line before; what they give; bounds."""
    if graph.is_op(node, "HardSigmoid"):
        slope, offset = (float(np.float32(attribute(node, *a))) for a in (("alpha", 0.2), ("beta", 0.5)))
        line.then(slope, offset, 0.0)
        return [node], node.output[0], (0.0, 1.0)
    nodes, lo, hi = list[NodeProto](), -np.inf, np.inf
    while node is not None and len(nodes) < MAX_STEPS and (bounds := _bounds_of(graph, node, tensor)):
        lo, hi = (min(max(v, bounds[0]), bounds[1]) for v in (lo, hi))
        nodes.append(node)
        tensor = node.output[0]
        node = graph.only_user(tensor)
    return nodes, tensor, (lo, hi)


def _bounds_of(graph: Graph, node: NodeProto, tensor: str) -> tuple[float, float] | None:
    """The constant bounds of a Relu, a Clip, or a Max or Min with one number; None where the node is none of these, or
    where its bounds are computed or contradict each other."""
    if not graph.is_op(node, "Relu", "Clip", "Max", "Min") or list(node.input).count(tensor) != 1:
        return None
    if node.op_type == "Relu":
        return 0.0, np.inf
    if node.op_type in ("Max", "Min"):
        others = [name for name in node.input if name != tensor]
        value = _number(graph, others[0]) if len(others) == 1 else None
        if value is None or not abs(value) <= FLOAT_MAX:  # false for NaN
            return None
        return (value, np.inf) if node.op_type == "Max" else (-np.inf, value)
    if node.input[0] != tensor:
        return None
    lo, hi = _bound(graph, node, 1, "min", -FLOAT_MAX), _bound(graph, node, 2, "max", FLOAT_MAX)
    return (lo, hi) if lo is not None and hi is not None and lo <= hi else None  # false for NaN


def _bound(graph: Graph, node: NodeProto, index: int, name: str, default: float) -> float | None:
    if graph.opset < 11:
        return float(attribute(node, name, default))
    if len(node.input) <= index or not node.input[index]:
        return default
    value = graph.constant(node.input[index])
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


@dataclass
class _Line:
    """y = scale * x + shift, as far as the scalar steps that were read say; `rounding` is that of their constants."""

    scale: float = 1.0
    shift: float = 0.0
    rounding: float = 2.0**-24

    def then(self, scale: float, shift: float, rounding: float) -> None:
        self.scale, self.shift = self.scale * scale, self.shift * scale + shift
        self.rounding = max(self.rounding, rounding)


def _gated(graph: Graph, tensor: str, first: NodeProto, product: NodeProto) -> Activation | None:
    """x * gate(x), where the gate begins with `first`: scalar steps, one function, scalar steps; then maybe a scale.

    SiLU is x * sigmoid(x), and sigmoid(x) is 0.5 * tanh(0.5 * x) + 0.5. HardSwish is x * max(0, min(1, x / 6 + 1 / 2)).
    """
    if not graph.is_op(product, "Mul"):
        return None
    inner, outer = _Line(), _Line()
    before, entry, function = _steps(graph, tensor, first, inner)
    middle, ends, bounds = _cuts(graph, function, entry, inner)
    if graph.is_op(function, "Sigmoid", "Tanh"):
        middle, ends = [function], function.output[0]
    if function is None or not middle:
        return None
    after, gate, last = _steps(graph, ends, graph.only_user(ends), outer)
    if last is not product or sorted(product.input) != sorted((tensor, gate)):
        return None
    nodes = (*before, *middle, *after, product)
    silu = {"Sigmoid": (1.0, 0.0, 1.0, 0.0), "Tanh": (0.5, 0.0, 0.5, 0.5)}  # which are exact in every type
    if silu.get(function.op_type) == (inner.scale, inner.shift, outer.scale, outer.shift):
        return Activation("Silu", nodes, product.output[0], {})
    # x * relu6(x + 3) / 6 is divided last.
    return _scaled_last(graph, "HardSwish", nodes, outer, lambda: _is_hard_swish(bounds, inner, outer))


def _scaled_last(
    graph: Graph, suffix: str, nodes: tuple[NodeProto, ...], outer: _Line, whole: Callable[[], bool]
) -> Activation | None:
    """The activation that ends with a product, the last of these nodes, or with one more scale behind it; `whole` says
    whether it is one, as far as `outer` was read."""
    output = nodes[-1].output[0]
    if whole():
        return Activation(suffix, nodes, output, {})
    scale = graph.only_user(output)
    step = _scalar_step(graph, scale, output)
    if scale is None or step is None or step[1] != 0.0:
        return None
    outer.then(*step)
    return Activation(suffix, (*nodes, scale), scale.output[0], {}) if whole() else None


def _divided(graph: Graph, tensor: str, first: NodeProto, quotient: NodeProto) -> Activation | None:
    """SiLU as x / (1 + exp(-x))."""
    if not graph.is_op(quotient, "Div") or not quotient.output:
        return None
    inner, outer = _Line(), _Line()
    if graph.is_op(first, "Neg") and first.output:
        inner.then(-1.0, 0.0, 0.0)
        before, power = [first], graph.only_user(first.output[0])
    else:
        before, _, power = _steps(graph, tensor, first, inner)
    if power is None or not graph.is_op(power, "Exp") or not power.output:
        return None
    after, gate, last = _steps(graph, power.output[0], graph.only_user(power.output[0]), outer)
    lines = (inner.scale, inner.shift, outer.scale, outer.shift)
    if last is not quotient or list(quotient.input) != [tensor, gate] or lines != (-1.0, 0.0, 1.0, 1.0):
        return None
    return Activation("Silu", (*before, power, *after, quotient), quotient.output[0], {})


def _leaky(graph: Graph, tensor: str, first: NodeProto, larger: NodeProto) -> Activation | None:
    """LeakyRelu as max(x, alpha * x), which it is for an alpha between 0 and 1."""
    line = _Line()
    before, scaled, last = _steps(graph, tensor, first, line)
    if last is not larger or not graph.is_op(larger, "Max") or sorted(larger.input) != sorted((tensor, scaled)):
        return None
    if line.shift != 0.0 or not 0.0 < line.scale <= 1.0:
        return None
    return Activation("LeakyRelu", (*before, larger), larger.output[0], {"alpha": line.scale})


def _gelu(graph: Graph, tensor: str, first: NodeProto, other: NodeProto) -> Activation | None:
    """GELU as x * (1 + erf(x / sqrt(2))) / 2, where x, the gate or the product is halved."""
    inner, outer, halved = _Line(), _Line(), _Line()
    before, _, erf = _steps(graph, tensor, first, inner)
    if not graph.is_op(erf, "Erf"):
        return None
    after, gate, product = _steps(graph, erf.output[0], graph.only_user(erf.output[0]), outer)
    halves, x, last = _steps(graph, tensor, other, halved)
    if last is None or last is not product or not graph.is_op(product, "Mul"):
        return None
    if halved.shift != 0.0 or sorted(product.input) != sorted((x, gate)):
        return None
    outer.then(halved.scale, 0.0, halved.rounding)
    nodes = (*before, erf, *after, *halves, product)
    return _scaled_last(graph, "Gelu", nodes, outer, lambda: _is_erf_gelu(inner, outer))


def _steps(
    graph: Graph, tensor: str, node: NodeProto | None, line: _Line
) -> tuple[list[NodeProto], str, NodeProto | None]:
    """The scalar steps from `node` on, which reads the tensor; what they give, and the node that reads that."""
    nodes: list[NodeProto] = []
    while node is not None and len(nodes) < MAX_STEPS and (step := _scalar_step(graph, node, tensor)):
        line.then(*step)
        nodes.append(node)
        tensor = node.output[0]
        node = graph.only_user(tensor)
    return nodes, tensor, node


def _scalar_step(graph: Graph, node: NodeProto | None, tensor: str) -> tuple[float, float, float] | None:
    """(scale, shift, rounding of the constant) of a Mul, Div, Add or Sub of the tensor with one constant number."""
    if not graph.is_op(node, "Mul", "Div", "Add", "Sub") or list(node.input).count(tensor) != 1:
        return None
    left = node.input[0] == tensor
    other = node.input[1 if left else 0]
    value = _number(graph, other)
    if value is None:
        return None
    constant = graph.constant(other)
    rounding = ROUNDING.get(constant.dtype.name if constant is not None else "", 2.0**-24)
    if node.op_type == "Mul":
        return value, 0.0, rounding
    if node.op_type == "Div":
        return (1.0 / value, 0.0, rounding) if left and value else None
    if node.op_type == "Add":
        return 1.0, value, rounding
    return (1.0, -value, rounding) if left else (-1.0, value, rounding)


def _number(graph: Graph, tensor: str) -> float | None:
    """The one number of a constant that keeps the rank of what it is computed with; None for another tensor."""
    constant = graph.constant(tensor)
    if constant is None or constant.size != 1 or constant.ndim > 4:  # more axes would change the tensor's rank
        return None
    return float(constant.reshape(-1)[0])


def _equal(values: Sequence[float], wanted: Sequence[float], rounding: float) -> bool:
    return all(abs(v - w) <= rounding for v, w in zip(values, wanted, strict=True))  # false for NaN


def _is_erf_gelu(inner: _Line, outer: _Line) -> bool:
    """Whether erf(inner(x)) and outer make (1 + erf(x / sqrt(2))) / 2."""
    exact = (outer.scale, outer.shift, inner.shift) == (0.5, 0.5, 0.0)  # exact in every type
    return exact and _equal((inner.scale,), (0.5**0.5,), inner.rounding)


def _is_hard_swish(bounds: tuple[float, float], inner: _Line, outer: _Line) -> bool:
    """Whether outer(inner(x)), with inner(x) cut off at the bounds, is x / 6 + 1 / 2 between 0 and 1."""
    limits = (outer.scale * bound + outer.shift for bound in bounds)
    found = (outer.scale * inner.scale, outer.scale * inner.shift + outer.shift, *limits)
    return _equal(found, (1 / 6, 1 / 2, 0.0, 1.0), max(inner.rounding, outer.rounding))
