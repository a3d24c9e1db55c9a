"""Kernels and the device layer in a user's PyCUDA context, on a user's stream. Needs pycuda."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cutefuse import kernels
from cutefuse.engines.cuda_memory import PyCuda, open_device
from cutefuse.errors import CutefuseError
from cutefuse.kernels import Call, Launcher, Tensor
from cutefuse.operators import operators

pytestmark = pytest.mark.gpu
ROWS, COLUMNS, EPSILON = 37, 1000, 1e-5


@pytest.fixture
def driver() -> Iterator[Any]:
    """pycuda.driver with a context of the test's own, not the primary one, current."""
    found = pytest.importorskip("pycuda.driver")
    found.init()
    context = found.Device(0).make_context()
    yield found
    context.pop()


def norm(driver: Any, x: np.ndarray, gamma: np.ndarray) -> tuple[Call, Any, list[Any]]:
    """An RMSNorm over memory of PyCUDA: the call, the output's memory, and all of it."""
    memory = [driver.to_device(x), driver.to_device(gamma), driver.to_device(np.full_like(x, np.nan))]
    absent = Tensor((0,), "float32")
    described = [Tensor(a.shape, "float32", data=int(m)) for a, m in zip((x, gamma, x), memory, strict=True)]
    inputs, outputs = [described[0], absent, described[1], absent], [described[2], absent, absent, absent]
    return Call("CuteRowNormForward", inputs, outputs, {"epsilon": EPSILON, "layer": 0}), memory[2], memory


def test_a_norm_runs_on_a_users_stream_in_a_users_context(driver: Any) -> None:
    rng = np.random.default_rng(0)
    x, gamma = (rng.standard_normal(s).astype(np.float32) for s in ((ROWS, COLUMNS), (COLUMNS,)))
    stream = driver.Stream()
    call, out, memory = norm(driver, x, gamma)
    Launcher(replace(call, stream=stream.handle))()
    stream.synchronize()
    y = driver.from_device_like(out, x)
    truth = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(1)[:, None] + EPSILON) * gamma
    assert np.abs(y - truth).max() < 4e-6 * np.abs(truth).max()
    assert len(memory) == 3


def convolution(driver: Any, config: int) -> np.ndarray:
    """The bits that a tile of a convolution writes from the same random operands."""
    op = next(o for o in operators() if o.stem == "concat_conv")
    call = replace(op.call(op.cases()[0], "float16"), config=config)
    rng, keep = np.random.default_rng(1), []

    def placed(t: Tensor) -> Tensor:
        ld = t.ld or (-(-t.dims[1] // 8) * 8 if t.layout == kernels.CHANNELS_LAST else 0)
        count = int(np.prod(t.dims)) // t.dims[1] * ld if ld else int(np.prod(t.dims))
        data = rng.standard_normal(max(count, 1)).astype(np.float32 if t.dtype == "float32" else np.float16)
        keep.append((driver.to_device(data), data))
        return replace(t, data=int(keep[-1][0]))

    call = replace(call, inputs=[placed(t) for t in call.inputs], outputs=[placed(t) for t in call.outputs])
    size = max(kernels.Plan(call).workspace_bytes, 1)
    space = driver.to_device(np.zeros(size, np.uint8))
    stream = driver.Stream()
    Launcher(replace(call, workspace=int(space), workspace_bytes=size, stream=stream.handle))()
    stream.synchronize()
    memory, like = keep[-1]
    found: np.ndarray = driver.from_device_like(memory, like).view(np.uint16)
    return found


def test_every_context_may_use_tiles_of_much_shared_memory(driver: Any) -> None:
    """What a kernel may use of shared memory is a property of the context: a second one starts without."""
    op = next(o for o in operators() if o.stem == "concat_conv")
    tiles = kernels.configs(op.call(op.cases()[0], "float16"))
    first = {tile: convolution(driver, tile) for tile in tiles}
    other = driver.Device(0).make_context()
    try:
        second = {tile: convolution(driver, tile) for tile in tiles}
    finally:
        other.pop()
    assert tiles and all(np.array_equal(first[t], second[t]) for t in tiles)


def test_the_device_layer_takes_a_users_stream(driver: Any) -> None:
    stream = driver.Stream()
    found = open_device(stream)
    assert found.name == "pycuda" and found.stream == stream.handle
    address = found.allocate(1024)
    found.upload(address, bytes(range(256)))
    assert found.time_ms(lambda: driver.memset_d8_async(address + 256, 7, 768, stream)) >= 0
    found.synchronize()
    data = np.empty(1024, np.uint8)
    driver.memcpy_dtoh(data, address)
    found.close()
    assert list(data[:256]) == list(range(256)) and (data[256:] == 7).all()


def test_what_pycuda_refuses_is_one_sentence(driver: Any) -> None:
    found = PyCuda()  # open_device prefers NVIDIA's binding, where that is installed too
    with pytest.raises(CutefuseError, match="cudaMalloc failed: cuMemAlloc failed: out of memory"):
        found.allocate(1 << 50)
    context = driver.Context.get_current()
    context.pop()
    try:
        with pytest.raises(CutefuseError, match="needs a current CUDA context"):
            found.allocate(16)
    finally:
        context.push()
    found.close()
