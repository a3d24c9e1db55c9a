"""The library without kernels for aarch64: cross-compiled by Debian's compiler, run under qemu-user."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cutefuse import kernels, plugin_path

ROOT = Path(__file__).resolve().parents[1]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
MISSING = [name for name in (COMPILER, EMULATOR, "cmake") if not shutil.which(name)]
pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("aarch64"),  # one build for all of them
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"no {', '.join(MISSING)}: apt install g++-aarch64-linux-gnu qemu-user libc6-arm64-cross",
    ),
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the build as docs/aarch64.md types it, with a driver and a loader of the library beside it."""
    folder = tmp_path_factory.mktemp("aarch64")
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/cmake/aarch64-linux-gnu.cmake"
    for command in (
        ["cmake", "-S", ROOT, "-B", folder, "-DCUTEFUSE_CUDA=OFF", toolchain],
        ["cmake", "--build", folder, "-j", str(os.cpu_count() or 1)],
        [COMPILER, "-std=c++17", f"-I{ROOT}/plugins", ROOT / "tests/cpp/plugin_sanitizer_driver.cpp",
         "-o", folder / "driver", f"-L{folder}/lib", "-lcutefuse_host", f"-Wl,-rpath,{folder}/lib"],
        [COMPILER, "-std=c++17", ROOT / "tests/cpp/describe.cpp", "-o", folder / "describe", "-ldl"],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(*command: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([EMULATOR, "-L", SYSROOT, *(a for name, value in environment.items() for a in
                           ("-E", f"{name}={value}")), *command], capture_output=True, text=True, errors="replace",
                          timeout=300)  # fmt: skip


def facts(library: Path, build: Path) -> dict[str, object]:
    """What a library of that architecture says of itself."""
    done = run(build / "describe", library)
    assert done.returncode == 0, done.stderr
    return without_the_build(json.loads(done.stdout))


def without_the_build(described: dict[str, Any]) -> dict[str, Any]:
    """Less what depends on the kernels that a library was built with."""
    kept = {k: v for k, v in described.items() if k not in ("cuda", "cuda_version", "archs", "targets")}
    return kept | {"architectures": [{**a, "code": None} for a in kept["architectures"]]}


def test_every_file_is_of_that_machine(build: Path) -> None:
    files = [*build.glob("lib/*.so"), *(build / name for name in ("test_problem", "test_branches", "driver"))]
    assert len(files) == 6
    for path in files:
        head = path.read_bytes()[:20]
        assert head[:6] == b"\x7fELF\x02\x01" and int.from_bytes(head[18:20], "little") == 183, path  # EM_AARCH64


@pytest.mark.parametrize("name", ["test_problem", "test_branches"])
def test_the_arithmetic_is_right_there(name: str, build: Path) -> None:
    done = run(build / name)
    assert (done.returncode, done.stdout) == (0, f"{name}: passed\n"), done.stdout + done.stderr


def test_the_library_knows_the_same_operators_tiles_and_attributes_as_here(build: Path) -> None:
    own = without_the_build(kernels.describe())
    there = facts(build / "lib/libcutefuse.so", build)
    assert there == own and len(own["ops"]) == 4


def test_the_plugin_host_builds_every_variant_there(build: Path) -> None:
    """The driver feeds malformed fields and sizes that overflow as well; it ends with 0 when each was refused."""
    done = run(build / "driver", build / "lib/libcutefuse.so")
    assert (done.returncode, done.stdout) == (0, "192 plugins built\n"), done.stdout + done.stderr[-2000:]


def test_a_library_of_another_machine_is_refused_in_words(build: Path) -> None:
    for program in ("driver", "describe"):
        done = run(build / program, plugin_path())
        assert done.returncode == 1 and plugin_path().name in done.stderr + done.stdout
        assert len((done.stderr + done.stdout).strip().splitlines()) == 1


def test_without_tensorrt_nothing_is_registered_and_one_line_says_so(build: Path) -> None:
    done = run(build / "describe", build / "lib/libcutefuse_register.so")
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and "not loaded in this process yet, so nothing was registered" in lines[0]
    assert len(lines) == 2 and "cutefuse_describe" in lines[1]


def test_a_missing_library_is_one_sentence(build: Path) -> None:
    done = run(build / "describe", build / "lib/libnothing.so")
    assert done.returncode == 1 and re.search(r"^describe: .*libnothing\.so", done.stderr)
    assert len(done.stderr.splitlines()) == 1
