"""Reads a Conv behind what stands in front of it: every fact that the fused operator needs, or why it cannot be
fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from onnx import NodeProto

from cutefuse.graph.numbers import FLOATS
from cutefuse.graph.read import ELEM_TYPES, Graph, attribute
from cutefuse.kernels import Call
from cutefuse.match.activation import ROUNDING
from cutefuse.match.after import Affine, composed
from cutefuse.match.answer import Constant, Refusal
from cutefuse.match.conv.front import Front, added
from cutefuse.match.qdq import dequantises
from cutefuse.operators.conv_form import Form, Source, form_of, most_spread
from cutefuse.operators.conv_math import Geometry, pack, pack_depthwise

GROUPS = "only group=1 and one filter for each channel (depthwise) can be fused"
LARGEST_FOLDED = 1e30  # a filter beyond it overflows float32 in sums that stayed finite before the fold
IMPRECISE = "overflows or loses precision"


@dataclass(frozen=True)
class Facts:
    """What the convolution computes: sources and input are N,C,H,W with -1 for unknown sizes.

    weight_dims: K, C, R, S. make: the filter of these out of the stored one, which it is itself without. spread: the
    filters of a pixel make the channels of so many rows and columns of pixels, as `Form.spread` says. transposed: the
    weight is a ConvTranspose's [C, channels, rows, columns], the bias one for each channel. by_channel: the weight and
    the bias have the filters of a channel one after another (CRD).
    """

    dtype: str
    weight: str
    weight_dims: tuple[int, int, int, int]
    bias: str
    sources: tuple[tuple[int, int, int, int], ...]
    geometry: Geometry
    depthwise: bool = False
    make: Callable[[np.ndarray], np.ndarray] | None = None
    spread: int = 1
    transposed: bool = False
    by_channel: bool = False

    def filters(self, graph: Graph) -> np.ndarray:
        """The filter [K, C, R, S]."""
        stored = np.asarray(graph.constant(self.weight))
        w = self.make(stored) if self.make else stored
        return self.placed(w.transpose(2, 3, 1, 0).reshape(self.weight_dims) if self.transposed else w)

    def biases(self, graph: Graph) -> np.ndarray:
        """The bias vector [K] in float64, zeros when the convolution has none."""
        b = np.asarray(graph.constant(self.bias), np.float64) if self.bias else np.zeros(self.weight_dims[0])
        return self.of_channels(b) if self.transposed and self.bias else self.placed(b)

    def placed(self, values: np.ndarray) -> np.ndarray:
        """What the graph has for each filter of the convolution, in the order of our filters."""
        if not self.by_channel:
            return values
        return values.reshape(-1, self.spread**2, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    def of_channels(self, values: np.ndarray) -> np.ndarray:
        """What the graph has for each channel of the output, for our filters."""
        return np.tile(values, self.spread**2)


def read(graph: Graph, conv: NodeProto, site: Front) -> Facts | Refusal:
    """Every fact about the convolution, transposed or not, or the first reason why it cannot be fused."""
    nodes = (conv, *site.nodes)

    def no(reason: str) -> Refusal:
        return Refusal(reason, nodes)

    weight, bias = conv.input[1], conv.input[2] if len(conv.input) > 2 else ""
    for what, name in (("filter", weight), ("bias", bias)):
        if name and (reason := _not_constant(graph, what, name)):
            return no(reason)
    weight_dims, dtype = _constant_type(graph, weight)
    if len(weight_dims) != 4:
        return no(f"the filter has rank {len(weight_dims)}; only 2-D convolutions (rank 4, KCRS) can be fused")
    if dtype not in FLOATS:
        return no(f"the filter is {dtype or 'of an unknown type'}; {', '.join(FLOATS)} can be fused, convert the model")
    transposed = conv.op_type == "ConvTranspose"
    K, C, R, S = weight_dims if not transposed else (*weight_dims[1::-1], *weight_dims[2:])
    group = attribute(conv, "group", 1)
    depthwise = group != 1 and (group, 1) == (K, C) and not transposed
    if group != 1 and not depthwise:
        return no(f"the Conv has {group} groups; {GROUPS}")
    if tuple(attribute(conv, "kernel_shape", (R, S))) != (R, S):
        return no(f"kernel_shape {attribute(conv, 'kernel_shape')} contradicts the filter's {R}x{S}; repair the model")
    if bias and _constant_type(graph, bias) != ((K,), dtype):
        return no(f"the bias is not a {dtype} vector of the filter's {K} outputs; repair the model")
    sources = source_dims(graph, site, C * group)
    if isinstance(sources, str):
        return no(sources)
    for name in site.sources:
        if (own := graph.dtype(name)) not in (None, dtype):
            return no(f"{site.word} '{name}' is {own}, the filter is {dtype}; types must agree, repair the model")
    if transposed:
        spread = _spread_of(conv, (R, S))
        if isinstance(spread, str):
            return no(spread)
        whole = (K * spread**2, C, 1, 1)
        return Facts(dtype, weight, whole, bias, sources, Geometry((1, 1)), spread=spread, transposed=True)
    geometry = geometry_of(conv, (R, S), sources[0][2:])
    if isinstance(geometry, str):
        return no(geometry)
    geometry = replace(geometry, pads=added(geometry.pads, site.pads))
    return Facts(dtype, weight, (K, C, R, S), bias, sources, geometry, depthwise)


def _constant_type(graph: Graph, tensor: str) -> tuple[tuple[int, ...], str | None]:
    if tensor in graph.initializers:
        return graph.dims(tensor) or (), graph.dtype(tensor)
    value = graph.constant(tensor)
    if value is None:
        return (), None
    return value.shape, value.dtype.name if value.dtype.name in ELEM_TYPES else None


def _not_constant(graph: Graph, what: str, tensor: str) -> str | None:
    if tensor in graph.overridable:
        return f"the {what} '{tensor}' is also a graph input, so callers may replace it; take it off the graph's inputs"
    if dequantises(graph.producer(tensor), graph):
        return f"quantised site: the {what} is dequantised in the graph, TensorRT fuses that itself"
    if not graph.is_constant(tensor) or (tensor not in graph.initializers and graph.constant(tensor) is None):
        return f"the {what} '{tensor}' {graph.not_constant(tensor)}; only constants can be packed"
    return None


def source_dims(graph: Graph, site: Front, C: int) -> tuple[tuple[int, int, int, int], ...] | str:
    """N,C,H,W of each source, -1 for unknown sizes; or why they do not suit a filter of C channels."""
    known = [graph.dims(name) for name in site.sources]
    whole = graph.dims(site.concats[0].output[0]) if site.concats else None
    for name, d in zip(site.sources, known, strict=True):
        if d is not None and len(d) != 4:
            return f"{site.word} '{name}' has rank {len(d)}; only 2-D convolutions (rank 4, NCHW) can be fused"
        if d is not None and 0 in d:  # runtimes skip an empty operand of Concat even where its other sizes disagree
            remedy = "take it out of the Concat" if site.concats else "give the model larger inputs"
            return f"{site.word} '{name}' is empty ({'x'.join(map(str, d))}); {remedy}"
    channels = [d[1] if d else -1 for d in known]
    if channels.count(-1) == 1:  # its channels are the filter's, less those of the others
        channels[channels.index(-1)] = C - sum(c for c in channels if c >= 0)
    if -1 in channels:
        name = site.sources[channels.index(-1)]
        return f"the channel count of source '{name}' is unknown; give the model's inputs static channel counts"
    if sum(channels) != C:
        found = f"{site.word}s have" if len(channels) > 1 else f"{site.word} has"
        return f"the {found} {'+'.join(map(str, channels))} channels, the filter takes {C}; repair the model"
    rows = [d for d in (*known, whole) if d is not None and len(d) == 4]
    # A Concat along channels needs equal N, H, W, so one source's size is every source's size.
    shared = [next((r[i] for r in rows if r[i] >= 0), -1) for i in range(4)]
    dims = []
    for c, own in zip(channels, known, strict=True):
        n, h, w = (own[i] if own and own[i] >= 0 else shared[i] for i in (0, 2, 3))
        dims.append((n, c, h, w))
    return tuple(dims)


def _spread_of(conv: NodeProto, kernel: tuple[int, int]) -> int | str:
    """How many rows and columns of pixels a ConvTranspose makes of each, where every output is of one pixel alone; or
    why it is not. Then no automatic padding adds anything."""
    strides = tuple(attribute(conv, "strides", (1, 1)))
    others = [*attribute(conv, "pads", ()), *attribute(conv, "output_padding", ())]
    others += [d - 1 for d in attribute(conv, "dilations", ())] + list(attribute(conv, "output_shape", ()))
    if kernel == strides == kernel[::-1] and kernel[0] <= most_spread() and not any(others):
        return kernel[0]
    rows, columns = kernel
    moves = "x".join(map(str, strides))
    return (
        f"its filter is {rows}x{columns} with strides {moves}; a filter as large as the strides, up to "
        f"{most_spread()}x{most_spread()} and without padding, dilation or output_shape, can be fused"
    )


def geometry_of(conv: NodeProto, kernel: tuple[int, int], size: Sequence[int]) -> Geometry | str:
    """The convolution's geometry on images of `size` (H, W); or why it has none."""
    strides = tuple(attribute(conv, "strides", (1, 1)))
    dilations = tuple(attribute(conv, "dilations", (1, 1)))
    pads = tuple(attribute(conv, "pads", (0, 0, 0, 0)))
    if (len(strides), len(dilations), len(pads)) != (2, 2, 4):
        return f"strides {strides}, dilations {dilations} or pads {pads} suit no 2-D convolution; repair the model"
    auto_pad = attribute(conv, "auto_pad", "NOTSET")
    if auto_pad == "VALID":
        pads = (0, 0, 0, 0)
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        smaller, larger = [], []
        for i in range(2):
            extent = dilations[i] * (kernel[i] - 1) + 1
            if strides[i] == 1:
                total = extent - 1  # the same for every size
            elif strides[i] < 1 or size[i] < 0:
                return f"auto_pad={auto_pad} with stride {strides[i]} needs a static input size; export explicit pads"
            else:
                total = max((-(-size[i] // strides[i]) - 1) * strides[i] + extent - size[i], 0)
            smaller.append(total // 2)
            larger.append(total - total // 2)
        pads = (*smaller, *larger) if auto_pad == "SAME_UPPER" else (*larger, *smaller)
    elif auto_pad != "NOTSET":
        return f"auto_pad={auto_pad} is not one of NOTSET, VALID, SAME_UPPER, SAME_LOWER; repair the model"
    return Geometry(kernel, strides, (pads[0], pads[1], pads[2], pads[3]), dilations)


def keeps_precision(exact: np.ndarray, dtype: str, unit: np.ndarray | float = 1.0) -> bool:
    """Whether a filter [K, C, R, S] is as precise in `dtype` as its largest value of each output allows. `unit`: what
    its values are measured in, positive, as [C, 1, 1] for each input channel."""
    with np.errstate(all="ignore"):
        error = np.abs(exact.astype(np.dtype(dtype)).astype(np.float64) - exact) / unit
        error, largest = (v.reshape(len(exact), -1).max(axis=1, initial=0.0) for v in (error, np.abs(exact) / unit))
        allowed = 2 * ROUNDING.get(dtype, 2.0**-23)
        return bool(np.all((error <= allowed * largest) & (largest < LARGEST_FOLDED)))  # false for NaN


class Folded:
    """The filter and bias with the affine steps after the convolution folded in, and those `before` it, of the input
    channels; evaluated when asked, never kept."""

    def __init__(self, graph: Graph, facts: Facts, steps: Sequence[Affine], before: Sequence[Affine] = ()) -> None:
        self._graph, self._facts, self._steps, self._before = graph, facts, steps, before

    def behind(self, before: Sequence[Affine]) -> Folded:
        """The same with these steps before all others."""
        return Folded(self._graph, self._facts, self._steps, (*before, *self._before))

    def _scale_and_shift(self) -> tuple[np.ndarray, np.ndarray]:
        scale, shift = composed(self._steps)
        bias = self._facts.biases(self._graph)
        given = composed(self._before)[1]
        if given.any():
            bias = bias + self._facts.filters(self._graph).astype(np.float64).sum(axis=(2, 3)) @ given
        return np.broadcast_to(scale, bias.shape), bias * scale + shift

    def _filter(self, scale: np.ndarray) -> np.ndarray:
        w = self._facts.filters(self._graph)
        if not self._steps and not self._before:
            return w
        given = composed(self._before)[0].astype(np.float32)[:, None, None]
        return w.astype(np.float32) * scale.astype(np.float32)[:, None, None, None] * given

    def reject(self) -> str | None:
        """Why folding would not give the same function; None when it does. Reads no weights when nothing is folded."""
        if not self._steps and not self._before and not self._facts.make:
            return None
        factor, offset = composed(self._before)
        with np.errstate(all="ignore"):
            scale, shift = self._scale_and_shift()
            if not all(np.isfinite(v).all() for v in (scale, factor, shift.astype(np.float32))):
                return "the normalisation's constants give NaN or infinity; repair the model"
            if offset.any() and any(self._facts.geometry.pads):
                return "the image is shifted, then padded with zeros; only a Conv without padding can take a shift in"
            unit = np.where(factor == 0, 1, np.abs(factor))[:, None, None]
            if not keeps_precision(self._filter(scale), self._facts.dtype, unit):
                filters = f"folding the normalisation into a {self._facts.dtype} filter"
                return f"{filters} {IMPRECISE}; keep this Conv in float32"
        return None

    def packed(self, channels: Sequence[int], form: Form) -> np.ndarray:
        """The filter matrix [K, columns] in the activation type, packed for sources of these channel counts."""
        scale, _ = self._scale_and_shift()
        w = self._filter(scale).astype(np.dtype(self._facts.dtype))
        return pack_depthwise(w) if form.depthwise else pack(w, channels, form)

    def constants(self, sources: Sequence[Source], call: Call) -> list[Constant]:
        """Packed filter and bias as operands of a node that makes `call` of these sources."""
        w, b = call.inputs[len(sources) : len(sources) + 2]
        packed = partial(self.packed, [s.channels for s in sources], form_of(call.op_type))
        return [
            Constant("packed_weight", tuple(w.dims), w.dtype, packed, typed=True),
            Constant("bias", tuple(b.dims), b.dtype, self.bias),
        ]

    def bias(self) -> np.ndarray:
        """The bias vector [K] in float32, zeros when the convolution has none."""
        return self._scale_and_shift()[1].astype(np.float32)
