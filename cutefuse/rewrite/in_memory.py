"""Patching a model that a program holds, without files of its own: out to a folder, patched there, and back."""

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
