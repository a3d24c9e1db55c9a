"""The network's image, which the first convolution reads as it is given: in NCHW, in float32 where a Cast follows."""

from __future__ import annotations

from dataclasses import replace

from cutefuse import kernels
from cutefuse.graph.read import Graph
from cutefuse.kernels import LINEAR
from cutefuse.match.answer import Match
from cutefuse.operators import conv_form
from cutefuse.operators.conv_form import Form

IMAGE = "image"


def of_image(graph: Graph, found: Match) -> Match | None:
    """The same convolution over the image that the network is given; None where it reads anything else, or where the
    kernels do not read such an image."""
    form, tensor = conv_form.form_of(found.call.op_type), found.inputs[0]
    if form != Form(1, form.suffix) or not isinstance(tensor, str):
        return None
    node, dtype = graph.producer(tensor), found.call.dtype
    nodes = found.nodes
    if node is not None and node.op_type == "Cast" and graph.dtype(node.input[0]) == "float32":
        nodes, tensor, dtype = (*nodes, node), node.input[0], "float32"
    if tensor not in graph.inputs:
        return None
    source, *others = found.call.inputs
    inputs = [replace(source, dtype=dtype, layout=LINEAR), *others]
    call = replace(found.call, op_type=replace(form, image=True).op_type, inputs=inputs, _keep=[])
    if kernels.reject(call):
        return None
    return replace(found, call=call, nodes=nodes, inputs=(tensor, *found.inputs[1:]), takes=found.takes | {IMAGE})
