"""`cutefuse profile-kernels`: Nsight Compute metrics of our kernels, variants side by side.

A variant is a tile of one of our operators (--op, --config), any program (--command), or a CSV that ncu wrote earlier
(--csv). An engine (--engine) runs under Nsight Systems and Nsight Compute, whichever is here: its kernels are sorted to
its layers, their ONNX nodes and the roofline. --beside times the same work alone and beside another load.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError, command_line
from cutefuse.output import add_json, json_alone, make_folder, write_json
from cutefuse.profilers.kernels import contention, engines, ncu, nsys
from cutefuse.profilers.kernels.cases import Problem, case_call, drive_command, known_cases, launcher, list_cases
from cutefuse.profilers.kernels.contention import Load
from cutefuse.profilers.kernels.layers import figures, print_layers, sort
from cutefuse.profilers.kernels.metrics import BRIEF, Kernel, side_by_side
from cutefuse.report.analyse.rank import peaks_of


@dataclass
class Variant:
    """What was profiled under one label; `run`: None where earlier results are read."""

    label: str
    run: ncu.Run | None = None
    kernels: list[Kernel] = field(default_factory=list)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cutefuse profile-kernels", allow_abbrev=False, description=__doc__)
    parser.add_argument("--op", help="operator of ours, such as concat_conv")
    parser.add_argument("--case", help="one of the operator's cases (--list)")
    parser.add_argument("--size", default="", metavar="H=160,...", help="sizes in place of the case's own")
    parser.add_argument("--dtype", default="float16", help="float16, bfloat16 or float32 (float16)")
    parser.add_argument("--config", type=int, action="append", metavar="ID", help="tile, repeatable; 0: the best guess")
    parser.add_argument("--command", action="append", metavar="CMD", help="profile this program instead, repeatable")
    parser.add_argument("--csv", action="append", type=Path, metavar="FILE", help="earlier results of ncu, repeatable")
    parser.add_argument("--kernel", metavar="REGEX", help="only kernels whose name matches")
    parser.add_argument("--launches", type=int, default=5, help="launches to profile (5)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds for each run (600)")
    parser.add_argument("--engine", type=Path, help="engine file, or ONNX model for PyTorch: its layers' kernels")
    parser.add_argument("--inferences", type=int, default=1, metavar="N", help="inferences of the engine (1)")
    parser.add_argument("--peaks", default="auto", help="roof of --engine: auto, measured, a board, a JSON file (auto)")
    parser.add_argument("--trt-version", help="TensorRT of the commands of --dry-run, such as 10.3 (the installed one)")
    parser.add_argument(
        "--beside", action="append", default=[], metavar="LOAD",
        help="time alone and beside stream:copy, stream:matmul, process:copy, process:matmul, process:CMD; repeatable",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list operators, or that of --op, tiles and cases")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    parser.add_argument("-o", "--outdir", type=Path, default=Path("kernel_profile"), help="folder (kernel_profile)")
    add_json(parser)
    return parser


@command_line
def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    for option, value in (("--launches", args.launches), ("--inferences", args.inferences)):
        if value < 1:
            raise CutefuseError(f"{option} is {value}; give 1 or more")
    loads = [Load.of(text) for text in args.beside]
    with json_alone(args.json) as show:
        if args.list:
            found: Any = known_cases(args.op)
            print(list_cases(found))
        elif loads:
            found = _beside(args, loads)
        elif args.engine:
            found = _engine(args)
        else:
            found = _variants_profiled(args)
        if found is not None:
            show(found)
    return 0


# ------------------------------------------------------------------------------------------------- variants
def _variants(args: argparse.Namespace) -> list[Variant]:
    found = [Variant(path.name) for path in args.csv or []]
    for command in args.command or []:
        words = shlex.split(command)
        if not words:
            raise CutefuseError("--command is empty; give a program with its arguments")
        found.append(Variant(" ".join(words)[-40:], ncu.Run(words, kernel=args.kernel, launches=args.launches)))
    if args.op:
        problem = _problem(args)
        for config in args.config or [0]:
            command = drive_command(problem, config, args.launches)
            kernel = args.kernel or "cutefuse"  # PyTorch fills the operands with kernels of its own
            found.append(Variant(f"{args.op} tile {config}", ncu.Run(command, kernel=kernel, launches=args.launches)))
    if not found:
        raise CutefuseError("nothing to profile was given; use --op with --case, --command, --csv, --engine or --list")
    return found


def _problem(args: argparse.Namespace) -> Problem:
    if not args.case:
        raise CutefuseError(f"--op {args.op} needs a --case; --list shows them")
    problem = Problem(args.op, args.case, args.dtype, args.size)
    case_call(problem)
    return problem


def _variants_profiled(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    variants = _variants(args)
    runs = [(v, v.run) for v in variants if v.run]
    if args.dry_run:
        for _, run in runs:
            print(shlex.join(ncu.command_line("ncu", run)))
        return None
    tool = ncu.find() or ""
    if runs and not tool:
        raise CutefuseError("ncu was not found; install Nsight Compute, or read earlier results with --csv")
    make_folder(args.outdir)
    for v, run in runs:
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in v.label)[:80] or "variant"
        launches = ncu.profile(tool, run, args.outdir / f"{name}.ncu.csv", v.label, args.timeout)
        v.kernels = ncu.kernels_of(launches)
    for v, path in zip(variants, args.csv or [], strict=False):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise CutefuseError(
                f"{path} cannot be read ({error.strerror}); give a CSV of ncu --csv --page raw"
            ) from None
        v.kernels = ncu.kernels_of(ncu.read_csv(text, str(path)))
    data = [
        {"label": v.label, "command": v.run.command if v.run else [], "kernels": [vars(k) for k in v.kernels]}
        for v in variants
    ]
    write_json(args.outdir / "kernels.json", data)
    print(side_by_side([(v.label, v.kernels) for v in variants]))
    return data


# ------------------------------------------------------------------------------------------------- an engine
def _engine(args: argparse.Namespace) -> dict[str, Any] | None:
    """Run an engine under both profilers, sort its kernels to its layers, print and write what was found."""
    target = engines.target(args.engine, args.outdir, args.inferences, args.trt_version if args.dry_run else None)
    report = args.outdir.resolve() / f"{args.engine.name}.nsys-rep"
    run = ncu.Run(target.command, BRIEF, nvtx=target.nvtx)
    if args.dry_run:
        for line in [*nsys.commands("nsys", target.command, report), ncu.command_line("ncu", run)]:
            print(shlex.join(line))
        return None
    if not (nsys.find() or ncu.find()):
        raise CutefuseError("neither nsys nor ncu was found; install Nsight Systems or Compute, or see --dry-run")
    make_folder(args.outdir)
    target = engines.with_layers(target, args.outdir, args.inferences)
    sums, launches, notes = _both(args, target, run, report)
    rows, more = sort(target, launches, sums)
    assert target.layers is not None
    peaks = peaks_of(args.peaks, target.layers)
    found = [figures(row, target.layers, peaks) for row in rows]
    data = {"engine": str(args.engine), "peaks": vars(peaks) if peaks else None, "notes": notes + more, "layers": found}
    write_json(args.outdir / f"{args.engine.name}.kernels.json", data)
    print_layers(found, peaks)
    for note in [*notes, *more]:
        print(note)
    return data


def _both(
    args: argparse.Namespace, target: engines.Target, run: ncu.Run, report: Path
) -> tuple[list[nsys.KernelSum], list[ncu.Launch], list[str]]:
    """What each profiler recorded, and why one recorded nothing. Raises CutefuseError where neither did."""
    sums, launches, notes = [], [], []
    system, compute = nsys.find(), ncu.find()
    name = args.engine.name
    try:
        if system and target.per_layer:
            sums = nsys.profile(system, target.command, report, name, args.timeout)
        elif system:
            notes.append("Nsight Systems was left out: torch.compile's kernels have no range of their own")
        else:
            notes.append("nsys was not found; times are the engine's own and Nsight Compute's")
    except CutefuseError as error:
        notes.append(f"without Nsight Systems: {error}")
    try:
        if compute:
            launches = ncu.profile(compute, run, args.outdir / f"{name}.ncu.csv", name, args.timeout)
        else:
            notes.append("ncu was not found; the bytes that the kernels move are not counted")
    except CutefuseError as error:
        notes.append(f"without Nsight Compute: {error}")
    if not sums and not launches:
        raise CutefuseError(f"no kernel of {args.engine} was recorded: {'; '.join(notes)}")
    return sums, launches, notes


# ------------------------------------------------------------------------------------------------- contention
def _beside(args: argparse.Namespace, loads: list[Load]) -> dict[str, Any]:
    """Time an operator's tile or an engine alone and beside other loads."""
    if bool(args.op) == bool(args.engine) or args.command or args.csv:
        raise CutefuseError("--beside times one thing: give --op with --case, or --engine")
    if args.engine:
        title, sampler = str(args.engine.name), engines.sampler(args.engine)
    else:
        problem = _problem(args)
        if len(args.config or []) > 1:
            raise CutefuseError("--beside times one tile; give --config once")
        title = f"{args.op} {args.case}"
        sampler = contention.event_sampler(launcher(problem, (args.config or [0])[0]))
    times = contention.measure(sampler, loads)
    make_folder(args.outdir)
    data = {"work": title, "loads": contention.records(times)}
    write_json(args.outdir / "contention.json", data)
    contention.print_times(title, times)
    return data
