"""The README's commands run, its options exist, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = "\n".join(re.findall(r"^```\w*\n(.*?)^```", README, re.M | re.S))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small demo model under the README's name, model.onnx."""
    out = tmp_path_factory.mktemp("readme")
    make = [sys.executable, str(ROOT / "scripts/make_models.py"), "--out", str(out), "--small", "yolo_neck"]
    subprocess.run(make, check=True, capture_output=True, env=ENVIRONMENT)
    (out / "yolo_neck-float32.onnx").rename(out / "model.onnx")
    return out


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One command line of the README, without its comment, as a module of this Python."""
    words = line.split("#")[0].split()
    words = [sys.executable, "-m", *words] if words[0] == "cutefuse" else [sys.executable, *words[1:]]
    return subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def lines(start: str) -> list[str]:
    found = [line for line in BLOCKS.splitlines() if line.startswith(start)]
    assert found, f"the README shows no command '{start}'"
    return found


@pytest.mark.slow
def test_the_commands_run_as_shown(folder: Path) -> None:
    patch, again = lines("cutefuse patch")
    assert again.split("#")[0] == patch.split("#")[0] and "--dtype fp16" in patch
    done = run(patch, folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "model.cutefuse.onnx").is_file() and (folder / "model.patch.json").is_file()
    (build,) = lines("cutefuse build")
    done = run(f"{build.split('#')[0]} --dry-run", folder)
    assert done.returncode == 0 and "--dynamicPlugins=" in done.stdout, done.stderr
    (process,) = lines("cutefuse process")
    done = run(process, folder)
    assert done.returncode == 0, done.stderr
    assert list((folder / "out").glob("*.report.html"))
    (optimize,) = lines("cutefuse optimize")
    done = run(f"{optimize.split('#')[0]} --dry-run", folder)
    assert done.returncode == 0 and "candidates" in done.stdout, done.stderr


SOURCES = [
    "benchmarks",
    "calibration",
    "cutefuse",
    "cutefuse_host",
    "cutlass_kernels",
    "models",
    "plugins",
    "scripts",
    "docs",
    "tests",
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text())
    local = [(page.parent / target if target else page, anchor) for target, anchor in links if ":" not in target]
    assert [str(target) for target, _ in local if not target.exists()] == []
    assert [anchor for target, anchor in local if anchor and anchor not in anchors(target)] == []


def test_pages_of_documents_are_linked_from_the_readme_or_from_each_other() -> None:
    linked = {(page.parent / t).resolve() for page in PAGES for t in re.findall(r"\]\(([^)#\s]+)", page.read_text())}
    assert [str(page) for page in PAGES if page.parent != ROOT and page not in linked] == []


def test_source_files_that_the_pages_name_exist() -> None:
    present = {path.name for folder in SOURCES for path in (ROOT / folder).rglob("*.*")}
    named = {name for page in PAGES for name in re.findall(r"\b[a-z]\w*\.(?:cuh?|cpp|h|py)\b", page.read_text())}
    assert "op.h" in named
    written = set(re.findall(r"^# (\w+\.py)$", (ROOT / "docs/recipes.md").read_text(), re.M))  # by its reader
    assert named - present - written == set()


def test_the_picture_shows_the_tables_times(tmp_path: Path) -> None:
    from scripts import draw_gain

    before_us, after_us = draw_gain.times_us(README, draw_gain.NETWORK)
    assert 0 < after_us < before_us
    assert draw_gain.PICTURE.read_text() == draw_gain.drawn(draw_gain.NETWORK, before_us, after_us)
    widths = [
        float(w) for w in re.findall(r'class="(?:before|after)".*? width="([\d.]+)"', draw_gain.PICTURE.read_text())
    ]
    assert widths[1] / widths[0] == pytest.approx(after_us / before_us, abs=0.01)
    with pytest.raises(ValueError, match="no row 'nobody'"):
        draw_gain.times_us(README, "nobody")


def test_each_gpu_family_and_engine_is_measured_predicted_or_compiled() -> None:
    rows = re.findall(r"^\| ((?:PyTorch|TensorRT)[^|]*) \| (.*) \|$", README, re.M)
    assert len(rows) == 3
    for name, cells in rows:
        kinds = [re.fullmatch(r"(\*\*)?0\.\d\d(\*\*)?|1\.00|\d+→\d+|-", cell.strip()) for cell in cells.split("|")]
        assert len(kinds) == 8 and all(kinds), name
        assert ("**" in cells) == (name == "PyTorch"), "nothing else was measured"
        assert ("→" in cells) == ("RTX" in name), "copies are counted in compiled engines alone"
