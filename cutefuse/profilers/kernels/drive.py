"""The programs that run under NVIDIA's profilers or beside a measurement: a case, an engine layer by layer, a load.

python -m cutefuse.profilers.kernels.drive case OP CASE DTYPE SIZE CONFIG REPEATS
python -m cutefuse.profilers.kernels.drive engine FILE INFERENCES
python -m cutefuse.profilers.kernels.drive load copy|matmul
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError, command_line
from cutefuse.profilers.kernels.cases import Problem, launcher, torch_with_gpu

INFERENCE = "cutefuse inference"  # the NVTX range of one inference; Nsight Compute profiles what lies inside
LAYER = "cutefuse layer "  # and of one layer, with its name behind


def case(problem: Problem, config: int, repeats: int) -> None:
    torch = torch_with_gpu()
    launch = launcher(problem, config)
    for _ in range(repeats):
        launch()
    torch.cuda.synchronize()


def engine(path: Path, inferences: int) -> None:
    """Run an engine of the PyTorch back end outside of its CUDA graph, inside NVTX ranges. What builds it lies outside.

    By cuDNN every step has a range of its own; torch.compile's kernels have that of the inference alone.
    """
    from cutefuse.engines.pytorch.files import load

    torch = torch_with_gpu()
    loaded = load(path)
    loaded.run_outside_graph()
    torch.cuda.synchronize()

    @contextlib.contextmanager
    def ranged(name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        yield
        torch.cuda.nvtx.range_pop()

    for _ in range(inferences):
        with ranged(INFERENCE):
            if loaded.settings.mode == "compile":
                loaded.run_outside_graph()
            else:
                loaded.run_steps(lambda i: ranged(f"{LAYER}{loaded.program.steps[i].name}"))
    torch.cuda.synchronize()


def load(kind: str) -> None:
    """Keep the GPU busy until stdin is closed: `copy` its memory, `matmul` its multiprocessors. Says "ready" first."""
    import threading

    torch = torch_with_gpu()
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    work = work_of(torch, kind)
    pieces = [torch.cuda.Event() for _ in range(2)]
    for turn in itertools.count():  # two pieces are always under way, so that the GPU never waits for this process
        for _ in range(8):
            work()
        pieces[turn % 2].record()
        pieces[(turn + 1) % 2].synchronize()
        if turn == 1:
            print("ready", flush=True)
        if over.is_set():
            break
    torch.cuda.synchronize()


def work_of(torch: Any, kind: str) -> Any:
    """One piece of a load, a fraction of a millisecond: a copy of 256 MiB, or a float16 product of 4096^3."""
    if kind == "copy":
        source = torch.ones(1 << 26, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    if kind == "matmul":
        a = torch.randn(4096, 4096, device="cuda").half()
        c = torch.empty_like(a)
        return lambda: torch.mm(a, a, out=c)
    raise CutefuseError(f"load {kind} is unknown; choose copy or matmul")


@command_line
def main(argv: list[str] | None = None) -> None:
    kind, *words = sys.argv[1:] if argv is None else argv
    if kind == "case":
        case(Problem(*words[:4]), int(words[4]), int(words[5]))
    elif kind == "engine":
        engine(Path(words[0]), int(words[1]))
    else:
        load(words[0])


if __name__ == "__main__":
    sys.exit(main())
