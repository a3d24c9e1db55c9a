"""From an ONNX file to its patched file and patch.json: a model goes through the passes, each of which does one thing.

convert, branches, clean, find, filter, convert sites, select (with legal and merge), plan, idle; where something is
written: apply (with islands) and verify.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph import store
from cutefuse.graph.read import op_counts
from cutefuse.graph.shapes import batch_of_one, check_shapes, open_inputs
from cutefuse.match.answer import Constant
from cutefuse.match.site import Site
from cutefuse.operators.layouts import layout_of
from cutefuse.output import check_named, real, write_text
from cutefuse.rewrite import islands
from cutefuse.rewrite.options import TAKES, Options
from cutefuse.rewrite.passes import apply, branches, clean, convert, filter, find, idle, plan, select, verify
from cutefuse.rewrite.record import report_of, report_path, text_of
from cutefuse.rewrite.state import State
from cutefuse.select.engines import engine_of
from cutefuse.select.price import Pricing
from cutefuse.select.times import device_of

__all__ = ["TAKES", "Options", "Result", "default_output", "patch"]


@dataclass
class Result:
    """The sites, the report that patch.json holds, and what was written; `report_path` is where patch.json lies."""

    sites: list[Site]
    report: dict[str, Any]
    output: Path | None
    exit_code: int
    report_path: Path | None = None


def default_output(source: Path) -> Path:
    """model.onnx -> model.cutefuse.onnx, beside it."""
    check_named(source)
    return source.with_name(f"{source.name.removesuffix('.onnx')}.cutefuse.onnx")


def patch(
    source: Path, output: Path, options: Options, price: Pricing | None = None, tiles: select.Tiles | None = None
) -> Result:
    """Patch an ONNX file. Nothing is written on a dry run, when nothing can be fused, or when the verification fails
    (then only the report, and only where no model of an earlier run stands beside it).

    price, tiles: what was measured of sites and of their calls, trusted before the model and the kernels' first guess.
    Raises CutefuseError for a model or an output that cannot be, an unknown filter, a GPU without kernels.
    """
    state = begin(source, output, options)
    for step in (convert.run, branches.run, clean.run, find.run, filter.run, convert.sites):
        step(state)
    select.run(state, price, tiles)
    plan.run(state)
    idle.run(state)
    if not state.report_path or not state.changes:
        return Result(state.sites, report_of(state), None, 0 if state.changes else 3)
    with store.writer(output, _outside(state), source) as out:
        apply.run(state, out)
        verify.run(state, out.folder)
        report = report_of(state)
        if state.proof and not state.proof["passed"]:
            if not output.exists():
                write_text(state.report_path, text_of(report), [source])
            return Result(state.sites, report, None, 1, state.report_path)
        out.text(state.report_path, text_of(report))
        out.commit()
    return Result(state.sites, report, output, 0, state.report_path)


def plain_model(source: Path, options: Options) -> onnx.ModelProto:
    """The model with nothing fused, in the type that the options ask for: what a patched one is compared with.

    Raises CutefuseError for a model that cannot be read or converted.
    """
    model = store.load_model(source)
    islands.lift(model, source.parent)
    return convert.whole(model, source.parent, options)[0]


def begin(source: Path, output: Path, options: Options) -> State:
    """The model with its fused nodes in NCHW. Refuses an unknown engine or GPU, and paths that overwrite something."""
    engine = engine_of(options.engine, options.trt_version, options.sm)
    if reason := kernels.reject_device(options.sm):
        raise CutefuseError(f"{reason}; --sm names the GPU that will run the model, --sm 0 takes any")
    check_named(output)
    if real(output) == real(source):
        raise CutefuseError(f"the output {output} is the input; choose another -o")
    report = None if options.dry_run else report_path(output)
    model = store.load_model(source)
    if report:
        store.check_apart(model, source, output, store.data_path(output), report)
    layout = layout_of(options.layout, options.engine, options.sm)
    assumed = batch_of_one(model, options.shapes)
    state = State(
        source, output, report, store.sha256_of(source), options,
        model, engine, device_of(engine.device_sm, options.gpu), layout,
        turned=bool(islands.layouts(model) - {layout}),
        before=op_counts(model.graph),
        external=store.uses_external_data(model),
        assumed=assumed,
        open_inputs={n: d for n, d in open_inputs(model).items() if n not in {**assumed, **options.shapes}},
    )  # fmt: skip
    check_shapes(model, {**assumed, **options.shapes})
    islands.lift(model, source.parent)
    islands.mark(model, layout)  # `islands.lay` makes it true, once more is fused
    return state


def _outside(state: State) -> bool:
    """Whether weights are written beside the model: packing pads channels to 64, so that a model just below protobuf's
    limit may grow past it."""
    if state.external:
        return True
    size = store.size_of(state.model)
    operands = [i for s in state.fused for i in s.chosen.inputs] if size > 1 << 30 else []
    packed = sum(8 * math.prod(i.dims) for i in operands if isinstance(i, Constant))  # at most, an element
    return size + packed > store.EXTERNAL_LIMIT
