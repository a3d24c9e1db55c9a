"""`cutefuse profile-kernels`: Nsight Compute metrics of our kernels, variants side by side.

A variant is a tile of one of our operators (--op, --config), any program (--command), or a CSV that ncu wrote earlier
(--csv). For engines it prints the Nsight Systems commands that put layer names on the time line (--engine).
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError, run_command
from cutefuse.output import add_json, json_alone, make_folder, write_json, write_text
from cutefuse.progress import spinner

# metric of Nsight Compute, what the table calls it, factor from ncu's base unit, digits
METRICS: tuple[tuple[str, str, float, int], ...] = (
    ("gpu__time_duration.sum", "time µs", 1e-3, 2),
    ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "SM %", 1, 1),
    ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "tensor pipe %", 1, 1),
    ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "DRAM %", 1, 1),
    ("dram__bytes_read.sum", "DRAM read MB", 1e-6, 2),
    ("dram__bytes_write.sum", "DRAM written MB", 1e-6, 2),
    ("lts__t_sector_hit_rate.pct", "L2 hit %", 1, 1),
    ("l1tex__t_sector_hit_rate.pct", "L1 hit %", 1, 1),
    ("l1tex__data_bank_conflicts_pipe_lsu.sum", "shared bank conflicts", 1, 0),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", "occupancy %", 1, 1),
    ("smsp__issue_active.avg.pct_of_peak_sustained_active", "issue slots %", 1, 1),
    ("launch__registers_per_thread", "registers", 1, 0),
    ("launch__shared_mem_per_block", "shared memory KB", 1e-3, 1),
    ("launch__grid_size", "blocks", 1, 0),
    ("launch__waves_per_multiprocessor", "waves", 1, 2),
    ("smsp__inst_executed_op_local.sum", "local memory accesses", 1, 0),
)


@dataclass
class Kernel:
    """One kernel of one variant: means over its launches, in ncu's base units (ns, bytes, %)."""

    name: str
    launches: int = 0
    values: dict[str, float] = field(default_factory=dict)


@dataclass
class Variant:
    """What was profiled under one label."""

    label: str
    command: list[str]
    kernel: str | None = None  # only kernels whose demangled name matches
    kernels: list[Kernel] = field(default_factory=list)

    def total(self, metric: str) -> float | None:
        """Sum over the kernels for times and counts, time-weighted mean for percentages."""
        rows = [(k, v) for k in self.kernels if (v := k.values.get(metric)) is not None]
        if not rows:
            return None
        if metric.endswith(".sum"):
            return sum(v * k.launches for k, v in rows) / max(min(k.launches for k, _ in rows), 1)
        weights = [k.values.get(METRICS[0][0], 1.0) * k.launches for k, _ in rows]
        total = sum(weights)
        return sum(v * w for (_, v), w in zip(rows, weights, strict=True)) / total if total else None


# ------------------------------------------------------------------------------------------------- Nsight Compute
def ncu_command(ncu: str, command: list[str], kernel: str | None, launches: int) -> list[str]:
    """Nsight Compute over a program: raw CSV in base units, caches flushed and clocks left alone.

    Clocks are not locked (--clock-control none): locked base clocks hide what a kernel does at boost.
    """
    filters = ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{kernel}"] if kernel else []
    metrics = ",".join(m[0] for m in METRICS)
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--cache-control", "all",
        "--target-processes", "all", "--launch-count", str(launches), "--metrics", metrics, *filters, *command,
    ]  # fmt: skip


def find_ncu() -> str:
    for path in ("ncu", "/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu"):
        found = shutil.which(path)
        if found:
            return found
    raise CutefuseError("ncu was not found; install Nsight Compute, or read earlier results with --csv")


def parse_csv(text: str, where: str) -> list[Kernel]:
    """Kernels of ncu's raw CSV, in the order of their first launch. Raises CutefuseError for other text."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    header = rows[0] if rows else []
    if "Kernel Name" not in header:
        problem = next(
            (line.strip() for line in text.splitlines() if "ERROR" in line), "it has no column 'Kernel Name'"
        )
        raise CutefuseError(f"{where} is no result of ncu --csv --page raw: {problem}")
    kernels: dict[str, Kernel] = {}
    sums: dict[tuple[str, str], list[float]] = {}
    for row in rows[1:]:
        record = dict(zip(header, row, strict=False))
        if not record.get("ID", "").strip():
            continue  # the row of units
        name = record["Kernel Name"]
        kernel = kernels.setdefault(name, Kernel(name))
        kernel.launches += 1
        for metric, *_ in METRICS:
            try:
                value = float(record.get(metric, "").replace(",", ""))
            except ValueError:
                continue  # "n/a": this chip has no such counter
            if math.isfinite(value):
                sums.setdefault((name, metric), []).append(value)
    for (name, metric), values in sums.items():
        kernels[name].values[metric] = sum(values) / len(values)
    if not kernels:
        raise CutefuseError(f"{where} holds no kernel; check --kernel and that the program launches it")
    return list(kernels.values())


def profile(variant: Variant, outdir: Path, ncu: str, launches: int, timeout_s: float) -> None:
    """Run one variant under ncu; its raw CSV is kept in `outdir`."""
    command = ncu_command(ncu, variant.command, variant.kernel, launches)
    try:
        with spinner(f"profiling {variant.label}"):
            done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CutefuseError(f"{shlex.join(command[:1])} did not finish for {variant.label} ({error})") from None
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        words = [line for line in (text + done.stderr.decode(errors="replace")).splitlines() if line.strip()]
        reason = next((w for w in words if "ERROR" in w or "error:" in w), words[-1] if words else "no output")
        raise CutefuseError(f"ncu failed for {variant.label}: {reason.strip()}")
    variant.kernels = parse_csv(text, variant.label)
    write_text(outdir / f"{_slug(variant.label)}.ncu.csv", text)


def _slug(label: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in label)[:80] or "variant"


def table(variants: list[Variant]) -> str:
    """Metrics down, variants across; the last column is the ratio of the last to the first."""
    width = max(24, *(len(v.label) + 2 for v in variants))
    lines = [
        f"{'':<24}" + "".join(f"{v.label:>{width}}" for v in variants) + (f"{'ratio':>9}" if len(variants) > 1 else "")
    ]
    names = [f"{len(v.kernels)} kernel{'s' if len(v.kernels) != 1 else ''}" for v in variants]
    lines.append(f"{'':<24}" + "".join(f"{n:>{width}}" for n in names))
    for metric, title, factor, digits in METRICS:
        values = [v.total(metric) for v in variants]
        if all(v is None for v in values):
            continue
        cells = ["-" if v is None else f"{v * factor:.{digits}f}" for v in values]
        first, last = values[0], values[-1]
        ratio = f"{last / first:>8.2f}×" if len(values) > 1 and first and last is not None else ""
        lines.append(f"{title:<24}" + "".join(f"{c:>{width}}" for c in cells) + ratio)
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- our own operators
def drive_command(op: str, case: str, dtype: str, config: int, repeats: int) -> list[str]:
    """A program that launches one tile of one operator on one of its cases."""
    argv = ["drive", op, case, dtype, str(config), str(repeats)]
    return [sys.executable, "-m", "cutefuse.commands.profile_kernels", *argv]


def drive(op_name: str, case_name: str, dtype: str, config: int, repeats: int) -> int:
    """Allocate a case's operands on the GPU and launch it; this runs under ncu. Returns the number of launches."""
    from cutefuse import kernels

    call = case_call(op_name, case_name, dtype)
    try:
        import torch
    except ImportError:
        raise CutefuseError(
            "profiling our kernels needs PyTorch for device memory; install it, or use --command"
        ) from None
    if not torch.cuda.is_available():
        raise CutefuseError("no CUDA device was found; run on a machine with a GPU")
    keep: list[Any] = []

    def placed(tensor: kernels.Tensor) -> kernels.Tensor:
        elements = math.prod(tensor.dims)
        if tensor.layout == kernels.CHANNELS_LAST and tensor.ld:
            elements = elements // tensor.dims[1] * tensor.ld
        kind = getattr(torch, tensor.dtype)
        data = torch.randn(max(elements, 1), device="cuda").to(kind)
        keep.append(data)
        return replace(tensor, data=data.data_ptr())

    call = replace(call, inputs=[placed(t) for t in call.inputs], outputs=[placed(t) for t in call.outputs],
                   config=config)  # fmt: skip
    size = kernels.Plan(call).workspace_bytes
    if size > 0:
        keep.append(torch.zeros(size, dtype=torch.uint8, device="cuda"))
        call = replace(call, workspace=keep[-1].data_ptr(), workspace_bytes=size)
    launch = kernels.Launcher(replace(call, stream=torch.cuda.current_stream().cuda_stream))
    for _ in range(repeats):
        launch()
    torch.cuda.synchronize()
    return repeats


def case_call(op_name: str, case_name: str, dtype: str) -> Any:
    """The call of a named case. Raises CutefuseError with the known names."""
    from cutefuse.ops import operators

    found = {op.stem: op for op in operators()}
    if op_name not in found:
        raise CutefuseError(f"operator {op_name} is unknown; choose one of {', '.join(found)}")
    cases = {case.name: case for case in found[op_name].cases()}
    if case_name not in cases:
        raise CutefuseError(f"case {case_name} is unknown; --list shows those of {op_name}")
    return found[op_name].call(cases[case_name], dtype)


def list_cases() -> str:
    """Operators with their tiles and cases."""
    from cutefuse import kernels
    from cutefuse.ops import operators

    lines = []
    try:
        tiles = {op["name"]: op["configs"] for op in kernels.describe()["ops"]}
    except (CutefuseError, OSError):
        tiles = {}
    for op in operators():
        lines.append(op.stem)
        lines += [f"  config {c['id']:>4}  {c['name']} ({kernels.gpus_of(c)})" for c in tiles.get(op.stem, [])]
        lines += [f"  case {case.name}  {op.title(op.call(case, case.dtypes[0]))}" for case in op.cases()]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- Nsight Systems
def nsys_commands(engine: Path, outdir: Path, major: int, plugins: list[Path]) -> list[list[str]]:
    """Profile an engine on the time line with NVTX ranges of its layers, and sum the kernels by layer.

    CUDA graphs hide the ranges: TensorRT 10 runs without unless asked, 11 needs --noCudaGraph.
    """
    report = outdir / f"{engine.name}.nsys-rep"
    trtexec = ["trtexec", f"--loadEngine={engine}", "--profilingVerbosity=detailed", "--iterations=20", "--duration=0",
               "--warmUp=0", *(f"--dynamicPlugins={p}" for p in plugins)]  # fmt: skip
    trtexec += ["--noCudaGraph"] if major >= 11 else ["--noDataTransfers"]
    capture = ["nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--force-overwrite=true", f"--output={report}"]
    reports = ["--report", "nvtx_gpu_proj_sum", "--report", "cuda_gpu_kern_sum"]
    return [[*capture, *trtexec], ["nsys", "stats", *reports, "--format", "table", str(report)]]


# ------------------------------------------------------------------------------------------------- command line
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cutefuse profile-kernels", allow_abbrev=False, description=__doc__)
    parser.add_argument("--op", help="operator of ours, such as concat_conv")
    parser.add_argument("--case", help="one of the operator's cases (--list)")
    parser.add_argument("--dtype", default="float16", help="float16, bfloat16 or float32 (float16)")
    parser.add_argument(
        "--config", type=int, action="append", metavar="ID", help="tile, repeatable; 0 is the best guess"
    )
    parser.add_argument("--command", action="append", metavar="CMD", help="profile this program instead, repeatable")
    parser.add_argument("--csv", action="append", type=Path, metavar="FILE", help="earlier results of ncu, repeatable")
    parser.add_argument("--kernel", metavar="REGEX", help="only kernels whose name matches")
    parser.add_argument("--launches", type=int, default=5, help="launches to profile (5)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds for each variant (600)")
    parser.add_argument("--engine", type=Path, help="print the Nsight Systems commands for this engine")
    parser.add_argument("--trt-version", default="10", help="TensorRT of those commands (10)")
    parser.add_argument("--list", action="store_true", help="list operators, tiles and cases")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    parser.add_argument("-o", "--outdir", type=Path, default=Path("kernel_profile"), help="folder (kernel_profile)")
    add_json(parser)
    return parser


def _variants(args: argparse.Namespace) -> list[Variant]:
    found = [Variant(path.name, []) for path in args.csv or []]
    for command in args.command or []:
        words = shlex.split(command)
        if not words:
            raise CutefuseError("--command is empty; give a program with its arguments")
        found.append(Variant(" ".join(words)[-40:], words, args.kernel))
    if args.op:
        if not args.case:
            raise CutefuseError(f"--op {args.op} needs a --case; --list shows them")
        case_call(args.op, args.case, args.dtype)
        for config in args.config or [0]:
            command = drive_command(args.op, args.case, args.dtype, config, args.launches)
            # PyTorch fills the operands with kernels of its own.
            found.append(Variant(f"{args.op} tile {config}", command, args.kernel or "cutefuse"))
    if not found:
        raise CutefuseError("nothing to profile was given; use --op with --case, --command, --csv, --engine or --list")
    return found


def main(argv: list[str] | None = None) -> int:
    """Entry point; `drive ...` is what runs under ncu."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["drive"]:
        return run_command(lambda: 0 if drive(words[1], words[2], words[3], int(words[4]), int(words[5])) else 1)
    args = _parser().parse_args(words)

    def command() -> int:
        if args.list:
            print(list_cases())
            return 0
        if args.engine:
            from cutefuse.engine.plugins import library_if_built

            major = args.trt_version.split(".")[0]
            if not major.isdigit():
                raise CutefuseError(f"--trt-version is {args.trt_version}; give a version such as 10.3 or 11.1")
            for line in nsys_commands(args.engine, args.outdir, int(major), library_if_built()):
                print(shlex.join(line))
            return 0
        variants = _variants(args)
        if args.dry_run:
            for v in variants:
                if v.command:
                    print(shlex.join(ncu_command("ncu", v.command, v.kernel, args.launches)))
            return 0
        return _run(args, variants)

    return run_command(command)


def _run(args: argparse.Namespace, variants: list[Variant]) -> int:
    measured = [v for v in variants if v.command]
    ncu = find_ncu() if measured else ""
    make_folder(args.outdir)
    for variant in measured:
        profile(variant, args.outdir, ncu, args.launches, args.timeout)
    for variant, path in zip(variants, args.csv or [], strict=False):
        try:
            variant.kernels = parse_csv(path.read_text(encoding="utf-8", errors="replace"), str(path))
        except OSError as error:
            raise CutefuseError(
                f"{path} cannot be read ({error.strerror}); give a CSV of ncu --csv --page raw"
            ) from None
    data = [{"label": v.label, "command": v.command, "kernels": [vars(k) for k in v.kernels]} for v in variants]
    write_json(args.outdir / "kernels.json", data)
    with json_alone(args.json) as show:
        show(data)
        print(table(variants))
    return 0


if __name__ == "__main__":
    sys.exit(main())
