"""Files that are written whole or not at all, and results that are printed as JSON."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError


def check_replaceable(path: Path) -> None:
    """Raise CutefuseError where a file would take the place of a device or a pipe, as /dev/null: files are renamed."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise CutefuseError(f"{path} is no file that can be replaced; choose another output path")


def check_named(path: Path) -> None:
    """Raise CutefuseError for a path without a file name: "", "." and "/"."""
    if not path.name:
        raise CutefuseError(f"'{path}' is a folder; give the path of a file")


def real(path: Path) -> Path:
    """The path without symbolic links. Raises CutefuseError for links in a circle, and a name that no file can have."""
    try:
        os.stat(path)
    except ValueError:  # a NUL
        raise CutefuseError(f"{str(path)!r} is no name of a file; choose another path") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CutefuseError(f"{path} is a symbolic link in a circle; choose another path") from None
    return Path(os.path.realpath(path))


def as_private(made: Path, *sources: Path) -> None:
    """Let nobody read a file who may not read all that it was made from."""
    allowed = [os.stat(s).st_mode for s in sources if os.path.exists(s)]
    os.chmod(made, functools.reduce(operator.and_, allowed, os.stat(made).st_mode & 0o777))


def write_text(path: Path, text: str, sources: Sequence[Path] = ()) -> None:
    """Write a whole text file or nothing: beside first, then renamed; as private as its sources. Raises CutefuseError
    where that is impossible."""
    check_named(path)
    check_replaceable(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        as_private(part, *sources)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # its name may be the fault
            part.unlink()
        raise CutefuseError(f"{path} cannot be written ({error.strerror}); choose another output path") from None


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON, whole or not at all."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def indented(data: Any, depth: int = 0) -> str:
    """Data as JSON, keys being texts: each entry of an object is a line, and each item of a list that holds objects or
    lists, so that the encoder in C, which knows no indentation, writes thousands of them at once."""
    start, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if data and isinstance(data, dict):
        lines = [f"{json.dumps(key)}: {indented(value, depth + 1)}" for key, value in data.items()]
        return "{" + start + ("," + start).join(lines) + end + "}"
    if isinstance(data, (list, tuple)) and any(isinstance(v, (dict, list, tuple)) for v in data):
        return "[" + start + ("," + start).join(map(json.dumps, data)) + end + "]"
    return json.dumps(data)


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CutefuseError(f"output folder {path} cannot be made ({error.strerror}); choose another one") from error


def cache_folder() -> Path:
    """What is kept between runs: $XDG_CACHE_HOME/cutefuse; in ~/.cache where that is not set, or is no absolute path as
    it must be."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else Path.home() / ".cache") / "cutefuse"


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option `--json`, the same for every command."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON; other lines go to stderr")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command, `json` among them."""
    add_json(parser)
    return parser.parse_args(argv)


def whole_number(text: str) -> int:
    """The value of an option that takes 0, 1, 2, ..., as a seed does."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number; give 0 or more")
    return int(text)


def printable(data: Any) -> Any:
    """Data without NaN and infinity, for which JSON has no word: null in their place."""
    if isinstance(data, dict):
        return {key: printable(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [printable(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


@contextlib.contextmanager
def json_alone(wanted: bool) -> Iterator[Callable[[Any], None]]:
    """Where JSON is wanted, lines that are printed inside go to stderr; the function given prints data as JSON."""

    def show(data: Any) -> None:
        if wanted:
            ascii_only = (out.encoding or "").lower() not in ("utf-8", "utf8")  # \u is JSON, what Python escapes is not
            print(json.dumps(printable(data), indent=1, ensure_ascii=ascii_only, default=str), file=out)

    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield show
