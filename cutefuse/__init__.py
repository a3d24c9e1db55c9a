"""cutefuse: operators that TensorRT does not fuse, as plugins that one command puts into an ONNX model."""

from __future__ import annotations

import ctypes
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutefuse.errors import CutefuseError, VerificationError

if TYPE_CHECKING:
    from cutefuse.rewrite.in_memory import Patched, patch, patch_graph

__version__ = "0.2.0"
__all__ = [
    "CutefuseError", "Patched", "VerificationError", "patch", "patch_graph", "plugin_path", "__version__",
]  # fmt: skip

# name -> the module that has it, imported when someone asks: `import cutefuse` alone stays cheap.
_ON_DEMAND = dict.fromkeys(("Patched", "patch", "patch_graph"), "cutefuse.rewrite.in_memory")

if not TYPE_CHECKING:  # a checker that saw it would take any name

    def __getattr__(name: str) -> Any:
        if name not in _ON_DEMAND:
            raise AttributeError(f"module 'cutefuse' has no attribute '{name}'")
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})


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


def load_library(path: Path) -> ctypes.CDLL:
    """The library of that path. Raises CutefuseError when it was built for another system."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CutefuseError(f"{path} does not load on this system ({error}); build it here with `make setup`") from None
