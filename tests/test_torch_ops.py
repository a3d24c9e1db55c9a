"""The PyTorch operators: registration, gradients, torch.compile, modules; on the CPU by formula, on a GPU by kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEVICES = [pytest.param("cpu", marks=pytest.mark.torch), pytest.param("cuda", marks=pytest.mark.gpu)]


def samples(torch: Any, device: str, dtype: Any = None) -> list[tuple[Any, tuple[Any, ...]]]:
    """Every operator of the norms with arguments that need gradients: all optional operands, and none."""
    import cutefuse.torch  # noqa: F401

    torch.manual_seed(0)
    kind = dtype or torch.float32

    def t(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=kind, requires_grad=True)

    ops = torch.ops.cutefuse
    return [
        (ops.rms_norm, (t(3, 5, 48), None, t(48), 1e-6)),
        (ops.rms_norm, (t(7, 33), t(7, 33), t(33), 1e-6)),
        (ops.rms_norm, (t(4, 64), None, None, 1e-6)),
        (ops.layer_norm, (t(3, 5, 48), None, t(48), t(48), 1e-5)),
        (ops.layer_norm, (t(7, 33), t(7, 33), t(33), None, 1e-5)),
        (ops.layer_norm, (t(4, 64), None, None, None, 1e-5)),
    ]


def built() -> bool:
    """Whether the library holds convolutions: a GPU run may carry the norms alone."""
    from cutefuse import kernels

    return any(o["name"] == "concat_conv" for o in kernels.describe()["ops"])


@pytest.mark.parametrize("device", DEVICES)
def test_operators_pass_opcheck(device: str) -> None:
    import torch

    for i, (op, args) in enumerate(samples(torch, device)):
        tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
        # Tracing with symbolic shapes takes minutes per sample on two slow cores; a GPU machine does all of them.
        if device == "cuda" or i == 1:
            tests.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(op.default, args, test_utils=tests)


def convolutions(torch: Any, device: str, dtype: Any = None) -> list[tuple[Any, tuple[Any, ...]]]:
    """Functions of (two sources, scale and shift where there are, filter, bias), and tensors for them."""
    from cutefuse import torch as cute

    torch.manual_seed(0)

    def t(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=dtype or torch.float32, requires_grad=True)

    def function(of: Any, activation: str) -> Any:
        return lambda a, b, *ts: of(
            [a, b], *ts, stride=[1, 2], padding=[0, 1, 2, 1], activation=activation, alpha=0.1, lo=-1.0, hi=1.0
        )

    found = []
    for activation in cute.ACTIVATIONS:
        for of, vectors in ((cute.concat_conv, ()), (cute.pre_concat_conv, (t(24), t(24)))):
            tensors = (t(2, 8, 7, 6), t(2, 16, 7, 6), *vectors, t(12, 24, 3, 3), t(12))
            found.append((function(of, activation), tensors))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_convolutions_compile_without_a_graph_break_and_have_pytorchs_derivatives(device: str) -> None:
    import torch

    if device == "cuda" and not built():
        pytest.skip("the library was built with the norms alone")
    for function, tensors in convolutions(torch, device)[4:6]:
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        y, z = function(*tensors), compiled(*tensors)
        assert y.is_contiguous(memory_format=torch.channels_last) and y.stride() == z.stride()
        dy = torch.randn_like(y)
        for a, b in zip(torch.autograd.grad(y, tensors, dy), torch.autograd.grad(z, tensors, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.torch
def test_convolutions_keep_a_dynamic_batch_and_are_exported_and_transformed() -> None:
    import torch

    (plain, tensors), (pre, more) = convolutions(torch, "cpu")[2:4]
    seen = list[Any]()

    def backend(module: Any, _: Any) -> Any:
        seen.append(module)
        return module

    dynamic = torch.compile(plain, backend=backend, fullgraph=True, dynamic=True)
    for batch in (2, 3, 5):
        xs = [t.detach()[:1].repeat(batch, 1, 1, 1) for t in tensors[:2]]
        torch.testing.assert_close(dynamic(*xs, *tensors[2:]), plain(*xs, *tensors[2:]))
    assert len(seen) == 1

    class Module(torch.nn.Module):
        def forward(self, *ts: Any) -> Any:
            return pre(*ts)

    exported = torch.export.export(Module(), tuple(t.detach() for t in more)).module()
    torch.testing.assert_close(exported(*(t.detach() for t in more)), pre(*more))
    detached = tuple(t.detach() for t in tensors)
    transformed = torch.func.grad(lambda *ts: plain(*ts).square().sum(), argnums=2)(*detached)
    torch.testing.assert_close(transformed, torch.autograd.grad(plain(*tensors).square().sum(), tensors[2])[0])


@pytest.mark.torch
def test_a_bias_and_a_source_without_gradient_are_left_alone() -> None:
    import torch

    for function, (*tensors, w, _) in convolutions(torch, "cpu")[:4]:
        tensors[0] = tensors[0].detach()
        function(*tensors, w).sum().backward()
        assert tensors[0].grad is None and w.grad.shape == w.shape and tensors[1].grad is not None


@pytest.mark.torch
def test_gradients_pass_gradcheck_in_float64() -> None:
    import torch

    for op, args in samples(torch, "cpu", torch.float64):

        def norm(*a: Any, op: Any = op, residual: bool = args[1] is not None) -> Any:
            outputs = op(*a)
            return outputs[:2] if residual else outputs[0]

        assert torch.autograd.gradcheck(norm, args, fast_mode=True)
    for function, tensors in convolutions(torch, "cpu", torch.float64):
        assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_modules_are_drop_in_replacements(device: str) -> None:
    import torch
    from torch import nn

    from cutefuse import torch as cute

    torch.manual_seed(0)
    pairs = [
        (nn.LayerNorm(96), cute.LayerNorm(96)),
        (nn.LayerNorm(96, elementwise_affine=False), cute.LayerNorm(96, elementwise_affine=False)),
        (nn.LayerNorm(96, bias=False), cute.LayerNorm(96, bias=False)),
        (nn.RMSNorm(96), cute.RMSNorm(96)),
        (nn.RMSNorm(96, eps=1e-3), cute.RMSNorm(96, eps=1e-3)),
    ]
    for theirs, ours in pairs:
        for p in theirs.parameters():
            nn.init.normal_(p)
        ours.load_state_dict(theirs.state_dict())
        theirs, ours = theirs.to(device), ours.to(device)
        a = torch.randn(4, 7, 96, device=device, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        grad = torch.randn(4, 7, 96, device=device)
        x, y = theirs(a), ours(b)
        x.backward(grad)
        y.backward(grad)
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-5)
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_carries_its_own_gradient(device: str) -> None:
    import torch
    import torch.nn.functional as F

    from cutefuse import torch as cute

    torch.manual_seed(0)
    x, r, w, b = (torch.randn(*s, device=device, requires_grad=True) for s in ((6, 40), (6, 40), (40,), (40,)))
    y, total = cute.add_layer_norm(x, r, w, b)
    ours = torch.autograd.grad((y * y).sum() + (total * 3).sum(), (x, r, w, b))
    s = x + r
    z = F.layer_norm(s, (40,), w, b)
    theirs = torch.autograd.grad((z * z).sum() + (s * 3).sum(), (x, r, w, b))
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    _, total = cute.add_rms_norm(x, r, w)
    (only,) = torch.autograd.grad(total.sum(), x)
    assert bool((only == 1).all()), "a norm whose output nobody uses must not disturb the sum's gradient"


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_a_graph_break(device: str) -> None:
    import torch

    from cutefuse import torch as cute

    def step(x: Any, r: Any, w: Any) -> Any:
        y, total = cute.add_rms_norm(x * 2, r, w)
        return cute.layer_norm(y, w) + total

    torch.manual_seed(0)
    backend = "inductor" if device == "cuda" else "aot_eager"
    args = [torch.randn(*s, device=device, requires_grad=True) for s in ((5, 64), (5, 64), (64,))]
    expected = torch.autograd.grad(step(*args).square().sum(), args)
    got = torch.autograd.grad(torch.compile(step, backend=backend, fullgraph=True)(*args).square().sum(), args)
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_misaligned_and_empty_inputs_give_the_same_values(device: str) -> None:
    import torch

    from cutefuse import torch as cute

    base = torch.randn(9, 70, device=device)
    w = torch.randn(65, device=device)[1:]
    strided, moved = base[:, 3:67], torch.randn(1 + 9 * 64, device=device)[1:].view(9, 64)
    for x in (strided, moved, base[:, :64].t().contiguous().t(), base[:0, :64]):
        expected = torch.nn.functional.rms_norm(x, (64,), w, 1e-6)
        torch.testing.assert_close(cute.rms_norm(x, w), expected, rtol=1e-5, atol=1e-5)
    x = base[:0, :64].clone().requires_grad_()
    v = w.clone().requires_grad_()
    cute.rms_norm(x, v).sum().backward()
    assert x.grad.shape == (0, 64) and bool((v.grad == 0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_replace_norms_changes_every_norm_and_nothing_else(device: str) -> None:
    import torch

    from cutefuse import torch as cute

    sys.path.insert(0, str(ROOT / "models"))
    import llama_block

    config = llama_block.Config(layers=2, dim=64, heads=4, kv_heads=2, intermediate=96, vocabulary=50)
    model = llama_block.make(config).to(device)
    tokens = torch.arange(24, device=device).view(2, 12)
    with torch.no_grad():
        before = model(tokens)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        report = cute.replace_norms(model)
        assert len(report.replaced) == 5 and not report.left
        torch.testing.assert_close(model(tokens), before, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
    assert "RMSNorm" in repr(model)


@pytest.mark.torch
def test_wrong_arguments_are_named() -> None:
    import torch

    from cutefuse import torch as cute
    from cutefuse.errors import CutefuseError

    xs = [torch.randn(1, 8, 4, 4), torch.randn(1, 8, 4, 4)]
    with pytest.raises(CutefuseError, match="activation 'Mish' is unknown"):
        cute.concat_conv(xs, torch.randn(4, 16, 1, 1), activation="Mish")
    with pytest.raises(CutefuseError, match="9 sources were given; give 1 to 8"):
        cute.concat_conv([*xs, *xs, *xs, *xs, xs[0]], torch.randn(4, 72, 1, 1))
    with pytest.raises(CutefuseError, match="16 channels, the filter has 12"):
        cute.concat_conv(xs, torch.randn(4, 12, 1, 1))
    with pytest.raises(CutefuseError, match="the filter has 16, scale and shift have 16 and 8"):
        cute.pre_concat_conv(xs, torch.ones(16), torch.ones(8), torch.randn(4, 16, 1, 1))
    with pytest.raises(CutefuseError, match="activation 'Mish' is unknown"):
        cute.pre_concat_conv(xs, torch.ones(16), torch.ones(16), torch.randn(4, 16, 1, 1), activation="Mish")


@pytest.mark.gpu
def test_a_kernel_refusal_reaches_python_as_one_sentence() -> None:
    import torch

    from cutefuse import torch as cute
    from cutefuse.errors import CutefuseError

    x = torch.randn(4, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(CutefuseError, match="a vector|vector of 64"):
        cute.rms_norm(x, torch.randn(32, device="cuda"))
    with pytest.raises(CutefuseError, match="bfloat16 beside a float16 input"):
        cute.rms_norm(x, torch.randn(64, device="cuda", dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_concat_conv_matches_pytorch_with_any_channels(dtype: str) -> None:
    import torch

    from cutefuse import torch as cute

    if not built():
        pytest.skip("the library was built with the norms alone")
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    for channels, filters in (((64, 32), 48), ((5, 11, 3), 19)):
        xs = [torch.randn(2, c, 20, 14, device="cuda").to(kind) for c in channels]
        w = (torch.randn(filters, sum(channels), 3, 3, device="cuda") / 20).to(kind)
        b = torch.randn(filters, device="cuda")
        y = cute.concat_conv(xs, w, b, (2, 1), (1, 1, 1, 1), activation="Relu")
        z = torch.nn.functional.conv2d(torch.cat(xs, 1).double(), w.double(), b.double(), (2, 1), 1).relu()
        scale = {"float32": 2e-3, "float16": 2e-3, "bfloat16": 1.5e-2}[dtype]
        assert float((y.double() - z).abs().max()) <= scale * float(z.abs().max())
        assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pre_concat_conv_matches_pytorch_and_pads_with_zeros(dtype: str, device: str) -> None:
    import torch

    from cutefuse import torch as cute

    if device == "cuda" and not built():
        pytest.skip("the library was built with the norms alone")
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    for channels in ((64, 32), (5, 11, 3)):  # the second in PyTorch's own operators before the kernel
        xs = [torch.randn(2, c, 9, 7, device=device).to(kind) for c in channels]
        norm = torch.randn(2, sum(channels), device=device).to(kind)
        w = (torch.randn(24, sum(channels), 3, 3, device=device) / 20).to(kind)
        y = cute.pre_concat_conv(xs, norm[0], norm[1] + 2, w, None, (2, 1), (1, 1, 1, 1), activation="Silu")
        scale, shift = norm[0].double().view(1, -1, 1, 1), (norm[1] + 2).double().view(1, -1, 1, 1)
        seen = (torch.cat(xs, 1).double() * scale + shift).relu()
        z = torch.nn.functional.silu(torch.nn.functional.conv2d(seen, w.double(), None, (2, 1), 1))
        allowed = {"float32": 2e-3, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
        assert float((y.double() - z).abs().max()) <= allowed * float(z.abs().max())
        assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.torch
@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu", "Clip", "Silu", "HardSwish", "Sigmoid", "Tanh", "Gelu"])
def test_activations_have_pytorchs_derivatives_at_knees_infinities_and_nan(activation: str) -> None:
    import torch

    from cutefuse.torch.conv import activate
    from cutefuse.torch.conv_autograd import _GRADIENTS

    infinite = float("inf")
    points = [-infinite, -4, -3, -2.9, -1, -0.5, -0.0, 0, 0.5, 1, 2.9, 3, 3.1, infinite, float("nan")]
    z = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    dy = torch.linspace(-2, 2, len(points), dtype=torch.float64)
    (want,) = torch.autograd.grad(activate(z, activation, 0.1, -1.0, 1.0), z, dy)
    got = _GRADIENTS[activation](dy, z.detach(), 0.1, -1.0, 1.0)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
