"""docs/recipes.md shows what its commands print: they are typed again, and only figures may differ."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from test_typed import terminal  # noqa: F401  the fixture: an environment with the command

from cutefuse.engine.device import local_sm
from scripts.write_recipes import PAGE, shown, typed


def worded(page: str) -> list[str]:
    """The lines of a page without figures, which versions and machines change, and without the widths of columns."""
    return [" ".join(re.sub(r"\d[\d.]*(e-?\d+)?", "#", line).split()) for line in page.splitlines()]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(local_sm() > 0, reason="the page was written on a machine without a GPU")
def test_the_page_shows_what_is_printed(terminal, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("torch")

    def run(line: str) -> str:
        environment = {**os.environ, "PATH": terminal.path}
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 3) and "Traceback" not in done.stderr, f"{line}\n{done.stderr}"
        return done.stdout

    page = PAGE.read_text()
    assert worded(typed(page, tmp_path, run)) == worded(page), "run scripts/write_recipes.py"


PAGE_OF_TWO = """a
<!-- shown: two -->
```console
$ count 3
one
$ hush
```
```python
# f.py
x = 1
```
"""


def test_outputs_are_written_under_their_commands_and_files_beside_them(tmp_path: Path) -> None:
    said = {"count 3": "one\ntwo 2\nthree\nfour\n", "hush": ""}
    page = typed(PAGE_OF_TWO, tmp_path, said.__getitem__)
    assert page == PAGE_OF_TWO.replace("one\n", "...\ntwo 2\n...\n")
    assert (tmp_path / "f.py").read_text() == "# f.py\nx = 1\n"
    assert typed(page, tmp_path, said.__getitem__) == page


def test_another_word_is_seen_and_another_figure_is_not() -> None:
    assert worded("x  1.5 us, 3e-05") == worded("x 22 us, 0") != worded("x 22 ms, 0")


def test_without_words_every_line_is_shown() -> None:
    assert shown("a\nb\n", []) == ["a", "b"] and shown("a\nb\n", ["c"]) == ["..."]
