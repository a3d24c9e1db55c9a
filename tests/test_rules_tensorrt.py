"""What TensorRT and Myelin do by themselves, against the verdicts of public TensorRT build logs.

YOLOv8: NVIDIA/TensorRT 3254. GoogLeNet: dusty-nv/jetson-inference 1630. Plugins: NVIDIA/TensorRT 4345.
"""

from __future__ import annotations

from pathlib import Path

import graphs
import numpy as np
import onnx
import pytest

from cutefuse.errors import CutefuseError
from cutefuse.match.find import find_sites
from cutefuse.select.compiled import Kernel, Record
from cutefuse.select.engines import NEWEST, Engine, engine_of
from cutefuse.select.gain import Model
from cutefuse.select.rules_tensorrt import Myelin
from cutefuse.select.times import device_of
from cutefuse.select.wiring import Wiring, wiring

TRT = engine_of("tensorrt", "10.3")
TORCH = engine_of("torch")


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
    return wires.engine.copies(wires, node)


def is_widened(wires: Wiring, tensor: str) -> bool:
    return wires.engine.widened_us(wires, tensor) > 0


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


RTX = engine_of("rtx")


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
    assert is_widened(wiring(cleaned.whole, RTX).fused(match), "t") == in_nchw


# What an enlargement between pixels reads -> whether Myelin makes it in NCHW, as test_oracle_rules sees it do.
CONV, HALF = "Conv<pads=[1,1,1,1]>", "Conv<pads=[1,1,1,1], strides=[2,2]>"
ENLARGED = [
    (f"d = {HALF}(a, w1)", False),
    (f"d0 = {HALF}(a, w1) d = Relu(d0)", False),
    (f"e = {HALF}(a, w1) f = Relu(e) g = {CONV}(f, w1) h = Add(g, f) d = Relu(h)", False),
    (f"e = {HALF}(a, w1) f = Sigmoid(e) d = Mul(e, f)", False),
    (f"e = {HALF}(a, w1) f = {HALF}(a, w1) g = {HALF}(a, w1) h = Add(e, f) d = Add(h, g)", False),
    ("d = Identity(b)", True),  # a network input
]
NETWORK = (
    f's = {CONV}(a, w1) {{}} t = Resize<mode="linear">(d, , two) c = Concat<axis=1>(s, t) v = {CONV}(c, w3) y = Relu(v)'
)


def decoder(before: str, size: int = 64) -> onnx.ModelProto:
    values = graphs.weights(dtype="float16", w1=(32, 32, 3, 3), w3=(32, 64, 3, 3)) | {
        "two": np.array([1, 1, 2, 2], np.float32)
    }
    inputs = {"a": f"1,32,{size},{size}", "b": f"1,32,{size // 2},{size // 2}"}
    used = {name: dims for name, dims in inputs.items() if name == "a" or f"({name})" in before}
    return graphs.graph(NETWORK.format(before), values, inputs=used, dtype="float16")


def enlarged(before: str, *fused: str, outputs: tuple[str, ...] = ("y",)) -> Wiring:
    model = decoder(before)
    model.graph.output.extend(onnx.helper.make_tensor_value_info(o, 10, None) for o in outputs if o != "y")
    cleaned, sites = find_sites(model, Path())
    matches = [s.match for s in sites if s.match and {"y", *fused} & set(s.match.outputs)]
    assert len(matches) == 1 + len(fused)
    return wiring(cleaned.whole, RTX).fused(*matches)


@pytest.mark.parametrize(("before", "in_nchw"), ENLARGED)
def test_rtx_enlarges_in_nhwc_what_convolutions_make(before: str, in_nchw: bool) -> None:
    assert is_widened(enlarged(before), "t") == in_nchw


def test_rtx_enlarges_in_nchw_what_is_an_output_or_enlarged_itself() -> None:
    plain = f"d0 = {HALF}(a, w1) d = Relu(d0)"
    assert is_widened(enlarged(plain, outputs=("y", "d")), "t")
    twice = f'e = {HALF}(a, w1) f = {HALF}(e, w1) d = Resize<mode="linear">(f, , two)'
    assert is_widened(enlarged(twice), "t")


def test_an_enlargement_of_what_a_fused_node_makes_is_copied_before_it() -> None:
    plain, fused = enlarged(f"d0 = {HALF}(a, w1) d = Relu(d0)"), enlarged(f"d0 = {HALF}(a, w1) d = Relu(d0)", "d")
    assert not is_widened(fused, "t")
    resize = fused.graph.producer("t")
    copy_us = fused.device.pass_us(2 * fused.size_of("d"))
    assert resize and fused.node_us(resize) == pytest.approx(plain.node_us(resize) + copy_us)


@pytest.mark.parametrize(("body", "in_nchw"), [
    ("t = Mul(b, b2)", True), ("t = Mul(b, s)", False), ("t = Mul(s, b)", False),
    ("u = Sub(one, b) t = Mul(u, s)", False),
    ("u = Sub(one, b) t = Relu(u)", True), ("t = Mul(b, h)", True), ("t = Mul(b, p)", True),
])  # fmt: skip
def test_an_image_lies_in_nchw_where_all_that_it_is_computed_of_does(body: str, in_nchw: bool) -> None:
    """`p` has one pixel, which says nothing of the image that it scales."""
    text = f"s = {CONV}(a, w1) q = GlobalAveragePool(s) p = Conv(q, w2) {body} "
    text += f"c = Concat<axis=1>(s, t) v = {CONV}(c, w3) y = Relu(v)"
    values = graphs.weights(w1=(8, 8, 3, 3), w2=(8, 8, 1, 1), w3=(8, 16, 3, 3), h=(1, 8, 1, 1), one=(1,))
    inputs = {n: "1,8,8,8" for n in ("a", "b", "b2") if n == "a" or f"{n}," in body or f"{n})" in body}
    cleaned, sites = find_sites(graphs.graph(text, values, inputs=inputs), Path())
    (match,) = [s.match for s in sites if s.match and "y" in s.match.outputs]
    assert is_widened(wiring(cleaned.whole, RTX).fused(match), "t") == in_nchw


@pytest.mark.parametrize(("after", "joined"), [
    ("y = Add(m, n)", True), ("y = Add(n, m)", True), ("z = Add(m, n) y = Neg(n)", False),
    ("z = Neg(m) y = Neg(n)", False),
])  # fmt: skip
def test_rtx_computes_a_gate_in_the_sum_that_alone_reads_it(after: str, joined: bool) -> None:
    text = f"e = {CONV}(a, w1) p = Relu(e) f = {CONV}(a, w1) q = Relu(f) m = Mul(p, a) n = Mul(q, a) {after}"
    outputs = tuple(o for o in ("z", "y") if f"{o} =" in after)
    model = graphs.graph(text, graphs.weights(w1=(8, 8, 3, 3)), inputs={"a": "1,8,8,8"}, outputs=outputs)
    cleaned, sites = find_sites(model, Path())
    wires = wiring(cleaned.whole, RTX).fused(*(s.match for s in sites if s.match))
    first, second = (wires.graph.producer(t) for t in ("m", "n"))
    assert first and second
    assert (wires.node_us(second) < wires.node_us(first)) == joined
    assert wires.node_us(first) > wires.device.pass_us(0)


@pytest.mark.parametrize("between", ["", "t = Pad(s, nothing) ", "t = Identity(s) ", "t = Slice(s, nothing, all) "])
@pytest.mark.parametrize(("reader", "word"), [
    ("MaxPool<kernel_shape=[2,2], strides=[2,2]>(s)", "pooling"), ("GlobalAveragePool(s)", ""), ("Relu(s)", ""),
    ("MaxPool<kernel_shape=[5,5], pads=[2,2,2,2]>(s)", "pooling"),  # of YOLO's SPPF
    ("Conv<group=8>(s, g1)", "depthwise"), ("Conv<group=4>(s, g2)", ""), ("Conv(s, w1)", ""),
])  # fmt: skip
def test_rtx_copies_the_skip_of_a_unet_and_nothing_else_of_its_concat(reader: str, word: str, between: str) -> None:
    body = (
        f"s = Conv<pads=[1,1,1,1]>(a, w1) z = {reader} {between}u = Conv<pads=[1,1,1,1]>(b, w1) "
        + f"c = Concat<axis=1>({'t' if between else 's'}, u) y = Conv<pads=[1,1,1,1]>(c, w3)"
    )
    bounds = {"nothing": np.zeros(8 if "Pad" in between else 4, np.int64), "all": np.full(4, 1 << 40)}
    values = graphs.weights(w1=(8, 8, 3, 3), w3=(8, 16, 3, 3), g1=(8, 1, 3, 3), g2=(8, 2, 3, 3)) | bounds
    inputs = {"a": "1,8,8,8", "b": "1,8,8,8"}
    for dtype in ("float16", "float32"):
        typed = {n: v if n in bounds else v.astype(dtype) for n, v in values.items()}
        model = graphs.graph(body, typed, inputs=inputs, outputs=("y", "z"), dtype=dtype)
        skip, other = verdicts(wiring(find_sites(model, Path())[0].whole, RTX), "c")
        copied = bool(word) and (word, dtype) != ("depthwise", "float32")
        assert word in skip or not copied
        assert bool(skip) == copied and other == ""


@pytest.mark.parametrize("pool", ["MaxPool<kernel_shape=[2,2], strides=[2,2]>", "AveragePool<kernel_shape=[2,2]>"])
def test_rtx_copies_what_a_pooling_makes_and_writes_convolutions_in_place(pool: str) -> None:
    stride = 2 if "Max" in pool else 1
    body = f"p = {pool}(a) u = Conv<strides=[{stride},{stride}]>(a, w1) c = Concat<axis=1>(p, u) y = Conv(c, w3)"
    values, inputs = graphs.weights(w1=(8, 8, 2, 2), w3=(8, 16, 3, 3)), {"a": "1,8,8,8"}
    assert verdicts(wired(body, values, inputs, RTX), "c") == ["a pooling's output", ""]
    assert verdicts(wired(body, values, inputs, TRT), "c") == ["", ""]


def test_rtx_joins_tensors_of_one_dimension() -> None:
    body = "s = Neg(a) t = Neg(b) c = Concat<axis=0>(s, t) y = Relu(c)"
    model = graphs.graph(body, {}, inputs={"a": "8", "b": "8"}, rank=1)
    assert verdicts(wiring(find_sites(model, Path())[0].whole, RTX), "c") == ["", ""]


def test_rtx_writes_in_place_what_a_fused_depthwise_convolution_reads_too() -> None:
    body = (
        "s = Conv(a, w1) r = Relu(s) d = Conv<pads=[1,1,1,1], group=8>(r, g1) e = Relu(d) "
        + "c = Concat<axis=1>(r, b) y = Conv(c, w3) z = Neg(e)"
    )
    values = graphs.weights(dtype="float16", w1=(8, 8, 3, 3), w3=(8, 16, 3, 3), g1=(8, 1, 3, 3))
    model = graphs.graph(body, values, inputs={"a": "1,8,10,10", "b": "1,8,8,8"}, outputs=("y", "z"), dtype="float16")
    cleaned, sites = find_sites(model, Path())
    (match,) = [s.match for s in sites if s.match and "e" in s.match.outputs]
    plain, engine = wiring(cleaned.whole, RTX), RTX
    assert isinstance(engine, Myelin)
    assert "depthwise" in engine._pooled(plain, "r") and engine._pooled(plain.fused(match), "r") == ""


@pytest.mark.parametrize(("after", "fused", "in_nchw"), [
    ("t = DepthToSpace<blocksize=2>(d)", (), True), ("t0 = DepthToSpace<blocksize=2>(d) t = Relu(t0)", (), True),
    ("t0 = DepthToSpace<blocksize=2>(d) t = PRelu(t0, h)", (), True),
    ("t = DepthToSpace<blocksize=2>(d)", ("t",), False),
    ("t0 = DepthToSpace<blocksize=2>(d) t = PRelu(t0, h)", ("t0",), False),
    ("t0 = DepthToSpace<blocksize=2>(d) t = Conv(t0, w4)", (), False),
])  # fmt: skip
def test_rtx_copies_shuffled_pixels_for_fused_nodes(after: str, fused: tuple[str, ...], in_nchw: bool) -> None:
    body = f"s = Conv(a, w4) d = Conv(b, w2) {after} c = Concat<axis=1>(s, t) v = Conv(c, w3) y = Relu(v)"
    values = graphs.weights(dtype="float16", w2=(32, 8, 1, 1), w3=(8, 16, 3, 3), w4=(8, 8, 1, 1), h=(8, 1, 1))
    model = graphs.graph(body, values, inputs={"a": "1,8,8,8", "b": "1,8,4,4"}, dtype="float16")
    cleaned, sites = find_sites(model, Path())
    matches = [s.match for s in sites if s.match and {"y", *fused} & set(s.match.outputs)]
    assert len(matches) == 1 + len(fused)
    assert is_widened(wiring(cleaned.whole, RTX).fused(*matches), "t") == in_nchw


@pytest.mark.parametrize("fused", [(), ("t",), ("u",), ("t", "u")])
def test_rtx_reads_a_residual_in_the_convolution_as_ours_does(fused: tuple[str, ...]) -> None:
    body = "s = Conv(a, w1) t = Relu(s) v = Conv(t, w1) u = Relu(v) y = Add(u, t)"
    model = graphs.graph(body, graphs.weights(w1=(8, 8, 1, 1)), inputs={"a": "1,8,99,99"})
    cleaned, sites = find_sites(model, Path())
    matches = [m for s in sites if s.match for m in (s.match, s.match.otherwise) if m and set(m.outputs) <= set(fused)]
    wires = wiring(cleaned.whole, RTX).fused(*matches)
    add, y = wires.graph.producer("y"), wires.size_of("y")
    assert add and len(matches) == len(fused)
    assert wires.node_us(add) == (wires.device.pass_us(3 * y) if len(fused) == 2 else 0)


EVERY_OTHER = (
    "p = Slice(a, r0, r9, r, two) q = Slice(a, r1, r9, r, two) e = Slice(p, r0, r9, k, two) "
    "f = Slice(p, r1, r9, k, two) g = Slice(q, r0, r9, k, two) h = Slice(q, r1, r9, k, two) "
    "c = Concat<axis=1>(e, g, f, h) "
)


@pytest.mark.parametrize(("dtype", "fused"), [("float16", ["CuteImageConcatConv1Relu"]), ("float32", [])])
@pytest.mark.parametrize("sorts", [EVERY_OTHER, "c = SpaceToDepth<blocksize=2>(a) "])
def test_rules_of_rtx_sort_pixels_where_no_copy_takes_the_place(
    dtype: str, fused: list[str], sorts: str, tmp_path: Path
) -> None:
    """In float32 no tile reads an image as it is given: it would be turned in a kernel of its own."""
    values = graphs.weights(dtype=dtype, w1=(32, 12, 3, 3), w2=(32, 32, 3, 3)) | {
        "r0": np.array([0]), "r1": np.array([1]), "r9": np.array([1 << 40]), "r": np.array([2]), "k": np.array([3]),
        "two": np.array([2]),
    }  # fmt: skip
    body = f"{sorts}v = Conv<pads=[1,1,1,1]>(c, w1) t = Relu(v) y = Conv<pads=[1,1,1,1]>(t, w2)"
    used = {n: v for n, v in values.items() if f", {n}" in body}
    model = graphs.graph(body, used, inputs={"a": "1,3,256,256"}, dtype=dtype)
    _, patched = graphs.run_patch(model, tmp_path, engine="rtx", sm=89, all_sites=False, verify=False)
    assert graphs.fused_types(patched) == fused


def test_what_a_kernel_takes_in_by_the_way_has_no_share_of_it() -> None:
    """A convolution would compute the ReLU as well, and nothing else the Neg of an input."""
    kernels = (Kernel(("Relu_1", "Resize_2", "Concat_3"), 300, True), Kernel(("Relu_1", "Neg_5"), 100, False))
    body = (
        "x = Conv(b, w1) d = Relu(x) t = Resize(d, , two) c = Concat<axis=1>(a, t) v = Conv(c, w3) n = Neg(a) "
        "y = Sub(v, n)"
    )
    values = graphs.weights(w1=(8, 8, 1, 1), w3=(8, 16, 1, 1)) | {"two": np.array([1, 1, 2, 2], np.float32)}
    cleaned = find_sites(graphs.graph(body, values, inputs={"a": "1,8,8,8", "b": "1,8,4,4"}), Path())[0]
    model = Model(cleaned.whole, RTX, device_of(89), Record(kernels, frozenset()))
    assert model.shares("Resize_2") == {kernels[0]: 0.5} and model.shares("Concat_3") == {kernels[0]: 0.5}
    assert model.shares("Relu_1") == {kernels[0]: 0, kernels[1]: 0} and model.shares("Neg_5") == {kernels[1]: 1}
    assert model.shares("Conv_0") == {} and Model(cleaned.whole, RTX, device_of(89)).shares("Relu_1") == {}


SHUFFLE, LARGE = 't0 = DepthToSpace<blocksize=2,mode="CRD">(d) ', {"a": "1,32,160,160"}


@pytest.mark.parametrize(("body", "op_types"), [
    (f"d = Conv(a, w2) {SHUFFLE}t = Relu(t0) v = Conv(t, w1) y = Neg(v)", ["CuteSpread2ConcatConv1Relu"]),
    (f"d = Conv(a, w2) {SHUFFLE}v = Conv(t0, w1) y = Neg(v)", ["CuteSpread2ConcatConv1"]),
    # A kernel of its own takes the place of the shuffle's, which had computed it.
    (f"d = Conv(a, w2) {SHUFFLE}t = PRelu(t0, h) v = Conv(t, w1) y = Neg(v)", []),
    # But the shuffle's kernel would give what the next fused node has to turn.
    (f"d = Conv(a, w2) {SHUFFLE}t = PRelu(t0, h) e = Conv(t, w2) {SHUFFLE.replace('t0', 'f').replace('(d)', '(e)')}"
     "v = Conv(f, w1) y = Neg(v)", ["CuteSpread2ConcatConv1"] * 2),
    ("d = ConvTranspose<strides=[2,2]>(a, w5) t = Relu(d) v = Conv(t, w1) y = Neg(v)", []),
])  # fmt: skip
def test_rules_of_rtx_fuse_shuffles_alone(body: str, op_types: list[str], tmp_path: Path) -> None:
    values = graphs.weights(dtype="float16", w1=(32, 32, 1, 1), w2=(128, 32, 1, 1), w5=(32, 32, 2, 2), h=(32, 1, 1))
    used = {n: v for n, v in values.items() if f", {n})" in body}
    model = graphs.graph(body, used, inputs=LARGE, dtype="float16")
    result, patched = graphs.run_patch(model, tmp_path, engine="rtx", sm=89, all_sites=False, verify=False)
    assert (graphs.fused_types(patched) if patched else []) == op_types
    assert op_types or {s["status"] for s in result.report["sites"]} == {"left out"}


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
