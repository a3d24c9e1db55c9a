"""docs/walkthrough.md: its layouts are what the kernel's headers say, its pictures what the script draws."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from cutefuse.errors import CutefuseError

pytestmark = pytest.mark.xdist_group("walkthrough")  # one program for all of them
ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/walkthrough.md").read_text()
QUOTED = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("walkthrough_draw", ROOT / "docs/walkthrough/draw.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


draw = loaded()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        draw.includes()
    except CutefuseError as missing:
        pytest.skip(str(missing))
    return draw.build(tmp_path_factory.mktemp("walkthrough"))


def printed(program: Path, *words: str) -> list[str]:
    done = subprocess.run([str(program), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.long
def test_the_page_quotes_what_the_kernels_headers_say(program: Path) -> None:
    lines = printed(program)
    assert QUOTED
    for block in QUOTED:
        for line in block.splitlines():
            assert line in lines, f"the page quotes a line that layouts.cpp does not print: {line}"


@pytest.mark.long
def test_the_script_draws_every_picture_of_the_page(program: Path, tmp_path: Path) -> None:
    assert draw.main(["-o", str(tmp_path)]) == 0
    drawn = {p.name: ET.parse(p).getroot() for p in tmp_path.iterdir()}
    kept = {p.name: ET.parse(p).getroot() for p in (ROOT / "docs/images").glob("walkthrough-*.svg")}
    assert set(drawn) == set(kept)
    for name, root in drawn.items():
        labels, old = ([text for e in r.iter() if (text := (e.text or "").strip())] for r in (root, kept[name]))
        assert labels == old, f"{name} shows other labels; run `python docs/walkthrough/draw.py`"


@pytest.mark.long
@pytest.mark.parametrize(
    ("header", "old", "new", "fault"),
    [
        ("conv/sm80/traits.cuh", "Swizzle<(kColumns * kBytes >= 128 ? 3 : 2)", "Swizzle<0", "removes the conflicts"),
        ("conv/sm80/pixels.cuh", "<< (kMaxTaps + s)", "<< s", "a corner has four taps inside"),
    ],
)
def test_a_layout_that_does_not_do_what_the_page_says_is_told(
    program: Path, header: str, old: str, new: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "cutlass_kernels" / header).read_text()
    assert old in text
    changed = tmp_path / "cutlass_kernels" / header
    for path in (ROOT / "cutlass_kernels").rglob("*.[hc]*"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    changed.write_text(text.replace(old, new))
    folders = [tmp_path / "cutlass_kernels", *draw.includes()[1:]]
    monkeypatch.setattr(draw, "includes", lambda: folders)
    done = subprocess.run([str(draw.build(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 1 and re.search(f"WRONG: .*{fault}", done.stdout)


def test_the_pages_pictures_exist_and_no_other() -> None:
    shown = set(re.findall(r"images/(walkthrough-\w+\.svg)", PAGE))
    assert shown == {f"walkthrough-{name}.svg" for name in draw.PICTURES}
    for name in shown:
        root = ET.parse(ROOT / "docs/images" / name).getroot()
        assert root.get("aria-label") and root.tag.endswith("svg")


def test_without_headers_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draw.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    assert draw.main(["-o", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cute/tensor.hpp was not found; ") and not list(tmp_path.iterdir())


def test_without_a_compiler_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no_compiler"))
    with pytest.raises(CutefuseError, match="no C\\+\\+ compiler was found"):
        draw.build(tmp_path)


def test_what_the_compiler_says_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'note: x' >&2; echo 'layouts.cpp:1: error: bad' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(draw, "includes", lambda: [tmp_path])
    with pytest.raises(CutefuseError, match="refused layouts.cpp: layouts.cpp:1: error: bad"):
        draw.build(tmp_path)
