"""What is known of the sizes of a tensor: numbers, names, and how they follow from those of the tensors before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute

Pads = tuple[int, int, int, int]  # top, left, bottom, right
Shape = tuple[frozenset[int | str], ...]  # of each axis the numbers and names that its size is known by
MAX_DEPTH = 24  # nodes before a convolution; two with a SiLU behind them, as in a bottleneck, are six
MAX_STEPS = 8  # nodes of a gate; a GELU has five
ALIKE = (  # nodes whose result is as large as their first input
    "BatchNormalization", "Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh", "HardSwish", "Swish", "Identity", "Gelu",
    "Elu", "HardSigmoid", "Erf", "Softplus", "PRelu", "Mish", "Neg", "Abs", "Sqrt", "Exp", "Cast", "Dropout",
    "InstanceNormalization", "LayerNormalization", "Softmax",
)  # fmt: skip
_PAIRS = ("Mul", "Add", "Sub", "Div", "Max", "Min", "Pow")


@dataclass(frozen=True)
class _Line:
    """A size after some windows as that of a size x before them: (x + shift) // step."""

    shift: int = 0
    step: int = 1

    def after(self, window: _Line) -> _Line:
        """The same of the size before one more window: divisions of integers one after another are one."""
        return _Line(window.shift + window.step * self.shift, window.step * self.step)


def shape_of(graph: Graph, tensor: str, images: Sequence[str] = ()) -> Shape:
    """What is known of the sizes of a tensor; `images` are tensors of the same batch.

    Shape inference gives new names to equal sizes. A convolution keeps the batch, and its rows and columns follow from
    those before it, so that two paths from one tensor with the same windows end in the same sizes.
    """
    own = graph.partial_symbols(tensor) or ()
    rank = len(own) or 4
    known: list[set[int | str]] = [{size} for size in own] or [set() for _ in range(rank)]
    before = [*((t, (_Line(), _Line())) for t in images), *_before(graph, tensor)]
    for i, (name, lines) in enumerate(before):
        sizes = graph.partial_symbols(name) or ()
        if len(sizes) == rank:
            known[0].add(sizes[0])
        if i < len(images) or rank != 4:
            continue
        for axis, line in enumerate(lines, start=2):
            known[axis].add(f"\0{name}, axis {axis}, {line}")  # no axis is called so
            if line == _Line() and len(sizes) == rank:
                known[axis].add(sizes[axis])
    return tuple(frozenset(k - {""}) for k in known)


def _before(graph: Graph, tensor: str) -> Iterator[tuple[str, tuple[_Line, _Line]]]:
    """The tensor and those before it of the same batch, the nearest first; how its rows and columns follow."""
    lines = (_Line(), _Line())
    for _ in range(MAX_DEPTH):
        yield tensor, lines
        node = graph.producer(tensor)
        if node is None or not node.input or not node.output or node.output[0] != tensor:  # none in a damaged model
            return
        if graph.is_op(node, "Conv", "MaxPool", "AveragePool", "Pad"):
            if (windows := _windows(graph, node)) is None:
                return
            lines = (lines[0].after(windows[0]), lines[1].after(windows[1]))
            tensor = node.input[0]
        elif (step := _same_before(graph, node)) is not None:
            tensor = step
        elif graph.is_op(node, "Concat") and attribute(node, "axis", 1) in (1, -3):
            if 0 in (graph.partial_symbols(node.input[0]) or (0,)):  # an empty one may have other sizes
                return
            tensor = node.input[0]
        elif graph.is_op(node, "Reshape"):  # back to the sizes of another tensor, as behind a GroupNorm's own
            shape = graph.producer(node.input[1])
            if not graph.is_op(shape, "Shape") or shape.attribute:
                return
            tensor = shape.input[0]
        elif graph.is_op(node, *_PAIRS) and len(node.input) == 2:
            first, second = (_steps_before(graph, name) for name in node.input)  # a gate is made of what it gates
            common = next((name for name in first if name in second), None)
            if common is None:
                return
            tensor = common
        else:
            return


def _same_before(graph: Graph, node: NodeProto) -> str | None:
    """The tensor that a node makes another one of the same sizes of; None where it makes it of none, or of several."""
    if graph.is_op(node, *ALIKE):
        return node.input[0]
    if graph.is_op(node, *_PAIRS) and len(node.input) == 2:
        first, second = node.input
        return first if _adds_none(graph, second, first) else second if _adds_none(graph, first, second) else None
    return None


def _steps_before(graph: Graph, tensor: str) -> list[str]:
    """A tensor and those of the same sizes before it, the nearest first."""
    found = [tensor]
    while len(found) < MAX_STEPS and (node := graph.producer(found[-1])) is not None:
        before = _same_before(graph, node) if node.input and node.output and node.output[0] == found[-1] else None
        if before is None:
            break
        found.append(before)
    return found


def _adds_none(graph: Graph, tensor: str, other: str) -> bool:
    """Whether a tensor has one number at most for each channel of an image, so that the other one decides how many
    images, rows and columns both together have."""
    sizes, images = graph.partial_symbols(tensor), (graph.partial_symbols(other) or ("",))[0]
    if sizes is None or len(sizes) > 4 or len(graph.partial_symbols(other) or ()) != 4:
        return False
    sizes = (1,) * (4 - len(sizes)) + sizes
    return sizes[2:] == (1, 1) and (sizes[0] == 1 or "" != sizes[0] == images)


def _windows(graph: Graph, node: NodeProto) -> tuple[_Line, _Line] | None:
    """How rows and columns follow from those in front of a convolution, pool or Pad; None where that is not known."""
    if node.op_type == "Pad":
        given = pads_of(graph, node)
        return (_Line(given[0] + given[2]), _Line(given[1] + given[3])) if given else None
    pools = node.op_type in ("MaxPool", "AveragePool")
    weight = () if pools else (graph.dims(node.input[1]) or ())[2:] if len(node.input) > 1 else ()
    window = list(attribute(node, "kernel_shape", weight))
    count = len(window)
    steps, spaces = (list(attribute(node, name, [1] * count)) for name in ("strides", "dilations"))
    pads, mode = list(attribute(node, "pads", [0] * 2 * count)), attribute(node, "auto_pad", "NOTSET")
    if [count, len(steps), len(spaces), len(pads)] != [2, 2, 2, 4] or min(*window, *steps) < 1:
        return None
    if attribute(node, "ceil_mode", 0) or (weight and window != list(weight)):
        return None
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        return _Line(steps[0] - 1, steps[0]), _Line(steps[1] - 1, steps[1])
    if mode not in ("NOTSET", "VALID"):
        return None
    pads = pads if mode == "NOTSET" else [0] * 4
    rows, columns = (pads[i] + pads[i + 2] - (window[i] - 1) * spaces[i] - 1 + steps[i] for i in range(2))
    return _Line(rows, steps[0]), _Line(columns, steps[1])


def pads_of(graph: Graph, node: NodeProto | None) -> Pads | None:
    """What a Pad adds to rows and columns; None for another node, where it is not known, or adds images or channels."""
    if not graph.is_op(node, "Pad") or len(graph.dims(node.input[0]) or range(4)) != 4:
        return None
    given = graph.numbers(node, 1, "pads" if graph.opset > 1 else "paddings", 11)
    axes = graph.numbers(node, 3, "axes", 18)
    axes = list(range(4)) if axes == [] else axes
    if given is None or axes is None or len(given) != 2 * len(axes) or not set(axes) <= set(range(-4, 4)):
        return None
    sides = {axis % 4: (given[i], given[len(axes) + i]) for i, axis in enumerate(axes)}
    if len(sides) < len(axes):  # the standard does not say what an axis that is named twice gets
        return None
    (top, bottom), (left, right) = (sides.pop(axis, (0, 0)) for axis in (2, 3))
    return None if any(map(any, sides.values())) else (top, left, bottom, right)
