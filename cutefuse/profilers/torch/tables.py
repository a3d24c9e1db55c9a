"""The tables of `cutefuse profile-torch`: operators, modules, classes of modules, hot spots, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutefuse.profilers.torch.spots import HotSpot
from cutefuse.profilers.torch.sums import Row
from cutefuse.table import aligned

_NAME = 44  # characters of a name

# (title, key of the row, scale)
_Column = tuple[str, str, float]
_MIB = 1 / 2**20
_SHARE: tuple[_Column, ...] = (("%", "share", 1), ("calls", "calls", 1))
_CPU_SELF: _Column = ("self CPU us", "self_cpu_us", 1)
_CPU: tuple[_Column, ...] = (("CPU us", "cpu_us", 1), ("CPU avg", "cpu_us_avg", 1))
_DEVICE_SELF: _Column = ("self CUDA us", "self_device_us", 1)
_DEVICE: tuple[_Column, ...] = (("CUDA us", "device_us", 1), ("CUDA avg", "device_us_avg", 1))


def operator_table(rows: Sequence[Row], limit: int, device: bool) -> str:
    """Operators with their own and whole times, averages, calls, and the memory that they and what they call take."""
    columns = [_CPU_SELF, *_CPU, *((_DEVICE_SELF, *_DEVICE) if device else ()), *_SHARE]
    columns += [("CPU MiB", "cpu_bytes", _MIB), ("self", "self_cpu_bytes", _MIB)]
    columns += [("CUDA MiB", "device_bytes", _MIB), ("self", "self_device_bytes", _MIB)] if device else []
    return _table("operator", rows[:limit], columns)


def module_table(title: str, rows: Sequence[Row], limit: int, device: bool, backward: bool) -> str:
    """Modules, or classes of them, with the time of all that they contain; averages and memory are the forward's."""
    columns = [*_CPU, *([("bwd CPU us", "backward_cpu_us", 1.0)] if backward else [])]
    columns += [*_DEVICE, *([("bwd CUDA us", "backward_device_us", 1.0)] if backward else [])] if device else []
    columns += [*_SHARE, ("CPU MiB", "cpu_bytes", _MIB)]
    columns += [("CUDA MiB", "device_bytes", _MIB)] if device else []
    return _table(title, rows[:limit], columns)


def compared_table(rows: Sequence[Row], device: bool) -> str:
    where, memory = ("CUDA", "device_bytes") if device else ("CPU", "cpu_bytes")
    columns: list[_Column] = [("calls", "calls", 1), ("before us", "before_us", 1), ("after us", "after_us", 1)]
    columns += [("ratio", "ratio", 1), ("MiB before", f"before_{memory}", _MIB), ("after", f"after_{memory}", _MIB)]
    return _table(f"class, {where} time before and after", rows, columns)


def spots_text(spots: Sequence[HotSpot]) -> str:
    if not spots:
        return "no concatenation feeds a convolution and no row norm was found"
    cells = []
    for s in spots[:20]:
        times = f" ({s.count}x)" if s.count > 1 else ""
        cells.append([f"{s.removable_us:.1f}", f"{s.time_us:.1f}", f"{s.operator} at {s.where}{times}: {s.text}"])
    return "\n".join(aligned(["removable us", "measured us", "what our operators would take"], cells, (0, 1)))


def _table(title: str, rows: Sequence[Row], columns: Sequence[_Column]) -> str:
    cells = []
    for row in rows:
        name = row["name"] if len(row["name"]) <= _NAME else f"…{row['name'][1 - _NAME :]}"
        cells.append([name, *(_cell(row[key], key, scale) for _, key, scale in columns)])
    return "\n".join(aligned([title, *(head for head, *_ in columns)], cells, range(1, len(columns) + 1)))


def _cell(value: Any, key: str, scale: float) -> str:
    if value is None:
        return "-"
    digits = {"calls": 0, "ratio": 2}.get(key, 2 if scale != 1 else 1)
    return f"{value * scale:.{digits}f}"
