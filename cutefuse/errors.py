"""Errors that a user can act on, and the one place that turns them into an exit code."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from cutefuse.progress import waiting


class CutefuseError(Exception):
    """One sentence: what was given, what is allowed, what to do. Commands exit with `exit_code`."""

    exit_code = 2


class VerificationError(CutefuseError):
    """A patched model or a kernel does not compute what the original computes."""

    exit_code = 1


class NothingToPatch(CutefuseError):
    """The model is valid and holds nothing that can be fused."""

    exit_code = 3


def first_line(error: BaseException, most: int = 300) -> str:
    """What an error of another program says, as a part of a sentence: its first line, or its kind without one."""
    return next((line.strip()[:most] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def drop_output() -> int:
    """Send nowhere what stdout and stderr still hold: a reader, as `head`, has left. The exit code, as of SIGPIPE: what
    the command was to do may not be done."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return 141


def run_command(command: Callable[[], int | None]) -> int:
    """Run the body of a command line: a CutefuseError becomes one line on stderr and an exit code.

    On a terminal a command that takes longer than two seconds shows that it is at work.
    """
    for stream in (sys.stdout, sys.stderr):  # a name may hold what the terminal's encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with waiting(" ".join([Path(sys.argv[0]).name, *sys.argv[1:3]])):
            return command() or 0
    except CutefuseError as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)  # a name may hold a newline
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return drop_output()
    except OSError as error:  # a full disk or a name that is too long, wherever it is met
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}; free space or choose another path", file=sys.stderr)
        return CutefuseError.exit_code


def command_line(main: Callable[[list[str] | None], int | None]) -> Callable[..., int]:
    """The `main` of a command, whose body runs in `run_command`."""

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        return run_command(lambda: main(argv))

    return run
