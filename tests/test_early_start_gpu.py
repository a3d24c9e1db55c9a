"""Which kernels of a captured graph may start before the kernel in front of them has ended."""

from __future__ import annotations

import ctypes
from typing import Any

import problems
import pytest

from cutefuse import kernels
from cutefuse.engines.cuda_memory import local_sm

pytestmark = pytest.mark.gpu
FULL, PROGRAMMATIC = 0, 1  # CUgraphDependencyType


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = [(name, ctypes.c_uint8) for name in ("from_port", "to_port", "type")] + [
        ("reserved", ctypes.c_uint8 * 5)
    ]


def dependencies(graph: Any) -> list[int]:
    """The types of all edges of a graph that torch captured and kept."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    assert driver.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(count)) == 0
    if count.value == 0:  # none can be asked for
        return []
    nodes, edges = (ctypes.c_void_p * count.value)(), (EdgeData * count.value)()
    others = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetEdges_v2(handle, nodes, others, edges, ctypes.byref(count)) == 0
    return [edge.type for edge in edges]


@pytest.mark.skipif(local_sm() < 90, reason="needs a GPU whose kernels can start early")
@pytest.mark.parametrize(("order", "early"), [("oo", 1), ("xo", 0), ("ox", 0), ("xoox", 1), ("oxo", 0), ("ooo", 2)])
def test_a_kernel_starts_early_only_behind_one_of_ours(order: str, early: int) -> None:
    """o: a launch of ours; x: a kernel of PyTorch, which lets no other one start."""
    import torch

    instance = problems.instantiate(problems.Problem(1, 8, 8, (64,), 64), "float16")
    launch, other = kernels.Launcher(instance.call), torch.ones(64, device="cuda")
    launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for one in order:
            if one == "o":
                launch(torch.cuda.current_stream().cuda_stream)
            else:
                other.mul_(0.5)
    found = dependencies(graph)
    assert len(found) == len(order) - 1
    assert found.count(PROGRAMMATIC) == early and found.count(FULL) == len(found) - early
