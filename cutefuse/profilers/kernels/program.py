"""NVIDIA's profilers as programs: where they are, and what they printed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from cutefuse.errors import CutefuseError
from cutefuse.progress import spinner

_NO_PERMISSION = "ERR_NVGPUCTRPERM"  # of Nsight Compute


def first_program(*places: str) -> str | None:
    """The first of some names or paths that is a program here, or None."""
    return next(filter(None, map(shutil.which, places)), None)


def run_profiler(command: list[str], title: str, failed: str, timeout_s: float) -> str:
    """What it printed. Raises CutefuseError where it does not start, takes longer, or fails: `failed`, and why."""
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
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise CutefuseError(f"{failed}: {reason(text + done.stderr.decode(errors='replace'))}")
    return text


def reason(text: str) -> str:
    """Why a profiler failed, from what it printed, with what to do where that is known."""
    if _NO_PERMISSION in text:
        return (
            f"this user may not read the GPU's counters ({_NO_PERMISSION}); run as root, or let the driver allow it "
            "(NVreg_RestrictProfilingToAdminUsers=0)"
        )
    words = [line.strip() for line in text.splitlines() if line.strip()]
    own = [w for w in words if w.startswith("error:")]  # of a program of ours, which says more than the profiler of it
    told = own or [w for w in words if "ERROR" in w or "error:" in w.lower()]
    return (told[0] if told else words[-1] if words else "no output").replace("==ERROR== ", "").removeprefix("error: ")
