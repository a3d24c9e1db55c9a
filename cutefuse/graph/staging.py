"""Hidden folders in which a run prepares files, and how these come into place: as one, or not at all.

A lock beside the files makes two runs wait for each other. A run that was killed leaves its hidden folder, whose lock
nobody holds any more: the next run with the same files removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".cutefuse.lock"  # of a folder, while files in it change places
ALIVE = ".alive"  # in a hidden folder, locked while its run lives
_PRIVATE = 0o600


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits until no other run moves files in a folder. The file of the lock goes with it."""
    path = folder / LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is(path, file):  # else the run before took it away while this one waited
            break
        os.close(file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


@contextmanager
def hidden(folder: Path, prefix: str) -> Iterator[Path]:
    """A hidden folder of this run in `folder`, which disappears in any case, as those of killed runs do now.

    Raises OSError where it cannot be made.
    """
    with locked(folder):  # between making it and locking it, another run would take it for a killed one's
        _remove_killed(folder, prefix)
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        alive = os.open(made / ALIVE, os.O_RDWR | os.O_CREAT, _PRIVATE)
        fcntl.flock(alive, fcntl.LOCK_EX)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(alive)


def place(made: Path, target: Path, texts: Collection[str], stale: Collection[Path]) -> None:
    """Move the files of a hidden folder beside `target`, which is one of them; `stale` files of the earlier one go.

    Whoever finds the target, at any moment and after any kill, finds what belongs to it: so what speaks of it (`texts`)
    goes first and comes last, and where it has other files beside it, it goes before them and comes after them.

    Raises OSError where that is impossible; what was there before stays then.
    """
    names = {p.name for p in made.iterdir()} - {ALIVE}
    beside = sorted(names - {*texts, target.name})
    order = [*beside, target.name, *texts]
    behind = [*map(target.with_name, beside), *stale]
    earlier = [*map(target.with_name, texts), *([target, *behind] if behind else [])]
    with locked(target.parent):
        if folder := next((p for p in map(target.with_name, order) if p.is_dir()), None):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder))
        aside = {path: made / f".{path.name}.previous" for path in earlier if os.path.lexists(path)}
        try:
            for path, old in aside.items():
                os.replace(path, old)
            for name in order:
                os.replace(made / name, target.with_name(name))
        except OSError:
            if (made / target.name).exists():  # the new target is not in place
                for name in [n for n in beside if not (made / n).exists()]:
                    target.with_name(name).unlink()
                for path, old in reversed(aside.items()):
                    if old.exists():
                        os.replace(old, path)
            raise


def _remove_killed(folder: Path, prefix: str) -> None:
    """Remove the hidden folders whose runs live no longer."""
    own = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}")  # as mkdtemp names them
    for path in [p for p in folder.iterdir() if own.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]:
        try:
            file = os.open(path / ALIVE, os.O_RDWR | os.O_CREAT, _PRIVATE)
        except OSError:  # of another user
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(file)


def _is(path: Path, file: int) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
