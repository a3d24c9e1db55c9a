"""Turns a quantised convolution of a Q/DQ graph into a call of the operator."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from cutefuse import kernels
from cutefuse.graph.numbers import INT8, Number
from cutefuse.graph.read import Graph, label
from cutefuse.match.after import Chain, chains_after
from cutefuse.match.answer import Constant, Finder, Match, Refusal
from cutefuse.match.conv.build import SINGLE
from cutefuse.match.qdq import NotFused, after_cast, cast_type, linear, quantises, scalar
from cutefuse.match.quant import read as quant_facts
from cutefuse.match.quant.read import QuantSite
from cutefuse.operators import conv_math, quant_concat_conv, quant_math
from cutefuse.operators.conv_form import most_sources
from cutefuse.operators.layouts import HWC8, NHWC
from cutefuse.operators.quant_concat_conv import make_call, plain_of


@dataclass(frozen=True)
class _End:
    """Where a site ends: the nodes behind its activation that it takes, and what they make, a float of a type or, with
    a scale, quantised numbers."""

    nodes: tuple[NodeProto, ...]
    output: str
    dtype: str
    scale: float | None = None


class QuantSites(Finder):
    """Convolutions over int8 or float8 sources, joined by a Concat. Without one too in layout NHWC, that of Myelin: it
    writes the sums of an int8 convolution in float32, which a kernel behind scales, activates and quantises."""

    op = quant_concat_conv.OPERATOR
    anchors = frozenset({"Conv"})

    def __init__(self, layout: int = HWC8) -> None:
        self.layout = layout

    def match(self, graph: Graph, node: NodeProto) -> Match | Refusal | None:
        site = quant_facts.find(graph, node, most_sources(quantised=True), self.layout == NHWC)
        if site is None or isinstance(site, Refusal):
            return site
        (tail,) = chains_after(graph, node.output[0], site.weight.dims[0])
        factor, bias = site.weight.scale, site.bias
        for step in tail.steps:  # affine steps per channel move into the filter's scales and the bias
            scale, shift = step.make()
            factor, bias = factor * scale, bias * scale + shift
        if not (np.isfinite(factor.astype(np.float32)).all() and np.isfinite(bias.astype(np.float32)).all()):
            return Refusal("quantised site: the constants after the Conv give NaN or infinity; repair it", site.nodes)
        dtype = graph.dtype(tail.output) or graph.dtype(node.output[0]) or site.weight.dtype
        if dtype not in self.op.dtypes:
            why = f"quantised site: the Conv gives {dtype}; only {', '.join(self.op.dtypes)} can be fused"
            return Refusal(why, (*site.nodes, *tail.nodes))
        ends = _ends(graph, tail, dtype, site)
        return _first_legal([_match(site, tail, end, factor, bias, self.layout) for end in ends])


def _ends(graph: Graph, tail: Chain, dtype: str, site: QuantSite) -> list[_End]:
    """Where a site may end, most nodes first: behind the quantiser that alone reads it, behind a Cast to a type that
    the fastest kernels write, or behind the activation."""
    found = [_End((), tail.output, dtype)]
    between, inner = after_cast(graph, tail.output)
    if between and _writes(site.weight.number, cast_type(between)) and not _writes(site.weight.number, dtype):
        found.insert(0, _End(tuple(between), inner, cast_type(between)))
    node = graph.only_user(inner)
    if quantises(node, graph) and node.input[0] == inner:
        with contextlib.suppress(NotFused):  # what is no symmetric quantisation to the same type leaves a float
            scale = linear(graph, node, "the output")
            if scale.number is site.weight.number:
                nodes = (*between, node)
                found.insert(0, _End(nodes, node.output[0], dtype, scalar(scale, "the output")))
    return found


def _match(site: QuantSite, tail: Chain, end: _End, factor: np.ndarray, bias: np.ndarray, layout: int) -> Match:
    """The site up to one end. `factor` and `bias` [K] are the filter's scales and the bias with what follows."""
    K, order = site.weight.dims[0], quant_math.order_of(site.scales)
    dims, scales = [site.dims[i] for i in order], [site.scales[i] for i in order]
    channels = [d[1] for d in dims]

    def filters() -> np.ndarray:
        return quant_math.in_order(site.weight.make(), [d[1] for d in site.dims], order)

    plain = plain_of(dims, K, site.geometry, tail.suffix, tail.params, layout)
    bound = quant_math.sum_bound(filters(), channels, scales) if site.weight.number is INT8 else 0
    call = make_call(plain, scales, end.dtype, end.scale, site.weight.number, bound)
    constants = (
        Constant(
            "packed_weight", tuple(call.inputs[-3].dims), site.weight.number.name,
            lambda: conv_math.pack(filters(), channels),
        ),
        Constant("weight_scale", (K,), "float32", lambda: factor.astype(np.float32)),
        Constant("bias", (K,), "float32", lambda: bias.astype(np.float32)),
    )  # fmt: skip
    stored = {site.concat: 1} if site.concat else {}
    nodes = (*site.nodes, *tail.nodes, *end.nodes)
    takes = frozenset(() if site.concat else (SINGLE,))
    return Match(call, nodes, (*(site.sources[i] for i in order), *constants), (end.output,), stored, takes)


def _first_legal(matches: Sequence[Match]) -> Match:
    """The first match that the library can run, with a note why a larger one cannot be; without one the first."""
    refusals = [kernels.reject(m.call) for m in matches]
    if refusals[0] is None or None not in refusals:
        return matches[0]
    first = refusals.index(None)
    last = matches[0].nodes[-1]
    note = f"{last.op_type} '{label(last)}' stays: {refusals[0]}"
    return replace(matches[first], notes=(*matches[first].notes, note))


def _writes(number: Number, dtype: str) -> bool:
    """Whether the fastest kernels for a number type give a float type: Hopper's own write float8's as float16 alone."""
    return dtype == "float16" or number is INT8
