"""`cutefuse process`: build, profile, draw and report in one go, with the interface of NVIDIA's process_engine.py.

The input is an ONNX model, an engine, or a folder of JSON files that were written elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from cutefuse.commands import build, next_step
from cutefuse.engines import build as engine
from cutefuse.engines.artifacts import SUFFIXES, Artifacts, read_json
from cutefuse.engines.plugins import read_model
from cutefuse.engines.tensorrt import rtx
from cutefuse.errors import CutefuseError, command_line
from cutefuse.output import add_json, json_alone
from cutefuse.report.write import write

STEPS = ("build", "profile", "draw")
_KNOWN = (".onnx", *SUFFIXES)
_EMBEDDED = {
    "onnxruntime": "ONNX Runtime on the CPU is the embedded engine, its times are not those of a GPU",
    "torch": "PyTorch on the GPU is the embedded engine (--mode=compile gives it to torch.compile)",
}


def process(source: Path, outdir: Path, options: Sequence[str], steps: Collection[str], how: engine.How) -> Path | None:
    """Run the steps that are wanted of STEPS; returns the path of the HTML page when one was drawn.

    Raises CutefuseError for an input that is missing or of no known kind, or when a step fails.
    """
    if not source.exists():
        raise CutefuseError(f"{source} does not exist; give an ONNX model, an engine, or a folder of engine JSON files")
    if source.is_dir() or source.suffix == ".json":
        if how.dry_run:
            print(f"# {source} holds engine JSON: nothing to build or profile, only to draw")
            return None
        return write(source, outdir)
    if source.suffix not in _KNOWN:
        kinds = ", ".join(_KNOWN)
        raise CutefuseError(f"{source} is of no known kind; give {kinds} or a folder of engine JSON files")
    is_model = source.suffix == ".onnx"
    kind = how.kind(allow_onnxruntime=is_model)
    if how.backend == "auto" and kind in _EMBEDDED:
        print(f"no TensorRT here: {_EMBEDDED[kind]}")
    if kind == "onnxruntime" and (count := len(read_model(source).fused_nodes)):
        print(f"ONNX Runtime runs the function bodies of {count} fused nodes; TensorRT would run plugins")
    how = replace(how, backend=kind)
    # These load the model to profile it, and write all that building writes: it is loaded once for both.
    at_once = kind == "onnxruntime" or (kind == "torch" and "profile" in steps)
    files = Artifacts.of(source, outdir)
    if "build" in steps and is_model and not at_once:
        files = engine.build(source, outdir, options, how)
    untimed = rtx.cannot_run() if kind == "rtx" and is_model and "build" in steps and not how.dry_run else None
    if "profile" in steps and untimed:
        print(f"not profiled: {untimed}")
        for old in (files.profile, files.timing, files.profile_metadata, files.profile_log):
            old.unlink(missing_ok=True)  # of an engine that was here before
    elif "profile" in steps or ("build" in steps and kind == "onnxruntime"):
        engine.profile(files.engine if is_model and not at_once else source, outdir, options, how)
    return write(files.graph, outdir, source if is_model else None) if "draw" in steps and not how.dry_run else None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cutefuse process", allow_abbrev=False,
        description="Build and profile an engine, draw its graph, and write an HTML report.",
    )  # fmt: skip
    parser.add_argument("input", type=Path, help="ONNX model, engine, or folder of engine JSON files")
    parser.add_argument("outdir", type=Path, nargs="?", help="folder for all that is written (<input>.out)")
    parser.add_argument("trtexec", nargs="*", help="trtexec options, with or without dashes: fp16 shapes=x:1x3x64x64")
    parser.add_argument(
        "--print-only", "--print_only", "--dry-run", action="store_true", help="print the commands only"
    )
    for step, what in zip(STEPS, ("build the engine", "profile the engine", "draw graph and report"), strict=True):
        names = (f"-{step[0]}", f"--{step}-engine", f"--{step}_engine")
        parser.add_argument(*names, action="store_true", help=what)
    build.add_engine_arguments(parser, engine.BACKENDS)
    add_json(parser)
    return parser


@command_line
def main(argv: list[str] | None = None) -> None:
    """`process_engine.py input outdir [trtexec options]`; without -b, -p, -d all three steps."""
    args, rest = make_parser().parse_known_intermixed_args(argv)
    build.end_on_sigterm()
    steps = [step for step in STEPS if getattr(args, f"{step}_engine")] or STEPS
    words = [*args.trtexec, *rest]
    if args.outdir and "=" in args.outdir.name:  # an option: the folder was left out
        words, args.outdir = [str(args.outdir), *words], None
    options = build.trtexec_options(words)
    chosen = (("--backend", args.backend if args.backend != "auto" else ""), ("--sm", args.sm), ("--gpu", args.gpu))
    again = [*options, *(str(word) for name, value in chosen if value for word in (name, value))]
    beside = args.input if args.input.is_dir() else args.input.parent if args.input.suffix == ".json" else None
    outdir = args.outdir or beside or args.input.with_suffix(".out")  # reports of engine JSON go beside it
    with json_alone(args.json) as show:
        is_model = args.input.suffix == ".onnx"
        options += build.target_options(args, allow_onnxruntime=is_model)
        build.say_idle(args, args.input, "" if args.print_only else "--print-only")
        if args.input.suffix in _KNOWN:
            build.say_idle_timeout(args.timeout, args.backend, allow_onnxruntime=is_model)
        how = engine.How(args.backend, not args.no_plugins, args.timeout, args.print_only, args.trt_version)
        page = process(args.input, outdir, options, steps, how)
        show({"page": page, **read_json(page.with_suffix(".json"))} if page else {"page": None})
        if page:
            print(f"report: {page}")
            next_step.after_process(args.input, outdir, again)
