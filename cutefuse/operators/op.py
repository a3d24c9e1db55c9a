"""The Python half of an operator: what the rewriter, the tests and the reports ask of it.

One file per operator in this folder: it defines a subclass of `FusedOp` and one instance named `OPERATOR`. Its stem is
that of cutlass_kernels/<stem>/ and plugins/<stem>.cpp. Legality is not here: the rewriter asks `kernels.reject`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import FunctionProto

from cutefuse.graph.body import Body
from cutefuse.graph.numbers import ELEMENT_BYTES, FLOAT8, FLOATS, INT8
from cutefuse.kernels import Call, Tensor

AttrValues = Mapping[str, Sequence[int] | Sequence[float]]
# A quantised value at a tie may fall on either side, which is one step: 1/127 of int8's largest value or more, and 1/14
# of float8's. `graph.closeness` allows a step of quantised outputs besides, so that float8 needs no more.
_TOLERANCES = {"float32": 2e-4, "float16": 1e-2, "bfloat16": 6e-2, INT8.name: 2e-2, FLOAT8.name: 2e-2}


@dataclass(frozen=True)
class Case:
    """A problem for tests and benchmarks over all operators; `FusedOp.call` turns it into a Call of a given type."""

    name: str
    op_type: str
    sizes: Mapping[str, int | str | Sequence[int]]  # in the operator's own letters: N H W C K R S, or rows and columns
    attrs: AttrValues = field(default_factory=dict)
    dtypes: tuple[str, ...] = FLOATS  # in which the problem is legal


@dataclass(frozen=True)
class Cost:
    """What a call must do at least: multiply-adds count as two flops; bytes are one read or write of each operand."""

    flops: int
    bytes_moved: int


class FusedOp(ABC):
    """The Python half of one operator."""

    stem: str
    dtypes: tuple[str, ...] = FLOATS
    min_body_opset: int = 9  # ConstantOfShape; older opsets cannot express the unpacking of weights

    def oldest_opset(self, op_type: str, dtype: str = "") -> int:
        """The first opset in which `function` can write the body of an op_type for sources of a type."""
        return self.min_body_opset

    def must_agree(self, opset: int) -> tuple[str, ...]:
        """Attributes that must be equal in all calls that one body serves in the given opset."""
        return ()

    @abstractmethod
    def function(
        self, op_type: str, opset: int, dtype: str, calls: Sequence[Call] = (), positive: Collection[int] = ()
    ) -> FunctionProto:  # fmt: skip
        """The body of an op_type in standard operators of the given opset, right for all these calls.

        What the calls agree in may be written as numbers; with no calls the body is right for every attribute value
        that `must_agree` leaves free. From opset 15 on it may rely on dtype only where every call has it (else
        CastLike); before that it may cast to dtype. `positive` are the inputs that hold positive numbers in every call.
        """

    @abstractmethod
    def cases(self) -> list[Case]:
        """Legal problems: models' shapes, odd, tiny, empty; every op_type at least once."""

    @abstractmethod
    def call(self, case: Case, dtype: str) -> Call:
        """The case as a call without data: dims, types, layouts, all attributes."""

    @abstractmethod
    def operands(self, call: Call, rng: np.random.Generator) -> list[np.ndarray]:
        """Logical float64 values for every input of the call, in order (packed where the operator wants packed)."""

    @abstractmethod
    def reference(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs in float64 on the CPU."""

    @abstractmethod
    def magnitude(self, call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per output element the sum of the absolute values that went into it: the scale of its rounding error."""

    def tolerance(self, dtype: str) -> float:
        """Largest allowed error, relative to the largest absolute output, of the operator in a network."""
        return _TOLERANCES[dtype]

    @abstractmethod
    def cost(self, call: Call) -> Cost:
        """Flops and bytes of a call; unknown sizes count as 1."""

    @abstractmethod
    def title(self, call: Call) -> str:
        """The problem in one short text for tables, e.g. '64+64->64 3x3 @512x512 Relu'."""


def elements(t: Tensor) -> int:
    """The numbers of a tensor; unknown sizes count as 1."""
    return math.prod(max(1, d) for d in t.dims)


def moved_bytes(call: Call) -> int:
    """One read of each input and one write of each output."""
    return sum(elements(t) * ELEMENT_BYTES[t.dtype] for t in (*call.inputs, *call.outputs))


def body_of(opset: int, dtype: str, calls: Sequence[Call]) -> Body:
    """An empty body for these calls; without a type of its own where CastLike has to tell float32 from float16."""
    one_type = opset < 15 or {call.dtype for call in calls} == {dtype}
    return Body(opset, dtype if one_type else "", [call.attrs for call in calls])
