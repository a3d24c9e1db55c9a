"""The row norm kernels on a GPU: every tile against float64, against PyTorch in the same type, and around the edges."""

from __future__ import annotations

from typing import Any

import problems
import pytest
from gpu import Buffer, device_facts, to_linear, torch_dtype

from cutefuse import kernels
from cutefuse.kernels import Call, KernelError, Tensor

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "float16", "bfloat16")
# rows x columns: one element, less than a vector, every tile's edges, odd lengths, one more than a power of two
SHAPES = [
    (1, 1), (5, 3), (300, 8), (33, 31), (7, 64), (4099, 48), (1000, 100), (65, 256), (3, 257), (130, 512), (9, 760),
    (257, 1024), (5, 1128), (31, 2048), (17, 4095), (8, 4096), (3, 5120), (2, 8200), (3, 16384), (2, 16385), (2, 24584),
    (2, 32768), (1, 65536), (1, 131072), (1, 200001), (1, 262144), (3, 40960), (5, 65536),
]  # fmt: skip
if problems.SANITIZED:  # rows enough for several blocks
    SHAPES = [(min(rows, 40), columns) for rows, columns in SHAPES]
ABSENT = Tensor((0,), "float32")


def tensor_of(buffer: Buffer, shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(shape, dtype, data=buffer.view.data_ptr())


def make_rows(torch: Any, rows: int, columns: int, dtype: str, kind: str = "normal") -> Any:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.float64)
    if kind == "offset":  # mean >> std
        x = x + 1000 * (1 + torch.rand(rows, 1, device="cuda", dtype=torch.float64))
    if kind == "large":  # squares overflow float16
        x = 1e4 * torch.sign(x) * (1 + torch.rand_like(x))
    if kind == "outlier":
        x[:, 0] = 3e4
    return x.to(torch_dtype(dtype))


def reference(torch: Any, s: Any, gamma: Any, beta: Any, epsilon: float, layer: bool) -> tuple[Any, Any, Any]:
    """(y, mean, rstd) in float64 of float64 operands; gamma and beta may be None."""
    mean = s.mean(1, keepdim=True) if layer else torch.zeros_like(s[:, :1])
    rstd = ((s - mean).square().mean(1, keepdim=True) + epsilon).rsqrt()
    y = (s - mean) * rstd
    y = y if gamma is None else y * gamma
    return (y if beta is None else y + beta), mean, rstd


def check_error(torch: Any, given: Any, truth: Any, same_type: Any, dtype: str, scale: Any, what: str) -> None:
    """At most twice the error of PyTorch plus one ulp of the largest value, and every element within its own bound."""
    unit = torch.finfo(torch_dtype(dtype)).eps
    error = (given.double() - truth).abs()
    largest = truth.abs().max()
    allowed = largest * unit + (2 * (same_type.double() - truth).abs().max() if same_type is not None else float("inf"))
    bound = unit * truth.abs() + scale + torch.finfo(torch_dtype(dtype)).tiny * unit * 2
    finite = torch.isfinite(given.double()).all()
    if bool(finite & (error.max() <= allowed) & (error <= bound).all()):  # one wait for the device
        return
    assert bool(finite), f"{what}: not finite"
    assert float(error.max()) <= float(allowed), f"{what}: error {float(error.max()):.3g}, PyTorch allows {allowed:.3g}"
    worst = int((error - bound).argmax())
    raise AssertionError(
        f"{what}: element {worst} is {given.flatten()[worst]}, truth {truth.flatten()[worst]}, "
        f"bound {float(bound.expand_as(error).flatten()[worst]):.3g}"
    )


def run_forward(
    torch: Any, x: Any, residual: Any, gamma: Any, beta: Any, layer: bool, epsilon: float, config: int
) -> tuple[Any, Any]:
    """(y, sum or None) of the plugin's operator; checks the poison around and inside every buffer."""
    dtype = str(x.dtype).removeprefix("torch.")
    sm, sm_count = device_facts()
    operands = [t for t in (x, residual, gamma, beta) if t is not None]
    pairs = [to_linear(t, str(t.dtype).removeprefix("torch.")) for t in operands]
    outputs = [Buffer.of(x.numel(), dtype, float("nan")) for _ in range(2 if residual is not None else 1)]
    name = f"Cute{'Add' if residual is not None else ''}{'Layer' if layer else 'RMS'}Norm"
    out_tensors = [tensor_of(b, tuple(x.shape), dtype) for b in outputs]
    call = Call(name, [t for _, t in pairs], out_tensors, {"epsilon": epsilon}, config=config, sm=sm, sm_count=sm_count)
    kernels.run(call)
    torch.cuda.synchronize()
    intact = torch.stack([b.guards_intact() for b in [b for b, _ in pairs] + outputs]).all()
    assert bool(intact), f"{name} tile {config} wrote outside of a buffer, {tuple(x.shape)} {dtype}"
    results = [b.view.view(x.shape) for b in outputs]
    return results[0], results[1] if residual is not None else None


def legal_tiles(x: Any, layer: bool, residual: bool, param: str) -> list[int]:
    dtype = str(x.dtype).removeprefix("torch.")
    sm, sm_count = device_facts()
    like, vector = Tensor(tuple(x.shape), dtype), Tensor((x.shape[1],), param)
    inputs = [like] * (1 + residual) + [vector] * (1 + layer)
    name = f"Cute{'Add' if residual else ''}{'Layer' if layer else 'RMS'}Norm"
    call = Call(name, inputs, [like] * (1 + residual), {}, sm=sm, sm_count=sm_count)
    return kernels.configs(call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_every_tile_computes_the_norm_of_every_shape(dtype: str, layer: bool, with_residual: bool) -> None:
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    seen: set[int] = set()
    for index, (rows, columns) in enumerate(SHAPES):
        kind = ("normal", "offset", "large", "outlier")[index % 4]
        x = make_rows(torch, rows, columns, dtype, kind)
        residual = make_rows(torch, rows, columns, dtype) if with_residual else None
        param = dtype if index % 2 else "float32"
        gamma = (1 + torch.randn(columns, device="cuda")).to(torch_dtype(param))
        beta = torch.randn(columns, device="cuda").to(torch_dtype(param)) if layer else None
        s = x.double() if residual is None else x.double() + residual.double()
        truth, mean, rstd = reference(torch, s, gamma.double(), None if beta is None else beta.double(), 1e-5, layer)
        s_same = s.to(x.dtype)
        g_same, b_same = gamma.to(x.dtype), None if beta is None else beta.to(x.dtype)
        same = (
            F.layer_norm(s_same, (columns,), g_same, b_same, 1e-5) if layer
            else F.rms_norm(s_same, (columns,), g_same, 1e-5)
        )  # fmt: skip
        # float32 arithmetic before the only rounding: the mean to its ulp, the rest to some ulps of each term
        terms = ((s - mean) * rstd * gamma.double()).abs()
        scale = 4e-6 * (terms + (0 if beta is None else beta.double().abs()))
        size = mean.abs() + s.abs().mean(1, keepdim=True) * layer + s.abs() * with_residual
        scale = scale + 3e-7 * size * rstd * gamma.double().abs()
        for tile in legal_tiles(x, layer, with_residual, param):
            seen.add(tile)
            what = f"tile {tile}, {rows}x{columns} {dtype} {kind} gamma {param}"
            y, total = run_forward(torch, x, residual, gamma, beta, layer, 1e-5, tile)
            check_error(torch, y, truth, same, dtype, scale, what)
            if total is not None:
                rounded = s.float().to(x.dtype)
                assert torch.equal(total, rounded), f"{what}: the sum is not x + residual, rounded once"
    names = {c["id"]: c["name"] for c in kernels.operator_of("CuteRMSNorm")["configs"]}
    narrow = dtype != "float32" and not with_residual  # what cluster_v8 takes
    assert seen == {i for i, name in names.items() if narrow or name != "cluster_v8"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("kind", ["normal", "offset", "large", "outlier"])
def test_no_set_of_rows_is_less_accurate_than_in_torch(dtype: str, layer: bool, kind: str) -> None:
    """The largest error of a seeded set, in units of each truth's largest value, by the tile that is tried first."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(2)
    ours, theirs = 0.0, 0.0
    for rows, columns in (
        (64, 512),
        (300, 768),
        (33, 1000),
        (200, 1024),
        (140, 4096),
        (16, 5120),
        (9, 16384),
        (3, 65536),
        *([] if problems.SANITIZED else [(140, 32768)]),  # under a sanitizer every tile sees such rows elsewhere
    ):
        x = make_rows(torch, rows, columns, dtype, kind)
        gamma = (1 + torch.randn(columns, device="cuda")).to(x.dtype)
        beta = torch.randn(columns, device="cuda").to(x.dtype) if layer else None
        wide = None if beta is None else beta.double()
        truth, _, _ = reference(torch, x.double(), gamma.double(), wide, 1e-5, layer)
        norm = F.layer_norm(x, (columns,), gamma, beta, 1e-5) if layer else F.rms_norm(x, (columns,), gamma, 1e-5)
        y, _ = run_forward(torch, x, None, gamma, beta, layer, 1e-5, 0)
        largest = float(truth.abs().max())
        ours = max(ours, float((y.double() - truth).abs().max()) / largest)
        theirs = max(theirs, float((norm.double() - truth).abs().max()) / largest)
    # float32 errors are a few roundings of either side, and differ by chance
    assert ours <= theirs * (1.1 if dtype == "float32" else 1.0), (
        f"{dtype} {kind}: error {ours:.3g}, PyTorch {theirs:.3g}"
    )


def training_call(op_type: str, inputs: list[Any], outputs: list[Any], **kwargs: Any) -> Call:
    def wrap(t: Any) -> Tensor:
        if t is None:
            return ABSENT
        return Tensor(tuple(t.shape), str(t.dtype).removeprefix("torch."), data=t.data_ptr())

    sm, sm_count = device_facts()
    attrs = {"epsilon": 1e-5, "layer": int(kwargs.pop("layer"))}
    return Call(op_type, list(map(wrap, inputs)), list(map(wrap, outputs)), attrs, sm=sm, sm_count=sm_count, **kwargs)


def run_backward(torch: Any, dy: Any, dsum: Any, x: Any, gamma: Any, layer: bool, beta: bool) -> dict[str, Any]:
    """Statistics by the forward operator, then the gradients; every output starts as NaN."""
    nan = float("nan")
    rows, columns = x.shape
    mean = torch.full((rows,), nan, device="cuda") if layer else None
    rstd = torch.full((rows,), nan, device="cuda")
    kernels.run(
        training_call("CuteRowNormForward", [x, None, None, None], [torch.empty_like(x), None, mean, rstd], layer=layer)
    )
    dx = torch.full_like(x, nan)
    dgamma = None if gamma is None else torch.full_like(gamma, nan)
    dbeta = torch.full_like(gamma, nan) if beta else None
    call = training_call(
        "CuteRowNormBackward", [dy, dsum, x, gamma, mean, rstd], [dx, dgamma, dbeta], layer=layer
    )  # fmt: skip
    bytes_ = kernels.workspace_bytes(call)
    workspace = Buffer.of(bytes_ // 4, "float32", nan) if bytes_ else None
    if workspace is not None:
        call = training_call(
            "CuteRowNormBackward", [dy, dsum, x, gamma, mean, rstd], [dx, dgamma, dbeta], layer=layer,
            workspace=workspace.view.data_ptr(), workspace_bytes=bytes_,
        )  # fmt: skip
    kernels.run(call)
    torch.cuda.synchronize()
    assert workspace is None or workspace.guards_intact(), "the workspace was overrun"
    return {"dx": dx, "dgamma": dgamma, "dbeta": dbeta, "mean": mean, "rstd": rstd}


BACKWARD_SHAPES = [
    *SHAPES, (2049, 16), (1500, 40), (3001, 128), (700, 768), (999, 1000), (1027, 1536), (640, 4096), (300, 8192),
    (300, 12288), (150, 16384), (64, 65536), (400, 5120),
]  # fmt: skip
if problems.SANITIZED:
    BACKWARD_SHAPES = [(min(rows, 200), columns) for rows, columns in BACKWARD_SHAPES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [False, True])
def test_backward_gives_the_gradients_of_every_shape(dtype: str, layer: bool) -> None:
    import torch
    import torch.nn.functional as F

    torch.manual_seed(1)
    for index, (rows, columns) in enumerate(BACKWARD_SHAPES):
        param = dtype if index % 2 else "float32"
        with_dsum, affine = index % 3 == 0, index % 5 != 4
        x, dy = make_rows(torch, rows, columns, dtype), make_rows(torch, rows, columns, dtype)
        dsum = make_rows(torch, rows, columns, dtype) if with_dsum else None
        gamma = (1 + torch.randn(columns, device="cuda")).to(torch_dtype(param)) if affine else None
        beta = affine and layer
        got = run_backward(torch, dy, dsum, x, gamma, layer, beta)
        what = f"{rows}x{columns} {dtype} gamma {param if affine else None} dsum {with_dsum}"

        s, d = x.double(), dy.double()
        g = torch.ones(columns, device="cuda", dtype=torch.float64) if gamma is None else gamma.double()
        _, mean, rstd = reference(torch, s, None, None, 1e-5, layer)
        xhat, wdy = (s - mean) * rstd, d * g
        c1, c2 = (xhat * wdy).mean(1, keepdim=True), wdy.mean(1, keepdim=True) if layer else 0.0
        dx = (wdy - c2 - xhat * c1) * rstd
        mean1, mean2 = (xhat * wdy).abs().mean(1, keepdim=True), wdy.abs().mean(1, keepdim=True)
        size = rstd * (wdy.abs() + xhat.abs() * mean1 + mean2)
        same = x.clone().requires_grad_()
        weight = None if gamma is None else gamma.to(x.dtype).requires_grad_()
        bias = torch.zeros(columns, device="cuda", dtype=x.dtype, requires_grad=True) if beta else None
        shape = (columns,)
        norm = F.layer_norm(same, shape, weight, bias, 1e-5) if layer else F.rms_norm(same, shape, weight, 1e-5)
        norm.backward(dy)
        truth = dx if dsum is None else dx + dsum.double()
        peer = None if dsum is not None else same.grad
        check_error(torch, got["dx"], truth, peer, dtype, 6e-6 * size, "dx " + what)
        for name, value, other, total in (
            ("dgamma", d * xhat, weight, gamma is not None), ("dbeta", d, bias, beta),
        ):  # fmt: skip
            if total:
                exact, spread = value.sum(0), value.abs().sum(0)
                # a float32 tree over blocks and rows: far below sqrt(rows) ulps of the absolute sum
                # and the rounding of the saved mean, which every element of a row shares
                shift = 3e-7 * (rstd * (mean.abs() + (s - mean).abs().mean(1, keepdim=True)) * d.abs()).sum(0)
                scale = 1e-6 * spread + (shift if name == "dgamma" else 0)
                check_error(torch, got[name], exact, other.grad, param, scale, f"{name} {what}")
        if layer:
            torch.testing.assert_close(got["mean"].double(), mean[:, 0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got["rstd"].double(), rstd[:, 0], rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("layer", [False, True])
def test_backward_gives_the_same_bits_every_time(layer: bool) -> None:
    import torch

    for rows, columns in ((3001, 128), (1027, 1536), (999, 1000), (150, 16384)):
        x, dy = make_rows(torch, rows, columns, "bfloat16"), make_rows(torch, rows, columns, "bfloat16")
        gamma = torch.randn(columns, device="cuda")
        first = run_backward(torch, dy, None, x, gamma, layer, layer)
        for _ in range(3):
            again = run_backward(torch, dy, None, x, gamma, layer, layer)
            for name in ("dx", "dgamma", "dbeta") if layer else ("dx", "dgamma"):
                assert torch.equal(first[name], again[name]), f"{name} {rows}x{columns}"


def test_no_rows_are_no_work_and_zero_gradients() -> None:
    import torch

    x = torch.empty(0, 64, device="cuda")
    gamma = torch.ones(64, device="cuda")
    y, _ = run_forward(torch, x, None, gamma, None, False, 1e-5, 0)
    assert y.shape == (0, 64)
    got = run_backward(torch, x, None, x, gamma, True, True)
    assert bool((got["dgamma"] == 0).all()) and bool((got["dbeta"] == 0).all())


def test_a_captured_graph_replays_on_new_data() -> None:
    import torch

    x, y = torch.randn(64, 4096, device="cuda"), torch.empty(64, 4096, device="cuda")
    gamma = torch.randn(4096, device="cuda")
    tensors = [Tensor(tuple(t.shape), "float32", data=t.data_ptr()) for t in (x, gamma, y)]
    launch = kernels.Launcher(Call("CuteRMSNorm", tensors[:2], tensors[2:], {"epsilon": 1e-6}))
    launch(torch.cuda.current_stream().cuda_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launch(torch.cuda.current_stream().cuda_stream)
    x.normal_(5.0, 3.0)
    graph.replay()
    torch.cuda.synchronize()
    truth, _, _ = reference(torch, x.double(), gamma.double(), None, 1e-6, False)
    torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5)


def test_dependent_launches_see_what_the_previous_one_wrote() -> None:
    import torch

    for rows, columns in ((8192, 256), (132 * 16, 4096), (33, 65536)):
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        chain = [x] + [torch.empty_like(x) for _ in range(12)]
        gamma = torch.randn(columns, device="cuda").abs() + 0.5
        weight = Tensor((columns,), "float32", data=gamma.data_ptr())
        shape = (rows, columns)
        stream = torch.cuda.current_stream().cuda_stream
        for source, target in zip(chain, chain[1:], strict=False):
            inputs = [Tensor(shape, "bfloat16", data=source.data_ptr()), weight]
            output = Tensor(shape, "bfloat16", data=target.data_ptr())
            kernels.run(Call("CuteRMSNorm", inputs, [output], {"epsilon": 1e-6}, stream=stream))
        torch.cuda.synchronize()
        for source, target in zip(chain, chain[1:], strict=False):
            truth, _, _ = reference(torch, source.double(), gamma.double(), None, 1e-6, False)
            torch.testing.assert_close(target.double(), truth, rtol=1e-2, atol=1e-5)


def test_nan_and_infinity_stay_in_their_row() -> None:
    import torch

    for columns in (256, 257, 4096, 65536):
        x = torch.randn(4, columns, device="cuda", dtype=torch.float16)
        x[1, columns // 2], x[2, 0] = float("nan"), float("inf")
        gamma = torch.ones(columns, device="cuda")
        y, _ = run_forward(torch, x, None, gamma, None, False, 1e-5, 0)
        assert bool(torch.isnan(y[1]).all()) and bool(torch.isnan(y[2, 0]))
        assert bool(torch.isfinite(y[0]).all()) and bool(torch.isfinite(y[3]).all())


def test_a_tile_that_cannot_hold_the_row_is_refused_at_run_time() -> None:
    import torch

    x = torch.randn(2, 8192, device="cuda")
    with pytest.raises(KernelError, match="tile 1 cannot run rows of 8192 float32"):
        run_forward(torch, x, None, torch.ones(8192, device="cuda"), None, False, 1e-5, 1)


def test_a_misaligned_tensor_is_refused_at_run_time() -> None:
    import torch

    storage = torch.randn(2 * 64 + 1, device="cuda")
    x = Tensor((2, 64), "float32", data=storage.data_ptr() + 4)
    gamma = Tensor((64,), "float32", data=storage.data_ptr())
    with pytest.raises(KernelError, match="aligned to 16 bytes"):
        kernels.run(Call("CuteRMSNorm", [x, gamma], [Tensor((2, 64), "float32", data=storage.data_ptr())], {}))
