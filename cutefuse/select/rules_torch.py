"""What torch.compile does by itself: cuDNN's bare convolutions, and Triton's kernels for all that stands around them.

Fitted on an H200 with torch 2.11 and cuDNN 9.19; calibration/ holds the networks that judge these constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from onnx import NodeProto

from cutefuse.graph.numbers import ELEMENT_BYTES
from cutefuse.select.times import Convolution, Device, convolution_us
from cutefuse.select.wiring import ELEMENTWISE, ENLARGED, MOVES, POOLS, Engine, Wiring, is_between

_VECTOR = 8  # channels to which our pixels are padded
_MEANS = ("GlobalAveragePool", "ReduceMean")  # of images, as squeeze and excitation takes them
# Triton's kernel for a Concat: every element asks each source whether it comes from there. Microseconds for a million
# bytes of the result, at the H200's rate, as all figures for a million bytes here.
_JOIN_US, _JOIN_SOURCE_US = 0.3, 0.1
# An enlargement between pixels whose result is laid out as pixels, and a Concat of it: an element's place, its four
# neighbours and their weights are computed for this element alone. Laid out as Triton likes it, rows of a tile share
# them: HRNet's head takes 21 us for three of them and not 77.
_BETWEEN_US = 0.8
# A pooling computes a Concat of what fused nodes made anew for each of its taps, instead of in the kernel that computes
# bias and activation of the sources: so long, and so long for a million bytes of the Concat.
_POOLED_US, _POOLED_SHARE_US = 1.0, 2.0
# Where the sources are written in place, their planes lie one after the other: a kernel turns them into pixels again,
# and an enlargement reads pixels and writes planes.
_TURN_SHARE, _SCATTER_US = 0.7, 1.6
# How much longer Triton takes over a Concat that it also normalises: 116 of DenseNet-121, one image and eight. Of more
# than a few inputs it joins some beforehand.
_NORMALISED_US = 1.6
# How much longer cuDNN takes in 16 bits where channels are no whole vectors. Under several taps it first copies image
# and filter, which takes start_us, and image_us and filter_us for a million bytes of each. A 1x1 filter takes
# pointwise_us for a million bytes of the image. calibration/odd_channels.py fits these.
ODD = {"start_us": 6.0, "image_us": 1.5, "filter_us": 2.5, "pointwise_us": 0.6}
# Forward row norms against torch.compile, geometric means on an H200, for the bytes they move.
_NORM_RATIOS = {False: 0.83, True: 0.74}


@dataclass(frozen=True)
class TorchCompile(Engine):
    """torch.compile with cuDNN's convolutions. Triton computes bias and activation in one kernel after them, and joins
    all inputs of a Concat in one, with the elementwise nodes before it."""

    family: ClassVar[str] = "PyTorch (torch.compile)"
    reads_ranges: ClassVar[bool] = False  # cuDNN wants channels dense
    fitted: ClassVar[bool] = True
    quantised: ClassVar[bool] = False
    joins: ClassVar[str] = "joins"

    def absorbed(self, wiring: Wiring, tensor: str) -> bool:
        """Triton computes elementwise nodes and nearest enlargements in the kernels of Concats that alone read them."""
        node, concats = wiring.maker(tensor), wiring.joined_alone(tensor)
        if node is None or not concats or any(self.in_planes(wiring, c) for c in concats):
            return False
        nearest = node.op_type in ENLARGED and not is_between(node)
        return nearest or node.op_type == "Conv" or node.op_type in ELEMENTWISE

    def in_planes(self, wiring: Wiring, concat: NodeProto) -> bool:
        """Whether the sources of a Concat are written where they belong, plane after plane: one of them is the result
        of elementwise nodes that a pooling reads too, so that it is stored anyway, and no convolution has fixed how it
        lies. The first Concat of such a tensor has it, others copy."""
        return any(self._is_stored(wiring, wiring.source(t), concat) for t in concat.input)

    def _is_stored(self, wiring: Wiring, tensor: str, concat: NodeProto) -> bool:
        node = wiring.maker(tensor)
        if node is None or node.op_type not in ELEMENTWISE or wiring.read[tensor]:
            return False
        users = [u for u in wiring.graph.users(tensor) if wiring.alive(u)]
        first = next(filter(wiring.alive, wiring.concats_of(tensor)), concat)
        pooled = any(u.op_type in POOLS for u in users) and not any(u.op_type == "Conv" for u in users)
        return pooled and first is concat

    def joins_for_pools(self, wiring: Wiring, concat: NodeProto) -> bool:
        """Whether a pooling reads a Concat of what fused nodes made: Triton then joins it in the pooling's kernel."""
        pooled = any(u.op_type in POOLS and wiring.alive(u) for u in wiring.graph.users(concat.output[0]))
        return pooled and any(wiring.source(t) in wiring.made for t in concat.input)

    def in_pixels(self, wiring: Wiring, node: NodeProto) -> bool:
        """Whether a convolution that stays comes after a node: torch.compile then fixes its results as pixels.

        Its layout optimisation (`find_nodes_prefer_channels_last` of torch/_inductor/graph.py) begins at ATen's
        convolutions; fused nodes are none. What only they read lies as Triton likes.
        """
        last = next((c for c in reversed(wiring.convolutions) if wiring.alive(c)), None)
        return last is not None and wiring.position[id(node)] < wiring.position[id(last)]

    # --------------------------------------------------------------------------------------------------------- times
    def node_us(self, wiring: Wiring, node: NodeProto) -> float:
        if node.op_type == "Concat":
            return self._concat_us(wiring, node)
        if node.op_type == MOVES and (maker := wiring.maker(node.input[0])) and not _is_bare(maker):
            # Triton stores where it belongs what it computes in a pass, if only a bias.
            return 0.0 if maker.op_type in ("Conv", *ELEMENTWISE) else super().node_us(wiring, node)
        us = super().node_us(wiring, node)
        maker = wiring.maker(node.input[0]) if node.op_type in _MEANS else None
        if maker is not None and maker.op_type in ELEMENTWISE:  # summed up in the pass over memory that computes it
            us -= wiring.device.pass_us(wiring.size_of(node.input[0]))
        slow = us and node.op_type in ENLARGED and is_between(node) and self.in_pixels(wiring, node)
        return us + _for_bytes(wiring.device, _BETWEEN_US, wiring.size_of(node.output[0])) if slow else us

    def _concat_us(self, wiring: Wiring, concat: NodeProto) -> float:
        """What it computes of its inputs needs no pass of its own."""
        device, size = wiring.device, wiring.size_of(concat.output[0])
        makers = {t: wiring.graph.producer(t) for t in dict.fromkeys(concat.input)}
        enlarged = {t: n for t, n in makers.items() if n is not None and n.op_type in ENLARGED}
        if self.in_planes(wiring, concat):
            scattered = sum(wiring.size_of(t) for t, n in enlarged.items() if not self._reads_planes(wiring, n))
            return turn_us(device, size, scattered)
        between = sum(wiring.size_of(t) for t, n in enlarged.items() if is_between(n))
        inside = [t for t, n in makers.items() if t not in enlarged and not _is_bare(n) and self.absorbed(wiring, t)]
        own_us = self.join_us(device, size, len(concat.input)) + _for_bytes(device, _BETWEEN_US, between)
        if self.joins_for_pools(wiring, concat):
            own_us += _POOLED_US + _for_bytes(device, _POOLED_SHARE_US, size)
        shares = {t: len(wiring.graph.users(wiring.source(t))) for t in inside}  # the pass is saved once
        return own_us - sum(device.pass_us(2 * wiring.size_of(t)) / n for t, n in shares.items())

    def _reads_planes(self, wiring: Wiring, enlarged: NodeProto) -> bool:
        """Whether what an enlargement reads lies in a Concat of planes."""
        concats = wiring.concats_of(wiring.source(enlarged.input[0]))
        return any(self.in_planes(wiring, c) for c in concats if wiring.alive(c))

    def convolution_us(self, device: Device, conv: Convolution) -> float:
        if conv.depthwise:
            return device.depthwise_us(conv.output_bytes, conv.taps, conv.dilated_taps)
        return convolution_us(conv, device) + odd_channels_us(device, conv)

    def join_us(self, device: Device, size_bytes: float, sources: int) -> float:
        per_million_us = _JOIN_US + _JOIN_SOURCE_US * sources
        return device.pass_us(0) + _for_bytes(device, per_million_us, size_bytes)

    def normalised_us(self, device: Device, size_bytes: float, behind: NodeProto | None) -> float:
        """Triton's kernel for a Concat writes nothing else, but takes longer."""
        if behind is not None and behind.op_type == "Concat":
            return _NORMALISED_US
        return super().normalised_us(device, size_bytes, behind)

    def norm_us(self, device: Device, size_bytes: float, output_bytes: float, kind: Mapping[str, object]) -> float:
        slower = 1 / _NORM_RATIOS[bool(kind["layer"])] - 1
        return device.pass_us(size_bytes) + device.move_us(size_bytes) * slower

    def widened_us(self, wiring: Wiring, tensor: str) -> float:
        """PyTorch's pixels are as wide as they have channels."""
        dims = wiring.graph.dims(tensor)
        narrow = dims is not None and len(dims) == 4 and dims[1] % _VECTOR != 0
        read = narrow and wiring.read[tensor] > wiring.given[tensor] and tensor not in wiring.made
        return wiring.device.copy_us(2 * wiring.size_of(tensor)) if read else 0.0


def odd_channels_us(device: Device, conv: Convolution, rates: Mapping[str, float] = ODD) -> float:
    """How much longer cuDNN takes than over whole vectors of channels; images of fewer have kernels of their own."""
    size = ELEMENT_BYTES[conv.dtype]
    if conv.C % _VECTOR == 0 or conv.C < _VECTOR or size != 2:
        return 0.0
    image_bytes, filter_bytes = conv.N * conv.C * conv.H * conv.W * size, conv.K * conv.C * conv.taps * size
    if conv.taps == 1:
        return _for_bytes(device, rates["pointwise_us"], image_bytes)
    copied_us = _for_bytes(device, rates["image_us"], image_bytes)
    return rates["start_us"] + copied_us + _for_bytes(device, rates["filter_us"], filter_bytes)


def turn_us(device: Device, size_bytes: float, scattered_bytes: float = 0.0) -> float:
    """What it costs that so many bytes were joined as planes, some of them enlarged, and are read as pixels."""
    passed_us = device.move_us(2 * size_bytes) / _TURN_SHARE
    return device.pass_us(0) + passed_us + _for_bytes(device, _SCATTER_US, scattered_bytes)


def _for_bytes(device: Device, per_million_us: float, size_bytes: float) -> float:
    """Time for so many bytes, at so many microseconds for a million of them on the GPU of the constants."""
    return per_million_us * size_bytes * 1e-6 * device.slower


def _is_bare(node: NodeProto | None) -> bool:
    """Whether a convolution has no bias, so that torch.compile needs no pass after it."""
    return node is not None and node.op_type == "Conv" and len(node.input) < 3
