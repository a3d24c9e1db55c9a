"""Our kernels in a captured graph: which wait for each other, and that they compute what they do one by one."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import emulated
import gpu
import problems
import pytest
from test_early_start_gpu import PROGRAMMATIC, dependencies

from cutefuse import kernels
from cutefuse.engines.cuda_memory import local_sm

pytestmark = pytest.mark.gpu
SIZE = 8 if emulated.EMULATED else 24 if problems.SANITIZED else 64  # pixels along an edge
SLOTS = 7
on_a_gpu = pytest.mark.skipif(emulated.EMULATED, reason="reads a graph of PyTorch's")


class Memory:
    """Some images of one shape, and kernels that read some of them and write another."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.buffers = [gpu.Buffer.of(SIZE * SIZE * 64, "float16", 0) for _ in range(SLOTS)]
        self.first = torch.rand(SLOTS, SIZE * SIZE * 64).to(gpu.DEVICE, torch.float16)
        self._instances = {n: problems.instantiate(self._problem(n), "float16") for n in (1, 2)}
        self.launchers: list[kernels.Launcher] = []
        self.reset()

    @staticmethod
    def _problem(sources: int) -> problems.Problem:
        form = {} if emulated.EMULATED else {"R": 3, "S": 3, "pads": (1, 1, 1, 1)}
        return problems.Problem(1, SIZE, SIZE, (64,) * sources, 64, activation="Sigmoid", **form)  # type: ignore[arg-type]

    def reset(self) -> None:
        for buffer, first in zip(self.buffers, self.first, strict=True):
            buffer.view.copy_(first)

    def values(self) -> Any:
        gpu.synchronize()
        return self.torch.stack([buffer.view for buffer in self.buffers])

    def launch(self, reads: Sequence[int], writes: int, stream: int) -> None:
        """Enqueue a convolution of one or two images into another."""
        call = self._instances[len(reads)].call
        inputs = [replace(t, data=self.buffers[i].view.data_ptr()) for t, i in zip(call.inputs, reads, strict=False)]
        outputs = [replace(call.outputs[0], data=self.buffers[writes].view.data_ptr())]
        moved = replace(call, inputs=[*inputs, *call.inputs[len(reads) :]], outputs=outputs, _keep=[])
        self.launchers.append(kernels.Launcher(moved))
        self.launchers[-1](stream)

    def run(self, steps: Sequence[Any], stream: int) -> None:
        """Each step is what a kernel of ours reads and writes, or the image that somebody else changes."""
        for step in steps:
            if not isinstance(step, int):
                self.launch(*step, stream)
            elif emulated.EMULATED:
                view = self.buffers[step].view
                size = ctypes.c_size_t(view.numel() * view.element_size())
                emulated.call("cudaMemsetAsync", ctypes.c_void_p(view.data_ptr()), 0x2E, size, ctypes.c_void_p(stream))
            else:
                self.buffers[step].view.mul_(0.75)

    def results(self, steps: Sequence[Any], replays: int) -> Iterator[tuple[Any, Any]]:
        """What the steps make one by one, and what each replay of a graph makes in which they run side by side."""
        self.run(steps, gpu.current_stream())
        expected = self.values()

        def launch(stream: int) -> None:
            with kernels.side_by_side():
                self.run(steps, stream)

        graph = gpu.capture(launch, gpu.new_stream())
        for _ in range(replays):
            self.reset()
            graph.replay()
            yield self.values(), expected

    def captured(self, steps: Sequence[Any], beside: bool = True) -> Any:
        """A graph whose edges can be read."""
        graph = self.torch.cuda.CUDAGraph(keep_graph=True)
        with self.torch.cuda.graph(graph), kernels.side_by_side(beside):
            self.run(steps, gpu.current_stream())
        return graph


@pytest.fixture
def memory() -> Memory:
    made = Memory()
    if not emulated.EMULATED:
        made.run([([0], 1), ([0, 1], 2), 3], gpu.current_stream())  # loads what is new
        made.reset()
        gpu.synchronize()
    return made


A, B, C, D = ([0], 1), ([1], 2), ([1], 3), ([2, 3], 4)


@on_a_gpu
@pytest.mark.parametrize(
    ("steps", "edges"),
    [
        ([A, B, C, D], 4),  # a diamond
        ([A, ([5], 6)], 0),
        ([A, ([5], 0)], 1),  # writes what the one before reads
        ([A, ([5], 1)], 1),  # writes what the one before writes
        ([A, B, ([5], 1)], 2),  # waits for both, but the second waits for the first
        ([A, ([5], 6), 3, B], 3),  # what is not ours waits for all, and all behind it for it
        ([3, A, ([5], 6)], 2),
        ([A, ([0], 2), ([0], 3), ([0], 4)], 0),
    ],
)
def test_kernels_wait_for_those_whose_memory_they_touch(steps: Any, edges: int, memory: Memory) -> None:
    assert len(dependencies(memory.captured(steps))) == edges
    assert len(dependencies(memory.captured(steps, beside=False))) == len(steps) - 1


@on_a_gpu
@pytest.mark.skipif(local_sm() < 90, reason="needs a GPU whose kernels can start early")
def test_kernels_that_wait_for_two_of_ours_start_early(memory: Memory) -> None:
    assert dependencies(memory.captured([A, B, C, D])) == [PROGRAMMATIC] * 4


@pytest.mark.parametrize(
    "steps",
    [
        [A, *[([0], i) for i in range(2, SLOTS)]],
        [5, A, ([5], 2)],  # somebody else is first
        [A, ([5], 2), 1],  # or last
        [A, 1, ([1], 2), ([0], 3), 0, ([0], 1)],
    ],
)
def test_branches_compute_what_they_do_one_by_one(steps: list[Any], memory: Memory) -> None:
    """Also at the end of a graph, and around what is not ours."""
    for got, expected in memory.results(steps, 4 if problems.SANITIZED else 20):
        assert memory.torch.equal(got, expected)


@pytest.mark.parametrize("seed", range(4 if problems.SANITIZED else 24))
def test_random_kernels_over_few_images_compute_what_they_do_one_by_one(seed: int, memory: Memory) -> None:
    draw = random.Random(seed)
    steps: list[Any] = []
    for _ in range(15 if problems.SANITIZED else 30):
        if draw.random() < 0.1:
            steps.append(draw.randrange(SLOTS))
            continue
        *reads, writes = draw.sample(range(SLOTS), draw.choice((2, 2, 3)))
        steps.append((reads, writes))
    for got, expected in memory.results(steps, 4 if problems.SANITIZED else 100):
        assert memory.torch.equal(got, expected)


@on_a_gpu
def test_a_capture_that_another_one_follows_is_not_mixed_with_it(memory: Memory) -> None:
    """Also one of another stream in between, by the same thread."""
    torch = memory.torch
    first, second = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.CUDAGraph(keep_graph=True)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    with kernels.side_by_side():
        for graph, stream in zip((first, second), streams, strict=True):
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
        for step in ([0], 1), ([0], 2), ([0], 3):
            for stream in streams:
                with torch.cuda.stream(stream):
                    memory.launch(*step, stream.cuda_stream)
        for graph, stream in zip((first, second), streams, strict=True):
            with torch.cuda.stream(stream):
                graph.capture_end()
    for graph in (first, second):  # each launch finds a capture that it does not know, and comes after all of it
        assert len(dependencies(graph)) == 2
