"""Rows of figures as a JSON file: one row a line with six digits, written whole or not at all, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError
from cutefuse.output import write_text

Row = dict[str, Any]


def write(path: Path | None, rows: list[Row]) -> None:
    """Write the rows; nothing without a path. Raises CutefuseError where that is impossible."""
    if path is not None:
        write_text(path, "[\n" + ",\n".join(json.dumps(_short(row)) for row in rows) + "\n]\n")


def read(path: Path) -> list[Row]:
    """The rows of a file. Raises CutefuseError for a file that cannot be read or holds none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CutefuseError(f"{path} cannot be read ({error}); give a file that --json wrote") from None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise CutefuseError(f"{path} holds no rows; give a file that --json wrote")
    return rows


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, (list, tuple)) else value
