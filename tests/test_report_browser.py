"""Pages in a real browser: no script errors, no request, light and dark, narrow and wide. Skipped without Chromium."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import engine_files as ef
import pytest

from cutefuse.report.write import write, write_compare

DATA = Path(__file__).parent / "data" / "engines"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


def chromium(tmp_path: Path, *arguments: str) -> str:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout + "\n" + done.stderr


def screenshot(tmp_path: Path, page: Path, name: str, width: int, height: int, dark: bool = False) -> Path:
    """A PNG of the page; kept in $CUTEFUSE_SCREENSHOTS when that is set (docs/images is made so)."""
    folder = Path(os.environ.get("CUTEFUSE_SCREENSHOTS", tmp_path))
    target = folder / name
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    chromium(tmp_path, f"--window-size={width},{height}", f"--screenshot={target}", *theme, page.as_uri())
    return target


def test_the_script_builds_the_table_and_places_the_graph(tmp_path: Path) -> None:
    page = write(DATA / "resnet18-a100-fp16", tmp_path, quiet=True)
    dom = chromium(tmp_path, "--dump-dom", "--enable-logging=stderr", page.as_uri())
    assert "Uncaught" not in dom and "SyntaxError" not in dom
    body = dom[dom.index("<tbody></tbody>") if "<tbody></tbody>" in dom else dom.index('id="rows"') :]
    assert len(re.findall(r'<tr data-i="\d+"', body)) == 36
    assert "36 of 36 layers" in dom
    assert re.search(r'<svg[^>]*viewBox="-?[\d.]+ 0 1\d\d\d [\d.]+"', dom)


def test_nothing_is_requested_from_the_network(tmp_path: Path) -> None:
    page = write(DATA / "resnet18-a100-fp16", tmp_path, quiet=True)
    log = tmp_path / "net.json"
    chromium(tmp_path, f"--log-net-log={log}", "--dump-dom", page.as_uri())
    requests = set(re.findall(r'"url":"(https?://[^"]+)"', log.read_text(errors="replace")))
    assert not {r for r in requests if "google" not in r and "gvt1" not in r}


@pytest.mark.parametrize(("width", "height", "dark"), [(1240, 1500, False), (1240, 1500, True), (390, 1500, False)])
def test_pages_render_in_every_shape(tmp_path: Path, width: int, height: int, dark: bool) -> None:
    page = write(DATA / "resnet50-rtx3090-fp32", tmp_path, quiet=True)
    name = f"report{'-dark' if dark else ''}{'-phone' if width < 500 else ''}.png"
    png = screenshot(tmp_path, page, name, width, height, dark)
    assert png.stat().st_size > 20_000  # a blank page of this size has less than 10 kB


def test_a_comparison_renders(tmp_path: Path) -> None:
    write_compare(list(ef.write_pair(tmp_path)), page := tmp_path / "compare.html")
    dom = chromium(tmp_path, "--dump-dom", "--enable-logging=stderr", page.as_uri())
    assert "Uncaught" not in dom
    assert screenshot(tmp_path, page, "compare.png", 1240, 900).stat().st_size > 20_000


def asked(tmp_path: Path, page: Path, script: str, width: int) -> Any:
    """What a script says of the page, in a window of this width."""
    told = f"<script>addEventListener('load', () => document.body.dataset.told = JSON.stringify({script}))</script>"
    copy = tmp_path / "asked.html"
    copy.write_text(page.read_text() + told)
    dom = chromium(tmp_path, f"--window-size={width},900", "--dump-dom", copy.as_uri())
    return json.loads(html.unescape(re.search(r'data-told="([^"]*)"', dom)[1]))  # type: ignore[index]


OUTSIDE = """(() => {
  const bad = [], wide = innerWidth;
  for (const cell of document.querySelectorAll("td")) {
    if (cell.textContent.trim() === "" || cell.closest("details:not([open])")) continue;
    const box = cell.getBoundingClientRect();
    if (!box.width || box.left < 0 || box.right > wide + 1 || cell.scrollWidth > cell.clientWidth + 1)
      bad.push(cell.textContent.slice(0, 40));
  }
  const told = [...document.querySelectorAll("#rows tbody td")].map(c => c.dataset.h);
  return [document.documentElement.scrollWidth - wide, bad, [...new Set(told)]];
})()"""


@pytest.mark.parametrize("width", [390, 1400])
def test_tables_keep_their_columns_inside_of_the_window(tmp_path: Path, width: int) -> None:
    for folder in ("resnet18-a100-fp16", "resnet50-rtx3090-fp32"):
        page = write(DATA / folder, tmp_path, quiet=True)
        beyond, outside, headings = asked(tmp_path, page, OUTSIDE, width)
        assert beyond <= 0 and (outside == [] or width > 700), outside[:5]
        assert {"layer", "type", "math", "µs", "%", "output", "format", "GFLOP", "MiB", "GB/s", "% roof"} <= set(
            headings
        )
    write_compare(list(ef.write_pair(tmp_path)), page := tmp_path / "compare.html")
    beyond, outside, _ = asked(tmp_path, page, OUTSIDE, width)
    assert beyond <= 0 and outside == []


OVERLAPS = """(() => {
  const all = [...document.querySelectorAll("#graph .g-l, #graph .g-io")].map(e => [e.textContent, e.getBBox()]);
  const across = (p, q) => p.x < q.x + q.width && q.x < p.x + p.width;
  const meet = (p, q) => across(p, q) && p.y + 2 < q.y + q.height && q.y + 2 < p.y + p.height;
  return [all.length, all.flatMap((a, i) => all.slice(i + 1).filter(b => meet(a[1], b[1])).map(b => [a[0], b[0]]))];
})()"""


@pytest.mark.parametrize("folder", sorted(p.name for p in DATA.iterdir() if p.is_dir()))
def test_no_label_of_the_graph_lies_on_another_as_it_is_drawn(tmp_path: Path, folder: str) -> None:
    count, overlaps = asked(tmp_path, write(DATA / folder, tmp_path, quiet=True), OVERLAPS, 1400)
    assert count > 20 and overlaps == []
