"""Kernels that NVIDIA's profilers recorded, sorted to the layers of an engine, their ONNX nodes and the roofline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cutefuse.engines.layers import Layer
from cutefuse.profilers.kernels.engines import Target
from cutefuse.profilers.kernels.metrics import READ, TIME, WRITTEN, Kernel, Metric
from cutefuse.profilers.kernels.ncu import Launch, kernels_of
from cutefuse.profilers.kernels.nsys import KernelSum
from cutefuse.report.read.cost import Cost, layer_cost, place
from cutefuse.report.read.reader import Engine
from cutefuse.roofline.peaks import Peaks
from cutefuse.table import scaled, show


@dataclass
class Measured:
    """One layer with its kernels of one inference: by Nsight Compute (caches flushed, kernels alone), by Nsight Systems
    (as they run), either empty where that profiler did not run."""

    layer: Layer
    ncu: list[Kernel] = field(default_factory=list)
    nsys: list[KernelSum] = field(default_factory=list)

    @property
    def ncu_us(self) -> float | None:
        return self._sum(TIME, factor=TIME.factor)

    @property
    def nsys_us(self) -> float | None:
        return sum(k.total_us / max(k.ranges, 1) for k in self.nsys) if self.nsys else None

    @property
    def time_us(self) -> float | None:
        """The best known time inside of the engine: Nsight Systems, the engine's own profile, Nsight Compute."""
        return next((t for t in (self.nsys_us, self.layer.time_us, self.ncu_us) if t is not None), None)

    @property
    def dram_bytes(self) -> float | None:
        """Bytes that its kernels moved between memory and L2, counted by Nsight Compute."""
        return self._sum(READ, WRITTEN)

    def _sum(self, *metrics: Metric, factor: float = 1) -> float | None:
        found = [(v, k.launches) for k in self.ncu for m in metrics if (v := k.value(m)) is not None]
        return sum(v * launches for v, launches in found) * factor if found else None

    @property
    def kernel_names(self) -> list[str]:
        return list(dict.fromkeys(k.name for k in self.ncu)) or list(dict.fromkeys(k.kernel for k in self.nsys))


def sort(target: Target, launches: Sequence[Launch], sums: Sequence[KernelSum]) -> tuple[list[Measured], list[str]]:
    """Every layer that a kernel was recorded of, in the engine's order, and sentences about kernels of no layer."""
    assert target.layers is not None
    engine, notes = target.layers, []
    rows: dict[int, Measured] = {}

    def row(index: int) -> Measured:
        return rows.setdefault(index, Measured(engine.layers[index]))

    by_layer: dict[int, list[list[Launch]]] = {}
    for inference in _inferences(launches):
        owners = _owners(target, engine, inference)
        for layer in {o for o in owners if o is not None}:
            by_layer.setdefault(layer, []).append([x for x, o in zip(inference, owners, strict=True) if o == layer])
        if lost := sum(o is None for o in owners):
            notes.append(f"{lost} of {len(inference)} kernels that Nsight Compute saw belong to no layer of the engine")
    for index, runs in by_layer.items():
        row(index).ncu = kernels_of([launch for run in runs for launch in run])
        for kernel in row(index).ncu:
            kernel.launches = max(round(kernel.launches / len(runs)), 1)
    for counted in sums:
        owner = target.layer_of(counted.range)
        if owner is not None:
            row(owner).nsys.append(counted)
    if sums and not any(r.nsys for r in rows.values()):
        notes.append("no range that Nsight Systems saw has the name of a layer; was the engine built with layer names?")
    return [rows[i] for i in sorted(rows)], list(dict.fromkeys(notes))


def _inferences(launches: Sequence[Launch]) -> list[list[Launch]]:
    """The launches of each inference: a new one begins where the range of the first launch comes again."""
    found: list[list[Launch]] = []
    for launch in launches:
        first = found[-1][0] if found else launch
        again = launch.ranges == first.ranges and launch.kernel == first.kernel
        if not found or (again and found[-1][-1].ranges != first.ranges):
            found.append([])
        found[-1].append(launch)
    return found


def _owners(target: Target, engine: Engine, launches: Sequence[Launch]) -> list[int | None]:
    """For each launch the index of its layer: by the innermost range that is a layer's, or by the order of kernels."""
    if target.per_layer:
        return [
            next((i for text in reversed(launch.ranges) if (i := target.layer_of(text)) is not None), None)
            for launch in launches
        ]
    order = [(layer.index, name) for layer in engine.layers for name in kernel_names(layer)]
    names = [short(launch.kernel) for launch in launches]
    runs = len(names) // len(order) if order else 0
    if not runs or names != [short(name) for _, name in order] * runs:
        return [None] * len(launches)
    return [index for _ in range(runs) for index, _ in order]


def kernel_names(layer: Layer) -> list[str]:
    """The kernels that the layer's own profile names, in order."""
    text = str(layer.raw.get("Kernels") or layer.tactic)
    return [name for name in text.split(" + ") if name]


def short(name: str) -> str:
    """A kernel's name without return type, template and arguments, which profilers write differently."""
    plain = re.sub(r"<unnamed>::|\(anonymous namespace\)::", "", name.removeprefix("void "))
    return re.split(r"[<(]", plain, maxsplit=1)[0].strip()


def figures(row: Measured, engine: Engine, peaks: Peaks | None) -> dict[str, Any]:
    """What is known of a layer: times, bytes counted and least, arithmetic, and where it lies under the roof."""
    layer, least = row.layer, layer_cost(engine, row.layer)
    moved = row.dram_bytes
    placed = place(peaks, layer.precision, least, row.time_us) if peaks and row.time_us else None
    counted = Cost(least.flops, moved).intensity
    return {
        "layer": layer.name, "onnx": layer.onnx, "kind": layer.kind, "kernels": row.kernel_names,
        "nsys_us": row.nsys_us, "ncu_us": row.ncu_us, "engine_us": layer.time_us,
        "flops": least.flops, "least_bytes": least.size_bytes, "dram_bytes": moved,
        "intensity": least.intensity, "counted_intensity": counted,
        "bound": placed.bound if placed else None, "percent_of_roof": placed.percent_of_roof if placed else None,
        "achieved_tflops": placed.achieved_tflops if placed else None,
        "metrics": {k.name: k.values for k in row.ncu},
    }  # fmt: skip


def print_layers(rows: Sequence[dict[str, Any]], peaks: Peaks | None) -> None:
    """The table of layers with their kernels, in the order of the engine."""
    cells = []
    for r in rows:
        names = ", ".join(short(k).split("::")[-1] for k in r["kernels"])
        roof = "-" if r["percent_of_roof"] is None else f"{r['percent_of_roof']:.0f}"
        cells.append([
            r["layer"][:44], str(len(r["onnx"])), names[:40], scaled(r["nsys_us"], 1), scaled(r["ncu_us"], 1),
            scaled(r["engine_us"], 1), scaled(r["least_bytes"], 1e6), scaled(r["dram_bytes"], 1e6),
            scaled(r["intensity"], 1), r["bound"] or "-", roof,
        ])  # fmt: skip
    head = ["layer", "nodes", "kernels", "nsys us", "ncu us", "engine us", "least MB", "DRAM MB", "FLOP/B", "bound",
            "% of roof"]  # fmt: skip
    roofs = f" under the roof of {peaks.device}" if peaks else ""
    show(f"layers and their kernels{roofs}", head, cells, (1, 3, 4, 5, 6, 7, 8, 10))
