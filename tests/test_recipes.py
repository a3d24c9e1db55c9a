"""docs/recipes.md shows commands and what they print: each is typed again, and prints the words that it shows."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from test_typed import terminal  # noqa: F401  the fixture: an environment with the command

from cutefuse.engines.cuda_memory import local_sm
from scripts.write_recipes import BLOCK, PAGE, shown, typed


def unsaid(page: str) -> list[str]:
    """What blocks of a typed page should show, where none of it was printed."""
    blocks = [(found["shown"] or "", re.sub(r"(?m)^\$ .*$", "", found["body"])) for found in BLOCK.finditer(page)]
    return [words for words, body in blocks if words and not any(word in body for word in words.split())]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(local_sm() > 0, reason="the page was written on a machine without a GPU")
def test_every_command_of_the_page_runs_and_prints_the_words_that_it_shows(terminal, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("torch")

    def run(line: str) -> str:
        environment = {**os.environ, "PATH": terminal.path}
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 3) and "Traceback" not in done.stderr, f"{line}\n{done.stderr}"
        return done.stdout

    assert unsaid(typed(PAGE.read_text(), tmp_path, run)) == [], "run scripts/write_recipes.py"


def test_the_page_as_it_stands_shows_its_words() -> None:
    assert BLOCK.search(PAGE.read_text()) and unsaid(PAGE.read_text()) == []


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
    assert typed(page, tmp_path, said.__getitem__) == page and unsaid(page) == []


def test_a_word_that_is_not_printed_any_more_is_seen(tmp_path: Path) -> None:
    page = typed(PAGE_OF_TWO, tmp_path, {"count 3": "one\nthree\n", "hush": "quiet"}.__getitem__)
    assert unsaid(page) == unsaid(PAGE_OF_TWO) == ["two"]
    assert unsaid(page.replace("$ count 3", "$ count two")) == ["two"], "a command is no output"


def test_without_words_every_line_is_shown() -> None:
    assert shown("a\nb\n", []) == ["a", "b"] and shown("a\nb\n", ["c"]) == ["..."]
