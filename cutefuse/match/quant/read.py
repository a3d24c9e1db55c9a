"""Recognises quantised convolutions of Q/DQ graphs, over a Concat or alone: which numbers and scales they work on.

Only explicit, symmetric quantisation to int8 or float8 (e4m3) with constant scales is taken: one scale for a whole
activation tensor, one for each output channel (or one in all) of the filter. Casts between float types may stand beside
the Q and DQ nodes. Everything else is refused in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from cutefuse.graph.numbers import FLOATS, Number
from cutefuse.graph.read import Graph, attribute, label
from cutefuse.match import qdq
from cutefuse.match.answer import Quantized, Refusal
from cutefuse.match.conv import read as conv_facts
from cutefuse.match.conv.front import Front
from cutefuse.match.qdq import Linear, NotFused
from cutefuse.operators.conv_math import Geometry


@dataclass(frozen=True)
class QuantSite:
    """Sources are quantised tensors of the graph, or float ones to be quantised, with a scale each; N,C,H,W dims.

    All of them and the filter are of one number type, `weight.number`.
    """

    sources: tuple[str | Quantized, ...]
    scales: tuple[float, ...]
    dims: tuple[tuple[int, int, int, int], ...]
    weight: Weight
    bias: np.ndarray  # float64 [K]
    geometry: Geometry
    nodes: tuple[NodeProto, ...]  # the Conv first
    concat: str  # what the Conv reads of one, "" without


@dataclass(frozen=True)
class Weight:
    """A quantised filter: a constant behind a DequantizeLinear, or a float constant behind a pair of both."""

    graph: Graph
    tensor: str
    dims: tuple[int, int, int, int]
    scale: np.ndarray  # float64 [K], with which it is dequantised
    step: np.ndarray  # float64 [K], with which it is quantised: the same, but for float16's rounding of either
    rounded: bool  # the tensor is quantised already
    number: Number
    dtype: str  # of the filter that the Conv reads

    def make(self) -> np.ndarray:
        """The quantised filter [K, C, R, S]."""
        value = self.graph.constant(self.tensor)
        assert value is not None, "found to be constant when the site was read"
        if self.rounded:
            return value
        return self.number.round(value.astype(np.float32) / self.step.astype(np.float32)[:, None, None, None])


def find(graph: Graph, conv: NodeProto, max_sources: int, alone: bool) -> QuantSite | Refusal | None:
    """The quantised site of a Conv; None when it is no Conv over a Concat, or neither side of it is quantised. `alone`:
    over anything, where the filter is quantised."""
    front = quantised_front(graph, conv, alone)
    if front is None:
        return None
    try:
        return _read(graph, conv, front, max_sources)
    except NotFused as no:
        return Refusal(f"quantised site: {no}", (conv, *front.nodes))


_MOST_BETWEEN = 5  # a pair of Q and DQ between Casts, and one node too many


def quantised_front(graph: Graph, conv: NodeProto, alone: bool) -> Front | None:
    """What a Conv of the quantised operator reads, fused there or refused; None of another one, see `find`. Its nodes
    are the Q and DQ nodes and Casts in front of the Conv, and the Concat."""
    if not graph.is_op(conv, "Conv") or len(conv.input) < 2:
        return None
    between: list[NodeProto] = []
    node = graph.producer(conv.input[0])
    while node is not None and (qdq.kind_of(node, graph) or qdq.casts(node, graph)) and len(between) < _MOST_BETWEEN:
        between.append(node)
        node = graph.producer(node.input[0])
    quantised_filter = qdq.dequantises(graph.producer(qdq.before_cast(graph, conv.input[1])[1]), graph)
    if node is None or not graph.is_op(node, "Concat") or attribute(node, "axis", 1) not in (1, -3):
        return Front((conv.input[0],), (), ()) if alone and quantised_filter else None
    if not quantised_filter and not any(qdq.kind_of(n, graph) for n in between):
        return None
    return Front(tuple(node.input), (*between, node), (node,))


def _read(graph: Graph, conv: NodeProto, front: Front, max_sources: int) -> QuantSite:
    if len(front.sources) > max_sources:
        raise NotFused(f"Concat joins {len(front.sources)} tensors, only {max_sources} can be fused; split the Concat")
    weight = _weight(graph, conv)
    K, C, R, S = weight.dims
    sources, scales, made = _sources(graph, front, weight.number)
    if (group := attribute(conv, "group", 1)) != 1:
        raise NotFused(f"the Conv has {group} groups; only group=1 can be fused")
    if tuple(attribute(conv, "kernel_shape", (R, S))) != (R, S):
        raise NotFused(f"kernel_shape {attribute(conv, 'kernel_shape')} contradicts a {R}x{S} filter; repair the model")
    dims = conv_facts.source_dims(graph, front, C)
    if isinstance(dims, str):
        raise NotFused(dims)
    geometry = conv_facts.geometry_of(conv, (R, S), dims[0][2:])
    if isinstance(geometry, str):
        raise NotFused(geometry)
    nodes = (conv, *front.nodes, *made, *_makers(graph, conv))
    joined = next((c.output[0] for c in front.concats), "")
    return QuantSite(sources, scales, dims, weight, _bias(graph, conv, K), geometry, nodes, joined)


def _makers(graph: Graph, conv: NodeProto) -> list[NodeProto]:
    """Q and DQ nodes and Casts over the filter and the bias; they go when nothing else reads them."""
    found = []
    for tensor in conv.input[1:]:
        node = graph.producer(tensor)
        while node is not None and (qdq.kind_of(node, graph) or qdq.casts(node, graph)):
            found.append(node)
            node = graph.producer(node.input[0])
    return found


def _sources(
    graph: Graph, front: Front, number: Number
) -> tuple[tuple[str | Quantized, ...], tuple[float, ...], list[NodeProto]]:
    """Quantised sources, their scales, and the DQ nodes and Casts that go with them.

    Three forms: DQ before each source; quantised sources under one DQ; float sources under one pair of Q and DQ, which
    is the same as the pair before each source, since quantising treats every element alone.
    """
    between = front.nodes[: len(front.nodes) - len(front.concats)]
    pair = [n for n in between if qdq.kind_of(n, graph)]
    if not pair:
        return _own_scales(graph, front.sources, between, number)
    name, count = f"the Concat '{label(front.concats[0])}'", len(front.sources)
    kinds = [qdq.kind_of(n, graph) for n in pair]
    first = between.index(pair[0])
    down = _alike(qdq.dequantised(graph, pair[0], between[:first], name), number, name)
    scale = qdq.scalar(down, name)
    if kinds == [qdq.DEQUANTIZE]:
        return front.sources, (scale,) * count, []
    if kinds != [qdq.DEQUANTIZE, qdq.QUANTIZE]:
        raise NotFused(f"{' and '.join(kinds)} stand between Conv and Concat; one pair of Q and DQ can be")
    up = _alike(qdq.linear(graph, pair[1], name), number, name)
    if not _nearly(given := qdq.scalar(up, name), scale):
        raise NotFused(f"{name} is quantised with scale {given:g} and dequantised with {scale:g}; repair the model")
    before = between[between.index(pair[1]) + 1 :]
    if len(before) > 1:
        raise NotFused(f"{name} is cast {len(before)} times before it is quantised; only one Cast can be moved")
    cast, custom = qdq.cast_type(before), pair[1].domain == qdq.CUSTOM_DOMAIN
    sources, gone = list[str | Quantized](), list[NodeProto]()
    for tensor in front.sources:
        if graph.dtype(tensor) not in (None, *FLOATS):
            raise NotFused(f"source '{tensor}' is {graph.dtype(tensor)}; only {', '.join(FLOATS)} can be quantised")
        own = graph.producer(tensor)
        # Rounding what already is a multiple of the scale gives it back.
        if qdq.dequantises(own, graph) and not cast and _same(graph, own, up):
            sources.append(own.input[0])
            gone.append(own)
        else:
            sources.append(Quantized(tensor, up.tensor, up.zero_point, number.name, cast, custom))
    return tuple(sources), (scale,) * count, gone


def _own_scales(
    graph: Graph, tensors: Sequence[str], behind: Sequence[NodeProto], number: Number
) -> tuple[tuple[str | Quantized, ...], tuple[float, ...], list[NodeProto]]:
    """As `_sources`, where each source has a DQ of its own; `behind` their Concat stand Casts at most."""
    sources, scales, gone = list[str | Quantized](), list[float](), list[NodeProto]()
    for tensor in tensors:
        between, inner = qdq.before_cast(graph, tensor)
        node, what = graph.producer(inner), f"source '{tensor}'"
        if not qdq.dequantises(node, graph):
            dynamic = graph.is_op(node, "Mul", "Cast") and "; dynamic quantisation cannot be fused" or ""
            raise NotFused(f"{what} is not dequantised, the filter is{dynamic}; quantise every source")
        found = _alike(qdq.dequantised(graph, node, [*between, *behind], what), number, what)
        sources.append(node.input[0])
        scales.append(qdq.scalar(found, what))
        gone += [*between, node]
    return tuple(sources), tuple(scales), gone


def _alike(found: Linear, number: Number, what: str) -> Linear:
    """Raises NotFused for another number type than the filter's."""
    if found.number is not number:
        raise NotFused(
            f"{what} is {found.number.name}, the filter {number.name}; sources and filter must be of one type"
        )
    return found


def _nearly(a: object, b: object) -> bool:
    """Whether two scales are one, of which float16 may have rounded either."""
    return bool(np.allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2.0**-10, atol=0))


def _same(graph: Graph, node: NodeProto, up: Linear) -> bool:
    """Whether a DQ node has the number type and the scale of a Q node."""
    try:
        found = qdq.linear(graph, node, "a source")
        return found.number is up.number and qdq.scalar(found, "a source") == qdq.scalar(up, "a source")
    except NotFused:
        return False


def _weight(graph: Graph, conv: NodeProto) -> Weight:
    between, tensor = qdq.before_cast(graph, conv.input[1])
    node = graph.producer(tensor)
    if not qdq.dequantises(node, graph):
        raise NotFused("the filter is not quantised, the activations are; quantise it like them")
    found = qdq.dequantised(graph, node, between, "the filter")
    steps, tensor, rounded = found, node.input[0], True
    quantiser = graph.producer(tensor)
    if qdq.quantises(quantiser, graph):
        steps = _alike(
            qdq.linear(graph, quantiser, "the filter"), found.number, "the filter before its DequantizeLinear"
        )
        different = steps.scale.shape != found.scale.shape or not _nearly(steps.scale, found.scale)
        if different or (steps.scale.size > 1 and steps.axis != found.axis):
            raise NotFused("the filter is quantised and dequantised with different scales; repair the model")
        tensor, rounded = quantiser.input[0], False
    if not graph.is_constant(tensor):
        raise NotFused(f"the filter '{tensor}' {graph.not_constant(tensor)}; only constants can be packed")
    value = None if rounded and tensor in graph.initializers else graph.constant(tensor)
    if value is not None and np.isnan(value.astype(np.float32)).any():
        raise NotFused("the filter holds NaN, of which a quantiser may make any number; repair the model")
    dims = graph.dims(tensor) if value is None else value.shape
    if dims is None or len(dims) != 4:
        raise NotFused(f"the filter has dimensions {dims}; only 2-D convolutions (KCRS) can be fused")
    if found.scale.size > 1 and (found.axis % 4 != 0 or found.scale.shape != (dims[0],)):
        raise NotFused(f"the filter has {found.scale.size} scales along axis {found.axis}; one for each output channel "
                       f"(axis 0) can be fused")  # fmt: skip
    scale, step = (np.broadcast_to(f.scale.reshape(-1), (dims[0],)).astype(np.float64) for f in (found, steps))
    dtype = qdq.cast_type(between) or graph.dtype(found.tensor) or "float32"
    return Weight(graph, tensor, (dims[0], dims[1], dims[2], dims[3]), scale, step, rounded, found.number, dtype)


def _bias(graph: Graph, conv: NodeProto, K: int) -> np.ndarray:
    tensor = conv.input[2] if len(conv.input) > 2 else ""
    if not tensor:
        return np.zeros(K)
    node, scale = graph.producer(tensor), np.ones(1)
    if qdq.dequantises(node, graph):  # int32, usually with the product of both scales
        given = graph.constant(node.input[1]) if len(node.input) > 1 else None
        zero = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1)
        if given is None or zero is None or np.any(zero):
            raise NotFused("the bias is dequantised with a scale or zero point that cannot be fused; store it as float")
        tensor, scale = node.input[0], np.asarray(given, np.float64).reshape(-1)
    value = graph.constant(tensor)
    if value is None or value.shape != (K,) or scale.size not in (1, K):
        why = graph.not_constant(tensor) if value is None else f"is no vector of {K}"
        raise NotFused(f"the bias '{tensor}' {why}; only constant vectors of {K} can be fused")
    return value.astype(np.float64) * scale
