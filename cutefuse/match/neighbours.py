"""Whether a convolution that cannot be fused has a neighbour worth fusing, so that it is told about."""

from __future__ import annotations

from functools import partial

from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute
from cutefuse.match import before as views
from cutefuse.match.after import chains_after
from cutefuse.match.answer import Refusal
from cutefuse.match.before import Operand
from cutefuse.match.conv.front import find_concat, one_source
from cutefuse.match.explain import behind_concat
from cutefuse.match.sizes import shape_of
from cutefuse.operators.conv_form import Source


def has_neighbour(graph: Graph, conv: NodeProto) -> bool:
    """Whether an activation or a residual follows a convolution of any kind, or what it reads is enlarged or a channel
    range."""
    if not conv.output or not conv.output[0]:
        return False
    weight = graph.dims(conv.input[1]) or ()
    filters = weight[0] if weight and conv.op_type == "Conv" else -1
    if len(weight) > 1 and conv.op_type == "ConvTranspose":
        filters = weight[1] * attribute(conv, "group", 1)
    front = one_source(graph, conv)
    shape = partial(shape_of, graph, conv.output[0], front.sources)
    chain = chains_after(graph, conv.output[0], filters, shape)[0]
    if not chain.is_empty or chain.note:
        return True
    (tensor,) = front.sources
    dims = graph.dims(tensor)
    if dims is None or len(dims) != 4:
        return False
    return views.see_through(graph, Operand(tensor, Source(dims, dims[1]))).source.is_view


def transposed(graph: Graph, node: NodeProto, reason: str) -> Refusal | None:
    """The refusal of a ConvTranspose with such a neighbour, or with a Concat in front, for a reason."""
    near = has_neighbour(graph, node) or behind_concat(graph, node.input[0]) or find_concat(graph, node, 0) is not None
    return Refusal(f"this is a ConvTranspose: {reason}", (node,)) if near else None
