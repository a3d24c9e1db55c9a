"""Make `cutefuse` a command of this Python's environment, and `import cutefuse` work from any folder.

Both use the files of this checkout. It comes last on the path, so that PYTHONPATH and the current folder, where another
checkout may be worked on, go before it. `pip install -e` would put it first, and compile the kernels.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A shell reads the first lines, Python takes them for a string: a path may hold spaces and be of any length.
COMMAND = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys

from cutefuse.cli import main

sys.exit(main())
"""


def link(packages: Path, scripts: Path, python: str) -> Path:
    """Write a .pth file into `packages` and the command into `scripts`; returns the command's path."""
    (packages / "cutefuse_checkout.pth").write_text(f"{ROOT}\n")
    command = scripts / "cutefuse"
    command.write_text(COMMAND.format(python=python))
    command.chmod(0o755)
    return command


if __name__ == "__main__":
    print(f"command: {link(Path(sysconfig.get_path('purelib')), Path(sysconfig.get_path('scripts')), sys.executable)}")
