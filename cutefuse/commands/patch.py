"""`cutefuse patch`: rewrite an ONNX model so that fused operators replace what TensorRT does not fuse.

Exit codes: 0 patched, 1 verification failed, 2 bad input, 3 nothing to patch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import onnx

import cutefuse
from cutefuse import table
from cutefuse.commands.doctor import local_sm
from cutefuse.errors import CutefuseError, run_command
from cutefuse.graph.read import Graph, op_counts
from cutefuse.graph.store import EXTERNAL_LIMIT, load_model, sha256_of, uses_external_data, writer
from cutefuse.ops import operators
from cutefuse.output import write_text
from cutefuse.rewrite.apply import Plan, apply_sites, plan
from cutefuse.rewrite.prove import failure, prove, words
from cutefuse.sites.find import (
    EXCLUDED,
    FUSED,
    MERGED,
    Site,
    check_bodies,
    check_overlaps,
    find_sites,
    merge_parallel,
    suit_device,
)

SCHEMA = 1
TAKES = ("upsample", "ranges", "residual", "parallel")
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Options:
    """What to patch and how; the defaults patch everything that is legal."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    include_op: Sequence[str] = ()
    exclude_op: Sequence[str] = ()
    without: Sequence[str] = ()  # of TAKES
    sm: int = 0  # compute capability * 10 of the GPU that will run the model; 0 for any
    functions: bool = True
    verify: bool = False
    seed: int = 0
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dry_run: bool = False
    profile: Path | None = None
    min_gain_us: float = 0.0
    dtype: str = ""  # float16 or bfloat16: lower the precision before fusing
    scope: str = "model"  # of dtype: the whole model, or the fused sites
    keep_float32: Sequence[str] = ()


@dataclass
class Result:
    """The sites, the report that patch.json holds, and what was written."""

    sites: list[Site]
    report: dict[str, Any]
    output: Path | None
    exit_code: int


def default_output(source: Path) -> Path:
    """model.onnx -> model.cutefuse.onnx, beside it."""
    return source.with_name(f"{source.name.removesuffix('.onnx')}.cutefuse.onnx")


def report_path(output: Path) -> Path:
    """model.cutefuse.onnx and model.onnx -> model.patch.json, beside it."""
    return output.with_name(f"{output.name.removesuffix('.onnx').removesuffix('.cutefuse')}.patch.json")


def patch(source: Path, output: Path, options: Options) -> Result:
    """Patch an ONNX file. Nothing is written on a dry run, when nothing can be fused, or when the verification fails
    (then only the report).

    Raises CutefuseError for a model that cannot be read, an unknown filter, or an output that cannot be written.
    """
    started = time.perf_counter()
    if output.resolve() == source.resolve():
        raise CutefuseError(f"the output {output} is the input; choose another -o")
    model = load_model(source)
    before = op_counts(model.graph)
    external = uses_external_data(model)
    conversion: dict[str, Any] | None = None
    converted: onnx.ModelProto | None = None
    if options.dtype:
        conversion = {"dtype": options.dtype, "scope": options.scope, "kept_float32": list[str]()}
        if options.scope == "model":
            model, conversion["kept_float32"] = _lowered(model, source, options)
            if options.verify and not options.dry_run:
                converted = onnx.ModelProto()
                converted.CopyFrom(model)
    graph, sites = find_sites(model, source.parent)
    _select(graph, sites, source, options)
    if conversion and options.scope == "sites":
        from cutefuse.rewrite.retype import retype

        conversion["kept_float32"] = retype(sites, options.dtype, options.keep_float32, graph.opset)
    suit_device(sites, options.sm)
    if options.functions:
        check_bodies(graph, sites)
    check_overlaps(graph, sites)  # the last check: an excluded site must claim no nodes
    if "parallel" not in options.without:
        merge_parallel(graph, sites, options.sm)
    doomed = plan(graph, sites)
    fused = [s for s in sites if s.status == FUSED]
    digest = sha256_of(source)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "tool": {"name": "cutefuse", "version": cutefuse.__version__},
        "input": {"path": str(source), "sha256": digest},
        "output": {"path": str(output)},
        "opset": graph.opset,
        "sm": options.sm,
        "conversion": conversion,
        "sites": [],
        "verify": None,
    }
    written = None
    if fused and not options.dry_run:
        written = _write(source, output, graph, sites, doomed, external, options, report, converted)
    report["sites"] = [s.as_json() for s in sites]
    after = op_counts(model.graph) if written or report["verify"] else _predicted(graph, sites, doomed)
    report["summary"] = _summary(sites, before, after, time.perf_counter() - started)
    failed = report["verify"] is not None and not report["verify"]["passed"]
    if written or failed:
        write_text(report_path(output), json.dumps(report, indent=1) + "\n")
    return Result(sites, report, written, 1 if failed else 0 if fused else 3)


def _write(
    source: Path, output: Path, graph: Graph, sites: Sequence[Site], doomed: Plan, external: bool, options: Options,
    report: dict[str, Any], converted: onnx.ModelProto | None,
) -> Path | None:  # fmt: skip
    model = graph.model
    # Packing pads channels to 64, so that a model just below protobuf's limit may grow past it.
    packed = sum(s.cost.bytes_moved for s in sites if s.status == FUSED and s.cost) if model.ByteSize() > 1 << 30 else 0
    external = external or model.ByteSize() + packed > EXTERNAL_LIMIT
    with writer(output, external) as out:
        apply_sites(graph, sites, doomed, out, options.functions, report["input"]["sha256"])
        out.save(model, source.parent)
        if options.verify:
            report["verify"] = prove(
                source, graph, out.folder, sites, converted, options.functions, options.shapes, options.seed
            )
            if not report["verify"]["passed"]:
                return None
        out.commit()
    return output


def _lowered(model: onnx.ModelProto, source: Path, options: Options) -> tuple[onnx.ModelProto, list[str]]:
    if options.dtype != "float16":
        raise CutefuseError(
            "--dtype bf16 works with --scope sites; for a whole model in bfloat16 run NVIDIA ModelOpt's AutoCast first"
        )
    from cutefuse.rewrite.retype import to_float16

    return to_float16(model, source.parent, options.keep_float32)


def _select(graph: Graph, sites: Sequence[Site], source: Path, options: Options) -> None:
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
        names = {site.name, *(n.name for n in site.nodes if n.name), *(o for n in site.nodes for o in n.output)}
        if options.include and not any(fnmatchcase(n, p) for n in names for p in options.include):
            site.refuse(EXCLUDED, "no --include pattern names it")
        elif pattern := next((p for p in options.exclude if any(fnmatchcase(n, p) for n in names)), None):
            site.refuse(EXCLUDED, f"--exclude '{pattern}' names it")
        elif options.include_op and site.op.stem not in options.include_op:
            site.refuse(EXCLUDED, "no --include-op names its operator")
        elif site.op.stem in options.exclude_op:
            site.refuse(EXCLUDED, f"--exclude-op {site.op.stem}")
    if options.profile:
        _choose_by_gain(graph, [s for s in sites if s.status == FUSED], source, options.profile, options.min_gain_us)


def _choose_by_gain(graph: Graph, sites: Sequence[Site], source: Path, profile: Path, min_gain_us: float) -> None:
    from cutefuse.report import rank

    engine = rank.profile_of(profile, source)
    for site, found in zip(sites, rank.price(engine, graph, sites, rank.engine_peaks(engine), source), strict=True):
        site.gain_us = found.gain_us
        if found.gain_us is None and min_gain_us > 0:
            site.refuse(EXCLUDED, f"what it would save is not known: {found.note}; without --min-gain it is fused")
        elif found.gain_us is not None and found.gain_us < min_gain_us:
            reason = f" ({found.note})" if found.note else ""
            text = f"it would save about {found.gain_us:.3g} us{reason}, less than --min-gain {min_gain_us:g} us"
            site.refuse(EXCLUDED, text)


def _predicted(graph: Graph, sites: Sequence[Site], doomed: Plan) -> Counter[str]:
    counts = Counter(n.op_type for n in graph.nodes if id(n) not in doomed.dead)
    counts.update(s.match.call.op_type for s in sites if s.status == FUSED and s.match)
    return counts


def _summary(sites: Sequence[Site], before: Counter[str], after: Counter[str], seconds: float) -> dict[str, Any]:
    status = Counter(s.status for s in sites)
    return {
        "candidates": len(sites),
        "fused": status[FUSED],
        "merged": status[MERGED],
        "refused": status["refused"],
        "excluded": status[EXCLUDED],
        "nodes_before": sum(before.values()),
        "nodes_after": sum(after.values()),
        "ops_before": dict(sorted(before.items())),
        "ops_after": dict(sorted(after.items())),
        "bytes_saved": sum(s.bytes_saved for s in sites),
        "seconds": round(seconds, 3),
    }


def show(result: Result, verbose: bool) -> None:
    """Print the candidates, the change and the verdict."""
    rows = []
    for s in result.report["sites"]:
        gflop = f"{s['flops'] / 1e9:.3g}" if s["flops"] else ""
        saved = f"{s['bytes_saved'] / 1e6:.3g}" if s["status"] == FUSED else ""
        notes = f" ({'; '.join(s['notes'])})" if s["notes"] else ""
        verdict = f"fused as {s['op_type']}{notes}" if s["status"] == FUSED else f"{s['status']}: {s['reason']}"
        rows.append([s["name"], s["title"] or s["operator"], s["dtype"] or "", gflop, saved, verdict])
    table.show("candidates", ["site", "problem", "type", "GFLOP", "MB saved", "verdict"], rows, numbers=(3, 4))
    if verbose:
        for s in result.report["sites"]:
            print(f"{s['name']}: nodes {', '.join(s['nodes'])}; inputs {', '.join(s['inputs'])}; shapes {s['shapes']}")
    summary = result.report["summary"]
    old, new = summary["ops_before"], summary["ops_after"]
    changed = [[op, old.get(op, 0), new.get(op, 0)] for op in sorted({*old, *new}) if old.get(op, 0) != new.get(op, 0)]
    if changed:
        changed.append(["all nodes", summary["nodes_before"], summary["nodes_after"]])
        table.show("nodes", ["op_type", "before", "after"], changed, numbers=(1, 2))
    counts = ", ".join(f"{summary[k]} {k}" for k in (FUSED, MERGED, "refused", EXCLUDED) if summary[k] or k == FUSED)
    saved = summary["bytes_saved"] / 1e6
    print(f"{summary['candidates']} candidates: {counts}; {saved:.3g} MB of traffic gone; {summary['seconds']} s")
    if proof := result.report["verify"]:
        if proof["passed"]:
            print("\n".join(words(proof, (result.report["conversion"] or {}).get("dtype", ""))))
        else:
            print(f"error: verification failed ({failure(proof)}); no model was written", file=sys.stderr)
    if result.output:
        print(f"wrote {result.output} and {report_path(result.output)}")
    elif result.exit_code == 3:
        print("nothing to patch; nothing was written")


def _shape(text: str) -> tuple[str, list[int]]:
    name, _, dims = text.rpartition(":")
    if not name or not re.fullmatch(r"\d+(x\d+)*", dims):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; write it as name:1x3x224x224")
    return name, [int(d) for d in dims.split("x")]


def _microseconds(text: str) -> float:
    units = {"": 1.0, "us": 1.0, "ms": 1e3, "s": 1e6}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no time; write it as 5us")
    return float(found[1]) * units[found[2] or ""]


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="patch_onnx.py", description="Replace Concat+Conv(+BN+activation) and norms by fused plugin nodes.",
        epilog="exit codes: 0 patched, 1 verification failed, 2 bad input, 3 nothing to patch",
    )  # fmt: skip
    p.add_argument("model", type=Path, help="ONNX file; it is never changed")
    p.add_argument("-o", "--output", type=Path, help="default: model.cutefuse.onnx beside the model")
    p.add_argument("--dry-run", action="store_true", help="show every candidate and its verdict, write nothing")
    p.add_argument("--include", action="append", default=[], metavar="GLOB", help="only sites with a node of this name")
    p.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="no site with a node of this name")
    p.add_argument(
        "--include-op", action="append", default=[], metavar="OP", help="only this operator (concat_conv, ...)"
    )
    p.add_argument("--exclude-op", action="append", default=[], metavar="OP", help="not this operator")
    p.add_argument("--without", action="append", default=[], choices=TAKES,
                   help="do not fuse nearest upsampling of a source, sources that are channel ranges, the Add of a "
                        "residual, or parallel Convs on the same Concat")  # fmt: skip
    p.add_argument("--sm", type=int, metavar="90",
                   help="compute capability of the GPU that will run the model; operators that only an older "
                        "generation's kernels can fuse stay outside; default: this machine's GPU; 0: any")  # fmt: skip
    p.add_argument("--no-functions", action="store_true", help="leave function bodies out (TensorRT 10.6 and older)")
    p.add_argument(
        "--verify", action="store_true", help="run original and patched model on the same inputs and compare"
    )
    p.add_argument("--input-shape", action="append", default=[], type=_shape, metavar="NAME:1x3x224x224",
                   help="size of a dynamic input for --verify")  # fmt: skip
    p.add_argument("--seed", type=int, default=0, help="of the inputs for --verify")
    p.add_argument("--profile", type=Path, metavar="DIR", help="profile of the unpatched engine, for --min-gain")
    p.add_argument("--min-gain", type=_microseconds, default=0.0, metavar="5us", help="skip sites that would gain less")
    p.add_argument(
        "--dtype", choices=sorted(DTYPES), help="lower the precision first; TensorRT 11 takes it from the file"
    )
    p.add_argument(
        "--scope", choices=("model", "sites"), help="what --dtype lowers; default: model for fp16, sites for bf16"
    )
    p.add_argument(
        "--keep-float32", action="append", default=[], metavar="GLOB", help="nodes that --dtype must not lower"
    )
    p.add_argument("--json", action="store_true", help="print the report as JSON instead of tables")
    p.add_argument("--verbose", action="store_true", help="also list the nodes, tensors and shapes of every site")
    return p


def main(argv: list[str] | None = None) -> int:
    """Entry point of `cutefuse patch` and scripts/patch_onnx.py."""
    args = make_parser().parse_args(argv)
    options = Options(
        args.include, args.exclude, args.include_op, args.exclude_op, args.without,
        local_sm() if args.sm is None else args.sm, not args.no_functions, args.verify,
        args.seed, dict(args.input_shape), args.dry_run, args.profile, args.min_gain, DTYPES.get(args.dtype, ""),
        args.scope or ("sites" if args.dtype == "bf16" else "model"), args.keep_float32,
    )  # fmt: skip

    def command() -> int:
        result = patch(args.model, args.output or default_output(args.model), options)
        if args.json:
            print(json.dumps(result.report, indent=1))
        else:
            show(result, args.verbose)
        return result.exit_code

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
