"""Row norms as numbers: their calls, their cases, and the float64 reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cutefuse import kernels
from cutefuse.kernels import Call, Tensor
from cutefuse.operators.op import Case

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
    (op,) = (op for op in kernels.describe()["ops"] if op["name"] == "row_norm")
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


def cases() -> list[Case]:
    """Every op_type at the shapes of models and at odd, tiny and empty ones."""
    found = [
        Case(f"{op_type}: {name}", op_type, sizes)
        for op_type in op_types().values()
        for name, sizes in PROBLEMS.items()
    ]
    return [*found, Case("large epsilon", op_types()[False, False], PROBLEMS["bert"], {"epsilon": [0.5]})]


def call_of(case: Case, dtype: str) -> Call:
    """A case as a call; parameters in the activation type unless the case says float32."""
    sizes: dict[str, Any] = dict(case.sizes)
    param = "float32" if sizes.get("float32_parameters") else dtype
    epsilon: Any = case.attrs.get("epsilon", [1e-5])
    dims = (*sizes["leading"], sizes["columns"])
    return make_call(dims, *flags_of(case.op_type), epsilon[0], dtype, param, sizes["columns"])


def _parts(call: Call, operands: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """(sum, mean, 1 / deviation, gamma, beta)."""
    layer, residual = flags_of(call.op_type)
    epsilon: Any = call.attrs["epsilon"]
    s = operands[0] + operands[1] if residual else operands[0]
    gamma = operands[1 + residual]
    mean = s.mean(-1, keepdims=True) if layer else np.zeros((*s.shape[:-1], 1))
    variance = np.square(s - mean).mean(-1, keepdims=True)
    return s, mean, 1 / np.sqrt(variance + epsilon[0]), gamma, operands[-1] if layer else np.zeros_like(gamma)


def reference(call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(y) or (y, sum) in the type of the operands."""
    s, mean, scale, gamma, beta = _parts(call, operands)
    return [(s - mean) * scale * gamma + beta, s][: len(call.outputs)]


def magnitude(call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Per output element the sum of the absolute values that went into it."""
    _, mean, scale, gamma, beta = _parts(call, operands)
    spread = np.abs(operands[0]) + (np.abs(operands[1]) if len(call.outputs) == 2 else 0.0)
    return [(spread + np.abs(mean)) * scale * np.abs(gamma) + np.abs(beta), spread][: len(call.outputs)]
