"""Writes function bodies: standard operators whose forms change with the opset, and values taken from attributes.

TensorRT's ONNX parser finds a body by its name alone and resolves a reference to an attribute of the call in some
attributes only: it reads a Conv's kernel_shape, strides and dilations as if they were 1. So a value that all calls of a
body agree in is written as a number, and only attributes that the parser resolves hold references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, NodeProto, helper, numpy_helper

from cutefuse.graph.read import ELEM_TYPES

DOMAIN = "cutefuse"
PLUGIN_VERSION = "1"
TILE = "tile"  # the attribute by which a node asks for one tile alone: how it runs, and nothing of what it computes
FORMAL = "__cutefuse_"  # prefix of every name inside a body: old TensorRT parsers mix them up with outer tensors

# TensorRT's parser gives the layer of such a node the node's own name, and refuses a name that a layer has already, so
# bodies must not share them. Nor can it take one body for two nodes that has one; a network like that needs the plugin.
QUANTISERS = ("QuantizeLinear", "DequantizeLinear")
LAST = np.iinfo(np.int64).max  # the end of a Slice that goes on to the last element


class Body:
    """Collects the nodes of one function body. Values are named by the returned strings, all with the safe prefix.

    `dtype` is the type that all calls compute in, "" when it differs. `calls` are the attributes of all calls that the
    body has to serve; none when they are unknown.
    """

    def __init__(self, opset: int, dtype: str, calls: Sequence[Mapping[str, Any]] = ()) -> None:
        self.opset, self.dtype, self.calls = opset, dtype, calls
        self.nodes: list[NodeProto] = []
        self._made: dict[bytes, list[str]] = {}

    def agreed(self, name: str) -> list[Any] | None:
        """The values of an attribute in which all calls agree; None where they do not, or where no call is known."""
        values = [list(attrs[name]) for attrs in self.calls]
        return values[0] if values and all(v == values[0] for v in values) else None

    def formal(self, name: str) -> str:
        """The name of a formal input or output."""
        return FORMAL + name

    def add(self, op_type: str, *inputs: str, refs: dict[str, str] | None = None, **attrs: Any) -> str:
        """One node with one output; `refs` maps its attributes to the call's: numbers where all calls agree."""
        return self.add_many(1, op_type, *inputs, refs=refs, **attrs)[0]

    def add_many(
        self, count: int, op_type: str, *inputs: str, refs: dict[str, str] | None = None, **attrs: Any
    ) -> list[str]:
        """One node with `count` outputs; the same node asked for again is made once."""
        node = helper.make_node(op_type, list(inputs), [], **attrs)
        schema = onnx.defs.get_schema(op_type, self.opset, "")
        for name, source in (refs or {}).items():
            kind: Any = schema.attributes[name].type  # an enumeration whose stub lacks its value
            if (values := self.agreed(source)) is None:
                node.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=source, type=kind.value))
            else:
                several = kind.value in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS)
                node.attribute.append(helper.make_attribute(name, values if several else values[0]))
        outputs = [f"{FORMAL}t{len(self.nodes)}_{i}" for i in range(count)]
        known = self._made.setdefault(node.SerializeToString(deterministic=True), outputs)
        if known is outputs:
            node.output.extend(outputs)
            self.nodes.append(node)
        return known

    def constant(self, value: Any, dtype: str = "int64") -> str:
        """A literal tensor."""
        return self.add("Constant", value=numpy_helper.from_array(np.array(value, dtype=dtype)))

    def ints(self, name: str) -> str:
        """An ints attribute as an int64 vector. Before opset 12 it must hold two values, each at least 1."""
        if (values := self.agreed(name)) is not None:
            return self.constant(values)
        if self.opset >= 12:
            return self.add("Constant", refs={"value_ints": name})
        # Opset 11 cannot turn an attribute into a tensor. It can set sizes: pads of a and b around one number under a
        # filter of two leave a + b numbers; a Split gives vectors of a and of b numbers, and Shape reads their sizes.
        one, two = self.constant([[[0.0]]], "float32"), self.constant([[[0.0, 0.0]]], "float32")
        row = self.add("Conv", one, two, refs={"pads": name}, kernel_shape=[2])
        parts = self.add_many(2, "Split", row, refs={"split": name}, axis=2)
        return self.add("Concat", *(self.size(p, 2) for p in parts), axis=0)

    def each(self, vector: str, count: int) -> list[str]:
        """The numbers of an int64 vector as `count` vectors of one."""
        if count == 1:
            return [vector]
        ones = [1] * count
        if self.opset < 13:
            return self.add_many(count, "Split", vector, axis=0, split=ones)
        return self.add_many(count, "Split", vector, self.constant(ones), axis=0)

    def int_attr(self, name: str) -> str:
        """An int attribute as an int64 vector of one (opset >= 12)."""
        if (values := self.agreed(name)) is not None:
            return self.constant(values)
        return self.add("Reshape", self.add("Constant", refs={"value_int": name}), self.constant([1]))

    def size(self, value: str, axis: int) -> str:
        """One of the sizes of a value, as an int64 vector of one."""
        return self.add("Gather", self.add("Shape", value), self.constant([axis]))

    def float_attr(self, name: str) -> str:
        """A float attribute as a float32 scalar."""
        if (values := self.agreed(name)) is not None:
            return self.constant(values[0], "float32")
        if self.opset >= 12:
            return self.add("Constant", refs={"value_float": name})
        # Opset 11 cannot turn an attribute into a tensor; LeakyRelu(-1) = -alpha can.
        return self.add("Neg", self.add("LeakyRelu", self.constant(-1.0, "float32"), refs={"alpha": name}))

    def cast_like(self, value: str, like: str, dtype: str = "") -> str:
        """A float32 value in the type of `like`, which is `dtype` or, without one, the type that the body is for."""
        known = dtype or self.dtype
        if known == "float32":
            return value
        if self.opset >= 15:
            return self.add("CastLike", value, like)
        return self.add("Cast", value, to=ELEM_TYPES[known])

    def split(self, value: str, sizes_attr: str, count: int, axis: int) -> list[str]:
        """Split along an axis by an ints attribute of the call."""
        if count == 1:
            return [value]
        if self.opset < 13:
            return self.add_many(count, "Split", value, axis=axis, refs={"split": sizes_attr})
        return self.add_many(count, "Split", value, self.ints(sizes_attr), axis=axis)

    def cut(
        self, value: str, starts: str | Sequence[int], ends: str | Sequence[int], axes: Sequence[int], steps: str = ""
    ) -> str:
        """A Slice; from opset 10 on, its limits may be int64 vectors instead of numbers, and it may have `steps`."""
        if self.opset < 10 and not (steps or isinstance(starts, str) or isinstance(ends, str)):
            return self.add("Slice", value, starts=list(starts), ends=list(ends), axes=list(axes))
        # Where all are numbers, int32: of int64 TensorRT's parser makes shape arithmetic. It wants the steps written.
        computed = [v for v in (starts, ends, steps or "") if isinstance(v, str) and v]
        kind = "int64" if computed else "int32"
        limits = [v if isinstance(v, str) else self.constant(v, kind) for v in (starts, ends)]
        limits += [self.constant(axes, kind), steps or self.constant([1] * len(axes), kind)]
        return self.add("Slice", value, *limits)

    def finish(self, op_type: str, inputs: list[str], outputs: list[str], attrs: list[str]) -> FunctionProto:
        """The function, which declares the operator's attributes and those of the plugin look-up. `outputs` are
        distinct values that nodes of this body make; they become the formal outputs."""
        formals = [self.formal(f"y{i}") for i in range(len(outputs))]
        renamed = dict(zip(outputs, formals, strict=True))
        for node in self.nodes:
            for names in (node.input, node.output):
                names[:] = [renamed.get(n, n) for n in names]
            if node.op_type in QUANTISERS:
                node.name = f"{op_type}_{node.output[0].removeprefix(FORMAL)}"
        # A tile has a default, since older models lack it; ONNX's reference evaluator wants all others on every call.
        return helper.make_function(
            DOMAIN, op_type, inputs, formals, self.nodes, [helper.make_opsetid("", self.opset)],
            attributes=[*attrs, "plugin_version", "plugin_namespace"],
            attribute_protos=[helper.make_attribute(TILE, 0)],
        )  # fmt: skip
