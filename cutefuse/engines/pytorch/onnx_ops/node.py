"""What an operator knows about its node, and the table of operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from torch import Tensor

from cutefuse.errors import CutefuseError

# A function over the tensor inputs of a node, or its results where they are known already.
Run = Callable[..., Any]
Build = Callable[["Node"], Run | Tensor]

_HELD = "FLOAT DOUBLE FLOAT16 BFLOAT16 FLOAT8E4M3FN FLOAT8E5M2 INT8 INT16 INT32 INT64 UINT8 BOOL"
DTYPES: dict[int, torch.dtype] = {  # NumPy and PyTorch name their types alike
    number: getattr(torch, onnx.helper.tensor_dtype_to_np_dtype(number).name)
    for number in map(onnx.TensorProto.DataType.Value, _HELD.split())
}


class UnsupportedError(CutefuseError):
    """A node that this back end cannot run, named in one sentence."""


def dtype_of(elem_type: int, where: str) -> torch.dtype:
    """The PyTorch type of an ONNX element type. Raises UnsupportedError for one that PyTorch cannot compute with."""
    if elem_type not in DTYPES:
        name = onnx.TensorProto.DataType.Name(elem_type) if elem_type else "unknown"
        raise UnsupportedError(f"{where} has element type {name}, which the PyTorch back end does not hold; cast it")
    return DTYPES[elem_type]


@dataclass
class Node:
    """One node at load. A tensor on the CPU is a known value; one on the device `meta` has only shape and type."""

    name: str
    op_type: str
    opset: int
    attrs: dict[str, Any]
    inputs: list[Tensor | None]
    outputs: int
    extra: list[Tensor] = field(default_factory=list)  # constants that the operator adds behind its inputs

    def refuse(self, reason: str) -> UnsupportedError:
        return UnsupportedError(f"{self.op_type} '{self.name}': {reason}")

    def attr(self, name: str, default: Any) -> Any:
        value = self.attrs.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    def tensor(self, index: int) -> Tensor:
        """Shape and type of an input that must be there."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None:
            raise self.refuse(f"input {index} is missing; repair the model")
        return found

    def shape(self, index: int) -> list[int]:
        return list(self.tensor(index).shape)

    def rank(self, index: int) -> int:
        return self.tensor(index).dim()

    def known(self, index: int) -> Tensor:
        """The value of an input that determines shapes and has to be known when the model is loaded."""
        found = self.tensor(index)
        if found.device.type == "meta":
            raise self.refuse(
                f"input {index} is computed from data, but must be known when the model is loaded (a CUDA graph has "
                "fixed shapes); make it a constant"
            )
        return found

    def ints(self, index: int) -> list[int]:
        return [int(v) for v in self.known(index).flatten().tolist()]

    def floats(self, index: int) -> list[float]:
        return [float(v) for v in self.known(index).flatten().tolist()]

    def number(self, index: int) -> float:
        """The value of an input with one element."""
        values = self.floats(index)
        if len(values) != 1:
            raise self.refuse(f"input {index} has {len(values)} elements; it must have one")
        return values[0]

    def axis(self, value: int, rank: int) -> int:
        """An axis counted from the front. Raises UnsupportedError when there is no such axis."""
        if not -rank <= value < max(rank, 1):
            raise self.refuse(f"axis {value} does not exist in rank {rank}; repair the model")
        return value % max(rank, 1)

    def axes(self, index: int, default: Sequence[int] | None, rank: int, tensor_since: int) -> list[int] | None:
        """Axes from an input (since an opset) or from the attribute `axes` (before), counted from the front."""
        if self.opset >= tensor_since:
            found = self.ints(index) if self.has(index) else default
        else:
            found = self.attr("axes", default)
        return None if found is None else [self.axis(a, rank) for a in found]

    def constant(self, value: Tensor) -> None:
        """Add a constant that the function receives behind the inputs."""
        self.extra.append(value)


@dataclass(frozen=True)
class Operator:
    """`host`: inputs whose values are read at load and not given to the function; `filters`: inputs that a
    convolution wants in channels-last memory."""

    build: Build
    host: tuple[int, ...] = ()
    filters: tuple[int, ...] = ()


TABLE: dict[str, Operator] = {}


def operator(*op_types: str, host: Sequence[int] = (), filters: Sequence[int] = ()) -> Callable[[Build], Build]:
    """Enter a function into the table of operators of the standard domain."""

    def enter(build: Build) -> Build:
        for op_type in op_types:
            TABLE[op_type] = Operator(build, tuple(host), tuple(filters))
        return build

    return enter


def broadcastable(shape: Sequence[int], into: Sequence[int]) -> bool:
    """Whether a tensor of `shape` broadcasts to `into` without enlarging it."""
    return len(shape) <= len(into) and all(a in (1, b) for a, b in zip(shape[::-1], into[::-1], strict=False))


def elements(shape: Sequence[int]) -> int:
    return math.prod(shape)
