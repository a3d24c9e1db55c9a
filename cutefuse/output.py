"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

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
