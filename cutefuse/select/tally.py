"""Counts that many wirings of one graph have nearly in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Tally:
    """How often each key counts, 0 unless told. A copy shares all but the last changes with what it is a copy of, so
    that it costs far less than a dict's where the keys are many."""

    def __init__(self) -> None:
        self._base: dict[Hashable, int] = {}  # shared, and never changed
        self._changes: dict[Hashable, int] = {}

    def __getitem__(self, key: Hashable) -> int:
        found = self._changes.get(key)
        return self._base.get(key, 0) if found is None else found

    def __contains__(self, key: Hashable) -> bool:
        found = self._changes.get(key)
        return (self._base.get(key, 0) if found is None else found) > 0

    def copy(self) -> Tally:
        """Another one with the same counts."""
        if len(self._changes) ** 2 > len(self._base):  # a base costs its length, the changes theirs at every copy
            self._base, self._changes = self._base | self._changes, {}
        other = Tally()
        other._base, other._changes = self._base, dict(self._changes)
        return other

    def add(self, keys: Iterable[Hashable], by: int = 1) -> None:
        """Count each key once more, or `by` times."""
        for key in keys:
            self._changes[key] = self[key] + by

    def put(self, keys: Iterable[Hashable], count: int) -> None:
        """Let each key count so often."""
        self._changes.update(dict.fromkeys(keys, count))
