"""Fused nodes that do not need each other run side by side in an engine's CUDA graph, where small ones leave a GPU's
multiprocessors idle: the branches of a detector's head, or of an Inception block.

The kernel library makes a captured kernel wait only for our kernels whose memory it touches (`kernels.side_by_side`).
Whatever PyTorch runs between them waits for all, and all that follow wait for it; hence the order of the steps here.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from cutefuse import kernels
from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
from cutefuse.engines.pytorch.onnx_ops.program import Program, Step

# Memory that is in use is not given to a kernel beside it, which would have to wait; but what is given again lies in
# the L2 cache. On an H200, with 50 MB of it, 8 MB gain as much as 24 in Inception and GoogLeNet; 24 made HRNet 4 %
# slower.
KEPT_BYTES = 8 << 20


def arrange(program: Program) -> None:
    """Bring a program's steps into an order with the longest runs of fused nodes: of the steps that could be next,
    those of PyTorch that a fused node needs come first and those that none needs last."""
    steps = program.steps
    needs = _needs(steps)
    fused = [isinstance(step.run, FusedNode) for step in steps]
    ranks = [1 if own else 2 for own in fused]
    for i in reversed(range(len(steps))):
        for j in needs[i] if ranks[i] < 2 else ():
            ranks[j] = 1 if fused[j] else 0
    users: list[list[int]] = [[] for _ in steps]
    for i, own in enumerate(needs):
        for j in own:
            users[j].append(i)
    missing = [len(own) for own in needs]
    ready = sorted((ranks[i], i) for i, count in enumerate(missing) if count == 0)
    order: list[Step] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(steps[i])
        for user in users[i]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (ranks[user], user))
    program.steps = order


@contextlib.contextmanager
def side_by_side(program: Program) -> Iterator[None]:
    """What is captured inside runs fused nodes of the program side by side."""
    kept, nodes = Kept(KEPT_BYTES), with_others(program)
    try:
        for node in nodes:
            node.kept = kept
        with kernels.side_by_side():
            yield
    finally:
        for node in nodes:
            node.kept = None


def with_others(program: Program) -> list[FusedNode]:
    """The fused nodes that come neither before nor after every other one."""
    before: list[int] = []  # of each step, as bits
    for needs in _needs(program.steps):
        bits = 0
        for j in needs:
            bits |= before[j] | 1 << j
        before.append(bits)
    runs = [(i, step.run) for i, step in enumerate(program.steps) if isinstance(step.run, FusedNode)]
    return [
        node for i, node in runs if any(i != j and not before[i] >> j & 1 and not before[j] >> i & 1 for j, _ in runs)
    ]


def _needs(steps: Sequence[Step]) -> list[set[int]]:
    """The steps whose results each step reads."""
    maker = {slot: i for i, step in enumerate(steps) for slot in step.outputs}
    return [{maker[slot] for slot in step.inputs if slot in maker} for step in steps]


class Kept:
    """The tensors that were made last, of so many bytes at most."""

    def __init__(self, most_bytes: int) -> None:
        self._left, self._tensors = most_bytes, deque[Tensor]()

    def add(self, tensors: Sequence[Tensor]) -> None:
        self._tensors.extend(tensors)
        self._left -= sum(t.untyped_storage().nbytes() for t in tensors)
        while self._left < 0:
            self._left += self._tensors.popleft().untyped_storage().nbytes()
