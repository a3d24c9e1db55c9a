"""What a compiler made of the graph with nothing fused: the kernels that only move or compute beside the convolutions.

The graph that TensorRT compiles of a plain model is the list of what it does not fuse. Where there is one, it takes the
place of the rules of `wiring` for everything that fused nodes have not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A kernel that computes neither convolution nor product: the names of its ONNX nodes, and the bytes that it reads
    and writes. is_copy: it only moves."""

    nodes: tuple[str, ...]
    traffic_bytes: int
    is_copy: bool


@dataclass(frozen=True)
class Record:
    """The kernels of a compiled graph beside convolutions and products. known: the nodes that any kernel names."""

    kernels: tuple[Kernel, ...]
    known: frozenset[str]

    def of(self, names: Iterable[str]) -> dict[Kernel, float]:
        """The kernels that work for nodes of these names, each with the share of its nodes that they are."""
        wanted = set(names)
        found = {}
        for kernel in self.kernels:
            if own := wanted.intersection(kernel.nodes):
                found[kernel] = len(own) / len(kernel.nodes)
        return found


def removed_bytes(record: Record, gone: Mapping[str, int]) -> float:
    """Bytes of copies that go with nodes; `gone`: name of a node -> how many sites remove it together."""
    return sum(
        kernel.traffic_bytes / len(kernel.nodes) / gone[name]
        for kernel in record.kernels if kernel.is_copy for name in kernel.nodes if name in gone
    )  # fmt: skip
