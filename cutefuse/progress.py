"""Progress: shown on a terminal, silent in logs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """A spinner with the elapsed time around a block of unknown length; one plain line without a terminal."""
    if not sys.stderr.isatty():
        print(f"{title} ...", file=sys.stderr)
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(title, total=None)
        yield


def track(items: Iterable[T], title: str, total: int) -> Iterator[T]:
    """Iterate with a progress bar on a terminal; plain iteration elsewhere."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as bar

    yield from bar(items, title, total=total, console=Console(stderr=True), transient=True)
