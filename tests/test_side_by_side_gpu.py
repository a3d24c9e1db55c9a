"""Our kernels in a captured graph: which wait for each other, and that they compute what they do one by one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import problems
import pytest
from test_early_start_gpu import PROGRAMMATIC, dependencies

from cutefuse import kernels
from cutefuse.engines.cuda_memory import local_sm

pytestmark = pytest.mark.gpu
SIZE = 24 if problems.SANITIZED else 64  # pixels along an edge
SLOTS = 7


class Memory:
    """Some images of one shape, and kernels that read some of them and write another."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.images = torch.rand(SLOTS, SIZE, SIZE, 64, device="cuda", dtype=torch.float16)
        self.first = self.images.clone()
        self._instances = {n: problems.instantiate(self._problem(n), "float16") for n in (1, 2)}
        self.launchers: list[kernels.Launcher] = []

    @staticmethod
    def _problem(sources: int) -> problems.Problem:
        return problems.Problem(1, SIZE, SIZE, (64,) * sources, 64, 3, 3, pads=(1, 1, 1, 1), activation="Sigmoid")

    def launch(self, reads: Sequence[int], writes: int) -> None:
        """Enqueue on the current stream a convolution of one or two images into another."""
        call = self._instances[len(reads)].call
        address = [image.data_ptr() for image in self.images]
        inputs = [replace(t, data=address[i]) for t, i in zip(call.inputs, reads, strict=False)]
        outputs = [replace(call.outputs[0], data=address[writes])]
        moved = replace(call, inputs=[*inputs, *call.inputs[len(reads) :]], outputs=outputs, _keep=[])
        self.launchers.append(kernels.Launcher(moved))
        self.launchers[-1](self.torch.cuda.current_stream().cuda_stream)

    def run(self, steps: Sequence[Any]) -> None:
        """Each step is what a kernel of ours reads and writes, or the image that PyTorch changes."""
        for step in steps:
            if isinstance(step, int):
                self.images[step].mul_(0.75)
            else:
                self.launch(*step)

    def captured(self, steps: Sequence[Any], beside: bool = True) -> Any:
        graph = self.torch.cuda.CUDAGraph(keep_graph=True)
        with self.torch.cuda.graph(graph), kernels.side_by_side() if beside else contextlib.nullcontext():
            self.run(steps)
        return graph


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    made.run([([0], 1), ([0, 1], 2), 3])  # what is loaded at its first launch
    made.torch.cuda.synchronize()
    yield made
    made.torch.cuda.synchronize()


A, B, C, D = ([0], 1), ([1], 2), ([1], 3), ([2, 3], 4)


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


@pytest.mark.skipif(local_sm() < 90, reason="needs a GPU whose kernels can start early")
def test_kernels_that_wait_for_two_of_ours_start_early(memory: Memory) -> None:
    assert dependencies(memory.captured([A, B, C, D])) == [PROGRAMMATIC] * 4


def test_a_graph_ends_when_all_branches_have_ended(memory: Memory) -> None:
    """Also one in which PyTorch comes last, or first."""
    torch = memory.torch
    for steps in ([A, *[([0], i) for i in range(2, SLOTS)]], [5, A, ([5], 2)], [A, ([5], 2), 1]):
        memory.images.copy_(memory.first)
        memory.run(steps)
        torch.cuda.synchronize()
        expected = memory.images.clone()
        graph = memory.captured(steps)
        for _ in range(20):
            memory.images.copy_(memory.first)
            graph.replay()
            assert torch.equal(memory.images, expected)


@pytest.mark.parametrize("seed", range(4 if problems.SANITIZED else 24))
def test_random_kernels_over_few_images_compute_what_they_do_one_by_one(seed: int, memory: Memory) -> None:
    torch, draw = memory.torch, random.Random(seed)
    steps: list[Any] = []
    for _ in range(30):
        if draw.random() < 0.1:
            steps.append(draw.randrange(SLOTS))
            continue
        *reads, writes = draw.sample(range(SLOTS), draw.choice((2, 2, 3)))
        steps.append((reads, writes))
    memory.images.copy_(memory.first)
    memory.run(steps)
    torch.cuda.synchronize()
    expected = memory.images.clone()
    graph = memory.captured(steps)
    for _ in range(4 if problems.SANITIZED else 100):
        memory.images.copy_(memory.first)
        graph.replay()
        assert torch.equal(memory.images, expected)


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
                    memory.launch(*step)
        for graph, stream in zip((first, second), streams, strict=True):
            with torch.cuda.stream(stream):
                graph.capture_end()
    for graph in (first, second):  # each launch finds a capture that it does not know, and comes after all of it
        assert len(dependencies(graph)) == 2
