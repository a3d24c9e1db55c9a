"""Turns a Conv and its neighbours into calls of the operator: the one that fuses most, then smaller ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from onnx import NodeProto

from cutefuse import kernels
from cutefuse.graph.numbers import ELEMENT_BYTES
from cutefuse.graph.read import Graph, attribute
from cutefuse.kernels import Call
from cutefuse.match import before as views
from cutefuse.match.after import Chain, chains_after
from cutefuse.match.answer import Constant, Finder, Match, Refusal
from cutefuse.match.answer import Operand as MatchOperand
from cutefuse.match.before import Operand
from cutefuse.match.conv import read as conv_facts
from cutefuse.match.conv.front import Front, behind_steps, broken, find_concat, one_source
from cutefuse.match.conv.image import of_image
from cutefuse.match.conv.pools import POOLS, wider
from cutefuse.match.conv.spread import SPREAD, spread_of
from cutefuse.match.explain import behind_concat
from cutefuse.match.pre_activation import PreActivation, fronts, grouped, pre_activation
from cutefuse.match.quant.read import quantised_front
from cutefuse.match.sizes import shape_of
from cutefuse.operators import concat_conv, conv_form, conv_math
from cutefuse.operators.conv_call import make_call, sources_of
from cutefuse.operators.conv_form import Form, Source, most_outputs, most_sources
from cutefuse.operators.layouts import HWC8, NHWC

RESIDUAL, PARALLEL, SINGLE, PRE_ACTIVATION, ALONE = "residual", "parallel", "single", "pre_activation", "alone"
DEPTHWISE = "depthwise"
_PASSED = ("Identity", "Dropout", "Pad")  # nodes that cost an engine nothing before a convolution


def _legal(found: Match | Refusal | None) -> Match | None:
    """The answer where it is a match that the kernels can run."""
    return found if isinstance(found, Match) and not kernels.reject(found.call) else None


def _has_neighbour(graph: Graph, conv: NodeProto) -> bool:
    """Whether an activation or a residual follows a convolution, or it reads an enlarged tensor or a range."""
    if not conv.output or not conv.output[0]:
        return False
    weight = graph.dims(conv.input[1]) or ()
    filters = weight[0] if weight and conv.op_type == "Conv" else -1
    if len(weight) > 1 and conv.op_type == "ConvTranspose":
        filters = weight[1] * attribute(conv, "group", 1)
    front = one_source(graph, conv)
    shape = partial(shape_of, graph, conv.output[0], front.sources)
    chain = chains_after(graph, conv.output[0], filters, shape)[0]
    if not chain.is_empty or chain.note:
        return True
    (tensor,) = front.sources
    dims = graph.dims(tensor)
    if dims is None or len(dims) != 4:
        return False
    return views.see_through(graph, Operand(tensor, Source(dims, dims[1]))).source.is_view


def _transposed(graph: Graph, node: NodeProto, reason: str) -> Refusal | None:
    """The refusal of a ConvTranspose with such a neighbour, or with a Concat in front, for a reason."""
    near = _has_neighbour(graph, node) or behind_concat(graph, node.input[0]) or find_concat(graph, node, 0) is not None
    return Refusal(f"this is a ConvTranspose: {reason}", (node,)) if near else None


def _spread(graph: Graph, node: NodeProto, layout: int) -> Match | Refusal | None:
    """The site of a convolution whose outputs are spread over squares of pixels, with the Concat in front of it where
    that is legal; None of a Conv without DepthToSpace."""
    joined = find_concat(graph, node, most_sources())
    fronts = [f for f in (joined, one_source(graph, node)) if isinstance(f, Front) and len(f.sources) <= most_sources()]
    answers = [_spread_over(graph, node, front, layout) for front in fronts]
    return next(filter(_legal, answers), answers[-1])


def _spread_over(graph: Graph, node: NodeProto, site: Front, layout: int) -> Match | Refusal | None:
    nodes = (node, *site.nodes)
    facts = broken(graph, node, nodes) or conv_facts.read(graph, node, site)
    if isinstance(facts, Refusal):
        return facts if node.op_type == "ConvTranspose" else None  # of a Conv it is said elsewhere
    found = spread_of(graph, node, facts) if not facts.depthwise else None
    if found is None or isinstance(found, str):
        return Refusal(found, nodes) if found else None
    facts, chain, stored = found
    if facts.dtype == "float32" and facts.spread > 1:
        types = "outputs are spread in float16 and bfloat16, convert the model"
        return Refusal(f"the filter is float32; {types}", nodes)
    folded = conv_facts.Folded(graph, facts, chain.steps)
    if fault := folded.reject():
        return Refusal(fault, (*nodes, *chain.nodes))
    operands = [Operand(t, Source(d, d[1])) for t, d in zip(site.sources, facts.sources, strict=True)]
    built = _built(graph, node, site, facts, folded, operands, chain, None, layout)
    return replace(built, stored={**built.stored, **dict.fromkeys(stored, ELEMENT_BYTES[facts.dtype])})


def _pre_activated(graph: Graph, node: NodeProto, before: PreActivation, layout: int) -> list[Match] | str:
    """The matches that take in what stands before a Conv, the largest first; or why there is none."""
    reason, matches = "", list[Match]()
    for front in fronts(graph, before):
        facts = conv_facts.read(graph, node, front)
        if isinstance(facts, Refusal):
            reason = reason or facts.reason
            continue
        operands = grouped(facts, front, most_sources())
        chain = chains_after(graph, node.output[0], facts.weight_dims[0])[0]
        folded = conv_facts.Folded(graph, facts, chain.steps)
        fault = before.reject(facts.dtype) or folded.reject()
        if operands is None or fault:
            reason = reason or fault or f"Concat joins {len(front.sources)} tensors; their Concat stays"
            continue
        sources = [s for _, s in operands]
        form = Form(len(sources), chain.suffix, pre_activated=True)
        call = make_call(form, sources, facts.weight_dims[:1], facts.geometry, facts.dtype, chain.params, layout)
        if fault := kernels.reject(call):
            reason = reason or fault
            continue
        inputs = (
            *(o for o, _ in operands), *folded.constants(sources, call),
            *before.constants(facts.weight_dims[1], facts.dtype),
        )  # fmt: skip
        takes = frozenset({PRE_ACTIVATION} | (set() if front.concats else {SINGLE}))
        notes = (chain.note,) if chain.note else ()
        nodes = (node, *front.nodes, *chain.nodes)
        stored = _stored(facts, front.nodes, chain)
        matches.append(Match(call, nodes, inputs, (chain.output,), stored, takes, notes=notes))
    return matches or reason


def _match_plain(graph: Graph, node: NodeProto, wanted: ConvSites) -> Match | Refusal | None:
    """The site of a Conv that multiplies what it reads as it is."""
    found: Match | Refusal | None = None
    # Sources of an inner Concat may be illegal where their join is not (two and six float32 channels).
    for flatten_to in (most_sources(), 0):
        front = find_concat(graph, node, flatten_to)
        found = _match(graph, node, front, wanted) if isinstance(front, Front) else front
        if not isinstance(found, Match):
            break
        if _legal(found):
            return found
    behind = _match(graph, node, one_source(graph, node), wanted)
    if found is None:
        return _near(graph, node, behind)
    if (legal := _legal(behind)) is None:
        return found
    # What cannot be fused with its Concat may still be fused behind it.
    reason = found.reason if isinstance(found, Refusal) else kernels.reject(found.call)
    return noted(legal, f"'{node.input[0]}' is read as it is: {reason}")


def _with_more(
    graph: Graph, node: NodeProto, wanted: ConvSites, plain: Match | Refusal | None
) -> Match | Refusal | None:
    """The site of a Conv, first with the average pool or slices in front of it, or with a note why they stay, then with
    the affine steps in front of it, in its filter."""
    pooled = wider(graph, node)
    more: list[tuple[Front, conv_facts.Facts | None]] = [] if isinstance(pooled, str) else [*pooled]
    more += [(front, None) for front in behind_steps(graph, node, most_sources())]
    for front, facts in reversed(more):
        if whole := _legal(_match(graph, node, front, wanted, facts)):
            plain = _chained(whole.chain, _legal(plain))
    if isinstance(pooled, str):
        return noted(plain, pooled) if isinstance(plain, Match) else plain or Refusal(pooled, (node,))
    return plain


def _chained(matches: Sequence[Match], smaller: Match | None = None) -> Match | None:
    """These matches as one chain, the largest first, and behind them that of a smaller one."""
    for match in reversed(matches):
        smaller = replace(match, otherwise=smaller)
    return smaller


def _near(graph: Graph, node: NodeProto, behind: Match | Refusal | None) -> Match | Refusal | None:
    """The site of a Conv without a Concat right before it; one further off is named, unless the Conv has groups."""
    if isinstance(behind, Refusal) or attribute(node, "group", 1) != 1:
        return behind
    why = behind_concat(graph, node.input[0], behind.nodes if behind else ())
    if behind is None:
        return Refusal(why, (node,)) if why else None
    return noted(behind, why) if why else behind


def noted(found: Match, note: str) -> Match:
    """A match and all its smaller ones with one more note."""
    smaller = noted(found.otherwise, note) if found.otherwise else None
    return replace(found, notes=(*found.notes, note), otherwise=smaller)


def _match(
    graph: Graph, node: NodeProto, site: Front, wanted: ConvSites, facts: conv_facts.Facts | Refusal | None = None,
    steps: float = math.inf,
) -> Match | Refusal | None:  # fmt: skip
    """The site of a Conv over a front. `facts`: those of another filter that computes what is in front as well.
    `steps`: the most affine steps behind the Conv that go into the filter."""
    if refusal := broken(graph, node, (node, *site.nodes)):
        return refusal if site.concats or _has_neighbour(graph, node) else None
    facts = facts or conv_facts.read(graph, node, site)
    if isinstance(facts, conv_facts.Facts) and facts.depthwise and facts.dtype == "float32":
        types = "depthwise ones can be fused in float16 and bfloat16, convert the model"
        facts = Refusal(f"the filter is float32; {types}", (node, *site.nodes))
    if isinstance(facts, Refusal):
        return facts if site.concats or _has_neighbour(graph, node) else None
    plain = [Operand(t, Source(d, d[1])) for t, d in zip(site.sources, facts.sources, strict=True)]
    seen = plain if facts.depthwise else [views.see_through(graph, p) for p in plain]
    images = (*site.sources, *(o.tensor for o in seen))  # a view has the batch of its tensor
    shape = None if facts.depthwise else partial(shape_of, graph, node.output[0], images)  # it takes no residual
    chains = chains_after(graph, node.output[0], facts.weight_dims[0], shape, steps)

    def rejected(operands: Sequence[Operand]) -> str | None:
        if len(operands) > most_sources():
            return f"Concat joins {len(operands)} tensors, at most {most_sources()} can be fused; split the Concat"
        return kernels.reject(_call(facts, operands, chains[-1], None, wanted.layout))

    taken: dict[tuple[str, ...], tuple[Operand, ...]] = {}  # best first, each with other tensors as sources
    in_place = any(o is not p for o, p in zip(seen, plain, strict=True))
    for kinds in (views.KINDS, (views.RANGES,), (views.UPSAMPLE,), ()) if in_place else ((),):
        operands = views.choose(graph, plain, rejected, kinds)
        taken.setdefault(tuple(o.tensor for o in operands), operands)
    options = [
        (operands, chain, added)
        for operands in taken.values() if len(operands) <= most_sources()
        for chain in chains for added in _residuals(graph, chain, facts, operands)
        if wanted.alone or site.concats or facts.make or not chain.is_empty or any(o.source.is_view for o in operands)
    ]  # fmt: skip
    if not options:
        reason = (rejected(plain) or "") if site.concats else chains[0].note or " and ".join(seen[0].notes)
        return Refusal(reason, (node, *site.nodes)) if reason else None
    folded = conv_facts.Folded(graph, facts, chains[0].steps, site.steps)
    if fault := folded.reject():
        # A model with NaN or infinity is to be repaired; else the step that does not fit stays behind the site.
        fewer = len(chains[0].steps) - 1 if conv_facts.IMPRECISE in fault else -1
        found = _match(graph, node, site, wanted, facts, fewer) if fewer >= 0 else None
        whole = (node, *site.nodes, *chains[-1].nodes)
        return noted(found, fault) if isinstance(found, Match) else Refusal(fault, whole)
    built = [
        _built(graph, node, site, facts, folded, operands, chain, added, wanted.layout)
        for operands, chain, added in options
    ]
    legal = [m for m in built if not kernels.reject(m.call)] or built[-1:]
    answers = [of_image(graph, m, folded) for m in legal]
    found = _chained([*(m for m in answers if isinstance(m, Match)), *legal])
    why = next((reason for reason in answers if isinstance(reason, str)), "")
    return noted(found, why) if found and why else found


def _residuals(
    graph: Graph, chain: Chain, facts: conv_facts.Facts, operands: Sequence[Operand]
) -> list[Operand | None]:
    """What holds the residual of a chain: the wider tensor of which it is a range, and itself; None without one."""
    if not chain.residual:
        return [None]
    dims = _call(facts, operands, chain, None, HWC8).outputs[0].dims
    whole = Operand(chain.residual, Source(tuple(dims), dims[1]))
    seen = views.see_through(graph, whole, (views.RANGES,))
    return [whole] if seen.tensor == whole.tensor else [seen, whole]


def _call(
    facts: conv_facts.Facts, operands: Sequence[Operand], chain: Chain, added: Operand | None, layout: int
) -> Call:
    sources = [o.source for o in operands]
    residual = added.source if added else None
    view = any(s.is_view for s in (*sources, *([residual] if residual else [])))
    form = Form(len(sources), chain.suffix, view, 1, chain.when, depthwise=facts.depthwise, spread=facts.spread)
    outputs = [facts.weight_dims[0] // facts.spread**2]
    return make_call(form, sources, outputs, facts.geometry, facts.dtype, chain.params, layout, residual)


def _built(
    graph: Graph, conv: NodeProto, site: Front, facts: conv_facts.Facts, folded: conv_facts.Folded,
    operands: Sequence[Operand], chain: Chain, added: Operand | None, layout: int,
) -> Match:  # fmt: skip
    call = _call(facts, operands, chain, added, layout)
    inputs: list[str | Constant] = [o.tensor for o in operands]
    inputs += folded.constants([o.source for o in operands], call)
    inputs += [added.tensor] if added else []
    read = (*operands, *([added] if added else []))
    between = {id(n): n for o in read for n in o.nodes}
    stored = _stored(facts, (*between.values(), *site.nodes), chain)
    crossed = {n.op_type for n in between.values()}
    takes = frozenset(kind for kind, types in views.OPERATORS.items() if types & crossed)
    takes |= {RESIDUAL} if chain.residual else set()
    takes |= {SPREAD} if facts.transposed or facts.spread > 1 else set()
    if not site.concats:
        takes |= {SINGLE} if takes or facts.make or not chain.is_empty else {SINGLE, ALONE}
    takes |= {DEPTHWISE} if facts.depthwise else set()
    takes |= {POOLS} if facts.make else set()
    notes = [n for o in read for n in o.notes] + ([chain.note] if chain.note else [])
    return Match(
        call, (conv, *site.nodes, *between.values(), *chain.nodes), tuple(inputs), (chain.output,), stored,
        takes, notes=tuple(dict.fromkeys(notes)),
    )  # fmt: skip


def _stored(facts: conv_facts.Facts, before: Iterable[NodeProto], chain: Chain) -> dict[str, int]:
    """What engines write and read of the nodes before a convolution and of the chain behind it: bytes of an element."""
    made = [o for n in before if n.op_type not in _PASSED for o in n.output]
    return dict.fromkeys(filter(None, (*made, chain.stored)), ELEMENT_BYTES[facts.dtype])


def _merged(matches: Sequence[Match]) -> Match | None:
    first = matches[0]
    form = replace(conv_form.form_of(first.call.op_type), outputs=len(matches))
    attrs: dict[str, Any] = dict(first.call.attrs)
    geometry = conv_math.Geometry.of(attrs)
    params = {name: attrs[name][0] for name in ("alpha", "lo", "hi")}
    filters = [m.call.outputs[0].dims[1] for m in matches]
    layout = attrs["layout"][0]
    call = make_call(form, sources_of(first.call), filters, geometry, first.call.dtype, params, layout)
    if kernels.reject(call):
        return None
    constants = [
        replace(own, dims=tuple(tensor.dims), make=partial(_stacked, [m.inputs[i] for m in matches]))
        for i, (own, tensor) in enumerate(zip(first.inputs, call.inputs, strict=True)) if isinstance(own, Constant)
    ]  # fmt: skip
    nodes = {id(n): n for m in matches for n in m.nodes}
    stored = {name: size for m in matches for name, size in m.stored.items()}
    return Match(
        call, tuple(nodes.values()), (*first.inputs[: form.sources], *constants),
        tuple(m.outputs[0] for m in matches), stored, first.takes | {PARALLEL},
        notes=tuple(dict.fromkeys(n for m in matches for n in m.notes)),
    )  # fmt: skip


def _stacked(parts: Sequence[MatchOperand]) -> np.ndarray:
    return np.concatenate([p.make() for p in parts if isinstance(p, Constant)], axis=0)


class ConvSites(Finder):
    """Convolutions in float32, float16 and bfloat16, over a Concat or with another neighbour that costs time.

    alone: those without any too, for an engine whose convolutions do not even add their bias. layout: of the nodes.
    """

    op = concat_conv.OPERATOR
    anchors = frozenset({"Conv", "ConvTranspose"})
    own_tiles_first = True

    def __init__(self, alone: bool = False, layout: int = HWC8) -> None:
        self.alone, self.layout = alone, layout

    def match(self, graph: Graph, node: NodeProto) -> Match | Refusal | None:
        if node.domain not in ("", "ai.onnx") or len(node.input) < 2:
            return None
        if quantised_front(graph, node, self.layout == NHWC):
            return None
        if node.op_type == "ConvTranspose":
            found = _spread(graph, node, self.layout)
            return _transposed(graph, node, found.reason) if isinstance(found, Refusal) else found
        before = pre_activation(graph, node)
        own = _pre_activated(graph, node, before, self.layout) if before else ""
        found = _with_more(graph, node, self, _match_plain(graph, node, self))
        if own and isinstance(own, str):
            found = noted(found, own) if isinstance(found, Match) else Refusal(own, (node,))
        elif not isinstance(own, str):
            found = _chained(own, _legal(found))
        spread = _spread(graph, node, self.layout)
        if isinstance(spread, Match) and not (reason := kernels.reject(spread.call)):
            return replace(spread, otherwise=found if isinstance(found, Match) else None)
        if spread is None or isinstance(found, Refusal):
            return found
        reason = spread.reason if isinstance(spread, Refusal) else f"the DepthToSpace behind it stays: {reason}"
        return noted(found, reason) if found else Refusal(reason, (node,))

    def merge_key(self, match: Match) -> Hashable | None:
        """Convolutions of the same sources with the same geometry and activation can be one, with more filters."""
        form = conv_form.form_of(match.call.op_type)
        if form != Form(form.sources, form.suffix, form.view) or POOLS in match.takes:
            return None
        attrs = tuple((name, tuple(values)) for name, values in match.call.attrs.items())  # type: ignore[arg-type]
        return match.call.op_type, match.inputs[: form.sources], attrs, match.call.dtype

    def merge(self, matches: Sequence[Match]) -> list[tuple[list[int], Match]]:
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
