"""replace_norms: which modules it takes, which it leaves and why, and that a look at a module changes nothing in it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def norms() -> dict[str, Any]:
    """Norms as model libraries write them, by class name; each takes (size) and has random parameters."""
    import torch
    from torch import nn

    class Base(nn.Module):
        """x / sqrt(mean(x^2) + eps) * weight, as Llama's model code writes it."""

        def __init__(self, size: int, eps: float = 1e-6, bias: bool = False) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(size))
            self.bias = nn.Parameter(torch.randn(size)) if bias else None
            self.eps = eps

        def normalised(self, x: Any) -> Any:
            x = x.float()
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

        def forward(self, x: Any) -> Any:
            return self.weight * self.normalised(x).to(x.dtype)

    class LlamaRMSNorm(Base):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.variance_epsilon = self.__dict__.pop("eps")

        def normalised(self, x: Any) -> Any:
            x = x.float()
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    class T5LayerNorm(LlamaRMSNorm):
        """A LayerNorm by name that subtracts no mean and has no bias."""

    class CohereLayerNorm(Base):
        """A LayerNorm without a bias that is no nn.LayerNorm."""

        def forward(self, x: Any) -> Any:
            wide = x.float()
            wide = wide - wide.mean(-1, keepdim=True)
            return (self.weight.float() * self.normalised(wide)).to(x.dtype)

    class FloatLayerNorm(nn.LayerNorm):
        def forward(self, x: Any) -> Any:
            wide = (x.float(), self.normalized_shape, self.weight.float(), self.bias.float())
            return nn.functional.layer_norm(*wide, self.eps).to(x.dtype)

    class Qwen3NextRMSNorm(Base):
        def forward(self, x: Any) -> Any:
            return (self.normalised(x.float()) * (1.0 + self.weight.float())).type_as(x)

    class WideRMSNorm(Base):
        """Gives float32 whatever it is given."""

        def forward(self, x: Any) -> Any:
            return self.weight.float() * self.normalised(x)

    class OutsideRMSNorm(Base):
        """Adds eps to the root, not to the mean."""

        def forward(self, x: Any) -> Any:
            wide = x.float()
            return (self.weight * wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype)

    class SampleLayerNorm(Base):
        """Divides by the deviation of a sample: n - 1."""

        def forward(self, x: Any) -> Any:
            wide = x.float()
            variance, mean = torch.var_mean(wide, -1, correction=1, keepdim=True)
            return ((wide - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias).to(x.dtype)

    class ScaledLayerNorm(nn.LayerNorm):
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    class NoisyRMSNorm(Base):
        """Like Llama's, with dropout while it trains."""

        def forward(self, x: Any) -> Any:
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    class LayerNorm2d(nn.LayerNorm):
        """Over the channels of an image."""

        def forward(self, x: Any) -> Any:
            x = nn.functional.layer_norm(x.movedim(1, -1), self.normalized_shape, self.weight, self.bias, self.eps)
            return x.movedim(-1, 1)

    class GatedRMSNorm(Base):
        def forward(self, x: Any, gate: Any = None) -> Any:
            return super().forward(x if gate is None else x * nn.functional.silu(gate))

    class CountingRMSNorm(Base):
        calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return super().forward(x)

    class RecordingRMSNorm(Base):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.seen: list[Any] = [object()]

        def forward(self, x: Any) -> Any:
            self.seen.append(x)
            return super().forward(x)

    class BufferRMSNorm(Base):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.register_buffer("factor", torch.ones(()))

        def forward(self, x: Any) -> Any:
            return (super().forward(x) * self.factor).to(x.dtype)

    class PairRMSNorm(Base):
        def forward(self, x: Any) -> Any:
            return super().forward(x), x

    class ConstantRMSNorm(Base):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.size = size
            del self.eps

        def normalised(self, x: Any) -> Any:
            return nn.functional.rms_norm(x.float(), (self.size,), None, 1e-6)

    class TensorRMSNorm(LlamaRMSNorm):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.variance_epsilon = torch.tensor(self.variance_epsilon)

    class OtherwiseRMSNorm(Base):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.scale = self.weight
            del self.weight

        def forward(self, x: Any) -> Any:
            return self.normalised(x).to(x.dtype) * self.scale

    class CubeRMSNorm(Base):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.weight = nn.Parameter(torch.randn(1, 1, size))

    classes: dict[str, Any] = {k: v for k, v in locals().items() if isinstance(v, type) and k != "Base"}
    classes["SampleLayerNorm"] = lambda size: SampleLayerNorm(size, bias=True)
    return classes


TAKEN = ["LlamaRMSNorm", "T5LayerNorm", "CohereLayerNorm", "FloatLayerNorm"]
LEFT = {
    "Qwen3NextRMSNorm": "computes neither RMSNorm nor LayerNorm",
    "WideRMSNorm": "turns float16 into float32",
    "OutsideRMSNorm": "computes neither RMSNorm nor LayerNorm",
    "SampleLayerNorm": "computes no LayerNorm",
    "ScaledLayerNorm": "computes no LayerNorm",
    "NoisyRMSNorm": "something else in training mode",
    "LayerNorm2d": "fails on",
    "GatedRMSNorm": "takes more than a tensor: gate",
    "CountingRMSNorm": "changes its attribute calls",
    "RecordingRMSNorm": "attribute seen is a list",
    "BufferRMSNorm": "buffer factor",
    "PairRMSNorm": "returns a tuple",
    "ConstantRMSNorm": "no epsilon",
    "TensorRMSNorm": "attribute variance_epsilon is a Tensor",
    "OtherwiseRMSNorm": "parameters are scale",
    "CubeRMSNorm": r"weight is \[1, 1, 48\]",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", TAKEN)
def test_norms_of_model_code_are_taken(name: str, dtype: str, device: str) -> None:
    import torch

    from cutefuse import torch as cute

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    module = norms()[name](48).to(device, kind)
    x = (torch.randn(3, 5, 48, device=device) + 1).to(kind)
    before = module(x).double()
    report = cute.replace_norms(module)
    assert report.replaced == (name,) and not report.left
    assert type(module) in (cute.RMSNorm, cute.LayerNorm)
    step = max(torch.finfo(kind).eps, 1e-7)
    torch.testing.assert_close(module(x).double(), before, rtol=4 * step, atol=8 * step)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LEFT)
def test_a_norm_that_differs_is_left_and_named(name: str, device: str) -> None:
    import re

    import torch
    from torch import nn

    from cutefuse import torch as cute

    torch.manual_seed(0)
    kind = {"WideRMSNorm": torch.float16, "SampleLayerNorm": torch.bfloat16}.get(name, torch.float32)
    model = nn.Sequential(nn.LayerNorm(48), norms()[name](48)).to(device, kind)
    was = type(model[1])
    report = cute.replace_norms(model)
    assert report.replaced == ("0",) and list(report.left) == ["1"] and type(model[1]) is was
    assert re.search(LEFT[name], report.left["1"]), report.left["1"]
    assert report.left["1"].startswith(f"{was.__name__}: ") and f"1, {report.left['1']}" in str(report)


@pytest.mark.parametrize("device", DEVICES)
def test_looking_at_a_module_changes_nothing_in_it(device: str) -> None:
    import torch
    from torch import nn

    from cutefuse import torch as cute

    torch.manual_seed(0)
    classes = norms()
    model = nn.ModuleDict({name: classes[name](48) for name in ("LlamaRMSNorm", *LEFT)}).to(device)
    model["plain"] = nn.LayerNorm(48, device=device)
    calls: list[Any] = []
    for i, module in enumerate(model.values()):
        module.register_forward_hook(lambda *a: calls.append(a))
        module.register_forward_pre_hook(lambda *a: calls.append(a))
        module.train(bool(i % 2))
    model["WideRMSNorm"].half()
    state = {k: (v, v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    modes = {k: m.training for k, m in model.items()}
    states = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    seen, count = model["RecordingRMSNorm"].seen.copy(), model["CountingRMSNorm"].calls
    report = cute.replace_norms(model)
    assert report.replaced == ("LlamaRMSNorm", "plain") and set(report.left) == set(LEFT)
    for now, then in zip([torch.get_rng_state(), *torch.cuda.get_rng_state_all()], states, strict=True):
        assert torch.equal(now, then)
    assert {k: m.training for k, m in model.items()} == modes and not calls
    assert model["RecordingRMSNorm"].seen == seen and model["CountingRMSNorm"].calls == count
    for key, value in model.state_dict(keep_vars=True).items():
        assert value is state[key][0] and torch.equal(value, state[key][1])
        assert value.grad is None
    model["LlamaRMSNorm"](torch.randn(2, 48, device=device))
    assert len(calls) == 2, "hooks stay where they were"


@pytest.mark.parametrize(
    "arguments", [{}, {"elementwise_affine": False}, {"bias": False}, {"eps": 1e-2}, {"eps": 0.0}]
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torchs_own_norms_are_taken(arguments: dict[str, Any], dtype: str, device: str) -> None:
    import torch
    from torch import nn

    from cutefuse import torch as cute

    kind = getattr(torch, dtype)
    model = nn.ModuleList([nn.LayerNorm(48, **arguments), nn.RMSNorm(48)])
    if "bias" not in arguments:
        model.append(nn.RMSNorm(48, **arguments))
    model.to(device, kind)
    x = (torch.randn(4, 48, device=device) * 2.0**-10).to(kind)  # so small that epsilon rules the result
    before = [norm(x) for norm in model]
    report = cute.replace_norms(model)
    assert len(report.replaced) == len(model) and not report.left
    for norm, expected in zip(model, before, strict=True):
        torch.testing.assert_close(norm(x), expected)
    again = cute.replace_norms(model)
    assert not again.replaced and not again.left, "a second time there is nothing to do and nothing to say"
    assert model[0](input=x).dtype == kind, "by the name that nn.LayerNorm gives it"


def test_what_cannot_be_looked_at_is_left_in_words() -> None:
    import torch
    from torch import nn
    from torch.nn.utils import prune

    from cutefuse import torch as cute

    def parametrised(norm: Any) -> Any:
        return nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())

    pruned = prune.random_unstructured(nn.LayerNorm(8), "weight", 0.5)
    patched = nn.LayerNorm(8)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    cases = {
        "meta device": nn.LayerNorm(8, device="meta"),
        "is parametrised": parametrised(nn.LayerNorm(8)),
        "goes over 2 axes": nn.LayerNorm((4, 8)),
        "forward was replaced on this instance": patched,
        "are torch.float16 and torch.float32": nn.LayerNorm(8),
        "torch.float8_e5m2": nn.LayerNorm(8).to(torch.float8_e5m2),
        "parameters are bias, weight_orig": pruned,
        "UninitializedParameter": nn.LayerNorm(8),
    }
    cases["are torch.float16 and torch.float32"].bias = nn.Parameter(torch.zeros(8, dtype=torch.float16))
    cases["UninitializedParameter"].weight = nn.UninitializedParameter()
    for text, module in cases.items():
        before, report = type(module), cute.replace_norms(nn.ModuleDict({"norm": module}))
        assert not report.replaced and text in report.left["norm"], (text, report)
        assert type(module) is before


def test_what_is_no_such_norm_is_not_named() -> None:
    from torch import nn

    from cutefuse import torch as cute

    class BlockWithLayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.dense = nn.LayerNorm(8), nn.Linear(8, 8)

    model = nn.Sequential(nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.Linear(8, 8), BlockWithLayerNorm())
    report = cute.replace_norms(model)
    assert report.replaced == ("3.inner",) and not report.left
    assert str(report) == "1 norm replaced"
