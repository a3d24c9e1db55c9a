"""The type that --dtype asks for: of the whole model before sites are found, or of the sites alone after that."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from onnx import ModelProto

from cutefuse.errors import CutefuseError
from cutefuse.rewrite.options import Options
from cutefuse.rewrite.state import Conversion, State


def run(state: State) -> None:
    """Reads `model`; leaves it in float16 where that was asked, `conversion` and `converted`."""
    options = state.options
    state.model, state.conversion = whole(state.model, state.source.parent, options)
    done = state.conversion
    if done and done.scope == "model" and done.changed and options.verify and not options.dry_run:
        state.converted = deepcopy(state.model)


def sites(state: State) -> None:
    """Reads `sites` and `graph`; takes matches in another type where that was asked, and completes `conversion`."""
    if (done := state.conversion) and done.scope == "sites":
        from cutefuse.rewrite.retype import retype

        options = state.options
        done.kept_float32, done.overflows = retype(state.sites, options.dtype, options.keep_float32, state.graph.opset)
        done.changed = any(s.cast_from for s in state.sites)


def whole(model: ModelProto, folder: Path, options: Options) -> tuple[ModelProto, Conversion | None]:
    """The model as the conversion leaves it before sites are known, and the account; None where nothing was asked.

    Raises CutefuseError for a model that cannot be converted as a whole.
    """
    if not options.dtype:
        return model, None
    scope = options.scope or ("sites" if options.dtype == "bfloat16" else "model")
    if scope == "sites":
        return model, Conversion(options.dtype, scope)
    if options.dtype != "float16":
        raise CutefuseError(
            "--dtype bf16 works with --scope sites; for a whole model in bfloat16 run NVIDIA ModelOpt's AutoCast first"
        )
    from cutefuse.rewrite.retype import to_float16, types_of

    before = types_of(model)
    lowered, kept, large = to_float16(model, folder, options.keep_float32)
    return lowered, Conversion(options.dtype, scope, kept, large, types_of(lowered) != before)
