"""A 1x1 Conv of a Softmax's channels to one filter, as YOLO's heads have it, as a weighted sum.

torch.compile computes the sum in the Softmax's kernel. cuBLAS, to which a Conv of one filter goes, takes 3.3 us of the
193 us of one image in YOLOv8n on an H200, and reads what the Softmax has written.
"""

from __future__ import annotations

from torch import Tensor

from cutefuse.engines.pytorch.onnx_ops.convolution import Convolution
from cutefuse.engines.pytorch.onnx_ops.program import Program, Step

_MOST_CHANNELS = 64  # longer sums are cuBLAS's


def take_sums(program: Program) -> None:
    """Replace such Convs of a program with fused nodes by sums, before torch.compile gets it."""
    if not program.fused:
        return
    makers = {slot: step for step in program.steps for slot in step.outputs}
    for step in program.steps:
        if isinstance(step.run, Convolution) and _is_sum(program, step, step.run, makers.get(str(step.inputs[0]))):
            step.run = weighted_sum


def _is_sum(program: Program, step: Step, conv: Convolution, maker: Step | None) -> bool:
    if maker is None or maker.op_type != "Softmax":
        return False
    x, w = program.shapes[str(step.inputs[0])], program.constants.get(str(step.inputs[1]))
    if w is None or tuple(w.shape) != (1, x.shape[1], *[1] * (x.dim() - 2)) or x.shape[1] > _MOST_CHANNELS:
        return False
    along = int(maker.attrs.get("axis", -1)) % x.dim() == 1  # the Softmax adds up the same channels
    return along and max(conv.stride) == 1 and not any(conv.pads)


def weighted_sum(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x (N,C,...) times w (1,C,1,...), added up in float32 over C, and b (1): (N,1,...) of x's type."""
    y = (x.float() * w.float()).sum(1, keepdim=True)
    return (y if b is None else y + b.float()).to(x.dtype)
