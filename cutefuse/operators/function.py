"""Fused nodes of a graph as calls, and the function body that serves a set of calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto, helper

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph.body import DOMAIN, PLUGIN_VERSION, TILE
from cutefuse.graph.read import Graph
from cutefuse.kernels import Call, Tensor
from cutefuse.operators import conv_call, operators
from cutefuse.operators.conv_form import GROUP


def graph_call(node: NodeProto, graph: Graph) -> Call:
    """The call of a fused node of a graph. Inputs of unknown type have "", those of unknown rank no sizes."""
    return call_of(node, [Tensor(graph.dims(name) or (), graph.dtype(name) or "") for name in node.input])


def call_of(node: NodeProto, inputs: Sequence[Tensor]) -> Call:
    """The call of a fused node over inputs with the node's own dims, every attribute written, without outputs."""
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    attrs: dict[str, Any] = {}
    for spec in kernels.operator_of(node.op_type)["attributes"]:
        value = given.get(spec["name"], [spec["default_value"]] * spec["default_count"])
        attrs[spec["name"]] = list(value) if isinstance(value, list | tuple) else [value]
    return Call(node.op_type, conv_call.with_logical_dims(node.op_type, inputs, attrs), [], attrs)


def node_attributes(call: Call, tile: int = 0) -> dict[str, Any]:
    """The attributes of a call's ONNX node by name: the operator's, and how TensorRT finds the plugin.

    `tile`: the one that the plugin should offer alone; 0 for any.
    """
    values: dict[str, Any] = dict(call.attrs) | {TILE: [tile]}
    found: dict[str, Any] = {}
    for spec in kernels.operator_of(call.op_type)["attributes"]:  # all of them: TensorRT only warns about a missing one
        value = list(values[spec["name"]])
        found[spec["name"]] = value[0] if spec["max_count"] == 1 else value
    found |= {GROUP: sum(values["channels"])} if kernels.facts(call.op_type)["depthwise"] else {}
    return found | {"plugin_version": PLUGIN_VERSION, "plugin_namespace": DOMAIN}


def complete(node: NodeProto, call: Call) -> None:
    """Write the attributes that a node of an older release lacks, to which a body may refer."""
    given = {a.name for a in node.attribute}
    missing = {name: value for name, value in node_attributes(call).items() if name not in given}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in missing.items())


def body_for(calls: list[Call], opset: int, positive: Collection[int] = ()) -> FunctionProto:
    """The body that serves all these calls of one op_type; `positive` inputs hold positive numbers in all of them.

    Raises CutefuseError where the opset cannot express it.
    """
    op_type = calls[0].op_type
    stem = kernels.operator_of(op_type)["name"]
    op = next(op for op in operators() if op.stem == stem)
    dtype = calls[0].dtype or next((t.dtype for t in calls[0].inputs if t.dtype), "float32")
    if opset < (oldest := op.oldest_opset(op_type, dtype)):
        raise CutefuseError(
            f"{op_type} has no standard form before opset {oldest}, the model has opset {opset}; convert the model "
            "before it is patched"
        )
    for name in op.must_agree(opset):
        values = {tuple(call.attrs[name]) for call in calls}  # type: ignore[arg-type]
        if len(values) > 1 and name == "layout":
            raise CutefuseError(
                f"nodes of {op_type} have layouts {sorted(v for (v,) in values)}, and one body cannot serve both; "
                "unpatch the model and patch it for one layout"
            )
        if len(values) > 1:
            raise CutefuseError(
                f"nodes of {op_type} have {name} {sorted(values)}, and one body cannot serve them in opset {opset}; "
                "convert the model before it is patched"
            )
    return op.function(op_type, opset, dtype, calls, positive)


def fused_nodes(model: ModelProto) -> list[NodeProto]:
    """The fused nodes of the main graph."""
    return [n for n in model.graph.node if n.domain == DOMAIN]
