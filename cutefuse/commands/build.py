"""`cutefuse build`: an engine from an ONNX model, and the options that `cutefuse process` shares with it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import threading
from pathlib import Path

from cutefuse.commands import next_step
from cutefuse.commands.choices import sm_of
from cutefuse.engines.build import BUILDERS, How, build, choose_backend
from cutefuse.engines.cuda_memory import local_sm
from cutefuse.engines.plugins import read_model
from cutefuse.engines.tensorrt import rtx, trtexec
from cutefuse.errors import CutefuseError, command_line
from cutefuse.operators.layouts import engine_of_backend, strange
from cutefuse.output import add_json, check_named, json_alone, whole_number
from cutefuse.select.engines import NEWEST


def end_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that children end and partial files go."""

    def handler(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
        signal.signal(signal.SIGTERM, handler)


def trtexec_options(words: list[str]) -> list[str]:
    """trtexec options from the command line: `--fp16`, `fp16` (as NVIDIA's script takes them), never a stray word."""
    for word in words:
        if word.startswith("-") and not word.startswith("--"):
            raise CutefuseError(f"{word} is no option of this command, and trtexec's begin with two dashes; see --help")
    return [word if word.startswith("--") else f"--{word}" for word in words]


def assumed_version(args: argparse.Namespace) -> str | None:
    """The TensorRT version of a dry run: the one given, else the newest known where there is no TensorRT here."""
    given: str | None = args.trt_version
    there = args.backend not in ("auto", "trtexec") or trtexec.find() or importlib.util.find_spec("tensorrt")
    if given or there or not args.dry_run:
        return given
    newest = ".".join(map(str, NEWEST))
    print(f"# no TensorRT here: {newest} is assumed, the newest that cutefuse knows; --trt-version names another")
    return newest


def say_idle_timeout(timeout_s: float | None, backend: str, allow_onnxruntime: bool = False) -> None:
    """Say that --timeout has no effect where the back end is not trtexec; not where there is none at all."""
    with contextlib.suppress(CutefuseError):
        kind = "" if timeout_s is None else choose_backend(backend, allow_onnxruntime)
        if kind not in ("", "trtexec", "rtx"):
            print(f"--timeout does nothing with the back end {kind}: it ends a process that builds")


def say_idle(args: argparse.Namespace, model: Path, dry_run: str = "") -> None:
    """Say which of the shared options have no effect; `dry_run`: the option of a run that builds something."""
    if args.trt_version and dry_run:
        print(f"--trt-version does nothing without {dry_run}: the TensorRT that is installed builds the engine")
    if model.suffix == ".onnx":
        with contextlib.suppress(CutefuseError):  # the command itself says what is wrong with the model
            facts = read_model(model)
            if args.no_plugins and not facts.fused_nodes:
                print(f"--no-plugins does nothing: {model} holds no fused node")
            elif facts.layouts and not args.no_plugins:
                engine = engine_of_backend(choose_backend(args.backend))
                if cost := strange(facts.layouts, engine, args.sm or local_sm()):
                    print(cost)


def target_options(args: argparse.Namespace, allow_onnxruntime: bool = False) -> list[str]:
    """--sm and --gpu as an option of the back end rtx. Raises CutefuseError for another one, and where they differ."""
    if args.sm is None and not args.gpu:
        return []
    kind = choose_backend(args.backend, allow_onnxruntime)
    if kind != "rtx":
        raise CutefuseError(
            f"--sm and --gpu name a target, and the back end {kind} builds for this machine's GPU; leave them out, or "
            "give --backend rtx"
        )
    named = sm_of(args.gpu) if args.gpu else args.sm
    if args.sm not in (None, named):
        raise CutefuseError(f"--gpu {args.gpu} has compute capability {named / 10}, --sm says {args.sm / 10}; give one")
    return [f"{rtx.TARGET}={rtx.check_sm(named)}"]


def add_engine_arguments(parser: argparse.ArgumentParser, backends: tuple[str, ...]) -> None:
    """Options that `build` and `process` share."""
    parser.add_argument("--backend", choices=backends, default="auto", help="what builds and runs the engine (auto)")
    parser.add_argument("--timeout", type=float, metavar="S",
                        help="end trtexec, or the process of TensorRT for RTX, after this many seconds")  # fmt: skip
    parser.add_argument("--sm", type=whole_number, metavar="89", help="compute capability for rtx (this GPU's, or 89)")
    parser.add_argument("--gpu", metavar="NAME", help="GPU that rtx builds for, as 'RTX 4090', instead of --sm")
    parser.add_argument("--no-plugins", action="store_true", help="build fused nodes from their function bodies")
    parser.add_argument(
        "--trt-version", metavar="V", help="TensorRT of a dry run without trtexec, such as 10.3 (newest)"
    )


@command_line
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="cutefuse build", allow_abbrev=False, description="Build an engine from an ONNX model.",
        epilog="Every other option goes to trtexec: --fp16 (TensorRT 10), --minShapes=x:1x3x64x64, ...",
    )  # fmt: skip
    parser.add_argument("model", type=Path, help="ONNX model")
    parser.add_argument("outdir", type=Path, nargs="?", help="folder for the engine and its files (<model>.trt)")
    parser.add_argument("--dry-run", "--print-only", action="store_true", help="print the exact command and stop")
    add_engine_arguments(parser, BUILDERS)
    add_json(parser)
    args, rest = parser.parse_known_args(argv)
    end_on_sigterm()
    check_named(args.model)
    with json_alone(args.json) as show:
        say_idle(args, args.model, "" if args.dry_run else "--dry-run")
        say_idle_timeout(args.timeout, args.backend)
        options = [*trtexec_options(rest), *target_options(args)]
        how = How(args.backend, not args.no_plugins, args.timeout, args.dry_run, assumed_version(args))
        files = build(args.model, args.outdir or args.model.with_suffix(".trt"), options, how)
        made = {} if args.dry_run else {"graph": files.graph, "log": files.build_log}
        show({"engine": files.engine, "written": not args.dry_run} | {k: p for k, p in made.items() if p.is_file()})
        if not args.dry_run:
            print(f"{files.engine} ({files.engine.stat().st_size / 2**20:.1f} MiB), layers in {files.graph}")
            next_step.after_build(files.engine)
