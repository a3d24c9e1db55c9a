#!/usr/bin/env python3
"""Times DenseNet-121's 1x1 layers: sources normalised and passed through ReLU inside the kernel, against the same
kernel without, cuDNN's bare convolution of the finished tensor, and all of it under torch.compile; operands in L2.

python benchmarks/pre_activation.py [--batch 1 8] [--no-compile]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.lib import timing  # noqa: E402
from cutefuse import kernels  # noqa: E402
from cutefuse.errors import run_command  # noqa: E402

# (side, channels of the sources, filters); a group of seven older layers is one tensor, as the rewriter joins them
LAYERS = [
    (56, (64,), 128), (56, (64, 32, 32, 32, 32), 128), (56, (64, *(32,) * 6), 128),
    (28, (128, 32, 32, 32), 128), (28, (320, *(32,) * 6), 256),
    (14, (256, 32, 32, 32), 128), (14, (448, 224, *(32,) * 6), 128), (14, (448, 224, 224, *(32,) * 4), 512),
    (7, (512, 32, 32, 32), 128), (7, (704, 224, 32, 32), 128),
]  # fmt: skip


def launcher(problem: Any, tile: int) -> Callable[[int], None]:
    """Enqueues one tile on the current stream."""
    import problems
    import torch

    instance = problems.instantiate(problem, "float16")
    launch = kernels.Launcher(replace(instance.call, config=tile))
    found = lambda i: launch(torch.cuda.current_stream().cuda_stream)  # noqa: E731
    found.__dict__["kept"] = instance
    return found


def peers(problem: Any, compiled: bool) -> dict[str, Callable[[int], Any]]:
    """cuDNN's convolution alone, and everything under torch.compile."""
    import torch
    import torch.nn.functional as F

    def last(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)

    p, C = problem, sum(problem.C)
    xs, w, b = [last(p.N, c, p.H, p.W) for c in p.C], last(p.K, C, 1, 1), torch.randn(p.K, device="cuda").half()
    x, statistics = torch.cat(xs, 1), [torch.rand(C, device="cuda").half() + 0.5 for _ in range(4)]

    def whole(xs: list[Any]) -> Any:
        joined = torch.cat(xs, 1) if len(xs) > 1 else xs[0]
        gamma, beta, mean, var = statistics
        return F.conv2d(F.batch_norm(joined, mean, var, gamma, beta).relu(), w, b).relu()

    found: dict[str, Callable[[int], Any]] = {"cudnn": lambda i: F.conv2d(x, w)}
    if compiled:
        fast = torch.compile(whole, dynamic=False)
        found["compile"] = lambda i: fast(xs)
    return found


def best(problem: Any) -> tuple[int, dict[int, float]]:
    """(first guess, tile -> microseconds)."""
    import problems

    ids = kernels.configs(problems.instantiate(problem, "float16").call)
    times = timing.interleaved({str(i): launcher(problem, i) for i in ids}, 1, 5)
    return ids[0], {int(i): t.median_us for i, t in times.items() if isinstance(t, timing.Timing)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes its time")
    args = parser.parse_args()
    timing.require_gpu()
    import problems
    import torch

    torch.backends.cudnn.benchmark = True
    print(timing.device_row()["gpu"], "float16, warm, us; in brackets the tile; 'guess' is the first guess's time")
    for batch in args.batch:
        for side, channels, filters in LAYERS:
            plain = problems.Problem(batch, side, side, channels, filters, activation="Relu")
            formed = replace(plain, pre_activated=True)
            (guess, own), (_, bare) = best(formed), best(plain)
            tile, without = min(own, key=lambda i: own[i]), min(bare, key=lambda i: bare[i])
            same = min(set(own) & set(bare), key=lambda i: own[i])
            variants: dict[str, Any] = {"pre": launcher(formed, tile), "plain": launcher(plain, without)}
            variants |= {"same": launcher(plain, same), **peers(plain, not args.no_compile and batch == 1)}
            times = timing.interleaved(variants, 1, 15)
            us = {n: t.median_us if isinstance(t, timing.Timing) else float("nan") for n, t in times.items()}
            print(f"{batch}x{side}x{side} {'+'.join(map(str, channels))}->{filters}: pre {us['pre']:.2f} [{tile}]",
                  f"guess {own[guess]:.2f} [{guess}] plain {us['plain']:.2f} [{without}]",
                  f"same tile plain {us['same']:.2f} ratio {us['pre'] / us['plain']:.3f} cudnn {us['cudnn']:.2f}",
                  f"compile {us.get('compile', float('nan')):.2f}", flush=True)  # fmt: skip
            fastest = sorted(own, key=lambda i: own[i])[:8]
            print("   ", {i: (round(own[i], 2), round(bare.get(i, 0), 2)) for i in fastest})
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
