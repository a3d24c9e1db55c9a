"""torch.cat and CUTLASS 2.x as a peer of ConcatConv's forms: the instructions of the Ampere path, tf32 for float32.

CUTLASS's optimised iterator wants whole 16-byte vectors, so channels are padded with zeros while they are joined. A
residual is left out of its epilogue, which favours the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gpu
import problems
from problems import Problem

from benchmarks.lib import cutlass_peers, timing
from benchmarks.lib.table import LARGEST_ERROR
from cutefuse.errors import CutefuseError

PEERS = {"float16": "cutlass2", "float32": "cutlass2_tf32"}


def arch(sm: int) -> str:
    """What nvcc calls the architecture of a compute capability."""
    return "90a" if sm == 90 else str(sm)


def padded(problem: Problem, dtype: str) -> Problem:
    """The plain convolution over one tensor that CUTLASS computes instead: input and output channels whole vectors."""
    vector = 4 if dtype == "float32" else 8
    c, k = (-(-channels // vector) * vector for channels in (sum(problem.C), problem.K))
    return replace(problem, C=(c,), K=k, starts=(), upsample=(), tail=0, residual="", outputs=())


def launch(instances: list[problems.Instance], parts: Callable[[int], list[Any]], rounds: int) -> timing.Launch:
    """torch.cat of `parts(i)`, then the fastest of CUTLASS's tiles, each checked against float32 before it is timed."""
    import torch
    import torch.nn.functional as F

    dtype = instances[0].dtype
    peer, sm = PEERS.get(dtype, ""), gpu.device_facts()
    if not peer:
        raise CutefuseError(f"CUTLASS's tiles are built for {' and '.join(PEERS)}, not {dtype}")
    built, p = arch(sm[0]), padded(instances[0].problem, dtype)
    n, k, rows, columns = p.output
    w0, kind = instances[0].w, gpu.torch_dtype(dtype)
    missing = p.C[0] - w0.shape[1]
    w = F.pad(w0, (0, 0, 0, 0, 0, missing, 0, k - w0.shape[0])).contiguous(memory_format=torch.channels_last)
    b = F.pad(instances[0].b, (0, k - w0.shape[0])).to(kind)
    zeros = [torch.zeros(p.N, p.H, p.W, missing, dtype=kind, device="cuda").permute(0, 3, 1, 2)] if missing else []
    x = [torch.empty(p.N, p.H, p.W, p.C[0], dtype=kind, device="cuda").permute(0, 3, 1, 2) for _ in instances]
    y = [torch.empty(n, rows, columns, k, dtype=kind, device="cuda") for _ in instances]

    def join(i: int) -> None:
        torch.cat([*parts(i), *zeros], 1, out=x[i])

    join(0)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        sums = F.conv2d(x[0].float(), w.float(), b.float(), p.strides, p.pads[:2], p.dilations)
    truth = problems.activate(sums, p.activation)

    def launches(made: list[cutlass_peers.Convolution]) -> timing.Launch:
        return lambda i: made[i](torch.cuda.current_stream().cuda_stream)

    found: dict[str, timing.Launch] = {}
    for tile in cutlass_peers.TILES[peer]:
        for splits in cutlass_peers.splits(tile, p, sm[1]) if tile.library(built).exists() else ():
            try:
                made = [
                    cutlass_peers.Convolution(
                        tile, built, p, splits, (x[i].data_ptr(), w.data_ptr(), b.data_ptr(), y[i].data_ptr())
                    )
                    for i in range(len(instances))
                ]
            except CutefuseError:
                continue  # this tile does not take the problem; another may
            y[0].fill_(float("nan"))
            made[0](torch.cuda.current_stream().cuda_stream)
            if float((y[0].permute(0, 3, 1, 2) - truth).norm() / truth.norm()) <= LARGEST_ERROR:
                found[f"{tile.name}_k{splits}"] = launches(made)
    timed = timing.interleaved(found, len(instances), rounds)
    best = min(((t.median_us, name) for name, t in timed.items() if isinstance(t, timing.Timing)), default=None)
    if best is None:
        raise CutefuseError(f"{peer} has no tile that is built, takes the problem and is right")

    def run(i: int) -> None:
        join(i)
        found[best[1]](i)

    run.keep = (w, b, y)  # type: ignore[attr-defined]  # operands that the prepared launches point to
    return run
