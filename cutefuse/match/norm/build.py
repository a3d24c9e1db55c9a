"""Turns the norm around a node into a call of the operator, with the Add before it where the sum is needed too."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from onnx import NodeProto

from cutefuse.graph.numbers import ELEMENT_BYTES
from cutefuse.graph.read import Graph
from cutefuse.match.answer import Constant, Finder, Match, Refusal
from cutefuse.match.norm import read as norm_facts
from cutefuse.operators import row_norm


class NormSites(Finder):
    """Norms over the last axis."""

    op = row_norm.OPERATOR
    anchors = frozenset({"ReduceMean", *norm_facts.SINGLE, *norm_facts.OF_PIXELS})

    def match(self, graph: Graph, node: NodeProto) -> Match | Refusal | None:
        norm = norm_facts.find(graph, node)
        if norm is None or isinstance(norm, Refusal):
            return norm
        alone = replace(norm, total=None, nodes=tuple(n for n in norm.nodes if n is not norm.total))
        if norm.total is not None and norm.x in graph.behind(filter(None, (norm.gamma, norm.beta))):
            norm = alone  # the fused node would wait for a parameter that is computed from the sum that it makes
        found = self._match(graph, norm)
        if isinstance(found, Match) and norm.total is not None:  # another operator may want the Add for itself
            smaller = self._match(graph, alone)
            found = replace(found, otherwise=smaller if isinstance(smaller, Match) else None)
        return found

    def _match(self, graph: Graph, norm: norm_facts.Norm) -> Match | Refusal:
        dtype, dims = graph.dtype(norm.x), graph.dims(norm.x)
        if dtype not in self.op.dtypes or graph.dtype(norm.y) not in (dtype, None):
            return Refusal(f"the norm of {dtype} into {graph.dtype(norm.y)} is not supported; both must be one of "
                           f"{', '.join(self.op.dtypes)}", norm.nodes)  # fmt: skip
        columns = norm_facts.columns(graph, norm)
        if columns < 0:
            return Refusal("the size of the last axis is unknown; set the shapes of the model's inputs", norm.nodes)
        dims = dims or (-1, columns)  # of unknown rank: any number of rows
        param = graph.dtype(norm.gamma or norm.beta) or "float32"
        parameters: list[str | Constant] = []
        for name, tensor, fill in (("gamma", norm.gamma, 1.0), ("beta", norm.beta, 0.0))[: 1 + norm.layer]:
            vector = graph.dims(tensor) == (columns,) and graph.dtype(tensor) == param
            if tensor and vector and tensor not in graph.evaluated:
                parameters.append(tensor)
                continue
            if tensor and not (graph.is_constant(tensor) and math.prod(graph.dims(tensor) or (0,)) in (1, columns)):
                return Refusal(f"{name} '{tensor}' is {graph.dtype(tensor)} {graph.dims(tensor)}; it must be a vector "
                               f"of {columns}, all parameters of one type", norm.nodes)  # fmt: skip

            def make(tensor: str = tensor, fill: float = fill) -> np.ndarray:
                return norm_facts.parameter_values(graph, tensor, columns, param, fill)

            parameters.append(Constant(name, (columns,), param, make))
        call = row_norm.make_call(dims, norm.layer, norm.total is not None, norm.epsilon, dtype, param, columns)
        inputs: tuple[str | Constant, ...] = (norm.x, *parameters)
        outputs: tuple[str, ...] = (norm.y,)
        if norm.total is not None:
            needed = graph.escapes(norm.x) or any(u not in norm.nodes for u in graph.users(norm.x))
            inputs, outputs = (*norm.total.input, *parameters), (norm.y, norm.x if needed else "")
        made = [o for n in norm.nodes for o in n.output if o and o not in outputs]
        wide = [o for o in made if norm_facts.last_size(graph, o) == columns]
        stored = {o: ELEMENT_BYTES.get(graph.dtype(o) or dtype, 4) for o in wide}
        return Match(call, norm.nodes, inputs, outputs, stored)
