"""`profile-kernels`: ncu's CSV, variants side by side, and the command lines, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cutefuse.commands.profile_kernels import METRICS, main, ncu_command, nsys_commands, parse_csv
from cutefuse.errors import CutefuseError

HEAD = ["ID", "Process ID", "Kernel Name", *(m[0] for m in METRICS)]


def ncu_csv(rows: list[tuple[str, dict[str, str]]]) -> str:
    lines = ["==PROF== Connected to process 7", ",".join(f'"{h}"' for h in HEAD), ",".join('""' for _ in HEAD)]
    for number, (name, values) in enumerate(rows):
        cells = [str(number), "7", name, *(values.get(m[0], "n/a") for m in METRICS)]
        lines.append(",".join(f'"{c}"' for c in cells))
    return "\n".join([*lines, "==PROF== Disconnected"])


TIME, READ, SM = METRICS[0][0], "dram__bytes_read.sum", "sm__throughput.avg.pct_of_peak_sustained_elapsed"
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
    (kernel,) = parse_csv(FAST, "a")
    assert kernel.launches == 2 and kernel.values["gpu__time_duration.sum"] == 11000
    assert "lts__t_sector_hit_rate.pct" not in kernel.values


def test_two_variants_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slow.csv").write_text(SLOW)
    (tmp_path / "fast.csv").write_text(FAST)
    argv = ["--csv", str(tmp_path / "slow.csv"), "--csv", str(tmp_path / "fast.csv"), "-o", str(tmp_path / "out")]
    assert main(argv) == 0
    lines = {line.split("  ")[0].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["time µs"][-3:] == ["22.00", "11.00", "0.50×"]
    assert lines["DRAM read MB"][-3:] == ["8.00", "2.00", "0.25×"]
    # Percentages are weighted with the time of the kernels.
    assert lines["SM %"][-3:-1] == [f"{(5 * 9 + 50 * 13) / 22:.1f}", "61.0"]
    saved = json.loads((tmp_path / "out" / "kernels.json").read_text())
    assert [len(v["kernels"]) for v in saved] == [2, 1]


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
    assert "ERR_NVGPUCTRPERM" in err and "Traceback" not in err
    assert not (tmp_path / "out" / "kernels.json").exists()


@pytest.mark.parametrize("text", ["", "hello", '"ID","Kernel Name"\n', "==ERROR== no permission"])
def test_other_text_is_no_result(text: str) -> None:
    with pytest.raises(CutefuseError):
        parse_csv(text, "x.csv")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "nothing to profile was given"),
        (["--op", "concat_conv"], "--op concat_conv needs a --case"),
        (["--op", "nothing", "--case", "x"], "operator nothing is unknown"),
        (["--op", "concat_conv", "--case", "nothing"], "case nothing is unknown"),
        (["--csv", "missing.csv"], "missing.csv cannot be read"),
        (["--engine", "x.engine", "--trt-version", "new"], "--trt-version is new"),
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
    monkeypatch.setattr("cutefuse.commands.profile_kernels.shutil.which", lambda name: None)
    assert main(["--command", "x", "-o", str(tmp_path)]) == 2
    assert "install Nsight Compute" in capsys.readouterr().err


def test_every_case_of_every_operator_can_be_driven(capsys: pytest.CaptureFixture[str]) -> None:
    from cutefuse.ops import operators

    for op in operators():
        case = op.cases()[0].name
        assert main(["--op", op.stem, "--case", case, "--config", "1", "--config", "2", "--dry-run"]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert f"drive {op.stem} " in first and first.replace(" 1 5", " 2 5") == second
    assert main(["--list"]) == 0
    listing = capsys.readouterr().out
    assert all(op.stem in listing for op in operators())


def test_ncu_is_asked_for_base_units_and_cold_caches() -> None:
    command = ncu_command("ncu", ["prog"], "conv", 3)
    joined = " ".join(command)
    assert "--print-units base" in joined and "--cache-control all" in joined and "--launch-count 3" in joined
    assert command[-1] == "prog" and "regex:conv" in command


def test_layer_names_reach_the_time_line_on_both_majors(tmp_path: Path) -> None:
    old, stats = nsys_commands(tmp_path / "x.engine", tmp_path, 10, [Path("lib.so")])
    new, _ = nsys_commands(tmp_path / "x.engine", tmp_path, 11, [])
    assert "--trace=cuda,nvtx" in old and "--profilingVerbosity=detailed" in old and "--dynamicPlugins=lib.so" in old
    assert "--useCudaGraph" not in old and "--noCudaGraph" in new and "nvtx_gpu_proj_sum" in stats
