"""What the operators' finders answer about a place in a graph: a match, a refusal, or nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from onnx import NodeProto

from cutefuse.graph.read import Graph
from cutefuse.kernels import Call
from cutefuse.match.qdq import CUSTOM, QUANTIZE
from cutefuse.operators.op import FusedOp


@dataclass(frozen=True)
class Constant:
    """An operand that the rewriter adds to the model as an initializer; `make` reads and packs it only when needed."""

    suffix: str  # of the initializer's name: "<node name>.<suffix>"
    dims: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray] = field(compare=False)
    typed: bool = False  # stored in the activation type, also after a conversion


@dataclass(frozen=True)
class Quantized:
    """An operand that is a float tensor of the graph, quantised by nodes that the rewriter adds.

    number: the name of the number type. cast: the float type that it is cast to before, "" for its own. custom: by
    TensorRT's own node, whose type is float8 without a zero point.
    """

    tensor: str
    scale: str
    zero_point: str
    number: str
    cast: str
    custom: bool

    @property
    def op_types(self) -> tuple[str, ...]:
        """Of the nodes that are added."""
        quantiser = CUSTOM[QUANTIZE] if self.custom else QUANTIZE
        return ("Cast", quantiser) if self.cast else (quantiser,)


@dataclass(frozen=True)
class Joined:
    """An operand that is a Concat of tensors along the channels, by a node that the rewriter adds and sites share."""

    tensors: tuple[str, ...]


Operand = str | Constant | Quantized | Joined


def tensors_of(operand: Operand) -> tuple[str, ...]:
    """The tensors of the graph that hold an operand; those that only say how to quantise it are not among them."""
    if isinstance(operand, str):
        return (operand,)
    if isinstance(operand, Joined):
        return operand.tensors
    return (operand.tensor,) if isinstance(operand, Quantized) else ()


@dataclass(frozen=True)
class Match:
    """A site that computes exactly what `call` computes.

    nodes: the nodes it replaces, anchor first; each is removed when nothing else needs its outputs.
    inputs: tensor names of the graph, constants to add, tensors to quantise or to join, in the operator's order.
    outputs: tensor names that the new node produces in their stead; "" for one that the graph does not use.
    call: shapes (-1 unknown), types, layouts and every attribute; what `kernels.reject` is asked.
    stored: tensors that engines write and read once where the match is not fused -> bytes of an element.
    takes: what the match fuses beyond the operator's plain form ('upsample', ...); `--without` names it.
    otherwise: the next smaller match of the same site, used where this one is impossible.
    notes: sentences about what was left outside, and why.
    """

    call: Call
    nodes: tuple[NodeProto, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[str, ...]
    stored: Mapping[str, int] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()
    otherwise: Match | None = None
    notes: tuple[str, ...] = ()

    @property
    def chain(self) -> tuple[Match, ...]:
        """The match and its smaller ones, the largest first."""
        return (self, *(self.otherwise.chain if self.otherwise else ()))

    @cached_property
    def read(self) -> tuple[str, ...]:
        """The tensors of the graph that hold its inputs, in their order."""
        return tuple(t for operand in self.inputs for t in tensors_of(operand))


@dataclass(frozen=True)
class Refusal:
    """A site that looks like the operator's and must stay as it is. One sentence: given, allowed, what to do."""

    reason: str
    nodes: tuple[NodeProto, ...] = ()


class Finder(ABC):
    """Finds the sites of one operator. It does not judge legality: callers ask `kernels.reject`."""

    op: FusedOp
    anchors: frozenset[str]  # op_types at which `match` is tried, standard domain or not

    # Whether a smaller match with tiles of the GPU's own generation beats a larger one without them: true where
    # arithmetic bounds the work, false where memory traffic does.
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
