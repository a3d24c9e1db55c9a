"""PyTorch operators over the same kernels: `cutefuse::rms_norm`, `cutefuse::layer_norm`, `cutefuse::packed_conv`.

    import cutefuse.torch

    print(cutefuse.torch.replace_norms(model))  # every module that computes LayerNorm or RMSNorm; names the others
    y = cutefuse.torch.rms_norm(x, weight)
    y, total = cutefuse.torch.add_rms_norm(x, residual, weight)  # norm(x + residual), x + residual
    fused = cutefuse.torch.fuse(model, (x,))  # for inference: convolutions with what stands around them, and norms

Tensors on a GPU run in the kernel library, in float32, float16 or bfloat16; elsewhere, and in float64, the same
formulas run in PyTorch. All operators have fake kernels, all functions have derivatives, and torch.compile takes them
without a graph break.

On a GPU the calls go through a small extension, which the user's own compiler builds once.
"""

from __future__ import annotations

from types import SimpleNamespace

from cutefuse.torch import compiled, conv, launch, norms
from cutefuse.torch.conv import ACTIVATIONS, PackedConv
from cutefuse.torch.conv_autograd import concat_conv, pre_concat_conv
from cutefuse.torch.fuse import FuseReport, fuse
from cutefuse.torch.norms import LayerNorm, RMSNorm, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from cutefuse.torch.replace import NormReport, replace_norms

# plan_...: a call that is new to the extension as plain data, with its bytes of workspace and, of a convolution, where
# its images lie. call_...: for whatever is no plain tensor. The others: the operators on types that no kernel takes.
compiled.loaded.python = SimpleNamespace(
    plan_norm=launch.plan, plan_conv=conv.plan, call_rms_norm=norms.call_rms_norm,
    call_layer_norm=norms.call_layer_norm, rms_norm=norms.rms_kernel, layer_norm=norms.layer_kernel,
    row_norm_backward=norms.backward_kernel, packed_conv=conv.run,
)  # fmt: skip

__all__ = [
    "ACTIVATIONS", "FuseReport", "LayerNorm", "NormReport", "PackedConv", "RMSNorm", "add_layer_norm", "add_rms_norm",
    "concat_conv", "fuse", "layer_norm", "pre_concat_conv", "replace_norms", "rms_norm",
]  # fmt: skip
