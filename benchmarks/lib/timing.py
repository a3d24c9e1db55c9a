"""Timing of device work: CUDA-graph replays over operands that do not fit into the L2 cache, variants interleaved.

One graph holds several launches that rotate through copies of the operands, so every launch finds its inputs in DRAM.
Variants of one problem are replayed in turn, round after round and in another order each time, so that clocks and
temperature are the same for all: at its power limit a GPU runs a kernel up to a tenth slower after power-hungry ones.
"""

from __future__ import annotations

import math
import random
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from cutefuse.errors import CutefuseError

Launch = Callable[[int], Any]  # enqueues one run over the i-th set of operands on the current stream

MAX_SETS = 40
TARGET_GRAPH_US = 1500.0


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch over the replays of one variant."""

    median_us: float
    p20_us: float
    p80_us: float
    replays: int


def rotation_sets(bytes_per_set: int, l2_bytes: int) -> int:
    """Copies of the operands that together hold three times the L2 cache."""
    return max(2, min(MAX_SETS, math.ceil(3 * l2_bytes / max(1, bytes_per_set))))


def capture(launch: Launch, sets: int) -> tuple[Any, int]:
    """(graph, launches in it); the launches rotate through the sets and fill about 1.5 ms."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):  # lazy initialisation and library autotuning happen here, outside the graph
            launch(i % sets)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for i in range(5):
            launch(i % sets)
        end.record()
        end.synchronize()
        estimate_us = start.elapsed_time(end) * 1e3 / 5
    launches = sets * max(1, math.ceil(min(60, TARGET_GRAPH_US / estimate_us) / sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            launch(i % sets)
    return graph, launches


def shuffled(names: Iterable[str], round_: int) -> list[str]:
    """The names in this round's order, the same in every run."""
    order = list(names)
    random.Random(round_).shuffle(order)
    return order


def interleaved(variants: Mapping[str, Launch], sets: int, rounds: int) -> dict[str, Timing | str]:
    """Times every variant in turn, `rounds` times; a variant that cannot run maps to its reason."""
    import torch

    graphs: dict[str, tuple[Any, int]] = {}
    times: dict[str, list[float]] = {name: [] for name in variants}
    result: dict[str, Timing | str] = {}
    for name, launch in variants.items():
        try:
            graphs[name] = capture(launch, sets)
        except Exception as error:  # a peer's failure is a result of the benchmark, not the end of it
            torch.cuda.synchronize()
            result[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for round_ in range(rounds + 1):
        for name in shuffled(graphs, round_):
            graph, launches = graphs[name]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_ > 0:  # the first replay uploads the graph
                times[name].append(start.elapsed_time(end) * 1e3 / launches)
    for name in graphs:
        values = sorted(times[name])
        at = [values[min(len(values) - 1, int(q * len(values)))] for q in (0.2, 0.8)]
        result[name] = Timing(statistics.median(values), at[0], at[1], len(values))
    return result


def clocks() -> dict[str, Any]:
    """Driver, clocks in MHz, power in W, temperature in C, now; empty where nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu", "-i", "0"]
    try:
        found = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    driver, *numbers = found.stdout.strip().split(", ")
    seen = zip(("sm_mhz", "memory_mhz", "power_w", "temperature_c"), numbers, strict=False)
    row = {name: float(value) for name, value in seen if value.replace(".", "", 1).isdigit()}
    return row | ({"driver": driver} if driver else {})


def require_gpu() -> None:
    """Raises CutefuseError, in one sentence, without torch or without a CUDA device."""
    try:
        import torch
    except ImportError:
        raise CutefuseError(
            "measuring needs PyTorch with CUDA, and torch is not installed; pip install torch"
        ) from None
    if not torch.cuda.is_available():
        raise CutefuseError("no CUDA device was found; run this on a machine with an NVIDIA GPU")


def device_row() -> dict[str, Any]:
    """What every JSON row says about the machine and the day: GPU, versions, date."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "date": date.today().isoformat(),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def l2_bytes() -> int:
    """Size of the device's L2 cache."""
    import torch

    return int(torch.cuda.get_device_properties(0).L2_cache_size)
