"""The compiled half of the operators (native/): built once with the user's own compiler, kept, loaded when needed.

It takes the operators over for tensors on a GPU, so that a call costs no Python. Without it Python does the same work,
and a warning says once why. CUTEFUSE_TORCH_EXTENSION=0 leaves it alone; `state()` tells in words what is in use.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.output import cache_folder, make_folder
from cutefuse.progress import waiting

SOURCES = Path(__file__).parent / "native"
NAME = "cutefuse_native"
SWITCH = "CUTEFUSE_TORCH_EXTENSION"


@dataclass
class _Loaded:
    """What is in use. python: what the extension asks of Python, see `cutefuse.torch`. rms_norm, layer_norm: calls of
    the extension; None until it is loaded."""

    python: SimpleNamespace | None = None
    rms_norm: Any = None
    layer_norm: Any = None
    asked: bool = False
    why_not: str = "no tensor on a GPU was given yet"


loaded = _Loaded()
_lock = threading.Lock()


def state() -> str:
    """One sentence: whether the operators are compiled, or why not."""
    if loaded.rms_norm is not None:
        return "the operators run compiled"
    return f"the operators run through Python: {loaded.why_not}"


def path() -> Path:
    """The file of the extension for these sources, this PyTorch and this Python, built or not."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.implementation.cache_tag}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return cache_folder() / f"{NAME}-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the extension unless it is there; its file. Raises CutefuseError with the reason where that fails.

    It takes about a minute. Two processes may build at a time: each has a folder of its own, and the last file stays.
    """
    target = path()
    if target.is_file():
        return target
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX", "c++")
    for tool, remedy in ((compiler, "install g++ or set CXX"), ("ninja", "run `pip install ninja`")):
        if shutil.which(tool) is None:
            raise CutefuseError(f"{tool} was not found; {remedy}")
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix="cutefuse_native_") as work:
        try:
            cpp_extension.load(
                NAME, [str(SOURCES / "module.cpp")], build_directory=work, extra_cflags=["-O2"], with_cuda=False,
                is_python_module=False,
            )  # fmt: skip
        except Exception as error:  # the compiler's own words, of any length
            lines = [line for line in str(error).splitlines() if "error" in line.lower()]
            words = (lines or [str(error)])[min(1, len(lines) - 1) if lines else 0][:300]
            raise CutefuseError(f"it could not be built with PyTorch {torch.__version__} ({words})") from None
        try:
            part = target.with_suffix(f".{os.getpid()}")
            shutil.copyfile(Path(work) / f"{NAME}.so", part)
            os.replace(part, target)
        except OSError as error:
            raise CutefuseError(f"{target} cannot be written ({error.strerror}); free {target.parent}") from None
    return target


def module(file: Path) -> ModuleType:
    """The extension in a file, imported."""
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None and spec.loader is not None
    try:
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    except ImportError as error:
        raise CutefuseError(f"{file} cannot be loaded ({error}); delete it") from None
    return made


def address_of(function: Any) -> int:
    """Where a function of a ctypes library starts."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _current_stream() -> int:
    """The address of PyTorch's C function for the current stream."""
    for name in ("libtorch_cuda.so", "libtorch_hip.so"):
        file = Path(torch.__file__).parent / "lib" / name
        if file.is_file():
            return address_of(ctypes.CDLL(str(file)).aoti_torch_get_current_cuda_stream)
    raise CutefuseError("this PyTorch has no libtorch_cuda.so; install a build with CUDA")


def enable(extension: ModuleType, device: str, run: int, stream: int, python: SimpleNamespace) -> None:
    """Let the extension take the operators over for tensors of a device. run, stream: addresses of C functions."""
    extension.enable(device, run, stream, python)
    loaded.rms_norm, loaded.layer_norm = extension.rms_norm, extension.layer_norm


def ensure() -> None:
    """Load the extension, built first where it is not there; once in a process. Never raises: it warns why not."""
    if loaded.asked:
        return
    with _lock:
        if loaded.asked:
            return
        loaded.asked = True
        if os.environ.get(SWITCH) == "0":
            loaded.why_not = f"{SWITCH}=0"
            return
        try:
            with waiting("compiling cutefuse's operators for this PyTorch, once"):
                extension = module(build())
            run = address_of(kernels.library().cutefuse_run)
            assert loaded.python is not None
            enable(extension, "cuda", run, _current_stream(), loaded.python)
        except (CutefuseError, OSError, AttributeError) as error:
            loaded.why_not = str(error)
            warnings.warn(f"{state()}; a call costs about 0.1 ms more (set {SWITCH}=0 to accept that)", stacklevel=3)
