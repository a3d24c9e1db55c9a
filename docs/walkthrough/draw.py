"""Builds layouts.cpp with the host compiler, and draws the pictures of docs/walkthrough.md from what it says.

    python docs/walkthrough/draw.py           # -> docs/images/walkthrough-*.svg
    python docs/walkthrough/draw.py --print   # what the page quotes

The kernel's headers need CuTe's (the nvidia-cutlass wheel, or $CUTLASS_DIR) and CUDA's ($CUDA_HOME, or nvcc's).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from cutefuse.errors import CutefuseError, run_command  # noqa: E402

COLORS = ("#4a78b0", "#d08a3c", "#3c8545", "#b8473a", "#7a5ba8", "#8a6d4f", "#c27ba0", "#6b7f3a")
PALE = ("#dbe7f6", "#f8e6cf", "#d9efdb", "#f7d9d5", "#e5dcf1", "#eee4da", "#f6e0ec", "#e6ead3")


def includes() -> list[Path]:
    """Folders of the kernel's, CuTe's and CUDA's headers. Raises CutefuseError where one is missing."""
    wheel = importlib.util.find_spec("cutlass_library")
    inside = [Path(p) / "source/include" for p in (wheel.submodule_search_locations or [] if wheel else [])]
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and str(Path(nvcc).resolve().parents[1]), "/usr/local/cuda"]
    cutlass = _holding("cute/tensor.hpp", [Path(os.environ.get("CUTLASS_DIR", "/")), *inside])
    cuda = _holding("cuda_runtime.h", [Path(home) / "include" for home in homes if home])
    return [ROOT / "cutlass_kernels", cutlass, cuda, _holding("cuda/std/utility", [cuda, cuda / "cccl"])]


def _holding(header: str, folders: Sequence[Path]) -> Path:
    found = next((folder for folder in folders if (folder / header).is_file()), None)
    if found is None:
        raise CutefuseError(
            f"{header} was not found; `pip install --no-deps nvidia-cutlass` and a CUDA toolkit bring the headers, "
            "$CUTLASS_DIR and $CUDA_HOME name others"
        )
    return found


def build(folder: Path) -> Path:
    """The program, compiled by the host compiler. Raises CutefuseError where there is none or it refuses."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CutefuseError("no C++ compiler was found; install g++ or name one in $CXX")
    target = folder / "layouts"
    own, *foreign = includes()
    words = [f"-I{own}", *(word for path in foreign for word in ("-isystem", str(path)))]
    command = [compiler, "-std=c++17", *words, str(HERE / "layouts.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        why = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise CutefuseError(f"{compiler} refused layouts.cpp: {why}")
    return target


def svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'font-size="13" role="img" aria-label="{label}">\n<style>text {{ fill: #222; text-anchor: middle }} '
        ".note { fill: #555; font-size: 12px } .title { font-weight: 600; font-size: 14px }</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def cell(x: float, y: float, w: float, h: float, fill: str, text: object = "") -> str:
    box = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="#fff"/>'
    return box + (f'<text x="{x + w / 2:g}" y="{y + h / 2 + 4:g}">{text}</text>' if text != "" else "")


def words(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{text}</text>'


def swizzle(data: dict[str, Any]) -> str:
    """Which of a row's eight 16-byte chunks lies where: a column is four banks."""
    parts = []
    straight = [chunk for _ in range(8) for chunk in range(8)]
    for left, title, at in (
        (40, "rows as they are: equal banks", straight),
        (400, "sX, chunk XOR row: all banks", data["swizzle"]),
    ):
        parts.append(words(left + 152, 28, title, "title"))
        for row in range(8):
            parts.append(words(left - 14, 62 + 28 * row, f"{row}", "note"))
            for chunk in range(8):
                parts.append(cell(left + 38 * at[8 * row + chunk], 44 + 28 * row, 38, 28, PALE[chunk], chunk))
        for bank in range(8):
            parts.append(words(left + 38 * bank + 19, 284, f"{4 * bank}-{4 * bank + 3}", "note"))
    note = "down: rows of the tile; across: banks; a number is the chunk of 8 channels that lies there"
    parts.append(words(370, 304, note, "note"))
    return svg(740, 318, "Chunks of eight rows in shared memory, without and with the swizzle.", parts)


def owners(data: dict[str, Any]) -> str:
    """The outputs that each thread holds, of 32x32."""
    parts = [words(336, 26, "32 x 32 outputs of the tiled mma, by lane", "title")]
    for warp in range(4):
        parts.append(cell(196 + 72 * warp, 36, 66, 20, PALE[warp], f"warp {warp}"))
    for m in range(32):
        for n in range(0, 32, 2):
            warp, lane = divmod(data["owners"][32 * m + n], 32)
            parts.append(cell(20 + 39.5 * (n // 2), 64 + 17 * m, 39.5, 17, PALE[warp], lane))
    note = "down: pixels; across: channels; a cell is two channels, 4 bytes of float16"
    parts.append(words(336, 628, note, "note"))
    return svg(672, 642, "Which thread holds which outputs of the tiled mma.", parts)


def pipeline(data: dict[str, Any]) -> str:
    """What each stage holds while the k-tiles are multiplied."""
    turns, count = data["pipeline"], data["stages"]
    parts = [words(120 + 80 * len(turns) / 2, 26, "what the stages do while a k-tile is multiplied", "title")]
    for stage in range(count):
        parts.append(words(60, 72 + 44 * stage, f"stage {stage}"))
    for tile, read, write, coming in turns:
        x = 120 + 80 * tile
        parts.append(words(x + 40, 46, f"k-tile {tile}", "note"))
        for stage in range(count):
            if stage == read:
                fill, text = COLORS[2], f"read {tile}"
            elif stage == write:
                fill, text = COLORS[1], f"copy {coming}"
            else:
                fill, text = PALE[0], f"has {tile + 1}"
            shown = cell(x, 52 + 44 * stage, 80, 36, fill, text)
            parts.append(shown.replace("<text", '<text style="fill:#fff"') if fill in COLORS else shown)
    note = "between two columns: wait until all but the newest copies have arrived, then a barrier"
    parts.append(words(120 + 40 * len(turns), 70 + 44 * count, note, "note"))
    return svg(140 + 80 * len(turns), 84 + 44 * count, "Stages of shared memory over the first k-tiles.", parts)


def epilogue(data: dict[str, Any]) -> str:
    """Which bytes of the output one store instruction of warp 0 writes."""
    parts = []
    for left, title, stores, wide in (
        (40, "registers to global: 8 x 16 bytes", data["pairs"], 2),
        (400, "shared to global: 4 x 128 bytes", data["vectors"], 8),
    ):
        parts.append(words(left + 160, 28, title, "title"))
        for row in range(8):
            parts.append(words(left - 14, 60 + 26 * row, f"{row}", "note"))
            parts += [cell(left + 80 * sector, 44 + 26 * row, 80, 24, "#eeeeee") for sector in range(4)]
        for m, n in stores:
            parts.append(cell(left + 5 * n, 44 + 26 * m, 5 * wide, 24, COLORS[2]))
    parts.append(words(370, 272, "down: pixels; across: 64 channels; a grey box is a sector of 32 bytes", "note"))
    return svg(740, 286, "Bytes that one store instruction of a warp writes, without and with staging.", parts)


PICTURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "swizzle": swizzle,
    "owners": owners,
    "pipeline": pipeline,
    "epilogue": epilogue,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the layouts instead of drawing")
    parser.add_argument("-o", "--outdir", type=Path, default=ROOT / "docs/images")
    args = parser.parse_args(argv)

    def command() -> int:
        with tempfile.TemporaryDirectory(prefix="cutefuse_") as folder:
            program = str(build(Path(folder)))
            if args.print:
                return subprocess.run([program]).returncode
            data = json.loads(subprocess.run([program, "--json"], check=True, capture_output=True, text=True).stdout)
        for name, draw in PICTURES.items():
            (args.outdir / f"walkthrough-{name}.svg").write_text(draw(data))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
