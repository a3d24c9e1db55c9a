"""Times on this GPU: the best tile of a fused call, and what the same nodes cost without it. Equal work is timed once.

The rival is PyTorch's, by cuDNN or torch.compile, the better of the two where both are asked for; TensorRT's own times
are those of a profile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx
from onnx import TensorProto, helper, numpy_helper

from cutefuse.errors import CutefuseError
from cutefuse.graph.body import TILE
from cutefuse.kernels import Call
from cutefuse.timing.cache import Times, TuneCache

RIVALS = {"best": ("cudnn", "compile"), "cudnn": ("cudnn",), "compile": ("compile",)}  # what to beat -> modes
_SMALL = 64  # elements up to which a constant may be a parameter, so that its value tells two graphs apart


class TileTimer(Protocol):
    """Takes times of tiles in microseconds, warm, inside of a CUDA graph. `most_tiles`: how many guesses of a call are
    timed, 0 for every legal tile. `notes`: a sentence for each tile that could not be timed."""

    most_tiles: int
    notes: list[str]

    @property
    def tiles_machine(self) -> str:
        """What the times of tiles depend on: GPU, driver, our library."""

    def tiles_us(self, call: Call) -> dict[int, float]:
        """Id of each tile -> time, best guess first. Raises CutefuseError where none runs."""


class Timer(TileTimer, Protocol):
    """Times graphs of standard operators as well."""

    @property
    def plain_machine(self) -> str:
        """What the times of plain graphs depend on: GPU, driver, PyTorch, cuDNN."""

    def model_us(self, model: onnx.ModelProto, mode: str) -> float:
        """A graph of standard operators. Raises CutefuseError where the mode cannot run it."""


@dataclass(frozen=True)
class Tiles:
    """Legal tiles of a call by their time. `guess`: the first one that runs."""

    times_us: Mapping[int, float]
    guess: int

    @property
    def best(self) -> int:
        return min(self.times_us, key=lambda tile: self.times_us[tile])

    @property
    def best_us(self) -> float:
        return self.times_us[self.best]


@dataclass(frozen=True)
class Replaced:
    """What nodes cost without a fused one: mode -> time, and why a mode is missing."""

    times_us: Mapping[str, float]
    failures: Mapping[str, str]

    @property
    def mode(self) -> str:
        return min(self.times_us, key=lambda mode: self.times_us[mode], default="")

    @property
    def best_us(self) -> float | None:
        return self.times_us[self.mode] if self.times_us else None


class TileTuner:
    """Takes the times of a call's tiles once: from the cache where they are there. `timed`, `known`: how many came from
    where."""

    def __init__(self, timer: TileTimer, cache: TuneCache) -> None:
        self.timer, self.cache = timer, cache
        self.timed = self.known = 0

    def tiles(self, call: Call) -> Tiles:
        """The times of a call's tiles; every size must be known. Raises CutefuseError where none runs.

        A timer of the first guesses keeps its times apart, and takes those of all tiles where they are known.
        """
        key, machine = call_key(call), self.timer.tiles_machine
        times = self._known(machine, key)
        if not times and self.timer.most_tiles:
            key += f" first {self.timer.most_tiles}"
            times = self._known(machine, key)
        if not times:
            times = {str(tile): time_us for tile, time_us in self.timer.tiles_us(call).items()}
            self._keep("tiles", machine, key, times)
        else:
            self.known += 1
        return Tiles({int(tile): time_us for tile, time_us in times.items()}, int(next(iter(times))))

    def _known(self, machine: str, key: str) -> Times:
        times = self.cache.get("tiles", machine, key)
        return times if all(name.isdigit() for name in times) else {}

    def _keep(self, kind: str, machine: str, key: str, times: Times) -> None:
        self.timed += 1
        self.cache.put(kind, machine, key, times)


class Tuner(TileTuner):
    """Takes the times of graphs once as well."""

    timer: Timer

    def __init__(self, timer: Timer, cache: TuneCache, rival: str = "best") -> None:
        if rival not in RIVALS:
            raise CutefuseError(f"the rival '{rival}' is unknown; choose one of {', '.join(RIVALS)}")
        super().__init__(timer, cache)
        self.modes = RIVALS[rival]
        self._failures: dict[tuple[str, str], str] = {}  # not cached: the next run may have the memory, or the compiler

    def replaced(self, plain: onnx.ModelProto, around: onnx.ModelProto | None = None) -> Replaced:
        """The time of `plain`; less that of `around`, the part of it that would run with a fused node as well."""
        times: Times = {}
        failures: dict[str, str] = {}
        for mode in self.modes:
            try:
                inside_us = 0.0 if around is None else self._model_us(around, mode)
                times[mode] = max(self._model_us(plain, mode) - inside_us, 0.0)
            except CutefuseError as error:
                failures[mode] = str(error)
        return Replaced(times, failures)

    def _model_us(self, model: onnx.ModelProto, mode: str) -> float:
        key, machine = model_key(model), self.timer.plain_machine
        times = self.cache.get("plain", machine, key)
        if mode in times:
            self.known += 1
            return times[mode]
        if (key, mode) in self._failures:
            raise CutefuseError(self._failures[key, mode])
        try:
            times[mode] = self.timer.model_us(model, mode)
        except CutefuseError as error:
            self._failures[key, mode] = str(error)
            raise
        self._keep("plain", machine, key, times)
        return times[mode]


def call_key(call: Call) -> str:
    """Equal for calls that cost the same: operator, sizes, types, layouts, attributes; not where the data lies, nor the
    tile that a node asks for, since all of them are timed."""
    return _digest({
        "op_type": call.op_type,
        "operands": [[list(t.dims), t.dtype, t.layout, t.ld] for t in (*call.inputs, *call.outputs)],
        "attrs": {
            name: list(v) if isinstance(v, Sequence) else v for name, v in sorted(call.attrs.items()) if name != TILE
        },
    })  # fmt: skip


def model_key(model: onnx.ModelProto) -> str:
    """Equal for graphs that cost the same: operators, attributes, sizes, types, whole numbers; not names or weights."""
    graph = model.graph
    numbers: dict[str, int] = {"": -1}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    stored = {t.name: t for t in graph.initializer}
    inputs = [[number(v.name), *_type(v)] for v in graph.input if v.name not in stored]
    nodes = []
    for node in graph.node:
        attributes = sorted((a.name, a.SerializeToString(deterministic=True).hex()) for a in node.attribute)
        read = [_constant(stored[n]) if n in stored else number(n) for n in node.input]
        nodes.append([node.domain, node.op_type, attributes, read, [number(o) for o in node.output]])
    opsets = sorted((o.domain, o.version) for o in model.opset_import)
    return _digest([opsets, inputs, nodes, [number(o.name) for o in graph.output]])


def _type(value: onnx.ValueInfoProto) -> list[Any]:
    tensor = value.type.tensor_type
    return [tensor.elem_type, [d.dim_value for d in tensor.shape.dim]]


def _constant(tensor: TensorProto) -> list[Any]:
    kind = [helper.tensor_dtype_to_string(tensor.data_type), list(tensor.dims)]
    values = numpy_helper.to_array(tensor)
    # The values of a bias cost nothing; those of pads or axes are what is computed.
    return [*kind, values.tolist()] if values.size <= _SMALL and values.dtype.kind in "iub" else kind


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
