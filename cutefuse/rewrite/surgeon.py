"""Patching an onnx-graphsurgeon Graph, for pipelines that hold one: out to ONNX, patched as a file, and back."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import onnx

from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.graph.store import external_fields, outside, tensors
from cutefuse.rewrite.patch import Options, patch
from cutefuse.rewrite.prove import failure


def patch_graph(graph: Any, report: dict[str, Any] | None = None, **choices: Any) -> Any:
    """A new onnx_graphsurgeon.Graph in which the sites that should pay are fused; the given one stays as it is.

    graph: an onnx_graphsurgeon.Graph whose inputs and outputs have types. report: a dict that receives what `cutefuse
    patch` writes into patch.json. choices: the fields of cutefuse.rewrite.patch.Options, such as all_sites=True, sm=90,
    verify=True or include=["*cls*"]. Name, doc string, producer, IR version, opset imports and functions of the Graph
    stay, the fused nodes' function bodies come beside them, and attributes that a user put on the Graph move to the new
    one. Where nothing can be fused, the new Graph has the nodes of the given one.

    Raises CutefuseError for anything that is no Graph or cannot be exported, and for a choice that does not exist;
    VerificationError where verify=True finds a difference.
    """
    try:
        import onnx_graphsurgeon as gs
        from onnx_graphsurgeon.util.exception import OnnxGraphSurgeonException
    except ImportError:
        raise CutefuseError("patch_graph needs onnx-graphsurgeon; run `pip install onnx-graphsurgeon`") from None
    if not isinstance(graph, gs.Graph):
        raise CutefuseError(
            f"patch_graph was given a {type(graph).__name__}; give an onnx_graphsurgeon.Graph, as "
            "gs.import_onnx(onnx.load(path)) returns it"
        )
    allowed = [f.name for f in fields(Options)]
    if unknown := next((name for name in choices if name not in allowed), None):
        raise CutefuseError(f"patch_graph has no choice '{unknown}'; choose among {', '.join(allowed)}")
    try:
        model = gs.export_onnx(graph)
    except OnnxGraphSurgeonException as error:
        raise CutefuseError(f"the Graph cannot be exported ({' '.join(str(error).split())}); repair it") from None
    if away := next((t.name for t in tensors(model.graph) if external_fields(t)), None):
        raise CutefuseError(f"the data of tensor '{away}' lies in a file; load it with the model before importing it")
    found, written = _patched(model, Options(**choices))
    found["input"]["path"] = found["output"]["path"] = graph.name
    if report is not None:
        report.update(found)
    if found["verify"] is not None and not found["verify"]["passed"]:
        raise VerificationError(f"the patched Graph computes something else: {failure(found['verify'])}")
    result = gs.import_onnx(written or gs.export_onnx(graph))
    for name, value in vars(graph).items():
        if name not in vars(result):
            setattr(result, name, value)
    return result


def _patched(model: onnx.ModelProto, options: Options) -> tuple[dict[str, Any], onnx.ModelProto | None]:
    """The report, and the patched model with all its weights; None where nothing was written."""
    with tempfile.TemporaryDirectory(prefix="cutefuse_") as folder:
        source = Path(folder) / "graph.onnx"
        source.write_bytes(outside(model, source.parent).SerializeToString())
        result = patch(source, source.with_name("graph.cutefuse.onnx"), options)
        return result.report, onnx.load(str(result.output)) if result.output else None
