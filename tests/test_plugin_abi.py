"""plugins/tensorrt_abi.h against NVIDIA's headers. Set TENSORRT_INCLUDE_DIR to one or more include folders (`:`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # compiles against two headers

ROOT = Path(__file__).resolve().parents[1]
PROBE = ROOT / "tests/cpp/plugin_abi_probe.cpp"
HEADERS = [Path(p) for p in os.environ.get("TENSORRT_INCLUDE_DIR", "").split(":") if p]
CUDA = [p for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
NVCC = shutil.which("nvcc")


def cuda_include() -> Path:
    """The CUDA toolkit's headers, which NVIDIA's TensorRT headers need."""
    roots = [Path(p) for p in CUDA]
    if NVCC:
        listing = subprocess.run([NVCC, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True)
        roots += [Path(top) for top in re.findall(r"#\$ TOP=(\S+)", listing.stderr)]
    for root in roots:
        if (root / "include/cuda_runtime_api.h").is_file():
            return root / "include"
    pytest.skip("no CUDA headers: NVIDIA's TensorRT headers need cuda_runtime_api.h; set CUDA_HOME")


def probe(folder: Path, options: list[str]) -> tuple[str, dict[str, list[str]]]:
    """What the probe prints, and the virtual table of each of its classes."""
    # Some versions declare destructors that only libnvinfer defines; the probe calls none of them.
    flags = ["-std=c++17", "-w", "-fdump-lang-class", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(["g++", *flags, *options, f"-I{ROOT}/plugins", PROBE, "-o", "probe"], cwd=folder, check=True)
    [dump] = folder.glob("*.class")
    tables = re.findall(r"^Vtable for (Probe\w+)\n.*?entries\n(.*?)\n\n", dump.read_text(), re.M | re.S)
    return subprocess.check_output([folder / "probe"], text=True), {name: table.splitlines() for name, table in tables}


@pytest.mark.skipif(not HEADERS, reason="TENSORRT_INCLUDE_DIR is not set; NVIDIA's headers are on GitHub")
@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_own_declaration_has_nvidias_layout(headers: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    own_text, own_tables = probe(ours, [])
    text, tables = probe(theirs, ["-DCUTEFUSE_NVIDIA_HEADERS=1", f"-isystem{headers}", f"-isystem{cuda_include()}"])
    assert set(own_tables) == set(re.findall(r"^struct (Probe\w+)", PROBE.read_text(), re.M))
    assert {"PluginTensorDesc.dims", "PluginField.data", "TensorFormat::kHWC8"} <= set(own_text.split())
    assert own_text == text
    assert own_tables == tables


@pytest.mark.skipif(not HEADERS or not shutil.which("cmake"), reason="TENSORRT_INCLUDE_DIR is not set, or no cmake")
def test_a_library_built_with_nvidias_headers_passes_the_host_built_with_ours(tmp_path: Path) -> None:
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DCUTEFUSE_CUDA=OFF", f"-DTENSORRT_INCLUDE_DIR={HEADERS[-1]}",
               f"-DCUDAToolkit_ROOT={cuda_include().parent}"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path, "-j2", "--target", "cutefuse", "cutefuse_host"], check=True)
    tests = [ROOT / "tests" / f"test_plugin{part}.py" for part in ("", "_refusals")]
    environment = os.environ | {"CUTEFUSE_LIBRARY_DIR": str(tmp_path / "lib")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_a_moved_virtual_function_would_be_seen(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    header = (ROOT / "plugins/tensorrt_abi.h").read_text()
    line = "  virtual std::int32_t getNbOutputs() const noexcept = 0;\n"
    assert line in header
    last = "  virtual char const *getMetadataString() noexcept { return nullptr; }\n"
    # The probe includes "tensorrt_abi.h" from the first folder that has one.
    (after / "tensorrt_abi.h").write_text(header.replace(line, "").replace(last, last + line))
    _, tables = probe(before, [])
    _, moved = probe(after, [f"-I{after}"])
    assert {name for name in tables if tables[name] != moved[name]} >= {"ProbeBuild"}
