"""The op_types of ConcatConv: what a name says about a node, and the name of what a node does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SOURCES, MAX_OUTPUTS = 8, 4
SUFFIXES = ("", "Relu", "LeakyRelu", "Clip", "Silu", "HardSwish", "Sigmoid", "Tanh")
BEFORE, AFTER = "before", "after"
_NAME = re.compile(
    rf"Cute(?P<view>View)?ConcatConv(?P<sources>[1-8])(?:x(?P<outputs>[2-4]))?"
    rf"(?P<first>Add)?(?P<suffix>{'|'.join(SUFFIXES[1:])})?(?P<last>Add)?"
)


@dataclass(frozen=True)
class Form:
    """Cute[View]ConcatConv<sources>[x<outputs>][Add]<suffix>[Add].

    view: sources may be channel ranges of wider tensors and may be enlarged. residual: whether a tensor of the output's
    shape is added `before` the activation, `after` it, or not at all ("").
    """

    sources: int
    suffix: str = ""
    view: bool = False
    outputs: int = 1
    residual: str = ""

    @property
    def op_type(self) -> str:
        view, several = "View" if self.view else "", f"x{self.outputs}" if self.outputs > 1 else ""
        first, last = ("Add" if self.residual == when else "" for when in (BEFORE, AFTER))
        return f"Cute{view}ConcatConv{self.sources}{several}{first}{self.suffix}{last}"

    @property
    def inputs(self) -> int:
        """Sources, packed filter, bias and the residual."""
        return self.sources + 2 + bool(self.residual)


def parse(op_type: str) -> Form:
    """The form that an op_type names. Raises ValueError for a name that is none of ConcatConv's."""
    found = _NAME.fullmatch(op_type)
    if found is None or (found["last"] and not found["suffix"]) or (found["first"] and found["last"]):
        raise ValueError(f"{op_type} is no op_type of concat_conv")
    residual = BEFORE if found["first"] else AFTER if found["last"] else ""
    if residual and found["outputs"]:
        raise ValueError(f"{op_type} has both a residual and several outputs")
    return Form(int(found["sources"]), found["suffix"] or "", bool(found["view"]), int(found["outputs"] or 1), residual)


@dataclass(frozen=True)
class Source:
    """One source of a call: channels [start, start + channels) of a tensor of `dims` (N, C, H, W), each pixel repeated
    `upsample` times in both directions."""

    dims: tuple[int, ...]
    channels: int
    start: int = 0
    upsample: int = 1

    @property
    def is_view(self) -> bool:
        return self.start > 0 or self.upsample > 1 or (self.dims[1] >= 0 and self.dims[1] != self.channels)

    @property
    def size(self) -> tuple[int, int]:
        """H and W as the convolution sees them, -1 where unknown."""
        h, w = (d * self.upsample if d >= 0 else -1 for d in self.dims[2:])
        return h, w

    def __str__(self) -> str:
        text = f"[{self.start}:{self.start + self.channels}]" if self.dims[1] not in (-1, self.channels) else ""
        return f"{text or self.channels}{f'up{self.upsample}' if self.upsample > 1 else ''}"


def first_size(sources: Sequence[Source]) -> tuple[int, int]:
    """H and W that all sources must have: the first known of each."""
    rows, columns = zip(*(s.size for s in sources), strict=True)
    return next((r for r in rows if r >= 0), -1), next((c for c in columns if c >= 0), -1)
