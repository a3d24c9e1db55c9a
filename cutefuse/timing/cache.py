"""Times taken on this machine, kept between runs: a JSON file in the user's cache folder, written whole.

`tiles` depend on GPU, driver and our library, `plain` on GPU, driver, PyTorch and cuDNN: each has the machine that it
was taken on beside the key of what was timed. A damaged or unwritable file costs time, not the run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from cutefuse.errors import CutefuseError
from cutefuse.output import cache_folder, make_folder, write_text

SCHEMA = 1
KINDS = ("tiles", "plain")
Times = dict[str, float]  # what was tried -> microseconds


def cache_path() -> Path:
    return cache_folder() / "tune.json"


class TuneCache:
    """Times by kind, machine and key. `note`: one sentence where the file could not be used, else ""."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_path()
        self.note = ""
        self._new: dict[tuple[str, str, str], Times] = {}
        self._stored = self._read()

    def get(self, kind: str, machine: str, key: str) -> Times:
        """What is known; empty where nothing is."""
        return dict(self._stored[kind].get(machine, {}).get(key, {}))

    def put(self, kind: str, machine: str, key: str, times: Times) -> None:
        """Replace what is known; `save` writes it."""
        self._new[kind, machine, key] = self._stored[kind].setdefault(machine, {})[key] = dict(times)

    def save(self) -> None:
        """Write what is new into the file as it is now, so that two runs at a time keep what each of them found."""
        if not self._new:
            return
        stored = self._stored = self._read()
        for (kind, machine, key), times in self._new.items():
            stored[kind].setdefault(machine, {})[key] = {k: round(t, 4) for k, t in times.items()}
        try:
            make_folder(self.path.parent)
            write_text(self.path, json.dumps({"schema": SCHEMA, **stored}, indent=1) + "\n")
        except CutefuseError as error:
            self.note = f"the times were not kept for the next run: {error}"
            return
        self._new.clear()

    def _read(self) -> dict[str, dict[str, dict[str, Times]]]:
        nothing: dict[str, dict[str, dict[str, Times]]] = {kind: {} for kind in KINDS}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(data, dict) and data.get("schema") not in (None, SCHEMA):
                self.note = f"the times in {self.path} have another format ({data['schema']}); they are taken anew"
                return nothing
            return {kind: _table(data[kind]) for kind in KINDS}
        except FileNotFoundError:
            return nothing
        except (AttributeError, KeyError, TypeError):
            why = "not what cutefuse writes"
        except (OSError, ValueError, RecursionError) as error:
            why = type(error).__name__
        self.note = f"the times in {self.path} cannot be read ({why}); they are taken anew"
        return nothing


def _table(value: dict[str, dict[str, Times]]) -> dict[str, dict[str, Times]]:
    """Machine -> key -> times as they were read. Raises TypeError, or AttributeError, for anything else."""
    times = [time for keys in value.values() for own in keys.values() for time in own.values()]
    if not all(type(time) in (int, float) and 0 <= time < math.inf for time in times):
        raise TypeError
    return value
