"""The host side of library and plugin host under AddressSanitizer (leaks too) and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c++17", "-g1", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra"]


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("g++"), reason="needs cmake and g++")
def test_every_variant_and_thousands_of_malformed_fields_are_clean(tmp_path: Path) -> None:
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-DCUTEFUSE_CUDA=OFF", "-DCMAKE_BUILD_TYPE=None"]
    subprocess.run([*configure, f"-DCMAKE_CXX_FLAGS={' '.join(FLAGS[1:4])}"], check=True, capture_output=True)
    targets = ["--target", "cutefuse", "cutefuse_host", "-j2"]
    built = subprocess.run(["cmake", "--build", tmp_path, *targets], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    driver, lib = tmp_path / "driver", tmp_path / "lib"
    source = ROOT / "tests/cpp/plugin_sanitizer_driver.cpp"
    link = [f"-L{lib}", "-lcutefuse_host", f"-Wl,-rpath,{lib}"]
    subprocess.run(["g++", *FLAGS, f"-I{ROOT}/plugins", source, "-o", driver, *link], check=True)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    run = [driver, lib / "libcutefuse.so"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, errors="replace")
    reports = [line for line in done.stderr.splitlines() if not line.startswith("cutefuse: ")]
    assert done.returncode == 0, done.stdout + "\n".join(reports[:80])
    assert done.stdout == "192 plugins built\n"
    assert reports == []
