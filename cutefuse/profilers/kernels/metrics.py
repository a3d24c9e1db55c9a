"""The metrics of Nsight Compute that explain a kernel, in the order of its panels, and variants side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cutefuse.table import aligned, counted

_ELAPSED = "avg.pct_of_peak_sustained_elapsed"
_ACTIVE = "avg.pct_of_peak_sustained_active"


@dataclass(frozen=True)
class Metric:
    """`names`: what Nsight Compute calls it, the first that a chip or version has counts. `factor`: from its base unit.

    `adds`: whether several kernels add up (times, counts), or are averaged with their times as weights.
    """

    names: tuple[str, ...]
    title: str
    factor: float = 1
    digits: int = 1
    adds: bool = False


DURATION = "gpu__time_duration.sum"
TIME = Metric((DURATION,), "time µs", 1e-3, 2, True)
READ = Metric(("dram__bytes_read.sum",), "DRAM read MB", 1e-6, 2, True)
WRITTEN = Metric(("dram__bytes_write.sum",), "DRAM written MB", 1e-6, 2, True)

# panel of Nsight Compute -> its metrics
PANELS: dict[str, tuple[Metric, ...]] = {
    "speed of light": (
        TIME,
        Metric(("gpc__cycles_elapsed.max", "sm__cycles_elapsed.max"), "elapsed cycles", 1, 0, True),
        Metric((f"sm__throughput.{_ELAPSED}",), "compute throughput %"),
        Metric((f"gpu__compute_memory_throughput.{_ELAPSED}",), "memory throughput %"),
        Metric((f"l1tex__throughput.{_ACTIVE}",), "L1 throughput %"),
        Metric((f"lts__throughput.{_ELAPSED}",), "L2 throughput %"),
        Metric((f"gpu__dram_throughput.{_ELAPSED}", f"dram__throughput.{_ELAPSED}"), "DRAM throughput %"),
        Metric((f"sm__pipe_tensor_cycles_active.{_ACTIVE}",), "tensor pipe %"),
        Metric((f"smsp__issue_active.{_ACTIVE}",), "issue slots %"),
    ),
    "memory": (
        Metric(("dram__bytes.sum.per_second", "dram__bytes_read.sum.per_second"), "memory GB/s", 1e-9),
        Metric((f"gpu__compute_memory_access_throughput.{_ELAPSED}",), "memory busy %", 1, 2),
        Metric((f"gpu__compute_memory_request_throughput.{_ELAPSED}",), "max bandwidth %", 1, 2),
        Metric((f"sm__memory_throughput.{_ELAPSED}",), "memory pipes busy %", 1, 2),
        Metric(("l1tex__t_sector_hit_rate.pct",), "L1 hit %"),
        Metric(("lts__t_sector_hit_rate.pct",), "L2 hit %"),
        Metric(
            ("lrc__average_ilc_input_sector_success_rate.pct", "lts__average_gcomp_input_sector_success_rate.pct"),
            "L2 compression success %",
        ),
        Metric(
            ("lts__average_gcomp_output_sector_compression_achieved_rate.ratio",), "L2 compression ratio", 1, 2
        ),
        Metric(  # what Nsight Compute shows as the ratio on compute capability 9.0 and 10
            ("lrc__average_ilc_output_sector_compression_achieved_rate.pct",), "L2 compression rate %"
        ),
        READ,
        WRITTEN,
        Metric(("l1tex__data_bank_conflicts_pipe_lsu.sum",), "shared bank conflicts", 1, 0, True),
        Metric(("smsp__inst_executed_op_local.sum",), "local memory accesses", 1, 0, True),
    ),
    "occupancy": (
        Metric(("sm__maximum_warps_per_active_cycle_pct",), "theoretical occupancy %"),
        Metric(("sm__maximum_warps_avg_per_active_cycle",), "theoretical warps per SM"),
        Metric((f"sm__warps_active.{_ACTIVE}",), "achieved occupancy %"),
        Metric(("sm__warps_active.avg.per_cycle_active",), "achieved warps per SM", 1, 2),
        Metric(("launch__occupancy_limit_registers",), "blocks by registers", 1, 0),
        Metric(("launch__occupancy_limit_shared_mem",), "blocks by shared memory", 1, 0),
        Metric(("launch__occupancy_limit_warps",), "blocks by warps", 1, 0),
        Metric(("launch__occupancy_limit_blocks",), "blocks by the SM", 1, 0),
    ),
    "launch": (
        Metric(("launch__registers_per_thread",), "registers", 1, 0),
        Metric(("launch__shared_mem_per_block",), "shared memory KB", 1e-3),
        Metric(("launch__grid_size",), "blocks", 1, 0),
        Metric(("launch__block_size",), "threads per block", 1, 0),
        Metric(("launch__waves_per_multiprocessor",), "waves", 1, 2),
    ),
}  # fmt: skip
METRICS: tuple[Metric, ...] = tuple(m for panel in PANELS.values() for m in panel)
# Of the hundreds of kernels of an engine: what one or two replays of a kernel count.
BRIEF: tuple[Metric, ...] = tuple(
    m for m in METRICS if m in (TIME, READ, WRITTEN) or m.title in ("DRAM throughput %", "achieved occupancy %")
)


@dataclass
class Kernel:
    """One kernel of one variant: means over its launches, in Nsight Compute's base units (ns, bytes, %)."""

    name: str
    launches: int = 0
    values: dict[str, float] = field(default_factory=dict)

    def value(self, metric: Metric) -> float | None:
        """The first of the metric's names that was measured."""
        return next((self.values[name] for name in metric.names if name in self.values), None)


def total(kernels: Sequence[Kernel], metric: Metric) -> float | None:
    """Sum over the kernels of one run for times and counts, else the mean weighted with the time of each kernel."""
    rows = [(k, v) for k in kernels if (v := k.value(metric)) is not None]
    if not rows:
        return None
    if metric.adds:
        return sum(v * k.launches for k, v in rows) / max(min(k.launches for k, _ in rows), 1)
    weights = [k.values.get(DURATION, 1.0) * k.launches for k, _ in rows]
    whole = sum(weights)
    return sum(v * w for (_, v), w in zip(rows, weights, strict=True)) / whole if whole else None


def side_by_side(columns: Sequence[tuple[str, Sequence[Kernel]]]) -> str:
    """Metrics down, by panel, variants across; the last column is the ratio of the last variant to the first.

    columns: (label, its kernels).
    """
    heads = ["", *(label for label, _ in columns), *(["ratio"] if len(columns) > 1 else [])]
    rows = [["", *(counted(len(kernels), "kernel") for _, kernels in columns)]]
    for panel, metrics in PANELS.items():
        found = [row for metric in metrics if (row := _row(metric, columns))]
        rows += [[panel], *found] if found else []
    whole = [row + [""] * (len(heads) - len(row)) for row in rows]
    return "\n".join(aligned(heads, whole, range(1, len(heads))))


def _row(metric: Metric, columns: Sequence[tuple[str, Sequence[Kernel]]]) -> list[str]:
    """The cells of one line; none where no variant has the metric."""
    values = [total(kernels, metric) for _, kernels in columns]
    if all(v is None for v in values):
        return []
    cells = ["-" if v is None else f"{v * metric.factor:.{metric.digits}f}" for v in values]
    first, last = values[0], values[-1]
    ratio = [f"{last / first:.2f}×"] if len(values) > 1 and first and last is not None else []
    return [f"  {metric.title:<24}", *cells, *ratio]
