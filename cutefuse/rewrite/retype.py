"""Lower precision before fusing: TensorRT 11 takes types from the ONNX file, so float16 must be in the graph.

The whole model goes through ONNX Runtime's converter; single sites are retyped here, with Casts around them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.numbers import LARGEST
from cutefuse.graph.read import Graph, nodes_of, opset_of, set_nodes, subgraphs
from cutefuse.graph.scopes import names_of
from cutefuse.graph.shapes import fault, inferred, settle_types
from cutefuse.graph.store import check_convertible, inlined, load_weights
from cutefuse.match.answer import Constant, Match
from cutefuse.match.site import FUSED, Site
from cutefuse.rewrite.apply import fresh, in_order
from cutefuse.rewrite.overflow import Overflow, name_and_lift, overflows

BFLOAT16_OPSET = 13  # of its Cast
HALF_SCALES_OPSET = 19  # of QuantizeLinear and DequantizeLinear with float16 scales
# The names that the converter gives its Casts and their outputs.
_CASTS = re.compile(r"^graph_(in|out)put_cast_?\d+$|_cast_to_fp(16|32)(_node)?$")


def to_float16(model: ModelProto, folder: Path, keep: Sequence[str]) -> tuple[ModelProto, list[str], list[Overflow]]:
    """The model in float16 with float32 inputs and outputs, the names of the nodes that were kept in float32, and those
    among them whose weights float16 cannot hold.

    Those that `keep` (patterns) names stay as they are too, and so do operators that the converter knows as sensitive.
    Raises CutefuseError when the converter cannot handle the model.
    """
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    check_convertible(model)
    load_weights(model, folder)
    sound = not fault(model)
    model = _prepared(model)
    passed_on = _inputs_taken_from_outputs(model)
    large = overflows(model)
    kept = name_and_lift(model, large)
    kept += [n.name for n in model.graph.node if n.name and any(fnmatchcase(m, p) for m in names_of(n) for p in keep)]
    opset = opset_of(model)
    quantisers = ["QuantizeLinear", "DequantizeLinear"] if opset < HALF_SCALES_OPSET else []
    blocked = [*DEFAULT_OP_BLOCK_LIST, *quantisers, *_without_float16(model, opset)]
    sensitive = [n.name for n in model.graph.node if n.op_type in blocked]
    if _is_float16(model, folder, {*kept, *sensitive}):
        return model, sorted({*kept, *sensitive}), large
    _free_names(model.graph)
    try:
        converted: ModelProto = convert_float_to_float16(
            model, keep_io_types=True, node_block_list=kept, op_block_list=blocked
        )
    except Exception as error:  # the converter asserts and raises whatever it meets
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CutefuseError(
            f"ONNX Runtime's float16 converter fails on this model ({reason}); use --scope sites, or convert it first"
        ) from None
    nodes = in_order(list(converted.graph.node))  # the converter appends its Casts at the end
    set_nodes(converted.graph, nodes)
    for place, output in passed_on:
        converted.graph.output.insert(place, output)
    settle_types(converted)  # the converter notes float16 for results that stay in float32, as a norm's statistics
    if sound and (wrong := fault(converted)):
        raise CutefuseError(
            f"ONNX Runtime's float16 converter makes an invalid model of this one ({wrong}); name nodes with "
            "--keep-float32, use --scope sites, or convert it first"
        )
    return converted, sorted({*kept, *sensitive}), large


def _is_float16(model: ModelProto, folder: Path, kept: Collection[str]) -> bool:
    """Whether a model holds float16, and only Casts and what is `kept` read or make a float32 tensor."""
    if not any(t.data_type == onnx.TensorProto.FLOAT16 for t in model.graph.initializer):
        return False
    graph = Graph(model, folder, inferred(model))
    lowered = [n for n in graph.nodes if n.op_type != "Cast" and n.name not in kept]
    images = [n.input[:1] if n.domain == DOMAIN else (*n.input, *n.output) for n in lowered]  # our biases are float32
    return not any(graph.dtype(t) == "float32" for names in images for t in names)


def _free_names(graph: onnx.GraphProto) -> None:
    """Rename the Casts that an earlier conversion made: the converter calls its new ones the same."""
    fixed = {v.name for v in (*graph.input, *graph.output)}
    taken = fixed | {name for n in graph.node for name in (n.name, *n.input, *n.output)}
    made = sorted({o for n in graph.node for o in n.output if _CASTS.search(o)} - fixed)
    renamed = {name: fresh(f"{name}.before", taken) for name in made}
    if renamed:
        _rename(graph, renamed)
    for node in graph.node:
        if _CASTS.search(node.name):
            node.name = fresh(f"{node.name}.before", taken)


def _prepared(model: ModelProto) -> ModelProto:
    """The model with what the converter overlooks in a form that it knows: nodes inside local functions, float32
    constants that are no tensors, and equal names in two bodies, such as the branches of an If."""
    local = [(f.domain, f.name) for f in model.functions if f.domain != DOMAIN]
    if local:
        model = inlined(model, local)
    _tell_apart(model.graph, _own_names(model.graph))
    for node in nodes_of(model.graph):
        for a in node.attribute if node.op_type == "Constant" else ():
            if a.name in ("value_float", "value_floats"):
                value = np.float32(a.f) if a.name == "value_float" else np.array(a.floats, np.float32)
                a.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(np.asarray(value))))
    return model


def _own_names(graph: onnx.GraphProto) -> set[str]:
    """The tensors that a graph itself defines."""
    made = {o for n in graph.node for o in n.output if o}
    return made | {t.name for t in graph.initializer} | {v.name for v in graph.input}


def _tell_apart(graph: onnx.GraphProto, taken: set[str]) -> None:
    """Give every tensor of a body a name that no other body has; `taken` are those that are in use."""
    for body in (b for n in graph.node for b in subgraphs(n)):
        own = _own_names(body)
        renamed = {name: fresh(name, taken) for name in sorted(own & taken)}
        taken |= own
        if renamed:
            _rename(body, renamed)
        _tell_apart(body, taken)


def _rename(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    """Rename tensors in a body and in the bodies within it, which see them."""
    for item in (*graph.initializer, *graph.input, *graph.output, *graph.value_info):
        item.name = renamed.get(item.name, item.name)
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        for body in subgraphs(node):
            _rename(body, renamed)


def _inputs_taken_from_outputs(model: ModelProto) -> list[tuple[int, onnx.ValueInfoProto]]:
    """Takes the outputs that are inputs away, which the converter would make twice; returns them and their places.

    Raises CutefuseError for an output that is a weight: it would become float16.
    """
    graph = model.graph
    weights, inputs = {t.name for t in graph.initializer}, {v.name for v in graph.input}
    if weight := next((o.name for o in graph.output if o.name in weights), None):
        raise CutefuseError(f"output '{weight}' is a weight, which float16 would round; use --scope sites")
    found = [(i, o) for i, o in enumerate(graph.output) if o.name in inputs]
    for i, _ in reversed(found):
        del graph.output[i]
    return found


def _without_float16(model: ModelProto, opset: int) -> list[str]:
    """The operators of a model that take float32 and no float16 in its opset, as Celu."""
    found = []
    for op_type in sorted({n.op_type for n in model.graph.node if n.domain in ("", "ai.onnx")}):
        if not onnx.defs.has(op_type, opset):
            continue
        schema = onnx.defs.get_schema(op_type, opset)
        allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        first = allowed.get(schema.inputs[0].type_str, ()) if schema.inputs else ()
        if "tensor(float)" in first and "tensor(float16)" not in first:
            found.append(op_type)
    return found


def types_of(model: ModelProto) -> tuple[list[int], list[bytes]]:
    """What a conversion of types changes: the types of the initializers, and the nodes."""
    return [t.data_type for t in model.graph.initializer], [n.SerializeToString() for n in model.graph.node]


def retype(sites: Sequence[Site], dtype: str, keep: Sequence[str], opset: int) -> tuple[list[str], list[Overflow]]:
    """Turn the float32 sites that will be fused into sites of another type.

    Returns the names of those that stay in float32, which `keep` (patterns) names or the type cannot hold, and the
    filters that it cannot hold.
    Raises CutefuseError where the opset has no Cast to the type.
    """
    if dtype == "bfloat16" and opset < BFLOAT16_OPSET:
        raise CutefuseError(
            f"opset {opset} has no Cast to bfloat16; convert the model to opset {BFLOAT16_OPSET}, or use --dtype fp16"
        )
    kept, large = list[str](), list[Overflow]()
    for site in sites:
        match = site.match
        if site.status != FUSED or match is None or match.call.dtype != "float32":
            continue
        lower = _lowered(match, dtype)
        constants = [i for i in lower.inputs if isinstance(i, Constant) and i.typed] if lower else []
        named = any(fnmatchcase(name, p) for n in site.nodes for name in names_of(n) for p in keep)
        stored = [] if named else [c.make().astype(np.float32).reshape(-1) for c in constants]
        values = [float(v[np.abs(v).argmax()]) for v in stored if v.size]  # the largest in magnitude
        if named or lower is None or not all(abs(v) <= LARGEST[dtype] for v in values):
            kept.append(site.name)
            large += [Overflow(site.name, match.nodes[0].input[1], v) for v in values if abs(v) > LARGEST[dtype]]
        else:
            site.take(lower)
            site.cast_from = "float32"
    return kept, large


def _lowered(match: Match, dtype: str) -> Match | None:
    """The match in another type, or the next smaller one that is legal in it."""
    smaller = _lowered(match.otherwise, dtype) if match.otherwise else None
    moves = [isinstance(i, str) or (isinstance(i, Constant) and i.typed) for i in match.inputs]
    inputs = [
        replace(t, dtype=dtype) if move and t.dtype == "float32" else t
        for t, move in zip(match.call.inputs, moves, strict=True)
    ]
    outputs = [replace(t, dtype=dtype) if t.dtype == "float32" else t for t in match.call.outputs]
    call = replace(match.call, inputs=inputs, outputs=outputs, _keep=[])
    operands = tuple(replace(i, dtype=dtype) if isinstance(i, Constant) and i.typed else i for i in match.inputs)
    return smaller if kernels.reject(call) else replace(match, call=call, inputs=operands, otherwise=smaller)
