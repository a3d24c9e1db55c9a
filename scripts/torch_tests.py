"""Run the tests marked `torch`: installs the given CPU torch into this environment first when none is there.

Where no such wheel exists (another Python, no registry) it says so in one line and the tests are left out.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys


def main(requirement: str) -> int:
    if importlib.util.find_spec("torch") is None:
        # --no-deps for torch itself keeps a resolver from pulling CUDA packages; its pure-Python needs follow.
        command = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:"]
        if subprocess.run([*command, "--no-deps", requirement]).returncode != 0:
            print(f"torch tests left out: {requirement} has no wheel for this Python")
            return 0
        subprocess.run(
            [*command, "filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions", "onnxscript"],
            check=True,
        )
    # A file stays in one process: the emulator's tests share a build. Others go on beside it.
    pytest = [sys.executable, "-m", "pytest", "-q", "--durations=10", "-n", "2", "--dist", "loadfile"]
    status = subprocess.run([*pytest, "-m", "torch and not gpu"]).returncode
    return 0 if status == 5 else status  # 5: no test is marked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
