"""A GPU that several processes of one program use: they try and time kernels one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

Quiet = Callable[[], contextlib.AbstractContextManager[Any]]
_quiet: Quiet = contextlib.nullcontext


def share_gpu(quiet: Quiet) -> None:
    """From now on engines and timers of this process try and time kernels inside of `quiet()`.

    quiet: makes a context that no two processes are in at a time, and that one process may enter again; without it
    their trials disturb each other's choice of kernels.
    """
    global _quiet
    _quiet = quiet


def is_shared() -> bool:
    return _quiet is not contextlib.nullcontext


def alone() -> contextlib.AbstractContextManager[Any]:
    """The context that `share_gpu` was given; one without effect before."""
    return _quiet()
