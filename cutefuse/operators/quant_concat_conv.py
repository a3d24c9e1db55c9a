"""Concat -> Conv -> [activation] -> [QuantizeLinear] on int8 or float8: every source keeps its own scale."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import FunctionProto

from cutefuse.graph.body import Body
from cutefuse.graph.numbers import FLOATS, INT8, NUMBERS, Number
from cutefuse.graph.read import ELEM_TYPES
from cutefuse.kernels import CHANNELS_LAST, LINEAR, Call, Tensor
from cutefuse.operators import concat_conv, conv_body, conv_call, conv_math
from cutefuse.operators.conv_form import Form, Source, form_of, forms
from cutefuse.operators.layouts import HWC8
from cutefuse.operators.op import Case, Cost, FusedOp, moved_bytes

PLAIN = concat_conv.OPERATOR
ATTRS = [
    "channels", "kernel_shape", "strides", "pads", "dilations", "packed_sizes", "input_scales", "output_scale",
    "output_type", "alpha", "lo", "hi", "sum_bound", "layout",
]  # fmt: skip


def plain_call(call: Call) -> Call:
    """The float32 ConcatConv that a call computes on dequantised operands."""
    attrs: dict[str, Any] = dict(call.attrs)
    geometry = conv_math.Geometry.of(attrs)
    params = {k: attrs[k][0] for k in ("alpha", "lo", "hi")}
    sources = [t.dims for t in call.inputs[:-3]]
    return plain_of(sources, call.inputs[-1].dims[0], geometry, form_of(call.op_type).suffix, params)


def plain_of(
    dims: Sequence[tuple[int, ...]], filters: int, geometry: conv_math.Geometry, suffix: str, params: dict[str, float],
    layout: int = HWC8,
) -> Call:  # fmt: skip
    sources = [Source(d, d[1]) for d in dims]
    return conv_call.make_call(Form(len(sources), suffix), sources, [filters], geometry, "float32", params, layout)


def make_call(
    plain: Call, scales: Sequence[float], dtype: str, output_scale: float | None, number: Number = INT8,
    sum_bound: int = 0,
) -> Call:  # fmt: skip
    """The twin of a plain call over quantised sources: an output of `dtype`, or of their type when there is an output
    scale. `sum_bound`: see `quant_math`; 0 where it is not known."""
    attrs: dict[str, Any] = dict(plain.attrs)
    attrs |= {
        "input_scales": [float(s) for s in scales], "output_scale": [1.0 if output_scale is None else output_scale],
        "output_type": [ELEM_TYPES["float32" if output_scale is not None else dtype]],
        "sum_bound": [sum_bound],
    }  # fmt: skip
    *sources, w, b = plain.inputs
    inputs = [replace(t, dtype=number.name) for t in (*sources, w)] + [Tensor(b.dims, "float32", LINEAR), b]
    y = Tensor(plain.outputs[0].dims, dtype if output_scale is None else number.name, CHANNELS_LAST)
    form = replace(form_of(plain.op_type), quantised=True, to_quantised=output_scale is not None)
    return Call(form.op_type, inputs, [y], {name: attrs[name] for name in ATTRS})


class QuantConcatConv(FusedOp):
    stem = "quant_concat_conv"
    min_body_opset = INT8.opset

    def oldest_opset(self, op_type: str, dtype: str = "") -> int:
        return NUMBERS[dtype].opset if dtype in NUMBERS else self.min_body_opset

    def must_agree(self, opset: int) -> tuple[str, ...]:
        return ("layout",)

    def function(
        self, op_type: str, opset: int, dtype: str, calls: Sequence[Call] = (), positive: Collection[int] = ()
    ) -> FunctionProto:  # fmt: skip
        form, body = form_of(op_type), Body(opset, "float32", [call.attrs for call in calls])
        number = NUMBERS.get(dtype, INT8)
        formals = [body.formal(f"x{i}") for i in range(form.sources)]
        w, w_scale, b = (body.formal(name) for name in ("w", "w_scale", "b"))
        xs = [self._values(body, x, i, number) for i, x in enumerate(formals)]
        if form.sources + 1 in positive:
            filters = body.add("DequantizeLinear", conv_body.unpack(body, w, form.sources), w_scale, axis=0)
        else:
            # A folded BatchNormalization may have made a scale negative, and TensorRT's parser refuses such a node. But
            # its builder takes quantised constants through these nodes alone.
            numbers = body.add("DequantizeLinear", w, body.constant(1, "float32"))
            scaled = body.add("Mul", numbers, body.add("Reshape", w_scale, body.constant([-1, 1])))
            filters = conv_body.unpack(body, scaled, form.sources)
        y = conv_body.convolve(body, body.add("Concat", *xs, axis=1) if form.sources > 1 else xs[0], filters, b)
        y = conv_body.from_nchw(body, conv_body.activate(body, form.suffix, y, "float32"))
        if form.to_quantised:
            y = body.add("QuantizeLinear", y, body.float_attr("output_scale"), body.constant(0, number.name))
        else:
            y = body.add("Cast", y, refs={"to": "output_type"})
        return body.finish(op_type, [*formals, w, w_scale, b], [y], ATTRS)

    def _values(self, body: Body, x: str, source: int, number: Number) -> str:
        """A quantised source as float32 NCHW. ONNX Runtime (1.32) decides the form:

        - it joins Q -> DQ -> Q -> DQ of int8 to one pair, which drops a rounding that the original has, if all four
          have a zero point;
        - it puts a Q without a zero point, thus of uint8, behind the Transpose of a DQ without one;
        - a Transpose takes float8 from opset 21 on only.
        """
        if number is INT8:
            return body.add("DequantizeLinear", conv_body.to_nchw(body, x), self._scale(body, source))
        zero = body.constant(0, number.name)
        return conv_body.to_nchw(body, body.add("DequantizeLinear", x, self._scale(body, source), zero))

    @staticmethod
    def _scale(body: Body, source: int) -> str:
        if (scales := body.agreed("input_scales")) is not None:
            return body.constant(scales[source], "float32")
        return body.add("Gather", body.add("Constant", refs={"value_floats": "input_scales"}), body.constant(source))

    def cases(self) -> list[Case]:
        found = []
        for to_quantised in (False, True):
            for case in PLAIN.cases():
                form = replace(form_of(case.op_type), quantised=True, to_quantised=to_quantised)
                if form not in forms():
                    continue
                case = replace(case, op_type=form.op_type, dtypes=FLOATS)
                if to_quantised:
                    attrs = {**case.attrs, "output_scale": [0.0625]}
                    case = replace(case, name=f"{case.name}_to_int8", dtypes=("float32",), attrs=attrs)
                found.append(case)
        return found

    def call(self, case: Case, dtype: str, number: Number = INT8) -> Call:
        """The case as a call without data, over sources of a number type; `dtype` is that of a float output."""
        form = form_of(case.op_type)
        attrs = {k: v for k, v in case.attrs.items() if k != "output_scale"}
        plain = replace(case, op_type=replace(form, quantised=False, to_quantised=False).op_type, attrs=attrs)
        scales = [0.015625 * (1 + i % 3) for i in range(form.sources)]
        output_scale = float(case.attrs.get("output_scale", [1.0])[0]) if form.to_quantised else None
        return make_call(PLAIN.call(plain, "float32"), scales, dtype, output_scale, number)

    def operands(self, call: Call, rng: np.random.Generator) -> list[np.ndarray]:
        *sources, w, w_scale, b = call.inputs
        channels: Any = call.attrs["channels"]
        shape: Any = call.attrs["kernel_shape"]
        filters = _random(NUMBERS[w.dtype], rng, (w.dims[0], sum(channels), *shape), -127)
        xs = [_random(NUMBERS[t.dtype], rng, t.dims, -128) for t in sources]
        steps = rng.uniform(0.5, 1.5, w_scale.dims) / (80 * math.sqrt(sum(channels) * math.prod(shape)))
        return [*xs, conv_math.pack(filters, channels), steps, rng.standard_normal(b.dims)]

    def reference(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        (y,) = PLAIN.reference(plain_call(call), self._dequantised(call, operands))
        if not form_of(call.op_type).to_quantised:
            return [y]
        step: Any = call.attrs["output_scale"]
        return [NUMBERS[call.inputs[0].dtype].round(y / step[0]).astype(np.float64)]

    def magnitude(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        (size,) = PLAIN.magnitude(plain_call(call), self._dequantised(call, operands))
        step: Any = call.attrs["output_scale"]
        return [size / step[0] if form_of(call.op_type).to_quantised else size]

    @staticmethod
    def _dequantised(call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        *xs, w, w_scale, b = operands
        scales: Any = call.attrs["input_scales"]
        return [*(x * s for x, s in zip(xs, scales, strict=True)), w * w_scale[:, None], b]

    def cost(self, call: Call) -> Cost:
        return Cost(PLAIN.cost(plain_call(call)).flops, moved_bytes(call))

    def title(self, call: Call) -> str:
        word = NUMBERS[call.inputs[0].dtype].word
        return f"{PLAIN.title(plain_call(call))} {word}{f' to {word}' if form_of(call.op_type).to_quantised else ''}"


def _random(number: Number, rng: np.random.Generator, dims: Sequence[int], lowest: int) -> np.ndarray:
    """Numbers of a type as float64: all integers from `lowest` on, or float8 up to its largest magnitudes."""
    if number is INT8:
        return rng.integers(lowest, 128, dims).astype(np.float64)
    return number.round(rng.standard_normal(dims) * number.highest / 4).astype(np.float64)


OPERATOR = QuantConcatConv()
