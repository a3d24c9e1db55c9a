"""`profile-kernels`: ncu's CSV, variants side by side, and the command lines, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cutefuse.commands.profile_kernels import main
from cutefuse.errors import CutefuseError
from cutefuse.profilers.kernels import ncu as nsight
from cutefuse.profilers.kernels.cases import Problem, case_call
from cutefuse.profilers.kernels.metrics import METRICS, PANELS, side_by_side
from cutefuse.profilers.kernels.ncu import Run, command_line, kernels_of, read_csv

RECORDED = Path(__file__).parent / "recorded"
HEAD = ["ID", "Process ID", "Kernel Name", *(m.names[0] for m in METRICS)]


def ncu_csv(rows: list[tuple[str, dict[str, str]]]) -> str:
    lines = ["==PROF== Connected to process 7", ",".join(f'"{h}"' for h in HEAD), ",".join('""' for _ in HEAD)]
    for number, (name, values) in enumerate(rows):
        cells = [str(number), "7", name, *(values.get(m.names[0], "n/a") for m in METRICS)]
        lines.append(",".join(f'"{c}"' for c in cells))
    return "\n".join([*lines, "==PROF== Disconnected"])


TIME, READ, SM = METRICS[0].names[0], "dram__bytes_read.sum", "sm__throughput.avg.pct_of_peak_sustained_elapsed"
FAST = ncu_csv(
    [
        ("void conv<half>(Params)", {TIME: "10,000", READ: "2000000", SM: "60"}),
        ("void conv<half>(Params)", {TIME: "12,000", READ: "2000000", SM: "62"}),
    ]
)
SLOW = ncu_csv(
    [("cat", {TIME: "9000", READ: "4000000", SM: "5"}), ("conv", {TIME: "13000", READ: "4000000", SM: "50"})]
)


def test_launches_of_one_kernel_are_averaged() -> None:
    (kernel,) = kernels_of(read_csv(FAST, "a"))
    assert kernel.launches == 2 and kernel.values["gpu__time_duration.sum"] == 11000
    assert "lts__t_sector_hit_rate.pct" not in kernel.values


def test_two_variants_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow.csv").write_text(SLOW)
    (tmp_path / "fast.csv").write_text(FAST)
    argv = ["--csv", str(tmp_path / "slow.csv"), "--csv", str(tmp_path / "fast.csv"), "-o", str(tmp_path / "out")]
    assert main(argv) == 0
    lines = {line[:26].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["time µs"][-3:] == ["22.00", "11.00", "0.50×"]
    assert lines["DRAM read MB"][-3:] == ["8.00", "2.00", "0.25×"]
    # Percentages are weighted with the time of the kernels.
    assert lines["compute throughput %"][-3:-1] == [f"{(5 * 9 + 50 * 13) / 22:.1f}", "61.0"]
    saved = json.loads((tmp_path / "out" / "kernels.json").read_text())
    assert [len(v["kernels"]) for v in saved] == [2, 1]


def test_one_variant_has_no_ratio_and_no_panel_without_figures(tmp_path: Path) -> None:
    kernels = kernels_of(read_csv(FAST, "a"))
    lines = side_by_side([("fast", kernels)]).splitlines()
    assert lines[0].split() == ["fast"] and "×" not in "".join(lines)
    panels = [line for line in lines if line in PANELS]
    assert panels == ["speed of light", "memory"]
    assert len({len(line) for line in lines if line.startswith("  ")} | {len(lines[0])}) == 1  # figures end together


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ncu that runs nothing and answers with FAST, or fails when the program is called `bad`."""
    (tmp_path / "answer").write_text(FAST)
    path = tmp_path / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport sys, pathlib\n"
        "if sys.argv[-1] == 'bad':\n    sys.exit(print('==ERROR== no permission (ERR_NVGPUCTRPERM)') or 1)\n"
        f"print(pathlib.Path({str(tmp_path / 'answer')!r}).read_text())\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return path


def test_a_program_is_profiled_and_its_csv_kept(ncu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--command", "prog one", "--kernel", "conv", "-o", str(tmp_path / "out")]) == 0
    assert "11.00" in capsys.readouterr().out
    assert (tmp_path / "out" / "prog_one.ncu.csv").is_file()


def test_a_failing_ncu_is_quoted(ncu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--command", "bad", "-o", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "may not read the GPU's counters (ERR_NVGPUCTRPERM); run as root" in err and "Traceback" not in err
    assert not (tmp_path / "out" / "kernels.json").exists()


@pytest.mark.parametrize("text", ["", "hello", '"ID","Kernel Name"\n', "==ERROR== no permission"])
def test_other_text_is_no_result(text: str) -> None:
    with pytest.raises(CutefuseError):
        read_csv(text, "x.csv")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "nothing to profile was given"),
        (["--op", "concat_conv"], "--op concat_conv needs a --case"),
        (["--op", "nothing", "--case", "x"], "operator nothing is unknown"),
        (["--op", "concat_conv", "--case", "nothing"], "case nothing is unknown"),
        (["--op", "nothing", "--list"], "operator nothing is unknown; choose one of concat_conv, "),
        (["--op", "", "--list"], "operator  is unknown; choose one of"),
        (["--csv", "missing.csv"], "missing.csv cannot be read"),
        (["--launches", "0", "--list"], "--launches is 0"),
        (
            ["--op", "row_norm", "--case", "large epsilon", "--size", "H=3"],
            "--size has H=3; the sizes of this case are",
        ),
        (["--op", "row_norm", "--case", "large epsilon", "--size", "columns=a"], "--size has columns=a"),
        (
            ["--op", "row_norm", "--case", "large epsilon", "--size", "columns=1x2"],
            "--size has columns=1x2; columns is",
        ),
        (["--op", "concat_conv", "--case", "unet_up", "--size", "C=64"], "--size has C=64; this case has 2 sources"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {words}")


def test_without_ncu_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nsight, "find", lambda: None)
    assert main(["--command", "x", "-o", str(tmp_path)]) == 2
    assert "install Nsight Compute" in capsys.readouterr().err


def test_every_case_of_every_operator_can_be_driven(capsys: pytest.CaptureFixture[str]) -> None:
    from cutefuse.operators import operators

    for op in operators():
        case = op.cases()[0].name
        assert main(["--op", op.stem, "--case", case, "--config", "1", "--config", "2", "--dry-run"]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert f"drive case {op.stem} " in first and first.replace(" 1 5", " 2 5") == second
    assert main(["--list"]) == 0
    listing = capsys.readouterr().out
    assert all(op.stem in listing for op in operators())


def test_the_list_of_one_operator_has_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--op", "row_norm", "--list"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert heads == ["row_norm"]
    assert main(["--op", "row_norm", "--list", "--json"]) == 0
    assert [op["op"] for op in json.loads(capsys.readouterr().out)] == ["row_norm"]


def test_ncu_is_asked_for_base_units_and_cold_caches() -> None:
    command = command_line("ncu", Run(["prog"], kernel="conv", launches=3))
    joined = " ".join(command)
    assert "--print-units base" in joined and "--cache-control all" in joined and "--launch-count 3" in joined
    assert command[-1] == "prog" and "regex:conv" in command and "--nvtx" not in command


def test_sizes_replace_those_of_a_case() -> None:
    call = case_call(Problem("row_norm", "CuteLayerNorm: bert", "float32", "leading=4x1024,columns=512"))
    assert call.inputs[0].dims == (4, 1024, 512)
    call = case_call(Problem("concat_conv", "unet_up", "float16", "N=2,H=64,C=32+16"))
    assert [t.dims for t in call.inputs[:2]] == [(2, 32, 64, 32), (2, 16, 64, 32)]


# ------------------------------------------------------------------------------------------- what the real tool wrote
def recorded(name: str) -> str:
    """An answer of Nsight Compute 2025.3.1 on an H200; CSVs cut to the columns that are read."""
    return (RECORDED / name).read_text()


def test_a_recorded_csv_has_the_metrics_of_every_panel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--csv", str(RECORDED / "ncu_layers.csv"), "--csv", str(RECORDED / "ncu_metrics.csv"), "-o", str(tmp_path)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    cells = {line[:26].strip(): line[26:].split() for line in out.splitlines()}
    assert all(panel in cells for panel in PANELS)
    # One launch each of conv and relu; their own CSV says 15,264 ns and 30,107 cycles of the first.
    assert cells["blocks by registers"][1] == "16" and cells["blocks by warps"][1] == "8"
    assert cells["theoretical occupancy %"][1] == "100.0" and cells["blocks by the SM"][1] == "32"
    assert float(cells["time µs"][1]) > 15.26 and int(cells["elapsed cycles"][1]) > 30107
    titles = "memory busy %|max bandwidth %|memory pipes busy %|L2 hit %|L2 compression success %|compute throughput %"
    assert all(title in cells for title in titles.split("|"))


def test_recorded_ranges_keep_commas_brackets_and_slashes() -> None:
    launches = read_csv(recorded("ncu_layers.csv"), "x")
    assert len(launches) == 6
    assert launches[0].ranges == ("cutefuse inference", "cutefuse layer 0: /blocks.0/norm, odd, [name]")
    assert launches[1].ranges == launches[2].ranges == ("cutefuse inference", "cutefuse layer 1: /blocks.0/MatMul")


@pytest.mark.parametrize("name", ["ncu_no_kernel.txt", "ncu_no_range.txt", "ncu_no_gpu_work.txt"])
def test_a_recorded_run_without_a_kernel_is_one_sentence(name: str) -> None:
    with pytest.raises(CutefuseError, match="x: no kernel was launched that matches; check --kernel"):
        read_csv(recorded(name), "x")


@pytest.mark.parametrize(
    ("name", "words"),
    [("ncu_no_program.txt", "'./no_such_program' does not exist"), ("ncu_program_failed.txt", "an error code (3)")],
)
def test_what_recorded_failures_say_is_kept(name: str, words: str) -> None:
    assert words in nsight.reason(recorded(name)) and "==" not in nsight.reason(recorded(name))


def test_what_a_program_of_ours_says_stands_before_what_ncu_says_of_it() -> None:
    text = recorded("ncu_program_failed.txt") + "error: tile 2 cannot run rows of 512; leave --config out\n"
    assert nsight.reason(text) == "tile 2 cannot run rows of 512; leave --config out"


def test_a_csv_that_breaks_off_is_read_as_far_as_it_goes() -> None:
    text = recorded("ncu_layers.csv")
    launches = read_csv(text[: text.rindex('"cutefuse') if '"cutefuse' in text else len(text) - 400], "x")
    assert 0 < len(launches) <= 6 and launches[0].values[TIME] == 12128
