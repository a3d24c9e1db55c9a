"""What the op_types of convolutions do, as the library describes them, and what a source of a call is."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from cutefuse import kernels

BEFORE, AFTER = "before", "after"
GROUP = "group"  # the attribute that a depthwise node has besides the operator's, for its body: all its channels


@dataclass(frozen=True)
class Form:
    """The facts that tell the op_types of convolutions apart.

    suffix: the activation, "" for none. view: sources may be channel ranges of wider tensors and may be enlarged.
    residual: whether a tensor of the output's shape is added `before` the activation, `after` it, or not at all ("").
    quantised: sources and filter are int8 or float8; to_quantised: so is the output.
    pre_activated: each input channel is scaled and shifted and passes ReLU before the filter sees it.
    image: the source is what a network is given: NCHW or channels-last, in the filter's type or in float32.
    depthwise: each channel has a filter of its own and makes one channel.
    spread: the filters of a pixel make the channels of spread x spread pixels, filter (i * spread + j) * channels + k
    channel k of row i and column j; 1: of one pixel.
    """

    sources: int
    suffix: str = ""
    view: bool = False
    outputs: int = 1
    residual: str = ""
    quantised: bool = False
    to_quantised: bool = False
    pre_activated: bool = False
    image: bool = False
    depthwise: bool = False
    spread: int = 1

    @property
    def op_type(self) -> str:
        """The op_type of this form. Raises KernelError for a form that the library does not have."""
        if self not in forms():
            raise kernels.KernelError(f"the library has no op_type for {self}; `kernels.describe()` lists its own")
        return forms()[self]

    @property
    def inputs(self) -> int:
        """Sources, packed filter, the filter's scales where it is quantised, bias, scale and shift of a pre-activation,
        and the residual."""
        return self.sources + 2 + self.quantised + 2 * self.pre_activated + bool(self.residual)


@functools.cache
def forms() -> dict[Form, str]:
    """Every form of the library with its op_type, in the library's order."""
    variants = [v for op in kernels.describe()["ops"] for v in op["variants"] if v["kind"] == "convolution"]
    return {
        Form(
            v["sources"], v["activation"], v["view"], v["outputs"], v["residual"] or "", v["quantised"],
            v["quantised"] and "int8" in v["output_types"], v["pre_activated"], v["image"],
            v["depthwise"], v["spread"],
        ): v["op_type"]
        for v in variants
    }  # fmt: skip


@functools.cache
def _by_op_type() -> dict[str, Form]:
    return {op_type: form for form, op_type in forms().items()}


def form_of(op_type: str) -> Form:
    """The form of an op_type. Raises KernelError for one that is no convolution of the library."""
    if op_type not in _by_op_type():
        raise kernels.KernelError(f"{op_type} is no convolution of the library; `kernels.describe()` lists its own")
    return _by_op_type()[op_type]


@functools.cache
def most_sources(quantised: bool = False) -> int:
    """How many sources one call may have."""
    return max(f.sources for f in forms() if f.quantised == quantised)


@functools.cache
def most_outputs() -> int:
    """How many outputs one call may have."""
    return max(f.outputs for f in forms())


@functools.cache
def most_spread() -> int:
    """Over how many rows and columns the filters of a pixel may be spread."""
    return max(f.spread for f in forms())


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
