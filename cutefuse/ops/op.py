"""The Python half of an operator: what the rewriter, the tests and the reports ask of it.

One file per operator in this folder: it defines a subclass of `FusedOp` and one instance named `OPERATOR`. Its stem is
that of cutlass_kernels/<stem>/ and plugins/<stem>.cpp. Legality is not here: the rewriter asks `kernels.reject`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, NodeProto, helper

from cutefuse.graph import Graph
from cutefuse.kernels import Call

DOMAIN = "cutefuse"
PLUGIN_VERSION = "1"
FORMAL = "__cutefuse_"  # prefix of every name inside a body: old TensorRT parsers mix them up with outer tensors

AttrValues = Mapping[str, Sequence[int] | Sequence[float]]


@dataclass(frozen=True)
class Constant:
    """An operand that the rewriter adds to the model as an initializer; `make` reads and packs it only when needed."""

    suffix: str  # of the initializer's name: "<node name>.<suffix>"
    dims: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray] = field(compare=False)
    typed: bool = False  # stored in the activation type, whatever that becomes


@dataclass(frozen=True)
class Quantized:
    """An operand that is a float tensor of the graph, quantised to int8 by a node that the rewriter adds."""

    tensor: str
    scale: str
    zero_point: str


@dataclass(frozen=True)
class Match:
    """A site that computes exactly what `call` computes.

    nodes: the nodes it replaces, anchor first; each is removed when nothing else needs its outputs.
    inputs: tensor names of the graph, constants to add, or tensors to quantise, in the operator's order.
    outputs: tensor names that the new node produces in their stead; "" for one that the graph does not use.
    call: shapes (-1 unknown), types, layouts and every attribute; what `kernels.reject` is asked.
    bytes_saved: intermediate tensor -> bytes of traffic that end when the graph no longer computes it.
    takes: what the match takes in beyond the operator's plain form ('upsample', ...); `--without` names it.
    otherwise: the next smaller match of the same site, for where this one cannot be had.
    notes: sentences about what was left outside, and why.
    """

    call: Call
    nodes: tuple[NodeProto, ...]
    inputs: tuple[str | Constant | Quantized, ...]
    outputs: tuple[str, ...]
    bytes_saved: Mapping[str, int] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()
    otherwise: Match | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A site that looks like the operator's and must stay as it is. One sentence: given, allowed, what to do."""

    reason: str
    nodes: tuple[NodeProto, ...] = ()


@dataclass(frozen=True)
class Case:
    """A problem for tests and benchmarks over all operators; `FusedOp.call` turns it into a Call of a given type."""

    name: str
    op_type: str
    sizes: Mapping[str, int | Sequence[int]]  # in the operator's own letters: N H W C K R S, or rows and columns
    attrs: AttrValues = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")  # in which the problem is legal


@dataclass(frozen=True)
class Cost:
    """What a call must do at least: multiply-adds count as two flops; bytes are one read or write of each operand."""

    flops: int
    bytes_moved: int


class FusedOp(ABC):
    """The Python half of one operator."""

    stem: str
    anchors: frozenset[str]  # op_types at which `match` is tried, standard domain or not
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    min_body_opset: int = 9  # ConstantOfShape; older opsets cannot express the unpacking of weights

    # Whether a smaller match with tiles of the GPU's own generation beats a larger one without: so where the work is
    # arithmetic, not where it is traffic.
    own_tiles_first: bool = False

    @abstractmethod
    def match(self, graph: Graph, node: NodeProto) -> Match | Refusal | None:
        """The site around an anchor node: a Match, a Refusal, or None when it is no candidate at all."""

    def merge_key(self, match: Match) -> Hashable | None:
        """Equal for matches that one call may compute together; None for one that must stay alone."""
        return None

    def merge(self, matches: Sequence[Match]) -> list[tuple[list[int], Match]]:
        """Matches of equal key as fewer calls: (positions, one match with their outputs); others stay as they are."""
        return []

    def oldest_opset(self, op_type: str) -> int:
        """The first opset in which `function` can write the body of an op_type."""
        return self.min_body_opset

    @abstractmethod
    def function(self, op_type: str, opset: int, dtype: str) -> FunctionProto:
        """The body of an op_type in standard operators of the given opset, correct for every attribute value.

        From opset 15 on it must not depend on dtype (use CastLike); before that it may cast to dtype.
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

    @abstractmethod
    def tolerance(self, dtype: str) -> float:
        """Largest allowed error, relative to the largest absolute output, of the operator in a network."""

    @abstractmethod
    def cost(self, call: Call) -> Cost:
        """Flops and bytes of a call; unknown sizes count as 1."""

    @abstractmethod
    def title(self, call: Call) -> str:
        """The problem in one short text for tables, e.g. '64+64->64 3x3 @512x512 Relu'."""


def function_proto(
    op_type: str, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[NodeProto], opset: int,
    attrs: Sequence[str],
) -> FunctionProto:  # fmt: skip
    """A local function of our domain that declares the operator's attributes and those of the plugin look-up."""
    declared = [*attrs, "plugin_version", "plugin_namespace"]
    return helper.make_function(
        DOMAIN, op_type, inputs, outputs, nodes, [helper.make_opsetid("", opset)], attributes=declared
    )


def by_reference(node: NodeProto, opset: int, **refs: str) -> NodeProto:
    """Add attributes to a body's node that take the call's attribute values: by_reference(conv, 17, pads="pads")."""
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    for name, source in refs.items():
        kind: Any = schema.attributes[name].type  # an enumeration whose stub lacks its value
        node.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=source, type=kind.value))
    return node
