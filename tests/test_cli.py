"""The command table: every entry has its module and its help, and an unknown command is one sentence."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from graphs import graph, weights

from cutefuse import cli, errors, kernels

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_its_module_and_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0 and "usage:" in capsys.readouterr().out


def test_an_unknown_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fuse"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "'fuse'" in line and all(name in line for name in cli.COMMANDS)


def test_without_a_command_the_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert set(cli.COMMANDS) <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_ends_with_an_example_whose_options_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown, _, example = capsys.readouterr().out.rpartition("example: ")
    assert example.strip() == cli.EXAMPLES[command] and f"cutefuse {command}" in example
    options = set(re.findall(r" (--[a-z-]+)(?!=|[a-z-])", example))  # trtexec's are written with "="
    assert {o for o in options if o not in shown} == set()


def test_the_help_of_a_command_that_failed_has_no_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["diff", "only-one"])
    assert "example:" not in capsys.readouterr().out


def test_exit_codes_are_in_one_table_that_the_pages_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    page = (Path(__file__).resolve().parent.parent / "docs" / "report.md").read_text()
    for code, text in cli.EXIT_CODES.items():
        assert f"{code:>3}  {text}" in shown and f"| {code} | {text} |" in page


@pytest.mark.parametrize("error", [errors.CutefuseError, errors.VerificationError, errors.NothingToPatch])
def test_errors_end_with_codes_of_the_table(error: type[errors.CutefuseError]) -> None:
    def fail() -> int:
        raise error("no")

    assert errors.run_command(fail) in cli.EXIT_CODES


def test_ctrl_c_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["patch", "m.onnx"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def in_bash(words: list[str]) -> str:
    """What bash does at the end of a line."""
    return (
        f'eval "$(cutefuse completion bash)"; COMP_WORDS=({" ".join(map(shlex.quote, words))}); '
        f'COMP_CWORD={len(words) - 1}; _cutefuse; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )


def in_zsh(words: list[str]) -> str:
    """The same in zsh; its functions offer only what begins with the word, as these stand-ins do."""
    return (
        "compdef() { :; }; _files() { :; }; compadd() { shift; print -l -- ${(M)@:#$PREFIX*}; }; "
        f'eval "$(cutefuse completion zsh)"; words=({" ".join(shlex.quote(w) for w in words)}); CURRENT={len(words)}; '
        f"PREFIX={shlex.quote(words[-1])}; _cutefuse"
    )


def complete(line: str, folder: Path, shell: str) -> list[str]:
    """What a shell offers at the end of a line; `cutefuse` is this Python."""
    fake = folder / "cutefuse"
    fake.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cutefuse "$@"\n')
    fake.chmod(0o755)
    script = {"bash": in_bash, "zsh": in_zsh}[shell](line.split(" "))
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([shell, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("cutefuse co", ["compare", "completion"]),
        ("cutefuse compare --o", ["--output"]),
        ("cutefuse compare plain/ --j", ["--json"]),
        ("cutefuse compare pla", []),  # the shell then offers files
        ("cutefuse frobnicate --o", []),
    ],
)
def test_a_shell_completes_commands_and_options(line: str, offered: list[str], shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    assert complete(line, tmp_path, shell) == offered


def test_a_shell_without_a_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["completion", "fish"])
    assert done.value.code == 2 and "choose from" in capsys.readouterr().err


def test_one_version_stands_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    version = capsys.readouterr().out.removeprefix("cutefuse ").strip()
    headings = re.findall(r"^## (\d+\.\d+\.\d+) - ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == version and headings == sorted(headings, key=lambda v: list(map(int, v.split("."))))[::-1]
    assert kernels.describe()["version"] == version, "the library is of another version: build it again"
    # The wheel and CMake read the number from the package; neither may hold a copy.
    for file in ("CMakeLists.txt", "pyproject.toml"):
        text = (ROOT / file).read_text()
        assert "cutefuse/__init__.py" in text and version not in text


@pytest.mark.parametrize("args", [["--help"], ["patch", "--help"], ["roofline"], ["patch", "--help", "-o", "x"]])
def test_a_reader_that_leaves_ends_a_command_in_silence(args: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "cutefuse", *args], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


def test_a_model_is_not_said_to_be_done_where_the_reader_of_all_words_left(tmp_path: Path) -> None:
    model = graph("c = Concat<axis=1>(a, b) x = Conv(c, w) y = Relu(x)", weights(w=(16, 24, 1, 1)))
    onnx.save(model, str(tmp_path / "m.onnx"))
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cutefuse", "patch", "m.onnx", "--all", "--verify"]
    done = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=write)
    os.close(write)
    assert done.returncode == 141 and [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
