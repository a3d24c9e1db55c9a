"""The peers of ConcatConv: what a user would run without it. Each maps a workload to a launch of one operand set."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu
import problems

from benchmarks.lib import cublaslt, cudnn, cutlass_peers, timing
from benchmarks.lib.convolutions import Convolution
from benchmarks.lib.table import LARGEST_ERROR
from benchmarks.lib.timing import Launch
from cutefuse import kernels
from cutefuse.errors import CutefuseError


@dataclass
class Prepared:
    """A launch, and what its rows say beside the time."""

    launch: Launch
    facts: dict[str, Any] = field(default_factory=dict)


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
    _truth: Any = None
    _chosen: dict[str, tuple[list[cutlass_peers.Convolution], str]] = field(default_factory=dict)

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
            with torch.inference_mode(False):  # some peer writes into them
                self._joined = [torch.cat(x, 1).contiguous(memory_format=torch.channels_last) for x in self.x]
        return self._joined

    def error(self, y: Any) -> float:
        """|y - truth| / |truth| of an output of set 0 against the float32 convolution of its operands (TF32 off)."""
        import torch

        if self._truth is None:
            allowed = torch.backends.cudnn.allow_tf32
            torch.backends.cudnn.allow_tf32 = False
            first = self.instances[0]
            self._truth = problems.activate(problems.convolve(first, torch.float32), self.problem.activation)
            torch.backends.cudnn.allow_tf32 = allowed
        return float((y.float() - self._truth).norm() / self._truth.norm())


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
    """One cuDNN plan for conv + bias + relu; for other activations the bare convolution, which favours the peer."""
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


def cutlass_arch(peer: str) -> str:
    """The architecture to build a CUTLASS peer for. Raises CutefuseError when the device cannot run it."""
    sm, _ = gpu.device_facts()
    if peer == "cutlass3" and sm != 90:
        raise CutefuseError(
            f"CUTLASS 3.x's implicit GEMM with wgmma needs compute capability 9.0, this device has {sm}"
        )
    return "90a" if sm == 90 else str(sm)


def _candidates(work: Workload, peer: str) -> dict[str, list[cutlass_peers.Convolution]]:
    """tile -> a prepared convolution of every set, on the concatenated inputs, for each tile that takes the problem."""
    import torch

    arch, (_, sm_count) = cutlass_arch(peer), gpu.device_facts()
    n, k, p, q = work.problem.output
    outputs = [torch.empty(n, p, q, k, dtype=torch.float16, device="cuda") for _ in work.instances]
    addresses = [
        (x.data_ptr(), work.w.data_ptr(), work.b.data_ptr(), y.data_ptr())
        for x, y in zip(work.joined(), outputs, strict=True)
    ]
    found: dict[str, list[cutlass_peers.Convolution]] = {}
    for tile in cutlass_peers.TILES[peer]:
        if not tile.library(arch).exists():
            continue
        for splits in cutlass_peers.splits(tile, work.problem, sm_count):
            try:
                prepared = [cutlass_peers.Convolution(tile, arch, work.problem, splits, a) for a in addresses]
            except CutefuseError:
                continue  # this tile does not take the problem; another may
            outputs[0].fill_(float("nan"))
            prepared[0](torch.cuda.current_stream().cuda_stream)
            if work.error(outputs[0].permute(0, 3, 1, 2)) <= LARGEST_ERROR:
                found[tile.name + (f"_k{splits}" if splits > 1 else "")] = prepared
    for convolutions in found.values():
        for convolution, y in zip(convolutions, outputs, strict=True):
            convolution.keep = y
    return found


def fastest(work: Workload, peer: str, candidates: dict[str, Launch]) -> str:
    """Name of the candidate that three rounds find fastest. Raises CutefuseError when none runs."""
    found = timing.interleaved(candidates, work.sets, rounds=3)
    ran = [(t.median_us, name) for name, t in found.items() if isinstance(t, timing.Timing)]
    if not ran:
        raise CutefuseError(f"{peer} has no tile that takes the problem and is right")
    return min(ran)[1]


def chosen(work: Workload, peer: str) -> tuple[list[cutlass_peers.Convolution], str]:
    """The fastest of a CUTLASS peer's tiles on the concatenated inputs, each checked against float32 first."""
    if peer not in work._chosen:
        if work.dtype != "float16":
            raise CutefuseError(f"{peer} is built for float16, not {work.dtype}; leave it out of --variants")
        candidates = _candidates(work, peer)
        best = fastest(work, peer, {name: _on_stream(found) for name, found in candidates.items()})
        work._chosen[peer] = candidates[best], best
    return work._chosen[peer]


def cublas(work: Workload) -> Prepared:
    """cuBLASLt on the concatenated inputs: of its heuristics' algorithms the fastest that is right."""
    import torch

    p = work.problem
    if (p.R, p.S, *p.strides) != (1, 1, 1, 1) or any(p.pads):
        raise CutefuseError("cuBLASLt multiplies matrices, which only 1x1 filters without stride and pads are")
    n, k, rows, columns = p.output
    sizes = n * rows * columns, sum(p.C), k
    outputs = [torch.empty(n, rows, columns, k, dtype=work.w.dtype, device="cuda") for _ in work.instances]
    products = [
        cublaslt.Product(work.dtype, sizes, (x.data_ptr(), work.w.data_ptr(), work.b.data_ptr(), y.data_ptr()))
        for x, y in zip(work.joined(), outputs, strict=True)
    ]
    truth = problems.convolve(work.instances[0], torch.float32)

    def launch(algorithm: int) -> Launch:
        def run(i: int) -> Any:
            products[i].run(algorithm, torch.cuda.current_stream().cuda_stream)
            return outputs[i]

        return run

    candidates = {}
    for algorithm in range(products[0].count):
        outputs[0].fill_(float("nan"))
        launch(algorithm)(0)
        if float((outputs[0].permute(0, 3, 1, 2) - truth).norm() / truth.norm()) <= LARGEST_ERROR:
            candidates[f"algorithm {algorithm}"] = launch(algorithm)
    best = fastest(work, "cublaslt", candidates)
    return Prepared(candidates[best], {"tile": best})


def _on_stream(convolutions: Sequence[cutlass_peers.Convolution]) -> Launch:
    import torch

    return lambda i: convolutions[i](torch.cuda.current_stream().cuda_stream)


def cutlass(work: Workload, peer: str, cat: bool) -> Prepared:
    """CUTLASS on the concatenated inputs; with `cat` the concatenation is part of the launch."""
    import torch

    convolutions, tile = chosen(work, peer)
    run = _on_stream(convolutions)
    if not cat:
        return Prepared(run, {"tile": tile})
    joined = work.joined()

    def launch(i: int) -> None:
        torch.cat(work.x[i], 1, out=joined[i])
        run(i)

    return Prepared(launch, {"tile": tile})


PEERS: dict[str, Callable[[Workload], Launch]] = {
    "eager": eager,
    "cat_cudnn": cat_cudnn,
    "compile": compiled,
    "compile_max": compiled_max,
    "cudnn_precat": cudnn_precat,
}
CUTLASS = {
    "cutlass2": ("cutlass2", False),
    "cat_cutlass2": ("cutlass2", True),
    "cutlass3": ("cutlass3", False),
    "cat_cutlass3": ("cutlass3", True),
}
# Whether bias and activation are part of it.
CUDNN = {"cudnn_bare": False, "cudnn_fused": True}
NAMES = (*PEERS, "cublaslt", *CUTLASS, *CUDNN)
_PLANS: dict[cudnn.Job, dict[str, bytes]] = {}


def build_cutlass(names: Sequence[str], jobs: int) -> dict[str, str]:
    """Build the CUTLASS peers among the variants; name -> reason for the variants and tiles that cannot be had."""
    missing: dict[str, str] = {}
    for peer in dict.fromkeys(CUTLASS[name][0] for name in names if name in CUTLASS):
        try:
            failed = cutlass_peers.build(peer, cutlass_arch(peer), jobs)
        except CutefuseError as error:
            missing |= {name: str(error) for name in names if CUTLASS.get(name, ("",))[0] == peer}
            continue
        missing |= {f"{peer} {tile}": text for tile, text in failed.items()}
        if len(failed) == len(cutlass_peers.TILES[peer]):
            missing |= {name: "no tile could be built" for name in names if CUTLASS.get(name, ("",))[0] == peer}
    return missing


def _job(problem: problems.Problem, fused: bool) -> cudnn.Job:
    """The problem on the concatenated inputs."""
    p = problem
    conv = Convolution(p.N, sum(p.C), p.H, p.W, p.K, p.R, p.S, p.strides, p.pads, p.dilations)
    return cudnn.Job(conv, fused, p.activation if fused else "", p.residual if fused else "")


def build_cudnn(names: Sequence[str], shapes: Sequence[problems.Problem], jobs: int, limit_s: float) -> dict[str, str]:
    """Compile the plans of cuDNN's graph API for its variants, for at most `limit_s` seconds: what is missing then is
    compiled when it is measured. name -> reason for the variants that cannot be had."""
    wanted = [name for name in names if name in CUDNN]
    if not wanted:
        return {}
    try:
        cudnn.frontend()
    except CutefuseError as error:
        return dict.fromkeys(wanted, str(error))
    every = [_job(problem, CUDNN[name]) for name in wanted for problem in shapes]
    with tempfile.TemporaryDirectory() as folder:
        _PLANS.update(cudnn.compiled(every, jobs, time.monotonic() + limit_s, Path(folder)))
    return {}


def cudnn_plan(work: Workload, name: str) -> Prepared:
    """The fastest of all plans of cuDNN's graph API, on operands of its own."""
    if work.dtype != "float16":
        raise CutefuseError(f"{name} is measured in float16, not {work.dtype}; leave it out of --variants")
    found = cudnn.candidates(_job(work.problem, CUDNN[name]), _PLANS, work.sets)
    best = fastest(work, name, found)
    return Prepared(found[best], {"tile": best})


def make(name: str, work: Workload) -> Prepared:
    """A peer, ready to launch, PyTorch's warnings about it silenced; torch.compile has compiled when this returns."""
    import torch

    if name in CUTLASS:
        return cutlass(work, *CUTLASS[name])
    if name == "cublaslt":
        return cublas(work)
    if name in CUDNN:
        return cudnn_plan(work, name)
    started = time.perf_counter()
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        launch = PEERS[name](work)
        if name in ("compile", "compile_max"):
            launch(0)
            torch.cuda.synchronize()

    def quiet(i: int) -> Any:
        with torch.inference_mode():
            return launch(i)

    return Prepared(quiet, {"setup_s": time.perf_counter() - started} if name.startswith("compile") else {})
