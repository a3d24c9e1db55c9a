"""Patching an onnx-graphsurgeon Graph, for pipelines that hold one: out to ONNX, patched as a file, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutefuse.errors import CutefuseError
from cutefuse.rewrite.in_memory import Choices, demand_proof, options_of, patched, with_signature

if TYPE_CHECKING:
    from typing_extensions import Unpack


@with_signature
def patch_graph(graph: Any, report: dict[str, Any] | None = None, **choices: Unpack[Choices]) -> Any:
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
    options = options_of("patch_graph", choices)
    try:
        model = gs.export_onnx(graph)
    except OnnxGraphSurgeonException as error:
        raise CutefuseError(f"the Graph cannot be exported ({' '.join(str(error).split())}); repair it") from None
    done, written = patched(model, options, graph.name)
    if report is not None:
        report.update(done.report)
    demand_proof(done)
    result = gs.import_onnx(written or gs.export_onnx(graph))
    for name, value in vars(graph).items():
        if name not in vars(result):
            setattr(result, name, value)
    return result
