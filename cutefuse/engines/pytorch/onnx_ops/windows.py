"""Pools, linear Resizes and Concats between fused nodes by kernels of ours, which read what is joined where it lies.

PyTorch would write a Concat before it pools it, and its kernels reach half of the memory's speed. Left to it are those
that Inductor joins with their neighbours: a Resize before an Add, a pool behind one.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from cutefuse import kernels
from cutefuse.engines.pytorch.onnx_ops.convolution import Convolution, ConvolutionRelu
from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
from cutefuse.engines.pytorch.onnx_ops.pooling import MEAN, Windowed
from cutefuse.engines.pytorch.onnx_ops.program import Program, Step

# Pixels that one window reads: a thread of ours reads all of them, Inductor's two kernels each row's largest once. The
# mean of an image is a block's work for a few channels; over more pixels Inductor's two kernels are faster.
_MOST_PIXELS, _MOST_OF_IMAGE = 81, 32 * 32
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_APART = (FusedNode, Convolution, ConvolutionRelu)  # kernels of their own in either mode of the engine
_VIEWS = ("Flatten", "Reshape", "Squeeze", "Transpose")


def take_windows(program: Program) -> None:
    """Give the windows of a program with fused nodes to our kernels, where they can run them."""
    if not program.fused:
        return
    maker = {slot: step for step in program.steps for slot in step.outputs}
    readers: dict[str | None, dict[int, Step]] = defaultdict(dict)
    for step in program.steps:
        for slot in step.inputs:
            readers[slot][id(step)] = step
    given = set(program.outputs.values())
    for step in program.steps[::-1]:  # who reads a result has been decided
        made = step.outputs[0]
        if not isinstance(step.run, Windowed) or made in given or not readers[made] or not _few_pixels(program, step):
            continue
        if not all(isinstance(r.run, _APART) or r.op_type in _VIEWS for r in readers[made].values()):
            continue
        before = maker.get(str(step.inputs[0]))
        concat = before if before and before.op_type == "Concat" and step.op_type != "Concat" else None
        images = step.inputs if step.op_type == "Concat" else step.inputs[:1]
        for sources in [concat.inputs, images] if concat else [images]:
            node = _node(program, step, sources)
            if node is None or not all(isinstance(maker[s].run, (*_APART, Windowed)) for s in sources if s in maker):
                continue
            for slot in step.inputs:
                readers[slot].pop(id(step), None)
            if concat and not readers[concat.outputs[0]] and concat.outputs[0] not in given:
                for slot in concat.inputs:
                    readers[slot].pop(id(concat), None)
            for slot in sources:
                readers[slot][id(step)] = step
            step.run, step.inputs = node, list(sources)
            break
    program.drop_unused()


@functools.cache
def _op_types() -> dict[int, str]:
    """Number of sources -> op_type."""
    (op,) = (op for op in kernels.describe()["ops"] if op["name"] == "window")
    return {v["sources"]: v["op_type"] for v in op["variants"]}


def _few_pixels(program: Program, step: Step) -> bool:
    assert isinstance(step.run, Windowed)
    pixels = math.prod(step.run.attrs.get("kernel_shape", [1]))
    whole = step.run.attrs["mode"] == [MEAN] and list(program.shapes[step.outputs[0]].shape[2:]) == [1, 1]
    return pixels <= (_MOST_OF_IMAGE if whole else _MOST_PIXELS)


def _node(program: Program, step: Step, sources: Sequence[str | None]) -> FusedNode | None:
    """The kernel call of a step over sources, which a Concat joins; None where the kernels refuse it."""
    assert isinstance(step.run, Windowed)
    shapes = [program.shapes[s] for s in sources if s in program.shapes]
    if len(sources) != len(shapes) or len(sources) not in _op_types():
        return None
    if any(t.dim() != 4 or t.dtype not in _TYPES for t in shapes):
        return None
    made = [program.shapes[step.outputs[0]]]
    node = FusedNode(step.name, _op_types()[len(sources)], dict(step.run.attrs), shapes, made, named=False)
    return None if node.reject() else node
