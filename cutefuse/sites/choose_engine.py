"""What an engine does by itself: which inputs of a Concat it writes in place, what it computes inside a convolution.

The facts about TensorRT are of its public build logs: "Eliminating concatenation", "Retargeting x to y", "Generating
copy for x to y because input is not movable" (a range of another tensor, the output of merged convolutions, a tensor
that lies in another Concat already), "because of stomping hazard", and "does not support striding" for plugins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnx import NodeProto

from cutefuse.graph.clean import has_no_effect
from cutefuse.graph.read import Graph, attribute
from cutefuse.ops.layouts import RTX, TENSORRT, TORCH
from cutefuse.sites.engines import Engine
from cutefuse.sites.match import Match, tensors_of
from cutefuse.sites.tally import Tally

RANGES = ("Split", "Slice")
ENLARGED = ("Resize", "Upsample")
ELEMENTWISE = (
    "Add", "Sum", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Swish",
    "Tanh", "Pow", "Sqrt", "Exp", "Max", "Min", "BatchNormalization", "PRelu", "Elu", "Gelu", "Cast",
)  # fmt: skip
VECTOR = 8  # channels to which our pixels are padded
CONVOLUTIONS = ("Conv", "ConvTranspose")
POOLS = ("MaxPool", "AveragePool")
MEANS = ("GlobalAveragePool", "GlobalMaxPool", "ReduceMean")
_PRODUCT_FILTERS = 256  # from here on Myelin was seen to compute 1x1 convolutions as matrix products
_INSIDE_DECONVOLUTION = {"Relu", "Sigmoid", "Add"}  # what Myelin was seen to compute in a ConvTranspose's kernel
_SEEN_THROUGH = ("Identity", "Dropout")


@dataclass(frozen=True)
class Input:
    """One input of a Concat; `copied` says why the engine copies it, "" where its producer writes it in place."""

    tensor: str
    copied: str = ""


@dataclass(frozen=True)
class Wiring:
    """A graph in which some matches are fused.

    made: tensors that fused nodes make. read: tensors that fused nodes read, and how often. low_made, low_read: those
    among them in another type than the graph's. awaited: the tensors that fused convolutions read and that are made
    last, and how many wait for each. gone: ids of the nodes that nothing needs any more. position: id of a node -> its
    place in the graph. convolutions: in that order.
    """

    graph: Graph
    engine: Engine
    position: Mapping[int, int]
    made: Tally = field(default_factory=Tally)
    read: Tally = field(default_factory=Tally)
    low_made: Tally = field(default_factory=Tally)
    low_read: Tally = field(default_factory=Tally)
    awaited: Tally = field(default_factory=Tally)
    gone: Tally = field(default_factory=Tally)
    convolutions: Sequence[NodeProto] = ()
    _sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    _pointwise: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)  # by the id of a node

    def fused(self, *matches: Match) -> Wiring:
        """The same graph with more matches fused, one after the other."""
        result = self._copy()
        for match in matches:
            result = result._beside(match)
            result.awaited.add(result._last_operand(match))
            result.made.put([o for o in match.outputs if o], 1)
            result.read.add(_operands(match))
            result.low_made.put(result._low_outputs(match), 1)
            result.low_read.add(result._low_operands(match))
            waiting = sorted(match.nodes, key=lambda n: -self.position[id(n)])
            while found := [n for n in waiting if id(n) not in result.gone and not result._needed(n)]:
                result.gone.put(map(id, found), 1)  # one pass takes all where the nodes are in order
        return result

    def unfused(self, *matches: Match) -> Wiring:
        """The same graph without some matches: all their nodes come back, since their outputs need them."""
        result = self._copy()
        for match in matches:
            result = result._beside(match)
            result.awaited.add(result._last_operand(match), -1)
            result.made.put(match.outputs, 0)
            result.read.add(_operands(match), -1)
            result.low_made.put(match.outputs, 0)
            result.low_read.add(result._low_operands(match), -1)
            result.gone.put(map(id, match.nodes), 0)
        return result

    def _copy(self) -> Wiring:
        # Not dataclasses.replace, which takes several times as long: a wiring is copied for every price.
        return Wiring(
            self.graph, self.engine, self.position, self.made.copy(), self.read.copy(), self.low_made.copy(),
            self.low_read.copy(), self.awaited.copy(), self.gone.copy(), self.convolutions, self._sources,
            self._pointwise,
        )  # fmt: skip

    def _beside(self, match: Match) -> Wiring:
        """This wiring, with what it knows of sources only where a match changes none of them."""
        makers = [self.graph.producer(o) for o in match.outputs if o]
        changed = any(n is not None and n.op_type in _SEEN_THROUGH for n in makers)
        return replace(self, _sources={}) if changed else self

    def _low_operands(self, match: Match) -> list[str]:
        pairs = zip(match.inputs, match.call.inputs, strict=True)
        return [i for i, t in pairs if isinstance(i, str) and self.graph.dtype(i) not in (None, t.dtype)]

    def _low_outputs(self, match: Match) -> list[str]:
        pairs = zip(match.outputs, match.call.outputs, strict=True)
        return [o for o, t in pairs if o and self.graph.dtype(o) not in (None, t.dtype)]

    def _last_operand(self, match: Match) -> list[str]:
        """The tensor that a fused convolution reads and that is made last; none of a norm."""
        if match.nodes[0].op_type != "Conv":
            return []
        read = [t for t in _operands(match) if t and not self.graph.is_constant(t)]
        places = {t: self.position.get(id(self.graph.producer(self.source(t))), -1) for t in read}
        return [max(read, key=lambda t: places[t])] if read else []

    def starts_late(self, tensor: str) -> bool:
        """Whether a fused convolution waits for a kernel that is not ours."""
        return self.awaited[tensor] > 0 and self.source(tensor) not in self.made

    def is_cast(self, tensor: str) -> bool:
        """Whether a Cast stands at a tensor: its maker or a reader alone computes in another type than the graph's."""
        readers = [n for n in self.graph.users(tensor) if self.alive(n)]
        if tensor in self.low_made:
            return bool(readers) or self.graph.escapes(tensor) or self.read[tensor] > self.low_read[tensor]
        return self.low_read[tensor] > 0

    def _needed(self, node: NodeProto) -> bool:
        """Whether something that stays reads an output which no fused node makes."""
        graph = self.graph
        return any(
            o and o not in self.made and (graph.escapes(o) or self.read[o] or any(map(self.alive, graph.users(o))))
            for o in node.output
        )

    def alive(self, node: NodeProto | None) -> bool:
        return node is not None and id(node) not in self.gone

    def inputs_of(self, concat: NodeProto) -> list[Input]:
        """What happens to each input of a Concat that stays. Triton joins all in one kernel, with the elementwise nodes
        before it."""
        if self.engine.name == TORCH:
            return [Input(t, "Triton joins the inputs in a kernel") for t in concat.input]
        seen: set[str] = set()
        result = []
        for tensor in concat.input:
            why = "it is there twice" if tensor in seen else self._why(tensor, concat)
            seen.add(tensor)
            result.append(Input(tensor, why))
        if self.engine.name == RTX:
            why = self._copied_whole(concat, result)
            return [Input(i.tensor, i.copied or why or self._pooled(i.tensor)) for i in result]
        return result

    def _copied_whole(self, concat: NodeProto, inputs: Sequence[Input]) -> str:
        """Why Myelin copies the inputs of a Concat that their makers could write in place; "" where it does not."""
        if first := next((i.copied for i in inputs if i.copied), ""):
            return f"Myelin copies all inputs where one is {first}"
        reader = self.graph.only_user(concat.output[0])
        return "a matrix product of Myelin reads the Concat" if reader and self._is_product(reader) else ""

    def _pooled(self, tensor: str) -> str:
        """Why Myelin copies what a pooling reads too, as the skips of U-Nets are; "" where none does."""
        pooled = any(u.op_type in POOLS and self.alive(u) for u in self.graph.users(self.source(tensor)))
        return "a tensor that a pooling reads too" if pooled else ""

    def _is_product(self, node: NodeProto) -> bool:
        """Whether a node is a convolution that Myelin was seen to compute as a matrix product, which takes and gives
        tensors of another form than its convolutions."""
        if node.op_type != "Conv" or not self.alive(node) or not self._is_pointwise(node):
            return False
        filters = (self.graph.dims(node.input[1]) or (0,))[0]
        return filters >= _PRODUCT_FILTERS

    def _why(self, tensor: str, concat: NodeProto) -> str:
        graph = self.graph
        own = self.source(tensor)
        if own in self.made:
            return "a fused node's output, which cannot be strided"
        node = graph.producer(own)
        if node is None:
            return "a network input" if own in graph.inputs else "a constant"
        if graph.escapes(tensor) or graph.escapes(own):
            return "a network output (stomping hazard)"
        if node.op_type in RANGES:
            return "a range of another tensor, which is not movable"
        if node.op_type in ENLARGED:
            return "an enlarged tensor, which TensorRT copies"
        if self._claimed(own, concat):
            return "it lies in another Concat already"
        if self._is_merged(own):
            return "the output of merged 1x1 convolutions, which is not movable"
        return "stomping hazard" if self._is_hazard(node) else ""

    def absorbed(self, tensor: str) -> bool:
        """Whether Triton computes the elementwise nodes that make a tensor, or its nearest enlargement, in the kernels
        of the Concats that alone read it, in each of them anew. Myelin does so with enlargements between pixels."""
        own = self.source(tensor)
        node = self.graph.producer(own)
        if self.engine.name == TENSORRT or own in self.made or node is None or self.graph.escapes(own):
            return False
        readers = self.graph.users(own)
        joined = bool(readers) and all(
            r.op_type == "Concat" and self.alive(r) and not self.in_planes(r) for r in readers
        )
        if self.engine.name == RTX:
            return joined and node.op_type in ENLARGED and is_between(node)
        nearest = node.op_type in ENLARGED and not is_between(node)
        return joined and (nearest or node.op_type == "Conv" or node.op_type in ELEMENTWISE)

    def in_planes(self, concat: NodeProto) -> bool:
        """Whether torch.compile writes the sources of a Concat where they belong, plane after plane: one of them is the
        result of elementwise nodes that a pooling reads too, so that it is stored anyway, and no convolution has fixed
        how it lies. The first Concat of such a tensor has it, others copy."""
        return self.engine.name == TORCH and any(self._is_stored(self.source(t), concat) for t in concat.input)

    def joins_for_pools(self, concat: NodeProto) -> bool:
        """Whether a pooling reads a Concat of what fused nodes made: Triton then joins it in the pooling's kernel."""
        pooled = any(u.op_type in POOLS for u in self.graph.users(concat.output[0]))
        return pooled and any(self.source(t) in self.made for t in concat.input)

    def in_pixels(self, node: NodeProto) -> bool:
        """Whether torch.compile fixes the results of a node as pixels: a convolution that stays comes after it.

        Its layout optimisation (`find_nodes_prefer_channels_last` of torch/_inductor/graph.py) begins at ATen's
        convolutions; fused nodes are none. What only they read lies as Triton likes.
        """
        last = next((c for c in reversed(self.convolutions) if self.alive(c)), None)
        return self.engine.name == TORCH and last is not None and self.position[id(node)] < self.position[id(last)]

    def reads_planes(self, enlarged: NodeProto) -> bool:
        """Whether what an enlargement reads lies in a Concat of planes."""
        return any(self.in_planes(c) for c in self.concats_of(self.source(enlarged.input[0])) if self.alive(c))

    def is_widened(self, tensor: str) -> bool:
        """Whether fused nodes read a copy of an image: PyTorch's pixels are as wide as they have channels, and
        what lies in NCHW in Myelin passes a Transpose, which a Concat that goes had done."""
        if self.engine.name == RTX:
            return self.read[tensor] > 0 and tensor not in self.made and self._in_nchw(tensor)
        if self.engine.name != TORCH or self.read[tensor] <= 0 or tensor in self.made:
            return False
        dims = self.graph.dims(tensor)
        return dims is not None and len(dims) == 4 and dims[1] % VECTOR != 0

    def _in_nchw(self, tensor: str) -> bool:
        """Whether Myelin copies a tensor for fused nodes: enlargements between pixels, deconvolutions that no part of
        their kernel ends, as a BatchNormalization, and convolutions that are matrix products, are made in NCHW. So are
        the inputs, which a convolution of its own would copy too, unless a Concat does or others read them as well."""
        node = self.graph.producer(self.source(tensor))
        after = set()
        while node is not None and node.op_type in ELEMENTWISE and self.alive(node):
            after.add(node.op_type)
            node = self.graph.producer(self.source(node.input[0]))
        if node is None:
            joined = any(not self.alive(c) for c in self.concats_of(tensor))
            return joined or any(map(self.alive, self.graph.users(tensor)))
        if node.op_type == "Conv":
            return self._is_product(node)
        apart = node.op_type == "ConvTranspose" and not after <= _INSIDE_DECONVOLUTION
        return apart or (node.op_type in ENLARGED and is_between(node))

    def copies_range(self, node: NodeProto) -> bool:
        """Whether a range of channels that stays is a kernel: Myelin copies it for every reader but a Concat."""
        readers = [u for o in node.output for u in self.graph.users(o) if self.alive(u) and u.op_type != "Concat"]
        fused = any(self.read[o] or self.graph.escapes(o) for o in node.output)
        return self.engine.name == RTX and node.op_type in RANGES and self.alive(node) and bool(readers or fused)

    def _is_stored(self, tensor: str, concat: NodeProto) -> bool:
        node = self.graph.producer(tensor)
        if tensor in self.made or node is None or node.op_type not in ELEMENTWISE or self.read[tensor]:
            return False
        users = [u for u in self.graph.users(tensor) if self.alive(u)]
        first = min(self.position[id(u)] for u in (*self.concats_of(tensor), concat) if self.alive(u))
        pooled = any(u.op_type in POOLS for u in users) and not any(u.op_type == "Conv" for u in users)
        return pooled and first == self.position[id(concat)]

    def source(self, tensor: str) -> str:
        """The tensor behind nodes without effect."""
        passed = []
        while (found := self._sources.get(tensor)) is None:
            node = self.graph.producer(tensor)
            passed.append(tensor)
            if node is None or tensor in self.made or not self._is_passed(node):
                found = tensor
                break
            tensor = node.input[0]
        self._sources.update(dict.fromkeys(passed, found))
        return found

    def _is_passed(self, node: NodeProto) -> bool:
        """Whether an engine takes a node's output for its input, as that of a Pad by nothing."""
        return bool(node.input) and (node.op_type in _SEEN_THROUGH or has_no_effect(self.graph, node))

    def _claimed(self, tensor: str, concat: NodeProto) -> bool:
        """Whether another Concat that stays takes the tensor; engines begin with the last one."""
        others = [n for n in self.concats_of(tensor) if n is not concat and self.alive(n)]
        return any(self.position[id(n)] > self.position[id(concat)] for n in others)

    def concats_of(self, tensor: str) -> list[NodeProto]:
        """The Concats that read a tensor, those behind nodes without effect included."""
        found: dict[int, NodeProto] = {}
        pending = [tensor]
        while pending:
            for node in self.graph.users(pending.pop()):
                if node.op_type == "Concat":
                    found[id(node)] = node
                elif self._is_passed(node):
                    pending += node.output[:1]
        return list(found.values())

    def convolution_behind(self, tensor: str) -> NodeProto | None:
        """The Conv whose kernel writes the tensor: bias, folded affine steps and the activation inside included."""
        node = self.graph.producer(self.source(tensor))
        for _ in range(4):
            if node is None or node.op_type == "Conv":
                break
            movable = [t for t in node.input if t and not self.graph.is_constant(t)]
            folded = node.op_type in ("BatchNormalization", "Mul", "Add") and len(movable) == 1
            inside = node.op_type in ("Relu", "Clip", "Tanh") and self.engine.inside(node.op_type)
            if not movable or not (folded or inside):
                return None
            node = self.graph.producer(self.source(movable[0]))
        return node if node is not None and node.op_type == "Conv" and self.alive(node) else None

    def siblings(self, conv: NodeProto) -> list[NodeProto]:
        """The convolutions that stay and that TensorRT computes in the kernel of a 1x1 convolution, itself included."""
        if not self.engine.merges_pointwise or not self._is_pointwise(conv):
            return [conv] if self.alive(conv) else []
        users = {id(n): n for n in self.graph.users(conv.input[0]) if n.op_type == "Conv"}
        return [n for n in users.values() if self.alive(n) and self._is_pointwise(n)]

    def _is_pointwise(self, conv: NodeProto) -> bool:
        if id(conv) not in self._pointwise:
            self._pointwise[id(conv)] = _is_pointwise(self.graph, conv)
        return self._pointwise[id(conv)]

    def _is_merged(self, tensor: str) -> bool:
        conv = self.convolution_behind(tensor)
        return conv is not None and len(self.siblings(conv)) > 1

    def _is_hazard(self, node: NodeProto) -> bool:
        """Whether TensorRT sees a stomping hazard: recorded for the boxes of detectors, sums and products with a
        constant that are no images; the condition itself is not public."""
        dims = self.graph.dims(node.output[0])
        constant = any(self.graph.is_constant(t) for t in node.input if t)
        return node.op_type in ("Mul", "Div", "Add", "Sub") and constant and (dims is None or len(dims) != 4)

    def own_kernel(self, node: NodeProto) -> bool:
        """Whether an elementwise node that stays is a kernel of its own: nothing but fused nodes, inputs and ranges
        stand before it, while it would be a part of the kernel of any other node."""
        if node.op_type not in ELEMENTWISE or not self.alive(node):
            return False
        return not any(self._hosts(t) for t in node.input if t and not self.graph.is_constant(t))

    def _hosts(self, tensor: str) -> bool:
        own = self.source(tensor)
        node = self.graph.producer(own)
        if own in self.made or node is None or not self.alive(node):
            return False
        return node.op_type == "Conv" or node.op_type in ELEMENTWISE


def is_between(node: NodeProto) -> bool:
    """Whether an enlargement computes its pixels from several others."""
    return attribute(node, "mode", "nearest") not in ("nearest", b"nearest")


def _is_pointwise(graph: Graph, conv: NodeProto) -> bool:
    dims = graph.dims(conv.input[1]) if len(conv.input) > 1 else None
    plain = all(s == 1 for s in attribute(conv, "strides", (1, 1))) and attribute(conv, "group", 1) == 1
    return dims is not None and tuple(dims[2:]) == (1, 1) and plain and not any(attribute(conv, "pads", (0,)))


def shortcut_fault(graph: Graph, tensor: str) -> bool:
    """Whether TensorRT 11.2 would compute convolution, SiLU in its tanh form, and a sum wrongly (NVIDIA/TensorRT 4854):
    the tensor is added to a part of a wider one, a range of channels or what lies in a Concat's buffer."""
    for add in graph.users(tensor):
        if add.op_type == "Add":
            for other in (t for t in add.input if t != tensor):
                maker = graph.producer(other)
                inside = any(n.op_type == "Concat" for n in graph.users(other))
                if inside or maker is not None and maker.op_type in RANGES:
                    return True
    return False


def wiring(graph: Graph, engine: Engine) -> Wiring:
    """The graph with nothing fused."""
    convolutions = [n for n in graph.nodes if n.op_type in CONVOLUTIONS]
    return Wiring(graph, engine, {id(n): i for i, n in enumerate(graph.nodes)}, convolutions=convolutions)


def _operands(match: Match) -> list[str]:
    return [t for operand in match.inputs for t in tensors_of(operand)]
