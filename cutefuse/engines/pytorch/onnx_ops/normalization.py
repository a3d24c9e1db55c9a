"""Normalisation over batches, instances, groups, layers, neighbouring channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.node import DTYPES, Node, Run, operator


@operator("BatchNormalization")
def batch_norm(node: Node) -> Run:
    if node.attr("training_mode", 0) or (node.opset < 7 and not node.attr("is_test", 0)):
        raise node.refuse("it is in training mode; export the model for inference")
    if node.outputs > 1:
        raise node.refuse("it has running statistics as outputs; export the model for inference")
    epsilon = node.attr("epsilon", 1e-5)
    dtype = node.tensor(0).dtype

    def run(x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, gamma, beta, False, 0.0, epsilon).to(dtype)

    return run


@operator("InstanceNormalization")
def instance_norm(node: Node) -> Run:
    epsilon = node.attr("epsilon", 1e-5)
    return lambda x, gamma, beta: F.instance_norm(x, None, None, gamma, beta, True, 0.0, epsilon)


@operator("GroupNormalization")
def group_norm(node: Node) -> Run:
    groups, epsilon, channels = node.attr("num_groups", 1), node.attr("epsilon", 1e-5), node.shape(0)[1]
    if channels % groups:
        raise node.refuse(f"{channels} channels do not divide into {groups} groups; repair the model")
    if node.opset < 21 and node.shape(1) == [groups]:  # before opset 21 scale and bias are per group
        size = channels // groups
        return lambda x, gamma, beta: F.group_norm(
            x, groups, gamma.repeat_interleave(size), beta.repeat_interleave(size), epsilon
        )
    return lambda x, gamma, beta: F.group_norm(x, groups, gamma, beta, epsilon)


@operator("LayerNormalization")
def layer_norm(node: Node) -> Run:
    rank, epsilon = node.rank(0), node.attr("epsilon", 1e-5)
    axis = node.axis(node.attr("axis", -1), rank)
    sizes = node.shape(0)[axis:]
    if node.outputs == 1 and node.shape(1) == sizes and (not node.has(2) or node.shape(2) == sizes):
        return lambda x, gamma, beta=None: F.layer_norm(x, sizes, gamma, beta, epsilon)
    axes, dtype, wide = tuple(range(axis, rank)), node.tensor(0).dtype, DTYPES[node.attr("stash_type", 1)]
    several = node.outputs

    def run(x: Tensor, gamma: Tensor, beta: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        x = x.to(wide)
        mean = x.mean(axes, keepdim=True)
        inverse = torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + epsilon)
        y = ((x - mean) * inverse).to(dtype) * gamma
        y = y if beta is None else y + beta
        return (y, mean, inverse)[:several] if several > 1 else y

    return run


@operator("RMSNormalization")
def rms_norm(node: Node) -> Run:
    rank, epsilon = node.rank(0), node.attr("epsilon", 1e-5)
    axes = tuple(range(node.axis(node.attr("axis", -1), rank), rank))
    dtype, wide = node.tensor(0).dtype, DTYPES[node.attr("stash_type", 1)]

    def run(x: Tensor, gamma: Tensor) -> Tensor:
        x = x.to(wide)
        return (x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon)).to(dtype) * gamma

    return run


@operator("LpNormalization")
def lp_norm(node: Node) -> Run:
    axis, p = node.axis(node.attr("axis", -1), node.rank(0)), node.attr("p", 2)

    def run(x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, p, axis, keepdim=True)
        return torch.where(size == 0, 0, x / size)

    return run


@operator("LRN")
def local_response(node: Node) -> Run:
    size, rank = node.attr("size", 1), node.rank(0)
    alpha, beta, bias = node.attr("alpha", 1e-4), node.attr("beta", 0.75), node.attr("bias", 1.0)
    before, after = (size - 1) // 2, size // 2

    def run(x: Tensor) -> Tensor:
        squares = F.pad(x * x, [0, 0] * (rank - 2) + [before, after])
        total = squares.unfold(1, size, 1).sum(-1)
        return x / (bias + alpha / size * total) ** beta

    return run
