"""The peers of ConcatConv: what a user would run without it. Each maps a workload to a launch of one operand set."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gpu
import problems

from benchmarks.lib.timing import Launch
from cutefuse import kernels


@dataclass
class Workload:
    """One problem with `sets` copies of its sources and outputs on the device, filter and bias shared.

    `x[i]` are the sources of set i (channels-last torch tensors over the memory that our kernel reads) and `joined[i]`
    is their concatenation, made only when a peer asks for it.
    """

    problem: problems.Problem
    dtype: str
    instances: list[problems.Instance]
    x: list[list[Any]]
    w: Any
    b: Any
    _joined: list[Any] | None = None

    @classmethod
    def of(cls, problem: problems.Problem, dtype: str, sets: int) -> Workload:
        import torch

        first = problems.instantiate(problem, dtype)
        instances = [first] + [problems.instantiate(problem, dtype, seed) for seed in range(1, sets)]
        n, h, w = problem.N, problem.H, problem.W
        x = []
        for instance in instances:
            views = [b.view.view(n, h, w, -1).permute(0, 3, 1, 2) for b in instance.buffers[: len(problem.C)]]
            x.append([v[:, :c] for v, c in zip(views, problem.C, strict=True)])
            instance.x = []  # the NCHW originals are only needed for checks, and only of the first set
            instance.call.inputs[len(problem.C) :] = first.call.inputs[len(problem.C) :]
        first.x = x[0]
        filter_ = first.w.to(memory_format=torch.channels_last)
        return cls(problem, dtype, instances, x, filter_, first.b.to(gpu.torch_dtype(dtype)))

    @property
    def sets(self) -> int:
        return len(self.instances)

    def joined(self) -> list[Any]:
        """The concatenated inputs of every set, channels-last."""
        import torch

        if self._joined is None:
            self._joined = [torch.cat(x, 1).contiguous(memory_format=torch.channels_last) for x in self.x]
        return self._joined


def ours(work: Workload, config: int = 0) -> Launch:
    """The library's kernel; config 0 is its own first guess."""
    import torch

    launchers = [kernels.Launcher(replace(instance.call, config=config)) for instance in work.instances]
    return lambda i: launchers[i](torch.cuda.current_stream().cuda_stream)


def _padding(problem: problems.Problem) -> tuple[int, int]:
    top, left, bottom, right = problem.pads
    if (top, left) != (bottom, right):
        raise ValueError("PyTorch's convolution knows no asymmetric pads")
    return top, left


def _convolution(work: Workload) -> Callable[[Any], Any]:
    """conv + bias + activation as PyTorch users write it."""
    import torch.nn.functional as F

    p, padding = work.problem, _padding(work.problem)
    return lambda x: problems.activate(
        F.conv2d(x, work.w, work.b, stride=p.strides, padding=padding, dilation=p.dilations), p.activation
    )


def _cudnn(work: Workload) -> Callable[[Any], Any]:
    """One cuDNN plan for conv + bias + relu; for other activations the bare convolution, which flatters the peer."""
    import torch
    import torch.nn.functional as F

    p, padding = work.problem, _padding(work.problem)
    if p.activation == "Relu":
        return lambda x: torch.cudnn_convolution_relu(x, work.w, work.b, p.strides, padding, p.dilations, 1)
    return lambda x: F.conv2d(x, work.w, None, stride=p.strides, padding=padding, dilation=p.dilations)


def eager(work: Workload) -> Launch:
    import torch

    run = _convolution(work)
    return lambda i: run(torch.cat(work.x[i], 1))


def cat_cudnn(work: Workload) -> Launch:
    import torch

    run = _cudnn(work) if work.problem.activation == "Relu" else _convolution(work)
    return lambda i: run(torch.cat(work.x[i], 1))


def _compiled(work: Workload, mode: str) -> Launch:
    import torch
    import torch._inductor.config as inductor

    inductor.max_autotune_conv_backends = "ATEN,TRITON"
    run = _convolution(work)
    torch._dynamo.reset()
    function = torch.compile(lambda *x: run(torch.cat(x, 1)), mode=mode, dynamic=False)
    return lambda i: function(*work.x[i])


def compiled(work: Workload) -> Launch:
    """torch.compile as most people call it; seconds per shape."""
    return _compiled(work, "default")


def compiled_max(work: Workload) -> Launch:
    """torch.compile with max-autotune over ATen's and Triton's convolutions; up to a minute per shape."""
    return _compiled(work, "max-autotune-no-cudagraphs")


def cudnn_precat(work: Workload) -> Launch:
    run, joined = _cudnn(work), work.joined()
    return lambda i: run(joined[i])


PEERS: dict[str, Callable[[Workload], Launch]] = {
    "eager": eager,
    "cat_cudnn": cat_cudnn,
    "compile": compiled,
    "compile_max": compiled_max,
    "cudnn_precat": cudnn_precat,
}


def make(name: str, work: Workload) -> Launch:
    """The launch of a peer, with PyTorch's warnings about it silenced."""
    import torch

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        launch = PEERS[name](work)

    def quiet(i: int) -> Any:
        with torch.inference_mode():
            return launch(i)

    return quiet
