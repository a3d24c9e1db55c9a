"""Puts fused nodes into a model and removes what they replace; everything else stays."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Hashable, Sequence, Set
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper

import cutefuse
from cutefuse.errors import CutefuseError
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.numbers import NUMBERS
from cutefuse.graph.read import ELEM_TYPES, FOLDABLE, Graph, label, nodes_of, reads_of, replace_nodes, subgraphs
from cutefuse.graph.store import Writer
from cutefuse.match.answer import Constant, Joined, Operand, Quantized, tensors_of
from cutefuse.match.qdq import CUSTOM_DOMAIN
from cutefuse.match.site import Site
from cutefuse.operators.function import node_attributes

SIZE_OPERATORS = FOLDABLE | {"Shape", "Gather", "Slice", "Concat", "Floor"}


def plan(graph: Graph, sites: Sequence[Site]) -> set[int]:
    """The ids of the nodes that these fused sites make superfluous, told before anything changes, so that a dry run
    reports the same; fills in each site's `bytes_saved`, None where the sizes of a tensor that goes are not known."""
    chosen = [s.chosen for s in sites]
    reads = Counter(name for node in graph.nodes for name in node.input)
    reads.update(name for match in chosen for operand in match.inputs for name in _read_by(operand))
    covered = {id(n) for match in chosen for n in match.nodes}
    outputs = {name for match in chosen for name in match.outputs}
    pending = [n for match in chosen for n in match.nodes if outputs & set(n.output)]
    dead = set[int]()
    while pending:
        node = pending.pop()
        if id(node) in dead:
            continue
        dead.add(id(node))
        for name in filter(None, node.input):
            reads[name] -= 1
        for name in filter(None, node.input):
            maker = None if reads[name] else graph.producer(name)
            if maker is None or any(o and (reads[o] or graph.escapes(o)) for o in maker.output):
                continue
            if id(maker) in covered or _computes_operands(graph, maker):
                pending.append(maker)
    credited: set[str] = set()
    for site in sites:
        gone = {o for n in site.nodes if id(n) in dead for o in n.output} - credited
        stored = {o: size for o, size in site.chosen.stored.items() if o in gone}
        sizes = {o: graph.sizes(o) or (-1,) for o in stored}
        known = all(min(dims) >= 0 for dims in sizes.values())
        site.bytes_saved = 2 * sum(math.prod(sizes[o]) * size for o, size in stored.items()) if known else None
        credited |= stored.keys()
    return dead


def _read_by(operand: Operand) -> tuple[str, ...]:
    """Tensors of the graph that an operand needs."""
    if isinstance(operand, Quantized):
        return tuple(filter(None, (operand.tensor, operand.scale, operand.zero_point)))
    return tensors_of(operand)


def _computes_operands(graph: Graph, node: NodeProto) -> bool:
    """Whether a node only prepares a replaced node's other inputs: constants, or sizes of tensors."""
    tensor = node.output[0]
    if graph.is_constant(tensor):
        return True
    rank = graph.dims(tensor)
    return rank is not None and len(rank) <= 1 and node.op_type in SIZE_OPERATORS and node.domain in ("", "ai.onnx")


def apply_sites(graph: Graph, sites: Sequence[Site], doomed: Set[int], writer: Writer, origin: str) -> None:
    """Put the nodes of these fused sites into `graph.model`, without their bodies, and remove the nodes in `doomed`.

    Names, order, shapes, metadata and everything unrelated stay as they are. `origin` goes into the model's metadata.
    """
    model, proto = graph.model, graph.proto
    names = Names(graph, doomed)
    position = {id(n): i for i, n in enumerate(graph.nodes)}
    operands, casts = _Operands(names, writer), _Casts(names)
    new: dict[int, list[NodeProto]] = {}
    for site in sites:
        match = site.chosen
        site.name = names.of_node(site.name)
        inputs = [operands.add(site.name, operand) for operand in match.inputs]
        outputs = [o or names.of_tensor(f"{site.name}.unused{i}") for i, o in enumerate(match.outputs)]
        makers = [position[id(n)] for n in match.nodes if set(n.output) & set(match.outputs)]
        read_here = [name for operand in match.inputs for name in _read_by(operand)]
        parents = [position[id(p)] for name in read_here if (p := graph.producer(name)) is not None]
        group = new.setdefault(max([min(makers), *parents]), [])
        group += operands.nodes
        operands.nodes = []
        group += casts.around(site, inputs, outputs, model.ir_version)
    nodes: list[NodeProto] = []
    for i, node in enumerate(graph.nodes):
        if id(node) not in doomed:
            nodes.append(node)
        nodes += new.get(i, [])
    read = {name for n in nodes for name in n.input}
    nodes = [n for n in nodes if id(n) not in casts.up or n.output[0] in read or graph.escapes(n.output[0])]
    if _is_in_order(graph.nodes):
        nodes = in_order(nodes)
    replace_nodes(proto, nodes)
    proto.initializer.extend(operands.tensors)
    _correct_types(model, sites)
    proto.value_info.extend(_types(graph, [o for s in sites for o in s.chosen.outputs]))
    proto.value_info.extend(casts.described(graph))
    if DOMAIN not in {o.domain for o in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    metadata = {"cutefuse.version": cutefuse.__version__, "cutefuse.input_sha256": origin}
    for key, value in metadata.items():
        if all(p.key != key for p in model.metadata_props):
            model.metadata_props.add(key=key, value=value)


def _correct_types(model: onnx.ModelProto, sites: Sequence[Site]) -> None:
    """What the file says of quantised tensors that fused nodes read and write: an exporter without float8 calls those
    of TensorRT's own nodes uint8. And the IR version that may store float8."""
    matches = [s.chosen for s in sites]
    known = {
        name: tensor.dtype
        for match in matches
        for name, tensor in zip((*match.inputs, *match.outputs), (*match.call.inputs, *match.call.outputs), strict=True)
        if isinstance(name, str) and tensor.dtype in NUMBERS
    }
    for info in model.graph.value_info:
        if info.name in known:
            info.type.tensor_type.elem_type = ELEM_TYPES[known[info.name]]
    stored = [NUMBERS[t.dtype].ir_version for m in matches for t in m.call.inputs if t.dtype in NUMBERS]
    model.ir_version = max([model.ir_version, *stored])


def _types(graph: Graph, tensors: Sequence[str]) -> list[onnx.ValueInfoProto]:
    """Types and sizes of tensors that the file does not describe, as far as they are known.

    Nothing infers them behind a fused node, and ONNX takes the Shape of a tensor of unknown rank for an empty list.
    """
    told = {v.name for v in (*graph.proto.value_info, *graph.proto.output)}
    found = (info_of(graph, t, t, graph.partial_symbols(t)) for t in tensors if t not in told)
    return [info for info in found if info]


def info_of(
    graph: Graph, tensor: str, origin: str, sizes: Sequence[int | str] | None
) -> onnx.ValueInfoProto | None:  # fmt: skip
    """The description of a tensor of these sizes and of the type of `origin`; None where either is not known."""
    # Other names are those of one run of shape inference; the next run may give them to other sizes.
    names = {d.dim_param for v in graph.proto.input for d in v.type.tensor_type.shape.dim if d.dim_param}
    dtype = graph.dtype(origin)
    if dtype is None or sizes is None:
        return None
    known = [s if isinstance(s, int) or s in names else None for s in sizes]
    return helper.make_tensor_value_info(tensor, ELEM_TYPES[dtype], known)


def _fused_node(site: Site, inputs: Sequence[str], outputs: Sequence[str], ir_version: int) -> NodeProto:
    """The node of a site."""
    call, origins = site.chosen.call, [label(n) for n in site.nodes]
    node = helper.make_node(
        call.op_type, inputs, outputs, name=site.name, domain=DOMAIN, doc_string=f"cutefuse: {', '.join(origins)}"
    )
    attributes = node_attributes(call, site.tile)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    if ir_version >= 10:
        node.metadata_props.add(key="cutefuse.nodes", value=json.dumps(origins))
    return node


class Names:
    """Fresh names for nodes and tensors that clash with nothing in the model, subgraphs included."""

    def __init__(self, graph: Graph, gone: Collection[int] = ()) -> None:
        self._nodes = {n.name for n in graph.nodes if id(n) not in gone}
        self._tensors = {v.name for v in (*graph.proto.input, *graph.proto.output)} | set(graph.initializers)
        for node in nodes_of(graph.proto):
            self._tensors.update(node.input, node.output)
            self._tensors.update(t.name for body in subgraphs(node) for t in body.initializer)

    def of_node(self, base: str) -> str:
        return fresh(base, self._nodes)

    def of_tensor(self, base: str) -> str:
        return fresh(base, self._tensors)

    def cast(self, source: str, target: str, dtype: str) -> NodeProto:
        """A Cast under a name of its own."""
        name = self.of_node(f"{source}/to_{dtype}")
        return helper.make_node("Cast", [source], [target], name=name, to=ELEM_TYPES[dtype])


def fresh(base: str, taken: set[str], mark: str = "_") -> str:
    """The base name, numbered behind a mark when it is taken; the result is taken from now on."""
    name, i = base, 0
    while name in taken:
        i += 1
        name = f"{base}{mark}{i}"
    taken.add(name)
    return name


class _Operands:
    """What fused nodes read that the graph does not hold: initializers, of which equal contents are stored once, as
    shared weights were before, and QuantizeLinear and Concat nodes, which sites that want the same operand share."""

    def __init__(self, names: Names, writer: Writer) -> None:
        self.tensors: list[onnx.TensorProto] = []
        self.nodes: list[NodeProto] = []
        self._names, self._writer = names, writer
        self._known: dict[Hashable, str] = {}

    def add(self, site: str, operand: Operand) -> str:
        """The name of the tensor that holds an operand."""
        if isinstance(operand, str):
            return operand
        if isinstance(operand, Constant):
            return self._constant(site, operand)
        if operand not in self._known:
            self._known[operand] = self._joined(operand) if isinstance(operand, Joined) else self._quantised(operand)
        return self._known[operand]

    def _constant(self, site: str, constant: Constant) -> str:
        value = np.ascontiguousarray(constant.make())
        if value.shape != constant.dims:
            raise CutefuseError(f"'{site}': {constant.suffix} is {value.shape}, expected {constant.dims}; report this")
        key = (constant.dtype, constant.dims, hashlib.sha256(value.view(np.uint8).data).digest())
        if key not in self._known:
            self._known[key] = self._names.of_tensor(f"{site}.{constant.suffix}")
            self.tensors.append(self._writer.tensor(self._known[key], value, constant.dtype))
        return self._known[key]

    def _joined(self, operand: Joined) -> str:
        output = self._names.of_tensor(f"{operand.tensors[-1]}.joined")
        name = self._names.of_node(f"{operand.tensors[-1]}/join")
        self.nodes.append(helper.make_node("Concat", operand.tensors, [output], name=name, axis=1))
        return output

    def _quantised(self, operand: Quantized) -> str:
        word = NUMBERS[operand.number].word
        source, *rest = _read_by(operand)
        if operand.cast:
            lower = self._names.of_tensor(f"{source}.{operand.cast}")
            self.nodes.append(self._names.cast(source, lower, operand.cast))
            source = lower
        output = self._names.of_tensor(f"{operand.tensor}.{word}")
        name = self._names.of_node(f"{operand.tensor}/to_{word}")
        typed: dict[str, Any] = {"domain": CUSTOM_DOMAIN} if operand.custom else {}
        if not operand.custom and not operand.zero_point:
            # Without a zero point the type is uint8 unless the attribute of opset 21 names another one.
            typed["output_dtype"] = ELEM_TYPES[operand.number]
        self.nodes.append(helper.make_node(operand.op_types[-1], [source, *rest], [output], name=name, **typed))
        return output


class _Casts:
    """Fused nodes with the Casts that a site in another type than its graph needs; neighbours share them."""

    def __init__(self, names: Names) -> None:
        self.up: dict[int, NodeProto] = {}  # back to the graph's type; superfluous when only our sites read the result
        self._names = names
        self._lowered: dict[tuple[str, str], str] = {}

    def around(self, site: Site, inputs: Sequence[str], outputs: Sequence[str], ir_version: int) -> list[NodeProto]:
        """The fused node, in the graph's type or between Casts."""
        if not site.cast_from:
            return [_fused_node(site, inputs, outputs, ir_version)]
        match, call = site.chosen, site.chosen.call
        before, after, low_inputs, low_outputs = list[NodeProto](), list[NodeProto](), list[str](), list[str]()
        for name, tensor, operand in zip(inputs, call.inputs, match.inputs, strict=True):
            key = (name, tensor.dtype)
            if isinstance(operand, str) and tensor.dtype != site.cast_from and key not in self._lowered:
                self._lowered[key] = self._names.of_tensor(f"{name}.{tensor.dtype}")
                before.append(self._names.cast(name, self._lowered[key], tensor.dtype))
            low_inputs.append(self._lowered.get(key, name) if isinstance(operand, str) else name)
        for name, tensor in zip(outputs, call.outputs, strict=True):
            low = self._lowered[name, tensor.dtype] = self._names.of_tensor(f"{name}.{tensor.dtype}")
            low_outputs.append(low)
            after.append(self._names.cast(low, name, site.cast_from))
        self.up.update((id(n), n) for n in after)
        node = _fused_node(site, low_inputs, low_outputs, ir_version)
        return [*before, node, *after]

    def described(self, graph: Graph) -> list[onnx.ValueInfoProto]:
        """Types and sizes of the lowered tensors, which nothing infers behind a fused node."""
        known = [(low, dtype, graph.dims(name)) for (name, dtype), low in self._lowered.items()]
        return [
            helper.make_tensor_value_info(low, ELEM_TYPES[dtype], [d if d >= 0 else None for d in dims])
            for low, dtype, dims in known if dims is not None
        ]  # fmt: skip


def cast_tensors(graph: Graph, sites: Sequence[Site], doomed: Set[int]) -> list[str]:
    """The tensors of the graph at which `apply_sites` puts a Cast, since a site computes in another type."""
    made = {o for s in sites if s.cast_from for o in s.chosen.outputs if o}
    low, read = dict[str, None](), {name for n in graph.nodes if id(n) not in doomed for name in n.input}
    for site in sites:
        for operand, tensor in zip(site.chosen.inputs, site.chosen.call.inputs, strict=True):
            if isinstance(operand, str) and site.cast_from and tensor.dtype != site.cast_from:
                low[operand] = None
            else:
                read.update(_read_by(operand))
    return [t for t in low if t not in made] + sorted(t for t in made if t in read or graph.escapes(t))


def _is_in_order(nodes: Sequence[NodeProto]) -> bool:
    read: set[str] = set()
    for node in nodes:
        read.update(filter(None, reads_of(node)))
        if not read.isdisjoint(node.output):
            return False
    return True


def in_order(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Stable topological order: the given one when that is topological, else every node right after its inputs.

    Raises CutefuseError where there is none, as a node waits for what is computed from its own output.
    """
    if _is_in_order(nodes):
        return list(nodes)
    maker = {o: n for n in nodes for o in n.output if o}
    done: set[int] = set()
    waiting: set[int] = set()  # for nodes that are above them on the stack
    result: list[NodeProto] = []
    for first in nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            missing = [maker[i] for i in reads_of(node) if i in maker and id(maker[i]) not in done]
            if id(node) in done or not missing:
                stack.pop()
                if id(node) not in done:
                    done.add(id(node))
                    result.append(node)
            elif id(node) in waiting:
                raise CutefuseError(f"node '{label(node)}' would read what is computed from its own output; "
                                    f"leave its site out with --exclude '{label(node)}'")  # fmt: skip
            else:
                waiting.add(id(node))
                stack += missing
    return result
