"""Tables in a pipe: columns keep apart however wide their cells are."""

from __future__ import annotations

import pytest

from cutefuse.table import aligned


def test_columns_are_two_spaces_apart_and_numbers_end_together() -> None:
    lines = aligned(("us", "name"), [(1234567.5, "a"), (2, "bc")], numbers=(0,))
    assert lines == ["       us  name", "1234567.5  a", "        2  bc"]


@pytest.mark.parametrize("rows", [[], [("", "")]])
def test_without_cells_the_headings_stand_alone(rows: list[tuple[str, str]]) -> None:
    assert aligned(("us", "name"), rows)[0] == "us  name"
