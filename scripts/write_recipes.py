#!/usr/bin/env python3
"""Type the commands of docs/recipes.md in a folder of their own and write into the page what they print.

A block of Python whose first line is `# name.py` becomes that file. The comment before a block of commands names what a
line must hold to be shown; `...` stands for the others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
BLOCK = re.compile(
    r"(?:^<!-- shown: (?P<shown>.*?) -->\n)?^```(?P<kind>console|python)\n(?P<body>.*?)^```", re.M | re.S
)


def shown(output: str, words: list[str]) -> list[str]:
    """The lines that hold one of the words, all of them without words; `...` for a run of others."""
    lines: list[str] = []
    for line in map(str.rstrip, output.splitlines()):
        if not words or any(word in line for word in words):
            lines.append(line)
        elif lines[-1:] != ["..."]:
            lines.append("...")
    return lines


def typed(page: str, folder: Path, run: Callable[[str], str]) -> str:
    """The page with the outputs of its commands; `run` types one line in `folder` and returns its stdout."""

    def block(found: re.Match[str]) -> str:
        head, body = found[0].partition("```")[0], found["body"]
        if found["kind"] == "python":
            (folder / body.splitlines()[0].removeprefix("# ")).write_text(body)
            return found[0]
        lines = []
        for command in re.findall(r"^\$ (.*)$", body, re.M):
            lines += [f"$ {command}", *shown(run(command), (found["shown"] or "").split())]
        return "\n".join([f"{head}```console", *lines, "```"])

    return BLOCK.sub(block, page)


def main() -> int:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:

        def run(line: str) -> str:
            environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
            print(f"{done.returncode}  {line}", *done.stderr.splitlines()[-3:], sep="\n     ", file=sys.stderr)
            return done.stdout

        PAGE.write_text(typed(PAGE.read_text(), Path(folder), run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
