"""float8 models from end to end: a network as ModelOpt quantises it, exports with TensorRT's own nodes, the plugin
host, function bodies for TensorRT's parser, and how float8 tensors are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from bodies import faults
from devices import skip_without_code
from graphs import fused_types, graph, run_patch
from onnx import TensorProto, helper, parser

from cutefuse import kernels
from cutefuse.cli import main
from cutefuse.engines.onnxruntime import run as onnxruntime
from cutefuse.graph.closeness import compare
from cutefuse.graph.numbers import FLOAT8, INT8
from cutefuse.graph.read import Graph
from cutefuse.graph.runner import Runner
from cutefuse.graph.shapes import inferred
from cutefuse.graph.verify import Probe, seeded_inputs, verify
from cutefuse.operators.function import body_for, graph_call
from cutefuse.operators.quant_concat_conv import OPERATOR
from cutefuse_host import Host, Input

E4M3 = ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(3)


# ---- a network: stem, C2f block, SPPF block, head; float32 inputs and outputs around float16 ----


class Network:
    """Nodes in ONNX's text form, with float8 quantisers in front of every convolution but the head."""

    def __init__(self) -> None:
        self.text = ""
        self.values: dict[str, np.ndarray] = {"z": np.zeros((), E4M3)}
        self._count = 0

    def node(self, expression: str) -> str:
        self._count += 1
        self.text += f"t{self._count} = {expression}\n"
        return f"t{self._count}"

    def constant(self, value: Any, dtype: Any = np.float16) -> str:
        self._count += 1
        self.values[f"v{self._count}"] = np.asarray(value, dtype)
        return f"v{self._count}"

    def quantised(self, x: str, scale: str) -> str:
        return self.node(f"DequantizeLinear({self.node(f'QuantizeLinear({x}, {scale}, z)')}, {scale}, z)")

    def silu(self, x: str, channels: int, filters: int, size: int, stored: bool) -> str:
        """A convolution of quantised values and SiLU; the filter is stored in float8, or in float16 before a pair."""
        floats = RNG.standard_normal((filters, channels, size, size)) / np.sqrt(channels * size * size)
        steps = np.float16(np.abs(floats).max(axis=(1, 2, 3)) / 448)
        scale, zeros = self.constant(steps), self.constant(np.zeros(filters), E4M3)
        if stored:
            w = self.constant(FLOAT8.round(floats / steps[:, None, None, None].astype(np.float64)), E4M3)
        else:
            w = self.node(f"QuantizeLinear<axis=0>({self.constant(floats)}, {scale}, {zeros})")
        dw = self.node(f"DequantizeLinear<axis=0>({w}, {scale}, {zeros})")
        bias = self.constant(RNG.standard_normal(filters) / 8)
        y = self.node(f"Conv<pads=[{size // 2},{size // 2},{size // 2},{size // 2}]>({x}, {dw}, {bias})")
        return self.node(f"Mul({y}, {self.node(f'Sigmoid({y})')})")


def network() -> onnx.ModelProto:
    net = Network()
    scale = net.constant(0.01)
    x = net.silu(net.quantised(net.node("Cast<to=10>(image)"), scale), 16, 32, 3, stored=True)
    x = net.silu(net.quantised(x, scale), 32, 32, 1, stored=False)
    net.text += f"left, right = Split<axis=1, num_outputs=2>({x})\n"
    inner = net.silu(net.quantised("right", scale), 16, 16, 3, stored=True)
    inner = net.node(f"Add(right, {net.silu(net.quantised(inner, scale), 16, 16, 3, stored=True)})")
    # C2f: the sources of the Concat share a scale, and each has quantisers of its own.
    joined = ", ".join(net.quantised(t, scale) for t in ("left", "right", inner))
    x = net.silu(net.node(f"Concat<axis=1>({joined})"), 48, 32, 1, stored=True)
    # SPPF: the quantisers stand behind the Concat.
    pools = [net.silu(net.quantised(x, scale), 32, 16, 1, stored=False)]
    for _ in range(3):
        pools.append(net.node(f"MaxPool<kernel_shape=[5,5], pads=[2,2,2,2]>({pools[-1]})"))
    joined = net.quantised(net.node(f"Concat<axis=1>({', '.join(pools)})"), net.constant(0.02))
    x = net.silu(joined, 64, 40, 1, stored=False)
    head = net.constant(RNG.standard_normal((6, 40, 1, 1)) / 8)
    y = net.node(f"Conv({x}, {head})")
    net.text += f"y = Cast<to=1>({y})\n"
    return graph(net.text, net.values, opset=19, inputs={"image": "n,16,20,20"}, ir=9)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save(network(), str(path))
    return path


def test_a_network_is_patched_proved_judged_by_the_host_and_restored(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_code(90)
    target = source.with_name("net.cutefuse.onnx")
    assert main(["patch", str(source), "--all", "--verify", "--sm", "90", "--input-shape", "image:2x16x20x20"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 fused sites" in said and "float8" in said
    report = json.loads(source.with_name("net.patch.json").read_text())
    assert report["verify"]["passed"] and report["summary"]["fused"] == 2
    assert [s["title"] for s in report["sites"] if s["status"] == "fused"] == [
        "16+16+16->32 1x1 @20x20 Silu float8 to float8", "16+16+16+16->40 1x1 @20x20 Silu float8"
    ]  # fmt: skip
    patched = onnx.load(str(target))
    onnx.checker.check_model(patched, full_check=True)
    assert fused_types(patched) == ["CuteQConcatConv3SiluQ", "CuteQConcatConv4Silu"]
    assert "Concat" not in {n.op_type for n in patched.graph.node} and faults(patched.functions) == []
    for node in (n for n in patched.graph.node if n.domain == "cutefuse"):
        site = next(s for s in report["sites"] if s["op_type"] == node.op_type)
        shapes = [[2, *dims[1:]] if len(dims) == 4 else dims for dims in site["shapes"]["inputs"]]
        count = len(shapes) - 3
        types = ["fp8"] * (count + 1) + ["float32"] * 2
        plugin = Host().build(node, [Input(tuple(d), t) for d, t in zip(shapes, types, strict=True)]).check()
        last = "kHWC16" if node.op_type.endswith("Q") else "kHWC8"
        assert plugin.findings == []
        assert [c["formats"] for c in plugin.report["combinations"]] == [["kHWC16"] * count + ["kLINEAR"] * 3 + [last]]
    plain = source.with_name("plain.onnx")
    assert main(["unpatch", str(target), "-o", str(plain)]) == 0
    restored = onnx.load(str(plain))
    onnx.checker.check_model(restored, full_check=True)
    kinds = [n.op_type for n in restored.graph.node]
    assert not restored.functions and kinds.count("Concat") == 2
    assert kinds.count("Conv") == [n.op_type for n in network().graph.node].count("Conv")
    tensors = [o for n in patched.graph.node if n.domain == "cutefuse" for o in n.output]
    proof = verify(source, restored, source.parent, 2e-2, {}, probes=[Probe(t, t) for t in tensors])
    assert proof["passed"]


@pytest.mark.parametrize(("sm", "gpu"), [(86, ["--sm", "86"]), (80, ["--gpu", "A100 SXM4 80GB"]), (87, ["--sm", "87"])])
def test_a_network_stays_as_it_is_for_gpus_without_float8(
    sm: int, gpu: list[str], source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_code(sm)
    assert main(["patch", str(source), "--all", *gpu]) == 3
    assert "2 refused, no kernels for this GPU" in " ".join(capsys.readouterr().out.split())
    assert not source.with_name("net.cutefuse.onnx").exists()


def test_a_patched_network_is_patched_again_and_its_body_stays_float8(tmp_path: Path, source: Path) -> None:
    one, two = tmp_path / "one.onnx", tmp_path / "two.onnx"
    assert main(["patch", str(source), "--all", "--sm", "0", "-o", str(one)]) == 0
    assert main(["patch", str(one), "--all", "--sm", "0", "-o", str(two)]) == 3
    model = onnx.load(str(one))
    seen = Graph(model, tmp_path, inferred(model))
    calls = [graph_call(n, seen) for n in model.graph.node if n.domain == "cutefuse"]
    assert {t.dtype for call in calls for t in call.inputs} == {"float8_e4m3fn", "float32"}


def test_a_profile_names_float8_as_tensorrt_does(source: Path) -> None:
    files = onnxruntime.profile(source, source.parent / "out", ["--iterations=1", "--duration=0", "--warmUp=0"])
    layers = json.loads(files.graph.read_text())["Layers"]
    kinds = {t["Format/Datatype"] for layer in layers for t in layer["Outputs"]}
    assert "Row major linear FP8" in kinds and not any("E4M3" in kind for kind in kinds)


# ---- TensorRT's own nodes ----

VALUES = {
    "sa": np.float16(0.012), "sb": np.float16(0.02), "sc": np.float32(0.016), "so": np.float16(0.009),
    "ws": np.float16(0.001), "k": np.linspace(-1, 1, 16).astype(np.float16),
    "wf": (RNG.standard_normal((16, 24, 3, 3)) / 8).astype(np.float16),
}  # fmt: skip
FILTER = "qw = trt.TRT_FP8QuantizeLinear(wf, ws) dw = trt.TRT_FP8DequantizeLinear(qw, ws) "
OWN = """qa = trt.TRT_FP8QuantizeLinear(a, sa) da = trt.TRT_FP8DequantizeLinear(qa, sa)
         qb = trt.TRT_FP8QuantizeLinear(b, sb) db = trt.TRT_FP8DequantizeLinear(qb, sb)
         c = Concat<axis=1>(da, db) """
WHOLE = """c0 = Concat<axis=1>(a, b) u = Cast<to=1>(c0) qc = trt.TRT_FP8QuantizeLinear(u, sc)
           d = trt.TRT_FP8DequantizeLinear(qc, sc) c = Cast<to=10>(d) """
CONV = "x = Conv<pads=[1,1,1,1]>(c, dw, k) r = Relu(x) "
OUT = "q = trt.TRT_FP8QuantizeLinear(r, so) y = trt.TRT_FP8DequantizeLinear(q, so)"
NAMES = {"TRT_FP8QuantizeLinear": "QuantizeLinear", "TRT_FP8DequantizeLinear": "DequantizeLinear"}
SIZES = {"qa": 8, "qb": 16, "da": 8, "db": 16, "c": 24, "qc": 24, "d": 24, "q": 16, "qw": 0, "dw": 0}


def exported(text: str, opset: int = 19, known: bool = True) -> onnx.ModelProto:
    """A model with TensorRT's nodes. `known`: local functions define them, so that ONNX Runtime runs it; otherwise it
    is as PyTorch writes it, which calls float8 tensors uint8."""
    header = f'<ir_version: {9 if opset >= 19 else 8}, opset_import: ["": {opset}, "trt": 1]>'
    formals = "(float16[n,8,9,7] a, float16[n,16,9,7] b) => (float16[n,16,9,7] y)"
    model = parser.parse_model(f"{header} g {formals} {{{text}}}")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for n, v in VALUES.items())
    for i, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{i}"
    if known:
        zero = helper.make_node("Constant", [], ["z"], value=onnx.numpy_helper.from_array(np.zeros((), E4M3)))
        for name, kind in NAMES.items():
            node = helper.make_node(kind, ["x", "s", "z"], ["y"])
            imports = [helper.make_opsetid("", opset)]
            model.functions.append(helper.make_function("trt", name, ["x", "s"], ["y"], [zero, node], imports))
        return model
    for node in model.graph.node:
        kind = TensorProto.UINT8 if "FP8Quantize" in node.op_type else TensorProto.FLOAT16
        channels = SIZES.get(node.output[0], 16)
        dims: list[Any] = ["n", channels, 9, 7] if channels else [16, 24, 3, 3]
        if node.output[0] != "y":
            model.graph.value_info.append(helper.make_tensor_value_info(node.output[0], kind, dims))
    return model


CUSTOM = {
    "own scales": (OWN + FILTER + CONV + "y = Identity(r)", "CuteQConcatConv2Relu"),
    "float8 output": (OWN + FILTER + CONV + OUT, "CuteQConcatConv2ReluQ"),
    "a pair between casts": (WHOLE + FILTER + CONV + OUT, "CuteQConcatConv2ReluQ"),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_tensorrts_own_nodes_mean_what_the_standard_ones_mean(name: str, tmp_path: Path) -> None:
    text, op_type = CUSTOM[name]
    result, patched = run_patch(exported(text), tmp_path)
    assert fused_types(patched) == [op_type] and result.report["verify"]["passed"], result.report["sites"]


@pytest.mark.parametrize("name", CUSTOM)
def test_an_old_export_is_fused_without_bodies(name: str, tmp_path: Path) -> None:
    text, op_type = CUSTOM[name]
    model = exported(text, 17, known=False)
    result, _ = run_patch(model, tmp_path, dry_run=True)
    assert [s["reason"] for s in result.report["sites"]] == [
        "opset 17 is older than 19; convert the model, or use --no-functions"
    ]
    result, patched = run_patch(model, tmp_path, functions=False, verify=False)
    assert fused_types(patched) == [op_type] and patched is not None
    [node] = [n for n in patched.graph.node if n.domain == "cutefuse"]
    made = {o: n for n in patched.graph.node for o in n.output}
    for source in node.input[:2]:
        assert (made[source].domain, made[source].op_type) == ("trt", "TRT_FP8QuantizeLinear")
    told = {v.name: v.type.tensor_type.elem_type for v in patched.graph.value_info}
    assert {told[n] for n in (*node.input[:2], *node.output) if n in told} <= {17, TensorProto.FLOAT16}
    assert "Q" not in op_type[-1] or told[node.output[0]] == TensorProto.FLOAT8E4M3FN
    assert patched.ir_version >= 9


@pytest.mark.parametrize(("front", "change", "reason"), [
    (OWN, ("trt.TRT_FP8DequantizeLinear(qb, sb)", "Cast<to=10>(b)"), "source 'b' is not dequantised"),
    (OWN, ("trt.TRT_FP8DequantizeLinear(qb", "other.TRT_FP8DequantizeLinear(qb"), "source 'db' is not dequantised"),
    (OWN, ("trt.TRT_FP8DequantizeLinear(qb", "trt.TRT_INT4DequantizeLinear(qb"), "source 'db' is not dequantised"),
    (WHOLE, ("trt.TRT_FP8DequantizeLinear(qw, ws)", "Identity(wf)"), "the filter is not quantised"),
    (WHOLE, ("trt.TRT_FP8QuantizeLinear(u, sc)", "QuantizeLinear(u, sc)"), "is quantised to uint8"),
])  # fmt: skip
def test_other_nodes_beside_tensorrts_own_are_refused_in_words(
    front: str, change: tuple[str, str], reason: str, tmp_path: Path
) -> None:
    text = (front + FILTER + CONV + OUT).replace(*change)
    result, _ = run_patch(exported(text, 17, known=False), tmp_path, functions=False, verify=False, dry_run=True)
    [site] = result.report["sites"]
    assert site["status"] == "refused" and reason in site["reason"], site["reason"]


# ---- plugins ----


def call_of(variant: str, output_type: int) -> tuple[kernels.Call, list[Input]]:
    attrs: dict[str, Any] = {"channels": (64, 24), "kernel_shape": (3, 3), "pads": (1, 1, 1, 1),
                             "packed_sizes": (576, 576), "input_scales": (0.1, 0.2),
                             "output_type": output_type}  # fmt: skip
    inputs = [Input((2, c, 20, 20), "fp8") for c in (64, 24)]
    inputs += [Input((32, 1152), "fp8"), Input((32,), "float32"), Input((32,), "float32")]
    return kernels.Call(variant, [], [], attrs), inputs


@pytest.mark.parametrize(("variant", "output_type", "last"), [
    ("CuteQConcatConv2Relu", 10, "kHWC8"), ("CuteQConcatConv2ReluQ", 1, "kHWC16"),
    ("CuteQConcatConv2Silu", 10, "kHWC8"),
])  # fmt: skip
def test_plugins_take_float8_in_one_format(variant: str, output_type: int, last: str) -> None:
    call, inputs = call_of(variant, output_type)
    plugin = Host().build((call.op_type, call.attrs), inputs).check()
    assert plugin.findings == []
    assert [c["formats"] for c in plugin.report["combinations"]] == [["kHWC16"] * 2 + ["kLINEAR"] * 3 + [last]]


# ---- what proves it ----


def test_runs_feed_and_give_float8(tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 19]> g (float8e4m3fn[4] x, float[4] f) => (float8e4m3fn[4] q, float[4] y) '
        "{ y = DequantizeLinear(x, s) q = QuantizeLinear(f, s, z) }"
    )
    stored = {"s": np.float32(0.5), "z": np.zeros((), E4M3)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for n, v in stored.items())
    feeds = seeded_inputs(model, (4, 4, 4), {}, 0)
    assert feeds["x"].dtype == E4M3
    q, y = Runner(model, tmp_path)(feeds)
    assert q.dtype == E4M3 and np.array_equal(y, feeds["x"].astype(np.float32) * 0.5)
    assert np.array_equal(q.view(np.uint8), FLOAT8.round(feeds["f"] / 0.5).view(np.uint8))


def test_float8_is_compared_by_its_own_steps() -> None:
    values = RNG.standard_normal((1, 4, 16, 16)) * 60
    a = FLOAT8.round(values)
    near = FLOAT8.round(values * (1 + 1e-3 * RNG.standard_normal(values.shape)))
    assert (a != near).any() and compare(a, near, 1e-2)["passed"]
    assert compare(a, near, 1e-2)["max_steps"] == 1
    one = a.copy()
    one[0, 2, 3, 4] = FLOAT8.round(one[0, 2, 3, 4].astype(float) + 60)
    assert not compare(a, one, 1e-2)["passed"]
    drifted = FLOAT8.round(values + 0.05 * 60)  # every value in one direction, few by more than a step
    assert not compare(a, drifted, 1e-2)["passed"]
    moved = FLOAT8.round(a.astype(float) + FLOAT8.step(a.astype(float)))  # all by one step, none by more
    assert compare(a, moved, 1e-2)["max_steps"] == 1 and not compare(a, moved, 1e-2)["passed"]
    nan = a.copy()
    nan[0, 0, 0, 0] = np.nan
    assert "NaN" in compare(a, nan, 1e-2)["why"] and compare(nan, nan, 1e-2)["passed"]
    assert not compare(a, a.astype(np.float32), 1e-2)["passed"]


def test_numbers_round_to_nearest_even_and_saturate() -> None:
    given = [1.0625, 1.0625 + 1e-12, 1.1875, 460.0, -1e9, 2.0**-10, 1.5 * 2.0**-9, 0.0]
    assert FLOAT8.round(given).astype(float).tolist() == [1.0, 1.125, 1.25, 448.0, -448.0, 0.0, 2.0**-8, 0.0]
    assert np.isnan(FLOAT8.round([np.nan]).astype(float)).all()
    assert FLOAT8.step([0.0, 2.0**-6, 1.0, 1.99, 448.0]).tolist() == [2.0**-9, 2.0**-9, 0.125, 0.125, 32.0]
    assert INT8.round([0.5, 1.5, -300.0]).tolist() == [0, 2, -128] and INT8.step([3, 100]).tolist() == [1, 1]


@pytest.mark.parametrize("opset", [19, 21, 24])
def test_float8_bodies_hold_what_tensorrts_parser_reads(opset: int) -> None:
    cases = {c.name: c for c in OPERATOR.cases()}
    for name in ("2_sources_Clip", "strided_to_int8", "1_sources_HardSwish"):
        call = OPERATOR.call(cases[name], "float16", FLOAT8)
        body = body_for([call], opset)
        assert faults([body]) == []
        # TensorRT reads float8 through quantisers alone: no Cast from it or to it.
        casts = [n.input[0] for n in body.node if n.op_type == "Cast"]
        assert not {*body.input} & {*casts}
        assert all(a.i != TensorProto.FLOAT8E4M3FN for n in body.node if n.op_type == "Cast" for a in n.attribute)
