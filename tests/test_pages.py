"""The documents: their length, and that every command, option and path that they name exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
MOST_WORDS = 30_000
LIMITS = {
    "README.md": 1300,
    "design.md": 5000,
    "measured.md": 4000,
    "verified.md": 600,
    "CONTRIBUTING.md": 700,
} | dict.fromkeys(("wrong_result.md", "slow_result.md", "adding.md", "release.md"), 400)
COMMAND = re.compile(
    r"(?:python|python3) (benchmarks/\w+\.py|scripts/\w+\.py|docs/\w+/\w+\.py|-m models[.\w]*)([^\n`]*)"
)
FOLDERS = "cutlass_kernels|plugins|cutefuse|scripts|models|benchmarks|docs|tests|cmake|docker"


def test_all_documents_together_can_be_read() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository")
    words = {name: len((ROOT / name).read_text().split()) for name in listed.stdout.split() if (ROOT / name).exists()}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:8]


@pytest.mark.parametrize("name", LIMITS)
def test_a_page_keeps_to_its_length(name: str) -> None:
    assert len(TEXT[name].split()) <= LIMITS[name]


@pytest.mark.parametrize("name", TEXT)
def test_make_targets_that_a_page_names_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", TEXT[name], re.M)) <= targets


def options_of(script: str) -> set[str]:
    """The options of a script or module, read from its source and from the package that it enters."""
    if script.startswith("-m "):
        path = ROOT / script.removeprefix("-m ").replace(".", "/")
        source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    else:
        source = ROOT / script
    assert source.is_file(), script
    text = source.read_text()
    for command in re.findall(r"from cutefuse\.(?:commands|cli) import (\w+)", text):
        text += "".join(p.read_text() for p in (ROOT / "cutefuse").glob(f"**/{command}.py"))
    return set(re.findall(r"--[a-z][a-z0-9-]*", text)) | {"--help"}


@pytest.mark.parametrize("name", TEXT)
def test_scripts_and_options_that_a_page_names_exist(name: str) -> None:
    for script, rest in COMMAND.findall(TEXT[name].replace("\\\n", " ")):
        known = options_of(script)
        if script.startswith("scripts/") and script not in ("scripts/write_recipes.py", "scripts/make_models.py"):
            continue  # thin entries: their commands are judged in test_typed.py
        asked = set(re.findall(r"--[a-z][a-z0-9-]*", rest.partition("#")[0]))
        assert asked <= known, f"{script} has no {asked - known}"


@pytest.mark.parametrize("name", TEXT)
def test_paths_that_a_page_names_exist(name: str) -> None:
    quoted = [word for span in re.findall(r"`([^`\n]+)`", TEXT[name]) for word in span.split()]
    named = [w.rstrip(".,:;)") for w in quoted if re.match(rf"({FOLDERS})/[\w./-]+$", w)]
    gone = [path for path in named if not (ROOT / path).exists()]
    # Files that a command makes, and one that only another commit has.
    assert [path for path in gone if not re.search(r"NAME|docs/history/", path)] == []


def test_a_page_that_names_what_there_is_not_is_told() -> None:
    with pytest.raises(AssertionError, match="none.py"):
        options_of("benchmarks/none.py")
    assert "--cold" in options_of("benchmarks/concat_conv.py") and "--lines" in options_of("-m models.packages")
    assert "--nothing" not in options_of("benchmarks/concat_conv.py")
