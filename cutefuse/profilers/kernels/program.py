"""NVIDIA's profilers as programs: where they are, and what they printed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from cutefuse.errors import CutefuseError
from cutefuse.progress import spinner


def first_program(*places: str) -> str | None:
    """The first of some names or paths that is a program here, or None."""
    return next(filter(None, map(shutil.which, places)), None)


def run_profiler(command: list[str], title: str, timeout_s: float) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. Raises CutefuseError where it does not start, or takes longer."""
    name = Path(command[0]).name
    try:
        with spinner(title):
            done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise CutefuseError(
            f"{name} did not finish {title} within {timeout_s:g} s; give --timeout more, or let it run less"
        ) from None
    except OSError as error:
        raise CutefuseError(f"{command[0]} cannot be started ({error.strerror}); install {name} again") from None
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
