"""How much slower something runs beside another load: on a second stream of its process, or in another process.

Nsight Compute runs one kernel at a time, so it cannot show this; here the same work is timed alone and beside the load.
"""

from __future__ import annotations

import contextlib
import math
import select
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cutefuse.engines.tensorrt.trtexec import end_group
from cutefuse.errors import CutefuseError
from cutefuse.profilers.kernels.cases import DRIVER
from cutefuse.profilers.kernels.drive import work_of
from cutefuse.table import show
from cutefuse.timing.noise import steady

PLACES, KINDS = ("stream", "process"), ("copy", "matmul")
ALONE = "alone"
_ROUNDS, _SAMPLE_US = 31, 5000.0
_START_S = 120.0  # for a load of ours to say that it is ready
_SETTLE_S = 2.0  # for a user's program, which says nothing


Sampler = Callable[[int], float]  # runs -> mean time of one of them, one after the other, in microseconds


@dataclass(frozen=True)
class Load:
    """`place`: "stream" or "process". `work`: "copy", "matmul", or for a process any command line."""

    place: str
    work: str

    @property
    def label(self) -> str:
        return f"{self.place}:{self.work}"

    @classmethod
    def of(cls, text: str) -> Load:
        """From `stream:copy`, `process:matmul`, `process:python train.py`. Raises CutefuseError for anything else."""
        place, _, work = text.partition(":")
        if place not in PLACES or not work or (place == "stream" and work not in KINDS):
            raise CutefuseError(
                f"--beside is {text}; give stream:copy, stream:matmul, process:copy, process:matmul or process:COMMAND"
            )
        return cls(place, work)


@dataclass(frozen=True)
class Times:
    """Samples of one place, each the mean of some runs."""

    label: str
    samples_us: list[float]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def worst_us(self) -> float:
        """The sample that 5 % of them exceed."""
        return sorted(self.samples_us)[math.ceil(0.95 * len(self.samples_us)) - 1]


def measure(sample: Sampler, loads: Sequence[Load], rounds: int = _ROUNDS) -> list[Times]:
    """The work alone, beside each load, and alone again, so that a drift of the clocks shows.

    Raises CutefuseError where a load cannot be started or ends while something is timed beside it.
    """
    once = steady(sample, _SAMPLE_US, most_runs=2000)
    found = [Times(ALONE, [once() for _ in range(rounds)])]
    for load in loads:
        with _process(load) if load.place == "process" else _stream(load) as beside:
            found.append(Times(load.label, [beside(once) for _ in range(rounds)]))
    return [*found, Times(f"{ALONE} again", [once() for _ in range(rounds)])]


_Around = Callable[[Callable[[], float]], float]  # takes a sample while the load is there


@contextlib.contextmanager
def _stream(load: Load) -> Iterator[_Around]:
    """A load on a second stream of this process, enqueued ahead of each sample and still running behind it."""
    import torch

    work, side = work_of(torch, load.work), torch.cuda.Stream()
    pieces = 16

    def beside(sample: Callable[[], float]) -> float:
        nonlocal pieces
        while True:
            done = torch.cuda.Event()
            with torch.cuda.stream(side):
                for _ in range(pieces):
                    work()
                done.record()
            figure = sample()
            covered = not done.query()
            torch.cuda.synchronize()
            if covered or pieces >= 1 << 14:
                return figure
            pieces *= 2

    yield beside


@contextlib.contextmanager
def _process(load: Load) -> Iterator[_Around]:
    """A load in a process of its own, with whatever it starts; it ends with this block."""
    own = load.work in KINDS
    words = [sys.executable, "-m", DRIVER, "load", load.work] if own else shlex.split(load.work)
    try:
        said = subprocess.PIPE if own else subprocess.DEVNULL
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True)
    except (OSError, IndexError) as error:
        raise CutefuseError(f"the load {load.work} cannot be started ({error}); give another --beside") from None

    def there() -> None:
        if child.poll() is not None:
            text = child.stderr.read().decode(errors="replace").strip() if child.stderr else ""
            why = text.splitlines()[-1] if text else f"exit code {child.returncode}"
            raise CutefuseError(f"the load {load.label} ended before the measurement did: {why}")

    def beside(sample: Callable[[], float]) -> float:
        figure = sample()
        there()
        return figure

    with child:  # which closes its pipes
        try:
            if own:
                _wait(child)
            else:
                time.sleep(_SETTLE_S)
            there()
            yield beside
        finally:
            end_group(child)


def _wait(child: subprocess.Popen[bytes]) -> None:
    """Until a load of ours says that it runs, or has ended."""
    assert child.stdout is not None
    if not select.select([child.stdout], [], [], _START_S)[0]:
        raise CutefuseError(f"the load did not start within {_START_S:g} s; is the GPU's memory full?")
    if not child.stdout.readline():
        child.wait(timeout=10)


def event_sampler(launch: Callable[[], Any]) -> Sampler:
    """Times launches on PyTorch's current stream with events."""
    from cutefuse.engines.pytorch.tile_times import mean_us

    return lambda runs: mean_us(launch, runs)


def records(times: Sequence[Times]) -> list[dict[str, Any]]:
    """As JSON: the ratio is to the time alone."""
    first = times[0].median_us
    return [
        {"load": t.label, "median_us": t.median_us, "p95_us": t.worst_us, "ratio": t.median_us / first,
         "samples_us": t.samples_us}
        for t in times
    ]  # fmt: skip


def print_times(title: str, times: Sequence[Times]) -> None:
    """One line for each load."""
    rows = [[r["load"], f"{r['median_us']:.2f}", f"{r['p95_us']:.2f}", f"{r['ratio']:.2f}×"] for r in records(times)]
    show(f"{title}, alone and beside another load", ["load", "median us", "p95 us", "ratio"], rows, (1, 2, 3))
