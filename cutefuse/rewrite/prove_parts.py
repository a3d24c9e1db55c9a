"""`--verify` where nothing here runs the whole model: each fused site is cut out of both models, run and compared."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from cutefuse.errors import VerificationError
from cutefuse.graph.cut import needed
from cutefuse.graph.read import ELEM_TYPES, Graph, attribute
from cutefuse.graph.store import load_weights
from cutefuse.graph.verify import Probe, from_fused, verify
from cutefuse.match.answer import tensors_of
from cutefuse.match.site import Site


def prove_parts(
    graph: Graph, unfused: tuple[ModelProto, Path], patched: tuple[ModelProto, Path], sites: Sequence[Site],
    probes: Sequence[Probe], tolerance: float, seed: int, error: VerificationError,
) -> dict[str, Any]:  # fmt: skip
    """What `verify` says about every site by itself, on random inputs of the site; `error`: why not of the whole model.

    unfused, patched: a model and the folder of its weights. Raises `error` where no site can be run either.
    """
    report: dict[str, Any] = {
        "seed": seed, "backend": "", "inputs": {}, "tolerance": tolerance, "fused_sites": len(sites),
        "unprobed": [], "outputs": [], "sites": [], "sums": [], "site_by_site": str(error),
    }  # fmt: skip
    for site in sites:
        own = [p for p in probes if p.site == site.name]
        try:
            ends, outputs = _ends(graph, site), [p.tensor for p in own]
            with tempfile.TemporaryDirectory(prefix="cutefuse_") as folder:
                path = Path(folder) / "site.onnx"
                onnx.save(_part(*unfused, ends, outputs, {}), str(path))
                part = _part(*patched, ends, outputs, _undone(patched[0], ends, site))
                found = verify(path, part, path.parent, tolerance, {}, seed, own)
        except VerificationError as reason:
            report["unprobed"].append({"name": site.name, "why": str(reason)})
            continue
        report["backend"] = found["backend"]
        if "why" in found:  # the patched part does not run
            report["sites"].append({"name": site.name, "passed": False, "why": found["why"]})
            continue
        worst = max(found["outputs"], key=lambda o: (not o["passed"], o.get("max_rel_error", 0.0)))
        report["sites"].append({**worst, "name": site.name, "tensor": worst["name"]})
    if not report["sites"]:
        raise error
    report["passed"] = all(s["passed"] for s in report["sites"])
    if wrong := next((s["name"] for s in report["sites"] if not s["passed"]), None):
        report["first_wrong_site"] = wrong
    return report


def _ends(graph: Graph, site: Site) -> dict[str, ValueInfoProto]:
    """The tensors that a site reads, with their types and what is known of their sizes."""
    ends = {}
    for operand, tensor in zip(site.chosen.inputs, site.chosen.call.inputs, strict=True):
        for name in tensors_of(operand):
            if graph.is_constant(name):
                continue
            dtype = graph.dtype(name) or site.cast_from or tensor.dtype
            dims = graph.sizes(name) or tensor.dims
            ends[name] = helper.make_tensor_value_info(name, ELEM_TYPES[dtype], [d if d >= 0 else None for d in dims])
    return ends


def _undone(model: ModelProto, ends: Mapping[str, ValueInfoProto], site: Site) -> dict[str, NodeProto]:
    """Nodes that make from `ends` what the fused nodes before them make: between two sites in another type or layout
    than the graph's, the patched graph has no tensor of the graph's."""
    low, found, chains = ELEM_TYPES[site.chosen.call.dtype], dict[str, NodeProto](), from_fused(model)
    for name in ends:
        for step in reversed(chains.get(name, [])):
            back: dict[str, Any] = {"to": low}
            if step.op_type == "Transpose":
                back = {"perm": [int(i) for i in np.argsort(attribute(step, "perm", ()))]}
            found[step.input[0]] = helper.make_node(step.op_type, [step.output[0]], [step.input[0]], **back)
    return found


def _part(
    model: ModelProto, folder: Path, ends: Mapping[str, ValueInfoProto], outputs: Sequence[str],
    makers: Mapping[str, NodeProto],
) -> ModelProto:  # fmt: skip
    """The nodes between `ends` and `outputs` as a model of their own, with its weights inside; `makers`: nodes that
    make tensors in place of the model's own."""
    nodes, read = needed([*makers.values(), *model.graph.node], outputs, ends.__contains__)
    stored = {t.name: t for t in model.graph.initializer if t.name in read}
    inputs = [*ends.values(), *(v for v in model.graph.input if v.name not in ends)]
    inputs = [v for v in inputs if v.name in read and v.name not in stored]
    results = [ValueInfoProto(name=name) for name in outputs]
    body = helper.make_graph(nodes, "site", inputs, results, list(stored.values()))
    part = helper.make_model(body, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    part.functions.extend(model.functions)
    load_weights(part, folder)
    return part
