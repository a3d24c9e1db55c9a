"""Neighbouring steps that are one kernel of cuDNN or PyTorch, so that the plain network is as fast as they allow."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.fusion import fuse_conv_bn_weights

from cutefuse.engines.pytorch.onnx_ops.convolution import Convolution, ConvolutionRelu
from cutefuse.engines.pytorch.onnx_ops.program import Program, Step


def merge(program: Program, convolutions: bool) -> None:
    """Join BatchNormalization into the Conv before it, x * Sigmoid(x) into SiLU and, with `convolutions`, Conv [+ Add]
    + Relu into one call. A compiler that fuses activations itself is better off without the last."""
    for join in (_fold_norms, _silu, *([_relu] if convolutions else [])):
        join(program)
        program.drop_unused()


class _Uses:
    def __init__(self, program: Program) -> None:
        self.made = {s: step for step in program.steps for s in step.outputs}
        self.reads = Counter(s for step in program.steps for s in step.inputs if s)
        self.reads.update(program.outputs.values())

    def single(self, slot: str | None) -> Step | None:
        """The step that makes a tensor which only one step reads."""
        return self.made.get(slot) if slot and self.reads[slot] == 1 else None


def _fold_norms(program: Program) -> None:
    """conv(x, w) * a + b as a convolution with other weights, computed in float64."""
    uses = _Uses(program)
    for step in program.steps:
        conv = uses.single(step.inputs[0]) if step.op_type == "BatchNormalization" else None
        if conv is None or not isinstance(conv.run, Convolution):
            continue
        slots = [*conv.inputs[1:], *step.inputs[1:]]
        if any(s is not None and s not in program.constants for s in slots):
            continue
        w, *bias = (None if s is None else program.constants[s].double() for s in conv.inputs[1:])
        gamma, beta, mean, variance = (program.constants[str(s)].double() for s in step.inputs[1:])
        assert w is not None
        epsilon, dtype = step.attrs.get("epsilon", 1e-5), program.constants[str(conv.inputs[1])].dtype
        folded, shift = fuse_conv_bn_weights(w, next(iter(bias), None), mean, variance, epsilon, gamma, beta)
        names = [f"{step.outputs[0]}w", f"{step.outputs[0]}b"]
        layout = torch.channels_last if w.dim() == 4 else torch.contiguous_format
        program.constants[names[0]] = folded.detach().to(dtype).contiguous(memory_format=layout)
        program.constants[names[1]] = shift.detach().to(dtype)
        step.run, step.inputs, step.op_type, step.attrs = conv.run, [conv.inputs[0], *names], "Conv", conv.attrs
        _take_in(step, conv)


def _silu(program: Program) -> None:
    uses = _Uses(program)
    for step in program.steps:
        if step.op_type != "Mul":
            continue
        for gate, x in (step.inputs, step.inputs[::-1]):
            sigmoid = uses.single(gate)
            if sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.inputs == [x]:
                step.run, step.inputs, step.op_type = F.silu, [x], "Silu"
                _take_in(step, sigmoid)
                break


def _relu(program: Program) -> None:
    """Conv + Relu, and Conv + Add + Relu where the sum is of equal shapes; cuDNN pads symmetrically only."""
    uses = _Uses(program)
    for step in program.steps:
        if step.op_type != "Relu":
            continue
        before = uses.single(step.inputs[0])
        conv, z = before, None
        if before is not None and before.op_type == "Add" and len(before.inputs) == 2:
            for one, other in (before.inputs, before.inputs[::-1]):
                conv = uses.single(one)
                same = one in program.shapes and other in program.shapes and _alike(program, str(one), str(other))
                if conv is not None and isinstance(conv.run, Convolution) and same:
                    z = other
                    break
        if conv is None or before is None or not isinstance(conv.run, Convolution) or not _fits(program, conv):
            continue
        if conv is not before and z is None:
            continue
        if len(conv.inputs) == 2:  # PyTorch would fill a bias with zeros at every call
            zeros = f"{step.outputs[0]}zeros"
            program.constants[zeros] = torch.zeros(conv.run.filters, dtype=program.shapes[str(conv.inputs[0])].dtype)
            conv.inputs = [*conv.inputs, zeros]
        inputs = [*conv.inputs, *([z] if z else [])]
        step.run, step.inputs, step.op_type, step.attrs = ConvolutionRelu(conv.run), inputs, "Conv", conv.attrs
        _take_in(step, *([conv, before] if z else [conv]))


def _alike(program: Program, a: str, b: str) -> bool:
    one, two = program.shapes[a], program.shapes[b]
    return one.shape == two.shape and one.dtype == two.dtype


def _fits(program: Program, conv: Step) -> bool:
    assert isinstance(conv.run, Convolution)
    x: Tensor | None = program.shapes.get(str(conv.inputs[0]))
    return conv.run.symmetric and len(conv.run.stride) == 2 and x is not None and x.dtype != torch.float64


def _take_in(step: Step, *before: Step) -> None:
    """`step` computes what was before it too from now on."""
    parts = (*before, step)
    step.name, step.nodes = " + ".join(p.name for p in parts), [n for p in parts for n in p.nodes]
