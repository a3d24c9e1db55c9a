"""Fetch TensorRT's lean runtimes, whose plugin registry tests/test_registry.py asks: 45 MB each, into build/lean.

They need no GPU and are installed nowhere, since two versions do not fit into one environment. Where pip cannot fetch
one, this says so in one line, and its tests are left out.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build/lean"
VERSIONS = ("10.16.1.11", "11.0.0.114", "11.2.1.2", "11.4.0.106")
PACKAGES = ("tensorrt-lean-cu13-libs", "tensorrt-lean-cu13-bindings")
SECONDS = 300


def fetch(version: str, folder: Path) -> str:
    """Unpack one version into a folder of its own; "" or why that failed."""
    whole = folder / version
    if whole.is_dir():
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheels, unpacked = Path(scratch) / "wheels", Path(scratch) / "unpacked"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
        try:
            done = subprocess.run(
                [*command, *(f"{p}=={version}" for p in PACKAGES)], capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"pip took more than {SECONDS} s"
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(unpacked)
        unpacked.rename(whole)
    return ""


def main() -> int:
    if sys.platform != "linux":
        print(f"registry tests left out: TensorRT's lean runtime comes for Linux, and this is {platform.system()}")
        return 0
    for version in VERSIONS:
        if reason := fetch(version, FOLDER):
            print(f"registry tests of TensorRT {version} left out: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
