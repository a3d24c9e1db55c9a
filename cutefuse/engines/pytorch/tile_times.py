"""Times of a call's tiles on the GPU of this machine, through PyTorch.

Work is repeated inside one CUDA graph over the same operands, so that it finds them in the L2 cache, as inside of a
network, and no launch from the host is part of the time. Large operands are not found there in a network either.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

import cutefuse
from cutefuse import kernels
from cutefuse.engines.pytorch.lock import alone
from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
from cutefuse.engines.pytorch.onnx_ops.program import image_like
from cutefuse.errors import CutefuseError, first_line
from cutefuse.kernels import Call
from cutefuse.timing.noise import interleave

NEAR = 1.15  # tiles within this of the best are timed again, in turns


@dataclass(frozen=True)
class Effort:
    """What a time may cost. `tiles`: how many of the kernels' guesses are timed, 0 for every legal tile. `graph_us`:
    what one replay should take at most. `first_rounds`: of all tiles; `rounds`: of those near the best."""

    tiles: int
    graph_us: float
    least_copies: int
    most_copies: int
    first_rounds: int
    rounds: int


THOROUGH = Effort(0, 1500.0, 16, 200, 3, 11)
# For an engine that is being built: a few milliseconds a tile. Of the 21 shapes whose Hopper tiles were all timed
# (benchmarks/results/concat_conv_h200.json) each has its fastest one among the first six guesses.
QUICK = Effort(8, 250.0, 4, 40, 3, 7)
_AHEAD_CYCLES = 1_500_000  # of the GPU's clock: most of a millisecond


class TileTimer:
    """See `cutefuse.timing.calls.TileTimer`. The GPU is PyTorch's current one."""

    device = "cuda"

    def __init__(self, effort: Effort = THOROUGH) -> None:
        self.effort = effort
        self.most_tiles = effort.tiles
        self.notes: list[str] = []

    @cached_property
    def gpu(self) -> str:
        """Name of the GPU and version of its driver."""
        return f"{torch.cuda.get_device_name()}, driver {_driver() or 'unknown'}"

    @cached_property
    def l2_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)

    @cached_property
    def tiles_machine(self) -> str:
        return f"{self.gpu}, cutefuse {cutefuse.__version__} {_digest(cutefuse.plugin_path())}"

    def tiles_us(self, call: Call) -> dict[int, float]:
        """The legal tiles that the effort allows; those near the best once more, in turns."""
        given, made = [_meta(t) for t in call.inputs], [_meta(t) for t in call.outputs]

        def node(tile: int = 0) -> FusedNode:
            found = FusedNode("tuned", call.op_type, dict(call.attrs), given, made)
            found.config = tile
            return found

        first = node()
        count = operand_sets(sum(t.nbytes for t in given), self.l2_bytes)
        # No copy is part of the time.
        sets = [[first.operand(_operand(t), i) for i, t in enumerate(call.inputs)] for _ in range(count)]
        size = max(first.workspace_bytes(), 0)
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        with alone():
            graphs: dict[int, Repeated] = {}
            reasons = []
            for tile in first.tiles()[: self.effort.tiles or None]:
                own = node(tile)
                own.workspace = workspace
                try:
                    graphs[tile] = Repeated(partial(_launch_next, own, cycle(sets)), self.effort)
                except (CutefuseError, RuntimeError) as error:
                    reasons.append(f"tile {own.tile_name} of {call.op_type} was not timed: {first_line(error)}")
            if not graphs:
                reason = first.reject() or next(iter(reasons), "it has no tile")
                raise CutefuseError(f"{call.op_type} cannot be timed here: {reason}")
            self.notes += reasons
            times = in_turns(graphs, self.effort.first_rounds)
            least = min(times.values())
            near = {tile: g for tile, g in graphs.items() if times[tile] <= NEAR * least}
            times |= in_turns(near, self.effort.rounds)
        return {tile: times[tile] for tile in graphs}


class Repeated:
    """Work that is repeated inside of a CUDA graph, for as long as the effort says or less."""

    def __init__(self, work: Callable[[], Any], effort: Effort) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            # The host enqueues while the GPU waits; work of very many launches seems longer, and gets fewer copies.
            torch.cuda._sleep(_AHEAD_CYCLES)
            once_us = max(mean_us(work, 4), 0.1)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.copies = min(max(round(effort.graph_us / once_us), effort.least_copies), effort.most_copies)
        self._graph = torch.cuda.CUDAGraph()
        with kernels.side_by_side(False), torch.cuda.graph(self._graph):
            for _ in range(self.copies):
                work()
        self.sample_us()  # the first replay uploads the graph

    def sample_us(self) -> float:
        """The time of one piece of work, the mean over one replay."""
        self._graph.replay()  # the GPU is busy while the host enqueues what is timed
        return mean_us(self._graph.replay) / self.copies


def mean_us(work: Callable[[], Any], runs: int = 1) -> float:
    """Microseconds of the GPU for what `work` enqueues on PyTorch's current stream, the mean over some runs of it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(runs):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / runs


def in_turns(graphs: Mapping[int, Repeated], rounds: int) -> dict[int, float]:
    """The median time of each over rounds in which all are replayed in turn."""
    times = interleave([graph.sample_us for graph in graphs.values()], rounds)
    return dict(zip(graphs, map(statistics.median, times), strict=True))


@functools.cache
def _driver() -> str:
    """The version of the driver, "" where it does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _meta(tensor: kernels.Tensor) -> torch.Tensor:
    return torch.empty(tensor.dims, dtype=getattr(torch, tensor.dtype), device="meta")


def _launch_next(node: FusedNode, sets: Iterator[list[torch.Tensor]]) -> None:
    node.launch(next(sets))


def operand_sets(read_bytes: int, l2_bytes: int) -> int:
    """How many sets of operands of so many bytes take turns: what fills more than half of the L2 cache is not found
    there after the layers between, so that two sets together must not fit."""
    return 1 if read_bytes <= l2_bytes / 2 else 2


def _operand(tensor: kernels.Tensor) -> torch.Tensor:
    """Values like those of a network: a kernel over zeros draws less power and runs at a higher clock."""
    made = image_like(list(tensor.dims), getattr(torch, tensor.dtype), "cuda")
    if made.is_floating_point():
        return made.normal_(0, 1 if made.dim() == 4 else 0.05)
    return made.copy_(torch.randint(-100, 100, tensor.dims, device="cuda"))
