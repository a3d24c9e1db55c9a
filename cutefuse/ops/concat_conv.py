"""Concat -> Conv -> [BatchNormalization, Mul, Add] -> [activation] as one convolution over several tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import FunctionProto, NodeProto, TensorProto

from cutefuse import conv_math, conv_site, kernels
from cutefuse.body import Body
from cutefuse.chain import FLOAT_MAX, chain_after
from cutefuse.graph import Graph
from cutefuse.kernels import CHANNELS_LAST, LINEAR, Call, Tensor
from cutefuse.ops.op import Case, Constant, Cost, FusedOp, Match, Refusal
from cutefuse.quant_site import is_quantised

MAX_SOURCES = 8
SUFFIXES = ("", "Relu", "LeakyRelu", "Clip", "Silu", "HardSwish", "Sigmoid", "Tanh")
ATTRS = [
    "channels", "kernel_shape", "strides", "pads", "dilations", "packed_sizes", "alpha", "lo", "hi",
    "channel_starts", "upsample", "output_channels",
]  # fmt: skip
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def make_call(
    sources: Sequence[tuple[int, ...]], filters: int, geometry: conv_math.Geometry, suffix: str, dtype: str,
    params: dict[str, float],
) -> Call:  # fmt: skip
    """The call of N,C,H,W sources and K filters, every attribute written."""
    channels = [s[1] for s in sources]
    sizes = conv_math.packed_sizes(channels, geometry.kernel_shape)
    first = sources[0]
    y = (first[0], filters, *(geometry.output_size(i, first[2 + i]) for i in range(2)))
    attrs: dict[str, Any] = {
        "channels": channels, **geometry.attrs(), "packed_sizes": sizes,
        "alpha": [0.01], "lo": [-FLOAT_MAX], "hi": [FLOAT_MAX], **{k: [v] for k, v in params.items()},
        "channel_starts": [0], "upsample": [1], "output_channels": [0],
    }  # fmt: skip
    inputs = [Tensor(s, dtype, CHANNELS_LAST) for s in sources]
    inputs += [Tensor((filters, sum(sizes)), dtype, LINEAR), Tensor((filters,), "float32", LINEAR)]
    return Call(f"CuteConcatConv{len(sources)}{suffix}", inputs, [Tensor(y, dtype, CHANNELS_LAST)], attrs)


class ConcatConv(FusedOp):
    stem = "concat_conv"
    anchors = frozenset({"Conv"})

    def match(self, graph: Graph, node: NodeProto) -> Match | Refusal | None:
        if is_quantised(graph, node):
            return None
        found = self._match(graph, node, MAX_SOURCES)
        if isinstance(found, Match) and kernels.reject(found.call):
            # Sources of an inner Concat may be illegal where their join is not (two and six float32 channels).
            joined = self._match(graph, node, 0)
            found = joined if isinstance(joined, Match) and not kernels.reject(joined.call) else found
        return found

    def _match(self, graph: Graph, node: NodeProto, flatten_to: int) -> Match | Refusal | None:
        site = conv_site.find_concat(graph, node, MAX_SOURCES, flatten_to)
        if site is None or isinstance(site, Refusal):
            return site
        facts = conv_site.read(graph, node, site)
        if isinstance(facts, Refusal):
            return facts
        tail = chain_after(graph, node.output[0], facts.weight_dims[0])
        folded = conv_site.Folded(graph, facts, tail.steps)
        nodes = (node, *site.nodes, *tail.nodes)
        if reason := folded.reject():
            return Refusal(reason, nodes)
        call = make_call(facts.sources, facts.weight_dims[0], facts.geometry, tail.suffix, facts.dtype, tail.params)
        w, b = call.inputs[-2:]
        constants = (
            Constant("packed_weight", tuple(w.dims), w.dtype, folded.packed, typed=True),
            Constant("bias", tuple(b.dims), b.dtype, folded.bias),
        )
        saved = conv_site.bytes_saved(graph, site, facts, SIZES[facts.dtype])
        return Match(call, nodes, (*site.sources, *constants), (tail.output,), saved)

    def function(self, op_type: str, opset: int, dtype: str) -> FunctionProto:
        rest = op_type.removeprefix("CuteConcatConv")
        count, suffix = int(rest[0]), rest[1:]
        body = Body(opset, dtype)
        formals, w, b = [body.formal(f"x{i}") for i in range(count)], body.formal("w"), body.formal("b")
        # Few runtimes convolve bfloat16 and before opset 22 the standard has no such Conv: compute it in float32.
        widen = dtype == "bfloat16"
        xs = [body.add("Cast", x, to=TensorProto.FLOAT) for x in formals] if widen else formals
        filters = conv_math.unpack(body, body.add("Cast", w, to=TensorProto.FLOAT) if widen else w, xs)
        concat = body.add("Concat", *xs, axis=1) if count > 1 else xs[0]
        refs = {name: name for name in ("kernel_shape", "strides", "pads", "dilations")}
        y = body.add("Conv", concat, filters, b if widen else body.cast_like(b, xs[0]), refs=refs)
        y = conv_math.activate(body, suffix, y, "float32" if widen else dtype)
        y = body.cast_like(y, formals[0]) if widen else y
        return body.finish(op_type, [*formals, w, b], [y], ATTRS)

    def cases(self) -> list[Case]:
        return conv_math.cases(SUFFIXES, MAX_SOURCES)

    def call(self, case: Case, dtype: str) -> Call:
        sizes: dict[str, Any] = dict(case.sizes)
        attrs: dict[str, Any] = dict(case.attrs)
        params: dict[str, float] = {k: attrs.pop(k)[0] for k in ("alpha", "lo", "hi") if k in attrs}
        geometry = conv_math.Geometry((sizes["R"], sizes["S"]), **{k: tuple(v) for k, v in attrs.items()})
        sources = [(sizes["N"], c, sizes["H"], sizes["W"]) for c in sizes["C"]]
        suffix = case.op_type.removeprefix(f"CuteConcatConv{len(sources)}")
        return make_call(sources, sizes["K"], geometry, suffix, dtype, params)

    def operands(self, call: Call, rng: np.random.Generator) -> list[np.ndarray]:
        shape: Any = call.attrs["kernel_shape"]
        channels: Any = call.attrs["channels"]
        fan_in = sum(channels) * math.prod(shape)
        xs = [rng.standard_normal(t.dims) for t in call.inputs[:-2]]
        w = rng.standard_normal((call.inputs[-1].dims[0], sum(channels), *shape)) / math.sqrt(fan_in)
        return [*xs, conv_math.pack(w, channels), rng.standard_normal(call.inputs[-1].dims)]

    def reference(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [conv_math.activation(call, conv_math.convolve(call, operands))]

    def magnitude(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [conv_math.convolve(call, [np.abs(o) for o in operands])]

    def tolerance(self, dtype: str) -> float:
        return {"float32": 2e-4, "float16": 1e-2, "bfloat16": 6e-2}[dtype]

    def cost(self, call: Call) -> Cost:
        sizes = [math.prod(max(1, d) for d in t.dims) * SIZES[t.dtype] for t in (*call.inputs, *call.outputs)]
        channels: Any = call.attrs["channels"]
        shape: Any = call.attrs["kernel_shape"]
        y = math.prod(max(1, d) for d in call.outputs[0].dims)
        return Cost(2 * y * sum(channels) * math.prod(shape), sum(sizes))

    def title(self, call: Call) -> str:
        shape: Any = call.attrs["kernel_shape"]
        channels: Any = call.attrs["channels"]
        k, p, q = call.outputs[0].dims[1:]
        suffix = call.op_type.removeprefix(f"CuteConcatConv{len(channels)}")
        size = "x".join("?" if d < 0 else str(d) for d in (p, q))
        return f"{'+'.join(map(str, channels))}->{k} {shape[0]}x{shape[1]} @{size} {suffix or 'linear'}"


OPERATOR = ConcatConv()
