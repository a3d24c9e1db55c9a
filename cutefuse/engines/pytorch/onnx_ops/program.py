"""From an ONNX model to a list of steps, each one PyTorch call over tensors of known shape.

What follows from shapes and constants is computed here, on the CPU, with the same functions that run later; so no step
reads a shape out of a tensor and none makes the host wait for the GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from onnx import NodeProto
from torch import Tensor

from cutefuse import kernels
from cutefuse.engines.pytorch.onnx_ops.fused import DOMAIN, GIVEN, GUESS, FusedNode, body_of, whole_pixels
from cutefuse.engines.pytorch.onnx_ops.node import TABLE, Node, Run, UnsupportedError, dtype_of
from cutefuse.engines.pytorch.onnx_ops.shapes import tensor_of
from cutefuse.errors import CutefuseError, first_line
from cutefuse.operators.layouts import HWC8, LAYOUT, NHWC, TO_NCHW, TO_NHWC
from cutefuse.torch.pixels import is_narrow

_STANDARD = ("", "ai.onnx")
for _family in ("arithmetic", "convolution", "indexing", "matrix", "normalization", "pooling", "quantization",
                "reduction", "resize", "shapes"):  # fmt: skip
    importlib.import_module(f"cutefuse.engines.pytorch.onnx_ops.{_family}")  # each fills its part of the table


@dataclass
class Value:
    """A tensor of the graph: known (on the CPU) or of known shape (on `meta`); `slot` names it in the program."""

    tensor: Tensor
    slot: str | None = None

    @property
    def known(self) -> bool:
        return self.tensor.device.type != "meta"


@dataclass
class Step:
    """One call. `inputs`: slots of variables and constants, None for an absent input."""

    run: Run
    inputs: list[str | None]
    outputs: list[str]
    name: str
    op_type: str
    attrs: dict[str, Any]
    nodes: list[str]  # the nodes of the given model that it computes


@dataclass
class Program:
    """`shapes`: each variable as a tensor on `meta`. `tensors`: what the ONNX model calls a slot."""

    inputs: dict[str, str]
    outputs: dict[str, str]
    steps: list[Step]
    constants: dict[str, Tensor]
    shapes: dict[str, Tensor]
    tensors: dict[str, str]
    notes: list[str] = field(default_factory=list)

    @property
    def kernels(self) -> list[FusedNode]:
        """All steps that run by our kernels, in order."""
        return [step.run for step in self.steps if isinstance(step.run, FusedNode)]

    @property
    def fused(self) -> list[FusedNode]:
        """Those that are nodes of the model."""
        return [node for node in self.kernels if node.named]

    def choose_tiles(self, tiles: Mapping[str, int], known: Collection[str]) -> None:
        """Give fused nodes their tiles by name. `known`: all fused nodes of the model, also those that run their
        bodies. Raises CutefuseError for a name of none of them."""
        if unknown := sorted(set(tiles) - set(known)):
            raise CutefuseError(f"tiles are given for {', '.join(unknown)}, which are no fused nodes here")
        for node in self.fused:
            tile = tiles.get(node.name, 0)
            if tile and tile not in node.tiles():
                self.notes.append(f"{node.name} runs the kernels' first guess: tile {tile} cannot run it here")
                continue
            node.config = tile
            node.tile_from = GIVEN if tile else GUESS

    def drop_unused(self) -> None:
        """Drop steps whose results nothing reads: the graph may hold dead nodes, and folding and merging leave some."""
        needed = set(self.outputs.values())
        kept: list[Step] = []
        for step in reversed(self.steps):
            if needed & set(step.outputs):
                needed |= {s for s in step.inputs if s}
                kept.append(step)
        self.steps = kept[::-1]
        self.constants = {s: t for s, t in self.constants.items() if s in needed}
        made = {s for step in kept for s in step.outputs} | set(self.inputs.values())
        self.shapes = {s: t for s, t in self.shapes.items() if s in made}

    def source(self) -> str:
        """The program as Python: a function of the inputs that forgets each tensor after its last use."""
        last: dict[str, int] = {}
        for i, step in enumerate(self.steps):
            last |= {s: i for s in (*step.inputs, *step.outputs) if s in self.shapes}
        kept = set(self.outputs.values())
        lines = [f"def forward({', '.join(self.inputs.values())}):"]
        for i, step in enumerate(self.steps):
            given = ", ".join(str(s) for s in step.inputs)
            made = ", ".join(step.outputs) + ("," if len(step.outputs) > 1 else "")
            lines.append(f"    {made} = f{i}({given})")
            gone = sorted(s for s, end in last.items() if end == i and s not in kept)
            lines += [f"    del {', '.join(gone)}"] if gone else []
        lines.append(f"    return ({''.join(f'{s}, ' for s in self.outputs.values())})")
        return "\n".join(lines) + "\n"

    def function(self, constants: Mapping[str, Tensor]) -> Run:
        """The program over constants on one device: a function of the inputs, in order, that returns all outputs."""
        space: dict[str, Any] = {**constants, **{f"f{i}": step.run for i, step in enumerate(self.steps)}}
        exec(compile(self.source(), "<onnx program>", "exec"), space)
        run: Run = space.pop("forward")  # its globals must not hold it, or its constants would outlive it
        return run


def load(model: onnx.ModelProto, dims: Mapping[str, Sequence[int]], *, fused: bool) -> Program:
    """The program of a model for inputs of the given shapes.

    Args:
        dims: input name -> shape, for every input. fused: whether nodes of our domain become kernel calls; else their
        function bodies run.
    Raises: UnsupportedError for a node that cannot run; CutefuseError for an incomplete model.
    """
    with torch.no_grad():
        return _Loader(model, fused).load(dims)


class _Loader:
    def __init__(self, model: onnx.ModelProto, fused: bool) -> None:
        self.model, self.fused = model, fused
        self.functions = {(f.domain, f.name): f for f in model.functions}
        self.program = Program({}, {}, [], {}, {}, {})
        self.count = 0
        self.wide: dict[str, Value] = {}  # slot of an image -> its copy whose pixels are whole vectors

    def load(self, dims: Mapping[str, Sequence[int]]) -> Program:
        graph = self.model.graph
        opsets = {o.domain: o.version for o in self.model.opset_import}
        self._check(graph.node, opsets.get("", 1))
        if graph.sparse_initializer:
            raise UnsupportedError("the model has sparse initializers; make them dense")
        scope = {i.name: Value(tensor_of(i, f"initializer '{i.name}'")) for i in graph.initializer}
        for value in graph.input:
            if value.name not in scope:
                scope[value.name] = self._input(value, dims)
        self._walk(graph.node, scope, opsets, None)
        for out in graph.output:
            if out.name not in scope:
                raise CutefuseError(f"no node makes the output {out.name}; repair the model")
            self.program.outputs[out.name] = self._slot(scope[out.name], out.name)
        self.program.drop_unused()
        return self.program

    def _check(self, nodes: Sequence[NodeProto], opset: int) -> None:
        """Name all operators that are missing at once, before anything is computed."""
        if missing := self._missing(nodes, set(), opset):
            names = ", ".join(sorted(missing))
            raise UnsupportedError(
                f"the PyTorch back end does not know {names}; use TensorRT or ONNX Runtime, or cut the model there"
            )

    def _missing(self, nodes: Sequence[NodeProto], seen: set[str], opset: int) -> set[str]:
        missing: set[str] = set()
        for node in nodes:
            function = self._function(node, opset)
            for a in node.attribute:
                if a.HasField("g"):
                    missing |= self._missing(a.g.node, seen, opset)
            if function is not None:
                if node.op_type not in seen:
                    seen.add(node.op_type)
                    missing |= self._missing(function.node, seen, opset)
            elif node.domain in _STANDARD and (node.op_type in TABLE or node.op_type == "If"):
                continue
            elif node.domain != DOMAIN:
                missing.add(node.op_type + (f" of domain {node.domain}" if node.domain not in _STANDARD else ""))
        return missing

    def _input(self, value: onnx.ValueInfoProto, dims: Mapping[str, Sequence[int]]) -> Value:
        dtype = dtype_of(value.type.tensor_type.elem_type, f"input {value.name}")
        x = image_like(list(dims[value.name]), dtype, "meta")
        slot = self.program.inputs[value.name] = self._name("i")
        self.program.shapes[slot], self.program.tensors[slot] = x, value.name
        return Value(x, slot)

    def _name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def _slot(self, value: Value, name: str) -> str:
        """The name of a value in the program; a known one becomes a constant at its first use."""
        if value.slot is None:
            value.slot = self._name("c")
            self.program.constants[value.slot], self.program.tensors[value.slot] = value.tensor, name
        return value.slot

    # ------------------------------------------------------------------------------------------------------ nodes
    def _walk(
        self, nodes: Sequence[NodeProto], scope: dict[str, Value], opsets: Mapping[str, int], owner: str | None
    ) -> None:
        """Run over nodes in their order. `owner`: the node of the given model whose function body they are."""
        for proto in nodes:
            unknown = [i for i in proto.input if i and i not in scope]
            if unknown:
                raise CutefuseError(f"{proto.op_type} reads '{unknown[0]}', which nothing makes; repair the model")
            label = proto.name or next((o for o in proto.output if o), proto.op_type)
            name = f"{owner}/{label}" if owner else label
            made = self._node(proto, name, owner or label, scope, opsets)
            for out, value in zip(proto.output, made, strict=False):
                if out:
                    scope[out] = value
                    if value.slot is not None and owner is None:
                        self.program.tensors[value.slot] = out

    def _node(
        self, proto: NodeProto, name: str, owner: str, scope: dict[str, Value], opsets: Mapping[str, int]
    ) -> list[Value]:
        given = [scope[i] if i else None for i in proto.input]
        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute if not a.ref_attr_name}
        if proto.domain == DOMAIN and self.fused:
            found = self._fused(proto, name, given, attrs, opsets)
            if found is not None:
                return found
        function = self._function(proto, opsets.get("", 1))
        if function is None and proto.domain == DOMAIN:
            function = body_of(proto, opsets.get("", 1), [None if v is None else v.tensor for v in given])
        if function is not None:
            return self._body(function, proto, given, owner)
        if proto.op_type == "If":
            return self._branch(name, owner, given, attrs, scope, opsets)
        node = Node(
            name, proto.op_type, opsets.get("", opsets.get("ai.onnx", 1)), attrs,
            [None if v is None else v.tensor for v in given], len([o for o in proto.output if o]),
        )  # fmt: skip
        return self._operator(node, given, owner)

    def _operator(self, node: Node, given: list[Value | None], owner: str) -> list[Value]:
        entry = TABLE[node.op_type]
        try:
            run = entry.build(node)
            if isinstance(run, Tensor):
                return [Value(run)]
            passed = [v for i, v in enumerate(given) if i not in entry.host]
            while passed and passed[-1] is None and not node.extra:
                passed.pop()
            inputs: list[Value | None] = [*passed, *(Value(t) for t in node.extra)]
            if all(v is None or v.known for v in inputs):
                made = run(*(None if v is None else v.tensor for v in inputs))
                return [Value(t) for t in (made if isinstance(made, (tuple, list)) else [made])]
            made = run(*(None if v is None else v.tensor.to("meta") for v in inputs))
        except CutefuseError:
            raise
        except Exception as error:  # a model that breaks its operator's rules fails inside of PyTorch
            shapes_text = ", ".join("-" if t is None else str(list(t.shape)) for t in node.inputs)
            why = first_line(error, 200)
            raise node.refuse(f"it cannot be computed from inputs {shapes_text} ({why}); repair the model") from None
        for i, value in enumerate(inputs):
            if i in entry.filters and value is not None and value.known and value.tensor.dim() == 4:
                value.tensor = value.tensor.contiguous(memory_format=torch.channels_last)
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        if entry.filters:  # convolutions keep channels-last memory, but on `meta` PyTorch forgets it
            results = [image_like(list(t.shape), t.dtype, "meta") for t in results]
        return self._step(run, inputs, results, node.name, node.op_type, node.attrs, [owner])

    def _step(
        self, run: Run, inputs: Sequence[Value | None], results: Sequence[Tensor], name: str, op_type: str,
        attrs: dict[str, Any], nodes: list[str],
    ) -> list[Value]:  # fmt: skip
        values = [Value(t, self._name("t")) for t in results]
        slots = [v.slot for v in values if v.slot is not None]
        self.program.shapes |= dict(zip(slots, results, strict=True))
        self.program.tensors |= {s: f"{name}:{i}" for i, s in enumerate(slots)}
        given = [None if v is None else self._slot(v, f"{name}.{i}") for i, v in enumerate(inputs)]
        self.program.steps.append(Step(run, given, slots, name, op_type, attrs, nodes))
        return values

    # ---------------------------------------------------------------------------------- fused nodes, bodies, branches
    def _fused(
        self, proto: NodeProto, name: str, given: list[Value | None], attrs: dict[str, Any], opsets: Mapping[str, int]
    ) -> list[Value] | None:
        """The kernel call of a node of our domain; None, with a note, where the library refuses it."""
        inputs = [v for v in given if v is not None]
        outputs = self._shapes_of(proto, given, opsets)
        nhwc = attrs.get(LAYOUT, HWC8) == NHWC
        if nhwc:  # dense NHWC is channels-last memory, so that the node and its readers see one tensor in two ways
            image = kernels.facts(proto.op_type)["image"]
            inputs = [v if image and i == 0 else self._turned(v, TO_NCHW, name) for i, v in enumerate(inputs)]
            outputs = [t.permute(TO_NCHW) for t in outputs]
            attrs = attrs | {LAYOUT: HWC8}
        node = FusedNode(name, proto.op_type, attrs, [v.tensor for v in inputs], outputs)
        reason = node.reject()
        if reason is not None:
            self.program.notes.append(f"{name} runs its function body: {reason}")
            return None
        if node.images:
            inputs = [self._widened(v) if i >= node.first_image else v for i, v in enumerate(inputs)]
            node.inputs = [v.tensor for v in inputs]
        made = self._step(node, inputs, node.results(), name, proto.op_type, attrs, [name])
        return [self._turned(v, TO_NHWC, name) for v in made] if nhwc else made

    def _turned(self, value: Value, perm: tuple[int, ...], name: str) -> Value:
        """An image with its axes in another order, as a view; other tensors as they are."""
        if value.tensor.dim() != len(perm):
            return value
        attrs = {"perm": list(perm)}
        (turned,) = self._operator(Node(name, "Transpose", 1, attrs, [value.tensor], 1), [value], name)
        return turned

    def _widened(self, value: Value) -> Value:
        """An image as the kernels can read it where it lies: one copy for all nodes that read it."""
        if value.slot is None or value.known or not is_narrow(value.tensor):
            return value
        if value.slot not in self.wide:
            name, result = f"{self.program.tensors[value.slot]} widened", whole_pixels(value.tensor)
            (self.wide[value.slot],) = self._step(whole_pixels, [value], [result], name, "Identity", {}, [])
        return self.wide[value.slot]

    def _shapes_of(self, proto: NodeProto, given: list[Value | None], opsets: Mapping[str, int]) -> list[Tensor]:
        """The outputs of a fused node, on `meta`: its function body says their shapes and types."""
        loader = _Loader(self.model, False)
        tensors = [None if v is None else v.tensor for v in given]
        function = self.functions.get((proto.domain, proto.op_type)) or body_of(proto, opsets.get("", 1), tensors)
        fresh = [None if v is None else Value(v.tensor, None if v.known else loader._name("t")) for v in given]
        return [v.tensor for v in loader._body(function, proto, fresh, proto.name)]

    def _function(self, node: NodeProto, opset: int) -> onnx.FunctionProto | None:
        """The function of a node: the model's, or ONNX's own for an operator that the table lacks."""
        found = self.functions.get((node.domain, node.op_type))
        if found is None and node.domain in _STANDARD and node.op_type not in TABLE:
            return _standard_body(node.op_type, opset)
        return found

    def _body(
        self, function: onnx.FunctionProto, call: NodeProto, given: list[Value | None], owner: str
    ) -> list[Value]:
        bound = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
        scope = {name: v for name, v in zip(function.input, given, strict=False) if v is not None}
        nodes = [_resolved(node, bound, set(function.input) - set(scope)) for node in function.node]
        self._walk(nodes, scope, {o.domain: o.version for o in function.opset_import}, owner)
        return [scope[o] for o in function.output]

    def _branch(
        self, name: str, owner: str, given: list[Value | None], attrs: dict[str, Any], scope: dict[str, Value],
        opsets: Mapping[str, int],
    ) -> list[Value]:  # fmt: skip
        condition = given[0]
        if condition is None or not condition.known:
            raise UnsupportedError(
                f"If '{name}': its condition depends on the data, so no CUDA graph can hold it; cut the model there"
            )
        graph = attrs["then_branch"] if bool(condition.tensor.item()) else attrs["else_branch"]
        inner = {**scope, **{i.name: Value(tensor_of(i, f"initializer '{i.name}'")) for i in graph.initializer}}
        self._walk(graph.node, inner, opsets, owner)
        return [inner[o.name] for o in graph.output]


def _standard_body(op_type: str, opset: int) -> onnx.FunctionProto | None:
    """What ONNX defines an operator by, with the defaults of its attributes; None where that is no function."""
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return None
    body = onnx.FunctionProto()
    body.CopyFrom(schema.function_body)
    body.attribute_proto.extend(a.default_value for a in schema.attributes.values() if a.default_value.name)
    return body if body.node else None


def _resolved(node: NodeProto, bound: Mapping[str, onnx.AttributeProto], absent: set[str]) -> NodeProto:
    """A node of a body with the attributes of the call in place of references; absent formals become absent inputs."""
    made = NodeProto(op_type=node.op_type, domain=node.domain, name=node.name, output=node.output)
    made.input.extend("" if i in absent else i for i in node.input)
    for a in node.attribute:
        if not a.ref_attr_name:
            made.attribute.append(a)
        elif a.ref_attr_name in bound:
            value = onnx.AttributeProto()
            value.CopyFrom(bound[a.ref_attr_name])
            value.name = a.name
            made.attribute.append(value)
    return made


def image_like(dims: list[int], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """An empty tensor as the program takes it: images (rank 4) in channels-last memory."""
    layout = torch.channels_last if len(dims) == 4 else torch.contiguous_format
    return torch.empty(dims, dtype=dtype, device=device, memory_format=layout)
