"""Keys in groups that grow together (union-find)."""

from __future__ import annotations


class Union:
    """Groups of keys; a key that was never joined is a group of its own."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, key: str) -> str:
        """The key that stands for the group."""
        root = key
        while self._parent.setdefault(root, root) != root:
            root = self._parent[root]
        while self._parent[key] != root:
            self._parent[key], key = root, self._parent[key]
        return root

    def join(self, first: str, *others: str) -> None:
        """Make one group of the groups of all these keys."""
        for other in others:
            self._parent[self.find(other)] = self.find(first)
