"""Pools and linear Resizes of a concatenation on a GPU against float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import emulated
import gpu
import pytest
from windows import LINEAR, MAX, MEAN, Instance, Window, reference

from cutefuse import kernels

pytestmark = pytest.mark.gpu
DTYPES = ("float16", "bfloat16", "float32")

WINDOWS = {
    "googlenet 3x3": Window(MAX, (64, 128, 32, 32), (2, 14, 14), (3, 3), pads=(1, 1, 1, 1)),
    "stem 3x3 stride 2": Window(MAX, (64,), (1, 57, 31), (3, 3), (2, 2), (1, 1, 1, 1)),
    "ceil mode": Window(MAX, (16, 48), (2, 13, 12), (3, 3), (2, 2), out=(7, 6)),
    "2x2": Window(MAX, (24,), (3, 10, 14), (2, 2), (2, 2)),
    "sppf 5x5": Window(MAX, (32,), (1, 20, 20), (5, 5), pads=(2, 2, 2, 2)),
    "rows": Window(MAX, (8,), (1, 9, 33), (1, 7), (1, 3), (0, 3, 0, 2)),
    "dilated": Window(MAX, (8, 8), (1, 11, 12), (3, 2), (1, 2), (2, 1, 1, 1), (2, 3)),
    "one pixel": Window(MAX, (8,), (1, 1, 1)),
    "mean 3x3": Window(MEAN, (16, 40), (2, 9, 7), (3, 3), pads=(1, 1, 1, 1)),
    "mean counts pads": Window(MEAN, (8,), (1, 9, 7), (3, 3), (2, 2), (1, 0, 1, 2), counts_pads=True),
    "mean ceil counts pads": Window(MEAN, (8,), (1, 8, 7), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), True, (5, 4)),
    "mean 2x2": Window(MEAN, (32,), (2, 12, 6), (2, 2), (2, 2)),
    "image": Window(MEAN, (40, 64), (3, 7, 7), (7, 7)),
    "wide image": Window(MEAN, (40,), (2, 31, 29), (31, 29)),
    "narrow image": Window(MEAN, (8,), (1, 3, 1), (3, 1)),
    "twice": Window(LINEAR, (64, 8), (2, 7, 9), out=(14, 18), scales=(0.5, 0.5), offsets=(-0.25, -0.25)),
    "four times": Window(LINEAR, (16,), (1, 5, 6), out=(20, 24), scales=(0.25, 0.25), offsets=(-0.375, -0.375)),
    "corners": Window(LINEAR, (8,), (1, 4, 5), out=(9, 11), scales=(3 / 8, 4 / 10)),
    "asymmetric": Window(LINEAR, (8, 16), (2, 6, 5), out=(15, 7), scales=(0.4, 5 / 7)),
    "smaller": Window(LINEAR, (8,), (1, 16, 23), out=(7, 6), scales=(16 / 7, 23 / 6), offsets=(0.64, 1.42)),
    "one row": Window(LINEAR, (8,), (1, 1, 9), out=(3, 5), scales=(1 / 3, 1.8), offsets=(-1 / 3, 0.4)),
}  # fmt: skip


def assert_right(instance: Instance) -> None:
    """The largest exactly, else two roundings of the type; nothing written beside the output."""
    truth = reference(instance.window, instance.x)
    unit = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-22}[instance.dtype]
    # Places of a Resize have 24 bits, of which those of the largest row or column are before the point.
    places = 2**-22 * max(instance.window.size[1:]) if instance.window.mode == LINEAR else 0.0
    reach = instance.x.abs().max() if instance.x.numel() else 0.0
    bound = 0.0 if instance.window.mode == MAX else (truth.abs() * 2 * unit + reach * (places + 2**-24))
    y = instance.run()
    assert bool(((y - truth).abs() <= bound).all()), f"off by {float((y - truth).abs().max()):.3g}"
    assert all(bool(buffer.guards_intact()) for buffer in instance.buffers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_equals_float64(name: str, dtype: str) -> None:
    assert_right(Instance.of(WINDOWS[name], dtype))


def drawn(draw: random.Random) -> Window:
    """Any window that is allowed: sizes, pads and strides that fit no tile."""
    mode = draw.choice((MAX, MEAN, LINEAR))
    channels = tuple(8 * draw.randint(1, 5) for _ in range(draw.randint(1, 8)))
    size = (draw.randint(1, 3), draw.randint(1, 24), draw.randint(1, 24))
    if mode == LINEAR:
        out = (draw.randint(1, 40), draw.randint(1, 40))
        scales = [draw.uniform(0.2, 1.5) * n / o for n, o in zip(size[1:], out, strict=True)]
        offsets = [draw.uniform(-1.0, 1.0) for _ in out]
        return Window(mode, channels, size, out=out, scales=(scales[0], scales[1]), offsets=(offsets[0], offsets[1]))
    kernel, dilations = [draw.randint(1, 6) for _ in "hw"], [draw.choice((1, 1, 2, 3)) for _ in "hw"]
    if mode == MEAN:
        dilations = [1, 1]
    strides = [draw.randint(1, 4) for _ in "hw"]
    pads = [min(draw.randint(0, 3), d * (k - 1), n) for k, d, n in zip(kernel * 2, dilations * 2, size[1:] * 2,
                                                                       strict=True)]  # fmt: skip
    extent = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    grown = [max(0, e - n - pads[i] - pads[i + 2]) for i, (e, n) in enumerate(zip(extent, size[1:], strict=True))]
    size = (size[0], size[1] + grown[0], size[2] + grown[1])
    return Window(
        mode, channels, size, (kernel[0], kernel[1]), (strides[0], strides[1]), (pads[0], pads[1], pads[2], pads[3]),
        (dilations[0], dilations[1]), draw.random() < 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_windows_equal_float64(seed: int) -> None:
    draw = random.Random(seed)
    window = drawn(draw)
    assert_right(Instance.of(window, draw.choice(emulated.TYPES if emulated.EMULATED else DTYPES)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["googlenet 3x3", "mean 3x3", "image", "twice"])
def test_nan_and_infinity_reach_the_windows_that_read_them(name: str, dtype: str) -> None:
    import torch

    window = WINDOWS[name]
    n, h, w = window.size
    x = torch.randn(n, sum(window.channels), h, w, dtype=torch.float64)
    x[0, 3, h // 2, w // 2], x[-1, 9, 0, 0], x[0, 20, h - 1, w - 1] = float("nan"), float("inf"), float("-inf")
    instance = Instance.of(window, dtype, x=x)
    truth = reference(window, instance.x)
    assert 0 < int(truth.isnan().sum()) < truth.numel() / 20
    y = instance.run()
    assert bool((y.isnan() == truth.isnan()).all())
    assert bool((y.isinf() == truth.isinf()).all()) and bool((y[y.isinf()] == truth[truth.isinf()]).all())


def test_windows_of_a_captured_graph_wait_for_what_they_read() -> None:
    """A chain of pools over one image, each over what the one before wrote, replayed: the same bits as one by one."""
    import torch

    window = Window(MAX, (64,), (2, 20, 20), (5, 5), pads=(2, 2, 2, 2))
    chain: list[Any] = [Instance.of(window, "float16", wider=False) for _ in range(4)]
    for one, other in zip(chain, chain[1:], strict=False):
        other.call = replace(other.call, inputs=[one.call.outputs[0]], _keep=[])
    expected = [instance.run().clone() for instance in chain]
    launches = [kernels.Launcher(instance.call) for instance in chain]
    with kernels.side_by_side():
        graph = gpu.capture(lambda stream: [launch(stream) for launch in launches], gpu.new_stream())
    for _ in range(emulated.repeats(20)):
        for instance in chain:
            instance.buffers[-1].view.fill_(float("nan"))
        graph.replay()
        gpu.synchronize()
        for instance, truth in zip(chain, expected, strict=True):
            n, c, p, q = instance.call.outputs[0].dims
            assert torch.equal(instance.buffers[-1].view.view(n, p, q, c).permute(0, 3, 1, 2).double(), truth)


def test_an_empty_batch_launches_nothing() -> None:
    instance = Instance.of(Window(MAX, (8,), (0, 4, 4), (2, 2)), "float16")
    assert instance.run().numel() == 0


def test_a_window_has_no_tiles_to_ask_for() -> None:
    instance = Instance.of(WINDOWS["2x2"], "float16")
    assert kernels.configs(instance.call) == []
    with pytest.raises(kernels.KernelError, match="tile 1"):
        kernels.run(replace(instance.call, config=1, _keep=[]))
