"""int8 ConcatConv beside the float16 one on the same path (sm_80 tiles), every tile, in one run.

    python benchmarks/quant_concat_conv.py --json rows.json

`one` is the fastest int8 tile when all sources share a scale, `own` when each has its own; output float16.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PEAK_FLOPS, PEAK_BYTES = 790e12, 4.3e12  # float16, as in benchmarks/concat_conv.py


def variants(problem: Any, sets: int) -> dict[str, Any]:
    """'f16:<tile>' and 's8:<tile>' -> launch of one operand set."""
    import problems
    import quant_problems
    import torch

    from cutefuse import kernels

    launches: dict[str, Any] = {}
    for kind in ("f16", "s8"):
        group: list[Any] = []
        for i in range(sets):
            if kind == "f16":
                group.append(problems.instantiate(problem, "float16", i))
                group[-1].x = []
            else:
                group.append(quant_problems.instantiate(problem, one_scale=True, seed=i))
                group[-1].exact = None  # float64 copies that only checks need
        names = {c["id"]: c["name"] for c in kernels.operator_of(group[0].call.op_type)["configs"]}
        for tile in kernels.configs(group[0].call):
            if not names[tile].startswith(("sm80", "s8")):
                continue
            bound = [kernels.Launcher(replace(instance.call, config=tile)) for instance in group]

            def launch(n: int, bound: list[Any] = bound, _keep: list[Any] = group) -> None:
                bound[n](torch.cuda.current_stream().cuda_stream)

            launches[f"{kind}:{names[tile]}"] = launch
    return launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", metavar="NAME", help="names of conv_shapes.json; default: all")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds; default 8")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    import problems
    import torch

    from benchmarks.lib import timing

    print(timing.device_row())
    rows = []
    for problem in problems.benchmark_shapes():
        if args.shapes and problem.name not in args.shapes:
            continue
        sets = timing.rotation_sets(problem.bytes_moved(1), timing.l2_bytes())
        found = timing.interleaved(variants(problem, min(sets, 12)), min(sets, 12), args.rounds)
        times = {k: v.median_us for k, v in found.items() if not isinstance(v, str)}
        for name, failure in found.items():
            if isinstance(failure, str):
                print(problem.name, name, failure[:200])
        best = {
            "f16": min((t, k) for k, t in times.items() if k.startswith("f16")),
            "one": min((t, k) for k, t in times.items() if k.startswith("s8")),
            "own": min((t, k) for k, t in times.items() if k.startswith("s8:s8_drain")),
        }
        compute = problem.flops / PEAK_FLOPS > problem.bytes_moved(2) / PEAK_BYTES
        rows.append({"shape": problem.name, "compute_bound": compute, "best": best, "times": times})
        ratios = " ".join(f"{best[k][0] / best['f16'][0]:.2f}" for k in ("one", "own"))
        print(f"{problem.name:24} {'C' if compute else 'M'} f16 {best['f16'][0]:7.1f} {best['f16'][1][4:]:22}"
              f" one {best['one'][0]:7.1f} {best['one'][1][3:]:18} own {best['own'][0]:7.1f} {best['own'][1][3:]:18}"
              f" ratios {ratios}", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    for kind in ("one", "own"):
        logs = [math.log(r["best"][kind][0] / r["best"]["f16"][0]) for r in rows if r["compute_bound"]]
        if logs:
            print(f"geometric mean of {kind} / f16 over {len(logs)} compute-bound shapes: "
                  f"{math.exp(sum(logs) / len(logs)):.3f}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"device": timing.device_row() | timing.clocks(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
