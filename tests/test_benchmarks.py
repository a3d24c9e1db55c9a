"""The benchmark harness without a GPU: tables, targets, drawings, choice of tiles, peers that cannot be built."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
import sys
import types
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import problems
import pytest

from benchmarks import concat_conv, launch_cost, torch_calls, torch_fuse
from benchmarks.lib import cutlass_peers, markdown, peers, plots, table, targets, timing
from benchmarks.lib import rows as table_rows
from cutefuse.errors import CutefuseError

MACHINE = {"gpu": "Some GPU", "torch": "2.0", "cuda": "13.0", "cudnn": 91900, "dtype": "float16"}

CLOCKS = {"sm_mhz": 1980, "memory_mhz": 3201, "temperature_c": 51}


def row(shape: str, variant: str, time_us: float | None, **more: Any) -> dict[str, Any]:
    """A row of 1 GFLOP and 1 MB with a floor of 2 us."""
    common = {"shape": shape, "variant": variant, "floor_us": 2.0, "gflop": 1.0, "mbytes": 1.0, "K": 64, "R": 3, "S": 3}
    timed = {} if time_us is None else {"time_us": time_us, "tflops": 1e3 / time_us, "gbytes_s": 1e3 / time_us}
    return MACHINE | common | timed | more


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [
        row("a", "ours", 5.0, tile="slow", guess=True),
        row("a", "ours", 4.0, tile="fast", guess=False),
        row("a", "ours_sm80", 9.0, tile="old", guess=True),
        row("a", "eager", 10.0),
        row("a", "compile", 8.0),
        row("a", "cudnn_precat", 5.0),
        row("a", "cutlass2", 10.0),
        row("a", "cat_cutlass2", 18.0),
        row("b", "ours", 16.0, tile="fast", guess=True),
        row("b", "eager", 8.0),
        row("b", "cudnn_precat", None, failure="RuntimeError: no"),
    ]


class TestTable:
    def test_the_fastest_tile_stands_for_ours_and_the_guess_is_kept(self, rows: list[dict[str, Any]]) -> None:
        shapes = table.by_shape(rows)
        assert shapes["a"]["ours"]["tile"] == "fast" and shapes["a"]["guess"]["tile"] == "slow"
        assert table.guess_loss(shapes["a"]) == 1.25

    def test_a_tile_of_the_ampere_path_is_no_guess_of_ours(self, rows: list[dict[str, Any]]) -> None:
        assert table.by_shape(rows[::-1])["a"]["guess"]["tile"] == "slow"

    def test_ratios_take_the_fastest_peer(self, rows: list[dict[str, Any]]) -> None:
        found = table.ratios(table.by_shape(rows), "ours / best unfused peer")
        assert found == {"a": 0.5, "b": 2.0}
        assert table.geometric_mean(found.values()) == pytest.approx(1.0)

    def test_a_failed_peer_has_no_ratio(self, rows: list[dict[str, Any]]) -> None:
        assert table.ratios(table.by_shape(rows), "ours / cuDNN on the pre-concatenated tensor") == {"a": 0.8}

    def test_no_value_has_no_mean(self) -> None:
        assert math.isnan(table.geometric_mean([]))

    def test_text_names_what_failed_and_leaves_unmeasured_ratios_out(self, rows: list[dict[str, Any]]) -> None:
        text = table.text(rows)
        assert "cudnn_precat: RuntimeError: no (b)" in text
        assert "geometric mean 1.000, worst 2.00 (b)" in text and "/cutlass3" not in text

    def test_warm_caches_have_columns_of_their_own(self, rows: list[dict[str, Any]]) -> None:
        warm = [row("a", "ours", 2.0, warm=True, tile="small"), row("a", "cudnn_precat", 4.0, warm=True)]
        heading, line, *more = table.cells(rows + warm)
        assert not more, "b was not timed warm"
        found = dict(zip(heading, line, strict=True))
        assert found["ours"] == "4.0" and found["/precat"] == "0.80" and found["tile"] == "fast"
        assert found["warm ours"] == "2.0" and found["warm /precat"] == "0.50" and found["warm tile"] == "small"
        assert any("warm: geometric mean 0.500" in line for line in table.summary(rows + warm))

    def test_rows_without_ours_are_tabulated(self) -> None:
        assert "nan" not in table.text([row("a", "eager", 3.0)])


class TestTargets:
    def verdict(self, rows: list[dict[str, Any]], begins: str) -> targets.Verdict:
        (found,) = [v for v in targets.verdicts(rows) if v.target.startswith(begins)]
        return found

    def test_a_mean_is_judged_against_its_limit(self, rows: list[dict[str, Any]]) -> None:
        assert self.verdict(rows, "ours / best unfused peer: geometric").reached is False
        assert self.verdict(rows[:8], "ours / best unfused peer: geometric").reached is True

    def test_every_shape_above_is_named(self, rows: list[dict[str, Any]]) -> None:
        found = self.verdict(rows, "ours / best unfused peer: < 1.00")
        assert found.reached is False and found.measured == "1 of 2 above: b 2.00"

    def test_level_is_not_faster(self) -> None:
        level = [row("a", "ours", 2.0), row("a", "eager", 2.0), row("a", "cudnn_precat", 2.0)]
        assert self.verdict(level, "ours / best unfused peer: < 1.00").reached is False
        assert self.verdict(level, f"{targets.PRECAT}: <= 1.00 on every").reached is True

    def test_the_ampere_path_is_judged_by_its_own_rows(self, rows: list[dict[str, Any]]) -> None:
        assert self.verdict(rows, f"{targets.SM80}: geometric").measured.startswith("0.900")
        assert self.verdict(rows, f"{targets.SM80_CAT}: geometric").reached is True

    def test_what_was_not_measured_is_not_judged(self) -> None:
        assert {v.reached for v in targets.verdicts([row("a", "eager", 3.0)])} == {None}

    def test_a_run_of_guesses_alone_says_nothing_about_the_guess(self) -> None:
        assert self.verdict([row("a", "ours", 4.0, guess=True)], "first guess").reached is None

    def test_memory_bound_shapes_need_their_share_of_the_bandwidth(self) -> None:
        slow = row("a", "ours", 1.0, R=1, S=1, gflop=0.001, mbytes=1000.0, gbytes_s=3000.0)
        assert self.verdict([slow], "memory-bound").reached is False
        assert self.verdict([slow | {"gbytes_s": 4000.0}], "memory-bound").reached is True

    def test_warm_rows_are_judged_by_targets_of_their_own(self, rows: list[dict[str, Any]]) -> None:
        warm = [row("a", "ours", 5.0, warm=True), row("a", "cudnn_precat", 5.5, warm=True)]
        slow = [*warm, row("a", "cublaslt", 4.0, warm=True)]
        target = "ours / cuBLASLt on the pre-concatenated tensor: <= 1.00 on every shape, warm"
        assert self.verdict(slow, target).measured == "1 of 1 above: a 1.25"
        assert self.verdict(warm, target).reached is None
        assert self.verdict(rows + warm, f"{targets.PRECAT}, warm: geometric").reached is False
        assert self.verdict(rows + warm, f"{targets.PRECAT}: geometric").measured.startswith("0.800")

    def test_rates_and_times_have_limits(self) -> None:
        assert self.verdict([row("unet_up4_b8", "ours", 1.0, tflops=719.9)], "unet_up4_b8").reached is False
        assert self.verdict([row("unet_up4_b8", "ours", 1.0, tflops=720.0)], "unet_up4_b8").reached is True
        assert self.verdict([row("raft_gru_1x5_b1", "ours", 3.3)], "raft_gru").reached is False
        assert self.verdict([row("raft_gru_1x5_b1", "ours", 3.1)], "raft_gru").reached is True


class TestFiles:
    def test_markdown_holds_machine_shapes_targets_and_failures(self, rows: list[dict[str, Any]]) -> None:
        text = markdown.text(rows)
        assert "Some GPU, driver unknown" in text and "|a|2.0|4.0|" in text
        assert "|**no**|" in text and "- cudnn_precat: RuntimeError: no (b)" in text
        widths = {line.count("|") for line in text.split("\n\n")[1].splitlines()}
        assert len(widths) == 1

    def test_the_drawing_is_svg_with_every_measured_row(self, rows: list[dict[str, Any]]) -> None:
        root = ET.fromstring(plots.svg(rows))
        space = "{http://www.w3.org/2000/svg}"
        assert len(root.findall(f"{space}circle")) == 10 - 1  # ten timed rows, one of them a slower tile of ours
        tips = [title.text for title in root.iter(f"{space}title")]
        assert "a: cutefuse 4.0 us, 250 TFLOP/s, fast" in tips

    def test_nothing_to_draw_is_an_error(self) -> None:
        with pytest.raises(CutefuseError, match="no time to draw"):
            plots.svg([row("a", "ours", None, failure="x")])

    def test_a_page_is_written_whole(self, rows: list[dict[str, Any]], tmp_path: Path) -> None:
        plots.write(rows, tmp_path / "rows.html")
        assert [p.name for p in tmp_path.iterdir()] == ["rows.html"]
        assert (tmp_path / "rows.html").read_text().startswith("<!doctype html>")

    def test_rows_of_a_file_are_tabulated_without_a_gpu(
        self, rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        assert concat_conv.main(["--from", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.svg")]) == 0
        assert "geometric mean" in capsys.readouterr().out and (tmp_path / "rows.svg").exists()

    def test_a_file_of_rows_has_one_line_each_with_six_digits(self, tmp_path: Path) -> None:
        table_rows.write(tmp_path / "rows.json", [row("a", "ours", 1.23456789), row("b", "ours", 2e-7)])
        assert len((tmp_path / "rows.json").read_text().splitlines()) == 4
        assert [r["time_us"] for r in json.loads((tmp_path / "rows.json").read_text())] == [1.23457, 2e-7]

    @pytest.mark.parametrize("text", [None, "[{", "[]", '{"a": 1}'])
    def test_a_file_without_rows_is_one_sentence(
        self, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if text is not None:
            (tmp_path / "rows.json").write_text(text)
        assert concat_conv.main(["--from", str(tmp_path / "rows.json")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and line.endswith("give a file that --json wrote")

    def test_a_wrong_result_is_a_failed_run(self, rows: list[dict[str, Any]], tmp_path: Path) -> None:
        (tmp_path / "rows.json").write_text(json.dumps([row("a", "ours", 1.0, relative_error=0.5)]))
        assert concat_conv.main(["--from", str(tmp_path / "rows.json")]) == 1

    @pytest.mark.parametrize(
        ("answer", "expected"),
        [
            ("580.1.2, 1980, 3201, 210.92, 51\n", {"driver": "580.1.2", **CLOCKS, "power_w": 210.92}),
            ("580.1.2, 1980, 3201, [N/A], 51\n", {"driver": "580.1.2", **CLOCKS}),
            ("", {}),
        ],
    )
    def test_clocks_are_numbers_or_absent(
        self, monkeypatch: pytest.MonkeyPatch, answer: str, expected: dict[str, Any]
    ) -> None:
        done = subprocess.CompletedProcess([], 0, stdout=answer)
        monkeypatch.setattr(timing.subprocess, "run", lambda *_, **__: done)
        assert timing.clocks() == expected


def test_every_round_times_every_variant_in_an_order_of_its_own() -> None:
    names = [f"tile {i}" for i in range(12)]
    orders = [timing.shuffled(names, r) for r in range(5)]
    assert all(sorted(o) == sorted(names) for o in orders) and len({tuple(o) for o in orders}) == 5
    assert orders == [timing.shuffled(names, r) for r in range(5)]


class TestTiles:
    NAMES = {101: "sm90_128x256", 110: "sm90_128x64", 1: "sm80_128x128x32_s4", 5: "sm80_64x64x64_s4"}
    IDS = [110, 5, 101, 1]

    @pytest.mark.parametrize(
        ("variant", "choice", "expected"),
        [
            ("ours", "guess", [110]),
            ("ours", "sm80", [110]),
            ("ours", "all", [110, 5, 101, 1]),
            ("ours", "1,101", [101, 1]),
            ("ours_sm80", "guess", [5]),
            ("ours_sm80", "sm80", [5, 1]),
            ("ours_sm80", "all", [5, 1]),
            ("ours_sm80", "101", []),
        ],
    )
    def test_choices(self, variant: str, choice: str, expected: list[int]) -> None:
        assert concat_conv.tile_ids(self.IDS, self.NAMES, variant, choice) == expected

    def test_an_unknown_choice_is_refused(self) -> None:
        with pytest.raises(CutefuseError, match="none of guess, all, sm80"):
            concat_conv.tile_ids(self.IDS, self.NAMES, "ours", "best")

    def test_asking_for_the_ampere_tiles_adds_their_variant(self) -> None:
        assert concat_conv.parse(["--tiles", "sm80", "--variants", "ours,eager"]).variants == [
            "ours",
            "ours_sm80",
            "eager",
        ]


class TestCutlassPeers:
    TILE = cutlass_peers.TILES["cutlass2"][0]

    def test_without_headers_the_reason_says_what_to_set(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
        with pytest.raises(CutefuseError, match="set CUTLASS_DIR"):
            cutlass_peers.include_folders()

    def test_a_tile_that_does_not_compile_is_named_and_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        fake = tmp_path / "nvcc"
        fake.write_text("#!/bin/sh\necho 'peer.h(3): error: no such thing' >&2\nexit 1\n")
        fake.chmod(0o755)
        monkeypatch.setattr(cutlass_peers, "BUILD", tmp_path / "out")
        assert cutlass_peers.build_one(self.TILE, "90a", str(fake), []) == "peer.h(3): error: no such thing"
        assert list((tmp_path / "out").iterdir()) == []

    def test_built_libraries_need_no_compiler(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(cutlass_peers, "BUILD", tmp_path)
        monkeypatch.setattr(cutlass_peers, "compiler", lambda: pytest.fail("asked for a compiler"))
        for tile in cutlass_peers.TILES["cutlass2"]:
            tile.library("90a").touch()
        assert cutlass_peers.build("cutlass2", "90a", 1) == {}

    @pytest.mark.parametrize(
        ("rows_columns", "expected"),
        [(20, [1, 2, 4, 8]), (512, [1])],
    )
    def test_the_reduction_is_split_only_where_tiles_are_few(self, rows_columns: int, expected: list[int]) -> None:
        problem = problems.Problem(1, rows_columns, rows_columns, (512, 512), 512, 3, 3, pads=(1, 1, 1, 1))
        assert cutlass_peers.splits(self.TILE, problem, 132) == expected
        assert cutlass_peers.splits(cutlass_peers.TILES["cutlass3"][0], problem, 132) == [1]

    def test_unequal_pads_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cutlass_peers, "_library", lambda path: None)
        problem = problems.Problem(1, 8, 8, (8,), 8, 3, 3, pads=(1, 1, 0, 0))
        with pytest.raises(CutefuseError, match="symmetric pads"):
            cutlass_peers.Convolution(self.TILE, "90a", problem, 1, (0, 0, 0, 0))


class TestMissingPeers:
    """What a run is told when peers cannot be had; the device is a stand-in."""

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        sm = [90]
        monkeypatch.setattr(peers.gpu, "device_facts", lambda: (sm[0], 132))
        return sm

    def test_without_a_compiler_each_variant_is_left_out_with_the_reason(
        self, device: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
        monkeypatch.setattr(cutlass_peers, "BUILD", tmp_path)
        missing = peers.build_cutlass(["ours", "eager", "cutlass2", "cat_cutlass2"], 1)
        assert list(missing) == ["cutlass2", "cat_cutlass2"] and "none was found" in missing["cutlass2"]

    def test_wgmma_is_not_built_for_an_older_device(self, device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        device[0] = 80
        monkeypatch.setattr(cutlass_peers, "build", lambda peer, arch, jobs: {} if arch == "80" else {"x": arch})
        missing = peers.build_cutlass(["cutlass2", "cutlass3"], 1)
        assert list(missing) == ["cutlass3"] and "9.0" in missing["cutlass3"] and "80" in missing["cutlass3"]

    def test_one_failed_tile_leaves_the_peer_in(self, device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cutlass_peers, "build", lambda peer, arch, jobs: {"64x64x64_s4": "no"})
        assert peers.build_cutlass(["cutlass2"], 1) == {"cutlass2 64x64x64_s4": "no"}

    def test_all_failed_tiles_leave_it_out(self, device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        every = {tile.name: "no" for tile in cutlass_peers.TILES["cutlass3"]}
        monkeypatch.setattr(cutlass_peers, "build", lambda peer, arch, jobs: every)
        assert peers.build_cutlass(["cutlass3"], 1)["cutlass3"] == "no tile could be built"

    def test_a_run_without_cutlass_asks_for_no_compiler(self, device: list[int]) -> None:
        assert peers.build_cutlass(["ours", "eager", "cudnn_precat"], 1) == {}


COMMANDS = [room.main for room in (concat_conv, launch_cost, torch_calls, torch_fuse)]


class TestMachines:
    """Commands on a machine that cannot measure: one sentence and status 2."""

    @pytest.mark.parametrize("command", COMMANDS)
    def test_without_a_gpu(
        self, command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert command([]) == 2
        assert "no CUDA device was found" in capsys.readouterr().err

    def test_an_unknown_variant_is_named_first(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert concat_conv.main(["--variants", "ours,tensorrt"]) == 2
        assert "unknown variant 'tensorrt'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
class TestLaunchCost:
    @pytest.fixture
    def loop(self, tmp_path: Path) -> ctypes.CDLL:
        return launch_cost.loop_library(tmp_path)

    def test_the_loops_call_what_they_are_given_and_report_a_refusal(self, loop: ctypes.CDLL) -> None:
        seen: list[tuple[int, ...]] = []
        number, address = ctypes.c_int32, ctypes.c_void_p
        sets = (address * 3)(16, 32, 48)
        for name, kinds, arguments, expected in (
            ("judge", (number, address), (7, address(8)), [(7, 8)] * 5),
            ("plan", (number, address, address), (7, address(8), address(24)), [(7, 8, 24)] * 5),
            ("run", (address, address), (address(8), sets, 3), [(8, 16), (8, 32), (8, 48), (8, 16), (8, 32)]),
        ):
            kind, function = ctypes.CFUNCTYPE(address, *kinds), getattr(loop, f"{name}_loop_us")
            seen.clear()
            assert function(kind(lambda *given: seen.append(given) or 0), *arguments, 5) > 0
            assert seen == expected
            assert function(kind(lambda *given: 1), *arguments, 5) == -1

    def test_a_compiler_that_fails_is_no_silence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(subprocess.CalledProcessError):
            launch_cost.loop_library(tmp_path)

    def test_a_missing_peer_is_a_dash_and_one_that_all_rows_miss_no_column(self) -> None:
        found = MACHINE | {"shape": "a", "sources": 2, "tile": "t", "judge_us": 0.5}
        head, _, first, _ = launch_cost.text([found, found | {"torch_us": 9.0}]).splitlines()
        assert first == "|a|2|t|0.50|-|" and "torch" in head and "cutlass2" not in head
