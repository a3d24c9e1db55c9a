"""Concat -> Conv -> [BatchNormalization, Mul, Add] -> [activation] as one convolution over several tensors; a depthwise
one too, and one whose outputs DepthToSpace spreads over squares of pixels."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from onnx import FunctionProto, TensorProto

from cutefuse.graph.numbers import ELEMENT_BYTES
from cutefuse.kernels import Call
from cutefuse.operators import conv_body, conv_call, conv_cases, conv_form, conv_math
from cutefuse.operators.conv_form import AFTER, BEFORE, GROUP, Source
from cutefuse.operators.op import Case, Cost, FusedOp, body_of, elements

ATTRS = [
    "channels", "kernel_shape", "strides", "pads", "dilations", "packed_sizes", "alpha", "lo", "hi",
    "channel_starts", "upsample", "output_channels", "residual_start", "layout",
]  # fmt: skip


class ConcatConv(FusedOp):
    stem = "concat_conv"

    def oldest_opset(self, op_type: str, dtype: str = "") -> int:
        # Before opset 12 a list attribute cannot become a tensor, and views slice and resize by such.
        return 12 if conv_form.form_of(op_type).view else super().oldest_opset(op_type)

    def must_agree(self, opset: int) -> tuple[str, ...]:
        # A Slice has steps from opset 10 on, and a Pad takes computed widths from opset 11 on.
        computed = () if opset >= 11 else ("dilations",) if opset == 10 else ("strides", "dilations")
        return (*computed, "layout")

    def function(
        self, op_type: str, opset: int, dtype: str, calls: Sequence[Call] = (), positive: Collection[int] = ()
    ) -> FunctionProto:  # fmt: skip
        form, body = conv_form.form_of(op_type), body_of(opset, dtype, calls)
        if form.depthwise:
            body.calls = [{**attrs, GROUP: [sum(attrs["channels"])]} for attrs in body.calls]
        if calls:
            must = self.must_agree(opset)
            assert all(body.agreed(name) for name in must), "calls that differ need bodies of their own"
        formals = [body.formal(name) for name in (*(f"x{i}" for i in range(form.sources)), "w", "b")]
        formals += [body.formal("scale"), body.formal("shift")] if form.pre_activated else []
        formals += [body.formal("z")] if form.residual else []
        # Few runtimes convolve bfloat16 and before opset 22 the standard has no such Conv: compute it in float32.
        widen = dtype == "bfloat16"
        like = formals[form.sources if form.image else 0]  # has the type of the activations
        wide = [body.add("Cast", f, to=TensorProto.FLOAT) if widen and f != body.formal("b") else f for f in formals]
        xs, (w, b, *others) = wide[: form.sources], wide[form.sources :]
        if form.image:
            given = any(c.inputs[0].dtype != c.dtype for c in calls) or not calls
            xs = [body.cast_like(x, w) for x in xs] if given and not widen else xs
        else:
            xs = [conv_body.to_nchw(body, x) for x in xs]
        z = [conv_body.to_nchw(body, v) for v in (others[2:] if form.pre_activated else others)]
        if form.view:
            xs = [conv_body.view(body, x, i, form.sources, calls) for i, x in enumerate(xs)]
            z = [conv_body.residual(body, v, w, form.sources, calls) for v in z]
        if form.depthwise:
            filters = conv_body.unpack_depthwise(body, w)
        else:
            filters = conv_body.unpack(body, w, form.sources, () if form.view else xs, form.image)
        concat = body.add("Concat", *xs, axis=1) if len(xs) > 1 else xs[0]
        concat = conv_body.pre_activate(body, concat, *others) if form.pre_activated else concat
        b = b if widen else body.cast_like(b, xs[0])

        def convolved(filters: str, b: str) -> str:
            y = conv_body.convolve(body, concat, filters, b, form.depthwise)
            y = body.add("Add", y, *z) if form.residual == BEFORE else y
            y = conv_body.activate(body, form.suffix, y, "float32" if widen else "")
            y = body.add("Add", y, *z) if form.residual == AFTER else y
            y = body.add("DepthToSpace", y, blocksize=form.spread) if form.spread > 1 else y
            y = conv_body.from_nchw(body, y)
            return body.cast_like(y, like, dtype) if widen else y

        declared = [*ATTRS, GROUP] if form.depthwise else ATTRS
        # A convolution for each output, as the model had: a Split of their images would be a copy.
        parts = (body.split(v, "output_channels", form.outputs, axis=0) for v in (filters, b))
        return body.finish(op_type, formals, list(map(convolved, *parts)), declared)

    def cases(self) -> list[Case]:
        return conv_cases.cases()

    def call(self, case: Case, dtype: str) -> Call:
        form, sizes, attrs = conv_form.form_of(case.op_type), dict[str, Any](case.sizes), dict[str, Any](case.attrs)
        params: dict[str, float] = {k: attrs.pop(k)[0] for k in ("alpha", "lo", "hi") if k in attrs}
        starts, factors, outputs, first = (
            attrs.pop(name, default)
            for name, default in (("channel_starts", [0] * 8), ("upsample", [1] * 8), ("output_channels", ()),
                                  ("residual_start", [0]))
        )  # fmt: skip
        sources = []
        for i, c in enumerate(sizes["C"]):
            width = sizes["widths"][i] if "widths" in sizes else starts[i] + c
            dims = (sizes["N"], width, sizes["H"] // factors[i], sizes["W"] // factors[i])
            sources.append(Source(dims, c, starts[i], factors[i]))
        geometry = conv_math.Geometry((sizes["R"], sizes["S"]), **{k: tuple(v) for k, v in attrs.items()})
        residual = None
        if form.view and form.residual:
            rows, columns = (geometry.output_size(i, sizes["HW"[i]]) for i in range(2))
            width = first[0] + sizes["K"] + sizes.get("after", 0)
            residual = Source((sizes["N"], width, rows, columns), sizes["K"], first[0])
        return conv_call.make_call(
            form, sources, outputs or [sum(sizes["C"]) if form.depthwise else sizes["K"]], geometry, dtype, params,
            residual=residual, image_dtype=sizes.get("image", ""),
        )  # fmt: skip

    def operands(self, call: Call, rng: np.random.Generator) -> list[np.ndarray]:
        form, attrs = conv_form.form_of(call.op_type), dict[str, Any](call.attrs)
        values = [rng.standard_normal(t.dims) for t in call.inputs]
        channels, shape, filters = attrs["channels"], attrs["kernel_shape"], call.inputs[form.sources + 1].dims[0]
        seen = 1 if form.depthwise else sum(channels)
        w = rng.standard_normal((filters, seen, *shape)) / math.sqrt(seen * math.prod(shape))
        values[form.sources] = conv_math.pack_depthwise(w) if form.depthwise else conv_math.pack(w, channels, form)
        return values

    def reference(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        return conv_math.finish(call, conv_math.convolve(call, operands), operands)

    def magnitude(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        absolute = [np.abs(o) for o in operands]
        added = conv_math.added(call, absolute) if conv_form.form_of(call.op_type).residual else 0
        return conv_math.split_channels(call, conv_math.convolve(call, absolute) + added)

    def cost(self, call: Call) -> Cost:
        form, attrs = conv_form.form_of(call.op_type), dict[str, Any](call.attrs)
        tensors = (*call.inputs, *call.outputs)
        counts = list(map(elements, tensors))
        for i, (tensor, channels) in enumerate(zip(call.inputs, attrs["channels"], strict=False)):
            counts[i] = counts[i] // max(1, tensor.dims[1]) * channels  # of a wider tensor, the channels read
        y = sum(counts[form.inputs :])
        if form.residual:
            counts[form.inputs - 1] = y  # of a wider tensor, the channels read
        sizes = [n * ELEMENT_BYTES[t.dtype] for n, t in zip(counts, tensors, strict=True)]
        seen = 1 if form.depthwise else sum(attrs["channels"])
        return Cost(2 * y * seen * math.prod(attrs["kernel_shape"]), sum(sizes))

    def title(self, call: Call) -> str:
        form, attrs = conv_form.form_of(call.op_type), dict[str, Any](call.attrs)
        r, s = attrs["kernel_shape"]
        sources = [str(source) for source in conv_call.sources_of(call)]
        outputs = "|".join(str(t.dims[1]) for t in call.outputs)
        size = "x".join("?" if d < 0 else str(d) for d in call.outputs[0].dims[2:])
        tail = {BEFORE: f"add {form.suffix}".strip(), AFTER: f"{form.suffix} add", "": form.suffix or "linear"}
        before = "relu " if form.pre_activated else "depthwise " if form.depthwise else ""
        outputs += f" over {form.spread}x{form.spread}" if form.spread > 1 else ""
        return f"{before}{'+'.join(sources)}->{outputs} {r}x{s} @{size} {tail[form.residual]}"


OPERATOR = ConcatConv()
