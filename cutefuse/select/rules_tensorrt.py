"""What TensorRT and TensorRT for RTX do by themselves.

TensorRT's facts are of its public build logs: "Eliminating concatenation", "Retargeting x to y", "Generating copy for x
to y because input is not movable" (a range of another tensor, the output of merged convolutions, a tensor that lies in
another Concat already), and "does not support striding" for plugins. Myelin's, the compiler of TensorRT for RTX, were
read from graphs that it compiled of this project's models. No time of either is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute
from cutefuse.match.answer import Match
from cutefuse.operators.layouts import RTX_ASSUMED
from cutefuse.select import wiring as w
from cutefuse.select.times import Device
from cutefuse.select.wiring import ELEMENTWISE, ENLARGED, Engine, Wiring, is_between

NEWEST = (11, 3)  # the newest TensorRT that a fact below is recorded for
TANH_SILU = (11, 0)  # from here on SiLU is a kernel of its own, and its tanh form is not
ORIN = 87  # TensorRT 10 was seen to compute Conv and SiLU in one layer there, and in two elsewhere
_PRODUCT_FILTERS = 256  # from here on Myelin was seen to compute 1x1 convolutions as matrix products
_INSIDE_DECONVOLUTION = {"Relu", "Sigmoid", "Add"}  # what Myelin was seen to compute in a ConvTranspose's kernel


@dataclass(frozen=True)
class TensorRT(Engine):
    """TensorRT's own kernels."""

    version: tuple[int, int] = NEWEST
    family: ClassVar[str] = "TensorRT"
    merges_pointwise: ClassVar[bool] = True

    @property
    def title(self) -> str:
        return f"{self.family} {self.version[0]}.{self.version[1]}"

    def inside(self, activation: str) -> bool:
        """TensorRT's catalogue of fusions has Conv with ReLU and Clip. From 11 on it also takes tanh, and so SiLU in
        its tanh form, which `--tanh-silu` writes; this is what a fused SiLU has to beat there."""
        inside = {"", "Relu", "Clip"}
        if self.version >= TANH_SILU:
            inside |= {"Tanh", "Silu"}
        elif self.sm == ORIN:
            inside |= {"Silu"}
        return activation in inside

    def computes(self, graph: Graph, match: Match, activation: str) -> bool:
        if activation == "Silu" and self.version >= TANH_SILU:
            return not any(shortcut_fault(graph, o) for n in match.nodes for o in n.output)
        return self.inside(activation)

    def copies(self, wiring: Wiring, concat: NodeProto) -> list[str]:
        first = {t: i for i, t in reversed(list(enumerate(concat.input)))}
        return [
            self._why(wiring, t, concat) if first[t] == i else "it is there twice" for i, t in enumerate(concat.input)
        ]

    def _why(self, wiring: Wiring, tensor: str, concat: NodeProto) -> str:
        graph, own = wiring.graph, wiring.source(tensor)
        if own in wiring.made:
            return "a fused node's output, which cannot be strided"
        node = graph.producer(own)
        if node is None:
            return "a network input" if own in graph.inputs else "a constant"
        if graph.escapes(tensor) or graph.escapes(own):
            return "a network output (stomping hazard)"
        if node.op_type in w.RANGES:
            return "a range of another tensor, which is not movable"
        if node.op_type in ENLARGED:
            return "an enlarged tensor, which TensorRT copies"
        # Another Concat that stays takes it: engines begin with the last one.
        last = next(filter(wiring.alive, reversed(wiring.concats_of(own))), concat)
        if wiring.position[id(last)] > wiring.position[id(concat)]:
            return "it lies in another Concat already"
        conv = self._convolution_behind(wiring, own)
        if conv is not None and len(wiring.siblings(conv)) > 1:
            return "the output of merged 1x1 convolutions, which is not movable"
        # Recorded for the boxes of detectors, sums and products with a constant; the condition itself is not public.
        constant = any(graph.is_constant(t) for t in node.input if t)
        image = len(graph.dims(node.output[0]) or ()) == 4
        return "stomping hazard" if node.op_type in ("Mul", "Div", "Add", "Sub") and constant and not image else ""

    def _convolution_behind(self, wiring: Wiring, tensor: str) -> NodeProto | None:
        """The Conv whose kernel writes the tensor: bias, folded affine steps and the activation inside included."""
        node = wiring.graph.producer(tensor)
        for _ in range(4):
            if node is None or node.op_type == "Conv":
                break
            movable = [t for t in node.input if t and not wiring.graph.is_constant(t)]
            folded = node.op_type in ("BatchNormalization", "Mul", "Add") and len(movable) == 1
            inside = node.op_type in ("Relu", "Clip", "Tanh") and self.inside(node.op_type)
            if not movable or not (folded or inside):
                return None
            node = wiring.graph.producer(wiring.source(movable[0]))
        return node if node is not None and node.op_type == "Conv" and wiring.alive(node) else None

    def norm_us(self, device: Device, size_bytes: float, output_bytes: float, kind: Mapping[str, object]) -> float:
        """A norm is taken for one pass over memory, and the Add before it for another: only without that pass can our
        kernel be the faster one."""
        y = output_bytes
        return device.pass_us(2 * y) + device.pass_us(3 * y) if kind["residual"] else device.pass_us(size_bytes)


@dataclass(frozen=True)
class Myelin(TensorRT):
    """TensorRT for RTX."""

    family: ClassVar[str] = "TensorRT for RTX"
    merges_pointwise: ClassVar[bool] = False
    timed: ClassVar[bool] = False

    @property
    def title(self) -> str:
        return self.family

    @property
    def device_sm(self) -> int:
        return self.sm or RTX_ASSUMED

    def inside(self, activation: str) -> bool:
        return True  # Myelin computes whatever follows a convolution in its kernel, a sum behind it included

    def copies(self, wiring: Wiring, concat: NodeProto) -> list[str]:
        result = super().copies(wiring, concat)
        whole = self._copied_whole(wiring, concat, result)
        return [why or whole or self._pooled(wiring, t) for t, why in zip(concat.input, result, strict=True)]

    def _copied_whole(self, wiring: Wiring, concat: NodeProto, copies: Sequence[str]) -> str:
        """Why Myelin copies the inputs of a Concat that their makers could write in place; "" where it does not."""
        if first := next(filter(None, copies), ""):
            return f"Myelin copies all inputs where one is {first}"
        reader = wiring.graph.only_user(concat.output[0])
        return "a matrix product of Myelin reads the Concat" if reader and _is_product(wiring, reader) else ""

    def _pooled(self, wiring: Wiring, tensor: str) -> str:
        """Why Myelin copies what a pooling makes, or what a pooling or, but in float32, a depthwise convolution reads
        too, as in YOLO's SPPF, the skips of U-Nets and Ghost modules; "" where it does not. Such copies bear no name
        of a node."""
        maker = wiring.maker(tensor)
        if maker is not None and maker.op_type in w.POOLS:
            return "a pooling's output"
        graph = wiring.graph
        for user in filter(wiring.alive, graph.users(wiring.source(tensor))):
            if user.op_type in w.POOLS:
                return "a tensor that a pooling reads too"
            group = attribute(user, "group", 1) if user.op_type == "Conv" and graph.dtype(tensor) != "float32" else 1
            if group > 1 and tuple(graph.dims(user.input[1]) or ())[:2] == (group, 1):
                return "a tensor that a depthwise convolution reads too"
        return ""

    def absorbed(self, wiring: Wiring, tensor: str) -> bool:
        """Myelin computes enlargements between pixels in the copies of the Concats that alone read them."""
        node = wiring.maker(tensor)
        enlarged = node is not None and node.op_type in ENLARGED and is_between(node)
        return enlarged and bool(wiring.joined_alone(tensor))

    def node_us(self, wiring: Wiring, node: NodeProto) -> float:
        if node.op_type in w.MEANS:  # it takes them of NCHW alone where a fused node stands before
            turned = wiring.source(node.input[0]) in wiring.made
            return wiring.device.pass_us(2 * wiring.size_of(node.input[0])) if turned else 0.0
        if node.op_type in w.RANGES:  # it copies a range of channels for every reader but a Concat or another Slice
            users = [u for o in node.output for u in wiring.graph.users(o)]
            read = [u for u in users if wiring.alive(u) and u.op_type not in ("Concat", "Slice")]
            if not read and not any(wiring.read[o] or wiring.graph.escapes(o) for o in node.output):
                return 0.0
            wanted = sum(wiring.size_of(o) for o in node.output if o and wiring.graph.users(o))
            return wiring.device.pass_us(2 * wanted)
        if node.op_type in ELEMENTWISE and (self._in_beside(wiring, node) or not wiring.own_kernel(node)):
            return 0.0  # what its kernel reads for it, ours reads as well
        if node.op_type == "Concat":  # one kernel
            copied = self.copied(wiring, node)
            makers = [wiring.maker(t) if self.absorbed(wiring, t) else None for t in copied]
            moved = [*copied, *(m.input[0] if m else t for m, t in zip(makers, copied, strict=True))]
            return wiring.device.pass_us(sum(map(wiring.size_of, moved))) if copied else 0.0
        if node.op_type in ENLARGED and is_between(node) and wiring.source(node.input[0]) in wiring.made:
            return super().node_us(wiring, node) + wiring.device.pass_us(2 * wiring.size_of(node.input[0]))
        return super().node_us(wiring, node)

    def _in_beside(self, wiring: Wiring, node: NodeProto) -> bool:
        """Whether Myelin computes an elementwise node in the kernel of a DepthToSpace before it, or in that of another
        one that alone reads it and that has begun with another input, as in a gated sum."""
        if any(m and m.op_type == w.MOVES and wiring.alive(m) for m in map(wiring.maker, node.input)):
            return True
        reader = wiring.graph.only_user(node.output[0])
        if reader is None or reader.op_type not in ELEMENTWISE:
            return False
        makers = [m for m in map(wiring.maker, reader.input) if m and wiring.alive(m)]
        begins = [(m.op_type != "Conv", wiring.position[id(m)]) for m in makers if m.op_type in ("Conv", *ELEMENTWISE)]
        return bool(begins) and min(begins) < (True, wiring.position[id(node)])

    norm_us = Engine.norm_us  # the Add before a norm is in its kernel

    def our_norm_us(self, device: Device, size_bytes: float) -> float:
        return device.pass_us(size_bytes) + device.move_us(size_bytes)  # a tensor beside ours is copied

    def widened_us(self, wiring: Wiring, tensor: str) -> float:
        """What lies in NCHW in Myelin passes a Transpose, which a Concat that goes had done."""
        copy_us = wiring.device.pass_us(2 * wiring.size_of(tensor))
        if wiring.given[tensor] == wiring.read[tensor] > 0:  # a convolution of its own would copy what it is given
            stays = any(map(wiring.alive, wiring.graph.users(tensor)))
            return 0.0 if stays or _is_sorted(wiring, tensor) else -copy_us
        read = wiring.read[tensor] > wiring.given[tensor] and tensor not in wiring.made
        return copy_us if read and self._in_nchw(wiring, tensor) else 0.0

    def _in_nchw(self, wiring: Wiring, tensor: str, enlarged: bool = False) -> bool:
        """Whether Myelin copies a tensor for fused nodes: the inputs, which a convolution of its own would copy too,
        unless a Concat or Slices do or others read them as well, shuffled pixels, deconvolutions that no part of their
        kernel ends, as a BatchNormalization, and convolutions that are matrix products. What is computed of several
        images is copied only where all of them would be, and an enlargement between pixels where a part of what it
        reads would be, or is `enlarged` itself."""
        graph, first, after = wiring.graph, list[NodeProto | None](), set[str]()
        pending, seen = [wiring.source(tensor)], set[str]()
        while pending:
            seen.add(own := pending.pop())
            node = graph.producer(own)
            if node is None or node.op_type not in ELEMENTWISE or not wiring.alive(node):
                first.append(node)
                continue
            after.add(node.op_type)
            images = [t for t in node.input if t and not graph.is_constant(t) and wiring.dims(t) == wiring.dims(own)]
            pending += [t for t in map(wiring.source, images) if t not in seen]

        def apart(node: NodeProto | None) -> bool:
            if node is None:
                joined = any(not wiring.alive(c) for c in reversed(wiring.concats_of(tensor)))
                joined |= _is_sorted(wiring, tensor)
                return enlarged or joined or any(map(wiring.alive, graph.users(tensor)))
            if node.op_type in ENLARGED and is_between(node) and wiring.alive(node):
                read = node.input[0]
                return enlarged or graph.escapes(read) or self._in_nchw(wiring, read, enlarged=True)
            apart = node.op_type == "ConvTranspose" and not after <= _INSIDE_DECONVOLUTION
            apart |= node.op_type == w.MOVES and wiring.alive(node)
            return apart or (wiring.alive(node) and _is_product(wiring, node))

        return any(map(apart, first)) if enlarged else all(map(apart, first))


def _is_sorted(wiring: Wiring, tensor: str) -> bool:
    """Whether Myelin sorts the pixels of an input in a kernel of its own, which turns it to NHWC as well."""
    users = wiring.graph.users(tensor)
    behind = [u for n in users if n.op_type == "Cast" for u in wiring.graph.users(n.output[0])]
    return any(n.op_type in ("Slice", "SpaceToDepth") for n in (*users, *behind))


def _is_product(wiring: Wiring, node: NodeProto) -> bool:
    """Whether a node is a convolution that Myelin was seen to compute as a matrix product, which takes and gives
    tensors of another form than its convolutions."""
    if node.op_type != "Conv" or not wiring.alive(node) or not wiring.is_pointwise(node):
        return False
    return (wiring.graph.dims(node.input[1]) or (0,))[0] >= _PRODUCT_FILTERS


def shortcut_fault(graph: Graph, tensor: str) -> bool:
    """Whether TensorRT 11.2 would compute convolution, SiLU in its tanh form, and a sum wrongly (NVIDIA/TensorRT 4854):
    the tensor is added to a part of a wider one, a range of channels or what lies in a Concat's buffer."""
    for other in (t for add in graph.users(tensor) if add.op_type == "Add" for t in add.input if t != tensor):
        maker = graph.producer(other)
        ranged = maker is not None and maker.op_type in w.RANGES
        if ranged or any(n.op_type == "Concat" for n in graph.users(other)):
            return True
    return False
