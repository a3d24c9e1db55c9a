"""PyTorch operators over the same kernels: `cutefuse::rms_norm`, `cutefuse::layer_norm`, `cutefuse::concat_conv`.

    import cutefuse.torch

    print(cutefuse.torch.replace_norms(model))  # every module that computes LayerNorm or RMSNorm; names the others
    y = cutefuse.torch.rms_norm(x, weight)
    y, total = cutefuse.torch.add_rms_norm(x, residual, weight)  # norm(x + residual), x + residual

Tensors on a GPU run in the kernel library, in float32, float16 or bfloat16; elsewhere, and in float64, the same
formulas run in PyTorch. All operators have fake kernels and autograd, and torch.compile takes them without a graph
break.

May import the base, the C interface and ops/.
"""

from __future__ import annotations

from cutefuse.torch.conv import ACTIVATIONS, concat_conv
from cutefuse.torch.norms import (
    LayerNorm,
    RMSNorm,
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
)
from cutefuse.torch.replace import NormReport, replace_norms

__all__ = [
    "ACTIVATIONS",
    "LayerNorm",
    "NormReport",
    "RMSNorm",
    "add_layer_norm",
    "add_rms_norm",
    "concat_conv",
    "layer_norm",
    "replace_norms",
    "rms_norm",
]
