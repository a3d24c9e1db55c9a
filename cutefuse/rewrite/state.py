"""What flows through the passes of `patch`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto

from cutefuse.graph.clean import Cleaned
from cutefuse.graph.read import Graph
from cutefuse.match.site import FUSED, Site
from cutefuse.operators.layouts import TENSORRT
from cutefuse.rewrite.options import Options
from cutefuse.rewrite.overflow import Overflow
from cutefuse.rewrite.tanh_silu import Silu
from cutefuse.select.engines import TANH_SILU, Engine
from cutefuse.select.policy import Saving
from cutefuse.select.times import Device


@dataclass
class Conversion:
    """What `--dtype` did. casts, cast_bytes: of scope "sites", where Casts stand around fused nodes."""

    dtype: str
    scope: str
    kept_float32: Sequence[str] = ()  # names of nodes, of scope "sites" those of sites
    overflows: Sequence[Overflow] = ()  # those among them whose weights are too large
    changed: bool = True
    casts: int = 0
    cast_bytes: int | None = 0


@dataclass(frozen=True)
class Folded:
    """One sum that became a convolution: its name, how many convolutions it was, and the tensor that it makes."""

    name: str
    convolutions: int
    tensor: str


@dataclass
class State:
    """A model on its way through the passes, and what they found. Fields get their values from the passes."""

    source: Path
    output: Path
    report_path: Path | None  # None on a dry run
    sha256: str  # of the file `source`
    options: Options
    model: ModelProto
    engine: Engine  # whose time is predicted, on `device`
    device: Device
    layout: int  # of the fused convolutions
    turned: bool  # whether fused nodes that were there before get another layout
    before: Counter[str]  # op_types of the file
    external: bool  # whether weights lie beside the file
    assumed: Mapping[str, Sequence[int]]  # sizes of inputs whose batch is open
    open_inputs: Mapping[str, Sequence[int]]  # those with other open axes, whose sizes nobody gave
    conversion: Conversion | None = None
    converted: ModelProto | None = None  # a copy of the model in its new type, for the proof
    branches: Sequence[Folded] = ()  # sums that are one convolution now
    cleaned: Cleaned = field(init=False)
    cleaning: Mapping[str, Any] = field(init=False)  # what the cleaned copy lacks, and why
    sites: list[Site] = field(init=False)
    forms: set[str] = field(init=False)  # `Match.takes` of the candidates before any choice
    saving: Saving = field(init=False)
    doomed: Set[int] = field(init=False)  # ids of the nodes that fused ones replace
    silus: Sequence[Silu] = field(init=False)  # that stay outside
    unused_options: Sequence[str] = field(init=False)
    known_faults: Sequence[Mapping[str, Any]] = field(init=False)
    after: Counter[str] = field(init=False)  # op_types of the patched model
    proof: dict[str, Any] | None = None  # what `verify` found; None where it was not asked
    started: float = field(default_factory=time.perf_counter)

    @property
    def graph(self) -> Graph:
        return self.cleaned.whole

    @property
    def fused(self) -> list[Site]:
        return [s for s in self.sites if s.status == FUSED]

    @property
    def rewritten(self) -> list[Silu]:
        """The SiLUs that are written with tanh."""
        return [s for s in self.silus if not s.left] if self.options.tanh_silu else []

    @property
    def fuses_tanh(self) -> bool:
        """Whether the engine computes SiLU's tanh form inside a convolution."""
        return self.engine.name == TENSORRT and self.engine.version >= TANH_SILU

    @property
    def changes(self) -> bool:
        """Whether the patched model is another one."""
        return bool(self.fused or self.branches or self.rewritten or self.turned)
