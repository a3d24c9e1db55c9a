"""The table of published packages: failures of every kind are told, and its counts add up."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import models
from cutefuse.errors import CutefuseError
from models import table
from models.packages import NETWORKS, wanted
from models.packages import __main__ as command
from models.packages.page import END, HEADINGS, START, part, row, tail, whole

PAGE = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
LINE: dict[str, Any] = {
    "package": "timm", "version": "1.0", "name": "net", "dynamo": False, "inputs": [[1, 3, 8, 8], [1]], "candidates": 7,
    "fused": 3, "merged": 1, "refused": 3, "refused_by": {"groups": 2, "not 2-D": 1}, "taken": 1, "left_out": 2,
    "nodes_before": 20, "nodes_after": 9, "ops": {"Conv": 4}, "error": "1.0e-06",
}  # fmt: skip


def network(_package: str, _name: str, _dynamo: bool, path: Path) -> list[list[int]]:
    onnx.save(models.build("hrnet_head", "float32", small=True, batch=1), str(path))
    return [[1, 3, 8, 8]]


def fail(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


@pytest.fixture(autouse=True)
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "version", lambda _: "1.0")


def test_a_network_is_patched_and_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "export", network)
    line = command.measure("timm", "net", False)
    assert (line["candidates"], line["fused"], line["proven"]) == (1, 1, 1) and float(line["error"]) < 1e-5
    assert line["taken"] + line["left_out"] == 1 and "traceback" not in line
    assert "1 exports: 0 outputs that differ, 0 tracebacks, 0 refused as a whole" in part([line])


@pytest.mark.parametrize(
    ("where", "error", "told"),
    [
        ("export", ValueError("no such\noperator"), "- not exported: timm net: ValueError: no such\n"),
        ("patch", CutefuseError("the model is odd"), "- refused as a whole: timm net: the model is odd\n"),
        ("patch", KeyError("x"), "- tracebacks: timm net: KeyError: 'x'\n"),
    ],
)
def test_a_failure_is_told_and_ends_nothing(
    where: str, error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "export", network)
    monkeypatch.setattr(command, where, fail(error))
    line = command.measure("timm", "net", False)
    exports = 1 if where == "export" else 2
    assert told in part([line, LINE]) and f"| timm 1.0 | {exports} | 1/2 | 7/3/1/3 |" in part([line, LINE])


def test_outputs_that_differ_are_counted_and_named() -> None:
    text = part([LINE, LINE | {"error": "**differs**", "name": "bad", "dynamo": True}])
    assert "2 exports: 1 outputs that differ, 0 tracebacks" in text and "| **differs** |" in text
    assert "- outputs that differ: timm bad (dynamo)\n" in text


def test_a_row_sums_up_a_package() -> None:
    other = LINE | {"name": "two", "refused_by": {"types": 1, "groups": 5, "a": 9, "b": 8}, "error": "2.0e-05"}
    cells = "timm 1.0 | 2 | 2/4 | 14/6/2/6 | 9 a, 8 b, 7 groups | 2.0e-05"
    assert row([LINE, other]) == f"| {cells} |\n" and len(cells.split(" | ")) == len(HEADINGS)
    assert row([LINE | {"refused_by": {}, "error": "-"}]).endswith("| - | - |\n")


def test_the_part_is_written_anew_behind_the_rest_of_the_page() -> None:
    page = "# Title\n\n| a | 17 |\n"
    once = whole(page, [LINE])
    assert once.startswith(page) and once.endswith(END) and "**1 exports: " in once
    assert whole(once, [LINE]) == once and tail(once) == once[once.index(START) :] and tail(page) == ""


def test_the_first_table_is_written_anew_before_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "sources", lambda: iter(()))
    page = tmp_path / "page.md"
    page.write_text(whole("# Old\n", [LINE]))
    table.write(page)
    assert (
        page.read_text().startswith(table.HEADER) and tail(page.read_text()) == START + part([LINE]).partition(START)[2]
    )
    page.unlink()
    table.write(page)
    assert START not in page.read_text()


def test_what_was_measured_is_kept_and_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, page = tmp_path / "lines.jsonl", tmp_path / "page.md"
    have = LINE | {"package": "monai", "name": "UNet"}
    lines.write_text(json.dumps(have) + "\n")
    page.write_text("# Title\n")
    measured: list[tuple[str, str, bool]] = []

    def measure(*one: Any) -> dict[str, Any]:
        measured.append(one)
        return LINE | dict(zip(("package", "name", "dynamo"), one, strict=True))

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    argv = ["monai/UNe*", "--packages", str(tmp_path), "--lines", str(lines), "--page", str(page)]
    assert command.main(argv) == 0
    assert measured == [w for w in wanted() if w[0] == "monai" and w[1].startswith("UNe")][1:]
    assert (
        len(lines.read_text().splitlines()) == 1 + len(measured)
        and f"| monai 1.0 | {1 + len(measured)} |" in page.read_text()
    )
    assert command.main(argv) == 0 and len(lines.read_text().splitlines()) == 1 + len(measured)


def test_files_are_written_whole_and_what_cannot_be_exported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(package: str, name: str, dynamo: bool, path: Path) -> None:
        path.write_text(f"{package} {name} {dynamo}")
        if name == "UNETR":
            raise RuntimeError("no such operator\nmore")

    monkeypatch.setattr(command, "export", export)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    argv = ["monai/UNe*", "monai/UNETR", "--packages", str(tmp_path), "--onnx", str(tmp_path / "files")]
    assert command.main(argv) == 0
    found = {p.name: p.read_text() for p in (tmp_path / "files").iterdir()}
    assert found == {f"monai-{n}.onnx": f"monai {n} False" for n in ("UNet", "UNet3d")}
    assert capsys.readouterr().out == "monai/UNETR: RuntimeError: no such operator\n"


def test_a_pattern_of_no_network_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["monai/none", "--onnx", str(tmp_path / "files")]) == 2
    assert "no network is called monai/none" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_without_torch_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert command.main(["--lines", str(tmp_path / "l"), "--page", str(tmp_path / "p")]) == 2
    assert "install torch and onnxscript" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("torch", "pinned"), [("2.13.0+cpu", "torchvision==0.28.*"), ("2.4.1", "torchvision==0.19.*"),
                                               ("3.0.0", "torchvision")])  # fmt: skip
def test_pip_fetches_the_torchvision_of_this_torch(
    torch: str, pinned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[list[str]] = []

    def pip(command: list[str]) -> subprocess.CompletedProcess[str]:
        typed.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(command, "version", lambda _: torch)
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(CutefuseError, match="could not fetch"):
        command.fetch(tmp_path)
    assert pinned in typed[0] and "--no-deps" in typed[0] and str(tmp_path) in typed[0] and "torch" not in typed[0]


def test_the_page_has_no_fault_and_its_counts_add_up() -> None:
    told = tail(PAGE)
    found = re.search(r"\*\*(\d+) exports: 0 outputs that differ, 0 tracebacks, 0 refused", told)
    assert found and int(found[1]) >= 100
    rows = [line.split(" | ") for line in told.splitlines() if re.match(r"\| \S+ [\d.]+ \|", line)]
    assert {cells[0].split()[1].replace("-", "_") for cells in rows} == set(NETWORKS)
    assert sum(int(cells[1]) for cells in rows) == int(found[1])
    for cells in rows:
        candidates, fused, merged, refused = map(int, cells[3].split("/"))
        assert candidates == fused + merged + refused and re.fullmatch(r"\d\.\de[-+]\d+ \|", cells[5]), cells
    assert "other reasons" not in told
