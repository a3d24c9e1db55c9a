"""Tables in a pipe: columns keep apart however wide their cells are."""

from __future__ import annotations

import pytest

from cutefuse.table import aligned, counted, some


def test_columns_are_two_spaces_apart_and_numbers_end_together() -> None:
    lines = aligned(("us", "name"), [(1234567.5, "a"), (2, "bc")], numbers=(0,))
    assert lines == ["       us  name", "1234567.5  a", "        2  bc"]


@pytest.mark.parametrize("rows", [[], [("", "")]])
def test_without_cells_the_headings_stand_alone(rows: list[tuple[str, str]]) -> None:
    assert aligned(("us", "name"), rows)[0] == "us  name"


@pytest.mark.parametrize(("number", "words"), [(0, "0 sites"), (1, "1 site"), (3, "3 sites")])
def test_a_number_stands_with_its_noun(number: int, words: str) -> None:
    assert counted(number, "site") == words


@pytest.mark.parametrize(("names", "words"), [([], ""), (["a", "b"], "a, b"), (["a", "b", "c"], "a, b and 1 more")])
def test_a_list_says_how_many_more_there_are(names: list[str], words: str) -> None:
    assert some(names, 2) == words
