"""Which Convs behind a Softmax a compiled PyTorch program adds up; no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import graph, run_patch, weights
from test_torch_fused import reference_kernels  # noqa: F401

pytestmark = pytest.mark.torch

# A fused convolution, and the end of a YOLO head: 16 channels of a Softmax to one.
FUSED = "c = Conv<kernel_shape=[1,1]>(x, w1) a = Relu(c) "
SOFTMAX = "s = Softmax<axis=1>(a) "
CONV = "y = Conv<kernel_shape=[1,1]>(s, w)"


def sums_of(body: str, folder: Path, w: tuple[int, ...] = (1, 16, 1, 1), fused: bool = True) -> tuple[Any, list[Any]]:
    """(filters, the sums) of a compiled program of the graph."""
    from cutefuse.engines.pytorch.onnx_ops.program import load
    from cutefuse.engines.pytorch.onnx_ops.sums import take_sums, weighted_sum

    values = weights(0, "float16", w1=(w[1], 16, 1, 1), w=w, b=(w[0],))
    model = graph(body, values, inputs={"x": "2,16,5,7"}, dtype="float16")
    patched = run_patch(model, folder, sm=90, engine="torch", only=frozenset({"Conv_0"}))[1] if fused else None
    program = load(patched or model, {"x": (2, 16, 5, 7)}, fused=True)
    take_sums(program)
    return values, [step.run for step in program.steps if step.run is weighted_sum]


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("axis", [1, -3])
@pytest.mark.parametrize("bias", ["", ", b"])
def test_the_conv_behind_a_softmax_is_a_sum(axis: int, bias: str, tmp_path: Path) -> None:
    import torch

    softmax = SOFTMAX.replace("axis=1", f"axis={axis}")
    values, sums = sums_of(FUSED + softmax + CONV.replace("w)", f"w{bias})"), tmp_path)
    assert len(sums) == 1
    x = torch.randn(2, 16, 5, 7, dtype=torch.float16)
    given = [torch.from_numpy(values[name]) for name in ("w", "b")[: 2 if bias else 1]]
    want = np.einsum("nchw,c->nhw", x.double().numpy(), values["w"].astype(np.float64).reshape(-1))[:, None]
    want = want + (float(values["b"][0]) if bias else 0)
    got = sums[0](x, *given)
    assert got.dtype == torch.float16 and got.shape == want.shape
    assert np.abs(got.double().numpy() - want).max() <= 2**-10 * np.abs(want).max()


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize(
    ("body", "w"),
    [
        (FUSED + SOFTMAX + CONV, (2, 16, 1, 1)),
        (FUSED + SOFTMAX + CONV, (1, 72, 1, 1)),
        (FUSED + SOFTMAX + CONV.replace("[1,1]", "[3,3],pads=[1,1,1,1]"), (1, 16, 3, 3)),
        (FUSED + SOFTMAX + CONV.replace("[1,1]", "[1,1],strides=[2,1]"), (1, 16, 1, 1)),
        (FUSED + SOFTMAX + CONV.replace("[1,1]", "[1,1],pads=[0,1,0,0]"), (1, 16, 1, 1)),
        (FUSED + SOFTMAX.replace("axis=1", "axis=2") + CONV, (1, 16, 1, 1)),
        (FUSED + "s = Sigmoid(a) " + CONV, (1, 16, 1, 1)),
    ],
)
def test_other_convs_stay(body: str, w: tuple[int, ...], tmp_path: Path) -> None:
    assert sums_of(body, tmp_path, w)[1] == []


@pytest.mark.usefixtures("reference_kernels")
def test_a_plain_model_has_none(tmp_path: Path) -> None:
    assert sums_of(FUSED + SOFTMAX + CONV, tmp_path, fused=False)[1] == []


@pytest.mark.usefixtures("reference_kernels")
def test_a_step_without_inputs_is_passed_over(tmp_path: Path) -> None:
    from cutefuse.engines.pytorch.onnx_ops.program import Step, load
    from cutefuse.engines.pytorch.onnx_ops.sums import take_sums

    model = graph(FUSED.replace("a =", "y ="), weights(0, "float16", w1=(16, 16, 1, 1)), inputs={"x": "2,16,5,7"},
                  dtype="float16")  # fmt: skip
    patched = run_patch(model, tmp_path, sm=90, engine="torch")[1]
    assert patched is not None
    program = load(patched, {"x": (2, 16, 5, 7)}, fused=True)
    alone = Step(lambda: None, [], ["t"], "alone", "RandomNormal", {}, [])
    program.steps.insert(0, alone)
    take_sums(program)
    assert program.fused and program.steps[0] is alone
