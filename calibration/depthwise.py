"""How long depthwise tiles take for every way to cut a layer: constants of cutlass_kernels/conv/depthwise.cpp.

data/depthwise_h200.csv holds microseconds of the layers in benchmarks/depthwise_shapes.json, operands in the L2 cache,
each cut into blocks of 4 << shift channels, `height` rows and `width` columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from calibration import fit, rows
from cutefuse.operators.conv_math import Geometry
from cutefuse.select import times

NOW = {
    "kStartUs": 0.204, "kBlockUs": 1.274, "kCopyNsOfByte": 0.072, "kAloneNs": 1.152, "kBytesOfUs": 41.7,
    "kHalfLines": 0.687, "kSharedNs": 0.179, "kTurnUs": 0.274, "epilogue": 217.0, "exponentials": 128.0,
}  # fmt: skip
SLOW = 1.6  # times the best cut's time; nobody chooses a slower one
COLUMNS, THREADS, RESIDENT, SM_COUNT = 8, 128, 4, 132  # as the kernel has them, and an H200


def report() -> Iterator[str]:
    """The lines of the report: errors now and refitted, and how much slower than the best the chosen cuts are."""
    names, cuts, recorded = _recorded()
    best = {name: recorded[names == name].min() for name in set(names)}
    near = recorded < SLOW * np.array([best[name] for name in names])
    names, cuts, recorded = names[near], {k: v[near] for k, v in cuts.items()}, recorded[near]
    yield f"depthwise tiles, {len(best)} layers"

    def predict(constants: Mapping[str, float], chosen: np.ndarray) -> np.ndarray:
        return times_us({k: v[chosen] for k, v in cuts.items()}, constants)

    yield from fit.outcome(predict, recorded, NOW, hold=0.02)
    predicted = times_us(cuts, NOW)
    slower = [
        recorded[names == name][predicted[names == name].argmin()] / us
        for name, us in sorted(best.items())
    ]  # fmt: skip
    yield f"  the cut with the least predicted time takes {np.exp(np.log(slower).mean()):.3f} of the best's in the mean"
    yield from _of_cudnn()


def _of_cudnn() -> Iterator[str]:
    """How far `times.Device.depthwise_us` is from cuDNN's kernels: the median of three runs each, those of deeplabv3p
    inside of the network."""
    device, layers = times.device_of(rows.SM, times.FITTED_GPU), _layers()
    recorded = rows.read("depthwise_cudnn_h200.csv")
    for dilated in (False, True):
        kept = [row for row in recorded if ("dilations" in layers[row["shape"]]) == dilated]
        predicted = [device.depthwise_us(*_result(layers[row["shape"]])) for row in kept]
        off = fit.errors(np.array(predicted), np.array([float(row["time_us"]) for row in kept]))
        yield f"cuDNN's depthwise kernels, {len(kept)} {'dilated ' if dilated else ''}layers: {fit.told(off)}"


def times_us(cuts: Mapping[str, np.ndarray], constants: Mapping[str, float]) -> np.ndarray:
    """As length_us of depthwise.cpp, of layers whose filter rows are unrolled."""
    c = constants
    instructions = cuts["unrolled"] + c["epilogue"] + cuts["exponential"] * c["exponentials"]
    resident = np.clip((228 << 10) // (cuts["bytes"] + 3072), 1, RESIDENT)
    waves = np.ceil(cuts["blocks"] / (SM_COUNT * resident))
    on_sm = np.maximum(np.minimum(resident, cuts["blocks"]), np.ceil(cuts["blocks"] / SM_COUNT))
    kilobytes, rounds, warps = cuts["copied"] * 1e-3, np.ceil(cuts["items"] / THREADS), np.ceil(cuts["items"] / 32)
    alone = c["kBlockUs"] + kilobytes * c["kCopyNsOfByte"] + rounds * instructions * c["kAloneNs"] * 1e-3
    copy = kilobytes / c["kBytesOfUs"] / np.where(cuts["channels"] < 32, c["kHalfLines"], 1.0)
    turn = warps * instructions * c["kSharedNs"] * 1e-3 + copy + c["kTurnUs"]
    return np.asarray(c["kStartUs"] + np.maximum(waves * alone, on_sm * turn))


def _recorded() -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """The layer of each row, what a cut makes of it by name, and its microseconds."""
    layers = _layers()
    kept = [row for row in rows.read("depthwise_h200.csv") if "dilations" not in layers[row["shape"]]]
    found = [_cut(layers[row["shape"]], *(int(row[k]) for k in ("shift", "height", "width"))) for row in kept]
    cuts = {name: np.array([cut[name] for cut in found]) for name in found[0]}
    return np.array([row["shape"] for row in kept]), cuts, np.array([float(row["time_us"]) for row in kept])


def _layers() -> dict[str, dict[str, Any]]:
    shapes = json.loads((rows.ROOT / "benchmarks/depthwise_shapes.json").read_text())["shapes"]
    return {shape["name"]: shape for shape in shapes}


def _result(layer: Mapping[str, Any]) -> tuple[int, int, float]:
    """Bytes of a layer's result, taps of its filter, and of a dilated one those inside of the image."""
    kernel, size = (layer["R"], layer["S"]), (layer["H"], layer["W"])
    geometry = Geometry(kernel, tuple(layer["stride"]), tuple(layer["pads"]), tuple(layer.get("dilations", (1, 1))))
    P, Q = (geometry.output_size(axis, extent) for axis, extent in enumerate(size))
    return layer["N"] * P * Q * layer["K"] * 2, layer["R"] * layer["S"], geometry.dilated_taps(size)


def _cut(layer: Mapping[str, Any], shift: int, height: int, width: int) -> dict[str, float]:
    """A square layer, cut: the blocks, and of each the bytes that it holds and copies, its items of threads and its
    instructions."""
    N, H, K, R, stride, pad = (int(np.ravel(layer[k])[0]) for k in ("N", "H", "K", "R", "stride", "pads"))
    P = (H + 2 * pad - R) // stride + 1
    height, width = min(height, P), min(width, -(-P // COLUMNS) * COLUMNS)
    rows_under, span = (height - 1) * stride + R, ((width - 1) * stride + R) | 1
    pixels = (COLUMNS - 1) * stride + R
    return {
        "channels": 4 << shift, "blocks": N * -(-P // height) * -(-P // width) * -(-K // (4 << shift)),
        "bytes": rows_under * span * (8 << shift), "copied": min(rows_under, H) * min(span, H) * (8 << shift),
        "items": height * (width // COLUMNS) << shift,
        "unrolled": R * (R * (4 * COLUMNS + 5) + 5 * pixels + 15), "exponential": layer["activation"] == "silu",
    }  # fmt: skip
