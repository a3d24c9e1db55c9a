"""Print lists of pyproject.toml: the `dependencies`, and the named extras; what a development checkout installs.

The package itself is run from the checkout, so that `make test` tests the files one edits.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(pyproject: str, wanted: list[str]) -> list[str]:
    """The requirement strings of the lists of these names (tomllib needs Python 3.11)."""
    found = []
    for name in wanted:
        block = re.search(rf"^{name} = \[(.*?)\]", pyproject, re.M | re.S)
        if block is None:
            raise SystemExit(f"error: pyproject.toml has no list '{name}'")
        found += re.findall(r'"([^"]+)"', block.group(1))
    return found


if __name__ == "__main__":
    print(" ".join(requirements((Path(__file__).parent.parent / "pyproject.toml").read_text(), sys.argv[1:])))
