"""Machine code of the library: the instructions each path stands for are there, and no register went to memory."""

from __future__ import annotations

import collections
import functools
import re
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from test_sm90 import traits_of

from cutefuse import kernels, plugin_path
from cutefuse.errors import CutefuseError

FLOAT8 = "conv_sm80INS0_4Sm80IN7cutlass12float_e4m3_t"
# Where mma.sync of float8 is one instruction; elsewhere it is float16's behind a conversion.
QMMA = ("sm_89", "sm_120", "sm_121")
WGMMA = {  # of each mangled type
    "N7cutlass6half_t": "HGMMA",
    "N7cutlass10bfloat16_t": "HGMMA",
    "N7cutlass12float_e4m3_t": "QGMMA",
    "a": "IGMMA",
}
# Start of a kernel's mangled name, up to its template arguments -> opcodes that must stand in every instance of it.
REQUIRED = {
    **{
        f"conv_sm80INS0_4Sm80IN7cutlass{type}": {"LDGSTS", "LDSM", "HMMA", "STG"}
        for type in ("6half_t", "10bfloat16_t", "10tfloat32_t")
    },
    FLOAT8: {"LDGSTS", "LDSM", "STG"},
    "conv_sm80INS0_4Sm80Ia": {"LDGSTS", "LDSM", "IMMA", "STG"},
    "conv_finishI": {"LDG", "STG"},
    "conv_sm80_imageI": {"LDGSTS", "LDS", "HMMA", "STG"},
    "conv_sm80_depthwiseI": {"LDGSTS", "LDS", "FFMA", "STG"},
    **{
        f"conv_sm90_{loads}I{type}": {"UTMALDG", product}
        for loads in ("im2colINS0_10Sm90Im2col", "haloINS0_8Sm90Halo", "smallINS0_9Sm90Small")
        for type, product in WGMMA.items()
    },
    "conv_sm90_haloINS0_8Sm90HaloIN7cutlass10tfloat32_t": {"UTMALDG", "HGMMA", "STG"},
    **{
        f"conv_sm90_patch_rowsINS0_13Sm90PatchRowsIN7cutlass{type}": {"UTMALDG", "HGMMA", "STG"}
        for type in ("6half_t", "10bfloat16_t")
    },
    "row_norm_forwardI": {"LDG", "STG"},
}
FUNCTION = re.compile(r"Function : (\S+)")
PRODUCT = re.compile(r"[A-Z]*MMA")  # of floats HMMA and HGMMA, of float8 QGMMA, of int8 IMMA and IGMMA
ARCH = re.compile(r"arch = (sm_\w+)")
OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)")


@functools.cache
def tool(name: str) -> Path:
    """A binary of NVIDIA's disassembler packages; the test is skipped where they are not installed."""
    for package in ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == name:
                return Path(str(file.locate()))
    pytest.skip(f"{name} is not installed")


# ptxas writes it unless it knows that one thread issues the load.
LOOPED = "a TMA load in a loop over the threads of a warp"


def kernel_opcodes() -> Iterator[tuple[str, str, collections.Counter[str]]]:
    """(architecture, function, opcode counts) of every kernel in the library; LOOPED is counted as an opcode."""
    library = plugin_path()
    path = f"{tool('nvdisasm').parent}:/usr/bin:/bin"
    process = subprocess.Popen(
        [str(tool("cuobjdump")), "-sass", str(library)], stdout=subprocess.PIPE, text=True, env={"PATH": path}
    )
    arch, made_for, function, counts, since_load = "", "", "", collections.Counter[str](), 0
    assert process.stdout is not None
    for line in process.stdout:
        if found := ARCH.search(line):
            arch = found.group(1)
        elif found := FUNCTION.search(line):
            if function:
                yield made_for, function, counts
            made_for, function, counts = arch, found.group(1), collections.Counter()
        elif found := OPCODE.match(line):
            counts[found.group(1)] += 1
            since_load = 0 if found.group(1) == "UTMALDG" else since_load + 1
            counts[LOOPED] += "BRA.U.ANY" in line and since_load < 5
    if function:
        yield made_for, function, counts
    assert process.wait() == 0


@pytest.mark.slow
def test_kernels_use_their_instructions_and_no_local_memory() -> None:
    try:
        if not kernels.describe()["cuda"]:
            pytest.skip("the library was built without CUDA")
    except CutefuseError as error:
        pytest.skip(str(error))
    seen: collections.Counter[str] = collections.Counter()
    for arch, function, counts in kernel_opcodes():
        rows = [kernel for kernel in REQUIRED if kernel in function]
        assert len(rows) == 1 or "conv_" not in function, f"{function} is {rows} of the table"
        for kernel in rows:
            required = REQUIRED[kernel]
            if kernel == FLOAT8:
                required = required | {"QMMA" if arch in QMMA else "HMMA"}
            seen[kernel] += 1
            assert required <= counts.keys(), f"{function} for {arch} lacks {sorted(required - counts.keys())}"
            if "Sm90Small" in function:  # filters as rows are transposed, pixels as rows are not
                activates, pixel_rows, _ = traits_of(function)
                assert ("MOVM" in counts, "LDGSTS" in counts) == (not pixel_rows, activates), function
                assert not activates or "HFMA2" in counts, function
                # The next kernel starts at once, or where this one's wait has ended.
                assert counts["PREEXIT"] >= 2, function
            others = {op for op in counts if PRODUCT.fullmatch(op)} - required
            assert not others, f"{function} for {arch} multiplies with {sorted(others)}"
        if int(re.sub(r"\D", "", arch)) >= 90:  # where it is launched before its predecessor has ended
            assert {"ACQBULK", "PREEXIT"} <= counts.keys(), f"{function} for {arch} does not wait for its predecessor"
        # Warps that multiply load a shortcut so, once for a tile: the thread that waits for the stores issues the load.
        looped = counts[LOOPED]
        assert looped <= ("conv_sm90_halo" in function), f"{function} for {arch} issues {LOOPED} {looped} times"
        spilled = {op: n for op, n in counts.items() if op in ("LDL", "STL")}
        assert not spilled, f"{function} for {arch} keeps registers in local memory: {spilled}"
    halves = sum(n for kernel, n in seen.items() if "Sm80IN7cutlass" in kernel and kernel != FLOAT8)
    assert halves >= 4 * len(kernels.describe()["archs"].split()), seen
    if "90a" in kernels.describe()["archs"]:
        assert all(seen[kernel] for kernel in REQUIRED), seen
