"""Patching what a program holds, an ONNX model or an onnx-graphsurgeon Graph: out to a folder, patched, and back."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import onnx

from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.graph.store import external_fields, outside, tensors
from cutefuse.rewrite.patch import Options, Result
from cutefuse.rewrite.patch import patch as patch_file
from cutefuse.rewrite.prove import failure

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


class Choices(TypedDict, total=False):
    """The keywords of `patch` and `patch_graph`: fields of cutefuse.rewrite.options.Options, which explains them."""

    include: Sequence[str]
    exclude: Sequence[str]
    include_op: Sequence[str]
    exclude_op: Sequence[str]
    without: Sequence[str]
    sm: int
    gpu: str
    functions: bool
    verify: bool
    seed: int
    shapes: Mapping[str, Sequence[int]]
    min_gain_us: float | None
    all_sites: bool
    dtype: str
    scope: str
    keep_float32: Sequence[str]
    clean: bool
    engine: str
    trt_version: str
    layout: str
    tanh_silu: bool


class Patched(NamedTuple):
    """A patched model with all its weights (the given one where nothing was fused), and what was done and why."""

    model: onnx.ModelProto
    result: Result


def with_signature(function: F) -> F:
    """A function whose `**choices` help() and inspect show one by one, with the defaults of Options."""
    defaults = Options()
    shown = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(defaults, name), annotation=kind)
        for name, kind in Choices.__annotations__.items()
    ]
    returned = inspect.signature(function).return_annotation
    function.__signature__ = inspect.Signature(shown, return_annotation=returned)  # type: ignore[attr-defined]
    return function


def options_of(caller: str, choices: Mapping[str, Any]) -> Options:
    """Raises CutefuseError for a choice that does not exist."""
    allowed = [f.name for f in fields(Options)]
    if unknown := next((name for name in choices if name not in allowed), None):
        raise CutefuseError(f"{caller} has no choice '{unknown}'; choose among {', '.join(Choices.__annotations__)}")
    return Options(**choices)


@with_signature
def patch(model: onnx.ModelProto, **choices: Unpack[Choices]) -> Patched:
    """A patched copy of an ONNX model and the account of it: `model, result = cutefuse.patch(onnx.load(path))`.

    model: with its weights inside, below 2 GB; it stays as it is. choices: as `dtype="float16"`, `gpu="RTX 4090"`,
    `verify=True`, `all_sites=True`, `include=["*neck*"]`; `result.report` is what patch.json holds.

    Raises CutefuseError for what is no model, for weights that lie in files, and for a choice that does not exist;
    VerificationError where verify=True finds a difference.
    """
    if not isinstance(model, onnx.ModelProto):
        raise CutefuseError(
            f"cutefuse.patch was given a {type(model).__name__}; give an onnx.ModelProto, as onnx.load(path) returns"
        )
    result, written = patched(model, options_of("cutefuse.patch", choices), model.graph.name)
    demand_proof(result)
    return Patched(written or model, result)


def patched(model: onnx.ModelProto, options: Options, name: str) -> tuple[Result, onnx.ModelProto | None]:
    """The result, whose report calls both models `name`, and the patched model with all its weights; None where nothing
    was fused or the proof failed. Raises CutefuseError for weights that lie in files."""
    if away := next((t.name for t in tensors(model.graph) if external_fields(t)), None):
        raise CutefuseError(f"the data of tensor '{away}' lies in a file; load it with the model first")
    with tempfile.TemporaryDirectory(prefix="cutefuse_") as folder:
        source = Path(folder) / "graph.onnx"
        source.write_bytes(outside(model, source.parent).SerializeToString())
        result = patch_file(source, source.with_name("graph.cutefuse.onnx"), options)
        written = onnx.load(str(result.output)) if result.output else None
    result.output = None
    result.report["input"]["path"] = result.report["output"]["path"] = name
    return result, written


def demand_proof(result: Result) -> None:
    """Raises VerificationError where the proof that was asked for failed."""
    if (proof := result.report["verify"]) is not None and not proof["passed"]:
        raise VerificationError(f"the patched model computes something else: {failure(proof)}")


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
