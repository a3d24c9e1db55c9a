"""Which fully connected layers of a PyTorch program our kernels take; no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import graph, run_patch, weights
from test_torch_fused import reference_kernels  # noqa: F401

pytestmark = pytest.mark.torch

# A classifier: a fused convolution, the mean of its image, and a Gemm over it.
BODY = "c = Conv<kernel_shape=[1,1]>(x, w1) a = Relu(c) m = GlobalAveragePool(a) f = Flatten(m) "


def program_of(gemm: str, folder: Path, C: int = 72, K: int = 10, N: int = 3, *, dtype: str = "float16",
               transposed: bool = True, sm: int = 90, bias: tuple[int, ...] | None = None) -> Any:  # fmt: skip
    """(program, its heads' op_types, its function on given rows)."""
    from cutefuse.engines.pytorch.onnx_ops.heads import take_heads
    from cutefuse.engines.pytorch.onnx_ops.program import load

    shape = (K, C) if transposed else (C, K)
    values = weights(0, dtype, w1=(C, 16, 1, 1), w=shape, b=bias or (K,))
    model = graph(BODY + gemm, values, inputs={"x": f"{N},16,5,5"}, dtype=dtype, rank=2)
    _, patched = run_patch(model, folder, sm=90, engine="torch")
    program = load(patched or model, {"x": (N, 16, 5, 5)}, fused=True)
    take_heads(program, sm)
    return program, [node.op_type for node in program.kernels if not node.named], values


@pytest.mark.parametrize(
    ("gemm", "transposed"),
    [
        ("y = Gemm<transB=1>(f, w, b)", True),
        ("y = Gemm(f, w, b)", False),
        ("y = Gemm<transB=1>(f, w)", True),
    ],
)
@pytest.mark.parametrize(("C", "K"), [(72, 10), (64, 16), (8, 1)])
def test_a_head_is_a_convolution_of_a_pixel(
    gemm: str, transposed: bool, C: int, K: int, reference_kernels: list[str], tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    import torch

    program, heads, values = program_of(gemm, tmp_path, C, K, transposed=transposed)
    assert heads == ["CuteConcatConv1"] and "Gemm" not in [s.op_type for s in program.steps if callable(s.run) and
                                                           type(s.run).__name__ == "function"]  # fmt: skip
    step = next(s for s in program.steps if getattr(s.run, "named", True) is False)
    rows = torch.randn(3, C, dtype=torch.float16)
    filters = [program.constants[slot] for slot in step.inputs[1:]]
    got = step.run.launch([rows.reshape(3, C, 1, 1), *filters])[0].reshape(3, K)
    w = values["w"].astype(np.float64)
    bias = values["b"].astype(np.float64) if ", b)" in gemm else 0.0
    want = rows.double().numpy() @ (w.T if transposed else w) + bias
    assert np.abs(got.double().numpy() - want).max() <= 2**-10 * np.abs(want).max()
    views = [program.steps[program.steps.index(step) + i] for i in (-1, 1)]
    assert [v.run(torch.zeros(s)).shape for v, s in zip(views, [(3, C), (3, K, 1, 1)], strict=True)] == [
        (3, C, 1, 1), (3, K),
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{"N": 16}, {"C": 4096, "K": 2048}], ids=["rows", "weights"])
def test_a_head_may_be_as_large_as_was_measured(options: dict[str, Any], tmp_path: Path) -> None:
    assert program_of("y = Gemm<transB=1>(f, w, b)", tmp_path, **options)[1] == ["CuteConcatConv1"]


@pytest.mark.parametrize(
    ("gemm", "options"),
    [
        ("y = Gemm<transB=1, alpha=0.5>(f, w, b)", {}),
        ("y = Gemm<transB=1, beta=2.0>(f, w, b)", {}),
        ("y = Gemm<transB=1>(f, w, b)", {"bias": (3, 10)}),  # another bias for each row
        ("y = Gemm<transB=1>(f, w, b)", {"N": 17}),  # more rows than were measured
        ("y = Gemm<transB=1>(f, w, b)", {"C": 4104, "K": 2048}),  # more weights
        ("y = Gemm<transB=1>(f, w, b)", {"C": 44}),  # rows that are no whole vectors
        ("y = Gemm<transB=1>(f, w, b)", {"dtype": "float32"}),
        ("y = Gemm<transB=1>(f, w, b)", {"sm": 80}),  # no small tiles
        ("y = Gemm<transB=1>(f, w, b)", {"sm": 0}),  # no GPU
        ("y = MatMul(f, w)", {"transposed": False}),
    ],
)
def test_the_rest_stays_with_cublas(gemm: str, options: dict[str, Any], tmp_path: Path) -> None:
    program, heads, _ = program_of(gemm, tmp_path, **options)
    assert heads == [] and program.steps[-1].op_type in ("Gemm", "MatMul")


def test_a_head_behind_no_fused_node_is_the_peer_and_stays() -> None:
    from cutefuse.engines.pytorch.onnx_ops.heads import take_heads
    from cutefuse.engines.pytorch.onnx_ops.program import load

    model = graph("y = Gemm<transB=1>(x, w, b)", weights(0, "float16", w=(8, 64), b=(8,)), inputs={"x": "2,64"},
                  dtype="float16", rank=2)  # fmt: skip
    program = load(model, {"x": (2, 64)}, fused=True)
    take_heads(program, 90)
    assert [step.op_type for step in program.steps] == ["Gemm"] and program.kernels == []
