"""`cutefuse unpatch`: turn fused nodes back into standard operators, with plain filters as constants.

A BatchNormalization that was folded stays folded. Exit codes: 0 done, 2 bad input, 3 nothing to undo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from cutefuse.errors import CutefuseError, NothingToPatch
from cutefuse.graph.body import DOMAIN, FORMAL
from cutefuse.graph.cut import needed
from cutefuse.graph.read import Graph, read_tensor, remove, replace_nodes, run_node
from cutefuse.graph.shapes import inferred
from cutefuse.graph.store import Writer, check_apart, data_path, inlined, load_model, uses_external_data, writer
from cutefuse.operators.function import body_for, fused_nodes, graph_call
from cutefuse.output import check_named, real
from cutefuse.rewrite.apply import fresh
from cutefuse.rewrite.functions import MIN_BODY_IR, remove_bodies
from cutefuse.rewrite.islands import lift


def default_output(source: Path) -> Path:
    """model.cutefuse.onnx -> model.plain.onnx, beside it."""
    check_named(source)
    return source.with_name(f"{source.name.removesuffix('.onnx').removesuffix('.cutefuse')}.plain.onnx")


def unpatch(source: Path, output: Path) -> int:
    """Write the model with standard operators only; returns how many nodes were turned back.

    Raises NothingToPatch when it holds no fused node, CutefuseError when it cannot be read or written.
    """
    check_named(output)
    if real(output) == real(source):
        raise CutefuseError(f"the output {output} is the input; choose another -o")
    model = load_model(source)
    check_apart(model, source, output, data_path(output))
    if not fused_nodes(model):
        raise NothingToPatch(f"{source} holds no fused node; nothing was written")
    lift(model, source.parent)
    fused = fused_nodes(model)
    graph = Graph(model, source.parent, inferred(model))
    sites = {n.name or n.output[0]: list(n.output) for n in fused}
    names = _own_bodies(graph, fused)
    kept = {o for n in model.graph.node for o in n.output}
    theirs = [f for f in model.functions if f.domain != DOMAIN]  # which may call each other in a circle
    for function in theirs:
        model.functions.remove(function)
    plain = inlined(model, [(DOMAIN, n) for n in names])
    plain.functions.extend(theirs)
    remove(plain.functions, lambda f: f.domain == DOMAIN)
    remove(plain.opset_import, lambda o: o.domain == DOMAIN)
    remove(plain.metadata_props, lambda p: p.key.startswith("cutefuse."))
    with writer(output, uses_external_data(plain), source) as out:
        _fold(plain, source.parent, kept, out)
        _rename(plain, sites)
        out.save(plain)
        out.commit()
    return len(fused)


def _own_bodies(graph: Graph, fused: list[NodeProto]) -> list[str]:
    """Give every fused node a body for its call alone, which is made of numbers only; returns the bodies' names."""
    model = graph.model
    calls = [graph_call(node, graph) for node in fused]
    remove_bodies(model, {n.op_type for n in fused})
    for i, (node, call) in enumerate(zip(fused, calls, strict=True)):
        vectors = [(i, graph.constant(name)) for i, name in enumerate(node.input) if len(graph.dims(name) or ()) == 1]
        positive = [i for i, v in vectors if v is not None and bool(np.all(v > 0))]  # scales of a quantised filter, say
        body = body_for([call], graph.opset, positive)
        node.op_type = body.name = f"{node.op_type}_{i}"
        model.functions.append(body)
    model.ir_version = max(model.ir_version, MIN_BODY_IR)
    return [n.op_type for n in fused]


def _fold(model: ModelProto, folder: Path, kept: set[str], out: Writer) -> None:
    """Evaluate what the bodies compute from constants alone; nodes that make a tensor of `kept` are not theirs."""
    graph = Graph(model, folder, inferred(model))
    reads = Counter(name for n in graph.nodes for name in n.input)
    values: dict[str, np.ndarray] = {}
    constants: dict[str, TensorProto] = {}
    nodes: list[NodeProto] = []
    for node in graph.nodes:
        results = None if kept & set(node.output) else _evaluate(graph, node, values)
        if results is None:
            for name in node.input:
                if name in values and name not in constants:
                    constants[name] = out.tensor(name, values[name], values[name].dtype.name)
            nodes.append(node)
        else:
            values.update(zip(node.output, results, strict=True))
        for name in node.input:
            reads[name] -= 1
            if not reads[name]:
                values.pop(name, None)
    wanted = [o for n in nodes for o in n.output if o in kept or graph.escapes(o)]
    nodes, _ = needed(nodes, wanted, lambda name: False)
    replace_nodes(model.graph, nodes)
    used = {name for n in nodes for name in n.input}
    model.graph.initializer.extend(t for name, t in constants.items() if name in used)


def _evaluate(graph: Graph, node: NodeProto, values: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
    if node.op_type == "DequantizeLinear" and node.input[1] in graph.initializers:  # engines look for a filter's
        return None
    operands = []
    for i, name in enumerate(node.input):
        if name in values:
            operands.append(values[name])
        elif name in graph.initializers and name not in graph.overridable:
            operands.append(read_tensor(graph.initializers[name], graph.folder))
        elif node.op_type == "CastLike" and i == 1 and (dtype := graph.dtype(name)):
            operands.append(np.zeros(0, dtype=np.dtype(dtype)))
        else:
            return None
    return run_node(node, graph.opset, operands)


def _rename(model: ModelProto, sites: Mapping[str, Sequence[str]]) -> None:
    """Name what came from a body after its site (name -> outputs): the convolution itself inherits the site's name."""
    nodes = list(model.graph.node)
    makers = {o: i for i, n in enumerate(nodes) for o in n.output}
    stored = {t.name: t for t in model.graph.initializer}
    taken = {n.name for n in nodes} | set(stored) | makers.keys()
    for site, outputs in sites.items():
        pending, members = [makers[o] for o in outputs if o in makers], set[int]()
        while pending:
            members.add(i := pending.pop())
            pending += [makers[n] for n in nodes[i].input if n.startswith(FORMAL) and n in makers]
        renamed: dict[str, str] = {}
        for node in (nodes[i] for i in sorted(members)):
            node.name = fresh(site if node.op_type in _ANCHORS else f"{site}/{node.op_type}", taken)
            for i, name in enumerate(node.input):
                if name.startswith(FORMAL) and name in stored and name not in renamed:
                    kind = _OPERANDS.get((node.op_type, i), "constant")
                    renamed[name] = stored[name].name = fresh(f"{site}.{kind}", taken)
            for i, name in enumerate(node.output):
                if name.startswith(FORMAL):
                    renamed[name] = node.output[i] = fresh(f"{node.name}_output_{i}", taken)
            node.input[:] = [renamed.get(i, i) for i in node.input]


_ANCHORS = frozenset({"Conv", "LayerNormalization", "RMSNormalization"})
_OPERANDS = {("Conv", 1): "weight", ("Conv", 2): "bias"}
