"""Print the GPU architectures to build kernels for, as `make build ARCHS=...` takes them: "90a", "80;90a", "none".

`make demo` and `make test-fast` ask this script. A build folder that holds kernels keeps its architectures. Otherwise
`--gpu` chooses the architecture of this machine's GPU; "none" is a library without kernels. What was chosen, and how to
get something else, goes to stderr in one sentence.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEGRA = (87, 110)  # systems on a chip, which run no other's machine code
KERNELS = '`make build ARCHS="80;90a"` compiles the kernels (needs nvcc; about 20 minutes on two cores)'


def known() -> list[str]:
    """All that the kernels are written for, as CMake lists it: PTX, such as "100-virtual", last."""
    found = re.search(r'set\(CUTEFUSE_ALL_ARCHS "([^"]+)"', (ROOT / "cmake" / "Architectures.cmake").read_text())
    assert found is not None
    return found.group(1).split(";")


def configured(cache: Path) -> list[str]:
    """The architectures whose kernels a build folder holds, from its CMakeCache.txt; none without kernels."""
    entries = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.M)) if cache.is_file() else {}
    with_kernels = entries.get("CUTEFUSE_CUDA") == "ON" and Path(entries.get("CMAKE_CUDA_COMPILER", "")).is_file()
    return ([a for a in entries.get("CUTEFUSE_CUDA_ARCHS", "").split(";") if a] or known()) if with_kernels else []


def capability() -> int:
    """Compute capability * 10 of the first GPU, from the driver; 0 without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) == 0:
        for attribute, value in ((75, major), (76, minor)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
    return 10 * major.value + minor.value


def runs_on(arch: str, sm: int) -> bool:
    """Whether code runs on a GPU, as the library judges: PTX on all newer ones; machine code on the same major version
    from its minor version on, among graphics cards; 90a on 9.0 alone."""
    if arch.endswith("-virtual"):
        return int(arch.removesuffix("-virtual")) <= sm
    if not arch.isdigit():
        return arch == f"{sm}a"
    number = int(arch)
    cards = number not in TEGRA and sm not in TEGRA and str(sm) in known()
    return number == sm or (cards and number // 10 == sm // 10 and number < sm)


def choose(built: list[str], sm: int | None) -> tuple[str, str]:
    """(architectures, sentence for the user) for what the build folder holds and the GPU (None: not asked, 0: none)."""
    if built and (not sm or any(runs_on(arch, sm) for arch in built)):
        return ";".join(built), f"The build folder keeps its kernels for {';'.join(built)}."
    gpu = f"this machine's GPU (compute capability {(sm or 0) // 10}.{(sm or 0) % 10})"
    # Machine code of its own before that of an older GPU, and PTX last.
    able = [arch for arch in known() if sm and runs_on(arch, sm)]
    own = ([arch for arch in able if arch.rstrip("a") == str(sm)] or able[-1:])[:1]
    if own:
        return ";".join(built + own), f"Building kernels for {gpu}: {own[0]}."
    if built:
        return ";".join(built), f"The build folder keeps its kernels for {';'.join(built)}; none exist for {gpu}."
    why = "The fast tests need no kernels" if sm is None else f"No kernels exist for {gpu}" if sm else "There is no GPU"
    return "none", f"{why}, so the library is built without kernels; {KERNELS}."


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="build for the GPU of this machine, where there is one")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="the build folder (build)")
    args = parser.parse_args()
    archs, sentence = choose(configured(args.build / "CMakeCache.txt"), capability() if args.gpu else None)
    print(sentence, file=sys.stderr)
    print(archs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
