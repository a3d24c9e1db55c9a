"""docs/measured.md holds what benchmarks/page.py makes of benchmarks/results: tables, means, and what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from benchmarks.lib import rows as table_rows
from cutefuse.errors import CutefuseError

FACTS = {"gpu": "G", "torch": "2", "cudnn": 91900, "date": "2026-11-28"}


def network(name: str, plain_us: float, own_us: float, batch: int = 1, **more: Any) -> dict[str, Any]:
    own = {"best_us": own_us, "ratio": own_us / plain_us, "sites": 1, "candidates": 2} | more
    return {"network": name, "batch": batch, "variants": {"plain": {"best_us": plain_us}, "default": own}} | FACTS


def layer(shape: str, time_us: float, variant: str = "ours", **more: Any) -> dict[str, Any]:
    return {"shape": shape, "variant": variant, "time_us": time_us, "warm": True} | more | FACTS


def test_every_table_of_the_page_is_what_its_rows_say() -> None:
    text = page.PAGE.read_text()
    assert page.written(text) == text, "run `python benchmarks/page.py`"


def test_the_page_shows_every_table() -> None:
    kept = json.loads((page.RESULTS / "tables.json").read_text())
    shown = [found[1] for found in page.MARKED.findall(page.PAGE.read_text())]
    assert sorted(shown) == sorted([*page.TABLES, *kept])


def test_another_figure_makes_the_page_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "page.md"
    old.write_text(re.sub(r"\|yolov8n\|\d+\|", "|yolov8n|1|", page.PAGE.read_text()))
    assert page.main([str(old), "--check"]) == 1 and "out of date" in capsys.readouterr().out
    assert "|yolov8n|1|" in old.read_text()
    assert page.main([str(old)]) == 0 and old.read_text() == page.PAGE.read_text()
    assert page.main([str(old), "--check"]) == 0


def test_networks_have_a_column_for_each_number_of_images_and_a_dash_for_what_was_not_measured() -> None:
    rows = [network("a", 100, 50), network("a", 400, 300, batch=8), network("b", 10, 11, predicted=0.5)]
    lines = page.networks(rows)
    assert lines[2:4] == ["|a|100|50|0.500|400|300|0.750|", "|b|10|11|1.100|-|-|-|"]
    assert any("slower: b b1 1.100" in line for line in lines) and any("off: b b1 0.500" in line for line in lines)


def test_packages_are_summed_up_one_by_one_and_together() -> None:
    rows = [network("a", 100, 50, predicted=0.5) | {"package": "p"}, network("b", 100, 200) | {"package": "q"}]
    assert page.packages(rows)[2:] == [
        "|p|1|0.500|a 0.500|a 0.500|1 of 1|",
        "|q|1|2.000|b 2.000|b 2.000|0 of 0|",
        "|all|2|1.000|a 0.500|b 2.000|1 of 1|",
    ]


def test_a_set_names_what_is_slower_and_counts_first_guesses() -> None:
    rows = [layer("s", 3.0), layer("s", 4.0, guess=True), layer("s", 2.0, "cudnn_precat")]
    rows += [layer("t", 1.0, guess=True), layer("t", 2.0, "cudnn_precat"), layer("t", 4.0, "cublaslt")]
    line = page.sets(*[rows] * len(page.SETS))[3]
    assert line == "|latency|2|L2|0.866|s 1.50|0.250|1 of 2|"


def test_of_a_run_with_both_states_of_the_cache_each_set_takes_its_own() -> None:
    rows = [layer("s", us, name) for us, name in ((1.0, "ours"), (2.0, "cudnn_precat"))]
    rows += [layer("s", us, name, warm=False) for us, name in ((4.0, "ours"), (5.0, "cudnn_precat"))]
    conv, latency = page.sets(*[rows] * len(page.SETS))[2:4]
    assert conv.startswith("|conv|1|memory|0.800|") and latency.startswith("|latency|1|L2|0.500|")


def test_machines_are_told_apart_and_versions_are_written_as_people_write_them() -> None:
    rows = [FACTS | {"dtype": "float16"}, FACTS | {"dtype": "float32"}, FACTS | {"gpu": "H", "dtype": "float16"}]
    assert page.machine(rows) == (
        "G, 2026-11-28, torch 2, cuDNN 9.19.0, float16, float32; H, 2026-11-28, torch 2, cuDNN 9.19.0, float16"
    )


@pytest.mark.parametrize("name", ["networks", "nothing"])
def test_rows_and_tables_that_there_are_not_are_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text('{"forms": []}')
    with pytest.raises(CutefuseError, match="cannot be read|there is no table 'nothing'"):
        page.section(name, tmp_path)


def test_a_page_that_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main([str(tmp_path / "none.md")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "none.md" in line


def test_the_rows_in_the_tree_can_be_tabulated() -> None:
    for name in {file for files, _ in page.TABLES.values() for file in files}:
        assert table_rows.read(page.RESULTS / f"{name}.json")
