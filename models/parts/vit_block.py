"""A pre-norm Vision Transformer block: LayerNormalization, attention and MLP, without any convolution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from models.net import Config, Net


def build(config: Config) -> Any:
    """197 tokens of 768 numbers, 12 heads; small: 17 tokens of 64, 4 heads."""
    tokens, width, heads = (17, 64, 4) if config.small else (197, 768, 12)
    net = Net("vit_block", config)
    x = net.tokens("x", tokens, width)

    def linear(y: str, filters: int, name: str) -> str:
        w = net.rng.standard_normal((net.channels[y], filters)) / math.sqrt(net.channels[y])
        y = net.add("MatMul", [y, net.weight(f"{name}.weight", w)], f"/{name}/MatMul", filters)
        return net.add("Add", [y, net.weight(f"{name}.bias", 0.1 * net.rng.standard_normal(filters))], f"/{name}/Add")

    def norm(y: str, name: str) -> str:
        gamma = net.weight(f"{name}.weight", net.rng.uniform(0.5, 1.5, width))
        beta = net.weight(f"{name}.bias", 0.1 * net.rng.standard_normal(width))
        return net.add("LayerNormalization", [y, gamma, beta], f"/{name}/LayerNormalization", axis=-1, epsilon=1e-6)

    def split_heads(y: str, name: str, perm: list[int]) -> str:
        shape = net.weight(f"{name}.shape", np.array([0, tokens, heads, width // heads]), "int64")
        return net.add(
            "Transpose", [net.add("Reshape", [y, shape], f"/{name}/Reshape")], f"/{name}/Transpose", perm=perm
        )

    y = norm(x, "norm1")
    q, k, v = (
        split_heads(linear(y, width, f"attn.{n}"), f"attn.{n}", p)
        for n, p in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
    )
    scale = net.weight("attn.scale", np.array(1 / math.sqrt(width // heads)))
    scores = net.add("Mul", [net.add("MatMul", [q, k], "/attn/MatMul"), scale], "/attn/Mul")
    y = net.add("MatMul", [net.add("Softmax", [scores], "/attn/Softmax", axis=-1), v], "/attn/MatMul_1")
    y = net.add("Transpose", [y], "/attn/Transpose_3", perm=[0, 2, 1, 3])
    flat = net.weight("attn.flat", np.array([0, tokens, width]), "int64")
    y = net.add("Reshape", [y, flat], "/attn/Reshape_3", width)
    x = net.add("Add", [x, linear(y, width, "attn.proj")], "/Add")
    y = linear(norm(x, "norm2"), 4 * width, "mlp.fc1")
    gate = net.add("Sigmoid", [y], "/mlp/Sigmoid")
    return net.model([net.add("Add", [x, linear(net.add("Mul", [y, gate], "/mlp/Mul"), width, "mlp.fc2")], "/Add_1")])
