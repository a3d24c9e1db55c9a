"""Places for the labels of a drawing, so that none lies on another."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

LINE = 11.0  # from one line of a label to the next, in pixels
_CHARACTER = 6.4  # at most, of a label's font on average
_LINES = 3
_GAP = 7.0  # beside an edge


@dataclass(frozen=True)
class Label:
    """A text at the start (or end) of its line; `y` is the base line."""

    text: str
    x: float
    y: float
    ends: bool = False  # at x, instead of beginning there

    @property
    def span(self) -> tuple[float, float]:
        """Left and right border in pixels, by the widest characters that a browser may take."""
        width = _CHARACTER * len(self.text)
        return (self.x - width, self.x) if self.ends else (self.x, self.x + width)


class Labels:
    """Labels of a drawing of this width that were placed so far."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._rows: dict[int, list[Label]] = defaultdict(list)

    def place(self, text: str, x: float, y: float, up: bool) -> Label | None:
        """A free place on either side of x, from the line at y downwards or `up`; None where all are taken."""
        for line in range(_LINES):
            at = y - LINE * line if up else y + LINE * line
            for label in (Label(text, x + _GAP, at), Label(text, x - _GAP, at, ends=True)):
                left, right = label.span
                if left >= 0 and right <= self._width and not self._taken(label):
                    self._rows[int(at // LINE)].append(label)
                    return label
        return None

    def _taken(self, label: Label) -> bool:
        left, right = label.span
        row = int(label.y // LINE)
        near = (other for r in (row - 1, row, row + 1) for other in self._rows.get(r, ()))
        return any(abs(other.y - label.y) < LINE and left < other.span[1] and other.span[0] < right for other in near)
