"""Recognises int8 Concat -> Conv in Q/DQ graphs: which integers and scales the convolution really works on.

Only explicit, symmetric int8 quantisation with constant scales is taken: one scale for a whole activation tensor, one
for each output channel (or one in all) of the filter. Everything else is refused in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from cutefuse.graph.read import ELEM_TYPES, Graph, attribute, label
from cutefuse.ops.conv_math import Geometry
from cutefuse.sites import conv_facts
from cutefuse.sites.match import Quantized, Refusal

FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Linear:
    """What a QuantizeLinear or DequantizeLinear does: `q = round(x / scale)`; the scale tensor's name and values."""

    node: NodeProto
    tensor: str  # the scale
    scale: np.ndarray  # float64, a scalar or a vector along `axis`
    axis: int


@dataclass(frozen=True)
class QuantSite:
    """Sources are int8 tensors of the graph, or float ones to be quantised, with a scale each; N,C,H,W dims.

    `filter` gives the int8 filter [K,C,R,S], `filter_scale` one float64 value for each of the K.
    """

    sources: tuple[str | Quantized, ...]
    scales: tuple[float, ...]
    dims: tuple[tuple[int, int, int, int], ...]
    weight: Weight
    bias: np.ndarray  # float64 [K]
    geometry: Geometry
    nodes: tuple[NodeProto, ...]  # the Conv first
    concat: str


@dataclass(frozen=True)
class Weight:
    """An int8 filter: a constant behind a DequantizeLinear, or a float constant behind a pair of both."""

    graph: Graph
    tensor: str
    dims: tuple[int, int, int, int]
    scale: np.ndarray  # float64 [K]
    rounded: bool  # the tensor is int8 already

    def make(self) -> np.ndarray:
        """The int8 filter [K, C, R, S]."""
        value = self.graph.constant(self.tensor)
        assert value is not None, "found to be constant when the site was read"
        if self.rounded:
            return value
        steps = value.astype(np.float32) / self.scale.astype(np.float32)[:, None, None, None]
        return np.clip(np.rint(steps), -128, 127).astype(np.int8)


def find(graph: Graph, conv: NodeProto, max_sources: int) -> QuantSite | Refusal | None:
    """The quantised site of a Conv; None when it is no Conv over a Concat, or neither side of it is quantised."""
    shape = _walk(graph, conv)
    if shape is None:
        return None
    concat, pair = shape
    nodes = (conv, *pair, concat)
    try:
        return _read(graph, conv, concat, pair, max_sources)
    except _No as no:
        return Refusal(f"quantised site: {no}", nodes)


class _No(Exception):
    """Why a site stays as it is."""


def _walk(graph: Graph, conv: NodeProto) -> tuple[NodeProto, tuple[NodeProto, ...]] | None:
    """(Concat, the Q and DQ nodes between it and the Conv) of a quantised Conv, anchor's side first."""
    if not graph.is_op(conv, "Conv") or len(conv.input) < 2:
        return None
    between: list[NodeProto] = []
    node = graph.producer(conv.input[0])
    while graph.is_op(node, "DequantizeLinear", "QuantizeLinear") and len(between) < 3:
        between.append(node)
        node = graph.producer(node.input[0])
    if not graph.is_op(node, "Concat") or attribute(node, "axis", 1) not in (1, -3):
        return None
    quantised_filter = graph.is_op(graph.producer(conv.input[1]), "DequantizeLinear")
    return (node, tuple(between)) if between or quantised_filter else None


def is_quantised(graph: Graph, conv: NodeProto) -> bool:
    """Whether the Conv over a Concat belongs to the int8 operator, fused there or refused."""
    return _walk(graph, conv) is not None


def linear(graph: Graph, node: NodeProto, what: str) -> Linear:
    """The scale of a Q or DQ node. Raises _No when it is not symmetric int8 with a constant scale."""
    if len(node.input) < 2 or (scale := graph.constant(node.input[1])) is None:
        raise _No(f"the scale of {what} is computed at run time; only constant scales can be fused")
    zero = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if len(node.input) > 2 and node.input[2] and zero is None:
        raise _No(f"the zero point of {what} is computed at run time; only constant zeros can be fused")
    kind = zero.dtype.name if zero is not None else _stored_type(graph, node)
    if kind != "int8":
        raise _No(f"{what} is quantised to {kind}; only int8 can be fused, quantise symmetrically to int8")
    if zero is not None and np.any(zero):
        raise _No(f"{what} has zero point {int(np.ravel(zero)[np.argmax(np.ravel(zero) != 0)])}; only symmetric "
                  f"quantisation (zero point 0) can be fused")  # fmt: skip
    if attribute(node, "block_size", 0):
        raise _No(
            f"{what} is quantised in blocks of {attribute(node, 'block_size')}; one scale a channel is the finest"
        )
    values = np.asarray(scale, np.float64)
    if not np.all(np.isfinite(values) & (values > 0)):
        raise _No(f"{what} has a scale that is not positive; repair the model")
    return Linear(node, node.input[1], values, int(attribute(node, "axis", 1)))


def _stored_type(graph: Graph, node: NodeProto) -> str | None:
    """The integer type of a Q or DQ node without a zero point."""
    if node.op_type == "DequantizeLinear":
        return _dtype(graph, node.input[0])
    named = attribute(node, "output_dtype", 0)
    return next((name for name, number in ELEM_TYPES.items() if number == named), "uint8")


def _dtype(graph: Graph, tensor: str) -> str | None:
    found = graph.dtype(tensor)
    value = graph.constant(tensor) if found is None else None
    return value.dtype.name if value is not None else found


def _scalar(found: Linear, what: str) -> float:
    if found.scale.size != 1:
        raise _No(f"{what} has {found.scale.size} scales, one for each channel; an activation may have one only")
    return float(np.float32(found.scale.reshape(-1)[0]))


def _read(
    graph: Graph, conv: NodeProto, concat: NodeProto, pair: Sequence[NodeProto], max_sources: int
) -> QuantSite:  # fmt: skip
    if len(concat.input) > max_sources:
        raise _No(f"Concat joins {len(concat.input)} tensors, at most {max_sources} can be fused; split the Concat")
    weight = _weight(graph, conv)
    K, C, R, S = weight.dims
    sources, scales, made = _sources(graph, concat, pair)
    if (group := attribute(conv, "group", 1)) != 1:
        raise _No(f"the Conv has {group} groups; only group=1 can be fused")
    if tuple(attribute(conv, "kernel_shape", (R, S))) != (R, S):
        raise _No(f"kernel_shape {attribute(conv, 'kernel_shape')} contradicts the {R}x{S} filter; repair the model")
    joined = conv_facts.Front(tuple(concat.input), (concat,), (concat,))
    dims = conv_facts.source_dims(graph, joined, C)
    if isinstance(dims, str):
        raise _No(dims)
    geometry = conv_facts.geometry_of(conv, (R, S), dims[0][2:])
    if isinstance(geometry, str):
        raise _No(geometry)
    nodes = (conv, *pair, concat, *made, *_makers(graph, conv))
    return QuantSite(sources, scales, dims, weight, _bias(graph, conv, K), geometry, nodes, concat.output[0])


def _makers(graph: Graph, conv: NodeProto) -> list[NodeProto]:
    """Q and DQ nodes over the filter and the bias; they go when nothing else reads them."""
    found = []
    for tensor in conv.input[1:]:
        node = graph.producer(tensor)
        while graph.is_op(node, "DequantizeLinear", "QuantizeLinear"):
            found.append(node)
            node = graph.producer(node.input[0])
    return found


def _sources(
    graph: Graph, concat: NodeProto, pair: Sequence[NodeProto]
) -> tuple[tuple[str | Quantized, ...], tuple[float, ...], list[NodeProto]]:
    """int8 sources, their scales, and the DQ nodes that go with them.

    Three forms: DQ before each source; int8 sources under one DQ; float sources under one pair of Q and DQ, which is
    the same as the pair before each source, since quantising treats every element alone.
    """
    count = len(concat.input)
    if not pair:
        found = [_source(graph, tensor) for tensor in concat.input]
        return (
            tuple(f.node.input[0] for f in found),
            tuple(_scalar(f, f"source '{t}'") for f, t in zip(found, concat.input, strict=True)),
            [f.node for f in found],
        )
    name = f"the Concat '{label(concat)}'"
    down = linear(graph, pair[0], name)
    scale = _scalar(down, name)
    if [n.op_type for n in pair] == ["DequantizeLinear"]:
        return tuple(concat.input), (scale,) * count, []
    if [n.op_type for n in pair] != ["DequantizeLinear", "QuantizeLinear"]:
        raise _No(f"{' and '.join(n.op_type for n in pair)} stand between Conv and Concat; one pair of Q and DQ can be")
    up = linear(graph, pair[1], name)
    if _scalar(up, name) != scale:
        raise _No(
            f"{name} is quantised with scale {_scalar(up, name):g} and dequantised with {scale:g}; repair the model"
        )
    zero = pair[1].input[2] if len(pair[1].input) > 2 else ""
    sources, gone = list[str | Quantized](), list[NodeProto]()
    for tensor in concat.input:
        if graph.dtype(tensor) not in (None, *FLOATS):
            raise _No(f"source '{tensor}' is {graph.dtype(tensor)}; only {', '.join(FLOATS)} can be quantised")
        own = graph.producer(tensor)
        # Rounding what already is a multiple of the scale gives it back.
        same = graph.is_op(own, "DequantizeLinear") and _same_scale(graph, own, scale)
        if own is not None and same:
            sources.append(own.input[0])
            gone.append(own)
        else:
            sources.append(Quantized(tensor, up.tensor, zero))
    return tuple(sources), (scale,) * count, gone


def _same_scale(graph: Graph, node: NodeProto, scale: float) -> bool:
    try:
        return _scalar(linear(graph, node, "a source"), "a source") == scale
    except _No:
        return False


def _source(graph: Graph, tensor: str) -> Linear:
    node = graph.producer(tensor)
    if not graph.is_op(node, "DequantizeLinear"):
        dynamic = graph.is_op(node, "Mul", "Cast") and "; dynamic quantisation cannot be fused" or ""
        raise _No(f"source '{tensor}' is not dequantised from int8, the filter is{dynamic}; quantise every source")
    return linear(graph, node, f"source '{tensor}'")


def _weight(graph: Graph, conv: NodeProto) -> Weight:
    node = graph.producer(conv.input[1])
    if not graph.is_op(node, "DequantizeLinear"):
        raise _No("the filter is not quantised, the activations are; quantise it to int8")
    found = linear(graph, node, "the filter")
    tensor, rounded = node.input[0], True
    quantiser = graph.producer(tensor)
    if graph.is_op(quantiser, "QuantizeLinear"):
        inner = linear(graph, quantiser, "the filter")
        if not np.array_equal(inner.scale, found.scale) or (inner.scale.size > 1 and inner.axis != found.axis):
            raise _No("the filter is quantised and dequantised with different scales; repair the model")
        tensor, rounded = quantiser.input[0], False
    if not graph.is_constant(tensor):
        raise _No(f"the filter '{tensor}' is computed at run time; only constants can be packed")
    value = None if tensor in graph.initializers else graph.constant(tensor)
    dims = graph.dims(tensor) if value is None else value.shape
    if dims is None or len(dims) != 4:
        raise _No(f"the filter has dimensions {dims}; only 2-D convolutions (KCRS) can be fused")
    if found.scale.size > 1 and (found.axis % 4 != 0 or found.scale.shape != (dims[0],)):
        raise _No(f"the filter has {found.scale.size} scales along axis {found.axis}; one for each output channel "
                  f"(axis 0) can be fused")  # fmt: skip
    scale = np.broadcast_to(found.scale.reshape(-1), (dims[0],)).astype(np.float64)
    return Weight(graph, tensor, (dims[0], dims[1], dims[2], dims[3]), scale, rounded)


def _bias(graph: Graph, conv: NodeProto, K: int) -> np.ndarray:
    tensor = conv.input[2] if len(conv.input) > 2 else ""
    if not tensor:
        return np.zeros(K)
    node, scale = graph.producer(tensor), np.ones(1)
    if graph.is_op(node, "DequantizeLinear"):  # int32, usually with the product of both scales
        given = graph.constant(node.input[1]) if len(node.input) > 1 else None
        zero = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1)
        if given is None or zero is None or np.any(zero):
            raise _No("the bias is dequantised with a scale or zero point that cannot be fused; store it as float")
        tensor, scale = node.input[0], np.asarray(given, np.float64).reshape(-1)
    value = graph.constant(tensor)
    if value is None or value.shape != (K,) or scale.size not in (1, K):
        raise _No(f"the bias '{tensor}' is no constant vector of {K}; only constants can be fused")
    return value.astype(np.float64) * scale


@dataclass(frozen=True)
class Step:
    """The QuantizeLinear that alone reads a tensor, and its scale."""

    node: NodeProto
    value: float


def quantiser_after(graph: Graph, tensor: str) -> Step | None:
    """The symmetric int8 quantisation that alone reads the tensor; None leaves the output in floating point."""
    node = graph.only_user(tensor)
    if not graph.is_op(node, "QuantizeLinear") or node.input[0] != tensor:
        return None
    try:
        return Step(node, _scalar(linear(graph, node, "the output"), "the output"))
    except _No:
        return None
