"""Progress: shown on a terminal, silent in logs. What takes longer than two seconds shows that it is at work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 2.0


def _display(title: str) -> Any:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Where stdout is a file or a pipe, its lines must not be drawn above the spinner instead.
    display = Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty(),
        refresh_per_second=4,
    )  # fmt: skip
    display.add_task(title, total=None)
    return display


class _Waiting:
    """A spinner that appears after a while, and makes room for others."""

    display: Any
    timer: threading.Timer

    def __init__(self, title: str, after_s: float) -> None:
        self.title, self.after_s = title, after_s
        self.lock, self.display, self.guests = threading.Lock(), None, 0

    def begin(self) -> None:
        self.timer = threading.Timer(self.after_s, self._show)
        self.timer.daemon = True
        self.timer.start()

    def _show(self) -> None:
        with self.lock:
            if not self.guests and self.display is None:
                self.display = _display(self.title)
                self.display.start()

    def end(self) -> None:
        self.timer.cancel()
        with self.lock:
            self.guests += 1  # a timer that has fired already shows nothing
            if self.display is not None:
                self.display.stop()
                self.display = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.end()
        try:
            yield
        finally:
            with self.lock:
                self.guests -= 1
            if not self.guests:
                self.begin()


_waiting: _Waiting | None = None


@contextmanager
def waiting(title: str, after_s: float = PATIENCE_S) -> Iterator[None]:
    """Around a whole command: a spinner once it has taken longer than `after_s`, wherever no other progress shows.

    Nothing without a terminal, and nothing new inside of another one.
    """
    global _waiting
    if _waiting is not None or not sys.stderr.isatty():
        yield
        return
    _waiting = _Waiting(title, after_s)
    _waiting.begin()
    try:
        yield
    finally:
        _waiting.end()
        _waiting = None


@contextmanager
def _alone() -> Iterator[None]:
    if _waiting is None:
        yield
    else:
        with _waiting.aside():
            yield


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """A spinner with the elapsed time around a block of unknown length; one plain line without a terminal."""
    if not sys.stderr.isatty():
        print(f"{title} ...", file=sys.stderr)
        yield
        return
    with _alone(), _display(title):
        yield


def track(items: Iterable[T], title: str, total: int) -> Iterator[T]:
    """Iterate with a progress bar on a terminal; plain iteration elsewhere."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as bar

    with _alone():
        yield from bar(items, title, total=total, console=Console(stderr=True), transient=True)
