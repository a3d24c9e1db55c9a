"""The proof: the model as it was and as it is written run on the same inputs, and every fused site is compared."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from cutefuse import kernels
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.cut import needed
from cutefuse.graph.read import ELEM_TYPES, Graph
from cutefuse.graph.runner import LacksOperator
from cutefuse.graph.store import load_model
from cutefuse.graph.verify import Probe, verify
from cutefuse.match.answer import Constant, Match
from cutefuse.match.site import Site
from cutefuse.operators import concat_conv
from cutefuse.operators.layouts import TO_NCHW
from cutefuse.progress import spinner
from cutefuse.rewrite.agnostic import is_nhwc
from cutefuse.rewrite.functions import add_bodies
from cutefuse.rewrite.islands import is_barred
from cutefuse.rewrite.prove_parts import prove_parts
from cutefuse.rewrite.state import State
from cutefuse.select.wiring import CONVOLUTIONS


def run(state: State, folder: Path) -> None:
    """Reads `model`, which `apply` saved in a folder, `sites`, `silus`, `converted`; leaves `proof` if it is asked."""
    if not state.options.verify:
        return
    source, graph, options = state.source, state.graph, state.options
    fused = state.fused
    model, added = graph.model, _left_out(graph, fused)
    if added or not options.functions:
        model = deepcopy(graph.model)
        model.graph.node.extend(added)
    if not options.functions:
        add_bodies(model, graph, {s.name: s.chosen.call for s in fused})
    # Of what is written anew without a fused node.
    dtypes = [s.dtype for s in state.rewritten] + [graph.dtype(b.tensor) or "float32" for b in state.branches]
    tolerance = max(
        [s.op.tolerance(s.chosen.call.dtype) for s in fused]
        + [concat_conv.OPERATOR.tolerance(dtype) for dtype in dtypes],
        default=concat_conv.OPERATOR.tolerance("float32"),  # nothing new: nodes of another layout were turned
    )
    probes = _probes(graph, fused)
    made = {o for n in graph.proto.node for o in n.output} - {p.tensor for p in probes}
    sums = [Probe(b.name, b.tensor, fused=False) for b in state.branches if b.tensor in made]
    with spinner(f"running {source.name} and its patched model on the same inputs"):
        try:
            state.proof = verify(
                source, model, folder, tolerance, options.shapes, options.seed, [*probes, *sums], state.converted
            )
        except LacksOperator as error:
            unfused = (state.converted or load_model(source), source.parent)
            state.proof = prove_parts(graph, unfused, (model, folder), fused, probes, tolerance, options.seed, error)


def _probes(graph: Graph, sites: Sequence[Site]) -> list[Probe]:
    """Every tensor that a fused site makes for others."""
    made = [(s.name, s.chosen, t) for s in sites for t in s.chosen.outputs if t]
    return [
        Probe(name, t, _inner(match, t), *_alike(match), _gain(graph, match) if t == match.outputs[0] else None)
        for name, match, t in made
    ]


def _alike(match: Match) -> tuple[tuple[str, ...], bool]:
    """The tensors that the fused node takes for as large as its result: what it adds; whether that may have more
    channels, of which it reads a range."""
    facts = kernels.facts(match.call.op_type)
    added = () if not facts["residual"] else match.inputs[:2] if facts["kind"] == "norm" else match.inputs[-1:]
    ranged = facts["kind"] != "norm" and match.call.inputs[-1].dims[1:2] != match.call.outputs[0].dims[1:2]
    return tuple(i for i in added if isinstance(i, str)), ranged


def _gain(graph: Graph, match: Match) -> np.ndarray | None:
    """A norm's factors of the channels; None for another site, and where they are no constant."""
    facts = kernels.facts(match.call.op_type)
    if facts["kind"] != "norm":
        return None
    gain = match.inputs[2 if facts["residual"] else 1]
    if isinstance(gain, Constant):
        return gain.make()
    return graph.constant(gain) if isinstance(gain, str) else None


def _inner(match: Match, tensor: str) -> tuple[str, ...]:
    """What a site's nodes make from its Conv to `tensor`; nothing for a site without a Conv."""
    convolved = {o for n in match.nodes if n.op_type in CONVOLUTIONS for o in n.output}
    behind = [n for n in match.nodes if convolved.isdisjoint(n.output)]
    nodes, read = needed(behind, [tensor], convolved.__contains__)
    ends = [t for t in read if t in convolved]
    return tuple(t for t in (*ends, *(o for n in nodes for o in n.output)) if t != tensor) if ends else ()


def _left_out(graph: Graph, sites: Sequence[Site]) -> list[NodeProto]:
    """Transposes and Casts to the results that a patched model does not make: between two sites that compute in another
    layout or type than the graph's, the rewriter leaves the tensors of the graph out."""
    fused = {n.name: n for n in graph.proto.node if n.domain == DOMAIN}
    made = {o for n in graph.proto.node for o in n.output}
    found = list[NodeProto]()
    for site in sites:
        node, match = fused[site.name], site.chosen
        dtypes = [t.dtype for t in match.call.outputs]
        for own, name, dtype in zip(node.output, match.outputs, dtypes, strict=True):
            if not name or name in made:
                continue
            steps: list[tuple[str, dict[str, Any]]] = []
            steps += [("Transpose", {"perm": TO_NCHW})] if is_nhwc(node) else []
            if steps and is_barred(graph, dtype):
                steps = [("Cast", {"to": ELEM_TYPES["float32"]}), *steps, ("Cast", {"to": ELEM_TYPES[dtype]})]
            steps += [("Cast", {"to": ELEM_TYPES[site.cast_from]})] if site.cast_from else []
            for i, (op_type, attributes) in enumerate(steps, start=1):
                result = name if i == len(steps) else f"{name}.{op_type}"
                found.append(helper.make_node(op_type, [own], [result], **attributes))
                own = result
    return found
