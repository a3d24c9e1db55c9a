"""The compiled half of cutefuse.torch on a GPU: values beside float64, CUDA graphs, streams, refusals; and
fused models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
ERRORS = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def torch() -> Any:
    """PyTorch with the extension in use."""
    import torch

    import cutefuse.torch as ours
    from cutefuse.torch import compiled

    ours.layer_norm(torch.randn(4, 8, device="cuda"))
    assert compiled.state() == "the operators run compiled"
    return torch


def functions(torch: Any, columns: int) -> list[tuple[Callable[..., Any], Callable[..., Any], int]]:
    """(ours, PyTorch's, how many of x, residual, weight, bias they take by position)."""
    import cutefuse.torch as ours

    F, size = torch.nn.functional, (columns,)
    return [
        (lambda x, _, w, b: ours.layer_norm(x, w, b), lambda x, _, w, b: F.layer_norm(x, size, w, b), 4),
        (lambda x, _, w: ours.rms_norm(x, w), lambda x, _, w: F.rms_norm(x, size, w, 1e-6), 3),
        (lambda x, r, w: ours.add_rms_norm(x, r, w)[0], lambda x, r, w: F.rms_norm(x + r, size, w, 1e-6), 3),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("shape", [(64, 128), (3, 5, 48), (7, 33), (0, 64), (4096, 512)])
def test_values_and_gradients_beside_float64(torch: Any, dtype: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)

    def given(*dims: int) -> Any:
        return torch.randn(*dims, device="cuda").to(getattr(torch, dtype)).requires_grad_()

    every, dy = (given(*shape), given(*shape), given(shape[-1]), given(shape[-1])), given(*shape).detach()
    for ours, theirs, count in functions(torch, shape[-1]):
        tensors = every[:count]
        wide = [t.detach().double().requires_grad_() for t in tensors]
        results = []
        for function, operands, gradient in ((ours, tensors, dy), (theirs, wide, dy.double())):
            y = function(*operands)
            results.append([y, *torch.autograd.grad(y, operands, gradient, allow_unused=True)])
        for got, true in zip(*results, strict=True):
            assert (got is None) == (true is None)
            if true is not None and true.numel():
                assert got.dtype == getattr(torch, dtype) and got.shape == true.shape
                error = ((got.double() - true).abs().max() / (true.abs().max() + 1e-30)).detach()
                assert float(error) < ERRORS[dtype]


def test_a_cuda_graph_holds_forward_and_backward(torch: Any) -> None:
    import cutefuse.torch as ours

    module, dy = ours.LayerNorm(512, device="cuda"), torch.randn(256, 512, device="cuda")
    x = torch.randn(256, 512, device="cuda", requires_grad=True)
    held = [x, *module.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(module(x), held, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(module(x), held, dy)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    y = torch.nn.functional.layer_norm(x, (512,), module.weight, module.bias)
    for got, true in zip(found, torch.autograd.grad(y, held, dy), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-3)


def test_it_runs_on_the_stream_that_is_current(torch: Any) -> None:
    import cutefuse.torch as ours

    x, stream = torch.zeros(4096, 4096, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.normal_()
        y = ours.rms_norm(x)  # on another stream it would read zeros
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (4096,), eps=1e-6), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused_and_the_device_lives_on(torch: Any) -> None:
    import cutefuse.torch as ours
    from cutefuse.errors import CutefuseError

    x = torch.randn(8, 64, device="cuda")
    for weight, kind, words in (
        (torch.randn(5, device="cuda"), CutefuseError, "a float32 vector of 64 is needed"),
        (torch.randn(64, device="cuda").double(), CutefuseError, "a parameter is torch.float64"),
        (torch.randn(64), RuntimeError, "is on cpu, the input on cuda:0; move both"),
    ):
        with pytest.raises(kind, match=words):
            ours.layer_norm(x, weight)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(ours.rms_norm, (x,), (x,))
    assert bool(torch.isfinite(ours.layer_norm(x)).all())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_fused_model_computes_the_same_eagerly_and_compiled(torch: Any, dtype: str) -> None:
    from test_torch_fuse import fused, model

    made, args = model(dtype=getattr(torch, dtype))
    made, args = made.cuda(), tuple(a.cuda() for a in args)
    with torch.no_grad():
        truth, plain = copy.deepcopy(made).double()(*(a.double() for a in args)), made(*args)
        result = fused(made, args)
        assert len(result.report.taken) == 5
        for found in (
            result(*args),
            torch.compile(result, fullgraph=True)(*args),
            result(*(a.contiguous() for a in args)),
        ):
            for ours, theirs, true in zip(found, plain, truth, strict=True):
                allowed = 2 * (theirs.double() - true).abs().max() + 2 * torch.finfo(ours.dtype).eps * true.abs().max()
                assert bool((ours.double() - true).abs().max() <= allowed)
        with pytest.raises(Exception, match="(?i)guard|size|shape"):
            result(args[0][:, :, :4])
