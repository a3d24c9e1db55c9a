"""RMSNorm and LayerNorm over the last axis, with the Add before them when its result is needed too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import FunctionProto, NodeProto

from cutefuse import norm_math, norm_site
from cutefuse.body import Body
from cutefuse.graph import Graph
from cutefuse.kernels import Call
from cutefuse.ops.op import Case, Constant, Cost, FusedOp, Match, Refusal

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


class RowNorm(FusedOp):
    stem = "row_norm"
    anchors = frozenset({"ReduceMean", *norm_site.SINGLE})

    def match(self, graph: Graph, node: NodeProto) -> Match | Refusal | None:
        norm = norm_site.find(graph, node)
        if norm is None or isinstance(norm, Refusal):
            return norm
        found = self._match(graph, norm)
        if isinstance(found, Match) and norm.total is not None:  # another operator may want the Add for itself
            alone = replace(norm, total=None, nodes=tuple(n for n in norm.nodes if n is not norm.total))
            smaller = self._match(graph, alone)
            found = replace(found, otherwise=smaller if isinstance(smaller, Match) else None)
        return found

    def _match(self, graph: Graph, norm: norm_site.Norm) -> Match | Refusal:
        dtype, dims = graph.dtype(norm.x), graph.dims(norm.x)
        if dtype not in self.dtypes or graph.dtype(norm.y) not in (dtype, None):
            return Refusal(f"the norm of {dtype} into {graph.dtype(norm.y)} is not supported; both must be one of "
                           f"{', '.join(self.dtypes)}", norm.nodes)  # fmt: skip
        if not dims or dims[-1] < 0:
            return Refusal("the size of the last axis is unknown; set the shapes of the model's inputs", norm.nodes)
        columns = dims[-1]
        param = graph.dtype(norm.gamma or norm.beta) or "float32"
        parameters: list[str | Constant] = []
        for name, tensor, fill in (("gamma", norm.gamma, 1.0), ("beta", norm.beta, 0.0))[: 1 + norm.layer]:
            if tensor and graph.dims(tensor) == (columns,) and graph.dtype(tensor) == param:
                parameters.append(tensor)
                continue
            if tensor and not (graph.is_constant(tensor) and math.prod(graph.dims(tensor) or (0,)) in (1, columns)):
                return Refusal(f"{name} '{tensor}' is {graph.dtype(tensor)} {graph.dims(tensor)}; it must be a vector "
                               f"of {columns}, all parameters of one type", norm.nodes)  # fmt: skip

            def make(tensor: str = tensor, fill: float = fill) -> np.ndarray:
                return norm_site.parameter_values(graph, tensor, columns, param, fill)

            parameters.append(Constant(name, (columns,), param, make))
        call = norm_math.make_call(dims, norm.layer, norm.total is not None, norm.epsilon, dtype, param, columns)
        inputs: tuple[str | Constant, ...] = (norm.x, *parameters)
        outputs: tuple[str, ...] = (norm.y,)
        if norm.total is not None:
            needed = graph.escapes(norm.x) or any(u not in norm.nodes for u in graph.users(norm.x))
            inputs, outputs = (*norm.total.input, *parameters), (norm.y, norm.x if needed else "")
        whole = math.prod(max(1, d) for d in dims)
        made = [o for n in norm.nodes for o in n.output if o and o not in outputs]
        wide = [o for o in made if (graph.dims(o) or ())[-1:] == (columns,)]
        saved = {o: 2 * whole * SIZES.get(graph.dtype(o) or dtype, 4) for o in wide}
        return Match(call, norm.nodes, inputs, outputs, saved)

    def function(self, op_type: str, opset: int, dtype: str) -> FunctionProto:
        layer, residual = norm_math.FLAGS[op_type]
        body = Body(opset, dtype)
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
        layer, residual = norm_math.FLAGS[call.op_type]
        return Cost(sizes[0] * (4 + 4 * layer + residual), bytes_moved)

    def title(self, call: Call) -> str:
        shape = "x".join("?" if d < 0 else str(d) for d in call.inputs[0].dims)
        return f"{call.op_type.removeprefix('Cute')} {shape}"


OPERATOR = RowNorm()
