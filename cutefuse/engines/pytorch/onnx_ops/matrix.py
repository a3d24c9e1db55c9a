"""Matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.node import Node, Run, operator


@operator("Gemm")
def gemm(node: Node) -> Run:
    alpha, beta = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    ta, tb, biased = node.attr("transA", 0), node.attr("transB", 0), node.has(2)
    if alpha == 1.0 and beta == 1.0 and tb and biased and node.rank(2) == 1:
        return lambda a, b, c: F.linear(a.t() if ta else a, b, c)

    def run(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        a, b = a.t() if ta else a, b.t() if tb else b
        if c is not None:
            return torch.addmm(c, a, b, beta=beta, alpha=alpha)
        y = torch.mm(a, b)
        return y if alpha == 1.0 else y * alpha

    return run


@operator("Einsum")
def einsum(node: Node) -> Run:
    equation = node.attr("equation", "").replace(" ", "")
    return lambda *xs: torch.einsum(equation, *xs)
