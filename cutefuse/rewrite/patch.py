"""From an ONNX file to its patched file and patch.json: find sites, choose among them, replace, prove, record."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import onnx

import cutefuse
from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph.clean import tidy
from cutefuse.graph.faults import met
from cutefuse.graph.read import Graph, op_counts
from cutefuse.graph.shapes import batch_of_one, open_inputs
from cutefuse.graph.store import (
    EXTERNAL_LIMIT,
    check_apart,
    check_written,
    data_path,
    load_model,
    sha256_of,
    size_of,
    uses_external_data,
    writer,
)
from cutefuse.ops import operators
from cutefuse.ops.layouts import NAMES, NHWC, TENSORRT, TORCH, layout_of, rule_of
from cutefuse.output import check_named, indented, real, write_text
from cutefuse.rewrite import islands, tanh_silu
from cutefuse.rewrite.apply import Plan, apply_sites, cast_tensors, new_calls, plan
from cutefuse.rewrite.functions import add_bodies
from cutefuse.rewrite.idle import idle, names_at
from cutefuse.rewrite.options import TAKES, Options
from cutefuse.rewrite.prove import prove
from cutefuse.sites.causes import by_cause
from cutefuse.sites.choose import Policy, Saving, choose
from cutefuse.sites.choose_cost import device_of
from cutefuse.sites.choose_model import Model
from cutefuse.sites.device import judge_device, suit_device
from cutefuse.sites.engines import TANH_SILU, Engine, engine_of
from cutefuse.sites.find import (
    EXCLUDED,
    FUSED,
    LEFT_OUT,
    MERGED,
    REFUSED,
    Site,
    check_bodies,
    check_overlaps,
    find_sites,
    merge_parallel,
)
from cutefuse.sites.match import Constant, Joined, Quantized

__all__ = ["TAKES", "Options", "Result", "default_output", "patch", "report_path"]
SCHEMA = 1


@dataclass
class Result:
    """The sites, the report that patch.json holds, and what was written."""

    sites: list[Site]
    report: dict[str, Any]
    output: Path | None
    exit_code: int


def default_output(source: Path) -> Path:
    """model.onnx -> model.cutefuse.onnx, beside it."""
    check_named(source)
    return source.with_name(f"{source.name.removesuffix('.onnx')}.cutefuse.onnx")


def report_path(output: Path) -> Path:
    """model.cutefuse.onnx and model.onnx -> model.patch.json, beside it; where that is the report of model.onnx,
    model.cutefuse.onnx -> model.cutefuse.patch.json, which readers look for first."""
    name = output.name.removesuffix(".onnx")
    usual = output.with_name(f"{name.removesuffix('.cutefuse')}.patch.json")
    return output.with_name(f"{name}.patch.json") if _reported_there(usual) not in ("", output.name) else usual


def _reported_there(report: Path) -> str:
    """The file name of the model that a patch report speaks of; empty where there is none."""
    try:
        return Path(json.loads(report.read_text(encoding="utf-8"))["output"]["path"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def patch(source: Path, output: Path, options: Options) -> Result:
    """Patch an ONNX file. Nothing is written on a dry run, when nothing can be fused, or when the verification fails
    (then only the report, and only where no model of an earlier run stands beside it).

    Raises CutefuseError for a model that cannot be read, an unknown filter, a GPU without kernels, or an output that
    cannot be written.
    """
    started = time.perf_counter()
    _check(source, output, options)
    model = load_model(source)
    if not options.dry_run:
        check_apart(model, source, output, data_path(output), report_path(output))
    before, external = op_counts(model.graph), uses_external_data(model)
    layout = layout_of(options.layout, options.engine, options.sm)
    turned = bool(islands.layouts(model) - {layout})  # of the fused nodes that are there already
    islands.lift(model, source.parent)
    islands.mark(model, layout)  # `islands.lay` makes it true, once more is fused
    model, conversion = _converted(model, source, options)
    converted: onnx.ModelProto | None = None
    whole = conversion is not None and conversion["scope"] == "model" and conversion["changed"]
    if whole and options.verify and not options.dry_run:
        converted = onnx.ModelProto()
        converted.CopyFrom(model)
    assumed, still_open = batch_of_one(model, options.shapes), open_inputs(model)
    sizes = {**assumed, **options.shapes}
    graph, sites, cleaning = _found(model, source.parent, options, sizes, layout)
    judge_device(sites, options.sm)
    forms = {form for s in sites if s.match for form in s.match.takes}
    _select(sites, options)
    if conversion and conversion["scope"] == "sites":
        _lower_sites(graph, sites, options, conversion)
    model_of = _model(graph, sites, options)
    saving = choose(model_of, sites, _policy(options), partial(_settle, graph, options))
    doomed = plan(graph, sites)
    casts = cast_tensors(graph, sites, doomed)
    cast_bytes = [_cast_bytes(sites[0].sizes(t) or graph.dims(t)) for t in casts]
    if conversion and conversion["scope"] == "sites":
        conversion |= {"casts": len(casts), "cast_bytes": _sum(cast_bytes)}
    fused = [s for s in sites if s.status == FUSED]
    silus = tanh_silu.find(graph, doomed.dead)
    rewritten = [s for s in silus if not s.left] if options.tanh_silu else []
    if options.tiles:
        for site, tile in zip(fused, options.tiles([site.sized_call for site in fused]), strict=True):
            site.tile = tile
    unused = [*options.idle, *idle(graph, sites, forms, conversion, options, _fuses_tanh(model_of.engine))]
    report = _report(source, output, options, model_of, conversion, unused, cleaning, silus, doomed, layout)
    report["assumed_shapes"], report["open_inputs"] = assumed, {n: d for n, d in still_open.items() if n not in sizes}
    writes = bool(fused or rewritten or turned) and not options.dry_run

    def complete() -> None:
        report["sites"] = [s.as_json() for s in sites]
        after = op_counts(model.graph) if writes else _predicted(graph, sites, doomed) + Counter({"Cast": len(casts)})
        report["summary"] = _summary(sites, before, after, saving, cast_bytes, time.perf_counter() - started)

    written = None
    if writes:
        written = _write(
            source,
            output,
            graph,
            sites,
            doomed,
            rewritten,
            external,
            options,
            report,
            converted,
            complete,
        )
    else:
        complete()
    failed = report["verify"] is not None and not report["verify"]["passed"]
    return Result(sites, report, written, 1 if failed else 0 if fused or rewritten or turned else 3)


def plain_model(source: Path, options: Options) -> onnx.ModelProto:
    """The model with nothing fused, in the type that the options ask for: what a patched one is compared with.

    Raises CutefuseError for a model that cannot be read or converted.
    """
    model = load_model(source)
    islands.lift(model, source.parent)
    return _converted(model, source, options)[0]


def _check(source: Path, output: Path, options: Options) -> None:
    """Refuse what needs no look into the model: an engine or GPU that there is not, and paths that would overwrite
    something."""
    engine_of(options.engine, options.trt_version, options.sm)
    if reason := kernels.reject_device(options.sm):
        raise CutefuseError(f"{reason}; --sm names the GPU that will run the model, --sm 0 takes any")
    check_named(output)
    if real(output) == real(source):
        raise CutefuseError(f"the output {output} is the input; choose another -o")
    if (other := _reported_there(report_path(output))) not in ("", output.name) and not options.dry_run:
        raise CutefuseError(f"{report_path(output)} is the report of {other}; choose another -o, or move that report")


def _converted(model: onnx.ModelProto, source: Path, options: Options) -> tuple[onnx.ModelProto, dict[str, Any] | None]:
    """The model in the type that --dtype asks for, and the report's account of that; None where nothing was asked.

    A conversion of the sites alone is done later, by _lower_sites: the sites are not known yet.
    """
    if not options.dtype:
        return model, None
    scope = options.scope or ("sites" if options.dtype == "bfloat16" else "model")
    conversion: dict[str, Any] = {
        "dtype": options.dtype, "scope": scope, "kept_float32": [], "overflows": [], "changed": True,
    }  # fmt: skip
    return (_lowered(model, source, options, conversion) if scope == "model" else model), conversion


def _found(
    model: onnx.ModelProto, folder: Path, options: Options, sizes: Mapping[str, Sequence[int]], layout: int
) -> tuple[Graph, list[Site], dict[str, Any]]:
    """The model's graph, its candidates, and what cleaning a copy of it took away; with --clean that goes for good."""
    alone = options.engine == TORCH  # whose convolutions do not even add their bias
    cleaned, sites = find_sites(model, folder, sizes, alone, layout)
    cleaning = {"folded": sorted(cleaned.folded), "no_ops": sorted(cleaned.no_ops), "left": cleaned.note,
                "stale_sizes": cleaned.stale}  # fmt: skip
    if options.clean:
        tidy(model, cleaned)
        cleaned, sites = find_sites(model, folder, sizes, alone, layout)
    return cleaned.whole, sites, cleaning


def _lower_sites(graph: Graph, sites: list[Site], options: Options, conversion: dict[str, Any]) -> None:
    from cutefuse.rewrite.retype import retype

    conversion["kept_float32"], large = retype(sites, options.dtype, options.keep_float32, graph.opset)
    conversion["overflows"] = [asdict(o) for o in large]
    conversion["changed"] = any(s.cast_from for s in sites)


def _report(
    source: Path, output: Path, options: Options, model_of: Model, conversion: dict[str, Any] | None,
    unused: list[str], cleaning: dict[str, Any], silus: Sequence[tanh_silu.Silu], doomed: Plan,
    layout: int,
) -> dict[str, Any]:  # fmt: skip
    """patch.json before anything is written: without its sites, its verdict and its summary."""
    graph, engine, device = model_of.graph, model_of.engine, model_of.device
    return {
        "schema": SCHEMA,
        "tool": {"name": "cutefuse", "version": cutefuse.__version__},
        "input": {"path": str(source), "sha256": sha256_of(source)},
        "output": {"path": str(output)},
        "opset": graph.opset,
        "sm": options.sm,
        "layout": {"name": NAMES[layout], "asked": options.layout, "why": rule_of(options.engine, options.sm).why},
        "conversion": conversion,
        "unused_options": unused,
        "clean": {"written": options.clean, **cleaning},
        "prediction": {
            "fuses_tanh": _fuses_tanh(engine),
            "engine": engine.title,
            "engine_assumed": engine.assumed,
            "gpu": device.name,
            "gpu_assumed": device.assumed,
            "gpu_rates": device.peaks.device,
            "gpu_others": list(device.others),
        },
        "input_shapes": {name: list(dims) for name, dims in options.shapes.items()},
        "silu": {
            "outside": len(silus),
            "tanh": [s.name for s in silus if not s.left] if options.tanh_silu else [],
            "left": {s.name: s.left for s in silus if s.left} if options.tanh_silu else {},
        },
        "known_faults": met(graph, engine.version, doomed.dead) if engine.name == TENSORRT else [],
        "sites": [],
        "verify": None,
    }


def _write(
    source: Path, output: Path, graph: Graph, sites: Sequence[Site], doomed: Plan, silus: Sequence[tanh_silu.Silu],
    external: bool, options: Options, report: dict[str, Any], converted: onnx.ModelProto | None,
    complete: Callable[[], None],
) -> Path | None:  # fmt: skip
    """Write the model and its report, which `complete` ends; the report alone where the proof fails, and nothing
    in place of an earlier model's."""
    model = graph.model
    # Packing pads channels to 64, so that a model just below protobuf's limit may grow past it.
    packed = _packed_bytes(sites) if size_of(model) > 1 << 30 else 0
    external = external or size_of(model) + packed > EXTERNAL_LIMIT
    with writer(output, external, source) as out:
        if any(s.status == FUSED for s in sites):
            apply_sites(graph, sites, doomed, out, report["input"]["sha256"])
        tanh_silu.write(model, silus)
        if report["layout"]["name"] == NAMES[NHWC]:
            islands.lay(model, source.parent)
        if options.functions:
            add_bodies(model, graph, new_calls(sites))
        written = out.save(model)
        if options.dtype:
            check_written(written, source)
        if options.verify:
            report["verify"] = prove(
                source, graph, out.folder, sites, converted, options.functions, options.shapes, options.seed,
                [s.dtype for s in silus],
            )  # fmt: skip
            if not report["verify"]["passed"]:
                complete()
                if not output.exists():
                    write_text(report_path(output), _text(report), [source])
                return None
        complete()
        out.text(report_path(output), _text(report))
        out.commit()
    return output


def _text(report: dict[str, Any]) -> str:
    return indented(report) + "\n"  # escaped to ASCII: a path may hold bytes that are no UTF-8


def _packed_bytes(sites: Sequence[Site]) -> int:
    """At most what the new constants take: 8 bytes an element."""
    operands = [i for s in sites if s.status == FUSED and s.match for i in s.match.inputs]
    return sum(8 * math.prod(i.dims) for i in operands if isinstance(i, Constant))


def _lowered(model: onnx.ModelProto, source: Path, options: Options, conversion: dict[str, Any]) -> onnx.ModelProto:
    """The model in float16; `conversion` learns the names of the nodes that stay in float32, those among them whose
    weights are too large, and whether anything changed."""
    if options.dtype != "float16":
        raise CutefuseError(
            "--dtype bf16 works with --scope sites; for a whole model in bfloat16 run NVIDIA ModelOpt's AutoCast first"
        )
    from cutefuse.rewrite.retype import to_float16, types_of

    before = types_of(model)
    lowered, kept, large = to_float16(model, source.parent, options.keep_float32)
    conversion |= {
        "kept_float32": kept,
        "overflows": [asdict(o) for o in large],
        "changed": types_of(lowered) != before,
    }
    return lowered


def _model(graph: Graph, sites: Sequence[Site], options: Options) -> Model:
    engine = engine_of(options.engine, options.trt_version, options.sm)
    return Model(graph, engine, device_of(engine.device_sm, options.gpu), sites[0].sizes if sites else graph.dims,
                 options.compiled)  # fmt: skip


def _fuses_tanh(engine: Engine) -> bool:
    return engine.name == TENSORRT and engine.version >= TANH_SILU


def _policy(options: Options) -> Policy:
    # Sites that were named one by one have been chosen already, but not what each of them takes in.
    least_us = options.min_gain_us if options.only is None else -math.inf
    return Policy(options.all_sites, least_us, options.price)


def _settle(graph: Graph, options: Options, sites: Sequence[Site], apart: Collection[int]) -> None:
    """Make the fused sites legal beside each other."""
    suit_device(sites, options.sm)
    if options.functions:
        check_bodies(graph, sites)
    check_overlaps(graph, sites)  # after the other checks: an excluded site must claim no nodes
    if options.functions:
        check_bodies(graph, sites)  # of the smaller matches that this left
    if "parallel" not in options.without:
        merge_parallel(graph, [s for s in sites if id(s) not in apart], options.sm)


def _select(sites: Sequence[Site], options: Options) -> None:
    stems = [op.stem for op in operators()]
    for stem in (*options.include_op, *options.exclude_op):
        if stem not in stems:
            raise CutefuseError(f"there is no operator '{stem}'; choose one of {', '.join(stems)}")
    for site in (s for s in sites if s.status == FUSED):
        while site.match and site.match.takes & set(options.without):
            if not site.fall_back():
                site.refuse(EXCLUDED, f"--without {' '.join(sorted(site.match.takes & set(options.without)))}")
                break
        if site.status != FUSED:
            continue
        if reason := _excluded(site, options):
            site.refuse(EXCLUDED, reason)
        elif reason := options.outweighed.get(site.name, ""):
            site.refuse(LEFT_OUT, reason)


def _excluded(site: Site, options: Options) -> str:
    """Which filter leaves a site out; "" where none does."""
    names = names_at(site, site.nodes) if options.include or options.exclude else set[str]()
    if options.only is not None and site.name not in options.only:
        return "it is not among the sites that were asked for"
    if options.include and not any(fnmatchcase(n, p) for n in names for p in options.include):
        return "no --include pattern names it"
    if pattern := next((p for p in options.exclude if any(fnmatchcase(n, p) for n in names)), None):
        return f"--exclude '{pattern}' names it"
    if options.include_op and site.op.stem not in options.include_op:
        return "no --include-op names its operator"
    return f"--exclude-op {site.op.stem}" if site.op.stem in options.exclude_op else ""


def _predicted(graph: Graph, sites: Sequence[Site], doomed: Plan) -> Counter[str]:
    counts = Counter(n.op_type for n in graph.nodes if id(n) not in doomed.dead)
    fused = [s.match for s in sites if s.status == FUSED and s.match]
    counts.update(match.call.op_type for match in fused)
    made = {i for match in fused for i in match.inputs if isinstance(i, Joined | Quantized)}  # sites share equal ones
    counts.update(kind for o in made for kind in (("Concat",) if isinstance(o, Joined) else o.op_types))
    return counts


def _cast_bytes(dims: Sequence[int] | None) -> int | None:
    """What the Cast of a float32 tensor to or from a type of 16 bits reads and writes."""
    return None if dims is None or min(dims, default=0) < 0 else (4 + 2) * math.prod(dims)


def _sum(figures: Sequence[int | None]) -> int | None:
    known = [f for f in figures if f is not None]
    return sum(known) if len(known) == len(figures) else None


def _summary(
    sites: Sequence[Site], before: Counter[str], after: Counter[str], saving: Saving,
    cast_bytes: Sequence[int | None], seconds: float,
) -> dict[str, Any]:  # fmt: skip
    status = Counter(s.status for s in sites)
    saved, cast = _sum([s.bytes_saved for s in sites]), _sum(cast_bytes)
    return {
        "candidates": len(sites),
        "fused": status[FUSED],
        "merged": status[MERGED],
        "refused": status["refused"],
        "refused_by": by_cause(s.reason for s in sites if s.status == REFUSED),
        "excluded": status[EXCLUDED],
        "left_out": status[LEFT_OUT],
        "gain_us": saving.gain_us,
        "plain_us": saving.plain_us,
        "gain_unknown": sum(s.status == FUSED and s.gain_us is None for s in sites),
        "nodes_before": sum(before.values()),
        "nodes_after": sum(after.values()),
        "ops_before": dict(sorted(before.items())),
        "ops_after": dict(sorted(after.items())),
        "bytes_saved": None if saved is None or cast is None else saved - cast,
        "seconds": round(seconds, 3),
    }
