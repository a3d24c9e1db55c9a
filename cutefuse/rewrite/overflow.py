"""Weights that float16 cannot hold: which nodes read them, so that they stay in float32 and are named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from cutefuse.graph.numbers import LARGEST
from cutefuse.graph.read import attribute, label, set_nodes

# A bound or a mask: the largest number of the type says the same there (Clip, Where, an Add of -3.4e38 before Softmax).
_BOUNDS = ("Clip", "Min", "Max", "Where", "Pad", "ConstantOfShape", "Identity", "Cast", "Shape")
_MASKS = ("Add", "Sub")


@dataclass(frozen=True)
class Overflow:
    """A node, the constant that it reads, and the entry of that which is largest in magnitude."""

    node: str
    tensor: str
    value: float


def overflows(model: ModelProto) -> list[Overflow]:
    """Every node of the main graph that computes with a constant beyond float16, in graph order; external data must be
    loaded. The converter would write the largest float16 in its place without a word."""
    large = {
        name: extremes for name, t in _constants(model).items() if (extremes := _extremes(numpy_helper.to_array(t)))
    }
    found = []
    for node in model.graph.node:
        for name in dict.fromkeys(node.input):
            if name not in large or node.op_type in _BOUNDS:
                continue
            least, most = large[name]
            if node.op_type not in _MASKS or most > LARGEST["float16"]:
                found.append(Overflow(label(node), name, most if most >= -least else least))
    return found


def name_and_lift(model: ModelProto, found: list[Overflow]) -> list[str]:
    """Prepare a model for the converter, which knows nodes by their names and lowers a Constant whoever reads it: nodes
    without a name get their label, large Constants become initializers. Returns the names of the nodes to keep."""
    keep, tensors, constants = {o.node for o in found}, {o.tensor for o in found}, _constants(model)
    kept: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] in tensors:
            value = numpy_helper.to_array(constants[node.output[0]])
            model.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
            if model.ir_version < 4:  # every initializer is an input there
                info = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, value.shape)
                model.graph.input.append(info)
            continue
        if not node.name and label(node) in keep:
            node.name = label(node)
        kept.append(node)
    set_nodes(model.graph, kept)
    return sorted(keep)


def _constants(model: ModelProto) -> dict[str, TensorProto]:
    """The float32 tensors that a model stores, those of Constants included, by their names."""
    literals = ((n.output[0], attribute(n, "value")) for n in model.graph.node if n.op_type == "Constant")
    stored = {t.name: t for t in model.graph.initializer} | {name: t for name, t in literals if t is not None}
    return {name: t for name, t in stored.items() if t.data_type == TensorProto.FLOAT}


def _extremes(value: np.ndarray) -> tuple[float, float] | None:
    """(least, most) finite entry where one is beyond float16."""
    if not value.size:
        return None
    with np.errstate(invalid="ignore"):
        least, most = float(value.min()), float(value.max())
        if not np.isfinite((least, most)).all():  # float16 has infinity and NaN itself
            finite = value[np.isfinite(value)]
            least, most = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return (least, most) if max(-least, most) > LARGEST["float16"] else None
