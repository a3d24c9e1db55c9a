"""Turns a Concat -> Conv site into calls of the operator: the one that fuses most, then smaller ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from onnx import NodeProto

from cutefuse import kernels
from cutefuse.graph.read import Graph
from cutefuse.kernels import Call
from cutefuse.ops import concat_conv, conv_form, conv_math
from cutefuse.ops.conv_call import ELEMENT_BYTES, make_call, sources_of
from cutefuse.ops.conv_form import Form, Source, most_outputs, most_sources
from cutefuse.sites import conv_facts, views
from cutefuse.sites.chain import Chain, Shape, chains_after
from cutefuse.sites.match import Constant, Finder, Match, Quantized, Refusal
from cutefuse.sites.quant_facts import is_quantised
from cutefuse.sites.views import Operand

RESIDUAL, PARALLEL = "residual", "parallel"


def match(graph: Graph, node: NodeProto) -> Match | Refusal | None:
    """The site around a Conv: the match that fuses most, or why there is none."""
    found = _match(graph, node, most_sources())
    if isinstance(found, Match) and kernels.reject(found.call):
        # Sources of an inner Concat may be illegal where their join is not (two and six float32 channels).
        joined = _match(graph, node, 0)
        found = joined if isinstance(joined, Match) and not kernels.reject(joined.call) else found
    return found


def _match(graph: Graph, node: NodeProto, flatten_to: int) -> Match | Refusal | None:
    site = conv_facts.find_concat(graph, node, flatten_to)
    if site is None or isinstance(site, Refusal):
        return site
    facts = conv_facts.read(graph, node, site)
    if isinstance(facts, Refusal):
        return facts
    chains = chains_after(graph, node.output[0], facts.weight_dims[0], _output_shape(graph, node, site))
    folded = conv_facts.Folded(graph, facts, chains[0].steps)
    if reason := folded.reject():
        return Refusal(reason, (node, *site.nodes, *chains[-1].nodes))
    plain = [Operand(t, Source(d, d[1])) for t, d in zip(site.sources, facts.sources, strict=True)]

    def rejected(operands: Sequence[Operand]) -> str | None:
        if len(operands) > most_sources():
            return f"Concat joins {len(operands)} tensors, at most {most_sources()} can be fused; split the Concat"
        return kernels.reject(_call(facts, operands, chains[-1]))

    taken: dict[tuple[str, ...], tuple[Operand, ...]] = {}  # best first, each with other tensors as sources
    for kinds in (views.KINDS, (views.RANGES,), (views.UPSAMPLE,), ()):
        operands = views.choose(graph, plain, rejected, kinds)
        taken.setdefault(tuple(o.tensor for o in operands), operands)
    options = [
        _built(graph, node, site, facts, folded, operands, chain)
        for operands in taken.values() if len(operands) <= most_sources() for chain in chains
    ]  # fmt: skip
    if not options:
        return Refusal(rejected(plain) or "", (node, *site.nodes))
    legal = [m for m in options if not kernels.reject(m.call)] or options[-1:]
    found = legal[-1]
    for bigger in reversed(legal[:-1]):
        found = replace(bigger, otherwise=found)
    return found


def _output_shape(graph: Graph, conv: NodeProto, site: conv_facts.ConcatSite) -> Shape:
    own = [graph.partial_symbols(conv.output[0]) or ()]
    # A Concat along channels needs equal N: shape inference gives it a new name behind some operators.
    batches = own + [graph.partial_symbols(t) or () for t in site.sources]
    known = [batches, own, own, own]
    return tuple(frozenset(s[i] for s in rows if len(s) == 4 and s[i] != "") for i, rows in enumerate(known))


def _call(facts: conv_facts.Facts, operands: Sequence[Operand], chain: Chain) -> Call:
    sources = [o.source for o in operands]
    form = Form(len(sources), chain.suffix, any(s.is_view for s in sources), 1, chain.when)
    return make_call(form, sources, facts.weight_dims[:1], facts.geometry, facts.dtype, chain.params)


def _built(
    graph: Graph, conv: NodeProto, site: conv_facts.ConcatSite, facts: conv_facts.Facts, folded: conv_facts.Folded,
    operands: Sequence[Operand], chain: Chain,
) -> Match:  # fmt: skip
    call = _call(facts, operands, chain)
    channels = [o.source.channels for o in operands]
    w, b = call.inputs[len(operands) : len(operands) + 2]
    inputs: list[str | Constant] = [o.tensor for o in operands]
    inputs.append(Constant("packed_weight", tuple(w.dims), w.dtype, partial(folded.packed, channels), typed=True))
    inputs.append(Constant("bias", tuple(b.dims), b.dtype, folded.bias))
    inputs += [chain.residual] if chain.residual else []
    between = {id(n): n for o in operands for n in o.nodes}
    element_bytes = ELEMENT_BYTES[facts.dtype]
    saved = views.traffic(graph, operands, element_bytes)
    saved |= conv_facts.traffic(graph, site, facts, element_bytes)
    takes = {RESIDUAL} if chain.residual else set()
    return Match(
        call, (conv, *site.nodes, *between.values(), *chain.nodes), tuple(inputs), (chain.output,), saved,
        views.kinds_of(operands) | takes,
        notes=tuple(dict.fromkeys(n for o in operands for n in o.notes)),
    )  # fmt: skip


def merge_key(found: Match) -> Hashable | None:
    """Convolutions of the same sources with the same geometry and activation can be one, with more filters."""
    form = conv_form.form_of(found.call.op_type)
    if form.residual or form.outputs > 1:
        return None
    attrs = tuple((name, tuple(values)) for name, values in found.call.attrs.items())  # type: ignore[arg-type]
    return found.call.op_type, found.inputs[: form.sources], attrs, found.call.inputs[0].dtype


def merge(matches: Sequence[Match]) -> list[tuple[list[int], Match]]:
    """(positions, match) of convolutions of equal key that become one; the others stay single."""
    # Vectors must not straddle two outputs: filters in whole vectors come first, and one other may be the last.
    waiting = sorted(range(len(matches)), key=lambda i: matches[i].call.outputs[0].dims[1] % 8 != 0)
    done = []
    while len(waiting) > 1:
        for count in range(min(most_outputs(), len(waiting)), 1, -1):
            if merged := _merged([matches[i] for i in waiting[:count]]):
                done.append((waiting[:count], merged))
                waiting = waiting[count:]
                break
        else:
            waiting = waiting[1:]
    return done


def _merged(matches: Sequence[Match]) -> Match | None:
    first = matches[0]
    form = replace(conv_form.form_of(first.call.op_type), outputs=len(matches))
    attrs: dict[str, Any] = dict(first.call.attrs)
    geometry = conv_math.Geometry(*(tuple(attrs[k]) for k in ("kernel_shape", "strides", "pads", "dilations")))
    params = {name: attrs[name][0] for name in ("alpha", "lo", "hi")}
    filters = [m.call.outputs[0].dims[1] for m in matches]
    call = make_call(form, sources_of(first.call), filters, geometry, first.call.inputs[0].dtype, params)
    if kernels.reject(call):
        return None
    constants = [
        replace(own, dims=tuple(tensor.dims), make=partial(_stacked, [m.inputs[i] for m in matches]))
        for i, (own, tensor) in enumerate(zip(first.inputs, call.inputs, strict=True)) if isinstance(own, Constant)
    ]  # fmt: skip
    nodes = {id(n): n for m in matches for n in m.nodes}
    saved = {name: size for m in matches for name, size in m.traffic.items()}
    return Match(
        call, tuple(nodes.values()), (*first.inputs[: form.sources], *constants),
        tuple(m.outputs[0] for m in matches), saved, first.takes | {PARALLEL},
        notes=tuple(dict.fromkeys(n for m in matches for n in m.notes)),
    )  # fmt: skip


def _stacked(parts: Sequence[str | Constant | Quantized]) -> np.ndarray:
    return np.concatenate([p.make() for p in parts if isinstance(p, Constant)], axis=0)


class ConvSites(Finder):
    """Convolutions in float32, float16 and bfloat16."""

    op = concat_conv.OPERATOR
    anchors = frozenset({"Conv"})
    own_tiles_first = True

    def match(self, graph: Graph, node: NodeProto) -> Match | Refusal | None:
        return None if is_quantised(graph, node) else match(graph, node)

    def merge_key(self, match: Match) -> Hashable | None:
        return merge_key(match)

    def merge(self, matches: Sequence[Match]) -> list[tuple[list[int], Match]]:
        return merge(matches)
