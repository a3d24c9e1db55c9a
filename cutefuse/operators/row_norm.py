"""RMSNorm and LayerNorm over the last axis, with the Add before them when its result is needed too."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from onnx import FunctionProto

from cutefuse.graph.body import Body
from cutefuse.kernels import Call
from cutefuse.operators import norm_math
from cutefuse.operators.op import Case, Cost, FusedOp, body_of

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


class RowNorm(FusedOp):
    stem = "row_norm"

    def function(
        self, op_type: str, opset: int, dtype: str, calls: Sequence[Call] = (), positive: Collection[int] = ()
    ) -> FunctionProto:  # fmt: skip
        layer, residual = norm_math.flags_of(op_type)
        body = body_of(opset, dtype, calls)
        names = ["x", *(["residual"] if residual else []), "gamma", *(["beta"] if layer else [])]
        formals = [body.formal(n) for n in names]
        # TensorRT's parser takes the operator's epsilon as a number alone.
        operator = layer and opset >= 17 and body.agreed("epsilon") is not None
        # It adds up in float32 by itself, where it is to be had in the type of all inputs.
        alike = operator and dtype != "bfloat16" and {t.dtype for c in calls for t in c.inputs} == {dtype}
        wide = dict(zip(names, formals if alike else (body.add("Cast", f, to=1) for f in formals), strict=True))
        total = body.add("Add", wide["x"], wide["residual"]) if residual else wide["x"]
        if operator:
            wires, refs = (total, wide["gamma"], wide["beta"]), {"epsilon": "epsilon"}
            y = body.add("LayerNormalization", *wires, refs=refs, axis=-1)
        else:
            centred = body.add("Sub", total, self._mean(body, total)) if layer else total
            variance = self._mean(body, body.add("Mul", centred, centred))
            deviation = body.add("Sqrt", body.add("Add", variance, body.float_attr("epsilon")))
            scaled = body.add("Mul", body.add("Div", centred, deviation), wide["gamma"])
            y = body.add("Add", scaled, wide["beta"]) if layer else scaled
        made = [y, total][: 1 + residual]
        outputs = made if alike else [body.cast_like(value, formals[0]) for value in made]
        return body.finish(op_type, formals, outputs, ["epsilon"])

    @staticmethod
    def _mean(body: Body, value: str) -> str:
        if body.opset >= 18:
            return body.add("ReduceMean", value, body.constant([-1]), keepdims=1)
        return body.add("ReduceMean", value, axes=[-1], keepdims=1)

    def cases(self) -> list[Case]:
        return norm_math.cases()

    def call(self, case: Case, dtype: str) -> Call:
        return norm_math.call_of(case, dtype)

    def operands(self, call: Call, rng: np.random.Generator) -> list[np.ndarray]:
        return [rng.standard_normal(t.dims) for t in call.inputs]

    def reference(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        return norm_math.reference(call, operands)

    def magnitude(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        return norm_math.magnitude(call, operands)

    def tolerance(self, dtype: str) -> float:
        return {"float32": 2e-4, "float16": 1e-2, "bfloat16": 6e-2}[dtype]

    def cost(self, call: Call) -> Cost:
        sizes = [math.prod(max(1, d) for d in t.dims) for t in (*call.inputs, *call.outputs)]
        bytes_moved = sum(n * SIZES[t.dtype] for n, t in zip(sizes, (*call.inputs, *call.outputs), strict=True))
        layer, residual = norm_math.flags_of(call.op_type)
        return Cost(sizes[0] * (4 + 4 * layer + residual), bytes_moved)

    def title(self, call: Call) -> str:
        shape = "x".join("?" if d < 0 else str(d) for d in call.inputs[0].dims)
        layer, residual = norm_math.flags_of(call.op_type)
        return f"{'Add' if residual else ''}{'LayerNorm' if layer else 'RMSNorm'} {shape}"


OPERATOR = RowNorm()
