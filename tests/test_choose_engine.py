"""What an engine does with a Concat by itself, against the verdicts of public TensorRT build logs.

YOLOv8: NVIDIA/TensorRT 3254. GoogLeNet: dusty-nv/jetson-inference 1630. Plugins: NVIDIA/TensorRT 4345.
"""

from __future__ import annotations

from pathlib import Path

import graphs
import numpy as np
import pytest

from cutefuse.errors import CutefuseError
from cutefuse.match.answer import Match
from cutefuse.match.find import find_sites
from cutefuse.select.engines import NEWEST, Engine, engine_of
from cutefuse.select.wiring import Wiring, wiring

TRT = Engine("tensorrt", (10, 3))
TORCH = Engine("torch")


def conv(x: str, y: str, w: str = "w", act: str = "") -> str:
    """A Conv and its activation, in ONNX's text form."""
    if act == "Silu":
        return f"{y}c = Conv(x0, {w})".replace("x0", x) + f" {y}s = Sigmoid({y}c) {y} = Mul({y}c, {y}s) "
    return f"{y}c = Conv({x}, {w}) {y} = {act}({y}c) " if act else f"{y} = Conv({x}, {w}) "


def wired(body: str, values: dict[str, np.ndarray], inputs: dict[str, str], engine: Engine = TRT) -> Wiring:
    model = graphs.graph(body, values, inputs=inputs)
    return wiring(find_sites(model, Path())[0].whole, engine)


def verdicts(wires: Wiring, concat: str) -> list[str]:
    """What happens to each input of the Concat that makes a tensor: why it is copied, "" where it is not."""
    node = wires.graph.producer(concat)
    assert node is not None
    return [i.copied for i in wires.inputs_of(node)]


def c2f(engine: Engine = TRT) -> Wiring:
    """YOLOv8's /model.21: cv1, its two halves, two convolutions after them, all four joined."""
    body = (
        conv("a", "h", "w1", "Silu") + "p, q = Split<axis=1>(h, halves) " + conv("q", "m0", "w2", "Silu")
        + conv("m0", "m1", "w2", "Silu") + "c = Concat<axis=1>(p, q, m0, m1) " + conv("c", "y", "w3")
    )  # fmt: skip
    values = graphs.weights(w1=(16, 8, 1, 1), w2=(8, 8, 1, 1), w3=(8, 32, 1, 1)) | {"halves": np.array([8, 8])}
    return wired(body, values, {"a": "1,8,20,20"}, engine)


def inception(engine: Engine = TRT, act: str = "Relu", kernel: int = 1) -> Wiring:
    """GoogLeNet's inception_5b: a 1x1, two reduced branches, and a pool with its projection."""
    body = (
        conv("a", "b1", "w1", act) + conv("a", "r2", "w1", act) + conv("r2", "b2", "w1", act)
        + conv("a", "r3", "w1", act) + conv("r3", "b3", "w1", act)
        + "p = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1], strides=[1,1]>(a) " + conv("p", "b4", "w1", act)
        + "y = Concat<axis=1>(b1, b2, b3, b4) z = Relu(y)"
    )  # fmt: skip
    model = graphs.graph(body.replace("y =", "c =").replace("(y)", "(c)"), graphs.weights(w1=(8, 8, kernel, kernel)),
                         inputs={"a": "1,8,7,7"}, outputs=("z",))  # fmt: skip
    return wiring(find_sites(model, Path())[0].whole, engine)


def test_two_halves_of_a_split_are_copied_and_two_convolutions_retargeted() -> None:
    first, second, third, fourth = verdicts(c2f(), "c")
    assert "not movable" in first and "not movable" in second and third == fourth == ""


def test_the_outputs_of_two_branches_are_both_retargeted() -> None:
    """YOLOv8's /model.22/Concat_2: the box and the class branch, 3x3 convolutions of one tensor."""
    body = conv("a", "u", "w1") + conv("a", "v", "w1") + "c = Concat<axis=1>(u, v) y = Relu(c)"
    wires = wired(body, graphs.weights(w1=(8, 8, 3, 3)), {"a": "1,8,20,20"})
    assert verdicts(wires, "c") == ["", ""]


def test_boxes_have_one_stomping_hazard() -> None:
    """YOLOv8's /model.22/Concat_4: (far + near) / 2 and far - near."""
    body = "s = Add(a, b) u = Div(s, two) v = Sub(a, b) y = Concat<axis=1>(u, v)"
    model = graphs.graph(body.replace("y =", "c =") + " y = Relu(c)", {"two": np.array(2, np.float32)},
                         inputs={"a": "1,2,84", "b": "1,2,84"}, rank=3)  # fmt: skip
    wires = wiring(find_sites(model, Path())[0].whole, TRT)
    assert verdicts(wires, "c") == ["stomping hazard", ""]


def test_the_output_of_merged_1x1_convolutions_is_copied() -> None:
    """GoogLeNet's inception_5b/output."""
    first, *others = verdicts(inception(), "c")
    assert "merged 1x1" in first and others == ["", "", ""]


@pytest.mark.parametrize(("act", "kernel"), [("Silu", 1), ("Relu", 3)])
def test_convolutions_that_are_not_merged_or_end_in_a_kernel_of_their_own_are_retargeted(act: str, kernel: int) -> None:
    wires = inception(act=act, kernel=kernel) if kernel == 1 else None
    if wires is None:
        body = (
            "b1 = Conv<pads=[1,1,1,1]>(a, w1) b2 = Conv<pads=[1,1,1,1]>(a, w1) c = Concat<axis=1>(b1, b2) y = Relu(c)"
        )
        wires = wired(body, graphs.weights(w1=(8, 8, 3, 3)), {"a": "1,8,7,7"})
    assert set(verdicts(wires, "c")) == {""}


def test_any_output_of_a_plugin_is_copied() -> None:
    model = graphs.graph(
        "c = Concat<axis=1>(a, b) v = Conv(c, w1) u = Conv(a, w2) d = Concat<axis=1>(u, v) y = Relu(d)",
        graphs.weights(w1=(8, 16, 1, 1), w2=(8, 8, 1, 1)), inputs={"a": "1,8,7,7", "b": "1,8,7,7"},
    )  # fmt: skip
    cleaned, (site, *_) = find_sites(model, Path())
    assert site.match is not None
    plain = wiring(cleaned.whole, TRT)
    assert verdicts(plain, "d") == ["", ""]
    assert verdicts(plain.fused(site.match), "d")[1].startswith("a fused node's output")
    assert verdicts(plain.fused(site.match).unfused(site.match), "d") == ["", ""]


@pytest.mark.parametrize(
    ("body", "first"),
    [
        ("u = Relu(a) d = Concat<axis=1>(u, b) e = Concat<axis=1>(u, a)", "it lies in another Concat already"),
        ("d = Concat<axis=1>(a, b)", "a network input"),
        ("u = Identity(a) d = Concat<axis=1>(u, b)", "a network input"),
        ("u = Resize(a, , two) d = Concat<axis=1>(u, u)", "an enlarged tensor, which TensorRT copies"),
        ("y = Relu(a) d = Concat<axis=1>(y, b)", "a network output (stomping hazard)"),
        ("u = Relu(a) d = Concat<axis=1>(u, u)", ""),
    ],
)
def test_other_inputs_of_a_concat(body: str, first: str) -> None:
    values = {"two": np.array([1, 1, 2, 2], np.float32)}
    tail = "" if "y =" in body else " y = Relu(d)"
    tail += " f = Relu(e)" if "e =" in body else ""
    model = graphs.graph(body + tail, values, inputs={"a": "1,8,6,6", "b": "1,8,6,6"})
    wires = wiring(find_sites(model, Path())[0].whole, TRT)
    assert verdicts(wires, "d")[0] == first


def test_a_tensor_twice_in_a_concat_is_copied_once() -> None:
    wires = wired("u = Relu(a) d = Concat<axis=1>(u, u) y = Relu(d)", {}, {"a": "1,8,6,6"})
    assert verdicts(wires, "d") == ["", "it is there twice"]


def test_triton_joins_all_inputs_in_a_kernel_that_computes_what_it_alone_reads() -> None:
    body = (
        "u = Resize(a, , two) v = Relu(a) x = Relu(b) d = Concat<axis=1>(u, v) e = Concat<axis=1>(x, b) "
        "z = Neg(x) y = Relu(d) y2 = Relu(e) y3 = Relu(z)"
    )
    values = {"two": np.array([1, 1, 2, 2], np.float32)}
    inputs = {"a": "1,8,6,6", "b": "1,8,6,6"}
    model = graphs.graph(body.replace("Relu(a)", "Resize<mode=\"linear\">(a, , two)"), values, inputs=inputs,
                         outputs=("y", "y2", "y3"))  # fmt: skip
    wires = wiring(find_sites(model, Path())[0].whole, TORCH)
    assert verdicts(wires, "d") == ["Triton joins the inputs in a kernel"] * 2
    assert wires.absorbed("u") and not wires.absorbed("v")  # nearest, linear
    assert not wires.absorbed("x") and not wires.absorbed("b")  # two readers, a network's input
    assert not wiring(wires.graph, TRT).absorbed("u")


@pytest.mark.parametrize(
    ("more", "planes"),
    [
        ("p = MaxPool<kernel_shape=[2,2]>(u)", True),  # stored for the pooling
        ("p = Conv<pads=[1,1,1,1]>(u, w1)", False),  # computed where the Concat is, or as that convolution wants it
        ("p = MaxPool<kernel_shape=[2,2]>(u) q = Conv<pads=[1,1,1,1]>(u, w1) y3 = Relu(q)", False),
        ("p = Neg(u)", False),
        ("p = MaxPool<kernel_shape=[2,2]>(b)", False),  # an input of the network lies as it came
    ],
)
def test_sources_of_a_concat_are_written_as_planes_where_a_pooling_has_one_stored(more: str, planes: bool) -> None:
    body = f"k = Conv<pads=[1,1,1,1]>(a, w1) u = Relu(k) {more} e = Resize(b, , two) d = Concat<axis=1>(u, e) "
    body += "c = Concat<axis=1>(u, a) y = Relu(d) y2 = Relu(p) z = Relu(c)"
    values = graphs.weights(w1=(8, 8, 3, 3)) | {"two": np.array([1, 1, 2, 2], np.float32)}
    outputs = ("y", "y2", "z", *(["y3"] if "y3" in more else []))
    model = graphs.graph(body, values, inputs={"a": "1,8,6,6", "b": "1,8,3,3"}, outputs=outputs)
    graph = find_sites(model, Path())[0].whole
    wires, plain = wiring(graph, TORCH), wiring(graph, TRT)
    first, second, enlarged = (graph.producer(t) for t in "dce")
    assert first is not None and second is not None and enlarged is not None
    assert wires.in_planes(first) == planes and not wires.in_planes(second) and not plain.in_planes(first)
    assert wires.absorbed("e") != planes and not wires.reads_planes(enlarged)


def test_what_several_concats_alone_read_is_computed_in_each() -> None:
    body = "x = Relu(a) d = Concat<axis=1>(x, b) e = Concat<axis=1>(b, x) v = Relu(b) c = Concat<axis=1>(v, a) "
    body += "n = Neg(v) y = Relu(d) y2 = Relu(e) y3 = Relu(c) y4 = Relu(n)"
    model = graphs.graph(body, {}, inputs={"a": "1,8,6,6", "b": "1,8,6,6"}, outputs=("y", "y2", "y3", "y4"))
    wires = wiring(find_sites(model, Path())[0].whole, TORCH)
    assert wires.absorbed("x") and not wires.absorbed("v")  # Neg reads v


def chain() -> tuple[Wiring, list[Match]]:
    """Two convolutions one after the other, then a Concat that a pooling reads; their matches."""
    body = conv("a", "h", "w1", "Relu") + conv("h", "k", "w1", "Relu")
    body += "c = Concat<axis=1>(k, b) p = MaxPool<kernel_shape=[2,2]>(c) y = Relu(p)"
    model = graphs.graph(body, graphs.weights(w1=(8, 8, 1, 1)), inputs={"a": "1,8,6,6", "b": "1,8,6,6"})
    work, sites = find_sites(model, Path())
    return wiring(work.whole, TORCH), [s.match for s in sites if s.match]


def test_only_a_convolution_behind_another_fused_one_starts_early() -> None:
    wires, (first, second) = chain()
    assert not wires.starts_late("a") and not wires.starts_late("h")
    both = wires.fused(first).fused(second)
    assert both.starts_late("a") and not both.starts_late("h")
    assert both.unfused(first).starts_late("h") and not both.unfused(first).starts_late("a")


def test_torch_compile_fixes_pixels_as_long_as_a_convolution_of_its_own_is_behind() -> None:
    """torch/_inductor/graph.py, find_nodes_prefer_channels_last."""
    body = conv("a", "h", "w1", "Relu") + 'u = Resize<mode="linear">(h, , two) ' + conv("u", "k", "w1", "Relu")
    body += 'y = Resize<mode="linear">(k, , two)'
    values = graphs.weights(w1=(8, 8, 1, 1)) | {"two": np.array([1, 1, 2, 2], np.float32)}
    model = graphs.graph(body, values, inputs={"a": "1,8,6,6"})
    work, sites = find_sites(model, Path())
    wires, (first, second) = wiring(work.whole, TORCH), [s.match for s in sites if s.match]
    before, after = (work.whole.producer(t) for t in "uy")
    assert before is not None and after is not None
    assert wires.in_pixels(before) and not wires.in_pixels(after)
    assert wires.fused(first).in_pixels(before), "the one behind it is left"
    assert not wires.fused(second).in_pixels(before), "the one that is left is in front of it"
    assert wires.fused(second).unfused(second).in_pixels(before)
    assert not wiring(work.whole, TRT).in_pixels(before)


def test_a_pooling_joins_what_fused_nodes_made() -> None:
    wires, (first, second) = chain()
    concat = wires.graph.producer("c")
    assert concat is not None and not wires.fused(first).joins_for_pools(concat)
    assert wires.fused(second).joins_for_pools(concat)


@pytest.mark.parametrize(("channels", "engine", "widened"), [(6, TORCH, True), (8, TORCH, False), (6, TRT, False)])
def test_pytorch_copies_images_of_odd_pixels_for_fused_nodes(channels: int, engine: Engine, widened: bool) -> None:
    body = "c = Concat<axis=1>(a, b) v = Conv(c, w1) y = Relu(v) z = Relu(a)"
    inputs = {"a": f"1,{channels},7,7", "b": f"1,{channels},7,7"}
    model = graphs.graph(body, graphs.weights(w1=(8, 2 * channels, 1, 1)), inputs=inputs, outputs=("y", "z"))
    cleaned, (site, *_) = find_sites(model, Path())
    assert site.match is not None
    plain = wiring(cleaned.whole, engine)
    assert plain.fused(site.match).is_widened("a") == widened and not plain.is_widened("a")


RTX = Engine("rtx")


@pytest.mark.parametrize(
    ("after", "in_nchw"),
    [("t = Relu(d)", False), ("t = Add(d, s)", False), ("t = Sigmoid(d)", False), ("t = LeakyRelu(d)", True),
     ("t = BatchNormalization(d, g, g, g, g)", True), ("t = Mul(d, h)", True)],
)  # fmt: skip
def test_rtx_copies_a_deconvolution_for_fused_nodes_where_a_kernel_follows(after: str, in_nchw: bool) -> None:
    body = (
        "s = Conv<pads=[1,1,1,1]>(a, w1) d = ConvTranspose<strides=[2,2]>(b, w2) "
        + f"{after} c = Concat<axis=1>(s, t) v = Conv<pads=[1,1,1,1]>(c, w3) y = Relu(v)"
    )
    values = graphs.weights(w1=(8, 8, 3, 3), w2=(8, 8, 2, 2), w3=(8, 16, 3, 3), g=(8,), h=(1, 8, 1, 1))
    model = graphs.graph(body, values, inputs={"a": "1,8,8,8", "b": "1,8,4,4"})
    cleaned, sites = find_sites(model, Path())
    (match,) = [s.match for s in sites if s.match and "y" in s.match.outputs]
    assert wiring(cleaned.whole, RTX).fused(match).is_widened("t") == in_nchw


@pytest.mark.parametrize("between", ["", "t = Pad(s, nothing) ", "t = Identity(s) ", "t = Slice(s, nothing, all) "])
@pytest.mark.parametrize(("reader", "pooled"), [("MaxPool<kernel_shape=[2,2]>", True), ("Relu", False)])
def test_rtx_copies_the_skip_of_a_unet_and_nothing_else_of_its_concat(reader: str, pooled: bool, between: str) -> None:
    body = (
        f"s = Conv<pads=[1,1,1,1]>(a, w1) z = {reader}(s) {between}u = Conv<pads=[1,1,1,1]>(b, w1) "
        + f"c = Concat<axis=1>({'t' if between else 's'}, u) y = Conv<pads=[1,1,1,1]>(c, w3)"
    )
    bounds = {"nothing": np.zeros(8 if "Pad" in between else 4, np.int64), "all": np.full(4, 1 << 40)}
    model = graphs.graph(body, graphs.weights(w1=(8, 8, 3, 3), w3=(8, 16, 3, 3)) | bounds,
                         inputs={"a": "1,8,8,8", "b": "1,8,8,8"}, outputs=("y", "z"))  # fmt: skip
    skip, other = verdicts(wiring(find_sites(model, Path())[0].whole, RTX), "c")
    assert ("pooling" in skip) == pooled and other == ""


def test_pytorch_merges_no_convolutions() -> None:
    wires = inception(TORCH)
    first = wires.graph.producer("b1c")
    assert first is not None and wires.siblings(first) == [first]
    plain = inception()
    own = plain.graph.producer("b1c")
    assert own is not None and len(plain.siblings(own)) == 3


def test_activations_inside_of_a_convolution_by_version() -> None:
    ten, eleven, orin = (
        engine_of("tensorrt", "10.3", 90),
        engine_of("tensorrt", "11.2"),
        engine_of("tensorrt", "10", 87),
    )
    assert [e.inside("Silu") for e in (ten, eleven, orin, TORCH)] == [False, True, True, False]
    assert all(e.inside("Relu") and e.inside("") for e in (ten, eleven, orin))
    assert not any(e.inside("HardSwish") or e.inside("LeakyRelu") for e in (ten, eleven, orin, TORCH))
    assert not TORCH.inside("")  # cuDNN's bare convolution, bias and activation in Triton


def test_the_newest_version_is_assumed_and_said() -> None:
    assert engine_of("tensorrt").assumed and engine_of("tensorrt").title == f"TensorRT {NEWEST[0]}.{NEWEST[1]}"
    assert not engine_of("tensorrt", "10.3.1").assumed and engine_of("tensorrt", "10.3.1").title == "TensorRT 10.3"


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("tensorflow", "", "no engine 'tensorflow'; choose one of tensorrt, rtx, torch"),
        ("torch", "10.3", "does not go with --engine torch"),
        ("tensorrt", "8.6", "'8.6' is no TensorRT that takes these plugins"),
        ("tensorrt", "new", "'new' is no TensorRT"),
    ],
)
def test_engines_that_do_not_exist(name: str, version: str, words: str) -> None:
    with pytest.raises(CutefuseError, match=words):
        engine_of(name, version)
