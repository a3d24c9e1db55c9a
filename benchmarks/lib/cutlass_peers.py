"""CUTLASS's own implicit GEMMs as peers: built by nvcc from the headers that the kernels use, loaded by ctypes.

    python -m benchmarks.lib.cutlass_peers --arch 90a        # build ahead of a run; needs no GPU

One shared library per tile under build/peers, named after a digest of its source, so that a changed source is rebuilt
and a library built elsewhere is used as it is. A tile that cannot be built is named in one line and left out.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "benchmarks" / "peers"
BUILD = ROOT / "build" / "peers"
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-DNDEBUG", "-shared", "-Xcompiler", "-fPIC")
ACTIVATIONS = ("", "Relu", "Silu", "Sigmoid")  # in the order of PeerActivation in peer.h


@dataclass(frozen=True)
class Tile:
    """One instantiation: block M, N, K; then warp M, N and stages (2.x), or cluster M, N (3.x)."""

    peer: str
    source: str
    numbers: tuple[int, ...]

    @property
    def name(self) -> str:
        m, n, k, *rest = self.numbers
        return f"{m}x{n}x{k}_" + (f"c{rest[0]}x{rest[1]}" if self.peer == "cutlass3" else f"s{rest[2]}")

    @property
    def unit(self) -> str:
        """What the tile's library is compiled from."""
        tf32 = "#define PEER_TF32\n" if self.peer == "cutlass2_tf32" else ""
        return f'{tf32}#define PEER_TILE {", ".join(map(str, self.numbers))}\n#include "{self.source}"\n'

    def library(self, arch: str) -> Path:
        """Where the tile's shared library lies, or will."""
        digest = hashlib.sha256(f"{self.unit} {FLAGS} {arch}".encode())
        for file in (SOURCES / self.source, SOURCES / "peer.h"):
            digest.update(file.read_bytes())
        return BUILD / f"{self.peer}_{self.name}_{arch}_{digest.hexdigest()[:12]}.so"


SM80_TILES = (
    (128, 128, 32, 64, 64, 4), (256, 128, 32, 64, 64, 3), (128, 256, 32, 64, 64, 3), (128, 128, 64, 64, 64, 3),
    (256, 64, 32, 64, 64, 4), (128, 64, 64, 64, 32, 3), (64, 64, 64, 32, 32, 4),
)  # fmt: skip
TF32_TILES = (
    (128, 128, 16, 64, 64, 4), (128, 128, 32, 64, 64, 3), (256, 64, 16, 64, 64, 4), (128, 64, 32, 64, 32, 3),
    (64, 64, 32, 32, 32, 4),
)  # fmt: skip
SM90_TILES = ((128, 128, 64, 2, 1), (64, 256, 64, 2, 1), (64, 128, 64, 2, 1), (128, 64, 64, 2, 1))
TILES = {
    "cutlass2": tuple(Tile("cutlass2", "cutlass_sm80.cu", numbers) for numbers in SM80_TILES),
    "cutlass2_tf32": tuple(Tile("cutlass2_tf32", "cutlass_sm80.cu", numbers) for numbers in TF32_TILES),
    "cutlass3": tuple(Tile("cutlass3", "cutlass_sm90.cu", numbers) for numbers in SM90_TILES),
}


def compiler() -> str:
    """nvcc of PATH or of CUDA_HOME. Raises CutefuseError without one."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if found is None:
        raise CutefuseError(
            "the CUTLASS peers need nvcc, and none was found; install the CUDA toolkit or set CUDA_HOME"
        )
    return found


def include_folders() -> list[Path]:
    """CUTLASS's include folders: $CUTLASS_DIR, or the nvidia-cutlass wheel. Raises CutefuseError without either."""
    if given := os.environ.get("CUTLASS_DIR"):
        include = Path(given)
    else:
        spec = importlib.util.find_spec("cutlass_library")
        if spec is None or not spec.submodule_search_locations:
            raise CutefuseError(
                "the CUTLASS peers need CUTLASS's headers; set CUTLASS_DIR to its include folder, or"
                " pip install --no-deps nvidia-cutlass==4.2.0.0"
            )
        include = Path(spec.submodule_search_locations[0]) / "source" / "include"
    folders = [include, include.parent / "tools" / "util" / "include"]
    if missing := [f for f in folders if not (f / "cutlass").is_dir()]:
        raise CutefuseError(
            f"{missing[0]} holds no CUTLASS headers; set CUTLASS_DIR to the include folder of CUTLASS 4"
        )
    return folders


def build_one(tile: Tile, arch: str, nvcc: str, includes: list[Path]) -> str | None:
    """None when the tile's library is there, else the compiler's first complaint."""
    library = tile.library(arch)
    library.parent.mkdir(parents=True, exist_ok=True)
    unit = library.with_suffix(".cu")
    unit.write_text(tile.unit)
    partial = library.with_suffix(".part")
    command = [nvcc, *FLAGS, f"-arch=sm_{arch}", *(f"-I{folder}" for folder in [SOURCES, *includes]), str(unit)]
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    unit.unlink()
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit status {done.returncode}"]
        return lines[0]
    os.replace(partial, library)
    return None


def build(peer: str, arch: str, jobs: int) -> dict[str, str]:
    """Build what is missing of a peer's tiles; tile -> complaint for those that failed. Raises without a compiler."""
    missing = [tile for tile in TILES[peer] if not tile.library(arch).exists()]
    if not missing:
        return {}
    nvcc, includes = compiler(), include_folders()
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        complaints = pool.map(lambda tile: build_one(tile, arch, nvcc, includes), missing)
        return {tile.name: text for tile, text in zip(missing, complaints, strict=True) if text is not None}


class _Problem(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            *("N", "H", "W", "C", "K", "R", "S", "P", "Q", "pad_h", "pad_w", "stride_h", "stride_w"),
            *("dilation_h", "dilation_w", "splits", "activation"),
        )
    ]


class _Operands(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "w", "b", "y")]


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    lib.peer_create.argtypes = [ctypes.POINTER(_Problem), ctypes.POINTER(_Operands)]
    lib.peer_create.restype = ctypes.c_void_p
    lib.peer_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lib.peer_destroy.argtypes = [ctypes.c_void_p]
    lib.peer_destroy.restype = None
    return lib


class Convolution:
    """One prepared convolution of a tile; calling it enqueues a kernel on the given stream."""

    def __init__(self, tile: Tile, arch: str, problem: Any, splits: int, addresses: tuple[int, int, int, int]) -> None:
        """`addresses` are those of x [N,H,W,C], w [K,R,S,C], b [K] and y [N,P,Q,K]. Raises when refused."""
        self.keep: Any = None  # an operand that must live as long as this
        self.library = _library(tile.library(arch))
        (n, k, p, q), (sh, sw), (dh, dw) = problem.output, problem.strides, problem.dilations
        top, left, bottom, right = problem.pads
        if (top, left) != (bottom, right) or problem.activation not in ACTIVATIONS:
            raise CutefuseError(f"{tile.peer} knows symmetric pads and {ACTIVATIONS}, not {problem}; leave it out")
        raw = _Problem(
            n, problem.H, problem.W, sum(problem.C), k, problem.R, problem.S, p, q, top, left, sh, sw, dh, dw,
            splits, ACTIVATIONS.index(problem.activation),
        )  # fmt: skip
        self.handle = self.library.peer_create(ctypes.byref(raw), ctypes.byref(_Operands(*addresses)))
        if not self.handle:
            raise CutefuseError(f"{tile.peer} {tile.name} with {splits} splits cannot take the problem; leave it out")

    def __call__(self, stream: int) -> None:
        status = self.library.peer_run(self.handle, stream)
        if status:
            raise CutefuseError(
                f"CUTLASS answered status {status} to a launch; check the architecture it was built for"
            )

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.peer_destroy(self.handle)


def splits(tile: Tile, problem: Any, sm_count: int) -> list[int]:
    """Ways to divide the reduction that may pay: one, and more where the tiles leave multiprocessors idle (2.x)."""
    n, k, p, q = problem.output
    m_block, n_block, k_block = tile.numbers[:3]
    blocks = -(-n * p * q // m_block) * -(-k // n_block)
    steps = -(-sum(problem.C) // k_block) * problem.R * problem.S
    if tile.peer == "cutlass3" or blocks >= sm_count:
        return [1]
    return [1, *(s for s in (2, 4, 8) if steps >= 4 * s)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="90a", help="architecture to build for; default 90a")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    failed = {f"{peer} {tile}": text for peer in TILES for tile, text in build(peer, args.arch, args.jobs).items()}
    for name, text in failed.items():
        print(f"{name} was not built: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
