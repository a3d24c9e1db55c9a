"""libcutefuse_register.so: registers with a TensorRT that is already loaded, and says one line where it cannot.

No TensorRT is involved: a stand-in libnvinfer.so takes the registrations, with the registry of TensorRT 10 or 11.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_plugin_abi import HEADERS, cuda_include

from cutefuse import plugin_path
from cutefuse_host import Host

pytestmark = pytest.mark.slow  # compiles stand-ins of TensorRT

ROOT = Path(__file__).resolve().parents[1]
SLOTS = {10: 12, 11: 8}
SCRIPT = """
import ctypes, sys
fake, library = sys.argv[1], sys.argv[2]
tensorrt = ctypes.CDLL(fake) if fake else None
ctypes.CDLL(library)
if len(sys.argv) > 3:
    again = sys.argv[3]
    ctypes.CDLL(again)
if tensorrt:
    print(tensorrt.fake_count(), tensorrt.fake_registered(b"cutefuse/CuteConcatConv2Relu/1"))
"""


def fake_tensorrt(
    folder: Path, major: int, slot: int, version: int | None = None, registers: int = 1, loaded_as: int | None = None
) -> Path:
    """A stand-in of that version, by default x.0.0; without `registers` the slot holds code of another library."""
    out = folder / f"libnvinfer.so.{loaded_as or major}"
    options = [f"-DMAJOR={major}", f"-DSLOT={slot}", f"-DVERSION={major * 10000 if version is None else version}"]
    options += [f"-DREGISTERS={registers}", f"-I{ROOT}/plugins", f"-Wl,-soname,{out.name}"]
    source = ROOT / "tests/cpp/plugin_fake_tensorrt.cpp"
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", *options, source, "-o", out], check=True)
    return out


def load(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def register_library() -> Path:
    return plugin_path("libcutefuse_register.so")


@pytest.mark.parametrize("major", SLOTS)
def test_registers_every_plugin_with_the_loaded_tensorrt(tmp_path: Path, major: int) -> None:
    done = load(fake_tensorrt(tmp_path, major, SLOTS[major]), register_library())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{len(Host().creators())} 1\n"


def test_says_one_line_when_no_tensorrt_is_loaded() -> None:
    done = load("", register_library())
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert "is not loaded" in done.stderr


@pytest.mark.parametrize(("major", "version"), [(10, 100002), (10, 101601), (11, 110000), (11, 110103)])
def test_registers_with_the_first_and_the_last_version_that_is_known(tmp_path: Path, major: int, version: int) -> None:
    done = load(fake_tensorrt(tmp_path, major, SLOTS[major], version), register_library())
    assert (done.stdout, done.stderr) == (f"{len(Host().creators())} 1\n", "")


@pytest.mark.parametrize(
    ("major", "version", "named"),
    [(10, 101700, "10.17"), (11, 110200, "11.2"), (12, 120000, "12.0"), (9, 90000, "9.0"),
     (10, 8601, "unknown version"), (11, 101600, "unknown version")],
)  # fmt: skip
@pytest.mark.parametrize("loaded_as", [10, 11])
def test_never_touches_the_registry_of_an_unknown_version(
    tmp_path: Path, loaded_as: int, major: int, version: int, named: str
) -> None:
    library = fake_tensorrt(tmp_path, major, SLOTS.get(major, 0), version, loaded_as=loaded_as)
    done = load(library, register_library())
    assert (done.returncode, done.stdout) == (0, "0 0\n") and done.stderr.count("\n") == 1
    assert f"({named}) is not known" in done.stderr


@pytest.mark.parametrize("major", SLOTS)
def test_never_calls_a_slot_that_holds_no_code_of_tensorrt(tmp_path: Path, major: int) -> None:
    done = load(fake_tensorrt(tmp_path, major, SLOTS[major], registers=0), register_library())
    assert (done.returncode, done.stdout) == (0, "0 0\n")
    assert "is not known" in done.stderr


def test_says_how_many_plugins_were_registered_before(tmp_path: Path) -> None:
    library = fake_tensorrt(tmp_path, 10, SLOTS[10])
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("libcutefuse.so", "libcutefuse_register.so"):
        (copy / name).write_bytes(plugin_path(name).read_bytes())
    done = load(library, register_library(), copy / "libcutefuse_register.so")
    count = len(Host().creators())
    assert f"{count} of {count} plugins were registered before" in done.stderr


def test_says_one_line_when_the_plugin_library_is_not_beside_it(tmp_path: Path) -> None:
    alone = tmp_path / "alone.so"
    alone.write_bytes(register_library().read_bytes())
    done = load(fake_tensorrt(tmp_path, 11, SLOTS[11]), alone)
    assert done.stdout == "0 0\n" and "libcutefuse.so was not found" in done.stderr


@pytest.mark.skipif(not HEADERS, reason="TENSORRT_INCLUDE_DIR is not set; NVIDIA's headers are on GitHub")
@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_the_registry_has_registercreator_where_the_library_calls_it(headers: Path, tmp_path: Path) -> None:
    command = ["g++", "-std=c++17", "-w", f"-isystem{headers}", f"-isystem{cuda_include()}", f"-I{ROOT}/plugins"]
    probe = tmp_path / "probe"
    subprocess.run([*command, ROOT / "tests/cpp/plugin_registry_probe.cpp", "-o", probe], check=True)
    place, believed = subprocess.check_output([probe], text=True).split()
    assert place == believed
