"""Resize, Upsample and GridSample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.node import Node, Run, operator
from cutefuse.engines.pytorch.onnx_ops.pooling import LINEAR, Windowed

_POSITIONS = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners", "half_pixel_symmetric",
              "tf_crop_and_resize")  # fmt: skip


class _Axis(NamedTuple):
    """How one axis is resized. `scale` is output over input size as the node gives it."""

    size: int
    out: int
    scale: float
    roi: tuple[float, float]

    def positions(self, kind: str) -> np.ndarray:
        """Where in the input each output element lies, as the ONNX specification defines it."""
        i = np.arange(self.out, dtype=np.float64)
        if kind == "asymmetric":
            return i / self.scale
        if kind == "align_corners":
            return i * (self.size - 1) / (self.out - 1) if self.out > 1 else np.zeros(1)
        if kind == "pytorch_half_pixel" and self.out <= 1:
            return np.zeros(self.out)
        if kind == "tf_crop_and_resize":
            start, end = self.roi
            if self.out <= 1:
                return np.full(self.out, 0.5 * (start + end) * (self.size - 1))
            return start * (self.size - 1) + i * (end - start) * (self.size - 1) / (self.out - 1)
        x = (i + 0.5) / self.scale - 0.5
        if kind == "half_pixel_symmetric":
            adjustment = self.out / (self.scale * self.size)
            x = self.size / 2 * (1 - adjustment) + x
        return x


_ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _kernel(distance: np.ndarray, mode: str, a: float) -> np.ndarray:
    d = np.abs(distance)
    if mode == "linear":
        return np.maximum(0.0, 1 - d)
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _matrix(x: np.ndarray, axis: _Axis, mode: str, a: float, antialias: bool, exclude_outside: bool) -> np.ndarray:
    """[out, in]: the weights with which each output element sums the input."""
    stretch = max(1.0, 1 / axis.scale) if antialias else 1.0
    reach = math.ceil((1 if mode == "linear" else 2) * stretch)
    taps = np.floor(x).astype(np.int64)[:, None] + np.arange(-reach + (stretch == 1), reach + 1)
    weights = _kernel((x[:, None] - taps) / stretch, mode, a)
    if exclude_outside:
        weights = np.where((taps >= 0) & (taps < axis.size), weights, 0.0)
    weights /= weights.sum(1, keepdims=True)
    matrix = np.zeros((axis.out, axis.size))
    rows = np.arange(axis.out)[:, None]
    np.add.at(matrix, (rows, np.clip(taps, 0, axis.size - 1)), weights)  # beyond the edge its last element counts
    return matrix


def _sizes(node: Node) -> list[_Axis]:
    """One entry for each axis of the input."""
    shape = node.shape(0)
    rank = len(shape)
    old = node.op_type == "Upsample" or node.opset < 11  # (x, scales), or scales as an attribute
    given = [node.axis(a, rank) for a in node.attr("axes", range(rank))]
    at = 1 if old else 2
    scales = node.floats(at) if node.has(at) else list(node.attr("scales", [])) if old else []
    sizes = node.ints(3) if not old and node.has(3) else []
    roi = node.floats(1) if not old and node.has(1) else []
    if len(scales or sizes) != len(given):
        raise node.refuse(f"{len(scales or sizes)} scales or sizes do not fit {len(given)} axes; repair the model")
    policy = node.attr("keep_aspect_ratio_policy", "stretch")
    if sizes and policy != "stretch":
        choose = min if policy == "not_larger" else max
        common = choose(s / shape[a] for s, a in zip(sizes, given, strict=True))
        sizes = [math.floor(common * shape[a] + 0.5) for a in given]
        scales = [common] * len(given)
    axes = [_Axis(d, d, 1.0, (0.0, 1.0)) for d in shape]
    for i, a in enumerate(given):
        out = sizes[i] if sizes else math.floor(shape[a] * scales[i])
        scale = scales[i] if scales else (out / shape[a] if shape[a] else 1.0)
        axes[a] = _Axis(shape[a], out, scale, (roi[i], roi[i + len(given)]) if roi else (0.0, 1.0))
    return axes


@operator("Resize", "Upsample", host=(1, 2, 3))
def resize(node: Node) -> Run:
    axes, mode = _sizes(node), node.attr("mode", "nearest")
    old = node.op_type == "Upsample" or node.opset < 11
    kind = "asymmetric" if old else node.attr("coordinate_transformation_mode", "half_pixel")
    rounding = "floor" if old else node.attr("nearest_mode", "round_prefer_floor")
    antialias, outside = bool(node.attr("antialias", 0)), bool(node.attr("exclude_outside", 0))
    if kind not in _POSITIONS or mode not in ("nearest", "linear", "cubic"):
        raise node.refuse(f"mode {mode} with {kind} is unknown; repair the model")
    changed = [a for a, axis in enumerate(axes) if axis.out != axis.size or kind == "tf_crop_and_resize"]
    if not changed:
        return lambda x: x
    plain = not (antialias or outside)
    run = _interpolate(node, axes, mode, kind, rounding) if plain else None
    run = run or _by_tables(node, axes, changed, mode, kind, rounding)
    images = len(axes) == 4 and min(changed) >= 2 and kind != "tf_crop_and_resize"
    return Windowed(run, _steps(axes[2:], kind)) if mode == "linear" and plain and images else run


def _steps(axes: list[_Axis], kind: str) -> dict[str, Any]:
    """A linear Resize as our kernels take it: its positions are even steps from the first one."""
    places = [axis.positions(kind) for axis in axes]
    scales = [float(p[-1] - p[0]) / (len(p) - 1) if len(p) > 1 else 1.0 for p in places]
    return {"mode": [LINEAR], "scales": scales, "offsets": [float(p[0]) if len(p) else 0.0 for p in places]}


def _by_tables(node: Node, axes: list[_Axis], changed: list[int], mode: str, kind: str, rounding: str) -> Run:
    """An axis at a time: by indices or, where neighbours are weighted, as a product with a matrix."""
    antialias, outside = bool(node.attr("antialias", 0)), bool(node.attr("exclude_outside", 0))
    extrapolated = node.attr("extrapolation_value", 0.0)
    seen = np.ones([1] * len(axes), dtype=bool)  # what a crop takes from inside of the image
    for a in changed:
        x, last = axes[a].positions(kind), axes[a].size - 1
        seen = seen & ((x >= 0) & (x <= last)).reshape([-1 if i == a else 1 for i in range(len(axes))])
        if mode == "nearest":
            node.constant(torch.from_numpy(np.clip(_ROUNDED[rounding](x), 0, last).astype(np.int64)))
        else:
            matrix = _matrix(x, axes[a], mode, node.attr("cubic_coeff_a", -0.75), antialias, outside)
            node.constant(torch.from_numpy(matrix).to(node.tensor(0).dtype))
    beyond = kind == "tf_crop_and_resize" and not seen.all()
    if beyond:
        node.constant(torch.from_numpy(seen))

    def run(x: Tensor, *tables: Tensor) -> Tensor:
        for a, table in zip(changed, tables, strict=False):
            if mode == "nearest":
                x = x.index_select(a, table)
            else:
                x = torch.matmul(x.movedim(a, -1), table.t()).movedim(-1, a)
        return torch.where(tables[-1], x, extrapolated) if beyond else x

    return run


def _interpolate(node: Node, axes: list[_Axis], mode: str, kind: str, rounding: str) -> Run | None:
    """PyTorch's own kernels where they mean the same: only the spatial axes change, exact ratios."""
    rank = len(axes) - 2
    if rank not in (1, 2, 3) or any(a.out != a.size for a in axes[:2]):
        return None
    spatial = axes[2:]
    size = [a.out for a in spatial]
    exact = all(a.size and math.isclose(a.scale * a.size, a.out, rel_tol=1e-6) for a in spatial)
    if mode == "nearest":
        # PyTorch takes floor(i * in / out); whole factors leave no doubt about rounding.
        same = all(a.out % max(a.size, 1) == 0 for a in spatial) and (
            (kind == "asymmetric" and rounding == "floor")
            or (kind in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round_prefer"))
        )
        tie = kind != "asymmetric" and any(a.out == 1 for a in spatial)
        return (lambda x: F.interpolate(x, size, mode="nearest")) if same and exact and not tie else None
    name = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}
    torch_mode = name.get((mode, rank))
    if torch_mode is None or not exact or (mode == "cubic" and node.attr("cubic_coeff_a", -0.75) != -0.75):
        return None
    if kind == "align_corners":
        return lambda x: F.interpolate(x, size, mode=torch_mode, align_corners=True)
    if kind in ("half_pixel", "pytorch_half_pixel") and (kind == "half_pixel" or all(s > 1 for s in size)):
        return lambda x: F.interpolate(x, size, mode=torch_mode, align_corners=False)
    return None


@operator("GridSample")
def grid_sample(node: Node) -> Run:
    given, padding = node.attr("mode", "bilinear"), node.attr("padding_mode", "zeros")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(given, given)
    corners = bool(node.attr("align_corners", 0))
    if mode not in ("bilinear", "nearest", "bicubic") or (mode == "bicubic" and node.rank(0) != 4):
        raise node.refuse(f"mode {given} of rank {node.rank(0)} is not supported; use bilinear or nearest")
    return lambda x, grid: F.grid_sample(x, grid, mode, padding, corners)
