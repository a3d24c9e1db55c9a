"""`cutefuse.torch.fuse` on the CPU, where the fused operator runs in PyTorch: what is taken, what is left and why, that
the numbers stay, and that the result compiles, saves, exports to ONNX and composes with the norms."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from cutefuse import kernels

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
nn = torch.nn


def conv(c: int, k: int, size: int = 3, act: Any = None, **named: Any) -> Any:
    parts = [nn.Conv2d(c, k, size, padding=size // 2, bias=False, **named), nn.BatchNorm2d(k)]
    return nn.Sequential(*parts, *([act] if act is not None else []))


class Block(nn.Module):
    """A shortcut, a Concat, an enlarged source, a range of channels, a norm, and things that stay."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.stem = conv(16, 32, act=nn.ReLU(inplace=True))
        self.down = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.same = conv(32, 32, 1, act=nn.SiLU(inplace=True))
        self.up = nn.Upsample(scale_factor=2)
        self.join = conv(64, 16, act=nn.Hardswish(inplace=True), groups=groups)
        self.part = nn.Conv2d(8, 8, 1)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout()

    def forward(self, x: Any) -> Any:
        y = self.stem(x)
        z = nn.functional.leaky_relu_(self.down(y), 0.1)
        z = self.same(z) + z
        j = self.join(torch.cat([self.up(z), self.drop(y)], 1))
        a, b = j.chunk(2, 1)
        return self.norm(j.permute(0, 2, 3, 1)), nn.functional.hardtanh(self.part(b), -1.0, 0.5) * a


def model(groups: int = 1, dtype: Any = torch.float16) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    made = Block(groups)
    for part in made.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(part.weight, 0.5, 1.5)
    made = made.eval().to(dtype).to(memory_format=torch.channels_last)
    return made, (torch.randn(2, 16, 8, 8).to(dtype).contiguous(memory_format=torch.channels_last),)


def fused(made: Any, args: Any, **choices: Any) -> Any:
    from cutefuse.torch import fuse

    return fuse(made, args, **{"all_sites": True, **choices})


def assert_same(got: Any, made: Any, args: Any, factor: float = 2.0) -> None:
    """Each output at most `factor` times as far from float64 as PyTorch's own, and an ulp of the largest value."""
    with torch.no_grad():
        truth = copy.deepcopy(made).double()(*(a.double() for a in args))
        plain = made(*args)
    for ours, theirs, true in zip(got, plain, truth, strict=True):
        allowed = factor * float((theirs.double() - true).abs().max())
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert float((ours.double() - true).abs().max()) <= allowed + torch.finfo(ours.dtype).eps * true.abs().max()


MODULES = {
    "": nn.Identity(), "Relu": nn.ReLU(), "LeakyRelu": nn.LeakyReLU(0.2), "Clip": nn.ReLU6(), "Silu": nn.SiLU(),
    "HardSwish": nn.Hardswish(), "Sigmoid": nn.Sigmoid(), "Tanh": nn.Tanh(),
    "Gelu": nn.GELU(),
}  # fmt: skip


@pytest.mark.parametrize(("form", "named"), [("", {}), ("Depthwise", {"groups": 24, "stride": 2})])
@pytest.mark.parametrize("activation", kernels.describe()["activations"])
def test_every_activation_of_the_library_is_taken_behind_a_convolution(
    activation: str, form: str, named: dict[str, Any]
) -> None:
    made, args = conv(24, 24, act=MODULES[activation], **named).eval().half(), (torch.randn(1, 24, 9, 7).half(),)
    result = fused(copy.deepcopy(made), args)
    (taken,) = result.report.taken.values()
    assert taken.split()[0] == f"Cute{form}ConcatConv1{activation}"
    assert_same(result(*args), made, args)


class Separable(nn.Module):
    """A depthwise convolution of two joined tensors and a 1x1 one, linear in between."""

    def __init__(self, channels: tuple[int, int], dilation: int) -> None:
        super().__init__()
        c = sum(channels)
        self.deep = nn.Conv2d(c, c, 3, padding=dilation, dilation=dilation, groups=c, bias=False)
        self.wide = nn.Conv2d(c, 16, 1)

    def forward(self, x: Any, y: Any) -> Any:
        return torch.relu(self.wide(self.deep(torch.cat([x, y], 1))))


@pytest.mark.parametrize("dilation", [1, 5])
@pytest.mark.parametrize(("channels", "op_type"), [((16, 8), "2"), ((16, 13), "2"), ((12, 12), "1")])
def test_a_depthwise_convolution_reads_joined_tensors_of_whole_vectors(
    channels: tuple[int, int], op_type: str, dilation: int
) -> None:
    made = Separable(channels, dilation).eval().half()
    args = tuple(torch.randn(2, c, 11, 9).half() for c in channels)
    result = fused(copy.deepcopy(made), args)
    taken = [text.split()[0] for text in result.report.taken.values()]
    assert taken == [f"CuteDepthwiseConcatConv{op_type}", "CuteConcatConv1Relu"]
    assert_same(result(*args), made, args)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_site_is_taken_and_the_numbers_stay(dtype: Any) -> None:
    from cutefuse.torch import LayerNorm

    made, args = model(dtype=dtype)
    before, state = made(*args), {k: v.clone() for k, v in made.state_dict().items()}
    result = fused(copy.deepcopy(made), args, norms=False)
    report = result.report
    assert set(report.taken) == {"stem.0", "down", "same.0", "join.0", "part"} and report.left == {}
    assert "CuteViewConcatConv2HardSwish" in report.taken["join.0"] and "up2" in report.taken["join.0"]
    assert "SiluAdd" in report.taken["same.0"] and "[8:16]" in report.taken["part"]
    assert_same(result(*args), made, args)
    assert all(torch.equal(v, made.state_dict()[k]) for k, v in state.items())
    assert all(torch.equal(a, b) for a, b in zip(before, made(*args), strict=True))
    assert not any(isinstance(m, LayerNorm) for m in made.modules())


def test_norms_and_convolutions_are_one_call_and_one_report() -> None:
    from cutefuse.torch import layer_norm

    made, args = model()
    plain = copy.deepcopy(made)
    result = fused(made, args)
    assert result.report.norms.replaced == ("norm",)
    text = str(result.report)
    assert text.startswith("5 convolutions fused\n") and "1 norm replaced" in text and "fused: stem.0, Cute" in text
    assert [n.target for n in result.graph.nodes if n.target is layer_norm] == [layer_norm]
    assert_same(result(*args), plain, args)


def test_it_compiles_whole_and_its_filters_move_with_it(tmp_path: Path) -> None:
    made, args = model()
    result = fused(made, args)
    with torch.no_grad():
        want = result(*args)
        for got, true in zip(torch.compile(result, backend="aot_eager", fullgraph=True)(*args), want, strict=True):
            torch.testing.assert_close(got, true)
    assert {k.split(".")[-1] for k in result.state_dict() if k.startswith("fused_")} == {"packed", "bias"}
    names = {name for name, _ in result.named_parameters()}
    assert "stem.0.weight" not in names and "join.1.weight" not in names  # folded away
    other = fused(made, args)
    for name, value in other.state_dict().items():
        if name.startswith("fused_"):  # the rest is the given model's own
            value.zero_()
    other.load_state_dict(result.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other(*args), want, strict=True))


@pytest.mark.parametrize("channels", [16, 20])
def test_what_makes_an_image_lays_it_out_when_torch_compiles(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.torch import conv
    from cutefuse.torch.pixels import pixel_stride

    made = nn.Sequential(nn.InstanceNorm2d(channels), nn.Conv2d(channels, 16, 3), nn.ReLU()).eval().half()
    args = (torch.randn(2, channels, 8, 8).half().contiguous(memory_format=torch.channels_last),)
    result, seen, original = fused(made, args), list[int](), conv.reference

    def watched(inputs: Any, given: Any) -> Any:
        seen.append(pixel_stride(inputs[0]))
        return original(inputs, given)

    monkeypatch.setattr(conv, "reference", watched)
    with torch.no_grad():
        want = result(*args)
        got = torch.compile(result, backend="aot_eager", fullgraph=True)(*args)
    assert seen == [0, -(-channels // 8) * 8]
    torch.testing.assert_close(got, want)


def test_without_a_price_that_pays_it_is_left_with_the_figures() -> None:
    made, args = model()
    result = fused(made, args, all_sites=False)
    assert {*result.report.taken, *result.report.left} == {"stem.0", "down", "same.0", "join.0", "part"}
    assert all(" us" in reason for reason in result.report.left.values())
    assert_same(result(*args), made, args)


def test_the_user_chooses_sites() -> None:
    made, args = model()
    result = fused(made, args, include=["same*", "join*"], exclude=["join.0"])
    assert set(result.report.taken) == {"same.0"}
    assert "--exclude 'join.0' names it" in result.report.left["join.0"]
    result = fused(made, args, without=["upsample", "residual"])
    assert "Add" not in result.report.taken["same.0"] and "up2" not in result.report.taken["join.0"]
    assert_same(result(*args), made, args)


@pytest.mark.parametrize(("size", "fused_up"), [(16, True), (12, False)])
def test_nearest_exact_repeats_pixels_by_whole_factors_alone(size: int, fused_up: bool) -> None:
    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(32, 16, 1)

        def forward(self, x: Any, y: Any) -> Any:
            up = nn.functional.interpolate(x, size=size, mode="nearest-exact")
            return self.c(torch.cat([up, y], 1)).relu()

    args = (torch.randn(1, 16, 8, 8).half(), torch.randn(1, 16, size, size).half())
    made = Exact().eval().half()
    result = fused(made, args)
    assert ("up2" in result.report.taken["c"]) == fused_up
    assert_same(result(*args), made, args)


def test_a_dynamic_batch_stays_dynamic() -> None:
    made, args = model()
    batch = torch.export.Dim("n", min=1, max=8)
    result = fused(made, args, dynamic_shapes=({0: batch},))
    assert len(result.report.taken) == 5
    other = (torch.randn(5, 16, 8, 8).half(),)
    assert_same(result(*other), made, other)


def test_onnx_gets_the_plugins_nodes_and_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    import onnx

    from cutefuse.engines.pytorch.run import TorchEngine
    from cutefuse.rewrite.patch import Options, patch

    made, args = model()
    result = fused(copy.deepcopy(made), args, norms=False)
    ours = torch.onnx.export(result, args, dynamo=True, verbose=False).model_proto
    torch.onnx.export(made, args, str(tmp_path / "plain.onnx"), dynamo=True, external_data=False, verbose=False)
    patch(
        tmp_path / "plain.onnx",
        tmp_path / "patched.onnx",
        Options(all_sites=True, engine="torch", include_op=["concat_conv"]),
    )
    patched = onnx.load(str(tmp_path / "patched.onnx"))

    def nodes(proto: Any) -> list[Any]:
        return sorted(
            (n.op_type, sorted((a.name, str(onnx.helper.get_attribute_value(a))) for a in n.attribute))
            for n in proto.graph.node if n.domain == "cutefuse"
        )  # fmt: skip

    assert len(nodes(ours)) == 5 and nodes(ours) == nodes(patched)
    (feed,) = (i.name for i in ours.graph.input)
    got = TorchEngine.build(ours, device="cpu")({feed: args[0].numpy()})
    assert_same(list(got.values()), made, args)


@pytest.mark.parametrize(("channels", "groups"), [(16, 1), (20, 1), (16, 16)])
def test_onnx_has_no_node_that_lays_an_image_out(channels: int, groups: int) -> None:
    pytest.importorskip("onnxscript")
    made = nn.Sequential(nn.Conv2d(channels, 16, 3, groups=groups), nn.ReLU()).eval().half()
    args = (torch.randn(1, channels, 8, 8).half(),)
    ours = torch.onnx.export(fused(made, args), args, dynamo=True, verbose=False).model_proto
    (node,) = ours.graph.node
    assert node.op_type == f"Cute{'Depthwise' if groups > 1 else ''}ConcatConv1Relu"
    assert [a.i for a in node.attribute if a.name == "group"] == ([groups] if groups > 1 else [])


# ---------------------------------------------------------------------------------------------- what stays, and why


@pytest.mark.parametrize(
    "choices, name, reason",
    [
        ({"groups": 2}, "join.0", "2 groups; only group=1"),
        ({"dtype": torch.float32}, "stem.0", "it computes in float32; fuse takes float16 and bfloat16, call half"),
    ],
)
def test_a_convolution_that_stays_says_why(choices: dict[str, Any], name: str, reason: str) -> None:
    made, args = model(**choices)
    result = fused(made, args)
    assert reason in result.report.left[name] and name not in result.report.taken
    assert f"left as it was: {name}, " in str(result.report)
    assert_same(result(*args), made, args)


class Odd(nn.Module):
    """Convolutions that are none of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.apart, self.line = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.Conv1d(16, 16, 3)
        self.back = nn.ConvTranspose2d(16, 16, 3, stride=2, output_padding=1)
        self.shared = conv(16, 16)
        self.free = nn.Parameter(torch.randn(16, 16, 1, 1))

    def forward(self, x: Any) -> Any:
        y = self.shared(x)
        filters = self.free * x.mean()
        return (
            torch.sort(self.apart(x), 1)[0], self.line(x.flatten(2)).relu(), self.back(x).relu(), y + y.relu(),
            torch.relu(nn.functional.conv2d(x, filters)), torch.relu(x + 1),
        )  # fmt: skip


def test_what_is_no_site_is_left_alone_with_its_reason() -> None:
    torch.manual_seed(0)
    made, args = Odd().eval().half(), (torch.randn(1, 16, 6, 6).half(),)
    result = fused(made, args)
    left = result.report.left
    assert "it has 4 groups; only group=1" in left["apart"]
    assert "only conv2d can be fused" in left["line"] and "ConvTranspose" in left["back"]
    assert "computed at run time" in next(v for k, v in left.items() if k.startswith("conv2d"))
    assert set(result.report.taken) <= {"shared.0"}
    assert_same(result(*args), made, args)


@pytest.mark.parametrize("padding", [0, 1])
def test_a_deconvolution_over_squares_is_taken_with_its_activation_and_with_no_more_pixels(padding: int) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.ConvTranspose2d(16, 24, 2, stride=2, output_padding=padding), nn.BatchNorm2d(24), nn.ReLU()
    )  # fmt: skip
    made, args = made.eval().half(), (torch.randn(2, 16, 6, 5).half(),)
    result = fused(made, args)
    assert set(result.report.taken) == (set() if padding else {"0"})
    assert result(*args).shape == (2, 24, 12 + padding, 10 + padding)
    assert_same(result(*args), made, args)


@pytest.mark.parametrize("alpha", [1, 2])
def test_a_sum_with_a_factor_is_no_shortcut(alpha: int) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(16, 16, 1)

        def forward(self, x: Any) -> tuple[Any]:
            return (torch.add(x, self.c(x), alpha=alpha),)

    made, args = Sum().eval().half(), (torch.randn(1, 16, 6, 6).half(),)
    result = fused(made, args)
    assert result.report.taken["c"].startswith("CuteConcatConv1Add ") == (alpha == 1), "else it stands alone"
    assert_same(result(*args), made, args)


def test_another_size_is_refused_before_anything_runs() -> None:
    made, args = model()
    result = fused(made, args)
    with pytest.raises(Exception, match="(?i)guard|size|shape"):
        result(torch.randn(2, 16, 12, 12).half())


def test_mistakes_are_one_sentence() -> None:
    from cutefuse.errors import CutefuseError
    from cutefuse.torch import fuse

    made, args = model()
    with pytest.raises(CutefuseError, match=r"in training mode, .* call eval\(\)"):
        fuse(made.train(), args)

    class Branch(nn.Module):
        def forward(self, x: Any) -> Any:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(CutefuseError, match="torch.export cannot take the model") as error:
        fuse(Branch().eval(), args)
    assert "\n" not in str(error.value)


def test_a_fused_model_is_not_for_training() -> None:
    made, args = model()
    result = fused(made, args)
    x = args[0].clone().requires_grad_()
    with pytest.raises(RuntimeError):
        result(x)[1].sum().backward()


def test_gelu_by_tanh_is_not_taken() -> None:
    made, args = conv(16, 24, act=nn.GELU(approximate="tanh")).eval().half(), (torch.randn(1, 16, 9, 7).half(),)
    (taken,) = fused(made, args).report.taken.values()
    assert taken.split()[0] == "CuteConcatConv1"
