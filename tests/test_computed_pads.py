"""Sizes behind pads that a graph computes, as PyTorch's exporter writes TensorFlow's `same` padding.

What a filter of three lacks at a stride of two follows from the size in front of the pad, which the pad before gave.
Half of it goes in front, the rest behind. The exporter also notes the sizes of all values between, and gives those that
it did not follow a name of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph, run_patch, weights
from onnx import TensorProto, helper, numpy_helper

from cutefuse.graph.clean import clean

SIDE, CHANNELS = 37, 16
# From the rows of {x} to those that are lacking (e), in front (q) and behind (u), and to the pads of four axes (n).
SAME = (
    "d{i} = Shape({x}) k{i} = Gather(d{i}, two_) l{i} = Cast<to=1>(k{i}) c{i} = Div(l{i}, two) h{i} = Ceil(c{i}) "
    "j{i} = Sub(h{i}, one) f{i} = Mul(j{i}, two) r{i} = Add(f{i}, three) b{i} = Sub(r{i}, l{i}) "
    "e{i} = Clip(b{i}, none) p{i} = Div(e{i}, two) q{i} = Floor(p{i}) u{i} = Sub(e{i}, q{i}) "
    "A{i} = Cast<to=7>(q{i}) B{i} = Cast<to=7>(u{i}) C{i} = Unsqueeze(A{i}, zero) D{i} = Unsqueeze(B{i}, zero) "
    "v{i} = Concat<axis=0>(C{i}, D{i}, C{i}, D{i}) s{i} = Shape(v{i}) m{i} = Sub(eight, s{i}) "
    "z{i} = ConstantOfShape<value: tensor = int64[1] {{0}}>(m{i}) w{i} = Concat<axis=0>(v{i}, z{i}) "
    "o{i} = Reshape(w{i}, pairs) g{i} = Slice(o{i}, last, start, zero, back) t{i} = Transpose<perm=[1,0]>(g{i}) "
    "n{i} = Reshape(t{i}, flat) x{i} = Pad({x}, n{i}) y{i} = Conv<strides=[2,2]>(x{i}, filter, bias) a{i} = Relu(y{i})"
)
RANKS = dict.fromkeys("klchjfrbepquAB", 0) | dict.fromkeys("dCDvsmzwn", 1) | dict.fromkeys("ogt", 2)
INTEGERS = frozenset("dkABCDvsmzwogtn")


def values() -> dict[str, np.ndarray]:
    ints = {"zero": [0], "eight": [8], "pairs": [-1, 2], "flat": [-1], "last": [-1], "start": [-99], "back": [-1]}
    floats = {"none": 0, "one": 1, "two": 2, "three": 3}
    stored = weights(filter=(CHANNELS, CHANNELS, 3, 3), bias=(CHANNELS,)) | {"two_": np.array(2, dtype=np.int64)}
    stored |= {name: np.array(v, dtype=np.int64) for name, v in ints.items()}
    return stored | {name: np.array(v, dtype=np.float32) for name, v in floats.items()}


def padded(count: int, named: bool, side: int | str = SIDE) -> onnx.ModelProto:
    """A convolution behind each of `count` computed pads. named: sizes between are noted, by names without a number."""
    body = " ".join(SAME.format(i=i, x=f"a{i - 1}" if i else "a") for i in range(count))
    inputs = {"a": f"1,{CHANNELS},{side},{side}"}
    model = graph(f"{body} y = Identity(a{count - 1})", values(), inputs=inputs)
    for i in range(count if named else 0):
        for letter, rank in RANKS.items():
            kind = TensorProto.INT64 if letter in INTEGERS else TensorProto.FLOAT
            dims = [f"unk_{letter}_{i}_{axis}" for axis in range(rank)]
            model.graph.value_info.append(helper.make_tensor_value_info(f"{letter}{i}", kind, dims))
    return model


def sides(count: int) -> list[int]:
    """Rows in front of each pad, and behind the last convolution."""
    found = [SIDE]
    for _ in range(count):
        found.append((found[-1] + 1) // 2)
    return found


def pads(side: int) -> list[int]:
    lacking = max((side + 1) // 2 * 2 + 1 - side, 0)
    return [0, 0] + [lacking // 2] * 2 + [0, 0] + [lacking - lacking // 2] * 2


@pytest.mark.parametrize("named", [False, True], ids=["bare", "named"])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_sizes_behind_computed_pads_are_known(count: int, named: bool) -> None:
    found = clean(padded(count, named), Path("."))
    got = [found.graph.dims(f"y{i}") for i in range(count)]
    assert got == [(1, CHANNELS, side, side) for side in sides(count)[1:]]
    folded = [list(numpy_helper.to_array(found.folded[f"n{i}"])) for i in range(count)]
    assert folded == [pads(side) for side in sides(count)[:-1]]


def test_every_figure_of_their_sites_is_known(tmp_path: Path) -> None:
    result, patched = run_patch(padded(4, named=True), tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    flops = [2 * side**2 * CHANNELS**2 * 9 for side in sides(4)[1:]]
    assert [site["flops"] for site in result.report["sites"]] == flops
    assert result.report["summary"]["bytes_saved"] is not None


@pytest.mark.parametrize("named", [False, True], ids=["bare", "named"])
def test_pads_of_a_size_that_only_a_run_tells_stay_unknown(named: bool) -> None:
    found = clean(padded(2, named, side="rows"), Path("."))
    assert not {"n0", "n1", "e0"} & found.folded.keys()
    assert [found.graph.dims(f"y{i}") for i in range(2)] == [(-1, CHANNELS, -1, -1)] * 2


def test_a_constant_of_a_pad_that_callers_may_replace_is_none() -> None:
    model = padded(1, named=True)
    model.graph.input.append(helper.make_tensor_value_info("three", TensorProto.FLOAT, []))
    found = clean(model, Path("."))
    assert "n0" not in found.folded and found.graph.dims("y0") == (-1, CHANNELS, -1, -1)
