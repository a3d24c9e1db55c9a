"""int8 or float8 ConcatConv beside the float16 one, the fastest tile of each over all paths of the GPU, in one run.

    python benchmarks/quant_concat_conv.py --json rows.json
    python benchmarks/quant_concat_conv.py --dtype float8_e4m3fn
    python benchmarks/quant_concat_conv.py --set latency --warm

`one`: all sources share a scale; `own`: each has its own; output float16. `one_q`, `own_q`: output of the 8-bit type.
Sources come in the order of their scales, and int8's nodes bound their sums, as `patch` writes them.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.concat_conv import SETS, WARM_SETS  # noqa: E402
from benchmarks.lib.targets import PEAK_BYTES, PEAK_FLOPS  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.output import write_json  # noqa: E402

COMPUTE = "compute-bound shapes"
KINDS = {"one": (True, False), "own": (False, False), "one_q": (True, True), "own_q": (False, True)}  # scale, output


def instance_of(problem: Any, kind: str, dtype: str, seed: int, as_listed: bool) -> Any:
    """Operands alone: nothing that only checks need. 8-bit sources come in the order that `patch` gives them, unless
    `as_listed`."""
    import problems
    import quant_problems

    from cutefuse.operators import quant_math

    if kind == "f16":
        instance = problems.instantiate(problem, "float16", seed)
        instance.x = []
        return instance
    one_scale, narrow = KINDS[kind]
    output = dtype if narrow else "float16"
    order = quant_math.order_of([quant_problems.own_scale(i) for i in range(len(problem.C))])
    if not one_scale and not as_listed:
        problem = replace(problem, C=tuple(problem.C[i] for i in order))
    quantised = quant_problems.instantiate(
        problem, output, one_scale=one_scale, seed=seed, dtype=dtype, trained=not as_listed,
        scale_of=() if as_listed else order,
    )  # fmt: skip
    quantised.exact = None
    return quantised


def variants(problem: Any, dtype: str, sets: int, most: int, as_listed: bool) -> dict[str, Any]:
    """'<kind>:<tile>' -> launch of one operand set; at most so many tiles of each path."""
    import torch

    from cutefuse import kernels

    launches: dict[str, Any] = {}
    for kind in ("f16", *KINDS):
        group = [instance_of(problem, kind, dtype, i, as_listed) for i in range(sets)]
        configs = {c["id"]: c for c in kernels.operator_of(group[0].call.op_type)["configs"]}
        ids = kernels.configs(group[0].call)
        paths = [[i for i in ids if (configs[i]["min_sm"] == 90) == hopper] for hopper in (True, False)]
        for tile in paths[0][:most] + paths[1][:most]:
            bound = [kernels.Launcher(replace(instance.call, config=tile)) for instance in group]

            def launch(n: int, bound: list[Any] = bound, _keep: list[Any] = group) -> None:
                bound[n](torch.cuda.current_stream().cuda_stream)

            launches[f"{kind}:{configs[tile]['name']}"] = launch
    return launches


def measure(problem: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One row: the fastest (us, '<kind>:<tile>') of each kind, and the times of all."""
    import torch

    from benchmarks.lib import timing

    sets = WARM_SETS if args.warm else min(timing.rotation_sets(problem.bytes_moved(1), timing.l2_bytes()), 12)
    found = timing.interleaved(variants(problem, args.dtype, sets, args.tiles, args.as_listed), sets, args.rounds)
    torch.cuda.empty_cache()
    times = {k: v.median_us for k, v in found.items() if not isinstance(v, str)}
    for name, failure in found.items():
        if isinstance(failure, str):
            print(problem.name, name, failure[:200])
    best = {kind: min((t, k) for k, t in times.items() if k.split(":")[0] == kind) for kind in ("f16", *KINDS)}
    compute = problem.flops / PEAK_FLOPS > problem.bytes_moved(2) / PEAK_BYTES
    return {"shape": problem.name, "compute_bound": compute, "best": best, "times": times}


def line(row: dict[str, Any]) -> str:
    """A row as text: us, its share of float16's, and the tile, for each kind."""
    least_us = row["best"]["f16"][0]
    cells = " ".join(f"{kind} {t:7.1f} {t / least_us:.2f} {k.split(':')[1]:27}" for kind, (t, k) in row["best"].items())
    return f"{row['shape']:24} {'C' if row['compute_bound'] else 'M'} {cells}"


def run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="conv", choices=SETS, help="file <set>_shapes.json; default conv")
    parser.add_argument("--shapes", nargs="*", metavar="NAME", help="names of that file; default: all")
    parser.add_argument("--warm", action="store_true", help="operands stay in the L2 cache, as inside a network")
    parser.add_argument("--dtype", default="int8", choices=["int8", "float8_e4m3fn"], help="default int8")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds; default 8")
    parser.add_argument("--tiles", type=int, default=99, help="most tiles of a path; default: all")
    parser.add_argument("--as-listed", action="store_true", help="8-bit sources as the file orders them, evenly "
                        "distributed filters, no bound of their sums")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    import problems

    from benchmarks.lib import timing

    known = {p.name: p for p in problems.benchmark_shapes(args.set)}
    if unknown := sorted(set(args.shapes or []) - set(known)):
        raise CutefuseError(f"'{unknown[0]}' is not in {args.set}_shapes.json; choose from {', '.join(known)}")
    timing.require_gpu()
    print(timing.device_row())
    rows = []
    for name, problem in known.items():
        if not args.shapes or name in args.shapes:
            rows.append(measure(problem, args))
            print(line(rows[-1]), flush=True)
    which, counted = ("shapes, warm", rows) if args.warm else (COMPUTE, [r for r in rows if r["compute_bound"]])
    for kind in KINDS:
        logs = [math.log(r["best"][kind][0] / r["best"]["f16"][0]) for r in counted]
        if logs:
            print(f"geometric mean of {kind} / f16 over {len(logs)} {which}: {math.exp(sum(logs) / len(logs)):.3f}")
    if args.json:
        write_json(args.json, {"device": timing.device_row() | timing.clocks(), "rows": rows})
    return 0


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
