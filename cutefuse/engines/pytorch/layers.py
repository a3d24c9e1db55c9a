"""Which layer of a PyTorch program each GPU kernel belongs to, and how long it took.

The times are those of the kernels inside replays of the CUDA graph. A replay does not say which step launched a kernel;
so the program also runs step by step under the profiler, each step in a region of its own, and the two sequences of
kernels are laid side by side. A compiled program has other kernels: there Inductor's code says what each one computes.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
from cutefuse.engines.pytorch.onnx_ops.program import Step

REGION = "cutefuse step "  # a step of the program runs in a region of this name, its number behind it
_OURS = "cutefuse::"  # in the names of our kernels
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Kernel:
    """One execution of a kernel, copy or fill on the GPU. `time_us`: by how much it lengthened the run, so that the
    times of kernels that overlap add up to the whole. `launch` is equal for all kernels of one graph replay."""

    name: str
    start_us: float
    time_us: float
    launch: int
    step: int | None = None


@dataclass(frozen=True)
class KernelSource:
    """One launch in the code that Inductor wrote. `name`: of a Triton kernel, "" for a call of a library.
    `variables`: what the program calls the tensors that it computes. `handle`: of a fused node, -1 for all else."""

    name: str
    variables: tuple[str, ...] = ()
    handle: int = -1


@dataclass
class Layer:
    """A layer as the report shows it: the steps that it computes, its kernels, and its time in each inference."""

    name: str
    steps: list[Step]
    kernels: list[str] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)


def read_trace(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels of a trace of torch.profiler, in the order of their start, with the step whose region holds the
    launch."""
    regions: dict[Any, list[tuple[float, float, int]]] = defaultdict(list)
    launches: dict[int, tuple[float, Any]] = {}
    found: list[dict[str, Any]] = []
    for event in trace.get("traceEvents", []):
        kind, args = event.get("cat"), event.get("args", {})
        if kind == "user_annotation" and event["name"].startswith(REGION):
            start = float(event["ts"])
            regions[event.get("tid")].append((start, start + event["dur"], int(event["name"][len(REGION) :])))
        elif kind in _LAUNCHES and "correlation" in args:
            launches[args["correlation"]] = float(event["ts"]), event.get("tid")
        elif kind in _ON_GPU:
            found.append(event)

    def step_of(correlation: int) -> int | None:
        at, thread = launches.get(correlation, (0.0, None))
        return next((i for start, end, i in regions.get(thread, []) if start <= at <= end), None)

    kernels = []
    busy_until_us = 0.0
    for event in sorted(found, key=lambda e: float(e["ts"])):
        launch, start_us = int(event.get("args", {}).get("correlation", -1)), float(event["ts"])
        end_us = start_us + float(event["dur"])
        # A kernel launched early waits beside the one before it; its own time begins where that one ends.
        time_us = max(end_us - max(start_us, busy_until_us), 0.0)
        busy_until_us = max(busy_until_us, end_us)
        kernels.append(Kernel(event["name"], start_us, time_us, launch, step_of(launch)))
    return kernels


def replays(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels of graph replays apart: one list for each launch of a graph."""
    groups: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.launch].append(kernel)
    return list(groups.values())


def step_layers(steps: Sequence[Step], by_step: Sequence[Kernel], runs: Sequence[Sequence[Kernel]]) -> list[Layer]:
    """One layer for each step. `by_step`: the kernels with their steps; `runs`: the same sequence, timed."""
    layers = [Layer(step.name, [step]) for step in steps]
    owners = [None if kernel.step is None else layers[kernel.step] for kernel in by_step]
    for kernel, layer in zip(by_step, owners, strict=True):
        if layer is not None:
            layer.kernels.append(kernel.name)
    _add_times([layer for layer in layers if layer.kernels], owners, runs)
    return layers


def _add_times(layers: Sequence[Layer], owners: Sequence[Layer | None], runs: Sequence[Sequence[Kernel]]) -> None:
    """Give each layer its time in each run. `owners`: the layer of each kernel of a run."""
    for run in runs:
        times: dict[int, float] = defaultdict(float)
        for owner, kernel in zip(owners, run, strict=False):
            times[id(owner)] += kernel.time_us
        for layer in layers:
            layer.times_us.append(times[id(layer)])


def compiled_layers(
    steps: Sequence[Step], sources: Sequence[KernelSource], runs: Sequence[Sequence[Kernel]]
) -> list[Layer]:
    """One layer for each kernel source, or for each kernel where Inductor's code does not tell."""
    if not runs:
        return []
    names = [k.name for k in runs[0]]
    owners = align(names, sources)
    maker = {out: step for step in steps for out in step.outputs}
    fused = {step.run.handle: step for step in steps if isinstance(step.run, FusedNode)}
    layers: list[Layer] = []
    of_kernel: list[Layer] = []
    computed: set[int] = set()  # Inductor lists what leads to a kernel too, back to the last tensor that it fixed
    last: int | None = None
    for name, owner in zip(names, owners, strict=True):
        if owner is None or owner != last:
            source = KernelSource("") if owner is None else sources[owner]
            listed = list({id(maker[v]): maker[v] for v in source.variables if v in maker}.values())
            own = [step for step in listed if id(step) not in computed] or listed[-1:]
            own = [fused[source.handle]] if source.handle in fused else own
            computed.update(map(id, listed))
            layers.append(Layer((own[0].name if len(own) == 1 else source.name) or name[:120], own))
        layers[-1].kernels.append(name)
        of_kernel.append(layers[-1])
        last = owner
    _add_times(layers, of_kernel, runs)
    return _unique(layers)


def _unique(layers: list[Layer]) -> list[Layer]:
    """The same layers with names that occur once, as a profile needs them."""
    seen: dict[str, int] = defaultdict(int)
    for layer in layers:
        seen[layer.name] += 1
        if seen[layer.name] > 1:
            layer.name = f"{layer.name} #{seen[layer.name]}"
    return layers


def align(kernels: Sequence[str], sources: Sequence[KernelSource]) -> list[int | None]:
    """For each kernel the source that launched it, by position, or None.

    Triton's kernels are known by name and come in order; between two of them are calls of libraries, which
    may launch one kernel or several.
    """
    result: list[int | None] = [None] * len(kernels)
    position, at = 0, 0
    while position < len(kernels):
        end = next((i for i in range(position, len(kernels)) if kernels[i].startswith("triton_")), len(kernels))
        stop = next((i for i in range(at, len(sources)) if sources[i].name), len(sources))
        calls, gap = list(range(at, stop)), end - position
        if gap and calls:
            result[position:end] = _between([_OURS in k for k in kernels[position:end]], calls, sources)
        if end < len(kernels) and stop < len(sources):
            if sources[stop].name != kernels[end]:
                return result  # not the code that ran
            result[end] = stop
            stop += 1
        position, at = end + 1, stop
    return result


def _between(ours: Sequence[bool], calls: Sequence[int], sources: Sequence[KernelSource]) -> list[int | None]:
    """For each kernel of some calls of libraries, in order, its call. `ours`: whether it is a kernel of cutefuse.

    Several kernels of a call lie together. Where each fused node has one kernel of ours, that is its last one, after
    copies and fills; calls that nothing tells apart share their kernels evenly.
    """
    fused = [i for i, call in enumerate(calls) if sources[call].handle >= 0]
    anchors = [i for i, own in enumerate(ours) if own]
    if len(fused) != len(anchors):
        fused, anchors = [], []
    result: list[int | None] = []
    first = 0
    for at, end in zip([*fused, len(calls)], [*(a + 1 for a in anchors), len(ours)], strict=True):
        others, count = calls[first:at], end - len(result) - (at < len(calls))
        if others:
            result += [others[i * len(others) // count] for i in range(count)]
        else:
            result += [calls[min(at, len(calls) - 1)]] * count
        result += calls[at : at + 1]
        first = at + 1
    return result


_LAUNCH = re.compile(r"^\s+(?:\w+ = )?(?:(triton_\w+)\.run\(|((?:extern_kernels|torch\.ops|aten)\.[\w.]+)\()")
_HANDLE = re.compile(r"\.fused_node\.default\(\[.*\], (\d+)\)")
_NODES = re.compile(r"^\s+# Topologically Sorted Source Nodes: \[(.*?)\]")


def kernel_sources(code: str) -> list[KernelSource]:
    """The launches in a module that Inductor wrote, in order, with the tensors that its comments name."""
    found: list[KernelSource] = []
    names: tuple[str, ...] = ()
    inside = False
    for line in code.splitlines():
        inside = inside or re.match(r"\s*def call\(", line) is not None
        if not inside:
            continue
        comment, launch = _NODES.match(line), _LAUNCH.match(line)
        if comment:
            names = tuple(n.strip() for n in comment[1].split(",") if n.strip())
        elif launch:
            handle = _HANDLE.search(line)
            found.append(KernelSource(launch[1] or "", names, int(handle[1]) if handle else -1))
            names = ()
        elif re.match(r"\s*return ", line):
            break
    return found


def profiled(work: Callable[[], Any]) -> list[Kernel]:
    """The kernels of some work on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text(encoding="utf-8")))
