"""Tables: rich on a terminal, aligned plain text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int] = ()) -> None:
    """Print rows under a title; `numbers` are the columns aligned to the right. Nothing without rows."""
    if not rows:
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            grid.add_column(column, justify="right" if i in numbers else "left", overflow="fold")
        for row in rows:
            grid.add_row(*(Text(str(cell)) for cell in row))  # brackets in names are not markup
        Console().print(grid)
        return
    print(f"{title}:")
    for line in aligned(columns, rows, numbers):
        print("  " + line)


def aligned(columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int] = ()) -> list[str]:
    """Headings and rows as lines of plain text, each column as wide as its longest cell, two spaces between columns;
    `numbers` are the columns aligned to the right."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = []
    for row in cells:
        parts = [c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(parts).rstrip())
    return lines


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 site", "3 sites"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def scaled(figure: float | None, unit: float) -> str:
    """A figure in a unit, with three digits; "?" for one that is not known."""
    return "?" if figure is None else f"{figure / unit:.3g}"


def time_text(time_us: float) -> str:
    """A time with its unit: 412.5 µs, 39.8 ms, 2.62 s."""
    for limit, unit in ((1e6, "s"), (1e4, "ms")):
        if abs(time_us) >= limit:
            return f"{time_us / (1e6 if unit == 's' else 1e3):.4g} {unit}"
    return f"{time_us:.1f} µs"
