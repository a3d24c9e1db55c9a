"""What a node of int8 says of its sums: the order of its sources, and the bound that its filters give."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph, run_patch
from onnx import numpy_helper
from test_quant import CONST

from cutefuse import kernels
from cutefuse.graph.numbers import FLOAT8
from cutefuse.operators import conv_math, quant_math

CHANNELS = (5, 3, 9, 1)


def exact_sums(w: np.ndarray, x: np.ndarray, scales: tuple[float, ...]) -> list[float]:
    """The sums of one filter [C, taps] before and after each change of their unit."""
    parts = np.split((w * x).sum(axis=1), np.cumsum(CHANNELS)[:-1])
    steps = np.asarray(scales, np.float32).astype(np.float64)
    found = [0.0]
    for i in range(1, len(parts)):
        worth = sum(part.sum() * step for part, step in zip(parts[:i], steps, strict=False))
        found += [worth / steps[i - 1], worth / steps[i]] if steps[i] != steps[i - 1] else []
    return found


@pytest.mark.parametrize("scales", [(0.1, 0.2, 0.2, 0.7), (3.0, 0.25, 1.0, 0.5), (0.5, 0.5, 0.5, 8.0)])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_reached_and_not_exceeded(seed: int, scales: tuple[float, ...]) -> None:
    w = np.random.default_rng(seed).integers(-128, 128, (6, sum(CHANNELS), 2, 3)).astype(np.int8)
    bound = quant_math.sum_bound(w, CHANNELS, scales)
    flat = w.reshape(6, sum(CHANNELS), 6).astype(np.float64)
    # The worst sources are -128 where the filter is negative, and as near to 128 as int8 has it where it is positive.
    worst = [np.abs(exact_sums(f, np.where(f < 0, -128, 127), scales)).max() for f in flat]
    assert 0.98 * bound <= max(worst) <= bound


def test_sums_whose_unit_never_changes_have_no_bound() -> None:
    w = np.full((2, sum(CHANNELS), 1, 1), 127, np.int8)
    assert quant_math.sum_bound(w, CHANNELS, (0.3,) * 4) == 0
    assert quant_math.sum_bound(w[:, :5], (5,), (0.3,)) == 0


def test_the_bound_of_filters_of_zeros_is_known_where_units_change() -> None:
    assert quant_math.sum_bound(np.zeros((2, sum(CHANNELS), 1, 1), np.int8), CHANNELS, (1.0, 2.0, 3.0, 4.0)) > 0


def test_the_bound_counts_the_most_negative_filter() -> None:
    w = np.full((1, 5, 1, 1), -128, np.int8)
    assert quant_math.sum_bound(w, (4, 1), (0.5, 1.0)) == 4 * 128 * 128


def test_a_bound_that_a_parser_would_change_is_not_written() -> None:
    """Parsers keep attributes in 32 bits: 2^32 + 1 would become a small bound, and sums wrong."""
    channels = (14000,) * 5 + (1,)
    w = np.broadcast_to(np.int8(127), (1, sum(channels), 3, 3))
    assert 128 * 127 * 9 * 70000 > 2**32
    assert quant_math.sum_bound(w, channels, (1.0,) * 5 + (2.0,)) == 0
    few = (7000,) * 2 + (1,)
    assert 2**31 > quant_math.sum_bound(w[:, :14001], few, (1.0, 1.0, 2.0)) > 2**30


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_another_order_of_sources_is_the_same_convolution(order: tuple[int, ...]) -> None:
    channels = CHANNELS[:3]
    w = np.arange(2 * sum(channels)).reshape(2, sum(channels), 1, 1)
    moved = quant_math.in_order(w, channels, order)
    parts = np.split(moved, np.cumsum([channels[i] for i in order])[:-1], axis=1)
    for part, i in zip(parts, order, strict=True):
        first = sum(channels[:i])
        assert np.array_equal(part, w[:, first : first + channels[i]])


def test_sources_are_ordered_by_scale_and_equal_ones_stay_in_order() -> None:
    assert quant_math.order_of([0.3, 0.1, 0.3, 0.2, 0.1]) == [1, 4, 3, 0, 2]


TWO_SCALES = """qa = QuantizeLinear(a, {a}, z) da = DequantizeLinear(qa, {a}, z)
    qb = QuantizeLinear(b, {b}, z) db = DequantizeLinear(qb, {b}, z) c = Concat<axis=1>(da, db)
    dw = DequantizeLinear<axis=0>(w, ws, z12) x = Conv<pads=[1,1,1,1]>(c, dw, k) y = Relu(x)"""


@pytest.mark.parametrize(("a", "b", "order"), [("sa", "sb", "ab"), ("sb", "sa", "ba"), ("sc", "sc", "ab")])
def test_patch_orders_sources_by_scale_and_bounds_their_sums(a: str, b: str, order: str, tmp_path: Path) -> None:
    result, patched = run_patch(graph(TWO_SCALES.format(a=a, b=b), CONST), tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    [node] = [n for n in patched.graph.node if n.domain == "cutefuse"]
    attrs = {p.name: onnx.helper.get_attribute_value(p) for p in node.attribute}
    assert [name[1] for name in node.input[:2]] == list(order)
    assert list(attrs["channels"]) == [{"a": 8, "b": 16}[name] for name in order]
    scales, w = attrs["input_scales"], quant_math.in_order(CONST["w"], (8, 16), ["ab".index(name) for name in order])
    assert list(scales) == sorted(scales)
    [packed] = [numpy_helper.to_array(t) for t in patched.graph.initializer if t.name == node.input[2]]
    assert np.array_equal(packed, conv_math.pack(w, attrs["channels"]))
    assert attrs["sum_bound"] == quant_math.sum_bound(w, attrs["channels"], scales)


def concat_of_four(sum_bound: int, dtype: str = "int8", filters: int = 256) -> kernels.Call:
    """1x1 filters over four sources of 64 channels and as many scales, on large maps."""
    attrs = {"channels": (64,) * 4, "kernel_shape": (1, 1), "strides": (1, 1), "pads": (0,) * 4, "dilations": (1, 1),
             "packed_sizes": (64,) * 4, "input_scales": (1.0, 1.5, 2.0, 2.5), "output_type": 10,
             "sum_bound": sum_bound}  # fmt: skip
    sources = [kernels.Tensor((8, 64, 80, 80), dtype, kernels.CHANNELS_LAST) for _ in range(4)]
    constants = [kernels.Tensor((filters, 256), dtype, kernels.LINEAR)]
    constants += [kernels.Tensor((filters,), "float32", kernels.LINEAR)] * 2
    y = kernels.Tensor((8, filters, 80, 80), "float16", kernels.CHANNELS_LAST)
    return kernels.Call("CuteQConcatConv4Silu", [*sources, *constants], [y], attrs, sm=90, sm_count=132)


def test_bounded_sums_are_expected_to_take_less_time() -> None:
    """And a bound that is too large, or of float8, changes nothing."""
    small, large = 2**22, 2**22 + 1
    times_us = [kernels.predicted_us(concat_of_four(bound)) or 0.0 for bound in (0, small, large)]
    assert times_us[1] < 0.97 * times_us[0] and times_us[2] == times_us[0] > 0
    float8_us = [kernels.predicted_us(concat_of_four(bound, FLOAT8.name)) for bound in (0, small)]
    assert float8_us[0] == float8_us[1]


def test_sharing_pixels_needs_a_second_tile_of_filters() -> None:
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    found = {filters: kernels.configs(concat_of_four(0, filters=filters)) for filters in (128, 136)}
    assert 201 in found[136] and 201 not in found[128]
