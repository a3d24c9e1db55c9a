"""`cutefuse.torch.fuse` on a dense block: normalisation and ReLU before each convolution, older tensors joined once."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
nn = torch.nn


class Dense(nn.Module):
    """Layers of BatchNorm, ReLU and Conv over everything before them, `growth` channels each."""

    def __init__(self, layers: int, growth: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(growth * (i + 1)) for i in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(growth * (i + 1), growth, 3, padding=1) for i in range(layers))

    def forward(self, x: Any) -> Any:
        made = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            made.append(conv(torch.relu(norm(torch.cat(made, 1)))))
        return torch.tanh(made[-1])


def model(layers: int, dtype: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    made = Dense(layers)
    for norm in made.norms:
        norm.running_mean.normal_(0, 0.2)
        norm.running_var.uniform_(0.5, 1.5)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    made = made.eval().to(dtype).to(memory_format=torch.channels_last)
    return made, torch.randn(2, 8, 7, 5).to(dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layers", [3, 10])
def test_a_dense_block_computes_the_same_with_its_normalisations_inside(dtype: Any, layers: int) -> None:
    from cutefuse.torch import fuse

    made, x = model(layers, dtype)
    result = fuse(copy.deepcopy(made), (x,), all_sites=True)
    assert len(result.report.taken) == layers and all("CutePre" in t for t in result.report.taken.values())
    joins = [n for n in result.graph.nodes if n.target == torch.ops.aten.cat.default]
    assert len(joins) == (1 if layers > 8 else 0), "tensors older than seven layers are joined once for all"
    with torch.no_grad():
        truth, plain, ours = copy.deepcopy(made).double()(x.double()), made(x).double(), result(x).double()
    allowed = 3 * float((plain - truth).abs().max()) + torch.finfo(dtype).eps
    assert float((ours - truth).abs().max()) <= allowed


def test_without_pre_activations_the_normalisations_stay() -> None:
    from cutefuse.torch import fuse

    made, x = model(3, torch.float16)
    result = fuse(made, (x,), all_sites=True, without=("pre_activation",))
    assert not any("CutePre" in t for t in result.report.taken.values())
