"""What torch.compile does by itself, in the predicted gains: norms, passes after a convolution, and our own finish."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph, run_patch, weights
from problems import Problem
from test_rules_tensorrt import TRT, conv, inception, is_widened, verdicts
from test_sm90 import SAME, call

import models
from cutefuse import kernels
from cutefuse.graph.clean import clean
from cutefuse.graph.read import Graph
from cutefuse.match.answer import Match
from cutefuse.match.find import find_sites
from cutefuse.select.engines import engine_of
from cutefuse.select.gain import Model
from cutefuse.select.rules_torch import TorchCompile
from cutefuse.select.times import device_of
from cutefuse.select.wiring import Engine, Wiring, wiring

TORCH = TorchCompile("torch")
KEPT = {"engine": "torch", "sm": 90, "gpu": "H200", "dry_run": True}


def halves(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: value.astype("float16") for name, value in weights(**shapes).items()}


def gains(model: onnx.ModelProto, folder: Path, **options: object) -> tuple[list[str], float]:
    """The states of the sites, and what those that are fused gain together."""
    result, _ = run_patch(model, folder, **{**KEPT, "all_sites": False, **options})
    return [site["status"] for site in result.report["sites"]], result.report["summary"]["gain_us"]


@pytest.mark.parametrize(("rows", "status"), [(197, "left out"), (1576, "left out"), (65536, "fused")])
def test_norms_of_few_bytes_are_left_to_triton(rows: int, status: str, tmp_path: Path) -> None:
    """1576 rows of 768 took 3.9 us of ours and 2.4 of Triton's, inside a transformer."""
    model = graph("y = LayerNormalization<axis=-1>(b, g, t)", halves(g=(768,), t=(768,)), dtype="float16",
                  inputs={"b": f"1,1,{rows},768"})  # fmt: skip
    assert gains(model, tmp_path)[0] == [status]


def test_a_source_without_a_bias_has_no_pass_that_its_concat_could_save(tmp_path: Path) -> None:
    body = "p = Conv<group=8>(b, u{}) q = Neg(b) c = Concat<axis=1>(p, q) x = Conv(c, w, k) y = Relu(x)"
    values = halves(u=(16, 2, 1, 1), v=(16,), w=(64, 32, 1, 1), k=(64,))
    inputs = {"b": "1,16,160,160"}
    read = {name: v for name, v in values.items() if name != "v"}
    bare = gains(graph(body.format(""), read, dtype="float16", inputs=inputs), tmp_path, all_sites=True)
    (tmp_path / "biased").mkdir()
    biased = gains(
        graph(body.format(", v"), values, dtype="float16", inputs=inputs), tmp_path / "biased", all_sites=True
    )
    assert bare[0] == biased[0] == ["fused"] and bare[1] > biased[1] + 1, "the pass of 1.6 MB"


@pytest.mark.parametrize(
    ("pixels", "heads", "status"),
    [
        (64, 1, "left out"),  # 2 MB between pixels, which save less than a head costs
        (256, 1, "fused"),
        (256, 3, "left out"),  # 34 MB save more than one head costs, and less than three of them
        (384, 3, "fused"),
    ],
)
def test_convolutions_behind_an_enlargement_are_taken_together_or_not(
    pixels: int, heads: int, status: str, tmp_path: Path
) -> None:
    """HRNet's 1x1 head on eight images is said to take 16 us longer with ours (it takes 5). Without a convolution of
    cuDNN behind it, an enlargement between pixels is faster."""
    body = 'u = Resize<mode="linear">(b, , two) z = Relu(u) '
    body += " ".join(f"h{i} = Conv(a{i}, w, k) y{i} = Relu(h{i})" for i in range(heads))
    values = halves(w=(19, 720, 1, 1), k=(19,)) | {"two": np.array([1, 1, 2, 2], np.float32)}
    inputs = {"b": f"8,32,{pixels // 2},{pixels // 2}"} | {f"a{i}": "8,720,128,256" for i in range(heads)}
    outputs = ("z", *(f"y{i}" for i in range(heads)))
    model = graph(body, values, dtype="float16", inputs=inputs, outputs=outputs)
    states, gain_us = gains(model, tmp_path)
    assert states == [status] * heads and (gain_us > 0) == (status == "fused")


def test_a_network_has_one_predicted_time_whatever_is_fused(tmp_path: Path) -> None:
    """Recorded for PyTorch; TensorRT's is told by the same times, its Concats and activations by its own rules."""
    model = models.build("hrnet_head", "float16", batch=1)
    kept = {**KEPT, "all_sites": False}
    some, none = (run_patch(model, tmp_path, **kept, min_gain_us=n)[0].report["summary"] for n in (None, 1e6))
    assert (some["fused"], none["fused"]) == (2, 0) and some["plain_us"] == pytest.approx(none["plain_us"])
    assert some["plain_us"] == pytest.approx(245, rel=0.2), "recorded"
    other = run_patch(model, tmp_path, **{**kept, "engine": "tensorrt"})[0].report["summary"]
    assert 0 < other["gain_us"] < other["plain_us"] < 1.2 * some["plain_us"]


@pytest.mark.parametrize("engine", ["torch", "tensorrt", "rtx"])
def test_the_gate_of_squeeze_and_excitation_is_a_kernel_that_computes_its_sigmoid(engine: str, tmp_path: Path) -> None:
    """TensorRT for RTX keeps it beside a fused convolution, as `__myl_MulTran`; it was `__myl_SigmMul`."""
    values, inputs = halves(w=(32, 32, 1, 1), k=(32,)), {"b": "1,32,400,400"}
    body = "m = GlobalAveragePool(b) c = Conv(m, w, k) "
    summaries, kernels_us = [], []
    for name, more in {"alone": "y = Sigmoid(c)", "gate": "s = Sigmoid(c) y = Mul(b, s)"}.items():
        (tmp_path / name).mkdir()
        model = graph(body + more, values, dtype="float16", inputs=inputs)
        report = run_patch(model, tmp_path / name, **KEPT | {"engine": engine, "sm": 89, "gpu": "H200"})[0].report
        (site,) = report["sites"]
        summaries.append(report["summary"])
        kernels_us.append(site["gain_parts"]["engine_kernels"])
        assert abs(site["gain_parts"].get("neighbours", 0.0)) < 0.1
    alone, gate = summaries
    assert kernels_us[0] - kernels_us[1] == pytest.approx(0.0 if engine == "rtx" else 1.3, abs=0.1)
    assert 4 < gate["plain_us"] - alone["plain_us"] < 6, "20 MB are read and written"


GELUS = {  # behind a convolution one pass, whatever the exporter writes
    "Gelu": "y = Gelu(c)",
    "erf": "d = Div(c, root) e = Erf(d) f = Add(e, one) g = Mul(c, f) y = Mul(g, half)",
}


@pytest.mark.parametrize("engine", ["torch", "rtx", "tensorrt"])
@pytest.mark.parametrize("behind", ["z = MaxPool<kernel_shape=[2,2]>(y)", "z = Concat<axis=1>(y, b)"])
def test_a_gelu_in_steps_takes_as_long_as_its_operator(engine: str, behind: str, tmp_path: Path) -> None:
    values = halves(w=(64, 32, 1, 1), k=(64,)) | {
        name: np.float16(v) for name, v in {"root": 2**0.5, "one": 1, "half": 0.5}.items()
    }
    found = []
    for name, gelu in GELUS.items():
        (tmp_path / name).mkdir()
        used = values if name == "erf" else {n: values[n] for n in "wk"}
        model = graph(f"c = Conv(b, w, k) {gelu} {behind}", used, opset=20, dtype="float16", outputs=("z",),
                      inputs={"b": "1,32,400,400"})  # fmt: skip
        result, _ = run_patch(model, tmp_path / name, **KEPT | {"engine": engine, "sm": 89, "gpu": ""})
        found.append((result.report["summary"]["gain_us"], result.report["summary"]["plain_us"]))
        assert "stays" not in str(result.report["sites"])
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("mean", ["GlobalAveragePool(y)", "ReduceMean<axes=[2,3]>(y)"])
def test_the_mean_of_an_activation_is_taken_in_its_pass(mean: str, tmp_path: Path) -> None:
    """Fusing the activation saves no pass over it then."""
    values, inputs = halves(w=(64, 32, 1, 1), k=(64,)), {"b": "1,32,400,400"}
    body = "c = Conv(b, w, k) s = Sigmoid(c) y = Mul(c, s)"
    alone, both = (
        run_patch(graph(body + more, values, dtype="float16", outputs=outputs, inputs=inputs), tmp_path, **KEPT)[0]
        for more, outputs in (("", ("y",)), (f" m = {mean}", ("y", "m")))
    )
    assert both.report["summary"]["gain_us"] < alone.report["summary"]["gain_us"] - 4


@pytest.mark.parametrize(
    ("node", "least_us"),
    [
        ("GlobalAveragePool(d)", 14),  # reads 52 MB
        ("InstanceNormalization(d, s, t)", 50),  # reads 52 MB three times, writes them once
        ("Conv<group=16>(d, u)", 46),  # writes 52 MB
        ("Conv<group=16>(e, u)", None),  # unknown sizes
    ],
)
def test_a_network_takes_what_its_other_nodes_take(node: str, least_us: float | None, tmp_path: Path) -> None:
    values = halves(w=(64, 32, 1, 1), k=(64,), u=(32, 2, 3, 3), s=(32,), t=(32,))
    inputs = {"b": "1,32,40,40", "d": "1,32,904,904", "e": "1,32,H,40"}
    alone, both = (
        graph(f"c = Conv(b, w, k) x = Relu(c) {more}", values, dtype="float16", outputs=outputs, inputs=inputs)
        for more, outputs in (("", ("x",)), (f"y = {node}", ("x", "y")))
    )
    one, two = (run_patch(m, tmp_path, **KEPT)[0].report["summary"] for m in (alone, both))
    assert one["gain_us"] == two["gain_us"] > 0 and one["plain_us"] > one["gain_us"]
    if least_us is None:
        assert two["plain_us"] is None
    else:
        assert least_us < two["plain_us"] - one["plain_us"] < 1.2 * least_us


def test_a_cast_without_sizes_has_those_of_its_input() -> None:
    """As converters to float16 leave it; another operator without sizes is unknown."""
    model = graph("y = Cast<to=10>(b) z = Abs(b)", {}, dtype="float16", outputs=("y", "z"), inputs={"b": "1,32,40,40"})
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    read = Graph(model, Path())
    prices = Model(read, TORCH, device_of(90))
    assert prices.plain.dims("y") == (1, 32, 40, 40) and prices.plain.dims("z") == ()
    assert math.isnan(prices.plain.size_of("z"))


def test_a_pad_by_nothing_that_is_computed_is_as_large_as_what_it_pads() -> None:
    values = {"k": np.zeros((4, 2), np.int64), "flat": np.array([-1])}
    model = graph("q = Transpose(k) p = Reshape(q, flat) t = Pad(a, p) y = Relu(t)", values, inputs={"a": "1,8,4,4"})
    whole = clean(model, Path()).whole
    prices = Model(whole, engine_of("rtx"), device_of(89))
    assert prices.plain.size_of("t") == prices.plain.size_of("a") > 0


@pytest.mark.parametrize(("activation", "seen"), [("Silu", True), ("Sigmoid", True), ("Relu", False), ("Clip", False)])
def test_a_small_tile_shows_the_finish_of_exponentials_alone(activation: str, seen: bool) -> None:
    if reason := kernels.reject_device(90):
        pytest.skip(reason)
    plain = call(Problem(1, 40, 40, (128,), 128, **SAME))
    given = call(Problem(1, 40, 40, (128,), 128, **SAME, activation=activation))
    plain_us, us = (kernels.predicted_us(replace(c, config=154, _keep=[])) or 0 for c in (plain, given))
    assert 0.1 < us - plain_us < 0.5 if seen else us == plain_us


# ------------------------------------------------------------------------------------------------------ rules
def test_triton_joins_all_inputs_in_a_kernel_that_computes_what_it_alone_reads() -> None:
    body = (
        "u = Resize(a, , two) v = Relu(a) x = Relu(b) d = Concat<axis=1>(u, v) e = Concat<axis=1>(x, b) "
        "z = Neg(x) y = Relu(d) y2 = Relu(e) y3 = Relu(z)"
    )
    values = {"two": np.array([1, 1, 2, 2], np.float32)}
    inputs = {"a": "1,8,6,6", "b": "1,8,6,6"}
    model = graph(body.replace("Relu(a)", "Resize<mode=\"linear\">(a, , two)"), values, inputs=inputs,
                         outputs=("y", "y2", "y3"))  # fmt: skip
    wires = wiring(find_sites(model, Path())[0].whole, TORCH)
    assert verdicts(wires, "d") == ["all inputs are copied"] * 2
    assert TORCH.absorbed(wires, "u") and not TORCH.absorbed(wires, "v")  # nearest, linear
    assert not TORCH.absorbed(wires, "x") and not TORCH.absorbed(wires, "b")  # two readers, a network's input
    assert not TRT.absorbed(wiring(wires.graph, TRT), "u")


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
    values = weights(w1=(8, 8, 3, 3)) | {"two": np.array([1, 1, 2, 2], np.float32)}
    outputs = ("y", "y2", "z", *(["y3"] if "y3" in more else []))
    model = graph(body, values, inputs={"a": "1,8,6,6", "b": "1,8,3,3"}, outputs=outputs)
    whole = find_sites(model, Path())[0].whole
    wires = wiring(whole, TORCH)
    first, second, enlarged = (whole.producer(t) for t in "dce")
    assert first is not None and second is not None and enlarged is not None
    assert TORCH.in_planes(wires, first) == planes and not TORCH.in_planes(wires, second)
    assert TORCH.absorbed(wires, "e") != planes


def test_what_several_concats_alone_read_is_computed_in_each() -> None:
    body = "x = Relu(a) d = Concat<axis=1>(x, b) e = Concat<axis=1>(b, x) v = Relu(b) c = Concat<axis=1>(v, a) "
    body += "n = Neg(v) y = Relu(d) y2 = Relu(e) y3 = Relu(c) y4 = Relu(n)"
    model = graph(body, {}, inputs={"a": "1,8,6,6", "b": "1,8,6,6"}, outputs=("y", "y2", "y3", "y4"))
    wires = wiring(find_sites(model, Path())[0].whole, TORCH)
    assert TORCH.absorbed(wires, "x") and not TORCH.absorbed(wires, "v")  # Neg reads v


def chain(engine: Engine = TORCH, sm: int = 0) -> tuple[Wiring, list[Match]]:
    """Two convolutions one after the other, then a Concat that a pooling reads; their matches."""
    body = conv("a", "h", "w1", "Relu") + conv("h", "k", "w1", "Relu")
    body += "c = Concat<axis=1>(k, b) p = MaxPool<kernel_shape=[2,2]>(c) y = Relu(p)"
    model = graph(body, weights(w1=(8, 8, 1, 1)), inputs={"a": "1,8,6,6", "b": "1,8,6,6"})
    work, sites = find_sites(model, Path())
    return wiring(work.whole, engine, device_of(sm)), [s.match for s in sites if s.match]


def test_only_a_convolution_behind_another_fused_one_starts_early() -> None:
    wires, (first, second) = chain()
    assert not wires.late_us("a") and not wires.late_us("h")
    both = wires.fused(first).fused(second)
    assert both.late_us("a") and not both.late_us("h")
    assert both.unfused(first).late_us("h") and not both.unfused(first).late_us("a")


@pytest.mark.parametrize(("engine", "sm", "late"), [
    ("torch", 120, True), ("tensorrt", 90, True), ("torch", 89, False), ("rtx", 120, False), ("rtx", 89, False),
])  # fmt: skip
def test_a_late_start_counts_against_kernels_that_were_timed(engine: str, sm: int, late: bool) -> None:
    wires, (first, _) = chain(engine_of(engine), sm)
    assert (wires.fused(first).late_us("a") > 0) == late


def test_torch_compile_fixes_pixels_as_long_as_a_convolution_of_its_own_is_behind() -> None:
    """torch/_inductor/graph.py, find_nodes_prefer_channels_last."""
    body = conv("a", "h", "w1", "Relu") + 'u = Resize<mode="linear">(h, , two) ' + conv("u", "k", "w1", "Relu")
    body += 'y = Resize<mode="linear">(k, , two)'
    values = weights(w1=(8, 8, 1, 1)) | {"two": np.array([1, 1, 2, 2], np.float32)}
    model = graph(body, values, inputs={"a": "1,8,6,6"})
    work, sites = find_sites(model, Path())
    wires, (first, second) = wiring(work.whole, TORCH), [s.match for s in sites if s.match]
    before, after = (work.whole.producer(t) for t in "uy")
    assert before is not None and after is not None
    assert TORCH.in_pixels(wires, before) and not TORCH.in_pixels(wires, after)
    assert TORCH.in_pixels(wires.fused(first), before), "the one behind it is left"
    assert not TORCH.in_pixels(wires.fused(second), before), "the one that is left is in front of it"
    assert TORCH.in_pixels(wires.fused(second).unfused(second), before)
    assert not TRT.in_pixels(wiring(work.whole, TRT), before)


def test_a_pooling_joins_what_fused_nodes_made() -> None:
    wires, (first, second) = chain()
    concat = wires.graph.producer("c")
    assert concat is not None and not TORCH.joins_for_pools(wires.fused(first), concat)
    assert TORCH.joins_for_pools(wires.fused(second), concat)


@pytest.mark.parametrize(("channels", "engine", "widened"), [(6, TORCH, True), (8, TORCH, False), (6, TRT, False)])
def test_pytorch_copies_images_of_odd_pixels_for_fused_nodes(channels: int, engine: Engine, widened: bool) -> None:
    body = "c = Concat<axis=1>(a, b) v = Conv(c, w1) y = Relu(v) z = Relu(a)"
    inputs = {"a": f"1,{channels},7,7", "b": f"1,{channels},7,7"}
    model = graph(body, weights(w1=(8, 2 * channels, 1, 1)), inputs=inputs, outputs=("y", "z"))
    cleaned, (site, *_) = find_sites(model, Path())
    assert site.match is not None
    plain = wiring(cleaned.whole, engine)
    assert is_widened(plain.fused(site.match), "a") == widened and not is_widened(plain, "a")


def test_pytorch_merges_no_convolutions() -> None:
    wires = inception(TORCH)
    first = wires.graph.producer("b1c")
    assert first is not None and wires.siblings(first) == [first]
    plain = inception()
    own = plain.graph.producer("b1c")
    assert own is not None and len(plain.siblings(own)) == 3
