"""Islands of NHWC: fused convolutions take and give NHWC tensors, and Transposes stand at the shores alone.

An island holds fused nodes and nodes that do not care for the order of axes (`agnostic`). Which of the latter belong to
it is the cheapest cut: the fewest bytes go through Transposes that a compiler cannot take for a view. Convolutions,
pools and enlargements that stay have NCHW tensors in ONNX, but engines keep these in NHWC inside, so a Transpose beside
them is free; what such a convolution takes into its own kernel stays beside it.

`lay` and `lift` are inverse to each other: tensors inside are called `<name>.nhwc`, and keep their names outside.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph.numbers import FLOAT8, INT8
from cutefuse.graph.read import Graph, attribute, label, remove, set_nodes
from cutefuse.graph.shapes import inferred
from cutefuse.kernels import CHANNELS_LAST, Tensor
from cutefuse.operators.function import fused_nodes, graph_call
from cutefuse.operators.layouts import HWC8, LAYOUT, NHWC, TO_NCHW, TO_NHWC
from cutefuse.rewrite.agnostic import FLAT, RANK, fused_ports, is_nhwc, is_pointwise, ports, turn, turned_axes
from cutefuse.rewrite.apply import Names, in_order, info_of
from cutefuse.rewrite.functions import fit_bodies
from cutefuse.rewrite.min_cut import SINK, SOURCE, source_side

SUFFIX = ".nhwc"
_REPAIR = "the model was changed after it was patched; patch the original again"
_FREE = 1e-6  # the price of a Transpose that is a view: fewer are better where nothing else tells
_BARRED = 1e15  # the price of one that the opset does not know: more than all bytes of a model
_FLOAT8_OPSET = 21  # the first whose Transpose takes float8
_SPATIAL = frozenset("Conv ConvTranspose MaxPool AveragePool Resize Upsample BatchNormalization".split())


def layouts(model: ModelProto) -> set[int]:
    """The layouts of the fused convolutions of a model."""
    return {NHWC if is_nhwc(n) else HWC8 for n in fused_nodes(model) if fused_ports(n) is not None}


def mark(model: ModelProto, layout: int) -> None:
    """Say a layout at every fused convolution; its tensors stay."""
    for node in (n for n in fused_nodes(model) if fused_ports(n) is not None):
        _set_layout(node, layout)


def lay(model: ModelProto, folder: Path) -> None:
    """Turn every fused convolution, whose tensors are NCHW so far, to NHWC, with what belongs to its island.

    Raises CutefuseError for a fused node that the kernels cannot run so.
    """
    graph = Graph(model, folder, inferred(model))
    island = _Island(graph, TO_NHWC, NHWC)
    for node in graph.nodes:
        if fused_ports(node) is not None:
            _set_layout(node, HWC8)
            if reason := _refused(graph, node):
                raise CutefuseError(f"'{label(node)}' cannot be turned to NHWC ({reason}); unpatch the model first")
            island.add(node)
    inside = _Sea(graph).agnostic_inside()
    for node in graph.nodes:
        if id(node) in inside:
            island.add(node)
    inner = {t: island.names.of_tensor(f"{t}{SUFFIX}") for t in island.tensors}
    nodes = list[NodeProto]()
    dry = {  # what nodes outside read, or nodes inside in another way than as an image
        name for n in graph.nodes for i, name in enumerate(n.input) if i not in island.images.get(id(n), ())
    }

    def shore(tensor: str, source: str, target: str, perm: Sequence[int], word: str) -> None:
        if is_barred(graph, graph.dtype(tensor)):
            raise CutefuseError(
                f"'{tensor}' is float8, which a Transpose takes from opset {_FLOAT8_OPSET} on, and the model has opset "
                f"{graph.opset}; convert the model, or choose --layout hwc8"
            )
        name, order = island.names.of_node(f"{tensor}/to_{word}"), turned_axes(perm, len(graph.dims(tensor) or ()))
        nodes.append(helper.make_node("Transpose", [source], [target], name=name, perm=order))

    made = {o for n in graph.nodes if id(n) in island for o in n.output}
    for node in in_order(graph.nodes):
        if id(node) not in island:
            nodes.append(node)
            continue
        for tensor in dict.fromkeys(node.input[i] for i in island.images[id(node)]):
            if tensor not in made:
                shore(tensor, tensor, inner[tensor], TO_NHWC, "nhwc")
                made.add(tensor)
        own = [o for o in node.output if o]
        nodes.append(island.turned(node, inner))
        for tensor in own:
            if tensor in dry or graph.escapes(tensor):
                shore(tensor, inner[tensor], tensor, TO_NCHW, "nchw")
    island.write(nodes, {new: old for old, new in inner.items()})
    fit_bodies(model, folder)


def lift(model: ModelProto, folder: Path) -> int:
    """Turn every NHWC node back to NCHW, without the Transposes at the shores; returns how many fused nodes there were.

    Raises CutefuseError where an NHWC tensor is read or made by a node that cannot be turned.
    """
    if not any(map(is_nhwc, model.graph.node)):
        return 0
    graph = Graph(model, folder, inferred(model))
    island = _Island(graph, TO_NCHW, HWC8)
    waiting = [n for n in graph.nodes if is_nhwc(n)]
    count, outer, shores = len(waiting), dict[str, str](), set[int]()
    exits: dict[str, list[str]] = {}
    while waiting:
        node = waiting.pop()
        if id(node) in island:
            continue
        island.add(node)
        for tensor in island.tensors_of(node):
            for other in filter(None, (graph.producer(tensor), *graph.users(tensor))):
                entry = other.op_type == "Transpose" and tensor in other.output
                if _is_shore(graph, other, TO_NHWC if entry else TO_NCHW):
                    shores.add(id(other))
                    outer |= {tensor: other.input[0]} if entry else {}
                    exits.setdefault(tensor, []).extend([] if entry else other.output)
                else:
                    waiting.append(other)
        if not graph.inputs.isdisjoint(made := island.tensors_of(node)) or any(map(graph.escapes, made)):
            raise CutefuseError(f"'{label(node)}' has NHWC tensors at the model's border; {_REPAIR}")
    for tensor in island.tensors:
        found = list(dict.fromkeys(exits.get(tensor, ())))
        name = next((t for t in found if graph.escapes(t)), found[0] if found else "")
        outer.setdefault(tensor, name or island.names.of_tensor(tensor.removesuffix(SUFFIX)))
        outer |= dict.fromkeys(found, outer[tensor])
    kept = {t for ts in exits.values() for t in ts if outer[t] != t and graph.escapes(t)}
    nodes = list[NodeProto]()
    for node in in_order(graph.nodes):
        if id(node) in shores:
            again = sorted(kept & set(node.output))
            nodes += [helper.make_node("Identity", [outer[t]], [t], name=node.name) for t in again]
        elif id(node) in island:
            nodes.append(island.turned(node, outer))
        else:
            node.input[:] = [outer.get(i, i) for i in node.input]
            nodes.append(node)
    island.write(nodes, {outer[t]: t for t in island.tensors})
    fit_bodies(model, folder)
    return count


def _refused(graph: Graph, node: NodeProto) -> str | None:
    """Why the kernels cannot run a fused convolution in NHWC; None where they can, and where types are not known."""
    call, images = graph_call(node, graph), fused_ports(node) or []
    inputs = [replace(t, layout=CHANNELS_LAST) if i in images else t for i, t in enumerate(call.inputs)]
    outputs = [Tensor(graph.dims(o) or (), graph.dtype(o) or "", CHANNELS_LAST) for o in node.output]
    if any(not t.dtype for t in (*inputs, *outputs)):
        return None
    return kernels.reject(kernels.Call(call.op_type, inputs, outputs, dict(call.attrs) | {LAYOUT: [NHWC]}))


def is_barred(graph: Graph, dtype: str | None) -> bool:
    """Whether no Transpose of the model's opset takes a type."""
    return dtype == FLOAT8.name and graph.opset < _FLOAT8_OPSET


def _is_shore(graph: Graph, node: NodeProto, perm: Sequence[int]) -> bool:
    if node.op_type != "Transpose":
        return False
    own = tuple(attribute(node, "perm", ()))
    return own == turned_axes(perm, len(own)) and len(own) == len(graph.dims(node.input[0]) or own)


class _Island:
    """The nodes that are turned, all of them at once: their images get axes in the order `perm`."""

    def __init__(self, graph: Graph, perm: Sequence[int], layout: int) -> None:
        self.graph, self.names = graph, Names(graph)
        self.images: dict[int, list[int]] = {}  # id of a node -> its inputs that are turned
        self.tensors: dict[str, None] = {}
        self._perm, self._layout = perm, layout
        self._read = {name for n in graph.nodes for name in n.input}  # nodes are turned in place
        self._constants: dict[tuple[str, bytes], str] = {}

    def __contains__(self, node_id: int) -> bool:
        return node_id in self.images

    def add(self, node: NodeProto) -> None:
        own = fused_ports(node)
        found = ports(self.graph, node, self._perm) if own is None else own
        if found is None:
            raise CutefuseError(f"'{label(node)}' reads or makes an NHWC tensor and cannot be turned; {_REPAIR}")
        self.images[id(node)] = found
        self.tensors |= dict.fromkeys(self.tensors_of(node))

    def tensors_of(self, node: NodeProto) -> list[str]:
        return [*(node.input[i] for i in self.images[id(node)]), *filter(None, node.output)]

    def turned(self, node: NodeProto, names: Mapping[str, str]) -> NodeProto:
        """The node itself, turned, its images called by `names`."""
        if fused_ports(node) is None:
            turn(self.graph, node, self._perm, self._store)
        else:
            _set_layout(node, self._layout)
        for i in self.images[id(node)]:
            node.input[i] = names[node.input[i]]
        node.output[:] = [names[o] if o else o for o in node.output]
        return node

    def _store(self, name: str, value: np.ndarray) -> str:
        base = f"{name}{SUFFIX}" if self._layout == NHWC else name.removesuffix(SUFFIX)
        key = (base, value.tobytes())
        if key not in self._constants:
            self._constants[key] = self.names.of_tensor(base)
            self.graph.proto.initializer.append(numpy_helper.from_array(value, self._constants[key]))
        return self._constants[key]

    def write(self, nodes: Sequence[NodeProto], origins: Mapping[str, str]) -> None:
        """Give the graph these nodes, without the constants and descriptions of tensors that went; say the types and
        sizes of new tensors, which are those of `origins` turned."""
        graph, proto = self.graph, self.graph.proto
        set_nodes(proto, nodes)
        read = {name for n in nodes for name in n.input}
        made = {o for n in nodes for o in n.output}
        gone = self._read - read - made - graph.inputs
        remove(proto.initializer, lambda t: t.name in gone)
        known = {v.name for v in (*proto.input, *proto.output)}
        described = made | set(graph.initializers)
        remove(proto.value_info, lambda v: v.name in origins or v.name not in described)
        for tensor, origin in origins.items():
            sizes = graph.partial_symbols(origin) or ()
            if len(sizes) not in (FLAT, RANK) or tensor in known:  # the first where inference of a damaged model errs
                continue
            turned = [sizes[axis] for axis in turned_axes(self._perm, len(sizes))]
            proto.value_info.extend(filter(None, [info_of(graph, tensor, origin, turned)]))


class _Sea:
    """The nodes around the fused ones, and what it costs to turn each."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._fused = {id(n) for n in graph.nodes if fused_ports(n) is not None}
        self._agnostic = {id(n) for n in graph.nodes if id(n) not in self._fused and ports(graph, n) is not None}
        self._hosted: set[int] = set()
        for node in in_order(graph.nodes):
            follows = node.op_type == "BatchNormalization" or (id(node) in self._agnostic and is_pointwise(node))
            if follows and any(map(self._hosts, node.input)) and not is_barred(graph, graph.dtype(node.output[0])):
                self._hosted.add(id(node))

    def _hosts(self, tensor: str) -> bool:
        """Whether a convolution that stays makes the tensor, what is computed in its kernel included."""
        node = self.graph.producer(tensor)
        return node is not None and (node.op_type in ("Conv", "ConvTranspose") or id(node) in self._hosted)

    def agnostic_inside(self) -> set[int]:
        """The ids of the nodes that belong to the islands beside the fused ones."""
        edges: dict[tuple[Hashable, Hashable], float] = {}

        def edge(a: Hashable, b: Hashable, price: float) -> None:
            edges[a, b] = edges.get((a, b), 0.0) + price

        for tensor, reader_ids in self._images():
            maker = self.graph.producer(tensor)
            flat = len(self.graph.dims(tensor) or ()) == FLAT
            own = SINK if maker is None else self._place(maker, flat)
            wet = {SINK if tensor in self._kept(r) else self._place(r, flat) for r in reader_ids}
            price = self._bytes(tensor) + _FREE
            if own is None:  # a view is all that its readers in NHWC need
                for reader in wet - {None}:
                    edge(reader, ("view", tensor), math.inf)
                edge(("view", tensor), SINK, _FREE)
                continue
            if self.graph.escapes(tensor):
                wet.add(SINK)
            for reader in wet - {None}:
                edge(("out", tensor), reader, math.inf)
                edge(reader, ("in", tensor), math.inf)
            edge(own, ("out", tensor), price)
            edge(("in", tensor), own, price)
        inside = source_side({pair: price for pair, price in edges.items() if pair[0] != pair[1]})
        return {i for i in inside if isinstance(i, int)}

    def _images(self) -> Iterator[tuple[str, list[NodeProto]]]:
        """Every tensor that can be turned, with the nodes that read it as an image or in any other way."""
        names = {o for n in self.graph.nodes for o in n.output if o} | self.graph.inputs
        for name in sorted(names):
            around = [self.graph.producer(name), *self.graph.users(name)]
            flat = any(n is not None and id(n) in self._agnostic for n in around)
            if (rank := len(self.graph.dims(name) or ())) == RANK or (rank == FLAT and flat):
                yield name, self.graph.users(name)

    def _place(self, node: NodeProto, flat: bool) -> Hashable | None:
        """A node of the cut; None for one beside which a Transpose is a view. `flat`: rows are one axis."""
        if id(node) in self._fused:
            return SOURCE
        if flat and (node.op_type == "MatMul" or tuple(attribute(node, "perm", ())) == (0, 2, 1)):
            return None
        if node.op_type in _SPATIAL or id(node) in self._hosted:
            return None
        return id(node) if id(node) in self._agnostic else SINK

    def _kept(self, node: NodeProto) -> list[str]:
        """What a fused node reads as it is given."""
        read = fused_ports(node)
        return [] if read is None else [name for i, name in enumerate(node.input) if i not in read]

    def _bytes(self, tensor: str) -> float:
        if is_barred(self.graph, self.graph.dtype(tensor)):
            return _BARRED
        sizes = self.graph.dims(tensor) or ()
        itemsize = {"float32": 4, INT8.name: 1, FLOAT8.name: 1}.get(self.graph.dtype(tensor) or "", 2)
        return float(math.prod(max(d, 1) for d in sizes) * itemsize)


def _set_layout(node: NodeProto, layout: int) -> None:
    for a in node.attribute:
        if a.name == LAYOUT:
            a.i = layout
            return
    node.attribute.append(helper.make_attribute(LAYOUT, layout))
