"""cutefuse: operators that TensorRT does not fuse, as plugins that one command puts into an ONNX model."""

from __future__ import annotations

import os
from pathlib import Path

from cutefuse.errors import CutefuseError

__version__ = "0.1.0"
__all__ = ["CutefuseError", "plugin_path", "__version__"]


def plugin_path(name: str = "libcutefuse.so") -> Path:
    """Path of the plugin library: $CUTEFUSE_LIBRARY_DIR, the installed package, or the source tree's build folder.

    Raises CutefuseError when it was never built.
    """
    package = Path(__file__).resolve().parent
    folders = [Path(p) / "lib" for p in __path__] + [package.parent / "build" / "lib"]
    override = os.environ.get("CUTEFUSE_LIBRARY_DIR")
    for folder in [Path(override)] if override else folders:
        if (folder / name).is_file():
            return folder / name
    raise CutefuseError(f"{name} was not found in {', '.join(map(str, folders))}; build it with `make setup`")
