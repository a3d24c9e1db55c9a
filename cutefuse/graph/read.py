"""A thin read view over one ONNX graph: who produces a tensor, who uses it, what is constant, which type and shape.

The protobuf stays the only container, so everything that is not rewritten survives byte for byte.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from cutefuse.errors import CutefuseError

# As NumPy calls them, with the types of ml_dtypes, which onnx registers there.
TYPE_NAMES: dict[int, str] = {
    kind: helper.tensor_dtype_to_np_dtype(kind).name
    for kind in (
        TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.INT8,
        TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT8E4M3FN,
        TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ,
    )
}  # fmt: skip
ELEM_TYPES = {name: number for number, name in TYPE_NAMES.items()}

# Operators that exporters put between an initializer and its use, those of normalised filters included; all are pure
# functions of constant inputs. BatchNormalization counts by its first output.
FOLDABLE = frozenset(
    "Constant ConstantOfShape Identity Cast Unsqueeze Squeeze Reshape Transpose Mul Add Sub Div Sqrt Neg Pow "
    "BatchNormalization ReduceL2 ReduceMean ReduceSum".split()
)
# Types of attributes that may hold bodies; the oldest files name no type.
_BODIES = frozenset({onnx.AttributeProto.UNDEFINED, onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS})
RUN_TIME = "is computed at run time"
_RANDOM = ("Bernoulli", "Multinomial", "Dropout")  # beside those whose names begin so
_RETIRED = ("GroupNormalization",)  # that of opset 18 is deprecated, and what exporters write
MAX_FOLDED_ELEMENTS = 1 << 28  # a constant beyond 1 GiB of float32 is not worth evaluating


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard operators that a model imports."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """The value of a node's attribute (str for strings), or the default when it is absent."""
    for a in node.attribute:
        if a.name == name:
            value = onnx.helper.get_attribute_value(a)
            return value.decode() if isinstance(value, bytes) else value
    return default


def subgraphs(node: NodeProto) -> list[onnx.GraphProto]:
    """The bodies of a control-flow node (If, Loop, Scan)."""
    return [body for a in node.attribute if a.type in _BODIES for body in _bodies(a)]


def _bodies(attribute: onnx.AttributeProto) -> Iterable[onnx.GraphProto]:
    return (attribute.g,) if attribute.HasField("g") else attribute.graphs


def nodes_of(graph: onnx.GraphProto) -> Iterator[NodeProto]:
    """Every node of a graph, those of subgraphs included."""
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from nodes_of(body)


def remove(items: Any, doomed: Callable[[Any], bool]) -> None:
    """Take items out of a list of a model in place: a new list would copy every weight."""
    for i in reversed(range(len(items))):
        if doomed(items[i]):
            del items[i]


def set_nodes(graph: onnx.GraphProto, nodes: Sequence[NodeProto]) -> None:
    """Give a graph these nodes in the place of its own, some of which may be among them."""
    del graph.node[:]
    graph.node.extend(nodes)


def replace_nodes(graph: onnx.GraphProto, nodes: Sequence[NodeProto]) -> None:
    """As `set_nodes`, and what the graph stores or says of tensors goes that only its own nodes have read or made."""
    read, made = {t for n in graph.node for t in reads_of(n)}, {o for n in graph.node for o in n.output}
    set_nodes(graph, nodes)
    read -= {t for n in graph.node for t in reads_of(n)} | {v.name for v in graph.output}
    made -= {o for n in graph.node for o in n.output}
    unread = read & {t.name for t in graph.initializer}
    remove(graph.initializer, lambda t: t.name in unread)
    remove(graph.input, lambda v: v.name in unread)
    remove(graph.value_info, lambda v: v.name in made)
    remove(graph.quantization_annotation, lambda q: q.tensor_name in made)


def label(node: NodeProto) -> str:
    """What to call a node in a message: its name, else the tensor it makes."""
    return node.name or next((o for o in node.output if o), node.op_type)


class Graph:
    """Read view of `model.graph`. `shapes` is the same graph after shape inference (weights may be missing there).
    `stored` are its initializers where the proto holds none, so that a changed copy of a graph shares its weights.

    Raises CutefuseError when a tensor has two producers or the graph has a cycle.
    """

    def __init__(
        self, model: onnx.ModelProto, folder: Path, shapes: onnx.GraphProto | None = None,
        stored: Mapping[str, TensorProto] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.proto, self.folder = model, model.graph, folder
        self.nodes = list(self.proto.node)  # holding them keeps id(node) unique; everything below uses these objects
        self.opset = opset_of(model)
        self.initializers = dict(stored) if stored is not None else {t.name: t for t in self.proto.initializer}
        self._sparse = {t.values.name for t in self.proto.sparse_initializer}
        inputs = {v.name for v in self.proto.input}
        # Before IR 4 every initializer had to be listed as an input; since then listing one means "may be overridden".
        self.evaluated: Set[str] = frozenset()  # initializers that nodes of the model compute
        self.overridable = inputs & set(self.initializers) if model.ir_version >= 4 else set()
        self.inputs = inputs - set(self.initializers) | self.overridable
        self.outputs = {v.name for v in self.proto.output}
        self._producers: dict[str, NodeProto] = {}
        self._users: defaultdict[str, list[NodeProto]] = defaultdict(list)
        self._captured: set[str] = set()
        self.sized: Graph | None = None  # the graph on inputs of the sizes that figures are for
        self._constants: dict[str, np.ndarray | None] = {}
        self._are_constant: dict[str, bool] = {}
        self._faults: dict[int, str] = {}
        self._rules: Any = type(onnx.checker.DEFAULT_CONTEXT)()
        self._rules.ir_version, self._rules.opset_imports = model.ir_version, {"": self.opset}
        in_order = True
        for node in self.nodes:
            for name in filter(None, node.input):
                self._users[name].append(node)
            for a in node.attribute:
                if a.ref_attr_name:
                    raise CutefuseError(
                        f"node '{label(node)}' takes an attribute of a local function and stands in none; repair it"
                    )
                if a.type in _BODIES:
                    self._captured.update(*map(names_read, _bodies(a)))
            for name in filter(None, node.output):
                if name in self._producers or name in inputs or name in self.initializers:
                    raise CutefuseError(f"tensor '{name}' is defined twice; names must be unique, repair the model")
                self._producers[name] = node
                in_order = in_order and name not in self._users and name not in self._captured
        self._infos = {v.name: v for v in _infos(self.proto)}
        self._symbols: dict[str, tuple[int | str, ...] | None] = {}  # as `partial_symbols` answered
        self._dims: dict[str, tuple[int, ...] | None] = {}  # as `dims` answered
        self._dtypes: dict[str, str | None] = {}  # as `dtype` answered
        self._sizes: dict[str, NodeProto] = {}
        self._folded: dict[str, TensorProto] = {}
        if shapes is not None:
            self.learn(shapes)
        if not in_order:
            self._check_acyclic()

    def learn(self, shapes: onnx.GraphProto, values: Mapping[str, TensorProto] | None = None) -> None:
        """Take over what shape inference of this graph found, and the values of tensors that are constant."""
        self._folded.update(values or {})
        self._are_constant.clear()
        self._note({v.name: v for v in _infos(shapes)})
        # Shape inference leaves Constants where the graph computes sizes from known sizes.
        self._sizes.update((n.output[0], n) for n in shapes.node if n.op_type == "Constant")

    def forget_sizes(self) -> None:
        """Take no note of what the model says of the sizes of its tensors, but for its inputs."""
        self._infos = {}
        self._note({v.name: v for v in self.proto.input})

    def _note(self, infos: Mapping[str, onnx.ValueInfoProto]) -> None:
        self._infos.update(infos)
        for answers in (self._dims, self._dtypes, self._symbols):
            answers.clear()

    def _check_acyclic(self) -> None:
        makers = {id(n): [id(p) for t in reads_of(n) if (p := self.producer(t)) is not None] for n in self.nodes}
        try:
            TopologicalSorter(makers).prepare()
        except CycleError as error:
            stuck = next(n for n in self.nodes if id(n) in error.args[1])
            raise CutefuseError(f"the graph has a cycle through node '{label(stuck)}'; repair the model") from None

    def fault(self, node: NodeProto) -> str:
        """Why a node breaks its schema (arity, attribute names and types); "" when it does not, or has none here."""
        if id(node) not in self._faults:
            fault = "" if node.output and node.output[0] else "it has no output"
            if not fault and node.op_type not in _RETIRED and onnx.defs.has(node.op_type, self.opset, ""):
                plain = node
                if node.domain == "ai.onnx":  # the checker knows the default domain by its short name only
                    plain = NodeProto.FromString(node.SerializeToString())
                    plain.domain = ""
                try:
                    onnx.checker.check_node(plain, self._rules)
                except onnx.checker.ValidationError as error:
                    fault = " ".join(str(error).split("\n==>")[0].split())
            self._faults[id(node)] = fault
        return self._faults[id(node)]

    def is_op(self, node: NodeProto | None, *op_types: str) -> TypeGuard[NodeProto]:
        """Whether the node exists, is one of the named standard operators, and obeys its schema."""
        if node is None or node.op_type not in op_types or node.domain not in ("", "ai.onnx"):
            return False
        return not self.fault(node)

    def producer(self, tensor: str) -> NodeProto | None:
        """The node that computes the tensor; None for inputs, initializers and unknown names."""
        return self._producers.get(tensor)

    def users(self, tensor: str) -> list[NodeProto]:
        """The nodes that read the tensor, once per reading input; subgraphs that capture it are not listed."""
        return self._users.get(tensor, [])

    def escapes(self, tensor: str) -> bool:
        """Whether something other than `users` needs the tensor: it is a graph output, or a subgraph captures it."""
        return tensor in self.outputs or tensor in self._captured

    def only_user(self, tensor: str) -> NodeProto | None:
        """The node that reads the tensor when nothing else does (it may read it through several inputs)."""
        users = self.users(tensor)
        alone = bool(users) and all(n is users[0] for n in users)  # ends at the second of very many
        return users[0] if alone and not self.escapes(tensor) else None

    def reaching_outputs(self) -> set[int]:
        """The ids of the nodes whose results go into an output of the graph; of all nodes where it has no output."""
        if not self.outputs:
            return {id(n) for n in self.nodes}
        found = (self.producer(name) for name in self.behind(self.outputs))
        return {id(n) for n in found if n is not None}

    def behind(self, tensors: Iterable[str]) -> Iterator[str]:
        """The tensors themselves and all that they are computed from, each once."""
        pending, seen = list(tensors), set[str]()
        while pending:
            if (name := pending.pop()) in seen:
                continue
            seen.add(name)
            yield name
            node = self.producer(name)
            if node is not None:
                pending += filter(None, reads_of(node))

    def sizes(self, tensor: str) -> tuple[int, ...] | None:
        """The sizes of a tensor on inputs of the sizes that figures are for; as `dims` where none were given."""
        return (self.sized.dims(tensor) if self.sized else None) or self.dims(tensor)

    def dtype(self, tensor: str) -> str | None:
        """Element type as a NumPy name ('float16', 'bfloat16', ...); None when unknown."""
        if tensor in self.initializers:
            return TYPE_NAMES.get(self.initializers[tensor].data_type)
        if tensor not in self._dtypes:
            self._dtypes[tensor] = TYPE_NAMES.get(self._elem_type(tensor))
        return self._dtypes[tensor]

    def type_word(self, tensor: str) -> str:
        """What to call the element type in a message, also one that `dtype` does not know, as 'float4_e2m1fn'."""
        kind = self._elem_type(tensor)
        return helper.tensor_dtype_to_np_dtype(kind).name if kind else "an unknown type"

    def _elem_type(self, tensor: str) -> int:
        if tensor in self.initializers:
            return self.initializers[tensor].data_type
        info = self._infos.get(tensor)
        return info.type.tensor_type.elem_type if info is not None and info.type.HasField("tensor_type") else 0

    def dims(self, tensor: str) -> tuple[int, ...] | None:
        """Logical sizes, -1 for each that is not known; None when even the rank is unknown."""
        if tensor in self.initializers:
            return tuple(self.initializers[tensor].dims)
        if tensor not in self._dims:
            sizes = self.partial_symbols(tensor)
            self._dims[tensor] = None if sizes is None else tuple(s if isinstance(s, int) else -1 for s in sizes)
        return self._dims[tensor]

    def partial_symbols(self, tensor: str) -> tuple[int | str, ...] | None:
        """Sizes as in `dims`, or the names that the model gives them, "" for one that has neither."""
        if tensor in self.initializers:
            return tuple(self.initializers[tensor].dims)
        if tensor not in self._symbols:
            info, found = self._infos.get(tensor), None
            if info is not None and info.type.HasField("tensor_type") and info.type.tensor_type.HasField("shape"):
                dims = info.type.tensor_type.shape.dim
                found = tuple([d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims])
            self._symbols[tensor] = found
        return self._symbols[tensor]

    def symbols(self, tensor: str) -> tuple[int | str, ...] | None:
        """Sizes as in `dims`, or the names that the model gives them; None when one has neither."""
        sizes = self.partial_symbols(tensor)
        return None if sizes is None or "" in sizes else sizes

    def is_constant(self, tensor: str) -> bool:
        """Whether `constant` can evaluate the tensor; reads no weights."""
        pending = [tensor]
        while pending:
            name = pending[-1]
            if name not in self._are_constant:
                waits = self._waits(name)
                if waits:
                    pending.append(waits)
                    continue
                self._are_constant[name] = waits is not None
            pending.pop()
        return self._are_constant[tensor]

    def _waits(self, tensor: str) -> str | None:
        """An operand of which it must be known first whether it is constant; "" where the tensor is, None where not."""
        if tensor in self._folded or (tensor in self.initializers and tensor not in self.overridable):
            return ""
        node = self.producer(tensor)
        if node is None or not self.is_op(node, *FOLDABLE) or node.output[0] != tensor or "" in node.input:
            return None
        known = [self._are_constant.get(name) for name in node.input]
        return None if False in known else next((n for n, k in zip(node.input, known, strict=True) if k is None), "")

    def not_constant(self, tensor: str) -> str:
        """Why `constant` has no value of a tensor, as the predicate of a sentence."""
        for name in self.behind([tensor]):
            node = self.producer(name)
            stored = node is None and (name in self.initializers or name in self._sparse) and name not in self.inputs
            random = node is not None and (node.op_type.startswith("Random") or node.op_type in _RANDOM)
            standard = node is not None and node.domain in ("", "ai.onnx") and not subgraphs(node)
            if not stored and (random or not standard):
                return RUN_TIME
        maker = self.producer(tensor)
        if maker is None:
            return "is a sparse initializer; store it densely"
        return f"is made of constants by {maker.op_type} '{label(maker)}', which is not evaluated here; fold it first"

    def constant(self, tensor: str) -> np.ndarray | None:
        """The value of an initializer or of a chain of foldable nodes over initializers; None when it is not constant.

        External data is read on demand. Raises CutefuseError when it is missing or too short.
        """
        if tensor not in self._constants:
            value = self._evaluate(tensor) if self.is_constant(tensor) else None
            if value is not None and value.size > 1 << 16:
                return value  # large weights are used once; keeping them would hold a second copy of the model
            self._constants[tensor] = value
        return self._constants[tensor]

    def size_values(self, tensor: str) -> np.ndarray | None:
        """The value of a constant, or of arithmetic over sizes that are known; None for anything else."""
        known = self.known_sizes(tensor)
        return self.constant(tensor) if known is None else known

    def known_sizes(self, tensor: str) -> np.ndarray | None:
        """The value of arithmetic over sizes, where shape inference found it."""
        literal = run_node(self._sizes[tensor], self.opset, []) if tensor in self._sizes else None
        return literal[0] if literal else None

    def slice_bounds(self, node: NodeProto) -> tuple[list[int], list[int], list[int], list[int]] | None:
        """(axes, starts, ends, steps) of a Slice; None when one is not known."""
        given: dict[str, list[int]] = {}
        for i, name in enumerate(("starts", "ends", "axes", "steps"), start=1):
            values = self.numbers(node, i, name, 10)
            if values is None:
                return None
            given |= {name: values} if values else {}
        count = len(given.get("starts", ()))
        if not count or len(given.get("ends", ())) != count:
            return None
        axes, steps = given.get("axes", list(range(count))), given.get("steps", [1] * count)
        return (axes, given["starts"], given["ends"], steps) if len(axes) == len(steps) == count else None

    def numbers(self, node: NodeProto, index: int, name: str, since: int) -> list[int] | None:
        """The integers that a node takes as an attribute before opset `since` and as an input from then on: [] where it
        gives none, None where they are not known."""
        if self.opset < since:
            return [int(v) for v in attribute(node, name, ())]
        if len(node.input) <= index or not node.input[index]:
            return []
        value = self.size_values(node.input[index])
        return None if value is None else [int(v) for v in np.reshape(value, -1)]

    def _evaluate(self, tensor: str) -> np.ndarray | None:
        if tensor in self._folded:
            return np.asarray(numpy_helper.to_array(self._folded[tensor]))
        if tensor in self.initializers:
            return read_tensor(self.initializers[tensor], self.folder)
        node = self._producers[tensor]
        operands = [self.constant(name) for name in node.input]
        if any(o is None for o in operands) or not _affordable(node, [o for o in operands if o is not None]):
            return None
        results = run_node(node, self.opset, [o for o in operands if o is not None])
        return results[0] if results else None


def run_node(node: NodeProto, opset: int, operands: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """The outputs of one standard node on the CPU; None where ONNX's evaluator cannot compute it."""
    from onnx.reference import ReferenceEvaluator

    names = [name for name in node.input if name]
    infos = [onnx.helper.make_empty_tensor_value_info(name) for name in dict.fromkeys(names)]
    results = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output]
    one = onnx.helper.make_graph([node], "one", infos, results)
    try:
        given = dict(zip(names, operands, strict=True))
        values: Any = ReferenceEvaluator(one, opsets={"": opset}).run(None, given)
        return [np.asarray(v) for v in values]
    except Exception:  # ill-typed operands, or an operator that the evaluator lacks
        return None


def _affordable(node: NodeProto, operands: Sequence[np.ndarray]) -> bool:
    if node.op_type == "ConstantOfShape":
        sizes = [int(s) for s in operands[0].ravel()]
        return all(s >= 0 for s in sizes) and math.prod(sizes) <= MAX_FOLDED_ELEMENTS
    if node.op_type in ("Mul", "Add", "Sub", "Div", "Pow"):
        try:
            return math.prod(np.broadcast_shapes(*(o.shape for o in operands))) <= MAX_FOLDED_ELEMENTS
        except ValueError:
            return False
    return True


def _infos(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.value_info
    yield from graph.input
    yield from graph.output


def reads_of(node: NodeProto) -> list[str]:
    """The tensors that a node reads, through its inputs or from within its bodies."""
    bodies = subgraphs(node)
    return [*node.input, *(sorted(set().union(*map(names_read, bodies))) if bodies else ())]


def names_read(graph: onnx.GraphProto) -> set[str]:
    """The tensors that a body reads, its own included."""
    names = {v.name for v in graph.output}
    for node in graph.node:
        names.update(filter(None, node.input))
        for body in subgraphs(node):
            names |= names_read(body)
    return names


def external_fields(tensor: TensorProto) -> dict[str, str]:
    """The external_data entries of a tensor that is stored beside the model; empty for one stored inside."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return {}
    return {"location": "", **{entry.key: entry.value for entry in tensor.external_data}}


def read_tensor(tensor: TensorProto, folder: Path) -> np.ndarray:
    """The value of an initializer, external data included. Raises CutefuseError when its data is missing or broken."""
    try:
        return np.asarray(numpy_helper.to_array(tensor, str(folder)))
    except Exception as error:
        raise CutefuseError(f"the data of tensor '{tensor.name}' cannot be read ({error}); repair the model") from None


def op_counts(graph: onnx.GraphProto) -> Counter[str]:
    """How many nodes of each op_type the graph holds."""
    return Counter(node.op_type for node in graph.node)
