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
        wide = dict(zip(names, (body.add("Cast", f, to=1) for f in formals), strict=True))  # 1: float32
        total = body.add("Add", wide["x"], wide["residual"]) if residual else wide["x"]
        centred = body.add("Sub", total, self._mean(body, total)) if layer else total
        variance = self._mean(body, body.add("Mul", centred, centred))
        deviation = body.add("Sqrt", body.add("Add", variance, body.float_attr("epsilon")))
        scaled = body.add("Mul", body.add("Div", centred, deviation), wide["gamma"])
        y = body.add("Add", scaled, wide["beta"]) if layer else scaled
        outputs = [body.cast_like(y, formals[0])] + ([body.cast_like(total, formals[0])] if residual else [])
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
