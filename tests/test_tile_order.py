"""The tiles of kernels that run one after the other, against all choices that there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from cutefuse import kernels
from cutefuse.timing.calls import Tiles
from cutefuse.timing.order import LEAST_GAIN, SWITCH_US, Kernel, cheapest_path, in_order


def kernel(tile: int, dtype: str = "float16") -> Kernel:
    return "concat_conv", False, dtype, tile


def cost(path: Sequence[Kernel], rows: Sequence[Mapping[Kernel, float]], switch_us: float) -> float:
    changes = sum(a != b for a, b in itertools.pairwise(path))
    return sum(row[k] for row, k in zip(rows, path, strict=True)) + switch_us * changes


def conv(op_type: str = "CuteConcatConv1Relu", dtype: str = "float16") -> kernels.Call:
    def tensor(*dims: int, layout: int = kernels.CHANNELS_LAST) -> kernels.Tensor:
        return kernels.Tensor(dims, dtype, layout)

    weights = [kernels.Tensor((64, 64), dtype, kernels.LINEAR), kernels.Tensor((64,), "float32", kernels.LINEAR)]
    attrs = {"channels": [64], "kernel_shape": [1, 1]}
    return kernels.Call(op_type, [tensor(1, 64, 8, 8), *weights], [tensor(1, 64, 8, 8)], attrs)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_takes_less_time(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        {kernel(t): rng.uniform(1, 5) for t in rng.sample(range(6), rng.randint(1, 4))}
        for _ in range(rng.randint(1, 6))
    ]
    switch_us = rng.choice([0.0, 0.3, 1.0, 3.0, 100.0])
    found = cheapest_path(rows, switch_us)
    least = min(cost(path, rows, switch_us) for path in itertools.product(*rows))
    assert cost(found, rows, switch_us) == pytest.approx(least, abs=1e-9)


def test_of_equal_tiles_the_first_guess_is_taken() -> None:
    assert cheapest_path([{kernel(3): 1.0, kernel(2): 1.0}], 1.0) == [kernel(3)]
    assert cheapest_path([], 1.0) == []


def test_a_tile_is_kept_where_another_one_gains_less_than_two_changes_cost() -> None:
    calls, own = [conv()] * 3, Tiles({1: 3.0, 2: 9.0}, 1)

    def middle(other_us: float) -> list[int]:
        return in_order(calls, [own, Tiles({2: other_us, 1: 3.0}, 2), own])

    assert middle(3.0 - 2 * SWITCH_US + 0.1) == [1, 1, 1]
    assert middle(3.0 - 2 * SWITCH_US - 0.1) == [1, 2, 1]


def test_a_gain_within_the_noise_of_quick_times_is_none() -> None:
    def taken(other_us: float) -> list[int]:
        return in_order([conv()], [Tiles({1: 10.0, 2: other_us}, 1)])

    assert taken(10.0 * (1 - LEAST_GAIN) - 0.01) == [2]
    assert taken(10.0 * (1 - LEAST_GAIN) + 0.01) == [1]


def test_the_same_tile_of_another_type_is_another_kernel() -> None:
    calls = [conv(), conv(dtype="bfloat16"), conv()]
    first, second = Tiles({1: 3.0, 2: 3.1}, 1), Tiles({1: 3.1, 2: 3.0}, 2)
    assert in_order(calls, [first, second, first]) == [1, 2, 1]
    assert in_order([conv()] * 3, [first, second, first]) == [1, 1, 1]


def test_the_same_tile_with_a_pre_activation_is_another_kernel() -> None:
    (pre,) = [
        v["op_type"] for v in kernels.operator_of("CuteConcatConv1Relu")["variants"]
        if v["pre_activated"] and v["sources"] == 1 and v["activation"] == "Relu"
    ]  # fmt: skip
    first, second = Tiles({1: 3.0, 2: 3.1}, 1), Tiles({1: 3.1, 2: 3.0}, 2)
    assert in_order([conv(), conv(pre), conv()], [first, second, first]) == [1, 2, 1]


def test_a_call_without_times_keeps_the_kernels_guess_between_others() -> None:
    own = Tiles({1: 3.0, 2: 3.2}, 1)
    assert in_order([conv()] * 3, [own, None, Tiles({2: 3.0, 1: 3.1}, 2)]) == [1, 0, 2]
    assert in_order([conv()], [None]) == [0]


def test_calls_and_times_belong_together() -> None:
    with pytest.raises(ValueError, match="shorter"):
        in_order([conv()] * 2, [None])
