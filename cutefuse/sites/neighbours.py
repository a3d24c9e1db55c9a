"""Whether a convolution that cannot be fused has a neighbour worth fusing, so that it is told about."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute
from cutefuse.ops.conv_form import Source
from cutefuse.sites import conv_facts, views
from cutefuse.sites.chain import Shape, chains_after
from cutefuse.sites.match import Refusal
from cutefuse.sites.near import behind_concat
from cutefuse.sites.views import Operand

MAX_DEPTH = 24  # nodes before a convolution; two with a SiLU behind them, as in a bottleneck, are six
_ALIKE = ("BatchNormalization", "Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh", "HardSwish", "Swish", "Identity", "Mul")


def output_shape(graph: Graph, conv: NodeProto, images: Sequence[str]) -> Shape:
    """What is known of the sizes of a convolution's output, as a residual must have them; `images` are tensors of the
    same batch."""
    own = graph.partial_symbols(conv.output[0]) or ()
    rank = len(own) or 4
    # Shape inference gives new names to equal sizes: a Concat along channels needs equal N, and a convolution that
    # pads what it takes away keeps rows and columns.
    kept = [graph.partial_symbols(t) or () for t in _as_large(graph, conv)]
    batches = [graph.partial_symbols(t) or () for t in images]
    known = [[own, *batches, *kept], [own], *[[own, *kept]] * (rank - 2)]
    return tuple(frozenset(s[i] for s in rows if len(s) == rank and s[i] != "") for i, rows in enumerate(known))


def _as_large(graph: Graph, conv: NodeProto) -> list[str]:
    """Tensors before a convolution that have as many images, rows and columns as its output, the nearest first."""
    found: list[str] = []
    node: NodeProto | None = conv
    while len(found) < MAX_DEPTH:
        if not graph.is_op(node, "Conv", *_ALIKE) or not node.input:  # none in a damaged model
            break
        if node.op_type == "Conv" and not _keeps_size(graph, node):
            break
        before = node.input[0]
        if node.op_type == "Mul":  # x * sigmoid(x)
            gates = [graph.producer(t) for t in node.input]
            inside = [i for g in gates if graph.is_op(g, "Sigmoid", "HardSigmoid") for i in g.input]
            if len(inside) != 1 or inside[0] not in node.input:
                break
            before = inside[0]
        found.append(before)
        node = graph.producer(before)
    return found


def _keeps_size(graph: Graph, conv: NodeProto) -> bool:
    """Whether a convolution's output has the rows and columns of its input, whatever these are."""
    window = (graph.dims(conv.input[1]) or ())[2:] if len(conv.input) > 1 else ()
    ones = [1] * len(window)
    if len(window) != 2 or any(w < 1 for w in window) or list(attribute(conv, "strides", ones)) != ones:
        return False
    mode = attribute(conv, "auto_pad", "NOTSET")
    if mode != "NOTSET":
        return bool(mode in ("SAME_UPPER", "SAME_LOWER"))
    pads, steps = list(attribute(conv, "pads", [0] * 4)), list(attribute(conv, "dilations", ones))
    taken = [(w - 1) * d for w, d in zip(window, steps, strict=False)]
    return len(pads) == 4 and len(steps) == 2 and [pads[0] + pads[2], pads[1] + pads[3]] == taken


def has_neighbour(graph: Graph, conv: NodeProto) -> bool:
    """Whether an activation or a residual follows a convolution of any kind, or what it reads is enlarged or a channel
    range."""
    if not conv.output or not conv.output[0]:
        return False
    weight = graph.dims(conv.input[1]) or ()
    filters = weight[0] if weight and conv.op_type == "Conv" else -1
    if len(weight) > 1 and conv.op_type == "ConvTranspose":
        filters = weight[1] * attribute(conv, "group", 1)
    front = conv_facts.one_source(graph, conv)
    chain = chains_after(graph, conv.output[0], filters, output_shape(graph, conv, front.sources))[0]
    if not chain.is_empty or chain.note:
        return True
    (tensor,) = front.sources
    dims = graph.dims(tensor)
    if dims is None or len(dims) != 4:
        return False
    return views.see_through(graph, Operand(tensor, Source(dims, dims[1]))).source.is_view


def reads_concat(graph: Graph, conv: NodeProto) -> bool:
    """Whether a Concat feeds a convolution of any kind."""
    return conv_facts.find_concat(graph, conv, 0) is not None


def transposed(graph: Graph, node: NodeProto) -> Refusal | None:
    """The refusal of a ConvTranspose with such a neighbour, or with a Concat in front."""
    if not has_neighbour(graph, node) and not behind_concat(graph, node.input[0]) and not reads_concat(graph, node):
        return None
    return Refusal("this is a ConvTranspose, and only a Conv can be fused; it stays as it is", (node,))
