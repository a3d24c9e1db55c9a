"""Pads with zeros in front of a convolution, which its own pads add as well: where they go into it, that it is the same
function, and what stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch, weights
from test_patch_pools import chain, difference

from cutefuse.match.find import find_sites
from cutefuse.operators.layouts import HWC8, NHWC
from cutefuse.rewrite.unpatch import unpatch

END = " q = Conv<strides=[2,2], pads=[1,0,0,2]>(p, w, k) y = LeakyRelu(q)"
SAME = [0, 0, 0, 1, 0, 0, 1, 1]  # top 0, left 1, bottom 1, right 1
PADS = {  # name -> opset, the Pad, its constants, and the pads of the fused convolution
    "one side": (17, "p = Pad(i, s)", {"s": SAME}, [1, 1, 1, 3]),
    "a zero that is given": (13, "p = Pad(i, s, z)", {"s": SAME, "z": 0.0}, [1, 1, 1, 3]),
    "a negative zero": (13, "p = Pad(i, s, z)", {"s": SAME, "z": -0.0}, [1, 1, 1, 3]),
    "no value": (18, "p = Pad(i, s, , x)", {"s": [2, 3, 4, 5], "x": [2, 3]}, [3, 3, 4, 7]),
    "axes from the end": (19, "p = Pad(i, s, z, x)", {"s": [3, 2, 5, 4], "z": 0.0, "x": [-1, -2]}, [3, 3, 4, 7]),
    "one axis": (18, "p = Pad(i, s, , x)", {"s": [0, 7], "x": [3]}, [1, 0, 0, 9]),
    "attributes": (10, f"p = Pad<pads={SAME}>(i)", {}, [1, 1, 1, 3]),
    "two of them": (17, "j = Pad(i, s) d = Dropout(j) p = Pad(d, s)", {"s": SAME}, [1, 2, 2, 4]),
    "beyond the filter": (17, "p = Pad(i, s)", {"s": [0, 0, 6, 7, 0, 0, 8, 9]}, [7, 7, 8, 11]),
}  # fmt: skip
STAYS = {
    "another value": (13, "p = Pad(i, s, z)", {"s": SAME, "z": 1.0}),
    "NaN": (13, "p = Pad(i, s, z)", {"s": SAME, "z": np.nan}),
    "an old value": (10, f"p = Pad<pads={SAME}, value=0.5>(i)", {}),
    "reflected": (13, 'p = Pad<mode="reflect">(i, s)', {"s": SAME}),
    "edge": (13, 'p = Pad<mode="edge">(i, s)', {"s": SAME}),
    "cut": (13, "p = Pad(i, s)", {"s": [0, 0, 0, 1, 0, 0, -1, 1]}),
    "channels": (13, "j = Slice(i, a, b, c) p = Pad(j, s)", {"s": [0, 1, 0, 1, 0, 0, 1, 1], "a": [0], "b": [5],
                 "c": [1]}),
    "images": (13, "p = Pad(i, s)", {"s": [1, 0, 0, 1, 0, 0, 1, 1]}),
    "an axis of images": (18, "p = Pad(i, s, , x)", {"s": [0, 1, 1, 0], "x": [0, 2]}),
    "automatic pads behind it": (13, "p = Pad(i, s)", {"s": SAME}),
}  # fmt: skip


def padded(opset: int, pad: str, constants: dict[str, object], end: str = END, **options: object) -> onnx.ModelProto:
    values = weights(w=(10, 6, 3, 3), k=(10,))
    values |= {n: np.array(v, np.int64 if isinstance(v, list) else np.float32) for n, v in constants.items()}
    given = {"opset": opset, "inputs": {"i": "2,6,15,13"}, **options}
    return graph(pad + end, values, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("special", [0.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", [HWC8, NHWC])
@pytest.mark.parametrize("name", PADS)
def test_a_pad_with_zeros_goes_into_the_convolution(name: str, layout: int, special: float) -> None:
    *model, pads = PADS[name]
    (match,) = chain(padded(*model), layout)
    assert match.read == ("i",) and list(match.call.attrs["pads"]) == pads  # type: ignore[call-overload]
    assert difference(padded(*model), match, special) < 2e-7


@pytest.mark.parametrize("name", STAYS)
def test_another_pad_stays(name: str, tmp_path: Path) -> None:
    end = END.replace("pads=[1,0,0,2]", 'auto_pad="SAME_UPPER"') if name.startswith("automatic") else END
    model = padded(*STAYS[name], end=end)
    (match,) = chain(model)
    assert match.read == ("p",)
    assert name == "NaN" or run_patch(model, tmp_path)[0].report["verify"]["passed"]


def test_a_pad_of_a_size_that_a_run_tells_stays() -> None:
    body = "h = Shape(i) d = Sub(h, h) n = Concat<axis=0>(d, d) p = Pad(i, n)"
    (match,) = chain(padded(17, body, {}, inputs={"i": "n,6,h,w"}))
    assert match.read == ("p",)


@pytest.mark.parametrize("replaced", ["s", "z"])
def test_a_pad_that_callers_may_replace_stays(replaced: str) -> None:
    model = padded(17, "p = Pad(i, s, z)", {"s": SAME, "z": 0.0})
    stored = next(t for t in model.graph.initializer if t.name == replaced)
    model.graph.input.append(onnx.helper.make_tensor_value_info(replaced, stored.data_type, list(stored.dims)))
    (match,) = chain(model)
    assert match.read == ("p",)


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
def test_pads_behind_a_concat_and_of_a_depthwise_convolution(layout: str, tmp_path: Path) -> None:
    """As TensorFlow's networks have them: both readers of one Pad are fused, and it goes with its Concat."""
    body = (
        "c = Concat<axis=1>(a, b) p = Pad(c, s) q = Conv<strides=[2,2]>(p, w, k) r = Relu(q) "
        "t = Conv(p, u) m = Sigmoid(t) o = Pad(r, s) d = Conv<strides=[2,2], group=16>(o, g) y = Clip(d, lo, hi) "
    )
    values = weights(w=(16, 24, 3, 3), k=(16,), u=(8, 24, 1, 1), g=(16, 1, 3, 3), dtype="float16")
    values |= {"s": np.array([0, 0, 0, 0, 0, 0, 1, 1]), "lo": np.float16(0), "hi": np.float16(6)}
    model = graph(body, values, dtype="float16", outputs=["y", "m"])
    result, patched = run_patch(model, tmp_path, layout=layout)
    assert patched is not None and result.report["verify"]["passed"]
    kept = [n.op_type for n in patched.graph.node if n.op_type != "Transpose"]
    assert sorted(kept) == ["CuteConcatConv2Relu", "CuteConcatConv2Sigmoid", "CuteDepthwiseConcatConv1Clip"]
    unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "plain.onnx")
    again = onnx.load(str(tmp_path / "plain.onnx"))
    assert [n.op_type for n in again.graph.node].count("Conv") == 3


def test_a_pad_that_something_else_reads_too_stays_for_that(tmp_path: Path) -> None:
    model = padded(17, "p = Pad(i, s)", {"s": SAME}, END + " z = MaxPool<kernel_shape=[2,2]>(p)", outputs=["y", "z"])
    result, patched = run_patch(model, tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    (node,) = (n for n in patched.graph.node if n.domain == "cutefuse")
    assert node.input[0] == "i" and [n.op_type for n in patched.graph.node].count("Pad") == 1


@pytest.mark.parametrize("step", ["", "Mul", "Sub"])
def test_the_network_s_image_is_read_as_it_is_given(step: str, tmp_path: Path) -> None:
    """The zeros around it are not shifted, so a mean stays outside; a scale goes into the filter."""
    front = f"j = {step}(i, m) p = Pad(j, s)" if step else "p = Pad(i, s)"
    values = weights(w=(16, 3, 3, 3), k=(16,), dtype="float16") | {"s": np.array(SAME)}
    values |= {"m": np.float16(2)} if step else {}
    body = front + END.replace("1,0,0,2", "0,0,0,0")
    result, patched = run_patch(graph(body, values, inputs={"i": "2,3,15,13"}, dtype="float16"), tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    kept = ["CuteImageConcatConv1LeakyRelu"] if step != "Sub" else ["Sub", "CuteConcatConv1LeakyRelu"]
    assert [n.op_type for n in patched.graph.node] == kept


@pytest.mark.parametrize("counted", [0, 1])
def test_a_pad_in_front_of_a_pool_is_counted_by_its_means(counted: int) -> None:
    pool = f" j = AveragePool<kernel_shape=[2,2], strides=[2,2], count_include_pad={counted}>(p)"
    values = weights(v=(10, 6, 1, 1)) | {"s": np.array(SAME)}
    model = graph(f"p = Pad(i, s){pool} q = Conv(j, v) y = LeakyRelu(q)", values, inputs={"i": "2,6,15,13"})
    match, *_ = chain(model)
    assert match.read == ("i",) and "pools" in match.takes and list(match.call.attrs["pads"]) == [0, 1, 1, 1]  # type: ignore[call-overload]
    assert difference(model, match) < 2e-7


def test_a_pad_in_front_of_a_transposed_convolution_stays() -> None:
    values = weights(v=(16, 8, 2, 2)) | {"s": np.array(SAME)}
    body = "p = Pad(i, s) q = ConvTranspose<strides=[2,2]>(p, v) y = Relu(q)"
    values = {n: v.astype(np.float16) if v.dtype == np.float32 else v for n, v in values.items()}
    found = [s for s in find_sites(graph(body, values, dtype="float16", inputs={"i": "2,16,9,7"}), Path())[1]]
    assert found[0].match is not None and found[0].match.read == ("p",)


def test_a_residual_around_a_pad_is_taken(tmp_path: Path) -> None:
    """The batch is open, and a Reshape hides its name: the rows follow from those before the Pad all the same."""
    body = "r = Relu(i) p = Pad(r, s) q = Conv(p, w, k) o = Conv<kernel_shape=[1,1]>(q, v) y = Add(o, r)"
    values = weights(w=(6, 6, 3, 2), k=(6,), v=(6, 6, 1, 1)) | {"s": np.array([0, 0, 1, 1, 0, 0, 1, 0])}
    result, patched = run_patch(graph(body, values, inputs={"i": "n,6,h,w"}), tmp_path, shapes={"i": [2, 6, 9, 7]})
    assert patched is not None and result.report["verify"]["passed"]
    assert "CuteConcatConv1Add" in fused_types(patched)
