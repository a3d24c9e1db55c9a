"""The tables of `cutefuse profile-torch`: operators, modules, classes of modules, hot spots, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutefuse.profilers.torch.spots import HotSpot
from cutefuse.profilers.torch.sums import Row

_NAME = 46  # columns of a name

# (title, key of the row, width, scale)
_Column = tuple[str, str, int, float]
_MIB = 1 / 2**20
_SHARE: tuple[_Column, ...] = (("%", "share", 7, 1), ("calls", "calls", 7, 1))
_CPU_SELF: _Column = ("self CPU us", "self_cpu_us", 13, 1)
_CPU: tuple[_Column, ...] = (("CPU us", "cpu_us", 12, 1), ("CPU avg", "cpu_us_avg", 11, 1))
_DEVICE_SELF: _Column = ("self CUDA us", "self_device_us", 13, 1)
_DEVICE: tuple[_Column, ...] = (("CUDA us", "device_us", 12, 1), ("CUDA avg", "device_us_avg", 11, 1))


def operator_table(rows: Sequence[Row], limit: int, device: bool) -> str:
    """Operators with their own and whole times, averages, calls, and the memory that they and what they call take."""
    columns = [_CPU_SELF, *_CPU, *((_DEVICE_SELF, *_DEVICE) if device else ()), *_SHARE]
    columns += [("CPU MiB", "cpu_bytes", 10, _MIB), ("self", "self_cpu_bytes", 10, _MIB)]
    columns += [("CUDA MiB", "device_bytes", 10, _MIB), ("self", "self_device_bytes", 10, _MIB)] if device else []
    return _table("operator", rows[:limit], columns)


def module_table(title: str, rows: Sequence[Row], limit: int, device: bool, backward: bool) -> str:
    """Modules, or classes of them, with the time of all that they contain; averages and memory are the forward's."""
    columns = [*_CPU, *([("bwd CPU us", "backward_cpu_us", 12, 1.0)] if backward else [])]
    columns += [*_DEVICE, *([("bwd CUDA us", "backward_device_us", 12, 1.0)] if backward else [])] if device else []
    columns += [*_SHARE, ("CPU MiB", "cpu_bytes", 10, _MIB)]
    columns += [("CUDA MiB", "device_bytes", 10, _MIB)] if device else []
    return _table(title, rows[:limit], columns)


def compared_table(rows: Sequence[Row], device: bool) -> str:
    """Classes before and after their norms were replaced, and the whole model."""
    where, memory = ("CUDA", "device_bytes") if device else ("CPU", "cpu_bytes")
    columns: list[_Column] = [
        ("calls", "calls", 7, 1),
        ("before us", "before_us", 12, 1),
        ("after us", "after_us", 12, 1),
    ]
    columns += [("ratio", "ratio", 8, 1)]
    columns += [("MiB before", f"before_{memory}", 12, _MIB), ("after", f"after_{memory}", 10, _MIB)]
    return _table(f"class, {where} time before and after", rows, columns)


def spots_text(spots: Sequence[HotSpot]) -> str:
    """The hot spots, one line each."""
    if not spots:
        return "no concatenation feeds a convolution and no row norm was found"
    lines = [f"{'removable us':>13}{'measured us':>13}  what our operators would take"]
    for s in spots[:20]:
        times = f" ({s.count}x)" if s.count > 1 else ""
        lines.append(f"{s.removable_us:>13.1f}{s.time_us:>13.1f}  {s.operator} at {s.where}{times}: {s.text}")
    return "\n".join(lines)


def _table(title: str, rows: Sequence[Row], columns: Sequence[_Column]) -> str:
    lines = [f"{title:<{_NAME}}" + "".join(f"{head:>{width}}" for head, _, width, _ in columns)]
    for row in rows:
        name = row["name"] if len(row["name"]) <= _NAME - 2 else f"…{row['name'][3 - _NAME :]}"
        cells = "".join(_cell(row[key], key, width, scale) for _, key, width, scale in columns)
        lines.append(f"{name:<{_NAME}}{cells}")
    return "\n".join(lines)


def _cell(value: Any, key: str, width: int, scale: float) -> str:
    if value is None:
        return f"{'-':>{width}}"
    digits = {"calls": 0, "ratio": 2}.get(key, 2 if scale != 1 else 1)
    return f"{value * scale:>{width}.{digits}f}"
