"""What a wider filter computes besides the convolution: an average pool in front of it, whose mean of k x k pixels is
k x k taps, each the weight over k * k; and slices of every other pixel (Focus, SpaceToDepth), whose taps alternate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import NodeProto

from cutefuse.graph.clean import TO_THE_END
from cutefuse.graph.read import Graph, attribute, label
from cutefuse.match.answer import Refusal
from cutefuse.match.conv import read as conv_facts
from cutefuse.match.conv.front import Front, added, find_concat, one_source
from cutefuse.match.conv.read import Facts
from cutefuse.operators.conv_form import most_sources
from cutefuse.operators.conv_math import Geometry

POOLS = "pools"


# A tensor, the nodes that a convolution with a wider filter over it computes as well, and the facts of that one.
_Wider = tuple[str, Sequence[NodeProto], Facts]


def wider(graph: Graph, conv: NodeProto) -> list[tuple[Front, Facts]] | str:
    """What a convolution with a wider filter reads and computes in the place of this one and of the pool or slices that
    it alone reads, over the tensors of a Concat first; [] where there are none, or why they stay."""
    site = one_source(graph, conv)
    node = graph.producer(site.sources[0])
    alone = all(graph.only_user(t) is not None for t in (*site.sources, *(n.output[0] for n in site.nodes)))
    if not alone or not graph.is_op(node, "AveragePool", "SpaceToDepth", "Concat"):
        return []
    own = conv_facts.read(graph, conv, site)
    if isinstance(own, Refusal) or own.depthwise:
        return []
    found = _of_pool(graph, node, own) if node.op_type == "AveragePool" else _of_slices(graph, node, own)
    if found is None or isinstance(found, str):
        return f"{node.op_type} '{label(node)}' stays: {found}" if found else []
    tensor, nodes, facts = found
    reader = next(n for n in nodes if n.input[0] == tensor)
    fronts = [find_concat(graph, reader, most_sources()), one_source(graph, reader)]
    pairs = list[tuple[Front, Facts]]()
    for front in (f for f in fronts if isinstance(f, Front)):
        dims = conv_facts.source_dims(graph, front, facts.weight_dims[1])
        if isinstance(dims, str):
            return f"{node.op_type} '{label(node)}' stays: {dims}"
        geometry = replace(facts.geometry, pads=added(facts.geometry.pads, front.pads))
        whole = replace(front, nodes=(*site.nodes, *nodes, *front.nodes))
        pairs.append((whole, replace(facts, sources=dims, geometry=geometry)))
    return pairs


def _of_pool(graph: Graph, pool: NodeProto, own: Facts) -> _Wider | str:
    """The filter that also takes the means of an AveragePool, or why there is none."""
    kernel = tuple(attribute(pool, "kernel_shape", ()))
    sizes = (graph.dims(pool.input[0]) or (-1,) * 4)[2:]
    if len(kernel) != 2 or len(sizes) != 2:
        return ""
    geometry = conv_facts.geometry_of(pool, kernel, sizes)
    if isinstance(geometry, str):
        return geometry
    if own.weight_dims[2:] != (1, 1) or any(own.geometry.pads):
        return "only a 1x1 Conv without padding can take its means in"
    if set(geometry.dilations) != {1}:
        return f"its dilations are {list(geometry.dilations)}; only a pool without them goes into a filter"
    if any(geometry.pads) and not attribute(pool, "count_include_pad", 0):
        return "count_include_pad=0 divides by fewer pixels at the border; only counted pads go into a filter"
    spans = [size + sum(geometry.pads[axis::2]) - k for axis, (size, k) in enumerate(zip(sizes, kernel, strict=True))]
    exact = all(size >= 0 and span % s == 0 for size, span, s in zip(sizes, spans, geometry.strides, strict=True))
    if attribute(pool, "ceil_mode", 0) and not exact:
        return "ceil_mode=1 may add means of fewer pixels to an image of this size; export it with 0 where it adds none"
    strides = tuple(a * b for a, b in zip(geometry.strides, own.geometry.strides, strict=True))
    count = np.float32(math.prod(kernel))

    def make(w: np.ndarray) -> np.ndarray:
        return np.broadcast_to(w.astype(np.float32) / count, (*w.shape[:2], *kernel))

    dims = (*own.weight_dims[:2], kernel[0], kernel[1])
    return pool.input[0], [pool], replace(own, weight_dims=dims, geometry=replace(geometry, strides=strides), make=make)


def _of_slices(graph: Graph, node: NodeProto, own: Facts) -> _Wider | None:
    """The filter over the image whose pixels a Concat of Slices, or a SpaceToDepth, sorts into channels, if it does."""
    nodes, first = [node], list[tuple[int, int]]()  # of each slice: its first row and column
    if node.op_type == "Concat":
        if attribute(node, "axis", 1) not in (1, -3):
            return None
        images, steps = set[str](), set[int]()
        for tensor in node.input:
            image, starts, slices = _sliced(graph, tensor)
            if starts.keys() != {2, 3}:
                return None
            images.add(image)
            steps |= {step for _, step in starts.values()}
            first.append((starts[2][0], starts[3][0]))
            nodes += [n for n in slices if all(n is not other for other in nodes)]
        step, tensor = steps.pop(), images.pop()
        if images or steps:
            return None
    else:
        step, tensor = attribute(node, "blocksize"), node.input[0]
    dims, (K, C, R, S) = graph.dims(tensor), own.weight_dims
    if step < 2 or C % (step * step):
        return None
    every = [(row, column) for row in range(step) for column in range(step)]
    first, channels = first or every, C // len(every)
    # Each once: only then are all slices of one size. A dilated filter has zeros, which make NaN of infinity.
    if sorted(first) != every or set(own.geometry.dilations) != {1}:
        return None
    if dims is None or len(dims) != 4 or dims[1] != channels:
        return None

    def make(w: np.ndarray) -> np.ndarray:
        whole = np.empty((K, channels, step * R, step * S), w.dtype)
        for i, (row, column) in enumerate(first):
            whole[:, :, row::step, column::step] = w[:, i * channels : (i + 1) * channels]
        return whole

    g = own.geometry
    pads = (step * g.pads[0], step * g.pads[1], step * g.pads[2], step * g.pads[3])
    geometry = Geometry((step * R, step * S), (step * g.strides[0], step * g.strides[1]), pads)
    facts = replace(own, weight_dims=(K, channels, step * R, step * S), geometry=geometry, make=make)
    return tensor, nodes, facts


def _sliced(graph: Graph, tensor: str) -> tuple[str, dict[int, tuple[int, int]], list[NodeProto]]:
    """The image of which a tensor has every step-th pixel, axis -> (the first, the step), and the Slices between."""
    starts, nodes = dict[int, tuple[int, int]](), list[NodeProto]()
    while graph.is_op(node := graph.producer(tensor), "Slice"):
        dims, bounds = graph.dims(node.input[0]), graph.slice_bounds(node)
        if dims is None or len(dims) != 4 or bounds is None:
            break
        found = {}
        for axis, start, end, step in zip(*bounds, strict=True):
            to_the_end = end >= TO_THE_END or 0 <= dims[axis % 4] <= end
            if axis % 4 in (2, 3) and to_the_end:
                found[axis % 4] = (start, step)
        if len(found) < len(bounds[0]) or found.keys() & starts:
            break
        starts |= found
        nodes.append(node)
        tensor = node.input[0]
    return tensor, starts, nodes
