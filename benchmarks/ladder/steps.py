"""The steps of steps.cu by name, and the library that holds them, which nvcc builds on first use."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from cutefuse.errors import CutefuseError

SOURCE = Path(__file__).resolve().parent / "steps.cu"
STEPS = {
    "RMSNorm v1: block per row, one thread works": 1,
    "RMSNorm: one thread per row": 2,
    "RMSNorm v2: block per row, shared-memory tree": 3,
    "RMSNorm: four warps per row, each sums all of it": 4,
    "RMSNorm warp reduce: one warp per row": 5,
    "RMSNorm v3: block reduce by shuffles, strided loop": 6,
    "RMSNorm v4: v3 with float4": 7,
    "LayerNorm: one thread per row": 8,
    "LayerNorm backward: one thread per row": 9,
    "LayerNorm backward: block per row": 10,
}


NORMS = ("RMSNorm", "LayerNorm", "LayerNorm backward")


def norm_of(name: str) -> str:
    """Which of NORMS a step or a peer computes."""
    return max((norm for norm in NORMS if name.startswith(norm)), key=len)


def label(name: str) -> str:
    """A few letters for a step, a peer or the library's kernel: "v1", "4 warps", "cutefuse"."""
    part = name.removeprefix(norm_of(name)).lstrip(" :")
    short = {"one thread per row": "thread", "four warps per row, each sums all of it": "4 warps",
             "warp reduce: one warp per row": "warp", "block per row": "block"}  # fmt: skip
    return short.get(part, part.split(":")[0])


def is_backward(name: str) -> bool:
    return norm_of(name) == "LayerNorm backward"


def bytes_moved(name: str, rows: int, columns: int) -> int:
    """The least that a step or a peer must move in float32: x -> y, or x, dy -> dx. Vectors of one row are left out."""
    return (3 if is_backward(name) else 2) * 4 * rows * columns


def build(folder: Path, sm: int) -> Path:
    """Compile steps.cu for the device. Raises CutefuseError when nvcc is missing or refuses it."""
    target = folder / f"libladder_sm{sm}.so"
    if target.is_file() and target.stat().st_mtime >= SOURCE.stat().st_mtime:
        return target
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.so")
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{sm}", "-Xcompiler", "-fPIC", "-shared", "-cudart", "static"]
    try:
        done = subprocess.run([*command, str(SOURCE), "-o", str(partial)], capture_output=True, text=True)
    except FileNotFoundError:
        raise CutefuseError(f"{nvcc} was not found; put CUDA's nvcc on the PATH to build the steps") from None
    if done.returncode != 0:
        why = (done.stderr or done.stdout or f"exit code {done.returncode}").strip().splitlines()[-1]
        raise CutefuseError(f"nvcc refused {SOURCE.name}: {why}")
    os.replace(partial, target)
    return target


def loaded(library: Path) -> Callable[..., bool]:
    """ladder_run of a library: (step, x, other, y, rows, columns, epsilon, stream) -> whether it ran; other is gamma of
    RMSNorm and dy of the backward steps. Raises CutefuseError for a file that is no such library."""
    try:
        run = ctypes.CDLL(str(library)).ladder_run
    except (OSError, AttributeError) as error:
        raise CutefuseError(f"{library} is no library of the steps ({error}); leave --library out") from None
    p = ctypes.c_void_p
    run.restype = ctypes.c_bool
    run.argtypes = [ctypes.c_int, p, p, p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, p]
    return run
