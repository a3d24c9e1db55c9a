"""The function bodies of a patched model: one for each op_type, right for every fused node of that op_type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from onnx import ModelProto

from cutefuse.graph.body import DOMAIN
from cutefuse.graph.read import Graph, remove
from cutefuse.graph.shapes import inferred
from cutefuse.kernels import Call
from cutefuse.operators.function import body_for, complete, fused_nodes, graph_call

MIN_BODY_IR = 8  # local functions


def fit_bodies(model: ModelProto, folder: Path) -> None:
    """Write the bodies that fused nodes have again, since the nodes were turned to another layout: sizes that follow
    from a body of the other one would be wrong, and a negative one ends the process inside onnx."""
    used = {n.op_type for n in fused_nodes(model)}
    if op_types := [f.name for f in model.functions if f.domain == DOMAIN and f.name in used]:
        remove_bodies(model, op_types)
        add_bodies(model, Graph(model, folder, inferred(model)), {}, op_types)


def add_bodies(model: ModelProto, graph: Graph, new: Mapping[str, Call], op_types: Iterable[str] = ()) -> None:
    """Give the model the body of every op_type of a new fused node and of `op_types`, and an IR version with functions.

    `new` holds the calls of the new nodes by their names; `graph` knows the tensors of those that were there before.
    A body that other nodes of its op_type had already is written again, so that it serves all of them.
    """
    calls: dict[str, list[Call]] = {op_type: [] for op_type in (*(c.op_type for c in new.values()), *op_types)}
    for node in fused_nodes(model):
        if node.op_type in calls:
            if (call := new.get(node.name)) is None:
                call = graph_call(node, graph)
                complete(node, call)
            calls[node.op_type].append(call)
    remove_bodies(model, calls)
    model.functions.extend(body_for(served, graph.opset) for served in calls.values())
    if model.ir_version < MIN_BODY_IR:
        if model.ir_version < 4:  # keep initializers constant: from IR 4 on a listed one may be overridden
            stored = {t.name for t in model.graph.initializer}
            remove(model.graph.input, lambda v: v.name in stored)
        model.ir_version = MIN_BODY_IR


def remove_bodies(model: ModelProto, op_types: Iterable[str]) -> None:
    """Take the bodies of these op_types out of the model."""
    doomed = set(op_types)
    remove(model.functions, lambda f: f.domain == DOMAIN and f.name in doomed)
