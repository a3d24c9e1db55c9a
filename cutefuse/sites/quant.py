"""Turns an int8 Concat -> Conv site of a Q/DQ graph into a call of the operator."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from cutefuse.graph.read import Graph
from cutefuse.ops import conv_math, quant_concat_conv
from cutefuse.ops.conv_form import most_sources
from cutefuse.ops.quant_concat_conv import make_call, plain_of
from cutefuse.sites import quant_facts
from cutefuse.sites.chain import chains_after
from cutefuse.sites.match import Constant, Finder, Match, Refusal, Traffic


class QuantSites(Finder):
    """Convolutions over int8 sources."""

    op = quant_concat_conv.OPERATOR
    anchors = frozenset({"Conv"})

    def match(self, graph: Graph, node: NodeProto) -> Match | Refusal | None:
        site = quant_facts.find(graph, node, most_sources(quantised=True))
        if site is None or isinstance(site, Refusal):
            return site
        K = site.weight.dims[0]
        (tail,) = chains_after(graph, node.output[0], K)
        factor, bias = site.weight.scale, site.bias
        for step in tail.steps:  # affine steps per channel move into the filter's scales and the bias
            scale, shift = step.make()
            factor, bias = factor * scale, bias * scale + shift
        if not (np.isfinite(factor.astype(np.float32)).all() and np.isfinite(bias.astype(np.float32)).all()):
            return Refusal("quantised site: the constants after the Conv give NaN or infinity; repair it", site.nodes)
        output, nodes = tail.output, (*site.nodes, *tail.nodes)
        last = quant_facts.quantiser_after(graph, output)
        if last is not None:
            output, nodes = last.node.output[0], (*nodes, last.node)
        dtype = graph.dtype(tail.output) or graph.dtype(node.output[0]) or "float32"
        if dtype not in self.op.dtypes:
            return Refusal(
                f"quantised site: the Conv gives {dtype}; only {', '.join(self.op.dtypes)} can be fused", nodes
            )
        plain = plain_of(site.dims, K, site.geometry, tail.suffix, tail.params)
        call = make_call(plain, site.scales, dtype, None if last is None else last.value)
        channels = [d[1] for d in site.dims]
        constants = (
            Constant(
                "packed_weight", tuple(call.inputs[-3].dims), "int8",
                lambda: conv_math.pack(site.weight.make(), channels),
            ),
            Constant("weight_scale", (K,), "float32", lambda: factor.astype(np.float32)),
            Constant("bias", (K,), "float32", lambda: bias.astype(np.float32)),
        )  # fmt: skip
        batch, _, height, width = site.dims[0]
        saved = {site.concat: Traffic((batch, sum(channels), height, width), 1)}
        return Match(call, nodes, (*site.sources, *constants), (output,), saved)
