"""Pools and linear Resizes between fused nodes by kernels of ours, which read what a Concat joins where it lies.

PyTorch would write the Concat first, and its kernels reach half of the memory's speed. Left to it are those whose
neighbours Inductor joins with them: a Resize before an Add, a pool behind one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from cutefuse.engines.pytorch.onnx_ops.convolution import Convolution, ConvolutionRelu
from cutefuse.engines.pytorch.onnx_ops.fused import FusedNode
from cutefuse.engines.pytorch.onnx_ops.pooling import MEAN, Windowed
from cutefuse.engines.pytorch.onnx_ops.program import Program, Step

_MOST_SOURCES = 8
# Pixels that one window reads: a thread of ours reads all of them, Inductor's two kernels each row's largest once. The
# mean of an image is a block's work for 16 channels; with more pixels it takes longer than Inductor's two kernels.
_MOST_PIXELS, _MOST_OF_IMAGE = 25, 64 * 64
_APART = (FusedNode, Convolution, ConvolutionRelu, Windowed)  # kernels of their own in either mode of the engine
_VIEWS = ("Flatten", "Reshape", "Squeeze", "Transpose")


def take_windows(program: Program) -> None:
    """Give pools and linear Resizes of a program with fused nodes to our kernels, where they can run them."""
    if not program.fused:
        return
    maker = {slot: step for step in program.steps for slot in step.outputs}
    readers: dict[str, dict[int, Step]] = defaultdict(dict)
    for step in program.steps:
        for slot in filter(None, step.inputs):
            readers[slot][id(step)] = step
    given = set(program.outputs.values())
    for step in program.steps[::-1]:
        made = step.outputs[0]
        if not isinstance(step.run, Windowed) or made in given or not _few_pixels(program, step):
            continue
        if not all(isinstance(r.run, _APART) or r.op_type in _VIEWS for r in readers[made].values()):
            continue
        x = str(step.inputs[0])
        concat = maker[x] if x in maker and maker[x].op_type == "Concat" else None
        node: FusedNode | None = None
        choices: list[list[str | None]] = [concat.inputs, [x]] if concat else [[x]]
        for sources in choices:
            if all(s not in maker or isinstance(maker[s].run, _APART) for s in sources if s):
                node = _node(program, step, sources)
            if node is not None:
                break
        if node is None:
            continue
        step.run, step.inputs = node, list(sources)
        del readers[x][id(step)]
        if concat and not readers[x] and x not in given:
            for source in filter(None, concat.inputs):
                readers[source].pop(id(concat), None)
        for source in filter(None, sources):
            readers[source][id(step)] = step
    program.drop_unused()


def _few_pixels(program: Program, step: Step) -> bool:
    assert isinstance(step.run, Windowed)
    pixels = math.prod(step.run.attrs.get("kernel_shape", [1]))
    whole = step.run.attrs["mode"] == [MEAN] and list(program.shapes[step.outputs[0]].shape[2:]) == [1, 1]
    return pixels <= (_MOST_OF_IMAGE if whole else _MOST_PIXELS)


def _node(program: Program, step: Step, sources: Sequence[str | None]) -> FusedNode | None:
    """The kernel call of a step over the sources that its input joins; None where the kernels refuse it."""
    assert isinstance(step.run, Windowed)
    shapes = [program.shapes[s] for s in sources if s in program.shapes]
    if not len(sources) == len(shapes) <= _MOST_SOURCES or any(t.dim() != 4 for t in shapes):
        return None
    op_type, made = f"CuteWindow{len(sources)}", [program.shapes[step.outputs[0]]]
    node = FusedNode(step.name, op_type, dict(step.run.attrs), shapes, made, named=False)
    return None if node.reject() else node
