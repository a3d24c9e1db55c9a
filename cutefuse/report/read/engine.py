"""One engine as plain data: its layers with their times, and what its files say of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cutefuse.engines.kinds import KINDS
from cutefuse.engines.layers import Layer
from cutefuse.engines.tensors import Tensor
from cutefuse.match.site import FUSED

ENOUGH_LATENCIES = 20  # for a percentile
_INLINED = "_inlfunc_Cute"  # in the names of the tensors of a function body that ONNX Runtime has inlined


def format_of(tensor: Tensor | None) -> str:
    """Type and layout of a tensor: "FP16 HWC8"; "" without one."""
    return f"{tensor.dtype} {tensor.layout}".strip() if tensor else ""


@dataclass
class Engine:
    """Everything that is known about one engine."""

    name: str
    folder: Path
    layers: list[Layer]
    inputs: list[str]
    outputs: list[str]
    files: dict[str, Path]
    performance: dict[str, Any] = field(default_factory=dict)
    percentiles: list[float] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)
    inference: dict[str, Any] = field(default_factory=dict)
    latencies_ms: list[float] = field(default_factory=list)
    concats: list[dict[str, str]] = field(default_factory=list)
    patch: dict[str, Any] | None = None
    peaks: dict[str, Any] | None = None
    backend: str = "tensorrt"
    version: str = ""
    size_bytes: int | None = None
    time_field: str = "averageMs"  # of the profile, from which the layers' times are
    notes: list[str] = field(default_factory=list)

    @cached_property
    def total_us(self) -> float:
        """Sum of the layers' times. Larger than the latency: profiling adds an event per layer."""
        return sum(layer.time_us or 0.0 for layer in self.layers)

    @property
    def on_cpu(self) -> bool:
        """Whether an embedded engine ran on the CPU, where fused nodes run their function bodies."""
        return self.backend == "onnxruntime" or str(self.device.get("Selected Device", "")).startswith("CPU")

    @cached_property
    def by_kind_us(self) -> dict[str, float]:
        """Time of the layers of each kind that took any, in the order of legends."""
        sums = {kind: sum(la.time_us or 0.0 for la in self.layers if la.kind == kind) for kind in KINDS}
        return {kind: us for kind, us in sums.items() if us}

    @property
    def sites(self) -> list[dict[str, Any]]:
        """The sites of the patch report, each with all fields of _SITE."""
        return self.patch["sites"] if self.patch else []

    @cached_property
    def fused_nodes(self) -> dict[str, str]:
        """Name -> op_type of the nodes that the patch report calls fused."""
        return {s["name"]: s["op_type"] for s in self.sites if s["status"] == FUSED and s["name"]}

    def in_body(self, layer: Layer) -> bool:
        """Whether a layer computes a part of a fused node's function body, as engines on the CPU do."""
        named = any(_INLINED in t.name for t in (*layer.inputs, *layer.outputs))
        return self.on_cpu and (named or not self.fused_nodes.keys().isdisjoint(layer.onnx))

    @property
    def runs_bodies(self) -> bool:
        """Whether fused nodes run their function bodies, so that their times say nothing about the kernels."""
        return any(map(self.in_body, self.layers))

    @property
    def profiled(self) -> bool:
        return any(layer.time_us is not None for layer in self.layers)

    @property
    def latency_ms(self) -> float | None:
        """Median latency of one inference: timing file first, then the log's summary."""
        if self.latencies_ms:
            return sorted(self.latencies_ms)[len(self.latencies_ms) // 2]
        values = self.performance.get("Latency") or self.performance.get("GPU Compute Time")
        return values[3] if isinstance(values, list) and len(values) > 3 else None

    def percentile_ms(self, percent: float) -> float | None:
        """A percentile of the latencies in the timing file; None where it holds too few of them."""
        last = len(self.latencies_ms) - 1
        return sorted(self.latencies_ms)[int(percent / 100 * last)] if last + 1 >= ENOUGH_LATENCIES else None
