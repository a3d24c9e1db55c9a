"""The network's image, which the first convolution reads as it is given: in NCHW, in float32 where a Cast follows, and
before constants scale it, which the filter then does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutefuse import kernels
from cutefuse.graph.read import Graph, label
from cutefuse.kernels import LINEAR
from cutefuse.match.after import Affine, affine_before
from cutefuse.match.answer import Match
from cutefuse.match.conv.read import Folded
from cutefuse.operators import conv_form, conv_math
from cutefuse.operators.conv_call import sources_of
from cutefuse.operators.conv_form import Form

IMAGE = "image"


def of_image(graph: Graph, found: Match, folded: Folded) -> Match | str | None:
    """The same convolution over the image that the network is given, or why what scales the image is not folded into
    its filter; None where it reads anything else, or where the kernels do not read such an image."""
    form, tensor = conv_form.form_of(found.call.op_type), found.inputs[0]
    if form != Form(1, form.suffix) or not isinstance(tensor, str):
        return None
    source, *others = found.call.inputs
    nodes, steps, dtype, why = found.nodes, list[Affine](), source.dtype, ""
    while (node := graph.producer(tensor)) is not None:
        if graph.is_op(node, "Cast") and graph.dtype(node.input[0]) == "float32":
            tensor, dtype = node.input[0], "float32"
        elif step := affine_before(graph, tensor, source.dims[1]):
            steps.insert(0, step[0])
            tensor = step[1]
            if (source.dtype, dtype) == ("float16", "float32"):
                why = "it scales an image that may be too large for float16 without it; put the Cast in front of it"
        else:
            return None
        nodes = (*nodes, node)
    image, attrs = replace(form, image=True), dict[str, Any](found.call.attrs)
    sizes = conv_math.packed_sizes(attrs["channels"], attrs["kernel_shape"], image)
    w, *others = others
    call = replace(
        found.call, op_type=image.op_type, attrs=attrs | {"packed_sizes": sizes}, _keep=[],
        inputs=[replace(source, dtype=dtype, layout=LINEAR), replace(w, dims=(w.dims[0], *sizes)), *others],
    )  # fmt: skip
    if tensor not in graph.inputs or kernels.reject(call):
        return None
    folded = folded.behind(steps)
    if steps:
        dims = graph.dims(tensor)
        if dims is None or len(dims) != 4 or dims[1] != source.dims[1]:  # a constant may make channels, or an axis
            return None
        if why := why or folded.reject() or "":
            return f"{steps[-1].node.op_type} '{label(steps[-1].node)}' stays: {why}"
    constants = folded.constants(sources_of(call), call)
    return replace(found, call=call, nodes=nodes, inputs=(tensor, *constants), takes=found.takes | {IMAGE})
