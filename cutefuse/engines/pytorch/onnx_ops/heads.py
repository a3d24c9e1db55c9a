"""Fully connected layers over a few rows, as classifiers have them, by our small tiles: 1x1 convolutions of a pixel.

cuBLAS gives each multiprocessor 64 columns of the weights, so that 1000 classes keep 16 of them busy; a small tile also
divides the reduction over a cluster. On an H200, float16, 2048 channels to 1000 classes: 3.5 us for 14.0 with one row,
3.4 for 6.8 with sixteen; 4096 to 2048: 6.6 for 10.2, 6.0 for 9.6 (`benchmarks/windows.py`); 4096 to 4096 gains nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cutefuse import kernels
from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
from cutefuse.engines.pytorch.onnx_ops.program import Program, Step
from cutefuse.operators.conv_call import make_call
from cutefuse.operators.conv_form import Source, form_of
from cutefuse.operators.conv_math import CHANNEL_BLOCK, Geometry

_MOST_ROWS, _MOST_WEIGHTS = 16, 1 << 23


def take_heads(program: Program, sm: int) -> None:
    """Give the Gemms of a program with fused nodes to our kernels where small tiles, Hopper's, run them. `sm`: compute
    capability * 10."""
    if program.fused:
        program.steps = [part for step in program.steps for part in _parts(program, step, sm)]
        program.drop_unused()


def _parts(program: Program, step: Step, sm: int) -> list[Step]:
    """The rows as images of one pixel, the kernel call, and its result as rows again; or the step itself."""
    if step.op_type != "Gemm" or step.attrs.get("transA", 0) or step.inputs[0] not in program.shapes:
        return [step]
    x, w, bias = str(step.inputs[0]), str(step.inputs[1]), (*step.inputs, None)[2]
    scaled = step.attrs.get("alpha", 1.0) != 1.0 or step.attrs.get("beta", 1.0) != 1.0
    if scaled or w not in program.constants or not (bias is None or bias in program.constants):
        return [step]
    rows = program.shapes[x]
    matrix = program.constants[w] if step.attrs.get("transB", 0) else program.constants[w].t()
    (N, C), K = rows.shape, len(matrix)
    if not 0 < N <= _MOST_ROWS or matrix.numel() > _MOST_WEIGHTS or C % 8 or rows.dtype.itemsize != 2:
        return [step]
    values = torch.zeros(K) if bias is None else program.constants[bias].float()
    if values.numel() not in (1, K) or values.shape[:-1].numel() != 1:  # another bias for each row
        return [step]
    dtype, pixel = str(rows.dtype).removeprefix("torch."), Source((N, C, 1, 1), C)
    call = make_call(form_of("CuteConcatConv1"), [pixel], [K], Geometry((1, 1)), dtype, {})
    if not kernels.made_for(call, sm):
        return [step]
    packed = F.pad(matrix, (0, -C % CHANNEL_BLOCK)).contiguous()
    x_image, y_image = (torch.empty(N, c, 1, 1, dtype=rows.dtype, device="meta") for c in (C, K))
    given = [x_image, packed, torch.empty(K)]
    node = FusedNode(step.name, call.op_type, dict(call.attrs), given, [y_image], named=False)
    made = step.outputs[0]
    pixels, filters, biases, result = (f"{made}{end}" for end in "xwby")
    program.constants |= {filters: packed, biases: values.reshape(-1).expand(K).contiguous()}
    program.shapes |= {pixels: x_image, result: y_image}
    return [
        Step(lambda t: t.reshape(N, C, 1, 1), [x], [pixels], f"{step.name}/pixels", "Reshape", {}, step.nodes),
        Step(node, [pixels, filters, biases], [result], step.name, step.op_type, step.attrs, step.nodes),
        Step(lambda t: t.reshape(N, K), [result], [made], f"{step.name}/rows", "Reshape", {}, step.nodes),
    ]
