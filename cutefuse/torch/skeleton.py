"""A PyTorch graph as the rewriter reads graphs: an ONNX model of the same tensors, for finding sites in it.

Operators that can be part of a site become standard ONNX nodes; every other becomes a node of a foreign domain, which
nothing is fused with and whose output sizes are written down. The model is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, fx

from cutefuse.graph.read import ELEM_TYPES, attribute
from cutefuse.match.conv.read import GROUPS

OPSET, IR_VERSION = 20, 10
FOREIGN = "torch"
_END = 1 << 62  # of a Slice that goes on to the last element
_BINARY = {"aten.add.Tensor": "Add", "aten.mul.Tensor": "Mul", "aten.sub.Tensor": "Sub", "aten.div.Tensor": "Div"}


class Skeleton:
    """`model`: the ONNX graph. `nodes`: name of an ONNX node -> the PyTorch node that it stands for. `tensors`: name of
    an ONNX tensor -> the PyTorch node whose value it is. `title` gives the name by which a user knows a node."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self.nodes: dict[str, fx.Node] = {}
        self.tensors: dict[str, fx.Node] = {}
        self._names: dict[fx.Node, str] = {}
        self._initializers: dict[str, TensorProto] = {}
        self._made: list[onnx.NodeProto] = []
        self._known: list[onnx.ValueInfoProto] = []
        inputs, outputs = list[onnx.ValueInfoProto](), list[onnx.ValueInfoProto]()
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, Tensor):
                inputs.append(self._info(self._name(node), value))
            elif node.op == "call_function":
                self._translate(node)
            elif node.op == "output":
                outputs += [
                    self._info(self._name(n), n.meta["val"])
                    for n in dict.fromkeys(node.all_input_nodes) if isinstance(n.meta.get("val"), Tensor)
                ]  # fmt: skip
        named = {v.name for v in (*inputs, *outputs)}
        graph = helper.make_graph(
            self._made, "torch", inputs, outputs, list(self._initializers.values()),
            value_info=[v for v in self._known if v.name not in named],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FOREIGN, 1)]
        self.model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    def others(self, named: Collection[str]) -> dict[str, str]:
        """Why convolutions that are no candidates stay: name -> a sentence."""
        found = {}
        for node in self.model.graph.node:
            target = str(self.nodes[node.name].target)
            if node.name in named or not target.startswith("aten.conv"):
                continue
            group = attribute(node, "group", 1)
            if node.op_type == "Conv" and group != 1:
                found[node.name] = f"it has {group} groups; {GROUPS}"
            elif node.op_type == "Conv":
                found[node.name] = "nothing stands around it that could be fused with it"
            else:
                rank = self.nodes[node.name].meta["val"].dim()
                found[node.name] = f"it is {target} of rank {rank}; only conv2d can be fused"
        return found

    # ----------------------------------------------------------------------------------------------------- the tensors
    def _name(self, node: fx.Node) -> str:
        """The ONNX tensor of a node's value; of a parameter the initializer, which is stored when first asked for."""
        if node not in self._names:
            self._names[node] = node.name
            self.tensors[node.name] = node
            if node.op == "get_attr":
                self._initializers[node.name] = _stored(node.name, attrgetter(str(node.target))(self._module))
        return self._names[node]

    def _info(self, name: str, value: Tensor) -> onnx.ValueInfoProto:
        dims = [int(d) if isinstance(d, int) else str(d) for d in value.shape]
        return helper.make_tensor_value_info(name, ELEM_TYPES.get(_kind(value), TensorProto.FLOAT), dims)

    def _constant(self, node: fx.Node, suffix: str, value: Any, like: Tensor | None = None) -> str:
        name = f"{node.name}.{suffix}"
        if like is not None:
            self._initializers[name] = _stored(name, torch.tensor(value, dtype=like.dtype))
        else:
            self._initializers[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def _operand(self, node: fx.Node, i: int, like: Tensor) -> str:
        """An argument as a tensor: a node's value, or a number in the type of `like`."""
        given = node.args[i]
        return self._name(given) if isinstance(given, fx.Node) else self._constant(node, f"operand{i}", given, like)

    # ------------------------------------------------------------------------------------------------------- the nodes
    def _add(self, node: fx.Node, op_type: str, inputs: Sequence[str], outputs: Sequence[str] = (), suffix: str = "",
             domain: str = "", **attrs: Any) -> str:  # fmt: skip
        """Write an ONNX node for a PyTorch node; its first output."""
        path = title(node)
        free = str(node.target).startswith("aten.conv") and path not in self.nodes  # what a module is known for
        name = path if free or path == node.name else f"{path}/{node.name}"
        name = f"{name}{suffix}" if f"{name}{suffix}" not in self.nodes else f"{name}{suffix}/{node.name}"
        self.nodes[name] = node
        outputs = list(outputs) or [f"{node.name}{suffix}" if suffix else self._name(node)]
        self._made.append(helper.make_node(op_type, inputs, outputs, name, domain=domain, **attrs))
        return outputs[0]

    def _translate(self, node: fx.Node) -> None:
        if str(node.target) == "<built-in function getitem>":
            source, i = node.args
            assert isinstance(source, fx.Node) and isinstance(i, int)
            self._names[node] = self._part(source, i)
            self.tensors[self._names[node]] = node
            if isinstance(value := node.meta.get("val"), Tensor):
                self._known.append(self._info(self._names[node], value))
            return
        target, value = str(node.target), node.meta.get("val")
        rule = _RULES.get(target)
        if rule is None or not rule(self, node, value):
            self._foreign(node)
        if isinstance(value, Tensor):
            self._known.append(self._info(self._name(node), value))

    def _part(self, source: fx.Node, i: int) -> str:
        return f"{source.name}.{i}"

    def _foreign(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        count = len(value) if isinstance(value, tuple | list) else 0
        outputs = [self._part(node, i) for i in range(count)] or [self._name(node)]
        read = [self._name(n) for n in node.all_input_nodes if n.op != "get_attr"]
        op_type = str(node.target).split(".")[-2] if "." in str(node.target) else str(node.target)
        self._add(node, op_type, read, outputs, domain=FOREIGN)


def title(node: fx.Node) -> str:
    """The path of the module that a node stands in; its own name where that says less."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path or node.name


def _stored(name: str, value: Tensor) -> TensorProto:
    value = value.detach().cpu().contiguous()
    raw = (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy().tobytes()
    return TensorProto(name=name, data_type=ELEM_TYPES[_kind(value)], dims=value.shape, raw_data=raw)


def _kind(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------- the rules
Rule = Callable[[Skeleton, fx.Node, Any], bool]  # whether it wrote the node


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by name, defaults included."""
    schema = node.target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def _pair(values: Sequence[int]) -> list[int]:
    return [int(v) for v in (values if len(values) == 2 else list(values) * 2)]


def _conv(s: Skeleton, node: fx.Node, value: Any) -> bool:
    a = _arguments(node)
    if value.dim() != 4 or isinstance(a["padding"], str):
        return False
    inputs = [s._name(a["input"]), s._name(a["weight"])] + ([s._name(a["bias"])] if a["bias"] is not None else [])
    geometry = {
        "strides": _pair(a["stride"]), "pads": _pair(a["padding"]) * 2, "dilations": _pair(a["dilation"]),
        "group": a["groups"],
    }  # fmt: skip
    transposed = a.get("transposed") or "transpose" in str(node.target)
    if transposed:
        geometry |= {"output_padding": _pair(a["output_padding"])}
    s._add(node, "ConvTranspose" if transposed else "Conv", inputs, **geometry)
    return True


def _batch_norm(s: Skeleton, node: fx.Node, value: Any) -> bool:
    a = _arguments(node)
    if any(a[k] is None for k in ("weight", "bias", "running_mean", "running_var")) or a.get("training"):
        return False
    inputs = [s._name(a[k]) for k in ("input", "weight", "bias", "running_mean", "running_var")]
    output = s._part(node, 0) if isinstance(value, tuple | list) else s._name(node)
    s._add(node, "BatchNormalization", inputs, [output], epsilon=float(a["eps"]))
    return True


def _cat(s: Skeleton, node: fx.Node, value: Any) -> bool:
    a = _arguments(node)
    s._add(node, "Concat", [s._name(t) for t in a["tensors"]], axis=int(a["dim"]) % max(1, value.dim()))
    return True


def _unary(op_type: str, attribute: str = "", argument: str = "", kind: type = str) -> Rule:
    """A function of one tensor, and of one of the node's arguments where ONNX has it as an attribute."""

    def rule(s: Skeleton, node: fx.Node, value: Any) -> bool:
        attrs = {attribute: kind(_arguments(node)[argument])} if attribute else {}
        s._add(node, op_type, [s._name(node.all_input_nodes[0])], **attrs)
        return True

    return rule


def _binary(s: Skeleton, node: fx.Node, value: Any) -> bool:
    values = [n.meta.get("val") for n in node.all_input_nodes]
    if node.kwargs or any(not isinstance(v, Tensor) or v.dtype != value.dtype for v in values):
        return False  # alpha, a rounding mode, or a promotion of types
    s._add(node, _BINARY[str(node.target)], [s._operand(node, i, value) for i in range(2)])
    return True


def _silu(s: Skeleton, node: fx.Node, value: Any) -> bool:
    x = s._name(node.all_input_nodes[0])
    gate = s._add(node, "Sigmoid", [x], suffix=".gate")
    s._add(node, "Mul", [x, gate])
    return True


def _clip(s: Skeleton, node: fx.Node, value: Any) -> bool:
    a = _arguments(node)
    keys = ("min_val", "max_val") if "min_val" in a else ("min", "max")
    lo, hi = (0.0, 6.0) if "relu6" in str(node.target) else (a[k] for k in keys)
    if any(isinstance(v, fx.Node) for v in (lo, hi)):
        return False
    bounds = ["" if v is None else s._constant(node, k, v, value) for k, v in (("lo", lo), ("hi", hi))]
    s._add(node, "Clip", [s._name(node.all_input_nodes[0]), *bounds])
    return True


def _nearest(s: Skeleton, node: fx.Node, value: Any) -> bool:
    x = node.all_input_nodes[0]
    before = x.meta["val"].shape
    if not all(isinstance(d, int) for d in (*before, *value.shape)) or value.dim() != 4:
        return False
    factors = [new / old for new, old in zip(value.shape[2:], before[2:], strict=True)]
    if any(not f.is_integer() for f in factors):
        return False  # by other factors ONNX, nearest and nearest-exact may take different pixels
    scales = s._constant(node, "scales", np.array([1, 1, *factors], np.float32))
    s._add(node, "Resize", [s._name(x), "", scales], mode="nearest", coordinate_transformation_mode="asymmetric",
           nearest_mode="floor")  # fmt: skip
    return True


def _slice(s: Skeleton, node: fx.Node, value: Any) -> bool:
    a = _arguments(node)
    start, end, step = (d if a.get(k) is None else a[k] for k, d in (("start", 0), ("end", _END), ("step", 1)))
    if any(isinstance(b, fx.Node) for b in (start, end, step)):
        return False
    names = [
        s._constant(node, k, np.array([min(int(v), _END)], np.int64))
        for k, v in (("starts", start), ("ends", end), ("axes", a["dim"]), ("steps", step))
    ]
    s._add(node, "Slice", [s._name(a["input"] if "input" in a else a["self"]), *names])
    return True


def _split(s: Skeleton, node: fx.Node, value: Any) -> bool:
    axis = int(_arguments(node)["dim"])
    sizes = [v.shape[axis] for v in value]
    if not all(isinstance(size, int) for size in sizes):
        return False
    wanted = s._constant(node, "sizes", np.array(sizes, np.int64))
    s._add(node, "Split", [s._name(node.all_input_nodes[0]), wanted], [s._part(node, i) for i in range(len(sizes))],
           axis=axis % value[0].dim())  # fmt: skip
    return True


_RULES: dict[str, Rule] = {
    "aten.conv2d.default": _conv, "aten.convolution.default": _conv,
    "aten.conv_transpose2d.input": _conv,
    "aten.batch_norm.default": _batch_norm, "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten.cat.default": _cat, "aten.silu.default": _silu,
    "aten.gelu.default": _unary("Gelu", "approximate", "approximate"),
    "aten.leaky_relu.default": _unary("LeakyRelu", "alpha", "negative_slope", float),
    "aten.relu.default": _unary("Relu"), "aten.sigmoid.default": _unary("Sigmoid"),
    "aten.tanh.default": _unary("Tanh"), "aten.hardswish.default": _unary("HardSwish"),
    **dict.fromkeys(("aten.clone.default", "aten.contiguous.default", "aten.alias.default"), _unary("Identity")),
    "aten.hardtanh.default": _clip, "aten.clamp.default": _clip, "aten.relu6.default": _clip,
    "aten.upsample_nearest2d.vec": _nearest, "aten.upsample_nearest2d.default": _nearest,
    "aten._upsample_nearest_exact2d.vec": _nearest, "aten._upsample_nearest_exact2d.default": _nearest,
    "aten.slice.Tensor": _slice, "aten.split.Tensor": _split, "aten.split_with_sizes.default": _split,
    **dict.fromkeys(_BINARY, _binary),
}  # fmt: skip
