"""What `--verify` asks of the fused sites, and what it found, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper

from cutefuse import kernels
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.read import ELEM_TYPES, Graph
from cutefuse.graph.runner import LacksOperator
from cutefuse.graph.store import load_model
from cutefuse.graph.verify import Probe, verify
from cutefuse.match.answer import Constant, Match
from cutefuse.match.site import FUSED, Site
from cutefuse.operators import concat_conv
from cutefuse.operators.layouts import TO_NCHW
from cutefuse.progress import spinner
from cutefuse.rewrite.agnostic import is_nhwc
from cutefuse.rewrite.apply import new_calls
from cutefuse.rewrite.functions import add_bodies
from cutefuse.rewrite.prove_parts import prove_parts

LISTED = 4  # inputs or sites that a line names before it says how many more there are


def prove(
    source: Path, graph: Graph, folder: Path, sites: Sequence[Site], converted: ModelProto | None, functions: bool,
    shapes: Mapping[str, Sequence[int]], seed: int, others: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """What `verify` says about a graph that was patched; `functions`: whether the function bodies are in the model.

    `others` are the types of what was written anew without a fused node.
    """
    fused = [s for s in sites if s.status == FUSED and s.match]
    model, added = graph.model, _left_out(graph.model, sites)
    if added or not functions:
        model = ModelProto()
        model.CopyFrom(graph.model)
        model.graph.node.extend(added)
    if not functions:
        add_bodies(model, graph, new_calls(fused))
    tolerance = max(
        [s.op.tolerance(s.match.call.inputs[0].dtype) for s in fused if s.match]
        + [concat_conv.OPERATOR.tolerance(dtype) for dtype in others],
        default=concat_conv.OPERATOR.tolerance("float32"),  # nothing new: nodes of another layout were turned
    )
    probes = _probes(graph, fused)
    with spinner(f"running {source.name} and its patched model on the same inputs"):
        try:
            return verify(source, model, folder, tolerance, shapes, seed, probes, converted)
        except LacksOperator as error:
            unfused = (load_model(source) if converted is None else converted, source.parent)
            return prove_parts(graph, unfused, (model, folder), fused, probes, tolerance, seed, error)


def _probes(graph: Graph, sites: Sequence[Site]) -> list[Probe]:
    """Every tensor that a fused site makes for others."""
    fused = [(s.name, s.match, _gain(graph, s.match)) for s in sites if s.match]
    return [
        Probe(name, t, _inner(match, t), *_alike(match), gain if t == match.outputs[0] else None)
        for name, match, gain in fused
        for t in match.outputs
        if t
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
    maker = {o: n for n in match.nodes for o in n.output}
    found: list[str] = []
    ahead, convolved = [tensor], False
    while ahead:
        name = ahead.pop()
        if name in found or name not in maker:
            continue
        found.append(name)
        convolved |= maker[name].op_type == "Conv"
        if maker[name].op_type != "Conv":
            ahead += maker[name].input
    return tuple(n for n in found if n != tensor) if convolved else ()


def _left_out(model: ModelProto, sites: Sequence[Site]) -> list[NodeProto]:
    """Transposes and Casts to the results that a patched model does not make: between two sites that compute in another
    layout or type than the graph's, the rewriter leaves the tensors of the graph out."""
    fused = {n.name: n for n in model.graph.node if n.domain == DOMAIN}
    made = {o for n in model.graph.node for o in n.output}
    found = list[NodeProto]()
    for site in (s for s in sites if s.status == FUSED and s.match):
        node, match = fused[site.name], site.match
        for own, name in zip(node.output, match.outputs if match else (), strict=True):
            if not name or name in made:
                continue
            steps: list[tuple[str, dict[str, Any]]] = []
            steps += [("Transpose", {"perm": TO_NCHW})] if is_nhwc(node) else []
            steps += [("Cast", {"to": ELEM_TYPES[site.cast_from]})] if site.cast_from else []
            for i, (op_type, attributes) in enumerate(steps, start=1):
                result = name if i == len(steps) else f"{name}.{op_type}"
                found.append(helper.make_node(op_type, [own], [result], **attributes))
                own = result
    return found


def _unproven(proof: Mapping[str, Any], silent: Sequence[dict[str, Any]]) -> list[str]:
    """What a proof that passed does not show: outputs without information, values that are no numbers."""
    lines, figures = list[str](), [*proof["outputs"], *proof["sites"]]
    if silent:
        which = "; ".join(f"output '{r['name']}' {r['says_nothing']}" for r in silent[:LISTED])
        lines.append(f"not proven by every output: {which}; what the fused sites make was compared by itself")
    if partly := [r for r in figures if 0 < r.get("compared", 0) < r["values"]]:
        counts = _some([f"{r['values'] - r['compared']} of {r['values']} of '{r['name']}'" for r in partly])
        lines.append(f"NaN or infinite in both models, and not compared: {counts}")
    if same := [s["name"] for s in proof["sites"] if "says_nothing" in s]:
        lines.append(f"proven through the outputs alone, since all they make is one value here: {_some(same)}")
    if len(proof.get("seeds_tried", ())) > 1:
        seeds = ", ".join(map(str, sorted(proof["seeds_tried"])))
        lines.append(f"seeds {seeds} were tried for outputs that say something")
    return lines


def words(proof: Mapping[str, Any], dtype: str) -> list[str]:
    """Sentences about a verification that passed; `dtype` is what the model was converted to, if it was."""
    inputs, compared, fused = len(proof.get("seeds_tried", [0])), len(proof["sites"]), proof["fused_sites"]
    on = f"{inputs} random {'input' if inputs == 1 else 'inputs'} (seed {proof['seed']})"
    sites_text = f"{compared} of {fused} fused {'site' if fused == 1 else 'sites'}"
    allowed = f"({proof['tolerance']:g} is allowed)"
    error = f"worst error {_worst(proof['sites']):.2g} of a channel's largest value {allowed}"
    silent = [r for r in proof["outputs"] if "says_nothing" in r]
    if "site_by_site" in proof:
        lines = [
            f"the whole model was not run and no output was compared: {proof['site_by_site'].split(';')[0]}",
            f"verified site by site with {proof['backend']}: {sites_text}, each cut out, on {on}; {error}",
        ]
    else:
        sizes = [f"{name} {'x'.join(map(str, dims)) or '(one number)'}" for name, dims in proof["inputs"].items()]
        own = [
            f for f in proof.get("end_to_end", proof["outputs"]) if f["name"] in {o["name"] for o in proof["outputs"]}
        ]
        which = f"{len(own)} {'output' if len(own) == 1 else 'outputs'}"
        verb = "compared" if silent else "verified"
        lines = [f"{verb} with {proof['backend']} on {_some(sizes)}, {on}: {which}, from end to end "
                 f"{_worst(own):.2g} of a channel's largest value from the unfused model's"]  # fmt: skip
        apart = ", each from the unfused model's own values" if "end_to_end" in proof else ""
        lines += [f"{sites_text} compared{apart}: {error}"] if compared else []
    lines += _unproven(proof, silent)
    reasons: dict[str, list[str]] = {}
    for site in proof["unprobed"]:
        reasons.setdefault(site["why"], []).append(site["name"])
    through = "not compared" if "site_by_site" in proof else "compared through the outputs alone"
    for why, names in reasons.items():
        lines.append(f"{through}: {_some(names)} ({why})")
    if "end_to_end" in proof:
        lines.append(
            f"inside, the model amplifies rounding errors to {_worst(proof['end_to_end']):.2g}; the sites' own figures "
            "count"
        )
    if strange := [s["name"] for s in proof["sites"] if s.get("overflows")]:
        lines.append(f"the unfused model overflows inside {_some(strange)}; what float64 makes there is taken as right")
    if "conversion" in proof:
        lines.append(
            f"the conversion to {dtype} itself changes the outputs by {_worst(proof['conversion']):.2g} of a channel's "
            f"largest value on {'this input' if inputs == 1 else 'these inputs'}, with or without fusion"
        )
    lines.append("what ran are the fused nodes' function bodies, standard operators, and not the kernels; "
                 "`cutefuse accuracy` compares an engine")  # fmt: skip
    return lines


def failure(proof: Mapping[str, Any]) -> str:
    """Why a verification failed, and where first."""
    compared = [*proof["outputs"], *proof["sites"]]
    why = next((o["why"] for o in (proof, *compared) if "why" in o), "")
    why = why or f"worst error {_worst(compared):.2g} of a channel's largest value, {proof['tolerance']:g} is allowed"
    return why + (f", first at site '{proof['first_wrong_site']}'" if proof.get("first_wrong_site") else "")


def _worst(figures: Sequence[Mapping[str, Any]]) -> float:
    return max((f.get("max_rel_error", f.get("mismatch_share", 0.0)) for f in figures), default=0.0)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
