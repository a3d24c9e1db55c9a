"""The compiled half of cutefuse.torch: values, derivatives, plans and refusals, on the CPU over a stand-in for the
library; and how it is built, kept and done without."""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DTYPES = ("float32", "float16", "bfloat16")
ERRORS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}


@pytest.fixture(scope="module")
def extension() -> Any:
    from cutefuse.errors import CutefuseError
    from cutefuse.torch import compiled

    try:
        return compiled.module(compiled.build())
    except CutefuseError as error:
        pytest.skip(str(error))


@pytest.fixture
def stub(extension: Any) -> Iterator[Any]:
    from native_stub import on_cpu

    with on_cpu(extension) as found:
        yield found


def given(*shape: int, dtype: str = "float32", grad: bool = True) -> Any:
    t = torch.randn(*shape).to(getattr(torch, dtype))
    return t.requires_grad_() if grad else t


def calls(
    x: Any, residual: Any, w: Any, b: Any
) -> list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]:
    """(ours, the formula in float64, the tensors) of every function."""
    import torch.nn.functional as F

    import cutefuse.torch as ours

    size = (x.shape[-1],)
    return [
        (ours.layer_norm, lambda x, w, b: F.layer_norm(x, size, w, b), (x, w, b)),
        (ours.rms_norm, lambda x, w: F.rms_norm(x, size, w, 1e-6), (x, w)),
        (lambda *t: sum(ours.add_rms_norm(*t)), lambda x, r, w: x + r + F.rms_norm(x + r, size, w, 1e-6),
         (x, residual, w)),
        (lambda *t: ours.add_layer_norm(*t)[1], lambda x, r, w, b: x + r, (x, residual, w, b)),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 48), (7, 33), (1, 1)])
def test_values_and_gradients_are_those_of_the_formula(stub: Any, dtype: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, residual = given(*shape, dtype=dtype), given(*shape, dtype=dtype)
    w, b, dy = given(shape[-1], dtype=dtype), given(shape[-1], dtype=dtype), given(*shape, dtype=dtype, grad=False)
    for ours, formula, tensors in calls(x, residual, w, b):
        y = ours(*tensors)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        want = formula(*wide)
        found = torch.autograd.grad(y, tensors, dy, allow_unused=True, materialize_grads=True)
        truth = torch.autograd.grad(want, wide, dy.double(), allow_unused=True, materialize_grads=True)
        for got, true in zip((y, *found), (want, *truth), strict=True):
            assert got.dtype == x.dtype and got.shape == true.shape
            assert float((got.double() - true).abs().max()) <= ERRORS[dtype] * (1 + float(true.abs().max()))
    assert stub.calls and all(call["stream"] == 77 for call in stub.calls)


def test_a_shape_is_planned_once_and_anything_that_changes_a_plan_anew(stub: Any) -> None:
    import cutefuse.torch as ours

    x, w = given(8, 64), given(64)
    for _ in range(3):
        ours.rms_norm(x, w)
    assert len(stub.planned) == 1 and len(stub.calls) == 3
    for args in ((given(9, 64), w), (given(8, 32), given(32)), (x, None), (x, w, 1e-3), (x.half(), w)):
        before = len(stub.planned)
        ours.rms_norm(*args)
        assert len(stub.planned) == before + 1
    ours.layer_norm(x, w)
    assert stub.planned[-1][4] == {"epsilon": 1e-5, "layer": 1}


def test_the_workspace_of_a_plan_is_there(stub: Any) -> None:
    import cutefuse.torch as ours

    stub.workspace_bytes = 4096
    ours.rms_norm(given(8, 64), given(64))
    assert stub.calls[0]["bytes"] == 4096 and stub.calls[0]["workspace"] % 16 == 0 != stub.calls[0]["workspace"]


def test_strided_and_misaligned_inputs_are_copied_and_others_are_not(stub: Any) -> None:
    import cutefuse.torch as ours

    dense = given(8, 64, grad=False)
    ours.rms_norm(dense)
    assert stub.calls[-1]["inputs"][0] == dense.data_ptr()
    for x in (given(64, 8, grad=False).t(), torch.randn(8 * 64 + 1)[1:].view(8, 64)):
        y = ours.rms_norm(x)
        assert stub.calls[-1]["inputs"][0] != x.data_ptr() and stub.calls[-1]["inputs"][0] % 16 == 0
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))


def test_float64_stays_with_python_and_passes_gradcheck(stub: Any) -> None:
    import cutefuse.torch as ours

    x, w, b = (given(*s).double().detach().requires_grad_() for s in ((3, 6), (6,), (6,)))
    assert torch.autograd.gradcheck(ours.layer_norm, (x, w, b))
    assert torch.autograd.gradcheck(lambda *t: ours.add_rms_norm(*t), (x, x.detach().flip(0).requires_grad_(), w))
    assert stub.calls == []


def test_operators_pass_opcheck(stub: Any) -> None:
    import cutefuse.torch  # noqa: F401

    ops = torch.ops.cutefuse
    for op, args in (
        (ops.rms_norm, (given(3, 5, 48), None, given(48), 1e-6)),
        (ops.layer_norm, (given(7, 33), given(7, 33), given(33), given(33), 1e-5)),
    ):
        torch.library.opcheck(
            op.default, args, test_utils=["test_schema", "test_autograd_registration", "test_faketensor"]
        )


def test_it_compiles_without_a_graph_break(stub: Any) -> None:
    import cutefuse.torch as ours

    def step(x: Any, w: Any, b: Any) -> Any:
        y, total = ours.add_rms_norm(ours.layer_norm(x * 2, w, b), x, w)
        return y * 3 + total

    tensors = (given(6, 48), given(48), given(48))
    want = torch.autograd.grad(step(*tensors).square().sum(), tensors)
    made = torch.compile(step, backend="aot_eager", fullgraph=True)(*tensors)
    for got, true in zip(torch.autograd.grad(made.square().sum(), tensors), want, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-4)


def test_function_transforms_subclasses_and_modes_take_the_operator(stub: Any) -> None:
    from torch.overrides import TorchFunctionMode

    import cutefuse.torch as ours

    x, w = given(4, 8, grad=False), given(8, grad=False)
    want = ours.rms_norm(x, w)

    class Kind(torch.Tensor):
        pass

    class Mode(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += "rms_norm" in str(func)
            return func(*args, **(kwargs or {}))

    assert type(ours.rms_norm(x.as_subclass(Kind), w)) is Kind
    with Mode() as mode:
        ours.rms_norm(x, w)
    assert mode.seen == 1
    gradient = torch.func.grad(lambda t: ours.rms_norm(t, w).square().sum())(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(ours.rms_norm(leaf, w).square().sum(), leaf)[0])
    torch.testing.assert_close(torch.func.vmap(lambda t: ours.rms_norm(t, w))(x[None])[0], want)


def test_threads_have_plans_of_their_own(stub: Any) -> None:
    import cutefuse.torch as ours

    x, w, made = given(8, 64, grad=False), given(64, grad=False), list[Any]()
    threads = [threading.Thread(target=lambda: made.extend(ours.rms_norm(x, w) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 80 and all(torch.equal(y, made[0]) for y in made) and len(stub.planned) == 4


def conv_args(*channels: int, K: int = 16, side: int = 6, dtype: str = "float16") -> tuple[Any, ...]:
    """Inputs of a packed convolution 3x3 with padding 1, its attributes, and the unpacked filter."""
    from cutefuse.operators.conv_form import Form
    from cutefuse.torch.conv import pack

    kind = getattr(torch, dtype)
    xs = [torch.randn(2, c, side, side).to(kind).contiguous(memory_format=torch.channels_last) for c in channels]
    w, b = torch.randn(K, sum(channels), 3, 3) / 10, torch.randn(K)
    op_type = Form(len(channels), "Relu").op_type
    values = ([*channels], [3, 3], [1, 1], [1, 1, 1, 1], [1, 1], [0], [1], [0], 0.01, -1.0, 1.0, 0)
    return [*xs, pack(w, channels).to(kind), b], op_type, values, w


def test_a_packed_convolution_reads_channels_last_images_where_they_lie(stub: Any) -> None:
    inputs, op_type, values, w = conv_args(8, 16)
    (y,) = torch.ops.cutefuse.packed_conv(inputs, op_type, *values)
    assert stub.calls[0]["inputs"] == [t.data_ptr() for t in inputs]
    want = torch.relu(torch.conv2d(torch.cat(inputs[:2], 1).float(), w.half().float(), inputs[3], padding=1))
    torch.testing.assert_close(y.float(), want, rtol=2e-3, atol=2e-3)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.library.opcheck(
        torch.ops.cutefuse.packed_conv.default, (inputs, op_type, *values),
        test_utils=["test_schema", "test_faketensor"],
    )  # fmt: skip


@pytest.mark.parametrize("channels, K", [((5, 11), 16), ((8,), 13), ((3,), 7)])
def test_images_that_the_kernels_cannot_read_are_copied(stub: Any, channels: tuple[int, ...], K: int) -> None:
    inputs, op_type, values, w = conv_args(*channels, K=K)
    inputs[0] = inputs[0].contiguous()
    (y,) = torch.ops.cutefuse.packed_conv(inputs, op_type, *values)
    x = torch.cat(inputs[: len(channels)], 1).float()
    want = torch.relu(torch.conv2d(x, w.half().float(), inputs[len(channels) + 1], padding=1))
    torch.testing.assert_close(y.float(), want, rtol=2e-3, atol=2e-3)
    assert stub.calls[0]["inputs"][0] != inputs[0].data_ptr() and y.stride(3) % 8 == 0


@pytest.mark.parametrize("channels", [1, 3, 4, 7, 8])
def test_the_filter_of_an_image_is_packed_compactly_or_as_any_other(stub: Any, channels: int) -> None:
    from cutefuse import kernels
    from cutefuse.operators import conv_math
    from cutefuse.operators.conv_form import Form
    from cutefuse.torch import conv, pixels

    inputs, _, values, w = conv_args(channels)
    form = Form(1, "Relu", image=True)
    given = conv.Attributes(form.op_type, values)
    compact = torch.from_numpy(conv_math.pack(w.half().numpy(), [channels], form))
    want = torch.relu(torch.conv2d(inputs[0].float(), w.half().float(), inputs[2], padding=1))
    for packed in (inputs[1], compact):
        operands = [inputs[0], packed, inputs[2]]
        (y,) = torch.ops.cutefuse.packed_conv(operands, form.op_type, *values)
        torch.testing.assert_close(y.float(), want, rtol=2e-3, atol=2e-3)
        read = [pixels.as_given(inputs[0]), (packed, 0), (inputs[2], 0)]
        assert kernels.reject(conv._call(given, read, given.outputs(operands))) is None


@pytest.mark.parametrize(
    ("laid", "in_place"),
    [
        (lambda x: x.contiguous(), True),
        (lambda x: x.contiguous(memory_format=torch.channels_last), True),
        (lambda x: torch.cat([x, x], 1).contiguous()[:, 3:], False),  # NCHW with gaps between images
        (lambda x: torch.cat([torch.zeros(1).half(), x.flatten()])[1:].view(x.shape), False),  # off 16 bytes
    ],
    ids=["NCHW", "channels-last", "gaps", "unaligned"],
)
def test_the_image_of_a_network_is_read_as_it_is_given(stub: Any, laid: Any, in_place: bool) -> None:
    from cutefuse.operators.conv_form import Form

    inputs, _, values, w = conv_args(3)
    x = inputs[0] = laid(inputs[0])
    (y,) = torch.ops.cutefuse.packed_conv(inputs, Form(1, "Relu", image=True).op_type, *values)
    want = torch.relu(torch.conv2d(x.float(), w.half().float(), inputs[2], padding=1))
    torch.testing.assert_close(y.float(), want, rtol=2e-3, atol=2e-3)
    assert (stub.calls[0]["inputs"][0] == x.data_ptr()) == in_place


@pytest.mark.parametrize("channels", [16, 19])
def test_a_depthwise_filter_has_a_column_for_each_channel(stub: Any, channels: int) -> None:
    from cutefuse.operators.conv_form import Form

    inputs, _, values, _ = conv_args(channels, K=channels)
    w = torch.randn(channels, 1, 3, 3).half()
    inputs[1] = w.reshape(channels, 9).t().contiguous()
    (y,) = torch.ops.cutefuse.packed_conv(inputs, Form(1, "Relu", depthwise=True).op_type, *values)
    want = torch.relu(torch.conv2d(inputs[0].float(), w.float(), inputs[2], padding=1, groups=channels))
    torch.testing.assert_close(y.float(), want, rtol=2e-3, atol=2e-3)
    assert (stub.calls[0]["inputs"][0] == inputs[0].data_ptr()) == (channels % 8 == 0)


# ------------------------------------------------------------------------------------------------- what is refused


def test_what_the_planner_and_the_library_refuse_is_raised_as_it_is(stub: Any) -> None:
    import cutefuse.torch as ours
    from cutefuse.kernels import KernelError

    stub.raises = KernelError("row_norm: gamma has 5 elements")
    for call in (
        lambda: ours.rms_norm(given(8, 64), given(5)),
        lambda: torch.ops.cutefuse.rms_norm(given(8, 64), None, given(5), 1e-6),
        lambda: torch.ops.cutefuse.packed_conv(conv_args(8)[0], *conv_args(8)[1:2], *conv_args(8)[2]),
    ):
        with pytest.raises(KernelError, match="gamma has 5 elements"):
            call()
    stub.raises, stub.reason = None, b"row_norm: the device is gone"
    with pytest.raises(RuntimeError, match="row_norm: the device is gone"):
        ours.rms_norm(given(8, 64))


def test_an_error_of_the_backward_pass_reaches_the_caller(stub: Any) -> None:
    import cutefuse.torch as ours
    from cutefuse.kernels import KernelError

    y = ours.rms_norm(given(8, 64), given(64))
    stub.raises = KernelError("row_norm: no backward today")
    with pytest.raises((KernelError, RuntimeError), match="no backward today"):
        y.sum().backward()


def test_a_device_without_a_current_stream_is_named(stub: Any) -> None:
    import cutefuse.torch as ours

    stub.stream_error = 1
    with pytest.raises(RuntimeError, match="no current stream on device cpu"):
        ours.rms_norm(given(8, 64))


def test_operands_on_two_devices_are_refused(stub: Any) -> None:
    ops = torch.ops.cutefuse
    meta = torch.empty(64, device="meta")
    with pytest.raises(RuntimeError, match="a parameter is on meta, the input on cpu; move both"):
        ops.rms_norm._op._get_dispatch if False else _kernel(ops.rms_norm.default)(
            given(8, 64, grad=False), None, meta, 1e-6
        )


def _kernel(op: Any) -> Callable[..., Any]:
    """An operator's kernel of the CPU, as it is called where no dispatch looks at the tensors' devices."""
    return lambda *args: op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)


def test_second_and_forward_mode_derivatives_are_refused_in_words(stub: Any) -> None:
    import cutefuse.torch as ours

    x = given(4, 8)
    (g,) = torch.autograd.grad(ours.rms_norm(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use torch.nn"):
        g.sum().backward()
    with pytest.raises(NotImplementedError, match="rms_norm has no forward-mode derivative"):
        torch.func.jvp(ours.rms_norm, (x.detach(),), (x.detach(),))


def test_a_packed_convolution_cannot_be_trained_or_called_with_less(stub: Any) -> None:
    op = torch.ops.cutefuse.packed_conv
    inputs, op_type, values, _ = conv_args(8)
    (y,) = op([inputs[0].requires_grad_(), *inputs[1:]], op_type, *values)
    with pytest.raises(RuntimeError, match="for inference; train the model that was given to fuse"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="no tensors were given"):
        _kernel(op.default)([], op_type, *values)


@pytest.mark.parametrize("extended", [True, False])
def test_a_packed_convolution_that_is_none_is_refused_in_both_halves(extended: bool, request: Any) -> None:
    import cutefuse.torch  # noqa: F401
    from cutefuse.errors import CutefuseError

    if extended:
        request.getfixturevalue("stub")
    op = torch.ops.cutefuse.packed_conv
    inputs, op_type, values, _ = conv_args(8)
    with pytest.raises(CutefuseError, match="takes 3 tensors, .* a packed filter .*; 2 were given"):
        op(inputs[:2], op_type, *values)
    with pytest.raises(CutefuseError, match="has 3 axes; give images of 4"):
        op([inputs[0][0], *inputs[1:]], op_type, *values)
    for change in ({1: [3]}, {2: [0, 1]}, {3: [1, 1]}, {4: []}, {6: []}):
        wrong = [change.get(i, v) for i, v in enumerate(values)]
        with pytest.raises(CutefuseError, match="geometry is not that of a 2-D convolution"):
            op(inputs, op_type, *wrong)


def test_the_extension_and_python_plan_the_same_call(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.torch import conv

    calls = dict[str, Any]()
    plan = types.SimpleNamespace(data=b"", workspace_bytes=0)
    for channels, K, side in (((8, 16), 16, 6), ((5, 11), 13, 6), ((16,), 24, 1), ((5,), 7, 1)):
        inputs, op_type, values, _ = conv_args(*channels, K=K, side=side)
        for given in (inputs, [inputs[0].contiguous(), *inputs[1:]], [inputs[0][:, :, ::2], *inputs[1:]]):
            with monkeypatch.context() as patch:
                patch.setattr(conv, "planned", lambda call, _: calls.update(native=call) or plan)
                conv.plan(given, op_type, *values)
                patch.setattr(conv, "runs_in_library", lambda _: True)
                patch.setattr(conv.compiled, "ensure", lambda: None)
                patch.setattr(conv, "enqueue", lambda key, call, *_: calls.update(python=call()))
                made = conv.run(given, op_type, *values)
            assert calls["native"] == calls["python"]
            assert [(*y.shape,) for y in made] == [t.dims for t in calls["native"].outputs]


# -------------------------------------------------------------------------------------------------- how it is built


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The loader as in a new process whose cache is empty."""
    from cutefuse.torch import compiled

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    fresh = compiled._Loaded()
    monkeypatch.setattr(compiled, "loaded", fresh)
    return compiled


def test_without_a_compiler_python_does_the_work_and_says_so_once(
    unbuilt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match="run through Python: no-such-compiler was not found; install g.. or set CXX"):
        unbuilt.ensure()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unbuilt.ensure()
    assert "no-such-compiler" in unbuilt.state() and not unbuilt.cache_folder().exists()


def test_it_can_be_switched_off(unbuilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(unbuilt.SWITCH, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unbuilt.ensure()
    assert unbuilt.state() == "the operators run through Python: CUTEFUSE_TORCH_EXTENSION=0"


def test_what_the_compiler_says_is_one_sentence_and_leaves_no_file(
    unbuilt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import cpp_extension

    from cutefuse.errors import CutefuseError

    def load(*_: Any, **__: Any) -> None:
        raise RuntimeError("Error building extension\n[1/2] c++ ...\nmodule.cpp:1:1: error: no such header\nmore\n")

    monkeypatch.setattr(cpp_extension, "load", load)
    with pytest.raises(CutefuseError, match=r"could not be built with PyTorch .* \(.*no such header\)") as error:
        unbuilt.build()
    assert "\n" not in str(error.value) and list(unbuilt.cache_folder().iterdir()) == []


def test_a_cache_that_cannot_be_written_and_a_damaged_file_are_named(
    unbuilt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cutefuse.errors import CutefuseError

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(unbuilt, "cache_folder", lambda: tmp_path / "file" / "cutefuse")
    with pytest.raises(CutefuseError, match="cannot be made"):
        unbuilt.build()
    monkeypatch.setattr(unbuilt, "cache_folder", lambda: tmp_path)
    unbuilt.path().write_text("no library")
    with pytest.raises(CutefuseError, match="cannot be loaded .* delete it"):
        unbuilt.module(unbuilt.build())


def test_the_file_is_for_these_sources_and_this_torch(unbuilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = unbuilt.path()
    assert unbuilt.path() == before
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert unbuilt.path() != before


def test_a_torch_without_cuda_says_so(unbuilt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cutefuse.errors import CutefuseError

    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(CutefuseError, match="no libtorch_cuda.so; install a build with CUDA"):
        unbuilt._current_stream()
