"""A graph in which some matches are fused, and what an engine makes of the rest: the part that all engines share.

`Engine` holds the rules that differ; rules_tensorrt.py and rules_torch.py say them for theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from onnx import NodeProto

from cutefuse.graph.clean import has_no_effect
from cutefuse.graph.numbers import ELEMENT_BYTES
from cutefuse.graph.read import Graph, attribute
from cutefuse.kernels import Tensor
from cutefuse.match.answer import Match, Operand
from cutefuse.match.conv.image import IMAGE
from cutefuse.select.tally import Tally
from cutefuse.select.times import NORM_US, Convolution, Device, convolution_us, device_of

RANGES = ("Split", "Slice")
ENLARGED = ("Resize", "Upsample")
ELEMENTWISE = (
    "Add", "Sum", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Swish",
    "Tanh", "Pow", "Sqrt", "Exp", "Log", "Neg", "Abs", "Reciprocal", "Max", "Min", "BatchNormalization", "PRelu", "Elu",
    "Selu", "Celu", "Gelu", "Erf", "Mish", "Softplus", "Softsign", "Cast",
)  # fmt: skip
CONVOLUTIONS = ("Conv", "ConvTranspose")
MOVES = "DepthToSpace"  # a pass that computes nothing
POOLS = ("MaxPool", "AveragePool")
IN_FILTERS = ("AveragePool", "SpaceToDepth")  # passes over memory, which a filter may compute
MEANS = ("GlobalAveragePool", "GlobalMaxPool", "ReduceMean")
_SEEN_THROUGH = ("Identity", "Dropout")
_MOST_STEPS = 8  # elementwise nodes in front of a product
# Neighbours that one tensor or one Concat ties, as DenseNet-264 has at most: what each of more has of its cost is
# small, and all pairs of them would take hours.
MOST_TIED = 64


@dataclass(frozen=True)
class Engine:
    """The engine whose time is predicted, and its rules; as it stands, one that copies all inputs of a Concat and
    computes nothing inside a convolution.

    merges_pointwise: 1x1 convolutions of the same tensor become one. reads_ranges: a convolution reads channels of a
    wider tensor where they lie. timed: its kernels were timed; those of another count as fast as ours in the same
    place, so that copies decide and a start behind any kernel costs both alike. fitted: the time model was fitted in
    it. quantised: times of its quantised convolutions are known. joins: what it does with the inputs of a Concat that
    it does not write in place.
    """

    name: str = ""
    version: tuple[int, int] = (0, 0)
    sm: int = 0
    assumed: bool = False  # nobody named the version
    family: ClassVar[str] = "an engine"
    merges_pointwise: ClassVar[bool] = False
    reads_ranges: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    fitted: ClassVar[bool] = False
    quantised: ClassVar[bool] = True
    joins: ClassVar[str] = "copies"

    @property
    def device_sm(self) -> int:
        """The compute capability (times 10) whose usual GPU stands for one that nobody named; 0: any."""
        return self.sm

    @property
    def title(self) -> str:
        return self.family

    def inside(self, activation: str) -> bool:
        """Whether the convolution's own kernel computes the activation; "": whether it adds the bias."""
        return False

    def computes(self, graph: Graph, match: Match, activation: str) -> bool:
        """Whether a match's convolution and activation would be one kernel."""
        return self.inside(activation)

    # ------------------------------------------------------------------------------------------------ how tensors lie
    def copies(self, wiring: Wiring, concat: NodeProto) -> list[str]:
        """Why the engine copies each input of a Concat that stays, "" where its producer writes it in place."""
        return ["all inputs are copied"] * len(concat.input)

    def copied(self, wiring: Wiring, concat: NodeProto) -> list[str]:
        """The inputs of a Concat that stays which the engine copies."""
        return [t for t, why in zip(concat.input, self.copies(wiring, concat), strict=True) if why]

    def absorbed(self, wiring: Wiring, tensor: str) -> bool:
        """Whether the node that makes a tensor is computed in the kernels that join it, in each of them anew."""
        return False

    def in_pixels(self, wiring: Wiring, node: NodeProto) -> bool:
        """Whether the engine fixes the results of a node as pixels where it need not."""
        return False

    # --------------------------------------------------------------------------------------------------------- times
    def node_us(self, wiring: Wiring, node: NodeProto) -> float:
        """What a node that stays costs beside the convolutions: a Concat's copies, an enlargement, a mean of
        neighbours, a DepthToSpace, an elementwise node that no other kernel takes in."""
        device, size_of = wiring.device, wiring.size_of
        if node.op_type == "Concat":
            return sum(device.pass_us(2 * size_of(t)) for t in self.copied(wiring, node))
        if node.op_type in ENLARGED:
            size = size_of(node.output[0])
            return 0.0 if self.absorbed(wiring, node.output[0]) else device.pass_us(size_of(node.input[0]) + size)
        if node.op_type in (*IN_FILTERS, MOVES):
            return device.pass_us(size_of(node.input[0]) + size_of(node.output[0]))
        if node.op_type in ELEMENTWISE:
            read = [size_of(t) for t in wiring.read_by(node)]
            if wiring.own_kernel(node):
                return device.pass_us(sum(read) + size_of(node.output[0]))
            return device.move_us(sum(read[1:]))
        return 0.0

    def convolution_us(self, device: Device, conv: Convolution) -> float:
        """Time of its own kernel for a convolution."""
        return device.pass_us(conv.bytes_moved) if conv.depthwise else convolution_us(conv, device)

    def join_us(self, device: Device, size_bytes: float, sources: int) -> float:
        """Time of a Concat of so many bytes by itself."""
        return device.pass_us(2 * size_bytes)

    def normalised_us(self, device: Device, size_bytes: float, behind: NodeProto | None) -> float:
        """What scale, shift and ReLU behind a node cost: a kernel of their own, or only what they write where the
        kernel of the node computes them."""
        hosted = behind is not None and (behind.op_type == "Conv" or behind.op_type in ELEMENTWISE)
        return device.move_us(size_bytes) if hosted else device.pass_us(2 * size_bytes)

    def norm_us(self, device: Device, size_bytes: float, output_bytes: float, kind: Mapping[str, object]) -> float:
        """Time of its own kernels for a row norm; `kind`: the facts of our operator, which moves `size_bytes`."""
        return device.pass_us(size_bytes)

    def our_norm_us(self, device: Device, size_bytes: float) -> float:
        """Time of ours with what it costs inside this engine."""
        return device.pass_us(size_bytes) + NORM_US

    def widened_us(self, wiring: Wiring, tensor: str) -> float:
        """Time in which a tensor is copied to the layout that fused nodes read."""
        return 0.0


@dataclass(frozen=True)
class Wiring:
    """A graph in which some matches are fused, in an engine on a device.

    made: tensors that fused nodes make. read: tensors that fused nodes read, and how often. given: those that they read
    as the network is given them, likewise. low_made, low_read: those among them in another type than the graph's.
    awaited: the tensors that fused convolutions read and that are made last, and how many wait for each. gone: ids
    of the nodes that nothing needs any more. position: id of a node -> its place in the graph. convolutions: in that
    order.
    """

    graph: Graph
    engine: Engine
    device: Device
    position: Mapping[int, int]
    made: Tally = field(default_factory=Tally)
    read: Tally = field(default_factory=Tally)
    given: Tally = field(default_factory=Tally)
    low_made: Tally = field(default_factory=Tally)
    low_read: Tally = field(default_factory=Tally)
    awaited: Tally = field(default_factory=Tally)
    gone: Tally = field(default_factory=Tally)
    convolutions: Sequence[NodeProto] = ()
    _sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    _concats: dict[str, list[NodeProto]] = field(default_factory=dict, compare=False, repr=False)

    def fused(self, *matches: Match) -> Wiring:
        """The same graph with more matches fused, one after the other."""
        result = self._with(matches, 1)
        waiting = {id(n): n for m in matches for n in m.nodes if id(n) not in result.gone}
        found = None
        while found != []:  # the first pass takes all where the nodes are in order
            found = []
            for key in sorted(waiting, key=self.position.__getitem__, reverse=True):
                if not result._needed(waiting[key]):
                    found.append(waiting.pop(key))
                    result.gone.put([key], 1)
        return result

    def unfused(self, *matches: Match) -> Wiring:
        """The same graph without some matches: all their nodes come back, since their outputs need them."""
        result = self._with(matches, -1)
        result.gone.put((id(n) for match in matches for n in match.nodes), 0)
        return result

    def _with(self, matches: Sequence[Match], by: int) -> Wiring:
        """The same graph where these matches read and make their tensors once more (1) or once less (-1)."""
        result = self._copy()
        for match in matches:
            result = result._beside(match)
            result.awaited.add(result._last_operand(match), by)
            result.made.put(filter(None, match.outputs), max(by, 0))
            result.read.add(match.read, by)
            result.given.add(match.read[:1] if IMAGE in match.takes else (), by)
            result.low_made.put(result._low(match.outputs, match.call.outputs), max(by, 0))
            result.low_read.add(result._low(match.inputs, match.call.inputs), by)
        return result

    def _copy(self) -> Wiring:
        # Not dataclasses.replace, which takes several times as long: a wiring is copied for every price.
        return Wiring(
            self.graph, self.engine, self.device, self.position, self.made.copy(), self.read.copy(),
            self.given.copy(), self.low_made.copy(), self.low_read.copy(), self.awaited.copy(), self.gone.copy(),
            self.convolutions, self._sources, self._concats,
        )  # fmt: skip

    def _beside(self, match: Match) -> Wiring:
        """This wiring, with what it knows of sources only where a match changes none of them."""
        makers = [self.graph.producer(o) for o in match.outputs if o]
        changed = any(n is not None and n.op_type in _SEEN_THROUGH for n in makers)
        return replace(self, _sources={}) if changed else self

    def _low(self, names: Sequence[Operand], tensors: Sequence[Tensor]) -> list[str]:
        """Those of a match's tensors that it has in another type than the graph."""
        pairs = zip(names, tensors, strict=True)
        return [n for n, t in pairs if isinstance(n, str) and self.graph.dtype(n) not in (None, t.dtype)]

    def _last_operand(self, match: Match) -> list[str]:
        """The tensor that a fused convolution reads and that is made last; none of a norm."""
        if match.nodes[0].op_type not in CONVOLUTIONS:
            return []
        read = [t for t in match.read if t and not self.graph.is_constant(t)]
        places = {t: self.position.get(id(self.graph.producer(self.source(t))), -1) for t in read}
        return [max(read, key=lambda t: places[t])] if read else []

    # ------------------------------------------------------------------------------------------------ what is known
    def dims(self, tensor: str) -> tuple[int, ...]:
        """The sizes of a tensor; () where one is not known."""
        return self._known(tensor) or ()

    def size_of(self, tensor: str) -> float:
        """Bytes of a tensor; NaN where a size is not known."""
        dims = self._known(tensor)
        if dims is None:
            return math.nan
        return math.prod(dims) * ELEMENT_BYTES.get(self.graph.dtype(tensor) or "", 2)

    def _known(self, tensor: str) -> tuple[int, ...] | None:
        """The sizes of a tensor. Those of a Cast and of a node without effect are its input's: converters to float16
        leave its own out, and shape inference passes over a Pad by what is computed."""
        dims, node = self.graph.sizes(tensor), self.graph.producer(tensor)
        if dims is not None and all(d >= 0 for d in dims):
            return tuple(dims)
        same = node is not None and (node.op_type == "Cast" or has_no_effect(self.graph, node))
        return self._known(node.input[0]) if node is not None and same else None

    def node_us(self, node: NodeProto) -> float:
        """What a node costs beside the convolutions."""
        if not self.alive(node) or not node.input or not node.output:  # a damaged node costs nothing
            return 0.0
        return self.engine.node_us(self, node)

    def late_us(self, tensor: str) -> float:
        """What it costs fused nodes that a kernel of a timed engine makes the tensor they wait for."""
        late = self.engine.timed and self.awaited[tensor] > 0 and self.source(tensor) not in self.made
        return self.device.late_us if late else 0.0

    def cast_us(self, tensor: str) -> float:
        """Time of the Cast of a tensor beside fused nodes that compute in a type of half the size: its maker or a
        reader alone computes in another type than the graph's."""
        cast = self.low_read[tensor] > 0
        if tensor in self.low_made:
            stays = any(self.alive(n) for n in self.graph.users(tensor)) or self.graph.escapes(tensor)
            cast = stays or self.read[tensor] > self.low_read[tensor]
        return self.device.pass_us(1.5 * self.size_of(tensor)) if cast else 0.0

    # --------------------------------------------------------------------------------------------------- the graph
    def alive(self, node: NodeProto | None) -> bool:
        return node is not None and id(node) not in self.gone

    def _needed(self, node: NodeProto) -> bool:
        """Whether something that stays reads an output which no fused node makes."""
        graph = self.graph
        return any(
            o and o not in self.made and (graph.escapes(o) or self.read[o] or any(map(self.alive, graph.users(o))))
            for o in node.output
        )

    def source(self, tensor: str) -> str:
        """The tensor behind nodes without effect."""
        if (known := self._sources.get(tensor)) is not None:
            return known
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

    def maker(self, tensor: str) -> NodeProto | None:
        """The engine's node that makes a tensor, behind nodes without effect; None of inputs and of fused nodes."""
        own = self.source(tensor)
        return None if own in self.made else self.graph.producer(own)

    def _is_passed(self, node: NodeProto) -> bool:
        """Whether an engine takes a node's output for its input, as that of a Pad by nothing."""
        return bool(node.input) and (node.op_type in _SEEN_THROUGH or has_no_effect(self.graph, node))

    def concats_of(self, tensor: str) -> list[NodeProto]:
        """The Concats that read a tensor, those behind nodes without effect included, in graph order."""
        if (known := self._concats.get(tensor)) is not None:
            return known
        found: dict[int, NodeProto] = {}
        pending = [tensor]
        while pending:
            for node in self.graph.users(pending.pop()):
                if node.op_type == "Concat":
                    found[id(node)] = node
                elif self._is_passed(node):
                    pending += node.output[:1]
        self._concats[tensor] = [found[i] for i in sorted(found, key=self.position.__getitem__)]
        return self._concats[tensor]

    def tied_concats(self, tensor: str) -> list[NodeProto]:
        """The Concats that read a tensor, without those of very many; [] of one that very many do."""
        found = self.concats_of(tensor)
        return [n for n in found if len(n.input) <= MOST_TIED] if len(found) <= MOST_TIED else []

    def joined_alone(self, tensor: str) -> list[NodeProto]:
        """The Concats that alone read what a node of the engine makes; [] where anything else does, or very many do."""
        own = self.source(tensor)
        readers = self.graph.users(own)
        stay = len(readers) <= MOST_TIED and all(r.op_type == "Concat" and self.alive(r) for r in readers)
        return readers if stay and self.maker(own) is not None and not self.graph.escapes(own) else []

    def siblings(self, conv: NodeProto) -> list[NodeProto]:
        """The convolutions that stay and share this one's kernel in the engine, itself too; alone among very many."""
        many = len(self.graph.users(conv.input[0])) > MOST_TIED
        if many or not self.engine.merges_pointwise or not self.is_pointwise(conv):
            return [conv] if self.alive(conv) else []
        users = {id(n): n for n in self.graph.users(conv.input[0]) if n.op_type == "Conv"}
        return [n for n in users.values() if self.alive(n) and self.is_pointwise(n)]

    def is_pointwise(self, conv: NodeProto) -> bool:
        """Whether a convolution's filter is 1x1, over every pixel and all channels."""
        dims = self.graph.dims(conv.input[1]) if len(conv.input) > 1 else None
        plain = all(s == 1 for s in attribute(conv, "strides", (1, 1))) and attribute(conv, "group", 1) == 1
        return dims is not None and tuple(dims[2:]) == (1, 1) and plain and not any(attribute(conv, "pads", (0,)))

    def _is_gated(self, node: NodeProto) -> bool:
        """Whether an elementwise node combines an image with less than an image, as the end of squeeze and excitation:
        what made the image has to end before its mean is known."""
        sizes = [self.dims(t) for t in node.input if t and not self.graph.is_constant(t)]
        return len(sizes) > 1 and all(len(s) == 4 for s in sizes) and len(set(sizes)) > 1

    def in_gate(self, tensor: str) -> bool:
        """Whether the kernel of such a node, which alone reads a tensor, computes what is left of the steps to it."""
        for _ in range(_MOST_STEPS):
            node = self.graph.only_user(tensor)
            if node is None or node.op_type not in ELEMENTWISE:
                return False
            if self._is_gated(node):
                return True
            tensor = node.output[0]
        return False

    def read_by(self, node: NodeProto) -> list[str]:
        """The tensors that an elementwise node reads, without those that its kernel computes of others, as a gate's."""
        read = [t for t in node.input if t and not self.graph.is_constant(t)]
        begins = list(map(self._begin, read)) if len(read) > 1 else read
        return [t for i, t in enumerate(read) if begins[i] not in begins[:i]]

    def _begin(self, tensor: str) -> str:
        """The tensor that a row of elementwise nodes makes another one of, each of a single tensor."""
        for _ in range(_MOST_STEPS):
            tensor = self.source(tensor)
            node = self.maker(tensor)
            if node is None or node.op_type not in ELEMENTWISE or not self.alive(node):
                break
            read = [t for t in node.input if t and not self.graph.is_constant(t)]
            if len(read) != 1:
                break
            (tensor,) = read
        return tensor

    def own_kernel(self, node: NodeProto) -> bool:
        """Whether an elementwise node that stays is a kernel of its own: nothing but fused nodes, inputs and ranges
        stand before it, while it would be a part of the kernel of any other node, or it gates an image."""
        if node.op_type not in ELEMENTWISE or not self.alive(node):
            return False
        if self._is_gated(node):
            return True
        makers = [self.maker(t) for t in node.input if t and not self.graph.is_constant(t)]
        return not any(m for m in makers if self.alive(m) and m and m.op_type in ("Conv", *ELEMENTWISE))


def is_between(node: NodeProto) -> bool:
    """Whether an enlargement computes its pixels from several others."""
    return attribute(node, "mode", "nearest") not in ("nearest", b"nearest")


def wiring(graph: Graph, engine: Engine, device: Device | None = None) -> Wiring:
    """The graph with nothing fused; by default on the GPU that the times were taken on."""
    convolutions = [n for n in graph.nodes if n.op_type in CONVOLUTIONS]
    position = {id(n): i for i, n in enumerate(graph.nodes)}
    return Wiring(graph, engine, device or device_of(0), position, convolutions=convolutions)
