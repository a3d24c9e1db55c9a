"""The targets of ConcatConv on one H200, judged from the rows of one run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.lib import table
from benchmarks.lib.table import Shapes

PEAK_FLOPS, PEAK_BYTES = 790e12, 4.3e12  # measured on an H200: 8192^3 bf16 product, device-to-device copy
UNFUSED, PRECAT, CUBLASLT, _, SM80, SM80_CAT, *_MORE = table.RATIOS


@dataclass(frozen=True)
class Verdict:
    """A target, what was measured, and whether it was reached; None where the rows do not say."""

    target: str
    measured: str = "not measured"
    reached: bool | None = None


def _mean(shapes: Shapes, label: str, limit: float, cache: str = "") -> Verdict:
    target = f"{label}{cache}: geometric mean <= {limit:.2f}"
    found = table.ratios(shapes, label)
    if not found:
        return Verdict(target)
    mean = table.geometric_mean(found.values())
    return Verdict(target, f"{mean:.3f} over {len(found)} shapes", mean <= limit)


def _everywhere(shapes: Shapes, label: str, limit: float, what: str = "every shape", strict: bool = False) -> Verdict:
    target = f"{label}: {'<' if strict else '<='} {limit:.2f} on {what}"
    found = table.ratios(shapes, label)
    if not found:
        return Verdict(target)
    above = sorted((v, n) for n, v in found.items() if v > limit or (strict and v == limit))[::-1]
    words = ", ".join(f"{name} {value:.2f}" for value, name in above[:6]) + (", ..." if len(above) > 6 else "")
    return Verdict(target, f"{len(above)} of {len(found)} above: {words}" if above else f"all {len(found)}", not above)


def _rate(shapes: Shapes, name: str, tflops: float) -> Verdict:
    target = f"{name} >= {tflops:.0f} TFLOP/s"
    if "ours" not in shapes.get(name, {}):
        return Verdict(target)
    found = shapes[name]["ours"]["tflops"]
    return Verdict(target, f"{found:.1f}", found >= tflops)


def _bandwidth(shapes: Shapes) -> Verdict:
    """Of the 1x1 shapes whose floor is set by memory."""
    target = f"memory-bound 1x1 shapes >= 88 % of {PEAK_BYTES / 1e12} TB/s"
    share = {
        name: found["ours"]["gbytes_s"] * 1e9 / PEAK_BYTES
        for name, found in shapes.items()
        if "ours" in found and found["ours"]["R"] * found["ours"]["S"] == 1
        and found["ours"]["mbytes"] * 1e6 / PEAK_BYTES > found["ours"]["gflop"] * 1e9 / PEAK_FLOPS
    }  # fmt: skip
    if not share:
        return Verdict(target)
    words = ", ".join(f"{name} {value:.0%}" for name, value in sorted(share.items(), key=lambda item: -item[1]))
    return Verdict(target, words, min(share.values()) >= 0.88)


def _time(shapes: Shapes, name: str, most_us: float, words: str) -> Verdict:
    target = f"{name} <= {words}"
    if "ours" not in shapes.get(name, {}):
        return Verdict(target)
    found = shapes[name]["ours"]
    measured = f"{found['time_us']:.1f} us, {found['time_us'] / found['floor_us']:.2f} of the floor"
    return Verdict(target, measured, found["time_us"] <= most_us)


def _guess(shapes: Shapes) -> Verdict:
    target = "first guess within 10 % of the fastest tile on 80 % of the shapes"
    losses = [loss for found in shapes.values() if not math.isnan(loss := table.guess_loss(found))]
    close = sum(loss <= 1.1 for loss in losses)
    return Verdict(target, f"{close} of {len(losses)}", close >= 0.8 * len(losses)) if losses else Verdict(target)


def _warm(rows: list[dict[str, Any]]) -> list[Verdict]:
    """The targets of small maps, whose operands a network leaves in the L2 cache."""
    shapes = table.by_shape(rows)
    warm = "every shape, warm"
    return [
        _mean(shapes, PRECAT, 0.80, ", warm"),
        _everywhere(shapes, PRECAT, 1.0, warm),
        _everywhere(shapes, CUBLASLT, 1.0, warm),
        _mean(shapes, SM80, 0.95, ", warm"),
        _everywhere(shapes, SM80, 1.05, warm),
    ]


def verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    """Every target in the order of the requirements: Hopper path, Ampere path; then those with warm caches."""
    caches = table.by_cache(rows)
    warm = _warm(caches["warm"]) if "warm" in caches else []
    return (_cold(caches["cold"]) if "cold" in caches else []) + warm


def _cold(rows: list[dict[str, Any]]) -> list[Verdict]:
    shapes = table.by_shape(rows)
    narrow = {n: f for n, f in shapes.items() if all(r["R"] * r["S"] == 9 and r["K"] <= 128 for r in f.values())}
    floor_us = {n: next(iter(f.values()))["floor_us"] for n, f in shapes.items() if f}
    all_tiles = any(r["variant"] == "ours" and not r.get("guess") for r in rows)
    return [
        _mean(shapes, UNFUSED, 0.50),
        _everywhere(shapes, UNFUSED, 1.0, strict=True),
        _mean(shapes, PRECAT, 0.85),
        _everywhere(shapes, PRECAT, 1.0),
        _everywhere(narrow, PRECAT, 0.75, "3x3 shapes with K <= 128"),
        _rate(shapes, "unet_up4_b8", 720),
        _rate(shapes, "centerpoint_neck_b4", 690),
        _rate(shapes, "unet_up2_b8", 740),
        _rate(shapes, "hrnet_w48_ocr_b1", 740),
        _rate(shapes, "segformer_b5_fuse_b2", 680),
        _bandwidth(shapes),
        _time(shapes, "pan_p5_b1", 12, "12 us"),
        _time(shapes, "lss_up_6cams", 1.6 * floor_us.get("lss_up_6cams", 0), "1.6 of the floor"),
        _time(shapes, "raft_gru_1x5_b1", 1.6 * floor_us.get("raft_gru_1x5_b1", 0), "1.6 of the floor"),
        _guess(shapes if all_tiles else {}),
        _mean(shapes, SM80, 0.92),
        _everywhere(shapes, SM80, 1.0),
        _mean(shapes, SM80_CAT, 0.65),
    ]
