"""Side by side in one run: the fused ConcatConv against what a user would run without it.

    python benchmarks/concat_conv.py --json rows.json --plot rows.svg
    python benchmarks/concat_conv.py --shapes unet_up4_b1 pan_p5_b1 --variants ours,cudnn_precat --tiles all
    python benchmarks/concat_conv.py --variants ours,ours_sm80,cutlass2,cat_cutlass2 --tiles all
    python benchmarks/concat_conv.py --set latency --variants ours,cudnn_precat,cublaslt --tiles all --warm
    python benchmarks/concat_conv.py --warm --variants ours,cudnn_bare,cudnn_fused   # needs nvidia-cudnn-frontend
    python benchmarks/concat_conv.py --from rows.json --markdown

Every variant of a shape is timed in the same interleaved rounds of CUDA-graph replays over inputs that do not fit into
the L2 cache, and again over inputs that stay in it, as inside a network. JSON: one row per (shape, variant, tile,
cache). `ours_sm80` is the Ampere path (cp.async, mma.sync) on whatever device this is. `--from` draws and tabulates a
file of rows without a GPU. A peer that cannot be built on this machine is named in one line and left out.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.lib import markdown, plots, table  # noqa: E402
from benchmarks.lib import rows as table_rows  # noqa: E402
from benchmarks.lib.targets import PEAK_BYTES, PEAK_FLOPS  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402

SETS = ("conv", "latency", "single_source", "few_filters", "odd_filters", "few_channels")
WARM_SETS = 2  # of operands: a network's tensors are in the L2 cache, but the same launch does not find its own output
OURS = {"ours": "", "ours_sm80": "sm80"}  # variant -> what the names of its tiles begin with
CUDNN_S = 120.0  # for compiling plans of cuDNN's graph API, at most
DEFAULT_VARIANTS = "ours,ours_sm80,eager,cat_cudnn,compile,cudnn_precat,cublaslt,cutlass2,cat_cutlass2,cutlass3"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--set", default="conv", choices=SETS, help="file <set>_shapes.json that the shapes come from; default conv"
    )
    parser.add_argument("--shapes", nargs="*", metavar="NAME", help="names of shapes of the set; default: all")
    parser.add_argument("--variants", default=DEFAULT_VARIANTS, help=f"comma list; default {DEFAULT_VARIANTS}")
    parser.add_argument(
        "--tiles",
        default="guess",
        help="of our variants: 'guess', 'all', 'sm80' (all of ours_sm80, the guess of ours), or a comma list of ids",
    )
    caches = parser.add_mutually_exclusive_group()
    caches.add_argument("--cold", action="store_true", help="only with operands that are not in the L2 cache")
    caches.add_argument("--warm", action="store_true", help="only with operands that stay in the L2 cache")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds; default 10")
    parser.add_argument("--autotune-s", type=float, default=60, help="seconds that compile_max may tune in all; 60")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time for CUTLASS and cuDNN"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, help="draw ratios and a roofline, as .svg or .html")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/measured.md instead of text")
    parser.add_argument("--from", dest="source", type=Path, help="read rows from a JSON file instead of measuring")
    args = parser.parse_args(argv)
    args.variants = args.variants.split(",")
    if args.tiles == "sm80" and "ours_sm80" not in args.variants:
        args.variants.insert(1, "ours_sm80")
    return args


def tile_ids(ids: list[int], names: dict[int, str], variant: str, choice: str) -> list[int]:
    """Tiles of one of our variants to time, of the legal ones (`ids`, first guess first)."""
    ids = [i for i in ids if names[i].startswith(OURS[variant])]
    if choice == "guess" or (choice == "sm80" and variant == "ours"):
        return ids[:1]
    if choice in ("all", "sm80"):
        return ids
    try:
        wanted = {int(i) for i in choice.split(",")}
    except ValueError:
        raise CutefuseError(f"--tiles '{choice}' is none of guess, all, sm80 or a comma list of tile ids") from None
    return [i for i in ids if i in wanted]


def measure(problem: Any, args: argparse.Namespace, device: dict[str, Any], warm: bool) -> list[dict[str, Any]]:
    """Rows of one shape and state of the L2 cache: times and floor of every variant, the error of ours."""
    import torch

    from benchmarks.lib import peers, timing
    from cutefuse import kernels

    bytes_moved = problem.bytes_moved(4 if args.dtype == "float32" else 2)
    floor_us = max(problem.flops / PEAK_FLOPS, bytes_moved / PEAK_BYTES) * 1e6
    sets = WARM_SETS if warm else timing.rotation_sets(bytes_moved, timing.l2_bytes())
    work = peers.Workload.of(problem, args.dtype, sets)
    call = work.instances[0].call
    names = {c["id"]: c["name"] for c in kernels.operator_of(call.op_type)["configs"]}
    legal = kernels.configs(call)
    if not legal:
        raise CutefuseError(str(kernels.reject(call)))

    variants: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for name in args.variants:
        if name in OURS:
            for place, tile in enumerate(tile_ids(legal, names, name, args.tiles)):
                key = f"{name}:{names[tile]}"
                variants[key] = peers.ours(work, tile)
                facts[key] = {"tile": names[tile], "tile_id": tile, "guess": place == 0}
        elif name == "compile_max" and args.autotune_s <= 0:
            failures[name] = "the seconds of --autotune-s were spent"
        else:
            try:
                prepared = peers.make(name, work)
                variants[name], facts[name] = prepared.launch, prepared.facts
                args.autotune_s -= prepared.facts.get("setup_s", 0) if name == "compile_max" else 0
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    timings = timing.interleaved(variants, work.sets, args.rounds) | failures
    device |= timing.clocks()  # now, while the device is still warm

    rows = []
    for name in [*variants, *failures]:
        result = timings[name]
        row = {
            "shape": problem.name, "variant": name.split(":")[0], "dtype": args.dtype, "floor_us": floor_us,
            "gflop": problem.flops / 1e9, "mbytes": bytes_moved / 1e6, "K": problem.K, "R": problem.R, "S": problem.S,
            "warm": warm,
        }  # fmt: skip
        row |= facts.get(name, {})
        if isinstance(result, str):
            row["failure"] = result
        else:
            row |= {"time_us": result.median_us, "p20_us": result.p20_us, "p80_us": result.p80_us}
            row |= {"tflops": problem.flops / result.median_us / 1e6, "gbytes_s": bytes_moved / result.median_us / 1e3}
        rows.append(row | device)
    for variant in OURS:
        timed = [r for r in rows if r["variant"] == variant and "time_us" in r]
        if timed:
            best = min(timed, key=lambda r: r["time_us"])
            work.instances[0].run(best["tile_id"])
            best |= {"best": True, "relative_error": work.error(work.instances[0].output()[0])}
    torch.cuda.empty_cache()
    return rows


def run(argv: list[str] | None) -> int:
    args = parse(argv)
    if args.source:
        rows = table_rows.read(args.source)
    else:
        from benchmarks.lib import peers, timing

        if unknown := sorted(set(args.variants) - set(OURS) - set(peers.NAMES)):
            raise CutefuseError(f"unknown variant '{unknown[0]}'; choose from {', '.join((*OURS, *peers.NAMES))}")
        timing.require_gpu()
        import problems
        import torch

        torch.backends.cudnn.benchmark = True
        known = {p.name: p for p in problems.benchmark_shapes(args.set)}
        if unknown := sorted(set(args.shapes or []) - set(known)):
            raise CutefuseError(f"'{unknown[0]}' is not in {args.set}_shapes.json; choose from {', '.join(known)}")
        chosen = [known[name] for name in args.shapes or known]
        missing = peers.build_cutlass(args.variants, args.jobs)
        missing |= peers.build_cudnn(args.variants, chosen, args.jobs, CUDNN_S)
        for name, reason in missing.items():
            print(f"# without {name}: {reason}", file=sys.stderr)
        args.variants = [name for name in args.variants if name not in missing]
        device = timing.device_row()
        rows, started = [], time.time()
        for problem in chosen:
            for warm in [False] * (not args.warm) + [True] * (not args.cold):
                rows += measure(problem, args, device, warm)
            table_rows.write(args.json, rows)  # after each shape, so that an interrupted run keeps its figures
            print(f"# {problem.name} done after {time.time() - started:.0f} s", file=sys.stderr, flush=True)
        print(f"{device['gpu']}, torch {device['torch']}, cuDNN {device['cudnn']}, {args.dtype}")
    print(markdown.text(rows) if args.markdown else table.text(rows))
    if args.plot:
        plots.write(rows, args.plot)
    failed = any(
        not math.isfinite(r["relative_error"]) or r["relative_error"] > table.LARGEST_ERROR
        for r in rows
        if "relative_error" in r
    )
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
