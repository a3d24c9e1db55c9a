#!/usr/bin/env python3
"""Times what the PyTorch engine runs by our kernels between convolutions, against torch.compile: pools, linear Resizes,
means and Concats (`CuteWindow`), and Gemms of a few rows. Where ours stops winning, onnx_ops/windows.py and heads.py
stop taking them. float16; operands in the L2 cache, or with --cold in none.

python benchmarks/windows.py [--cold] [--json rows.json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from windows import LINEAR, MAX, MEAN, Window  # noqa: E402

from benchmarks.lib import timing  # noqa: E402
from cutefuse.errors import run_command  # noqa: E402
from cutefuse.output import write_json  # noqa: E402

WARM_SETS = 2  # of operands
Case = tuple[str, Window, Callable[[Any], Any]]  # name, window, the same by PyTorch over the concatenation


def window_cases(n: int) -> Iterator[Case]:
    """Windows of networks, and those around the limits of onnx_ops/windows.py."""
    import torch.nn.functional as F

    def pool(name: str, channels: tuple[int, ...], side: int, k: int, stride: int, pad: int) -> Case:
        window = Window(MAX, channels, (n, side, side), (k, k), (stride, stride), (pad,) * 4)
        return name, window, lambda x: F.max_pool2d(x, k, stride, pad)

    def resize(name: str, c: int, h: int, w: int, by: int) -> Case:
        scale, offset = 1 / by, 0.5 / by - 0.5
        window = Window(LINEAR, (c,), (n, h, w), out=(h * by, w * by), scales=(scale,) * 2, offsets=(offset,) * 2)
        return name, window, lambda x: F.interpolate(x, scale_factor=by, mode="bilinear")

    def mean(c: int, side: int) -> Case:
        window = Window(MEAN, (c,), (n, side, side), (side, side))
        return f"mean of {side}x{side}, {c} channels", window, lambda x: x.mean((2, 3), keepdim=True)

    yield pool("stem, 3x3 by 2", (64,), 112, 3, 2, 1)
    yield pool("GoogLeNet 3b, 3x3 over a Concat", (128, 128, 32, 64), 28, 3, 1, 1)
    yield pool("SqueezeNet, 3x3 by 2 over a Concat", (64, 64), 55, 3, 2, 0)
    yield pool("SPPF, 5x5", (128,), 20, 5, 1, 2)
    yield pool("9x9", (128,), 20, 9, 1, 4)
    yield pool("U-Net, 2x2 by 2", (64,), 512, 2, 2, 0)
    yield resize("HRNet, by 2", 96, 64, 128, 2)
    yield resize("HRNet, by 8", 384, 16, 32, 8)
    yield resize("ASPP, by 4", 256, 32, 32, 4)
    for c, side in ((2048, 7), (512, 32), (64, 56)):
        yield mean(c, side)
    yield "a Concat alone", Window(MAX, (128, 128, 32, 64), (n, 28, 28)), lambda x: x


def times(ours: Callable[[list[Any]], Any], theirs: Callable[..., Any], operands: list[list[Any]]) -> dict[str, float]:
    """Microseconds of both over sets of operands; the results are near each other."""
    import torch

    torch.compiler.reset()
    compiled = torch.compile(theirs, dynamic=False)
    torch.testing.assert_close(ours(operands[0]), compiled(*operands[0]), rtol=1e-2, atol=1e-2)
    variants = {"ours": lambda i: ours(operands[i]), "compile": lambda i: compiled(*operands[i])}
    found = timing.interleaved(variants, len(operands), 7)
    return {name: t.median_us if isinstance(t, timing.Timing) else float("nan") for name, t in found.items()}


def sets_of(bytes_moved: int, cold: bool) -> int:
    return timing.rotation_sets(bytes_moved, timing.l2_bytes()) if cold else WARM_SETS


def time_window(window: Window, theirs: Callable[[Any], Any], cold: bool) -> tuple[int, dict[str, float]]:
    """Bytes moved, and the times."""
    import torch

    from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode

    n, h, w = window.size

    def image(c: int, rows: int, columns: int, device: str) -> Any:
        x = torch.randn(n, c, rows, columns, dtype=torch.float16, device=device)
        return x.contiguous(memory_format=torch.channels_last)

    given = [image(c, h, w, "meta") for c in window.channels]
    p, q = window.sizes
    made = [image(sum(window.channels), p, q, "meta")]
    node = FusedNode("window", window.call("float16").op_type, window.attrs, given, made)
    moved = 2 * sum(t.numel() for t in (*given, *made))
    operands = [[image(c, h, w, "cuda") for c in window.channels] for _ in range(sets_of(moved, cold))]
    return moved, times(lambda x: node.launch(x)[0], lambda *x: theirs(torch.cat(x, 1)), operands)


def time_head(rows: int, C: int, K: int, cold: bool) -> tuple[int, dict[str, float]]:
    """Of a Gemm of so many rows: bytes moved, and the times, ours by the first guess among the tiles."""
    import torch
    import torch.nn.functional as F

    from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
    from cutefuse.operators.conv_call import make_call
    from cutefuse.operators.conv_form import Source, form_of
    from cutefuse.operators.conv_math import Geometry

    call = make_call(form_of("CuteConcatConv1"), [Source((rows, C, 1, 1), C)], [K], Geometry((1, 1)), "float16", {})

    def empty(*dims: int, dtype: Any = torch.float16) -> Any:
        return torch.empty(*dims, dtype=dtype, device="meta")

    given = [empty(rows, C, 1, 1), empty(K, C), empty(K, dtype=torch.float32)]
    node = FusedNode("head", call.op_type, dict(call.attrs), given, [empty(rows, K, 1, 1)])
    node.workspace = torch.empty(max(node.workspace_bytes(), 1), dtype=torch.uint8, device="cuda")
    moved = 2 * (rows * C + K * C + rows * K)
    operands = []
    for _ in range(sets_of(moved, cold)):
        x, w = (torch.randn(n, C, device="cuda").half() for n in (rows, K))
        operands.append([x, w / C**0.5, torch.randn(K, device="cuda")])

    def ours(set_: list[Any]) -> Any:
        x, w, bias = set_
        return node.launch([x.view(rows, C, 1, 1), w, bias])[0].view(rows, K)

    return moved, times(ours, lambda x, w, bias: F.linear(x, w, bias.half()), operands)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="operands in no cache")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    timing.require_gpu()
    device, rows = timing.device_row(), []

    def told(name: str, images: int, found: tuple[int, dict[str, float]]) -> None:
        moved, us = found
        rows.append({"case": name, "images": images, "mbytes": moved / 1e6, "cold": args.cold, **us, **device})
        figures = f"ours {us['ours']:7.2f} us, compile {us['compile']:7.2f}, {us['ours'] / us['compile']:.2f}"
        print(f"{name:<36} {images:2d}  {moved / 1e6:6.1f} MB  {figures}", flush=True)

    print(device["gpu"], "float16,", "cold" if args.cold else "warm")
    for n in (1, 8):
        for name, window, theirs in window_cases(n):
            told(name, n, time_window(window, theirs, args.cold))
    for C, K in ((2048, 1000), (512, 1000), (4096, 1024), (4096, 2048)):
        for n in (1, 8, 16):
            told(f"{C} channels to {K} classes", n, time_head(n, C, K, args.cold))
    if args.json:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
