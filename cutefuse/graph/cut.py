"""Parts of a graph, for running or timing them alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import onnx
from onnx import NodeProto, helper, numpy_helper

from cutefuse.errors import CutefuseError
from cutefuse.graph.read import ELEM_TYPES, Graph, label


def cut(graph: Graph, nodes: Iterable[NodeProto], outputs: Sequence[str]) -> onnx.ModelProto:
    """A model of some nodes with fixed sizes: constants inside, what else they read as inputs.

    outputs: the tensors that it returns. The sizes are those that figures are for.
    Raises CutefuseError where the size or the type of an input is not known.
    """
    inside = {id(n) for n in nodes}
    chosen = [n for n in graph.nodes if id(n) in inside]
    made = {o for n in chosen for o in n.output if o}
    read = dict.fromkeys(name for n in chosen for name in n.input if name and name not in made)
    inputs, constants = [], []
    for name in read:
        value = graph.size_values(name)
        if value is not None:
            constants.append(numpy_helper.from_array(value, name))
            continue
        dims, dtype = graph.sizes(name), graph.dtype(name)
        if dims is None or min(dims, default=0) < 0 or dtype is None:
            reader = next(label(n) for n in chosen if name in n.input)
            raise CutefuseError(f"the sizes of {name}, which {reader} reads, are not known; --input-shape gives them")
        inputs.append(helper.make_tensor_value_info(name, ELEM_TYPES[dtype], list(dims)))
    results = [_output(graph, name) for name in dict.fromkeys(outputs)]
    body = helper.make_graph(chosen, "cut", inputs, results, constants)
    return helper.make_model(body, opset_imports=list(graph.model.opset_import), ir_version=graph.model.ir_version)


def needed(
    nodes: Sequence[NodeProto], outputs: Collection[str], given: Callable[[str], bool]
) -> tuple[list[NodeProto], list[str]]:
    """The nodes that make `outputs` of tensors that are `given` or that no node makes, in their order; and what they
    read of these. Of several makers of a tensor the first counts."""
    maker = {o: i for i, n in reversed(list(enumerate(nodes))) for o in n.output if o}
    ahead, places, read = list(outputs), set[int](), dict[str, None]()
    while ahead:
        name = ahead.pop()
        if name not in maker or (name not in outputs and given(name)):
            read[name] = None
        elif maker[name] not in places:
            places.add(maker[name])
            ahead += filter(None, nodes[maker[name]].input)
    return [nodes[i] for i in sorted(places)], list(read)


def _output(graph: Graph, name: str) -> onnx.ValueInfoProto:
    dims, dtype = graph.sizes(name), graph.dtype(name)
    if dtype is None:
        return helper.make_empty_tensor_value_info(name)
    known = None if dims is None else [d if d >= 0 else None for d in dims]
    return helper.make_tensor_value_info(name, ELEM_TYPES[dtype], known)
