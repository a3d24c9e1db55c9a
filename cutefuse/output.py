"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or nothing: beside first, then renamed. Raises CutefuseError where that is impossible."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CutefuseError(f"{path} cannot be written ({error.strerror}); choose another output path") from None


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON, whole or not at all."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def make_folder(path: Path) -> None:
    """Create a folder with its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CutefuseError(f"output folder {path} cannot be made ({error.strerror}); choose another one") from error
