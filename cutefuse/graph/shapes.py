"""Shape inference for files of any size, through the shape arithmetic that exporters write around dynamic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from cutefuse.errors import CutefuseError
from cutefuse.graph.axis_names import Names, keep
from cutefuse.graph.read import attribute, external_fields, opset_of, run_node
from cutefuse.graph.store import INLINE_BYTES

ROUNDS = 64  # of inference and folding; each makes at least one more size known
MAX_ELEMENTS = 64  # of a value that can describe a shape
ARITHMETIC = frozenset("Gather Slice Squeeze Unsqueeze Concat Cast Add Sub Mul Div Floor Identity".split())
# Operators whose output is as their first input, which onnx infers nothing through; some are of other domains.
SAME_SIZE = frozenset(
    {("", "GroupNormalization"), ("", "MeanVarianceNormalization"), ("", "SimplifiedLayerNormalization")}
    | {("", name) for name in ("InstanceNormalization_TRT", "GroupNormalizationPlugin", "GroupNormPlugin")}
    | {("com.microsoft", name) for name in ("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "GroupNorm")}
)
MOVES = frozenset("Gather Slice Squeeze Unsqueeze Concat Cast Identity".split())  # sizes without changing them


def inferred(
    model: ModelProto, stored: Mapping[str, TensorProto] | None = None, sizes: Mapping[str, Sequence[int]] | None = None
) -> onnx.GraphProto:
    """The graph after shape inference, without its large weights; as it is written where inference fails.

    Nodes that compute sizes from known sizes count as constants, so that channels stay known behind a sliced tensor of
    a dynamic batch. `stored` are the initializers where the model itself holds none. `sizes` are those of inputs with
    dynamic axes; an axis name has one size everywhere.
    """
    skeleton = _skeleton(model, stored)
    if sizes:
        _set_sizes(skeleton.graph, sizes)
    known: dict[str, np.ndarray] = {}
    graph = model.graph
    names = Names(skeleton.graph)
    try:
        for _ in range(ROUNDS):
            graph = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
            values = _Values(skeleton, graph, known, names)
            if not values.fold() and not keep(skeleton.graph, graph, values.opset, names, values.of):
                break
    except Exception:  # contradictory shapes, or more than 2 GB of constants inside nodes: go on with what is known
        pass
    return graph


def believed(
    model: ModelProto, stored: Mapping[str, TensorProto]
) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto], str]:
    """(value_info, outputs, sentence) of a model without what its inputs contradict.

    An exporter notes the sizes of tensors on the way; who then edits the inputs alone leaves stale ones behind, and no
    engine heeds these. Where one of them contradicts what follows from the inputs, none is believed, and the sentence
    names it: nobody knows how many more there are. A tensor keeps its type then, if inference does not know better.
    """
    noted = [v for v in (*model.graph.value_info, *model.graph.output) if v.type.tensor_type.HasField("shape")]
    outputs = list(model.graph.output)
    if not noted:
        return list(model.graph.value_info), outputs, ""
    skeleton = _skeleton(model, stored, noted=False)
    for i, info in enumerate(skeleton.graph.input):
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            # An axis without a name carries none through inference.
            if not dim.dim_param and (dim.dim_value < 0 or not dim.HasField("dim_value")):
                dim.dim_param = f"{_OPEN}{i}.{axis}"
    own = {d.dim_param for v in skeleton.graph.input for d in v.type.tensor_type.shape.dim if d.dim_param}
    for info in skeleton.graph.output:
        info.type.tensor_type.ClearField("shape")
    try:
        graph = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    except Exception:  # more than 2 GB of constants inside nodes, or a damaged model: nothing can be compared
        return list(model.graph.value_info), outputs, ""
    found = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.output)}
    stale = next((v for v in noted if v.name in found and _contradicts(v.type.tensor_type, found[v.name], own)), None)
    if stale is None:
        return list(model.graph.value_info), outputs, ""
    sizes = [_size_words(t) for t in (stale.type.tensor_type, found[stale.name])]
    why = (
        f"the model notes '{stale.name}' as {sizes[0]}, its inputs make it {sizes[1]}; no noted size is "
        "believed, infer the shapes of the model anew"
    )
    return [_without_sizes(v) for v in model.graph.value_info], [_without_sizes(v) for v in outputs], why


_OPEN = "\0open"


def _contradicts(noted: onnx.TypeProto.Tensor, found: onnx.TypeProto.Tensor, own: Set[str]) -> bool:
    """Whether noted sizes are other ones than those that follow from the inputs, whose axes' names are `own`."""
    if not found.HasField("shape"):
        return False
    pairs = list(zip(noted.shape.dim, found.shape.dim, strict=False))
    return len(noted.shape.dim) != len(found.shape.dim) or any(
        a.HasField("dim_value") and a.dim_value >= 0 and a.dim_value != b.dim_value
        for a, b in pairs if b.HasField("dim_value") or b.dim_param in own
    )  # fmt: skip


def _size_words(kind: onnx.TypeProto.Tensor) -> str:
    names = [d.dim_param if not d.dim_param.startswith(_OPEN) else "?" for d in kind.shape.dim]
    return "x".join(n or str(d.dim_value) for n, d in zip(names, kind.shape.dim, strict=True)) or "one number"


def _without_sizes(info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    bare = deepcopy(info)
    bare.type.tensor_type.ClearField("shape")
    return bare


def fed(model: ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs that a run has to be given: those that no stored weight stands for."""
    stored = {t.name for t in model.graph.initializer}
    return [v for v in model.graph.input if v.name not in stored]


def check_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises CutefuseError where `--input-shape` names no input of the model or contradicts its sizes."""
    inputs = {v.name: v for v in fed(model)}
    for name, given in shapes.items():
        if name not in inputs:
            raise CutefuseError(f"--input-shape names '{name}'; the model's inputs are {', '.join(inputs)}")
        dims = _dims(inputs[name])
        if dims is None:
            continue
        if len(dims) != len(given):
            raise CutefuseError(f"--input-shape gives '{name}' {len(given)} axes, it has {len(dims)}")
        if any(d >= 0 and d != g for d, g in zip(dims, given, strict=True)):
            texts = ["x".join("?" if d < 0 else str(d) for d in sizes) for sizes in (given, dims)]
            raise CutefuseError(f"--input-shape gives '{name}' {texts[0]}, the model has {texts[1]}; only ? may differ")


def batch_of_one(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Sizes for the inputs that `shapes` leaves out, where their first axes alone are open: one of each, as trtexec
    takes them. Empty where another axis is open too, or where nothing is open."""
    inputs, found, named = fed(model), dict[str, list[int]](), dict[str, int]()
    for info in inputs:
        axes = zip(info.type.tensor_type.shape.dim, shapes.get(info.name, ()), strict=False)
        named |= {axis.dim_param: size for axis, size in axes if axis.dim_param}
    for info in (v for v in inputs if v.name not in shapes):
        dims = _dims(info)
        if dims is None or any(d < 0 for d in dims[1:]):
            return {}
        if dims and dims[0] < 0:
            found[info.name] = [named.get(info.type.tensor_type.shape.dim[0].dim_param, 1), *dims[1:]]
    return found


def open_inputs(model: ModelProto) -> dict[str, list[int]]:
    """The inputs with axes of open size, and their sizes, -1 where open."""
    dims = {v.name: _dims(v) for v in fed(model)}
    return {name: sizes for name, sizes in dims.items() if sizes is not None and min(sizes, default=0) < 0}


def _set_sizes(graph: onnx.GraphProto, sizes: Mapping[str, Sequence[int]]) -> None:
    named: dict[str, int] = {}
    for info in graph.input:
        for dim, size in zip(info.type.tensor_type.shape.dim, sizes.get(info.name, ()), strict=False):
            if dim.dim_param:
                named.setdefault(dim.dim_param, size)
            dim.dim_value = size
    for info in (*graph.input, *graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in named:
                dim.dim_value = named[dim.dim_param]


def fault(model: ModelProto) -> str:
    """What strict inference of types and shapes says against a model's nodes and outputs; empty where nothing."""
    skeleton = _skeleton(model, noted=False)  # an exporter's or a converter's notes no runtime heeds
    try:
        onnx.shape_inference.infer_shapes(skeleton, check_type=True, strict_mode=True)
    except Exception as error:  # onnx's kinds of errors share no public base class
        return " ".join(str(error).split())
    return ""


def settle_types(model: ModelProto) -> None:
    """Let the types that a model notes on the way be those that its nodes make and its weights have."""
    skeleton = _skeleton(model, noted=False)
    try:
        known = onnx.shape_inference.infer_shapes(skeleton).graph.value_info
    except Exception:  # whoever writes the model checks it
        return
    made = {v.name: v.type.tensor_type.elem_type for v in known}
    made |= {t.name: t.data_type for t in model.graph.initializer}
    for info in model.graph.value_info:
        if made.get(info.name) and info.type.HasField("tensor_type"):
            info.type.tensor_type.elem_type = made[info.name]


def _skeleton(model: ModelProto, stored: Mapping[str, TensorProto] | None = None, noted: bool = True) -> ModelProto:
    """What inference works on. `stored`: as of `inferred`; `noted`: with what the model says of tensors on the way."""
    stored = {t.name: t for t in model.graph.initializer} if stored is None else stored
    skeleton = ModelProto()
    skeleton.ir_version = max(model.ir_version, 4)  # from there on initializers need not be inputs
    skeleton.opset_import.extend(model.opset_import)
    skeleton.functions.extend(model.functions)
    graph = skeleton.graph
    graph.name = model.graph.name
    graph.node.extend(_as_inferred(n) for n in model.graph.node)
    graph.output.extend(model.graph.output)
    # Inference takes a size without a number from here rather than from a stored tensor of that name.
    graph.value_info.extend(v for v in model.graph.value_info if noted and v.name not in stored)
    graph.input.extend(model.graph.input)
    listed = {v.name for v in graph.input}
    for name, t in stored.items():
        if not external_fields(t) and math.prod(t.dims) <= INLINE_BYTES and t.ByteSize() <= INLINE_BYTES:
            graph.initializer.append(t)
            graph.initializer[-1].name = name
        elif name not in listed:
            graph.input.append(helper.make_tensor_value_info(name, t.data_type, list(t.dims)))
    return skeleton


def _as_inferred(node: NodeProto) -> NodeProto:
    """A node as inference knows it: one that keeps the size and the type as an Identity."""
    if (node.domain.removesuffix("ai.onnx"), node.op_type) not in SAME_SIZE or not node.input or not node.output:
        return node
    return helper.make_node("Identity", node.input[:1], node.output[:1], name=node.name)


class _Values:
    """Small values of a round: constants and, as far as it is known by now, the arithmetic that computes sizes.

    known: those that earlier rounds found too. Sizes are coded by `names`.
    """

    def __init__(
        self, skeleton: ModelProto, graph: onnx.GraphProto, known: dict[str, np.ndarray], names: Names
    ) -> None:
        self.opset = opset_of(skeleton)
        self._nodes = skeleton.graph.node
        self._dims = {v.name: names.dims(v) for v in (*graph.input, *graph.value_info, *graph.output)}
        overridable = {v.name for v in skeleton.graph.input}
        self._small = {
            t.name: t
            for t in skeleton.graph.initializer
            if t.name not in overridable and np.prod(t.dims) <= MAX_ELEMENTS
        }
        self._constants = {n.output[0]: n for n in self._nodes if n.op_type == "Constant" and len(n.output) == 1}
        self._known = known
        self._partial: dict[str, np.ndarray] = {}  # sizes of which some are not known

    def of(self, name: str) -> np.ndarray | None:
        """The value of a tensor, with negative codes for sizes that have no number; None where it is not known."""
        if name not in self._known and name in self._small:
            self._known[name] = numpy_helper.to_array(self._small[name])
        elif name not in self._known and name in self._constants:
            node = self._constants[name]
            literal = run_node(node, self.opset, []) if node.ByteSize() <= INLINE_BYTES else None
            if literal and literal[0].size <= MAX_ELEMENTS:
                self._known[name] = literal[0]
        return self._known.get(name, self._partial.get(name))

    def fold(self) -> bool:
        """Turn arithmetic whose result is known by now into Constants of the skeleton; whether there was any."""
        if not any(n.op_type == "Shape" for n in self._nodes):
            return False
        found = False
        for node in self._nodes:
            if node.domain not in ("", "ai.onnx") or len(node.output) != 1 or node.output[0] in self._known:
                continue
            if node.op_type == "Shape" and node.input:
                dims = self._dims.get(node.input[0])
                if dims is not None:
                    part = slice(attribute(node, "start", 0), attribute(node, "end"))
                    self._partial[node.output[0]] = np.array(dims[part], dtype=np.int64)
            elif node.op_type in ARITHMETIC and (value := self._result(node)) is not None:
                result = node.output[0]
                self._known[result] = value
                constant = numpy_helper.from_array(value)
                node.CopyFrom(helper.make_node("Constant", [], [result], value=constant))
                found = True
        return found

    def _result(self, node: NodeProto) -> np.ndarray | None:
        operands = [o for o in map(self.of, node.input) if o is not None]
        if len(operands) < len(node.input) or not operands:
            return None
        coded = [i for i, n in enumerate(node.input) if n not in self._known and (self._partial[n] < 0).any()]
        # Codes may be moved, but neither computed with nor taken for positions.
        if coded and (node.op_type not in MOVES or (node.op_type != "Concat" and coded != [0])):
            return None
        results = run_node(node, self.opset, operands)
        value = results[0] if results and results[0].size <= MAX_ELEMENTS else None
        if value is None or not coded:
            return value
        if node.op_type == "Cast" and not np.array_equal(value, self._partial[node.input[0]]):
            return None
        if not (value < 0).any():
            return value
        self._partial[node.output[0]] = value
        return None


def _dims(info: onnx.ValueInfoProto) -> list[int] | None:
    kind = info.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
