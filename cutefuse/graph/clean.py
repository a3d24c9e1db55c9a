"""A cleaned copy of a graph for finding sites: constants folded, Slice, Identity, Cast and Pad without effect removed.

Every tensor of the copy is a tensor of the model under the same name, and every node of it stands for one of the
model's, so that what is found in the copy can be rewritten in the model, which stays as it is. The weights are shared.

Library cleaners would change what a patched model has to keep: ONNX Runtime's folds a Mul into a filter under a new
name and refuses plugin nodes, others drop metadata and quantisation annotations. Large weights are neither read nor
copied here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from cutefuse.graph.fold import fold
from cutefuse.graph.read import ELEM_TYPES, Graph, attribute, reads_of, replace_nodes
from cutefuse.graph.shapes import believed, inferred

ROUNDS = 64  # of inference, folding and removal; each but the last makes something known
TO_THE_END = (1 << 31) - 1  # an end of a Slice from which on ONNX means the whole axis, whatever its size
NO_OPS = ("Identity", "Cast", "Slice", "Pad")


@dataclass(frozen=True)
class Cleaned:
    """`graph`: the cleaned copy. `whole`: the model itself, with all that shape inference found on the way.

    no_ops: output of each node without effect -> the tensor that has the same value.
    folded: tensor that nodes of the model compute -> its value.
    note: why constants were left, one sentence; "" where none were. stale: the same of noted sizes.

    A graph that is not to be cleaned stands for itself: `Cleaned(graph, graph)`.
    """

    graph: Graph
    whole: Graph
    no_ops: Mapping[str, str] = field(default_factory=dict)
    folded: Mapping[str, TensorProto] = field(default_factory=dict)
    note: str = ""
    stale: str = ""

    def originals(self, nodes: tuple[NodeProto, ...]) -> tuple[NodeProto, ...]:
        """The model's nodes for these of the copy, and the no-ops through which they read."""
        found: dict[int, NodeProto] = {}
        for node in nodes:
            own = next((n for o in node.output if o and (n := self.whole.producer(o)) is not None), node)
            found.setdefault(id(own), own)
        pending = list(found.values())
        while pending:
            for name in pending.pop().input:
                maker = self.whole.producer(name) if name in self.no_ops else None
                if maker is not None and id(maker) not in found:
                    found[id(maker)] = maker
                    pending.append(maker)
        return tuple(found.values())

    def sized(self, sizes: Mapping[str, Sequence[int]]) -> Graph:
        """The copy as it is on inputs of these sizes."""
        stored = self.graph.initializers
        return Graph(self.graph.model, self.graph.folder, inferred(self.graph.model, stored, sizes), stored)


def clean(model: ModelProto, folder: Path) -> Cleaned:
    """The cleaned copy of a model's graph. Bodies of any kind, graph outputs and what bodies read stay as they are.

    Raises CutefuseError for a broken graph: a tensor defined twice, a cycle.
    """
    whole = Graph(model, folder)
    # A large value in a node would be copied with the node.
    literals = {n.output[0]: value for n in whole.nodes if (value := _literal(whole, n)) is not None}
    stored = whole.initializers | literals
    infos, outputs, stale = believed(model, stored)
    if stale:
        whole.forget_sizes()
    folded: dict[str, TensorProto] = {}
    no_ops: dict[str, str] = {}
    for _ in range(ROUNDS):
        copy = _copy(model, infos, outputs, literals.keys() | folded.keys(), no_ops)
        shapes = inferred(copy, stored | folded)
        graph = Graph(copy, folder, shapes, stored | folded)
        graph.evaluated = frozenset(folded)
        whole.learn(shapes, folded)
        new, note = fold(graph, kept=graph.outputs)
        useless = {n.output[0]: n.input[0] for n in graph.nodes if n.output and has_no_effect(graph, n)}
        new = {name: value for name, value in new.items() if name not in useless}
        if not new and not useless:
            break
        folded |= new
        no_ops |= useless
    return Cleaned(graph, whole, no_ops, folded, note, stale)


def _literal(graph: Graph, node: NodeProto) -> TensorProto | None:
    if not graph.is_op(node, "Constant") or node.output[0] in graph.outputs:
        return None
    value: TensorProto | None = attribute(node, "value")
    return value


def _copy(
    model: ModelProto, infos: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto], values: Set[str],
    no_ops: Mapping[str, str],
) -> ModelProto:  # fmt: skip
    """The model without its weights, the nodes that make only `values`, and the no-ops; with these sizes."""
    copy = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = copy.graph
    graph.name = model.graph.name
    graph.input.extend(model.graph.input)
    graph.output.extend(outputs)
    graph.value_info.extend(infos)
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    gone, sources = values | no_ops.keys(), _sources(no_ops)
    for node in model.graph.node:
        made = set(filter(None, node.output))
        if made and made <= gone:
            continue
        graph.node.append(node)
        own = graph.node[-1]
        for i, name in enumerate(own.input):
            if name in sources:
                own.input[i] = sources[name]
    return copy


def _sources(no_ops: Mapping[str, str]) -> dict[str, str]:
    """Output of each node without effect -> the tensor that has the same value and comes from another node."""
    found: dict[str, str] = {}
    for name in no_ops:
        chain = []
        while name in no_ops and name not in found:
            chain.append(name)
            name = no_ops[name]
        found |= dict.fromkeys(chain, found.get(name, name))
    return found


def has_no_effect(graph: Graph, node: NodeProto) -> bool:
    """Whether the node's output is its first input, whatever that holds, and only nodes of the graph itself read it."""
    if not graph.is_op(node, *NO_OPS) or len(node.output) != 1 or graph.escapes(node.output[0]):
        return False
    if node.op_type == "Cast":
        dtype = graph.dtype(node.input[0])
        return dtype is not None and attribute(node, "to") == ELEM_TYPES[dtype]
    if node.op_type == "Slice":
        return _takes_all(graph, node)
    pads = graph.numbers(node, 1, "pads" if graph.opset > 1 else "paddings", 11)
    return node.op_type == "Identity" or (bool(pads) and not any(pads or ()))


def _takes_all(graph: Graph, node: NodeProto) -> bool:
    dims, bounds = graph.dims(node.input[0]), graph.slice_bounds(node)
    if dims is None or bounds is None:
        return False
    for axis, start, end, step in zip(*bounds, strict=True):
        if not -len(dims) <= axis < len(dims) or step < 1:
            return False
        size = dims[axis]
        if size < 0 and (start != 0 or end < TO_THE_END or step != 1):
            return False
        if size >= 0 and range(size)[start:end:step] != range(size):
            return False
    return True


def tidy(model: ModelProto, cleaned: Cleaned) -> None:
    """Write the cleaning into the model itself: constants folded, no-ops taken out, with what only they read."""
    graph, values = cleaned.whole, cleaned.folded
    sources = _sources(cleaned.no_ops)
    nodes = []
    for node in graph.nodes:
        made = set(filter(None, node.output))
        if not made or not made <= values.keys() | cleaned.no_ops.keys():
            nodes.append(node)
            node.input[:] = [sources.get(name, name) for name in node.input]
    read = {name for n in nodes for name in reads_of(n)} | graph.outputs
    dropped = {name for n in graph.nodes for name in n.input} - read
    nodes = [n for n in nodes if n.op_type != "Constant" or n.output[0] not in dropped]
    replace_nodes(model.graph, nodes)
    model.graph.initializer.extend(value for name, value in values.items() if name in read)
