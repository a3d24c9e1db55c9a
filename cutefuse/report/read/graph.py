"""The engine graph as data: which layer feeds which, and what lies between."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from cutefuse.engines.tensors import Tensor
from cutefuse.report.read.engine import Engine


@dataclass(frozen=True)
class Edge:
    """A tensor from one layer to another; -1 is the outside (an input or output of the engine)."""

    source: int
    target: int
    tensor: Tensor


def edges(engine: Engine) -> list[Edge]:
    """All edges, in the order of the consuming layers. A tensor with several makers has an edge from each.

    The latest maker before the consumer wins where layers overwrite a tensor in place; makers that come only after it
    (loop-carried tensors) give backward edges.
    """
    makers: dict[str, list[int]] = defaultdict(list)
    for layer in engine.layers:
        for tensor in layer.outputs:
            makers[tensor.name].append(layer.index)
    used: set[tuple[int, str]] = set()
    result: list[Edge] = []
    for layer in engine.layers:
        for tensor in layer.inputs:
            before = [m for m in makers[tensor.name] if m < layer.index] if tensor.name in makers else []
            sources = before or [m for m in makers.get(tensor.name, []) if m != layer.index]
            for source in sources or [-1]:
                used.add((source, tensor.name))
                result.append(Edge(source, layer.index, tensor))
    outputs = set(engine.outputs)
    for layer in engine.layers:
        for tensor in layer.outputs:
            if tensor.name in outputs or (layer.index, tensor.name) not in used and tensor.dims:
                result.append(Edge(layer.index, -1, tensor))
    return result


def neighbours(engine: Engine) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """(producers, consumers) of each layer, as layer indices."""
    producers: dict[int, list[int]] = defaultdict(list)
    consumers: dict[int, list[int]] = defaultdict(list)
    for edge in edges(engine):
        if edge.source >= 0 and edge.target >= 0:
            producers[edge.target].append(edge.source)
            consumers[edge.source].append(edge.target)
    return producers, consumers


def memory_profile(engine: Engine) -> list[float]:
    """Bytes of activations that must be alive while each layer runs, padding of vector layouts included.

    TensorRT's own arena can be larger (alignment, workspace) or smaller (in-place layers).
    """
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    size: dict[str, float] = {}
    outputs, count = set(engine.outputs), len(engine.layers)
    for layer in engine.layers:
        for tensor in (*layer.inputs, *layer.outputs):
            first.setdefault(tensor.name, 0 if tensor.name in engine.inputs else layer.index)
            last[tensor.name] = count - 1 if tensor.name in outputs else layer.index
            size[tensor.name] = max(size.get(tensor.name, 0.0), tensor.padded_bytes or 0.0)
    change = [0.0] * (count + 1)
    for name, size_bytes in size.items():
        change[first[name]] += size_bytes
        change[last[name] + 1] -= size_bytes
    return [max(total, 0.0) for total in accumulate(change[:count])]
