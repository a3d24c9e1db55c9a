"""Times on the GPU of this machine through PyTorch: a call's tiles, and small graphs of standard operators.

Work is repeated inside one CUDA graph over the same operands, so that it finds them in the L2 cache, as inside of a
network, and no launch from the host is part of the time.
"""

from __future__ import annotations

import hashlib
import statistics
import subprocess
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import onnx

import cutefuse
from cutefuse import kernels
from cutefuse.engine.torch_share import shared
from cutefuse.errors import CutefuseError
from cutefuse.kernels import Call

GRAPH_US = 1500.0  # what one replay should take at most
LEAST_COPIES, MOST_COPIES = 16, 200
FIRST_ROUNDS, ROUNDS = 3, 11
NEAR = 1.15  # tiles within this of the best are timed again, in turns


def gpu_timer() -> GpuTimer:
    """The timer of this machine's first GPU. Raises CutefuseError, in one sentence, where there is none."""
    try:
        import torch
    except ImportError:
        raise CutefuseError(
            "tuning takes times on a GPU through PyTorch, which is not installed; pip install cutefuse[torch], or "
            "leave --tune out"
        ) from None
    if not torch.cuda.is_available():
        raise CutefuseError(
            "tuning takes times on a GPU, and PyTorch sees none here; run it on the machine that will run the model, "
            "or leave --tune out"
        )
    major, minor = torch.cuda.get_device_capability()
    if reason := kernels.reject_device(10 * major + minor):
        raise CutefuseError(f"{reason}; leave --tune out")
    return GpuTimer()


class GpuTimer:
    """See `cutefuse.engine.tune.Timer`."""

    device = "cuda"

    @cached_property
    def gpu(self) -> str:
        """Name of the GPU and version of its driver."""
        import torch

        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            driver = ""
        return f"{torch.cuda.get_device_name()}, driver {driver or 'unknown'}"

    @cached_property
    def tiles_machine(self) -> str:
        digest = hashlib.sha256(cutefuse.plugin_path().read_bytes()).hexdigest()[:16]
        return f"{self.gpu}, cutefuse {cutefuse.__version__} {digest}"

    @cached_property
    def plain_machine(self) -> str:
        import torch

        return f"{self.gpu}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"

    def tiles_us(self, call: Call) -> dict[int, float]:
        """Every legal tile; those near the best once more, in turns."""
        import torch

        from cutefuse.engine.torch_graph.fused import FusedNode

        xs = [_operand(t) for t in call.inputs]
        made = [_meta(t) for t in call.outputs]

        def node(tile: int = 0) -> FusedNode:
            found = FusedNode("tuned", call.op_type, dict(call.attrs), [x.to("meta") for x in xs], made)
            found.config = tile
            return found

        first = node()
        size = max(first.workspace_bytes(), 0)
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        with shared()():
            graphs: dict[int, _Repeated] = {}
            reasons = []
            for tile in first.tiles():
                own = node(tile)
                own.workspace = workspace
                try:
                    graphs[tile] = _Repeated(partial(own.launch, xs))
                except (CutefuseError, RuntimeError) as error:
                    reasons.append(str(error).split("\n")[0])
            if not graphs:
                reason = first.reject() or next(iter(reasons), "it has no tile")
                raise CutefuseError(f"{call.op_type} cannot be timed here: {reason}")
            times = _in_turns(graphs, FIRST_ROUNDS)
            least = min(times.values())
            times |= _in_turns({tile: g for tile, g in graphs.items() if times[tile] <= NEAR * least}, ROUNDS)
        return {tile: times[tile] for tile in graphs}

    def model_us(self, model: onnx.ModelProto, mode: str) -> float:
        from cutefuse.engine.torch_gpu import TorchEngine

        engine = TorchEngine.build(model, mode, self.device)
        # Its own graph holds one inference, whose launch from the host would be most of the time.
        with shared()():
            return _in_turns({0: _Repeated(engine.run_outside_graph)}, ROUNDS)[0]


class _Repeated:
    """Work that is repeated inside of a CUDA graph, for `GRAPH_US` or less."""

    def __init__(self, work: Callable[[], Any]) -> None:
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            # Called one by one, small work takes longer than inside of a graph: too few copies, which does no harm.
            once_us = max(_between(side, lambda: [work() for _ in range(4)]) / 4, 0.1)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.copies = min(max(round(GRAPH_US / once_us), LEAST_COPIES), MOST_COPIES)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(self.copies):
                work()
        self.sample_us()  # the first replay uploads the graph

    def sample_us(self) -> float:
        """The time of one piece of work, the mean over one replay."""
        import torch

        self._graph.replay()  # the GPU is busy while the host enqueues what is timed
        return _between(torch.cuda.current_stream(), self._graph.replay) / self.copies


def _between(stream: Any, work: Callable[[], Any]) -> float:
    """Microseconds of the GPU for what `work` enqueues."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000


def _in_turns(graphs: Mapping[int, _Repeated], rounds: int) -> dict[int, float]:
    """The median time of each over rounds in which all are replayed in turn."""
    times: dict[int, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(graph.sample_us())
    return {name: statistics.median(own) for name, own in times.items()}


def _dtype(tensor: kernels.Tensor) -> Any:
    import torch

    return getattr(torch, tensor.dtype)


def _meta(tensor: kernels.Tensor) -> Any:
    import torch

    return torch.empty(tensor.dims, dtype=_dtype(tensor), device="meta")


def _operand(tensor: kernels.Tensor) -> Any:
    """Values like those of a network: a kernel over zeros draws less power and runs at a higher clock."""
    import torch

    from cutefuse.engine.torch_graph.program import image_like

    made = image_like(list(tensor.dims), _dtype(tensor), "cuda")
    if made.is_floating_point():
        return made.normal_(0, 1 if made.dim() == 4 else 0.05)
    return made.copy_(torch.randint(-100, 100, tensor.dims, device="cuda"))
