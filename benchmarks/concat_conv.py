"""Side by side in one run: the fused ConcatConv against what a user would run without it.

    python benchmarks/concat_conv.py --json rows.json --plot rows.html
    python benchmarks/concat_conv.py --shapes unet_up4_b1 pan_p5_b1 --variants ours,cudnn_precat --tiles all

Every variant of a shape is timed in the same interleaved rounds of CUDA-graph replays over inputs that do not fit into
the L2 cache. JSON: one row per (shape, variant). `--plot` draws a file of rows without a GPU when `--from` names it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.lib import table  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402

DEFAULT_VARIANTS = "ours,eager,cat_cudnn,compile,cudnn_precat"
PEAK_FLOPS, PEAK_BYTES = 790e12, 4.3e12  # measured on an H200: 8192^3 bf16 product, device-to-device copy


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", metavar="NAME", help="names of conv_shapes.json; default: all")
    parser.add_argument("--variants", default=DEFAULT_VARIANTS, help=f"comma list; default {DEFAULT_VARIANTS}")
    parser.add_argument("--tiles", default="guess", help="'guess', 'all' or a comma list of tile ids for `ours`")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds; default 10")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, help="write an HTML page with ratios and a roofline")
    parser.add_argument("--from", dest="source", type=Path, help="read rows from a JSON file instead of measuring")
    return parser.parse_args(argv)


def tile_ids(call: Any, choice: str) -> list[int]:
    """Tiles to time, first guess first."""
    from cutefuse import kernels

    ids = kernels.configs(call)
    if not ids:
        raise CutefuseError(str(kernels.reject(call)))
    if choice == "guess":
        return ids[:1]
    if choice == "all":
        return ids
    wanted = {int(i) for i in choice.split(",")}
    return [i for i in ids if i in wanted]


def measure(problem: Any, args: argparse.Namespace, device: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one shape: every variant with its times, floor and, for ours, the error against float64."""
    import torch

    from benchmarks.lib import peers, timing
    from cutefuse import kernels

    bytes_moved = problem.bytes_moved(4 if args.dtype == "float32" else 2)
    floor_us = max(problem.flops / PEAK_FLOPS, bytes_moved / PEAK_BYTES) * 1e6
    work = peers.Workload.of(problem, args.dtype, timing.rotation_sets(bytes_moved, timing.l2_bytes()))
    names = {c["id"]: c["name"] for op in kernels.describe()["ops"] for c in op["configs"]}

    variants: dict[str, Any] = {}
    tiles: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name in args.variants.split(","):
        if name == "ours":
            for tile in tile_ids(work.instances[0].call, args.tiles):
                key = f"ours:{names[tile]}"
                tiles[key], variants[key] = tile, peers.ours(work, tile)
        elif name in peers.PEERS:
            try:
                variants[name] = peers.make(name, work)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            raise CutefuseError(f"unknown variant '{name}'; choose from ours, {', '.join(peers.PEERS)}")
    timings = timing.interleaved(variants, work.sets, args.rounds) | failures
    device |= timing.clocks()  # now, while the device is still warm

    rows = []
    for name, result in timings.items():
        row = {
            "shape": problem.name, "variant": name.split(":")[0], "dtype": args.dtype, "floor_us": floor_us,
            "gflop": problem.flops / 1e9, "mbytes": bytes_moved / 1e6, "K": problem.K, "R": problem.R, "S": problem.S,
        }  # fmt: skip
        if name in tiles:
            row |= {"tile": name.split(":")[1], "tile_id": tiles[name], "guess": name == next(iter(tiles))}
        if isinstance(result, str):
            row["failure"] = result
        else:
            row |= {"time_us": result.median_us, "p20_us": result.p20_us, "p80_us": result.p80_us}
            row |= {"tflops": problem.flops / result.median_us / 1e6, "gbytes_s": bytes_moved / result.median_us / 1e3}
        rows.append(row | device)
    best = min((r for r in rows if r["variant"] == "ours" and "time_us" in r), key=lambda r: r["time_us"], default=None)
    if best is not None:
        work.instances[0].run(best["tile_id"])
        best["best"] = True
        best["relative_error"] = error_of(work.instances[0])
    torch.cuda.empty_cache()
    return rows


def error_of(instance: Any) -> float:
    """|y - truth| / |truth| against the float32 convolution of the same operands (TF32 off)."""
    import problems
    import torch

    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    truth = problems.activate(problems.convolve(instance, torch.float32), instance.problem.activation)
    torch.backends.cudnn.allow_tf32 = allowed
    difference = instance.output()[0].float() - truth
    return float(difference.norm() / truth.norm())


def run(argv: list[str] | None) -> int:
    args = parse(argv)
    if args.source:
        rows = json.loads(args.source.read_text())
    else:
        import problems
        import torch

        from benchmarks.lib import timing

        if not torch.cuda.is_available():
            raise CutefuseError("no CUDA device was found; measure on a GPU, or draw old rows with --from rows.json")
        torch.backends.cudnn.benchmark = True
        known = {p.name: p for p in problems.benchmark_shapes()}
        if unknown := sorted(set(args.shapes or []) - set(known)):
            raise CutefuseError(f"shape '{unknown[0]}' is not in conv_shapes.json; choose from {', '.join(known)}")
        device = timing.device_row()
        rows, started = [], time.time()
        for name in args.shapes or known:
            rows += measure(known[name], args, device)
            write(args.json, rows)  # after each shape: a run that is cut off leaves what it measured
            print(f"# {name} done after {time.time() - started:.0f} s", file=sys.stderr, flush=True)
        print(f"{device['gpu']}, torch {device['torch']}, cuDNN {device['cudnn']}, {args.dtype}")
    print(table.text(rows))
    if args.plot:
        from benchmarks.lib import plots

        plots.write(rows, args.plot)
    failed = any(
        not math.isfinite(r["relative_error"]) or r["relative_error"] > 1e-2 for r in rows if "relative_error" in r
    )
    return 1 if failed else 0


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is None:
        return
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(json.dumps(rows, indent=1))
    os.replace(partial, path)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
