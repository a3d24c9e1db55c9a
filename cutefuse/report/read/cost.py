"""Arithmetic and least memory traffic of a layer, from shapes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cutefuse import kernels
from cutefuse.engines.layers import Layer, count_of, weight_bytes
from cutefuse.engines.tensors import Tensor
from cutefuse.match.site import FUSED
from cutefuse.report.read.engine import Engine
from cutefuse.roofline.peaks import Peaks, Roof


@dataclass(frozen=True)
class Cost:
    """`flops`: multiplications and additions; `size_bytes`: every distinct tensor and weight once. None: unknown."""

    flops: float | None
    size_bytes: float | None

    @property
    def intensity(self) -> float | None:
        """FLOP per byte."""
        return self.flops / self.size_bytes if self.flops and self.size_bytes else None


@dataclass(frozen=True)
class Placement(Roof):
    """Where a layer lies under the roof."""

    achieved_tflops: float
    percent_of_roof: float


def layer_cost(engine: Engine, layer: Layer) -> Cost:
    """Cost of one layer from its shapes; a fused node without shapes has the FLOPs of the patch report."""
    size = _bytes(layer)
    try:
        flops = _flops(layer)
    except (ValueError, ZeroDivisionError, OverflowError):
        flops = None
    if flops is None and layer.kind == "plugin":
        own = (s for s in engine.sites if s["status"] == FUSED and s["name"] in (layer.name, *layer.onnx))
        site = next(own, None)
        # Unusable where the rewriter did not know a dimension: it counts unknown ones as 1.
        flops = site["flops"] if site and "-1" not in str(site.get("shapes")) else None
    return Cost(flops, size)


def place(peaks: Peaks, precision: str, cost: Cost, time_us: float) -> Placement | None:
    """Position under the roof of a layer that took `time_us`; None when its cost or the peak is unknown."""
    if not cost.size_bytes or cost.flops is None or time_us <= 0:
        return None
    roof = peaks.roof(precision, cost.flops, cost.size_bytes)
    if roof is None or not roof.floor_us:
        return None
    return Placement(**vars(roof), achieved_tflops=cost.flops / time_us / 1e6,
                     percent_of_roof=100 * roof.floor_us / time_us)  # fmt: skip


def _bytes(layer: Layer) -> float | None:
    tensors = {t.name or str(i): t for i, t in enumerate([*layer.inputs, *layer.outputs])}
    sizes = [t.size_bytes for t in tensors.values()]
    if not sizes or None in sizes:
        return None
    return sum(s for s in sizes if s is not None) + weight_bytes(layer)


def _ints(value: Any) -> list[int]:
    return [int(v) for v in value if isinstance(v, (int, float))] if isinstance(value, list) else []


def _flops(layer: Layer) -> float | None:
    first, out = layer.first
    if layer.kind in ("copy", "noop"):
        return 0.0
    if out is None or out.elements is None:
        return None
    volume, read = float(out.elements), float(first.elements or 0) if first else 0.0
    if layer.kind == "conv":
        return _conv_flops(layer, first, out)
    if layer.kind == "gemm":
        return _gemm_flops(layer, out, volume)
    if layer.kind == "plugin":
        return _plugin_flops(layer, out, volume)
    if layer.kind == "pool":
        window = _ints(layer.raw.get("WindowSize"))
        return volume * math.prod(window) if window else max(read, volume)
    if layer.kind in ("norm", "attention", "softmax"):
        return 5 * max(volume, read)
    if layer.kind == "pointwise":
        operations = layer.raw.get("NbOperations", layer.raw.get("Operations"))
        return volume * (len(operations) if isinstance(operations, list) else max(len(layer.onnx), 1))
    return None


def _conv_flops(layer: Layer, first: Tensor | None, out: Tensor) -> float | None:
    """2 * N * P * Q * K * (C / groups) * R * S; a transposed convolution counts by its input's positions."""
    kernel, groups = _ints(layer.raw.get("Kernel")), layer.raw.get("Groups", 1)
    transposed = "deconv" in f"{layer.type} {layer.raw.get('ParameterType', '')}".lower()
    grid = first if transposed else out
    if grid is None or len(grid.dims) < 3:
        return None
    positions = math.prod(grid.dims) / grid.dims[1] if grid.dims[1] else 0
    weights = count_of(layer.raw.get("Weights"))
    if not weights:
        if not kernel or first is None or len(first.dims) < 3:
            return None
        share = groups if isinstance(groups, int) and groups > 0 else 1
        weights = first.dims[1] * out.dims[1] / share * math.prod(kernel)
    return 2 * positions * weights


def _gemm_flops(layer: Layer, out: Tensor, volume: float) -> float | None:
    """2 * M * N * K. K = sqrt(|A| |B| / |O|) holds for any transposition, batched over equal leading dimensions."""
    weights = count_of(layer.raw.get("Weights"))
    if weights and out.dims and out.dims[-1]:
        columns = out.dims[1] if len(out.dims) == 4 and out.dims[2:] == (1, 1) else out.dims[-1]
        return 2 * volume * weights / columns
    sizes = [t.elements for t in layer.inputs[:2]]
    if len(sizes) < 2 or not sizes[0] or not sizes[1] or not volume:
        return None
    batch = math.prod(out.dims[:-2]) if len(out.dims) > 2 and len(layer.inputs[1].dims) > 2 else 1
    return 2 * volume * math.sqrt(sizes[0] * sizes[1] / volume / max(batch, 1))


def _plugin_flops(layer: Layer, out: Tensor, volume: float) -> float | None:
    """ConcatConv by its packed weights [K][source][ceil(C/64)][R][S][64], stored as [K][rest], depthwise as
    [R * S][K]; row norms by volume. Spread outputs have as many filters for each channel as a square has pixels.

    The sources of a view may be parts of wider tensors: for them the padded channels count.
    """
    text = f"{layer.name} {layer.raw.get('PluginType', '')} {layer.raw.get('ParameterType', '')}"
    facts = kernels.facts_in(text)
    if facts is None or facts["kind"] != "convolution":
        return 5 * volume if "Norm" in text else None
    count = facts["sources"]
    sources, rest = layer.inputs[:count], layer.inputs[count:]
    if len(out.dims) < 3 or any(len(t.dims) != len(out.dims) for t in (*sources, *layer.outputs)):
        return None
    filters = sum(t.dims[1] for t in layer.outputs) * facts["spread"] ** 2
    axis = 1 if facts["depthwise"] else 0  # of the filters
    packed = next((t.elements for t in rest if t.elements and len(t.dims) == 2 and t.dims[axis] == filters), None)
    elements = [t.elements for t in layer.outputs]
    channels = [t.dims[1] for t in sources]
    padded = sum(-(-c // 64) * 64 for c in channels)
    if not packed or not padded or None in elements:
        return None
    columns = packed / filters
    products = columns if facts["view"] or facts["depthwise"] else columns / padded * sum(channels)
    return 2.0 * sum(e for e in elements if e) * products
