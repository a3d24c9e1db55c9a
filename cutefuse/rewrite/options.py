"""What a user asks of `patch`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from cutefuse.errors import CutefuseError
from cutefuse.operators.layouts import AUTO, CHOICES, ENGINES, TENSORRT
from cutefuse.select.compiled import Record

DTYPES = {"float16": "float16", "fp16": "float16", "half": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16"}
SCOPES = ("model", "sites")
TAKES = (
    "single", "upsample", "ranges", "residual", "parallel", "pre_activation", "alone", "branches", "image", "depthwise",
    "pools", "spread",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What to patch and how; the defaults fuse the sites that should pay in the newest TensorRT.

    A single text stands for a list of one. Raises CutefuseError for a choice of another type, or that there is not.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    include_op: Sequence[str] = ()
    exclude_op: Sequence[str] = ()
    without: Sequence[str] = ()  # of TAKES
    sm: int = 0  # compute capability * 10 of the GPU that will run the model; 0 for any
    functions: bool = True
    verify: bool = False
    seed: int = 0
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dry_run: bool = False
    min_gain_us: float | None = None  # the least gain of a site; None: see cutefuse.select.policy.Policy
    dtype: str = ""  # float16 or bfloat16: lower the precision before fusing
    clean: bool = False  # write the cleaned graph, not only the fused sites
    scope: str = ""  # of dtype: "model" (also "" for float16) or the fused "sites" (also "" for bfloat16)
    keep_float32: Sequence[str] = ()
    only: frozenset[str] | None = None  # names of sites; None for all that the filters leave
    all_sites: bool = False  # every legal site, whatever it saves
    engine: str = TENSORRT  # whose time is predicted: one of layouts.ENGINES
    trt_version: str = ""  # as 10.3; "" for the newest that is known
    tanh_silu: bool = False  # write the SiLUs that stay outside in the form that TensorRT 11 fuses
    compiled: Record | None = None  # what the engine's compiler makes of the model with nothing fused
    compiler_said: Mapping[str, Any] | None = None  # of the model with and without fused nodes, for the report
    outweighed: Mapping[str, str] = field(default_factory=dict)  # sites to leave out, by name, each with the reason
    layout: str = AUTO  # of the fused convolutions: one of layouts.CHOICES
    gpu: str = ""  # name of a board in the table of peaks; "" for the usual one of `sm`
    idle: Sequence[str] = ()  # sentences about the caller's own options that have no effect, for the report

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f.name, str(f.type), getattr(self, f.name)))
        for form in self.without:
            _among("without", form, TAKES)
        if self.dtype:
            _among("dtype", self.dtype, DTYPES)
            object.__setattr__(self, "dtype", DTYPES[self.dtype])
        if self.scope:
            _among("scope", self.scope, SCOPES)
        _among("layout", self.layout, CHOICES)
        _among("engine", self.engine, ENGINES)


_WORDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "bool": (bool, "True or False"), "int": (int, "a whole number from 0, as sm=90"), "str": (str, "a text"),
    "float | None": ((int, float), "a number of microseconds"),
}  # fmt: skip


def _checked(name: str, kind: str, value: Any) -> Any:
    """The value of a choice as its field holds it."""
    if kind in ("Sequence[str]", "frozenset[str] | None"):
        if value is None and kind.endswith("None"):
            return value
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Collection) else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise _wrong(name, value, "a text, or a list of them")
        return frozenset(texts) if kind.startswith("frozenset") else texts
    if kind == "Mapping[str, Sequence[int]]":
        whole = isinstance(value, Mapping) and all(
            isinstance(n, str) and not isinstance(d, str) and all(type(size) is int and size >= 0 for size in d)
            for n, d in value.items()
        )
        if not whole:
            raise _wrong(name, value, "the sizes of each input, as {'x': [1, 3, 224, 224]}")
    elif kind in _WORDS and not (value is None and kind.endswith("None")):
        types, words = _WORDS[kind]
        typed = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
        if not typed or (isinstance(value, int) and value < 0):
            raise _wrong(name, value, words)
    return value


def _wrong(name: str, value: object, words: str) -> CutefuseError:
    return CutefuseError(f"{name} was given {value!r}; give {words}")


def _among(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise CutefuseError(f"{name} has no choice '{value}'; choose among {', '.join(allowed)}")
