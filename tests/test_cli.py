"""The command table: every entry has its module and its help, and an unknown command is one sentence."""

from __future__ import annotations

import pytest

from cutefuse import cli


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_its_module_and_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0 and "usage:" in capsys.readouterr().out


def test_an_unknown_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fuse"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: unknown command 'fuse'; choose one of {', '.join(cli.COMMANDS)}"


def test_without_a_command_the_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert set(cli.COMMANDS) <= set(capsys.readouterr().out.split())
