"""What one launch costs the host, in microseconds, without waiting for the device.

    python benchmarks/launch_cost.py --json launch.json

Columns: the judge of legality alone, a plan (once for each shape), a run of that plan with other addresses at every
call, all in a loop in C; a run through the Python binding; and, as peers, a prepared CUTLASS launch in C and torch's
cat + conv.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cutefuse import kernels  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.output import write_json  # noqa: E402

BATCH = 300  # launches in flight: the driver's queue holds 1024, and a full one makes the host wait
DISTINCT = 128  # sets of addresses that the runs take in turn
SHAPES = ("yolo_neck_p3_b1", "yolov7_elan_p2_b1", "raft_gru_1x5_b1", "lss_up_6cams")
COLUMNS = ("judge_us", "plan_us", "run_us", "python_us", "cutlass2_us", "cutlass3_us", "torch_us")


def loop_library(folder: Path) -> ctypes.CDLL:
    """The loop in C, built when missing. Raises CutefuseError without a C++ compiler."""
    source = ROOT / "benchmarks" / "peers" / "launch_loop.cpp"
    library = folder / "launch_loop.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
        if compiler is None:
            raise CutefuseError("the loop in C needs a C++ compiler, and none was found; install g++ or set CXX")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-std=c++17", str(source), "-o", str(library)], check=True)
    lib = ctypes.CDLL(str(library))
    for name in ("judge", "plan", "run", "peer"):
        getattr(lib, f"{name}_loop_us").restype = ctypes.c_double
    return lib


def median(measure: Callable[[], float], repeats: int) -> float:
    """Median of several batches, the device idle before each."""
    import torch

    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        times.append(measure())
    torch.cuda.synchronize()
    return statistics.median(times)


def python_loop_us(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    for _ in range(BATCH):
        call()
    return (time.perf_counter() - started) * 1e6 / BATCH


def operator_times(instance: Any, config: int, lib: ctypes.CDLL, repeats: int) -> dict[str, float]:
    """Our columns for one tile. The outputs of the runs lie 256 bytes apart in one larger buffer."""
    import torch

    call = replace(instance.call, config=config, _keep=[])
    op, raw = kernels._lower(call)
    c, launcher = kernels.library(), kernels.Launcher(call)
    spare = torch.empty(instance.buffers[-1].view.numel() * 2 + DISTINCT * 256, dtype=torch.uint8, device="cuda")
    stream, given = torch.cuda.current_stream().cuda_stream, launcher._raw.inputs
    size = max(call.workspace_bytes, 0)
    kept = [(ctypes.c_void_p * 1)(spare.data_ptr() + 256 * i) for i in range(DISTINCT)]
    operands = [kernels._Operands(given, to, call.workspace or None, size, stream or None) for to in kept]
    sets = (ctypes.c_void_p * DISTINCT)(*(ctypes.addressof(o) for o in operands))
    state, at = launcher.plan._state, ctypes.byref(raw)
    spare_state = ctypes.create_string_buffer(len(state))
    times = {
        "judge_us": median(lambda: float(lib.judge_loop_us(c.cutefuse_reject, op, at, BATCH)), repeats),
        "plan_us": median(lambda: float(lib.plan_loop_us(c.cutefuse_plan, op, at, spare_state, BATCH)), repeats),
        "run_us": median(lambda: float(lib.run_loop_us(c.cutefuse_run, state, sets, DISTINCT, BATCH)), repeats),
        "python_us": median(lambda: python_loop_us(lambda: launcher(stream)), repeats),
    }
    if min(times.values()) < 0:
        raise CutefuseError(f"the library refused config {config}: {kernels.reject(instance.call)}")
    return times


def peer_times(problem: Any, lib: ctypes.CDLL, repeats: int) -> dict[str, float]:
    """The peers that this machine has."""
    import torch

    from benchmarks.lib import peers

    stream = torch.cuda.current_stream().cuda_stream
    work = peers.Workload.of(problem, "float16", 1)
    times = {}
    for peer in ("cutlass2", "cutlass3"):
        try:
            chosen = peers.chosen(work, peer)[0][0]
        except CutefuseError as error:
            print(f"# without {peer}: {error}", file=sys.stderr)
            continue
        handle, run = ctypes.c_void_p(chosen.handle), chosen.library.peer_run
        loop_us = functools.partial(lib.peer_loop_us, run, handle, ctypes.c_void_p(stream), BATCH)
        times[f"{peer}_us"] = median(loop_us, repeats)
    eager = peers.make("eager", work).launch
    times["torch_us"] = median(lambda: python_loop_us(lambda: eager(0)), repeats)
    return times


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per shape, of the library's own choice of tile."""
    import problems

    from benchmarks.lib import timing

    lib = loop_library(ROOT / "build" / "peers")
    known = {p.name: p for p in problems.benchmark_shapes()}
    rows = []
    for name in args.shapes:
        if name not in known:
            raise CutefuseError(f"shape '{name}' is not in conv_shapes.json; choose from {', '.join(known)}")
        instance = problems.instantiate(known[name], "float16")
        config = kernels.configs(instance.call)[0]
        names = {c["id"]: c["name"] for c in kernels.operator_of(instance.call.op_type)["configs"]}
        row = {"shape": name, "sources": len(known[name].C), "tile": names[config]}
        row |= operator_times(instance, config, lib, args.repeats)
        rows.append(row | peer_times(known[name], lib, args.repeats) | timing.device_row())
    return rows


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; a peer that was not measured is a dash, or no column where no row has it."""
    from benchmarks.lib import markdown

    columns = [c for c in COLUMNS if any(c in row for row in rows)]
    lines = [["shape", "sources", "tile", *(c.removesuffix("_us") for c in columns)]]
    for row in rows:
        times = [f"{row[c]:.2f}" if c in row else "-" for c in columns]
        lines.append([row["shape"], str(row["sources"]), row["tile"], *times])
    return "\n".join(markdown.grid(lines))


def run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="NAME", help="names of conv_shapes.json")
    parser.add_argument("--repeats", type=int, default=15, help="batches of which the median counts; default 15")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    from benchmarks.lib import timing

    timing.require_gpu()
    rows = measure(args)
    print(f"{rows[0]['gpu']}, microseconds of the host per call")
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
