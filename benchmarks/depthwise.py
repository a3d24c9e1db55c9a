#!/usr/bin/env python3
"""Times depthwise convolutions with their activation against a copy of as many bytes, PyTorch's convolution alone, and
convolution and activation under torch.compile: operands in the L2 cache, or with --cold in none.

python benchmarks/depthwise.py [--cold] [--no-compile]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.lib import timing  # noqa: E402
from cutefuse.errors import run_command  # noqa: E402

WARM_SETS = 2  # of operands


def variants(problem: Any, sets: int, compiled: bool) -> dict[str, Callable[[int], Any]]:
    """What is timed, each a function of the set of operands."""
    import problems
    import torch
    import torch.nn.functional as F

    from benchmarks.lib import peers

    p, work = problem, peers.Workload.of(problem, "float16", sets)
    elements = p.bytes_moved(2) // 4  # read, and written again
    tensors = [[torch.randn(elements, device="cuda").half() for _ in range(2)] for _ in range(sets)]

    def convolved(x: Any, bias: Any) -> Any:
        return F.conv2d(x, work.w, bias, p.strides, p.pads[:2], p.dilations, groups=p.K)

    def whole(x: Any) -> Any:
        return problems.activate(convolved(x, work.b), p.activation)

    fast = torch.compile(whole, dynamic=False)
    found: dict[str, Callable[[int], Any]] = {
        "ours": peers.ours(work), "copy": lambda i: tensors[i][0].copy_(tensors[i][1]),
        "conv": lambda i: convolved(work.x[i][0], None),
    }  # fmt: skip
    return found | ({"compile": lambda i: fast(work.x[i][0])} if compiled else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cold", action="store_true", help="operands in no cache")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes its time")
    args = parser.parse_args()
    timing.require_gpu()
    import problems
    import torch

    torch.backends.cudnn.benchmark = True
    print(timing.device_row()["gpu"], "float16,", "cold, us" if args.cold else "warm, us")
    for p in problems.benchmark_shapes("depthwise"):
        moved = p.bytes_moved(2)
        sets = timing.rotation_sets(moved, timing.l2_bytes()) if args.cold else WARM_SETS
        times = timing.interleaved(variants(p, sets, not args.no_compile), sets, 7)
        us = {n: t.median_us if isinstance(t, timing.Timing) else float("nan") for n, t in times.items()}
        print(f"{p.name:<22} {moved / 1e6:6.1f} MB ", " ".join(f"{n} {t:.2f}" for n, t in us.items()),
              f" of a copy's bytes a second {us['copy'] / us['ours']:.0%}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
