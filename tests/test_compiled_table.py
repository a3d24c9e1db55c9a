"""scripts/compiled_table.py: rows and sums, what fails, and the place of the table in its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cutefuse.engines.tensorrt import rtx
from scripts import compiled_table


def side(copies: int, copied: int, peak_mib: float) -> dict[str, Any]:
    return {
        "copies": copies, "copy_bytes": copied, "all_bytes": 10 * copied, "plugins": copies // 2,
        "engine_bytes": 2_000_000, "seconds": 1.5, "peak_mib": peak_mib,
    }  # fmt: skip


ROWS = [
    {"name": "a", "sm": 89, "plain": side(6, 3_000_000, 300), "patched": side(2, 1_000_000, 250)},
    {"name": "b", "sm": 89, "plain": side(4, 2_000_000, 200), "patched": side(4, 2_000_000, 400)},
    {"name": "c", "sm": 89, "error": "the parser refused it"},
    {"name": "a", "sm": 120, "plain": side(8, 8_000_000, 300), "patched": side(6, 6_000_000, 500)},
]
DATA = {"version": "1.7", "tool": "0.2", "patch": ["--sm", "89"], "command": "python table.py --write", "rows": ROWS}


def test_sums_are_of_one_gpu_leave_out_what_failed_and_memory_is_the_largest() -> None:
    found = compiled_table.totals(ROWS, 89)
    assert found[:9] == ["all", "89", "10", "5.0", "50", "6", "3.0", "30", "3"]
    assert found[9:] == ["4.0→4.0", "3.0→3.0", "300→400"]
    assert compiled_table.cells(ROWS[2])[:3] == ["c", "89", "the parser refused it"]


def test_the_table_is_written_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, source = tmp_path / "page.md", tmp_path / "rows.json"
    monkeypatch.setattr(compiled_table, "PAGE", page)
    source.write_text(json.dumps(DATA))
    page.write_text("before\n<!-- compiled: old -->\n| old |\n<!-- /compiled -->\nafter\n")
    for _ in range(2):  # the second time changes nothing
        assert compiled_table.main(["--from", str(source), "--write"]) == 1  # one model failed
        text = page.read_text()
        assert text.startswith("before\n<!-- compiled: python table.py --write -->\n") and text.endswith("after\n")
        assert "|a|89|6|3.0|" in text and "old" not in text and text.count("|b|") == 1
        assert "|all|89|10|" in text and "|all|120|8|" in text


def test_a_page_without_a_place_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, source = tmp_path / "page.md", tmp_path / "rows.json"
    monkeypatch.setattr(compiled_table, "PAGE", page)
    source.write_text(json.dumps(DATA))
    page.write_text("nothing\n")
    assert compiled_table.main(["--from", str(source), "--write"]) == 2 and page.read_text() == "nothing\n"


@pytest.mark.parametrize(("words", "said"), [(["nosuch"], "nosuch"), (["unet", "--sm", "90"], "9.0")])
def test_what_cannot_be_compiled_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setattr(rtx, "available", lambda: None)
    assert compiled_table.main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
