"""What a user's session of ONNX Runtime, with default options, computes of a patched model: what the unfused model
says, computed without any optimiser. The same models pass NVIDIA's parser, which reads the same bodies.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs import fused_types, graph, run_patch
from onnx import numpy_helper
from op_models import calls_of_all, model_of_calls

from cutefuse.engines.tensorrt import rtx
from cutefuse.graph.numbers import FLOAT8, INT8, Number
from cutefuse.operators.conv_call import HWC8, NHWC

pytestmark = pytest.mark.slow

NEWEST = min(24, onnx.defs.onnx_opset_version())
STEP = 1 if "CUTEFUSE_EVERY_BODY" in os.environ else 48  # of the op_types, one in so many
LAYOUTS = {"hwc8": HWC8, "nhwc": NHWC}
OPSETS = [(INT8, 13), (INT8, 17), (INT8, 21), (INT8, NEWEST), (FLOAT8, 19), (FLOAT8, 21), (FLOAT8, NEWEST)]
NAMES = [f"{number.word} {opset}" for number, opset in OPSETS]


def session(model: onnx.ModelProto, optimised: bool = True) -> ort.InferenceSession:
    """The model with ONNX Runtime's default options, which fold and fuse all that they can, or with no optimiser."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def outputs(model: onnx.ModelProto, optimised: bool = True) -> list[np.ndarray]:
    made = session(model, optimised)
    rng = np.random.default_rng(0)
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    sizes = {i.name: [d if isinstance(d, int) else 2 for d in i.shape] for i in made.get_inputs()}
    feeds = {i.name: rng.standard_normal(sizes[i.name]).astype(kinds[i.type]) for i in made.get_inputs()}
    return [np.asarray(v, np.float64) for v in made.run(None, feeds)]


def errors(model: onnx.ModelProto, exact: onnx.ModelProto) -> list[np.ndarray]:
    """How far each value that `model` gives by default lies from `exact`, over the largest of its output."""
    pairs = zip(outputs(model), outputs(exact, optimised=False), strict=True)
    return [np.abs(a - b) / np.abs(b).max() for a, b in pairs]


# ---- quantised bodies ----

STEPS = {"s0": 0.041, "sa": 0.03, "sb": 0.05, "sc": 0.036, "so": 0.07, "ws": np.linspace(0.001, 0.003, 12)}
# Sources that were quantised before, with another scale: as a Split or a pool leaves them in front of a Concat.
FRONT = """e = QuantizeLinear(a, s0, z) a1 = DequantizeLinear(e, s0, z)
           f = QuantizeLinear(b, s0, z) b1 = DequantizeLinear(f, s0, z) """
OWN = """qa = QuantizeLinear(a1, sa, z) da = DequantizeLinear(qa, sa, z)
         qb = QuantizeLinear(b1, sb, z) db = DequantizeLinear(qb, sb, z) c = Concat<axis=1>(da, db) """
ONE = "c0 = Concat<axis=1>(a1, b1) qc = QuantizeLinear(c0, sc, z) c = DequantizeLinear(qc, sc, z) "
FILTER = "dw = DequantizeLinear<axis=0>(w, ws, z12) "
CONV = "x = Conv<pads=[1,1,1,1]>(c, dw, k) "
OUT = "g = Sigmoid(x) r = Mul(x, g) q = QuantizeLinear(r, so, z) y = DequantizeLinear(q, so, z) "
BEHIND = """c2 = Concat<axis=1>(y, b1) q2 = QuantizeLinear(c2, sc, z) d2 = DequantizeLinear(q2, sc, z)
            dv = DequantizeLinear<axis=0>(v, ws, z12) x2 = Conv(d2, dv, k) y2 = Relu(x2)"""
SITES = {
    "one scale": (ONE + FILTER + CONV + "y = Relu(x)", ["CuteQConcatConv2Relu"], "y"),
    "own scales": (OWN + FILTER + CONV + "y = Relu(x)", ["CuteQConcatConv2Relu"], "y"),
    "quantised output": (OWN + FILTER + CONV + OUT, ["CuteQConcatConv2SiluQ"], "y"),
    "a second site": (ONE + FILTER + CONV + OUT + BEHIND, ["CuteQConcatConv2SiluQ", "CuteQConcatConv2Relu"], "y2"),
}  # fmt: skip


def quantised(text: str, number: Number, opset: int, output: str = "y") -> onnx.ModelProto:
    kind, rng = np.dtype(number.name), np.random.default_rng(1)
    values = {name: np.asarray(v, np.float32) for name, v in STEPS.items()}
    values |= {"k": np.linspace(-1, 1, 12, dtype=np.float32), "z": np.zeros((), kind), "z12": np.zeros(12, kind)}
    values |= {"six": np.float32(6), "zero": np.float32(0)}
    filters = {"w": (12, 24, 3, 3), "v": (12, 28, 1, 1)}
    values |= {name: number.round(rng.standard_normal(s) * number.highest / 4) for name, s in filters.items()}
    ir = None if number is INT8 or opset >= 21 else number.ir_version
    return graph(FRONT + text, values, opset=opset, outputs=(output,), ir=ir)


def patched_of(model: onnx.ModelProto, folder: Path, layout: str, op_types: list[str]) -> onnx.ModelProto:
    _, patched = run_patch(model, folder, layout=layout, verify=False)
    assert patched is not None and fused_types(patched) == op_types
    onnx.checker.check_model(patched, full_check=True)
    return patched


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("number", "opset"), OPSETS, ids=NAMES)
@pytest.mark.parametrize("name", SITES)
def test_a_quantised_site_keeps_its_numbers(
    name: str, number: Number, opset: int, layout: str, tmp_path: Path
) -> None:  # fmt: skip
    text, op_types, output = SITES[name]
    model = quantised(text, number, opset, output)
    (error,) = errors(patched_of(model, tmp_path, layout, op_types), model)
    # float32 sums in another order: a value at a tie may fall on its other side, and only there.
    assert np.mean(error > 1e-5) < (2e-3 if "q" in text.split() else 1e-9), error.max()


@pytest.mark.skipif(rtx.available() is not None, reason=str(rtx.available()))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("number", "opset"), OPSETS, ids=NAMES)
def test_nvidias_parser_takes_the_same_bodies(number: Number, opset: int, layout: str, tmp_path: Path) -> None:
    text, op_types, output = SITES["a second site"]
    patched_of(quantised(text, number, opset, output), tmp_path, layout, op_types)
    assert rtx.compile_model(tmp_path / "model.cutefuse.onnx").plugin_layers == 0


# ---- what the bodies avoid; when one of these fails, ONNX Runtime has been mended ----


@pytest.mark.parametrize("opset", [13, 21])
def test_four_zero_points_in_a_row_lose_a_rounding(opset: int, tmp_path: Path) -> None:
    text, op_types, _ = SITES["own scales"]
    model = quantised(text, INT8, opset)
    patched = patched_of(model, tmp_path, "hwc8", op_types)
    (body,) = patched.functions
    (w,) = (n for n in body.input if n.endswith("_w"))
    zero = numpy_helper.from_array(np.int8(0))
    for node in [n for n in body.node if n.op_type == "DequantizeLinear" and n.input[0] != w]:
        node.input.append("zero")
    body.node.insert(0, onnx.helper.make_node("Constant", [], ["zero"], value=zero))
    (error,) = errors(patched, model)
    assert np.mean(error > 1e-3) > 0.1


def test_a_transpose_behind_a_node_without_zero_point_loses_the_sign() -> None:
    text = "q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s) y = Transpose<perm=[0,2,3,1]>(d)"
    model = graph(text, {"s": np.float32(0.05), "z": np.int8(0)}, inputs={"a": "n,8,9,7"})
    (made,), (exact,) = outputs(model), outputs(model, optimised=False)
    assert made.min() == 0 > exact.min() and np.array_equal(made, np.maximum(exact, 0))


def before_float8(activation: str, folder: Path) -> list[onnx.ModelProto]:
    """An unfused model with an activation in front of a float8 QuantizeLinear, and the patched one."""
    text = OWN + FILTER + CONV + f"r = {activation} " + OUT[OUT.index("q =") :]
    model = quantised(text, FLOAT8, 19)
    return [model, patched_of(model, folder, "hwc8", [f"CuteQConcatConv2{activation.split('(')[0]}Q"])]


def test_a_relu_before_float8_vanishes_from_the_unfused_model_too(tmp_path: Path) -> None:
    model, patched = before_float8("Relu(x)", tmp_path)
    assert errors(model, model)[0].max() > 0.1
    assert np.array_equal(outputs(model), outputs(patched))


def test_a_clip_before_float8_lets_the_unfused_model_not_load_either(tmp_path: Path) -> None:
    for model in before_float8("Clip(x, zero, six)", tmp_path):
        with pytest.raises(Exception, match="clip_quantizelinear"):  # these exceptions share no public base class
            session(model)


def test_a_proof_joins_no_quantisers_of_the_unfused_model(tmp_path: Path) -> None:
    model = quantised(SITES["own scales"][0], INT8, 17)
    assert errors(model, model)[0].max() > 1e-3, "by default the unfused model loses a rounding"
    proof = run_patch(model, tmp_path)[0].report["verify"]
    assert [o["max_rel_error"] < 1e-5 for o in proof.get("end_to_end", proof["outputs"])] == [True]


# ---- other bodies ----


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("opset", [9, 13, 17, 21, NEWEST])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_float_body_keeps_its_numbers(layout: str, opset: int, dtype: str) -> None:
    for group in calls_of_all(dtype, None, LAYOUTS[layout], opset)[opset % STEP :: STEP]:
        model = model_of_calls([group], opset)
        worst = max(error.max() for error in errors(model, model))
        assert worst < {"float32": 2e-4, "float16": 5e-3}[group[0].dtype], group[0].op_type  # images have no float32
