"""Scales and shifts of the channels in front of a convolution, which its filter and bias compute as well: where they
go into it, that it is the same function, and what stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch, weights
from test_patch_pools import chain, difference

from cutefuse.operators.layouts import HWC8, NHWC
from cutefuse.rewrite.unpatch import unpatch

END = " q = Conv(p, w, k) y = LeakyRelu(q)"
NUMBERS = weights(s=(6, 1, 1), t=(1, 6, 1, 1), mean=(6,), var=(6,), beta=(6,)) | {"two": np.float32(2)}
STEPS = {  # name -> what is in front, and whether it shifts
    "GroupNorm's own": ("m = Mul(i, s) p = Add(m, t)", True),
    "BatchNormalization": ("p = BatchNormalization(i, beta, mean, beta, var)", True),
    "BatchNormalization, then a scale": ("m = BatchNormalization(i, beta, mean, beta, var) p = Mul(two, m)", True),
    "a number": ("p = Mul(i, two)", False),
    "a quotient": ("p = Div(i, two)", False),
    "a difference, constants first": ("p = Sub(t, i)", True),
    "Dropout behind": ("m = Add(i, t) d = Mul(m, s) p = Dropout(d)", True),
}


def stepped(front: str, end: str = END, **options: object) -> onnx.ModelProto:
    values = NUMBERS | weights(w=(10, 6, 3, 3), k=(10,), v=(10, 12, 1, 1), g=(6, 1, 3, 3), o=(6, 6, 1, 1))
    body = front + end
    read = {n: v for n, v in values.items() if n in body.replace("(", " ").replace(")", " ").replace(",", " ").split()}
    return graph(body, read, **{"inputs": {"i": "2,6,15,13"}, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("special", [0.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", [HWC8, NHWC])
@pytest.mark.parametrize("name", STEPS)
def test_steps_go_into_the_filter_behind_them(name: str, layout: int, special: float) -> None:
    model = stepped(STEPS[name][0])
    match, smaller = chain(model, layout)
    assert match.read == ("i",) and len(match.nodes) == len(model.graph.node) and smaller.read != ("i",)
    assert difference(model, match, special) < 2e-6


@pytest.mark.parametrize("name", STEPS)
def test_a_shift_of_an_image_that_is_then_padded_stays_and_a_scale_does_not(name: str, tmp_path: Path) -> None:
    front, shifts = STEPS[name]
    model = stepped(front, END.replace("Conv", "Conv<pads=[0,1,1,0]>"))
    result, patched = run_patch(model, tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    (node,) = (n for n in patched.graph.node if n.domain == "cutefuse")
    assert (node.input[0] == "i") != shifts


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_steps_behind_a_concat_go_with_it(dtype: str, layout: str, tmp_path: Path) -> None:
    values = weights(s=(24, 1, 1), t=(24, 1, 1), w=(16, 24, 1, 1), k=(16,), dtype=dtype)
    body = "c = Concat<axis=1>(a, b) m = Mul(c, s) p = Add(m, t) q = Conv(p, w, k) y = Relu(q)"
    result, patched = run_patch(graph(body, values, dtype=dtype), tmp_path, layout=layout)
    assert patched is not None and result.report["verify"]["passed"]
    assert [n.op_type for n in patched.graph.node if n.op_type != "Transpose"] == ["CuteConcatConv2Relu"]
    unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "plain.onnx")
    again = [n.op_type for n in onnx.load(str(tmp_path / "plain.onnx")).graph.node]
    assert again.count("Conv") == 1 and "Mul" not in again


STAYS = {
    "another reader": ("p = Mul(i, s)", END + " z = MaxPool<kernel_shape=[2,2]>(p)", ("y", "z")),
    "a reader with groups": ("p = Mul(i, s)", END + " r = Conv<group=6>(p, g) z = Relu(r)", ("y", "z")),
    "a reader inside": ("m = Mul(i, s) p = Add(m, t)", END + " z = Abs(m)", ("y", "z")),
    "a filter": ("p = Mul(i, s)", END + " h = Slice(p, start, end) z = Conv(i, h)", ("y", "z")),
    "an output": ("p = Mul(i, s)", END, ("y", "p")),
    "a number for each column": ("p = Mul(i, columns)", END, ("y",)),
    "no constant": ("m = ReduceMean<axes=[2,3]>(i) p = Mul(i, m)", END, ("y",)),
    "a quotient of the tensor": ("p = Div(two, i)", END, ("y",)),
    "a depthwise convolution": ("p = Mul(i, s)", END.replace("Conv(p, w, k)", "Conv<group=6>(p, g)"), ("y",)),
    "infinity": ("p = Mul(i, infinity)", END, ("y",)),
    "channels that the constant makes": ("h = ReduceMean<axes=[1]>(i) p = Mul(h, s)", END, ("y",)),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_other_steps_stay(name: str, tmp_path: Path) -> None:
    front, end, outputs = STAYS[name]
    NUMBERS["columns"], NUMBERS["infinity"] = np.full(13, 2, np.float32), np.float32(np.inf)
    NUMBERS["start"], NUMBERS["end"] = np.array([0, 0, 0, 0]), np.array([2, 6, 3, 3])
    half = "depthwise" in name
    model = stepped(front, end, outputs=outputs)
    result, patched = run_patch(model, tmp_path, verify=name != "infinity", **({"dtype": "float16"} if half else {}))
    assert patched is not None and (name == "infinity" or result.report["verify"]["passed"])
    assert all(n.input[0].startswith("p") for n in patched.graph.node if n.domain == "cutefuse")


def test_a_scale_that_two_convolutions_read_goes_into_both(tmp_path: Path) -> None:
    """As networks without normalisation have it (NFNet): the first convolution of a block and its shortcut."""
    model = stepped("p = Mul(i, two)", END + " r = Conv<strides=[2,2], pads=[1,1,1,1]>(p, w) z = Relu(r)",
                    outputs=("y", "z"))  # fmt: skip
    result, patched = run_patch(model, tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    assert fused_types(patched) == ["CuteConcatConv1LeakyRelu", "CuteConcatConv1Relu"]
    assert len(patched.graph.node) == 2


def test_a_normalisation_between_two_convolutions_is_the_first_one_s(tmp_path: Path) -> None:
    front = "c = Conv(i, o) p = BatchNormalization(c, beta, mean, beta, var)"
    result, patched = run_patch(stepped(front, END), tmp_path, engine="torch")
    assert patched is not None and result.report["verify"]["passed"]
    assert fused_types(patched) == ["CuteConcatConv1", "CuteConcatConv1LeakyRelu"] and len(patched.graph.node) == 2
    first, second = result.report["sites"]
    assert "BatchNormalization_1" in first["nodes"] and "BatchNormalization_1" not in second["nodes"]


def test_a_scale_that_would_cost_a_float16_filter_its_precision_stays(tmp_path: Path) -> None:
    values = weights(w=(16, 8, 1, 1), dtype="float16") | {"tiny": np.float16(2e-6)}
    model = graph("p = Mul(a, tiny) q = Conv(p, w) y = Relu(q)", values, dtype="float16", inputs={"a": "n,8,9,7"})
    _, patched = run_patch(model, tmp_path, verify=False)
    assert patched is not None and [n.op_type for n in patched.graph.node] == ["Mul", "CuteConcatConv1Relu"]


def test_channels_of_unknown_number_are_not_those_of_a_constant(tmp_path: Path) -> None:
    """A tensor of one channel and a constant of six have six."""
    model = stepped("p = Mul(i, s)", inputs={"i": "2,channels,15,13"})
    result, patched = run_patch(model, tmp_path, shapes={"i": [2, 1, 15, 13]})
    assert patched is not None and result.report["verify"]["passed"]
    assert all(n.input[0] == "p" for n in patched.graph.node if n.domain == "cutefuse")
