"""Writes function bodies: standard operators whose forms change with the opset, and values taken from attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, NodeProto, helper, numpy_helper

from cutefuse.graph.read import ELEM_TYPES

DOMAIN = "cutefuse"
PLUGIN_VERSION = "1"
FORMAL = "__cutefuse_"  # prefix of every name inside a body: old TensorRT parsers mix them up with outer tensors


class Body:
    """Collects the nodes of one function body. Values are named by the returned strings, all with the safe prefix."""

    def __init__(self, opset: int, dtype: str) -> None:
        self.opset, self.dtype = opset, dtype
        self.nodes: list[NodeProto] = []

    def formal(self, name: str) -> str:
        """The name of a formal input or output."""
        return FORMAL + name

    def add(self, op_type: str, *inputs: str, refs: dict[str, str] | None = None, **attrs: Any) -> str:
        """One node with one output; `refs` maps its attributes to the call's."""
        return self.add_many(1, op_type, *inputs, refs=refs, **attrs)[0]

    def add_many(
        self, count: int, op_type: str, *inputs: str, refs: dict[str, str] | None = None, **attrs: Any
    ) -> list[str]:
        """One node with `count` outputs."""
        outputs = [f"{FORMAL}t{len(self.nodes)}_{i}" for i in range(count)]
        node = helper.make_node(op_type, list(inputs), outputs, **attrs)
        self.nodes.append(by_reference(node, self.opset, **(refs or {})))
        return outputs

    def constant(self, value: Any, dtype: str = "int64") -> str:
        """A literal tensor."""
        return self.add("Constant", value=numpy_helper.from_array(np.array(value, dtype=dtype)))

    def zeros(self, dims: list[int]) -> str:
        """A float32 tensor of zeros that costs no bytes in the file."""
        return self.add("ConstantOfShape", self.constant(dims))

    def float_attr(self, name: str) -> str:
        """A float attribute as a scalar of the activation type; `like` gives that type from opset 15 on."""
        if self.opset >= 12:
            return self.add("Constant", refs={"value_float": name})
        # Opset 11 cannot turn an attribute into a tensor; LeakyRelu(-1) = -alpha can.
        return self.add("Neg", self.add("LeakyRelu", self.constant(-1.0, "float32"), refs={"alpha": name}))

    def cast_like(self, value: str, like: str, dtype: str = "") -> str:
        """The value in the type of `like`; before CastLike existed, in `dtype`, else in the body's own type."""
        if self.opset >= 15:
            return self.add("CastLike", value, like)
        return self.add("Cast", value, to=ELEM_TYPES[dtype or self.dtype])

    def split(self, value: str, sizes_attr: str, count: int, axis: int) -> list[str]:
        """Split along an axis by an ints attribute of the call."""
        if count == 1:
            return [value]
        if self.opset < 13:
            return self.add_many(count, "Split", value, axis=axis, refs={"split": sizes_attr})
        return self.add_many(count, "Split", value, self.add("Constant", refs={"value_ints": sizes_attr}), axis=axis)

    def head(self, value: str, count: str, axis: int) -> str:
        """The first `count` (an int64 vector of one) entries along an axis."""
        if self.opset >= 10:
            return self.add("Slice", value, self.constant([0]), count, self.constant([axis]))
        one = numpy_helper.from_array(np.ones(1, np.int64))
        rows = self.add("NonZero", self.add("ConstantOfShape", count, value=one))
        return self.add("Gather", value, self.add("Reshape", rows, self.constant([-1])), axis=axis)

    def finish(self, op_type: str, inputs: list[str], outputs: list[str], attrs: list[str]) -> FunctionProto:
        """The function. `outputs` are distinct values that nodes of this body make; they become the formal outputs."""
        formals = [self.formal(f"y{i}") for i in range(len(outputs))]
        renamed = dict(zip(outputs, formals, strict=True))
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [renamed.get(n, n) for n in names]
        return function_proto(op_type, inputs, formals, self.nodes, self.opset, attrs)


def function_proto(
    op_type: str, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[NodeProto], opset: int,
    attrs: Sequence[str],
) -> FunctionProto:  # fmt: skip
    """A local function of our domain that declares the operator's attributes and those of the plugin look-up."""
    declared = [*attrs, "plugin_version", "plugin_namespace"]
    return helper.make_function(
        DOMAIN, op_type, inputs, outputs, nodes, [helper.make_opsetid("", opset)], attributes=declared
    )


def by_reference(node: NodeProto, opset: int, **refs: str) -> NodeProto:
    """Add attributes to a body's node that take the call's attribute values: by_reference(conv, 17, pads="pads")."""
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    for name, source in refs.items():
        kind: Any = schema.attributes[name].type  # an enumeration whose stub lacks its value
        node.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=source, type=kind.value))
    return node
