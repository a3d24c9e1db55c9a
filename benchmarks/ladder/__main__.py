"""The ladder: RMSNorm from one working thread per row to the library's kernel, LayerNorm and its backward beside it.

    python benchmarks/ladder                # times, bytes, share of the copy bandwidth, error against float64
    python benchmarks/ladder --ncu          # with Nsight Compute's metrics that explain each step
    python benchmarks/ladder --ncu --pair "4 warps" v3      # two steps and their ratio

The steps are in steps.cu, which is compiled with nvcc on first use; docs/ladder.md tells what each step teaches.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import row_norm as bench  # noqa: E402
from benchmarks.ladder.ncu import RANGE, explain, tables  # noqa: E402
from benchmarks.ladder.problem import Ladder  # noqa: E402
from benchmarks.ladder.steps import NORMS, build, bytes_moved, norm_of  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.output import write_json  # noqa: E402


def body(args: argparse.Namespace) -> int:
    for option, value in (("--rows", args.rows), ("--columns", args.columns), ("--rounds", args.rounds)):
        if value < 1:
            raise CutefuseError(f"{option} is {value}; give 1 or more")
    try:
        import torch
    except ImportError:
        raise CutefuseError("the ladder needs PyTorch; install it with `pip install torch`") from None
    if not torch.cuda.is_available():
        raise CutefuseError("the ladder needs a CUDA device; run it on a machine with a GPU")
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    major, minor = torch.cuda.get_device_capability()
    library = args.library or build(ROOT / "build" / "ladder", 10 * major + minor)
    ladder = Ladder(torch, library, args.rows, args.columns, compiled=not (args.once or args.no_compile))
    if args.once:
        _once(torch, ladder)
        return 0
    errors = {name: ladder.error(name) for name in ladder.launches}
    able = {name: launch for name, launch in ladder.launches.items() if errors[name] is not None}
    times = bench.measure(torch, able, ladder.sets, args.rounds)
    bandwidth = bench.copy_bandwidth(torch)
    moved = {name: bytes_moved(name, args.rows, args.columns) for name in ladder.launches}
    sizes = f"{min(moved.values()) / 1e6:.1f} MB, backward {max(moved.values()) / 1e6:.1f} MB"
    where = f"{torch.cuda.get_device_name(0)}, copy {bandwidth / 1e12:.2f} TB/s"
    print(f"{args.rows} x {args.columns} float32, {sizes}, {where}")
    print(f"{'step':<52}{'us':>10}{'ratio':>8}{'GB/s':>8}{'of copy':>9}{'max error':>11}")
    firsts = {norm: next((times[n] for n in times if norm_of(n) == norm), 0.0) for norm in NORMS}
    for name in sorted(ladder.launches, key=lambda name: NORMS.index(norm_of(name))):
        if name not in times:
            print(f"{name:<52}{'cannot take this shape':>46}")
            continue
        rate = moved[name] / times[name] * 1e6
        figures = f"{times[name]:>10.2f}{times[name] / firsts[norm_of(name)]:>7.3f}×{rate / 1e9:>8.0f}"
        print(f"{name:<52}{figures}{rate / bandwidth:>9.1%}{errors[name]:>11.1e}")
    metrics = explain(args.rows, args.columns, args.csv) if args.ncu else {}
    if metrics:
        print(f"\n{tables(metrics, args.pair)}")
    if args.out:
        facts = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "copy_bytes_per_s": bandwidth}
        record = {"facts": facts, "rows": args.rows, "columns": args.columns, "time_us": times, "errors": errors}
        kernels = {name: [vars(k) for k in found] for name, found in metrics.items()}
        write_json(args.out, {**record, "ncu": kernels})
    return 0


def _once(torch: Any, ladder: Ladder) -> None:
    """Every step and every kernel of ours once, each in an NVTX range of its own: what runs under Nsight Compute."""
    for name, launch in ladder.launches.items():
        if "torch" not in name:
            torch.cuda.nvtx.range_push(f"{RANGE}{name}")
            with contextlib.suppress(CutefuseError):  # a step that cannot take this shape
                launch(0)
            torch.cuda.nvtx.range_pop()
    torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="the tutorial's batch of 4 x 1024 tokens")
    parser.add_argument("--columns", type=int, default=512, help="the tutorial's hidden size")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--ncu", action="store_true", help="add Nsight Compute's metrics")
    parser.add_argument(
        "--pair", nargs=2, metavar="STEP", help="only these two steps of RMSNorm in --ncu's table, such as '4 warps' v3"
    )
    parser.add_argument("--csv", type=Path, default=Path("ladder.ncu.csv"), help="where --ncu keeps what ncu wrote")
    parser.add_argument("--library", type=Path, help="steps.cu, already compiled")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    return run_command(lambda: body(args))


if __name__ == "__main__":
    sys.exit(main())
