"""RMSNorm and LayerNorm over the last axis, with the Add before them when its result is needed too."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from onnx import FunctionProto

from cutefuse import kernels
from cutefuse.graph.body import Body
from cutefuse.kernels import Call, Tensor
from cutefuse.operators.op import Case, Cost, FusedOp, body_of, elements, moved_bytes

PROBLEMS: dict[str, dict[str, Any]] = {
    "bert": {"leading": (2, 7), "columns": 768},
    "llama": {"leading": (1, 5), "columns": 4096},
    "one column": {"leading": (3,), "columns": 1},
    "vector": {"leading": (), "columns": 96},
    "odd": {"leading": (2, 3, 5), "columns": 77},
    "no rows": {"leading": (0, 4), "columns": 64},
    "float32 parameters": {"leading": (9,), "columns": 256, "float32_parameters": 1},
    "long": {"leading": (2,), "columns": 40000},
}


@functools.cache
def op_types() -> dict[tuple[bool, bool], str]:
    """(LayerNorm, with a residual) -> op_type, as the library describes them."""
    (op,) = (op for op in kernels.describe()["ops"] if op["name"] == RowNorm.stem)
    return {(v["layer"], v["residual"] is not None): v["op_type"] for v in op["variants"]}


def flags_of(op_type: str) -> tuple[bool, bool]:
    """(LayerNorm, with a residual) of an op_type. Raises KernelError for one that the library does not have."""
    facts = kernels.facts(op_type)
    return facts["layer"], facts["residual"] is not None


def make_call(
    dims: tuple[int, ...], layer: bool, residual: bool, epsilon: float, dtype: str, param: str, columns: int
) -> Call:
    """The call of a norm over the last of `dims`, whose parameters are of type `param`."""
    x, vector = Tensor(dims, dtype), Tensor((columns,), param)
    inputs = [x] * (1 + residual) + [vector] * (1 + layer)
    return Call(op_types()[layer, residual], inputs, [x] * (1 + residual), {"epsilon": [epsilon]})


class RowNorm(FusedOp):
    stem = "row_norm"

    def function(
        self, op_type: str, opset: int, dtype: str, calls: Sequence[Call] = (), positive: Collection[int] = ()
    ) -> FunctionProto:  # fmt: skip
        layer, residual = flags_of(op_type)
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
        found = [
            Case(f"{op_type}: {name}", op_type, sizes)
            for op_type in op_types().values()
            for name, sizes in PROBLEMS.items()
        ]
        return [*found, Case("large epsilon", op_types()[False, False], PROBLEMS["bert"], {"epsilon": [0.5]})]

    def call(self, case: Case, dtype: str) -> Call:
        sizes: dict[str, Any] = dict(case.sizes)
        param = "float32" if sizes.get("float32_parameters") else dtype
        epsilon: Any = case.attrs.get("epsilon", [1e-5])
        dims = (*sizes["leading"], sizes["columns"])
        return make_call(dims, *flags_of(case.op_type), epsilon[0], dtype, param, sizes["columns"])

    def operands(self, call: Call, rng: np.random.Generator) -> list[np.ndarray]:
        return [rng.standard_normal(t.dims) for t in call.inputs]

    def reference(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        s, mean, scale, gamma, beta = self._parts(call, operands)
        return [(s - mean) * scale * gamma + beta, s][: len(call.outputs)]

    def magnitude(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        _, mean, scale, gamma, beta = self._parts(call, operands)
        spread = np.abs(operands[0]) + (np.abs(operands[1]) if len(call.outputs) == 2 else 0.0)
        return [(spread + np.abs(mean)) * scale * np.abs(gamma) + np.abs(beta), spread][: len(call.outputs)]

    @staticmethod
    def _parts(call: Call, operands: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """(sum, mean, 1 / deviation, gamma, beta)."""
        layer, residual = flags_of(call.op_type)
        epsilon: Any = call.attrs["epsilon"]
        s = operands[0] + operands[1] if residual else operands[0]
        gamma = operands[1 + residual]
        mean = s.mean(-1, keepdims=True) if layer else np.zeros((*s.shape[:-1], 1))
        variance = np.square(s - mean).mean(-1, keepdims=True)
        return s, mean, 1 / np.sqrt(variance + epsilon[0]), gamma, operands[-1] if layer else np.zeros_like(gamma)

    def cost(self, call: Call) -> Cost:
        layer, residual = flags_of(call.op_type)
        return Cost(elements(call.inputs[0]) * (4 + 4 * layer + residual), moved_bytes(call))

    def title(self, call: Call) -> str:
        shape = "x".join("?" if d < 0 else str(d) for d in call.inputs[0].dims)
        layer, residual = flags_of(call.op_type)
        return f"{'Add' if residual else ''}{'LayerNorm' if layer else 'RMSNorm'} {shape}"


OPERATOR = RowNorm()
