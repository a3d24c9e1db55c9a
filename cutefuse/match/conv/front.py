"""What stands in front of a Conv: the tensors that it reads, and the nodes between that are computed with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute, label
from cutefuse.match.after import Affine, steps_before
from cutefuse.match.answer import Refusal
from cutefuse.match.qdq import dequantises, kind_of
from cutefuse.match.sizes import Pads, pads_of

MAX_DEPTH = 16  # nested concats and pass-through nodes; no real network has more


@dataclass(frozen=True)
class Front:
    """The tensors that a Conv reads, concatenated in this order; the nodes between them and the Conv; which of those
    are Concats: none where the Conv reads one tensor as it is; the zeros that others add around the image; the affine
    steps between."""

    sources: tuple[str, ...]
    nodes: tuple[NodeProto, ...]
    concats: tuple[NodeProto, ...]
    pads: Pads = (0, 0, 0, 0)
    steps: tuple[Affine, ...] = ()

    @property
    def word(self) -> str:
        """What to call a tensor that the Conv reads."""
        return "source" if self.concats else "input"


def find_concat(graph: Graph, conv: NodeProto, flatten_to: int) -> Front | Refusal | None:
    """The Concat that feeds a Conv, seen through Identity, inference Dropout and Pad with zeros.

    Nested Concats are flattened while there are at most `flatten_to` sources; 0 leaves them.
    """
    between, tensor, pads = _in_front(graph, conv)
    concat = graph.producer(tensor)
    quantised = dequantises(concat, graph)
    while concat is not None and kind_of(concat, graph):
        concat = graph.producer(concat.input[0])
    if concat is None or concat.op_type != "Concat" or concat.domain not in ("", "ai.onnx"):
        return None
    nodes = (conv, *between, concat)
    if refusal := broken(graph, conv, nodes) or broken(graph, concat, nodes):
        return refusal
    if quantised:
        return Refusal("quantised site: Q/DQ nodes stand between Concat and Conv, TensorRT fuses those itself", nodes)
    if not _joins_channels(graph, concat):
        axis = attribute(concat, "axis", 1)
        return Refusal(f"Concat joins axis {axis}; only the channel axis (1 or -3) can be fused into a Conv", nodes)
    sources, inner = flattened(graph, concat, flatten_to)
    return Front(tuple(sources), (*between, concat, *inner), (concat, *inner), pads)


def one_source(graph: Graph, conv: NodeProto) -> Front:
    """The one tensor that a Conv reads, seen through Identity, inference Dropout and Pad with zeros."""
    between, tensor, pads = _in_front(graph, conv)
    return Front((tensor,), tuple(between), (), pads)


def behind_steps(graph: Graph, conv: NodeProto, limit: int) -> list[Front]:
    """What a Conv reads behind affine steps that only convolutions read, the tensors of a Concat there first; [] where
    it has groups, or where engines fold the steps into a convolution before them."""
    site, weight = one_source(graph, conv), graph.dims(conv.input[1]) or ()
    if len(weight) != 4 or attribute(conv, "group", 1) != 1:
        return []
    steps, tensor = steps_before(graph, site.sources[0], weight[1])
    nodes = [*site.nodes, *(s.node for s in reversed(steps))]
    between, source = pass_through(graph, tensor)
    maker = graph.producer(source)
    engines = graph.is_op(maker, "Conv", "ConvTranspose") and graph.only_user(tensor) is not None
    made = [n.output[0] for n in nodes]
    others = [n for t in made for n in graph.users(t) if all(n is not own for own in nodes)]
    convolved = all(graph.is_op(n, "Conv") and n.input[0] in made and _is_plain(graph, n) for n in others)
    if not steps or engines or not convolved or any(map(graph.escapes, made)):
        return []
    nodes += between
    fronts = [Front((source,), tuple(nodes), (), site.pads, tuple(steps))]
    if maker is not None and _joins_channels(graph, maker):
        sources, inner = flattened(graph, maker, limit)
        fronts.insert(0, Front(tuple(sources), (*nodes, maker, *inner), (maker, *inner), site.pads, tuple(steps)))
    return fronts


def _in_front(graph: Graph, node: NodeProto) -> tuple[list[NodeProto], str, Pads]:
    """The nodes without effect and the Pads with zeros before a convolution or a pool, last first; the tensor behind
    them; what the Pads add to the node's own. Automatic pads follow from the padded image, so they add to none."""
    nodes, tensor = pass_through(graph, node.input[0])
    pads: Pads = (0, 0, 0, 0)
    explicit = attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID") and node.op_type != "ConvTranspose"
    while explicit and (found := _zeros_around(graph, graph.producer(tensor))):
        pad, more = found
        before, tensor = pass_through(graph, pad.input[0])
        nodes, pads = [*nodes, pad, *before], added(pads, more)
    return nodes, tensor, pads


def _zeros_around(graph: Graph, node: NodeProto | None) -> tuple[NodeProto, Pads] | None:
    """A Pad that puts zeros around images of any size, and how many; None for another node."""
    pads = pads_of(graph, node)
    if node is None or pads is None or min(pads) < 0 or attribute(node, "mode", "constant") != "constant":
        return None
    filled = node.input[2] if len(node.input) > 2 and graph.opset >= 11 else ""
    value = graph.constant(filled) if filled else np.array(attribute(node, "value", 0.0))
    return (node, pads) if value is not None and value.size == 1 and not value.any() else None


def added(pads: Sequence[int], more: Sequence[int]) -> Pads:
    """Pads around pads."""
    return pads[0] + more[0], pads[1] + more[1], pads[2] + more[2], pads[3] + more[3]


def broken(graph: Graph, node: NodeProto, nodes: tuple[NodeProto, ...]) -> Refusal | None:
    """The refusal of a site that holds a node against the standard."""
    if not (fault := graph.fault(node)):
        return None
    return Refusal(f"node '{label(node)}' breaks the ONNX standard ({fault}); repair the model", nodes)


def pass_through(graph: Graph, tensor: str) -> tuple[list[NodeProto], str]:
    """Identity and inference Dropout nodes that make a tensor, last first, and the tensor behind them."""
    nodes: list[NodeProto] = []
    while len(nodes) < MAX_DEPTH:
        node = graph.producer(tensor)
        if graph.is_op(node, "Dropout") and tensor == node.output[0]:
            training = node.input[2] if len(node.input) > 2 else ""
            off = not training or (graph.constant(training) is not None and not np.any(graph.constant(training)))
            unused_mask = len(node.output) < 2 or not (graph.users(node.output[1]) or graph.escapes(node.output[1]))
            if not off or not unused_mask or graph.opset < 7:
                break
        elif not graph.is_op(node, "Identity"):
            break
        nodes.append(node)
        tensor = node.input[0]
    return nodes, tensor


def _joins_channels(graph: Graph, concat: NodeProto | None) -> bool:
    return graph.is_op(concat, "Concat") and attribute(concat, "axis", 1) in (1, -3)


def flattened(graph: Graph, concat: NodeProto, limit: int, convolved: bool = True) -> tuple[list[str], list[NodeProto]]:
    """The tensors that nested Concats join, while they are at most `limit`, and the inner Concats that were opened:
    with `convolved` those alone that nothing but convolutions reads."""
    sources, nodes = list(concat.input), list[NodeProto]()
    while len(nodes) < limit:
        for i, name in enumerate(sources):
            inner = graph.producer(name)
            if inner is None or not _joins_channels(graph, inner) or len(sources) - 1 + len(inner.input) > limit:
                continue
            if not convolved or (sources.count(name) == 1 and _only_convolved(graph, name)):
                sources[i : i + 1] = inner.input
                nodes.append(inner)
                break
        else:
            break
    return sources, nodes


def _only_convolved(graph: Graph, joined: str) -> bool:
    """Whether nothing but convolutions reads a joined tensor, directly or through further Concats."""
    pending, seen = [joined], {joined}
    while pending:
        tensor = pending.pop()
        if graph.escapes(tensor):
            return False
        for node in graph.users(tensor):
            if _joins_channels(graph, node):
                pending += {node.output[0]} - seen
                seen.add(node.output[0])
            elif not graph.is_op(node, "Conv") or list(node.input).index(tensor) != 0 or not _is_plain(graph, node):
                return False
    return True


def _is_plain(graph: Graph, conv: NodeProto) -> bool:
    """Whether nothing is known against fusing a Conv before all its facts are read."""
    return attribute(conv, "group", 1) == 1 and graph.is_constant(conv.input[1])
