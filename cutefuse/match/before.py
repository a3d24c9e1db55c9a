"""Traces a source of a Concat back through nearest upsampling and channel ranges to a part of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from onnx import NodeProto

from cutefuse.graph.numbers import HALVES
from cutefuse.graph.read import ELEM_TYPES, Graph, attribute, label
from cutefuse.operators.conv_form import Source

MAX_DEPTH = 16  # nodes in front of one source; no real network has more
UPSAMPLE, RANGES = KINDS = ("upsample", "ranges")
OPERATORS = {UPSAMPLE: {"Resize", "Upsample"}, RANGES: {"Split", "Slice"}}
_WIDE = frozenset(ELEM_TYPES[name] for name in ("int32", "int64", "float32", "float64"))
MAX_FACTOR = 64  # float32 coordinates of larger factors are not exact on every runtime

# Output pixel x of an enlargement by u -> coordinate in the input (ONNX, Resize), where that does not depend on sizes.
_COORDINATES: dict[str, Callable[[int, int], Fraction]] = {
    "asymmetric": lambda x, u: Fraction(x, u),
    "half_pixel": lambda x, u: Fraction(2 * x + 1, 2 * u) - Fraction(1, 2),
    "tf_half_pixel_for_nn": lambda x, u: Fraction(2 * x + 1, 2 * u),
}
# They differ from half_pixel for an output of one pixel and for broken factors only.
_COORDINATES |= dict.fromkeys(("pytorch_half_pixel", "half_pixel_symmetric"), _COORDINATES["half_pixel"])
_ROUNDINGS: dict[str, Callable[[Fraction], int]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "round_prefer_floor": lambda v: math.ceil(v - Fraction(1, 2)),
    "round_prefer_ceil": lambda v: math.floor(v + Fraction(1, 2)),
}


@dataclass(frozen=True)
class Operand:
    """A source of the call: the tensor that holds it, the part of it, and the nodes between it and the Concat."""

    tensor: str
    source: Source
    nodes: tuple[NodeProto, ...] = ()
    notes: tuple[str, ...] = ()


def repeats_pixels(coordinates: str, rounding: str, factor: int) -> bool:
    """Whether a nearest Resize by a whole factor gives every pixel `factor` times, for images of any size."""
    if coordinates not in _COORDINATES or rounding not in _ROUNDINGS:
        return False
    # Coordinates of pixel x + factor are those of x plus one, so that one period, away from the border, is all.
    period = (_COORDINATES[coordinates](factor + i, factor) for i in range(factor))
    return all(_ROUNDINGS[rounding](c) == 1 for c in period)


def see_through(graph: Graph, plain: Operand, kinds: Collection[str] = KINDS) -> Operand:
    """The operand behind the Identity, Resize and Upsample (UPSAMPLE), Split and Slice (RANGES) nodes before it."""
    found = plain
    for _ in range(MAX_DEPTH):
        node = graph.producer(found.tensor)
        if node is None:
            break
        raised = _raised(graph, node) if UPSAMPLE in kinds else ()
        if graph.is_op(node, "Identity"):
            step: Operand | str | None = replace(found, tensor=node.input[0])
        elif raised:
            step = _enlarged(graph, raised[0], found)
            if isinstance(step, Operand):
                step = replace(step, tensor=raised[1].input[0], nodes=(*found.nodes, *raised))
        elif UPSAMPLE in kinds and graph.is_op(node, "Resize", "Upsample"):
            step = _enlarged(graph, node, found)
        elif RANGES in kinds and graph.is_op(node, "Split", "Slice"):
            step = _range(graph, node, found)
        else:
            break
        if isinstance(step, str):
            stays = raised[0] if raised else node
            return replace(found, notes=(f"{stays.op_type} '{label(stays)}' stays: {step}",))
        if step is None:
            break
        found = replace(step, nodes=(*step.nodes, node))
    return found if found.source.is_view or found.tensor != plain.tensor else plain


def merged(operands: Sequence[Operand]) -> tuple[Operand, ...]:
    """Neighbours that are adjacent ranges of one tensor joined."""
    result: list[Operand] = []
    for right in operands:
        left = result[-1] if result else None
        if left and left.tensor == right.tensor and left.source.dims[1] >= 0:
            a, b = left.source, right.source
            if a.start + a.channels == b.start and a.upsample == b.upsample and a.dims == b.dims:
                whole = replace(a, channels=a.channels + b.channels)
                result[-1] = Operand(left.tensor, whole, (*left.nodes, *right.nodes), left.notes + right.notes)
                continue
        result.append(right)
    return tuple(result)


def choose(
    graph: Graph, plain: Sequence[Operand], legal: Callable[[Sequence[Operand]], str | None], kinds: Collection[str]
) -> tuple[Operand, ...]:
    """The operands, neighbours merged, with every view of these kinds that `legal` allows: it returns the reason
    against a view, or None."""
    seen = [see_through(graph, p, kinds) for p in plain]
    whole = merged(seen)
    reason = legal(whole)
    if reason is None or legal(plain) is not None:
        return whole
    chosen = [replace(p, notes=s.notes) for p, s in zip(plain, seen, strict=True)]
    for i, operand in enumerate(seen):
        if operand.tensor != plain[i].tensor:
            trial = [*chosen[:i], operand, *chosen[i + 1 :]]
            reason = legal(trial)
            note = f"'{plain[i].tensor}' is read as it is: {reason}"
            chosen = trial if reason is None else [*chosen[:i], replace(chosen[i], notes=(note,)), *chosen[i + 1 :]]
    return merged(chosen)


def _raised(graph: Graph, down: NodeProto) -> tuple[NodeProto, NodeProto] | tuple[()]:
    """(Resize, Cast before it) where a Cast takes the result of a Resize in float32 back to the 16 bits that it came
    from: converters to float16 leave it so, and copies of pixels are exact in either type."""
    resize = graph.producer(down.input[0]) if graph.is_op(down, "Cast") else None
    up = graph.producer(resize.input[0]) if graph.is_op(resize, "Resize", "Upsample") else None
    if resize is None or not graph.is_op(up, "Cast") or graph.dtype(up.output[0]) != "float32":
        return ()
    own = graph.dtype(up.input[0])
    return (resize, up) if own in HALVES and graph.dtype(down.output[0]) == own else ()


def _enlarged(graph: Graph, node: NodeProto, found: Operand) -> Operand | str:
    """The operand in front of a nearest Resize by one whole factor, or why it is none of these."""
    mode = attribute(node, "mode", "nearest")
    if mode != "nearest":
        return f"mode={mode}; only nearest by a whole factor can be read in place"
    factor = _factor(graph, node)
    if factor is None:
        return "its factors are not known to be one whole number for H and W and 1 for N and C"
    coordinates, rounding = "asymmetric", "floor"
    if graph.opset >= 11 and node.op_type == "Resize":
        coordinates = attribute(node, "coordinate_transformation_mode", "half_pixel")
        rounding = attribute(node, "nearest_mode", "round_prefer_floor")
    if not repeats_pixels(coordinates, rounding, factor):
        return (f"coordinate_transformation_mode={coordinates} with nearest_mode={rounding} does not repeat each pixel "
                f"{factor} times; export it with asymmetric and floor")  # fmt: skip
    dims, own = graph.dims(node.input[0]), found.source
    if dims is None or len(dims) != 4 or dims[1] not in (-1, own.dims[1]):
        return f"its input has dimensions {dims}, not N,{own.dims[1]},H,W"
    rows, columns = (
        d if d >= 0 else large // factor if large >= 0 and large % factor == 0 else -1
        for d, large in zip(dims[2:], own.dims[2:], strict=True)
    )
    batch = dims[0] if dims[0] >= 0 else own.dims[0]
    source = replace(own, dims=(batch, own.dims[1], rows, columns), upsample=own.upsample * factor)
    return replace(found, tensor=node.input[0], source=source)


def _factor(graph: Graph, node: NodeProto) -> int | None:
    """The whole factor of H and W; None when it is not known, not one for both, or N or C change too."""
    given: Sequence[float | Fraction] | None = None
    scales = node.input[-1 if graph.opset < 11 else 2] if len(node.input) > (1 if graph.opset < 11 else 2) else ""
    if attribute(node, "scales") is not None:
        given = attribute(node, "scales")
    elif scales and (value := graph.size_values(scales)) is not None and value.size:
        given = [float(v) for v in value.reshape(-1)]
    elif len(node.input) > 3 and node.input[3]:
        given = _size_ratios(graph, node)
    axes = _axes(node, len(given)) if given is not None else None
    if given is None or axes is None:
        return None
    factors: dict[int, float | Fraction] = dict.fromkeys(range(4), 1) | dict(zip(axes, given, strict=True))
    factor = factors[2]
    whole = factor == factors[3] and 2 <= factor <= MAX_FACTOR and factor == int(factor)
    return int(factor) if whole and factors[0] == factors[1] == 1 else None


def _axes(node: NodeProto, count: int) -> list[int] | None:
    """The axes, 0 to 3 and each once, of a Resize that gives `count` sizes or scales; None when they are no such."""
    axes = list(attribute(node, "axes", range(count)))
    legal = len(axes) == count == len({a % 4 for a in axes}) and all(-4 <= a < 4 for a in axes)
    return [a % 4 for a in axes] if legal and (count == 4 or attribute(node, "axes") is not None) else None


def _size_ratios(graph: Graph, node: NodeProto) -> list[Fraction] | None:
    """Output over input sizes of a Resize with `sizes`, axis by axis; None where one is not known."""
    dims = graph.dims(node.input[0])
    sizes = _sizes(graph, node.input[3])
    axes = _axes(node, len(sizes)) if sizes is not None else None
    policy = attribute(node, "keep_aspect_ratio_policy", "stretch")
    if sizes is None or axes is None or dims is None or len(dims) != 4 or policy != "stretch":
        return None
    ratios = []
    for axis, size in zip(axes, sizes, strict=True):
        if isinstance(size, int):
            if dims[axis] <= 0:
                return None
            ratios.append(Fraction(size, dims[axis]))
        elif size[:2] == (node.input[0], axis):
            ratios.append(size[2])
        else:
            return None
    return ratios


_Size = int | tuple[str, int, Fraction]  # a number, or (tensor, axis, factor): that many times a tensor's size


def _sizes(graph: Graph, tensor: str, depth: int = 0) -> list[_Size] | None:
    """What a vector of sizes is made of, through the arithmetic that exporters write; None when that is not known."""
    value, node = graph.size_values(tensor), graph.producer(tensor)
    if value is not None:
        return [int(v) for v in value.reshape(-1)] if value.dtype.kind == "i" and value.ndim <= 1 else None
    # A matrix would be taken for the list of its entries.
    if node is None or depth > MAX_DEPTH or len(graph.dims(tensor) or ()) > 1:
        return None
    if graph.is_op(node, "Shape"):
        dims = graph.dims(node.input[0])
        axes = None if dims is None else range(len(dims))[attribute(node, "start", 0) : attribute(node, "end")]
        return None if axes is None else [(node.input[0], axis, Fraction(1)) for axis in axes]
    if graph.is_op(node, "Concat"):
        parts = [_sizes(graph, name, depth + 1) for name in node.input]
        return None if None in parts else [entry for part in parts if part is not None for entry in part]
    if graph.is_op(node, "Reshape"):  # of a number to a vector of one, or the other way round
        return _sizes(graph, node.input[0], depth + 1) if graph.dims(tensor) is not None else None
    narrow = node.op_type == "Cast" and attribute(node, "to") not in _WIDE  # a size may wrap around or be rounded
    if not narrow and graph.is_op(node, "Cast", "Unsqueeze", "Squeeze", "Identity", "Floor"):
        entries = _sizes(graph, node.input[0], depth + 1)
        whole = entries is not None and all(isinstance(e, int) or e[2].denominator == 1 for e in entries)
        return entries if whole else None
    if graph.is_op(node, "Gather", "Slice", "Mul"):
        return _picked(graph, node, depth)
    return None


def _picked(graph: Graph, node: NodeProto, depth: int) -> list[_Size] | None:
    if node.op_type == "Mul":
        for own, other in (node.input, reversed(node.input)):
            entries, by = _sizes(graph, own, depth + 1), graph.size_values(other)
            if entries and by is not None and by.size == 1 and np.isfinite(by).all():
                factor = Fraction(float(by.reshape(-1)[0]))
                scaled = [(*e[:2], e[2] * factor) for e in entries if not isinstance(e, int)]
                return [*scaled] if len(scaled) == len(entries) else None
        return None
    entries = _sizes(graph, node.input[0], depth + 1)
    if entries is None:
        return None
    positions = np.arange(len(entries))
    if node.op_type == "Gather":
        index = graph.size_values(node.input[1])
        if index is None or index.ndim > 1 or not np.all((-len(entries) <= index) & (index < len(entries))):
            return None
        return [entries[i] for i in np.atleast_1d(positions[index])]
    bounds = graph.slice_bounds(node)
    if bounds is None:
        return None
    axes, starts, ends, steps = bounds
    return [entries[i] for i in positions[starts[0] : ends[0] : steps[0]]] if axes == [0] and steps[0] > 0 else None


def _range(graph: Graph, node: NodeProto, found: Operand) -> Operand | str | None:
    """The operand in front of a Split or Slice along channels; None for one along another axis or of unknown bounds."""
    dims = graph.dims(node.input[0])
    if dims is None or len(dims) != 4 or dims[1] < 0:
        return None
    if node.op_type == "Split":
        before = [graph.dims(o) for o in node.output[: list(node.output).index(found.tensor)]]
        if attribute(node, "axis", 0) not in (1, -3) or any(d is None or len(d) != 4 or d[1] < 0 for d in before):
            return None
        start = sum(d[1] for d in before if d is not None)
    else:
        bounds = graph.slice_bounds(node)
        if bounds is None or bounds[0] not in ([1], [-3]) or bounds[3] != [1]:
            return None
        start = range(dims[1])[bounds[1][0] : bounds[2][0]].start
    own = found.source
    if start + own.dims[1] > dims[1]:
        return None
    # N, H and W of a range are those of the whole.
    size = (own.dims[0], dims[1], *own.dims[2:])
    return replace(found, tensor=node.input[0], source=replace(own, dims=size, start=own.start + start))
