"""--dtype: lower precision in the file, either the whole model or only the fused sites, with its error reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import FILTER, fused_types, graph, weights
from onnx import TensorProto

import models
from cutefuse.commands.patch import main
from cutefuse.commands.unpatch import main as unpatch
from cutefuse.rewrite.patch import Options, patch

CHAIN = (
    "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w, k) z = Relu(x) "
    "d = Concat<axis=1>(z, b) v = Conv(d, u) y = Tanh(v)"
)
VALUES = weights(w=(16, 24, 3, 3), k=(16,), u=(8, 32, 1, 1))


def run(tmp_path: Path, model: onnx.ModelProto, *options: str) -> tuple[int, dict, onnx.ModelProto | None]:
    source, output = tmp_path / "m.onnx", tmp_path / "m.cutefuse.onnx"
    onnx.save(model, str(source))
    code = main([str(source), *options])
    report = tmp_path / "m.patch.json"
    return code, json.loads(report.read_text()) if report.exists() else {}, \
        onnx.load(str(output)) if output.exists() else None  # fmt: skip


def stored(model: onnx.ModelProto, suffix: str) -> set[int]:
    return {t.data_type for t in model.graph.initializer if t.name.endswith(suffix)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(models.PARTS), "raft_update", "yolov8n"])
def test_a_whole_model_in_float16_keeps_its_interface_and_its_results(name: str, tmp_path: Path) -> None:
    code, report, patched = run(tmp_path, models.build(name, "float32", True), "--all", "--dtype", "fp16", "--verify")
    assert code == 0 and report["verify"]["passed"], report.get("verify")
    assert report["conversion"]["dtype"] == "float16" and report["conversion"]["scope"] == "model"
    assert {s["dtype"] for s in report["sites"] if s["status"] == "fused"} == {"float16"}
    assert 1e-6 < max(o["max_rel_error"] for o in report["verify"]["conversion"]) < 2e-2
    assert max(o["max_rel_error"] for o in report["verify"]["outputs"]) < 1e-2
    kinds = {v.type.tensor_type.elem_type for v in (*patched.graph.input, *patched.graph.output)}
    assert kinds == {TensorProto.FLOAT}
    onnx.checker.check_model(patched, full_check=True)


@pytest.mark.parametrize("celu", [False, True])  # which stays in float32
@pytest.mark.parametrize("fused", [True, False])
def test_a_model_that_was_converted_before_is_told_so(
    fused: bool, celu: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = CHAIN.replace("y = Tanh(v)", "y = Celu(v)") if celu else CHAIN
    first, _, _ = run(tmp_path, graph(body, VALUES), "--all", "--dtype", "fp16")
    assert first == 0
    name = "m.cutefuse.onnx"
    if not fused:
        assert unpatch([str(tmp_path / name)]) == 0
        name = "m.plain.onnx"
    capsys.readouterr()
    again = main([str(tmp_path / name), "-o", str(tmp_path / "again.onnx"), "--all", "--dtype", "fp16"])
    assert again == (3 if fused else 0)
    assert "--dtype does nothing" in capsys.readouterr().out


def test_float32_beside_an_earlier_conversion_is_lowered(tmp_path: Path) -> None:
    """The converter's Casts of both runs would have the same names."""
    code, report, _ = run(tmp_path, graph(CHAIN, VALUES), "--all", "--dtype", "fp16", "--keep-float32", "Conv_1")
    assert code == 0 and "Conv_1" in report["conversion"]["kept_float32"]
    patched = tmp_path / "m.cutefuse.onnx"
    code, report, again = run(tmp_path, onnx.load(str(patched)), "--all", "--dtype", "fp16", "--verify")
    assert code in (0, 3) and again is not None and report["verify"] is None or report["verify"]["passed"]


def test_an_operator_without_float16_stays_in_float32(tmp_path: Path) -> None:
    model = graph(CHAIN.replace("y = Tanh(v)", "y = Celu(v)"), VALUES)
    code, report, _ = run(tmp_path, model, "--all", "--dtype", "fp16", "--verify")
    assert code == 0 and report["verify"]["passed"] and report["conversion"]["kept_float32"] == ["Celu_5"]


def test_a_layer_norm_in_steps_is_proven_in_float16(tmp_path: Path) -> None:
    body = (
        "m = ReduceMean<axes=[-1]>(a) d = Sub(a, m) p = Pow(d, two) v = ReduceMean<axes=[-1]>(p) e = Add(v, eps) "
        "r = Sqrt(e) n = Div(d, r) s = Mul(g, n) y = Add(s, h)"
    )
    values = weights(g=(64,), h=(64,)) | {"two": np.float32(2), "eps": np.float32(1e-5)}
    model = graph(body, values, inputs={"a": "2,7,64"}, rank=3)
    code, report, _ = run(tmp_path, model, "--all", "--dtype", "fp16", "--verify")
    assert code == 0 and report["verify"]["passed"]


def test_nodes_can_be_kept_in_float32(tmp_path: Path) -> None:
    model = graph(CHAIN, VALUES)
    code, report, patched = run(tmp_path, model, "--dtype", "fp16", "--keep-float32", "Conv_1", "--verify")
    assert code == 0 and report["verify"]["passed"] and report["conversion"]["kept_float32"] == ["Conv_1"]
    kept, lowered = report["sites"]
    assert "Cast stands between this Conv and Concat" in kept["reason"] and lowered["dtype"] == "float16"
    conv = next(n for n in patched.graph.node if n.op_type == "Conv")
    assert conv.name == "Conv_1" and stored(patched, "w") == {TensorProto.FLOAT}


def test_sites_can_be_kept_in_float32(tmp_path: Path) -> None:
    options = ["--dtype", "fp16", "--scope", "sites", "--keep-float32", "Conv_1", "--verify", "--all"]
    code, report, patched = run(tmp_path, graph(CHAIN, VALUES), *options)
    assert code == 0 and report["verify"]["passed"] and report["conversion"]["kept_float32"] == ["Conv_1"]
    assert [s["dtype"] for s in report["sites"]] == ["float32", "float16"]


@pytest.mark.parametrize("opset", [13, 17, 22])
@pytest.mark.parametrize(("dtype", "kind"), [("fp16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)])
def test_only_the_fused_sites_change_their_type(dtype: str, kind: int, opset: int, tmp_path: Path) -> None:
    model = graph(CHAIN, VALUES, opset=opset)
    code, report, patched = run(tmp_path, model, "--dtype", dtype, "--scope", "sites", "--verify")
    assert code == 0 and report["verify"]["passed"], report.get("verify")
    assert fused_types(patched) == ["CuteConcatConv2Relu", "CuteConcatConv2Tanh"]
    assert stored(patched, "packed_weight") == {kind} and stored(patched, "bias") == {TensorProto.FLOAT}
    kinds = [n.op_type for n in patched.graph.node]
    assert kinds.count("Cast") == 3, "a and b down once each, y up; z stays in low precision between the sites"
    onnx.checker.check_model(patched, full_check=True)


def test_a_result_that_others_read_too_goes_back_to_float32(tmp_path: Path) -> None:
    model = graph(CHAIN.replace("y = Tanh(v)", "y1 = Tanh(v) y2 = Neg(z)"), VALUES, outputs=("y1", "y2"))
    code, report, patched = run(tmp_path, model, "--dtype", "bf16", "--verify")
    assert code == 0 and report["verify"]["passed"]
    assert [n.op_type for n in patched.graph.node].count("Cast") == 4


SIZES = ["--input-shape", "a:1x8x9x7", "--input-shape", "b:1x16x9x7"]
SHARED = CHAIN.replace("y = Tanh(v)", "y1 = Tanh(v) y2 = Neg(z)")  # float32 reads what a site makes


@pytest.mark.parametrize(("body", "outputs", "casts"), [(CHAIN, ("y",), 3), (SHARED, ("y1", "y2"), 4)])
def test_casts_beside_the_sites_are_in_the_figures(
    body: str, outputs: tuple[str, ...], casts: int, tmp_path: Path
) -> None:
    model, options = graph(body, VALUES, outputs=outputs), ("--dtype", "bf16", "--all", *SIZES)
    _, high, _ = run(tmp_path, model, "--all", *SIZES)
    _, report, patched = run(tmp_path, model, *options)
    made = [n for n in patched.graph.node if n.op_type == "Cast"]
    assert report["conversion"]["casts"] == len(made) == report["summary"]["ops_after"]["Cast"] == casts
    sizes = {"a": 8 * 63, "b": 16 * 63, "z": 16 * 63, "y": 8 * 63, "y1": 8 * 63}  # elements
    ends = [next(t for t in (*n.input, *n.output) if t in sizes) for n in made]
    assert report["conversion"]["cast_bytes"] == 6 * sum(sizes[t] for t in ends)
    gone = report["summary"]["bytes_saved"]
    assert gone == high["summary"]["bytes_saved"] - report["conversion"]["cast_bytes"]


def test_a_dry_run_counts_the_casts_that_a_run_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = graph(SHARED, VALUES, outputs=("y1", "y2"), inputs={"a": "n,8,h,7", "b": "n,16,h,7"})
    _, report, _ = run(tmp_path, model, "--dtype", "bf16", "--all", *SIZES)
    dry = patch(tmp_path / "m.onnx", tmp_path / "dry.onnx", Options(dtype="bfloat16", all_sites=True, dry_run=True))
    assert dry.report["summary"]["ops_after"] == report["summary"]["ops_after"]
    assert "4 Casts to and from bfloat16 stand beside the fused nodes" in capsys.readouterr().out
    assert dry.report["conversion"]["cast_bytes"] is None and dry.report["summary"]["bytes_saved"] is None, "no sizes"


def test_a_site_is_charged_with_its_casts_and_not_with_those_that_a_neighbour_spares(tmp_path: Path) -> None:
    onnx.save(graph(CHAIN, VALUES), tmp_path / "m.onnx")
    shapes = {"a": (64, 8, 9, 7), "b": (64, 16, 9, 7)}
    gains = {}
    for name, chosen in (("both", {}), ("first", {"include": ("Conv_1",)}), ("last", {"include": ("Conv_4",)})):
        options = Options(dtype="bfloat16", all_sites=True, dry_run=True, shapes=shapes, **chosen)
        gains[name] = patch(tmp_path / "m.onnx", tmp_path / "out.onnx", options).report["summary"]
    assert [gains[n]["fused"] for n in gains] == [2, 1, 1]
    # Alone, each has the Cast of the tensor between them: one up, one down.
    spared = gains["both"]["gain_us"] - gains["first"]["gain_us"] - gains["last"]["gain_us"]
    assert spared > 5, "four passes over memory: z up, z down, b down twice instead of once, and the Concat that stays"


def test_a_model_that_is_converted_whole_has_no_casts_to_count(tmp_path: Path) -> None:
    _, report, _ = run(tmp_path, graph(CHAIN, VALUES), "--dtype", "fp16", "--all", *SIZES)
    assert "casts" not in report["conversion"]


def test_channels_that_float32_cannot_have_are_no_hindrance_in_float16(tmp_path: Path) -> None:
    model = graph(CHAIN, weights(w=(16, 24, 3, 3), k=(16,), u=(8, 33, 1, 1)), inputs={"a": "n,7,9,7", "b": "n,17,9,7"})
    code, report, _ = run(tmp_path, model, "--dtype", "fp16", "--verify")
    assert code == 0 and {s["status"] for s in report["sites"]} == {"fused"}, "16-bit types pad to 8 channels"


def test_weights_beyond_float16_stay_in_float32(tmp_path: Path) -> None:
    values = weights(w=FILTER, k=(12,))
    values["w"][0, 0, 0, 0] = 1e5
    model = graph("c = Concat<axis=1>(a, b) y = Conv(c, w, k)", values)
    code, report, patched = run(tmp_path, model, "--dtype", "fp16", "--scope", "sites", "--verify")
    assert code == 0 and report["conversion"]["kept_float32"] == ["Conv_1"]
    assert fused_types(patched) == ["CuteConcatConv2"] and stored(patched, "weight") == {TensorProto.FLOAT}


def test_a_whole_model_in_bfloat16_is_referred_to_autocast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, patched = run(tmp_path, graph(CHAIN, VALUES), "--dtype", "bf16", "--scope", "model")
    assert code == 2 and patched is None and "AutoCast" in capsys.readouterr().err


def test_a_model_that_is_float16_already_is_left_as_it_is(tmp_path: Path) -> None:
    values = {k: v.astype(np.float16) for k, v in VALUES.items()}
    code, report, patched = run(tmp_path, graph(CHAIN, values, dtype="float16"), "--dtype", "fp16", "--verify")
    assert code == 0 and "Cast" not in {n.op_type for n in patched.graph.node}


def test_outside_weights_stay_outside_when_converted(tmp_path: Path) -> None:
    onnx.save(graph(CHAIN, weights(w=(40, 24, 3, 3), k=(40,), u=(8, 56, 1, 1))), str(tmp_path / "m.onnx"),
              save_as_external_data=True, location="m.bin", size_threshold=512)  # fmt: skip
    assert main([str(tmp_path / "m.onnx"), "--dtype", "fp16", "--verify"]) == 0
    assert (tmp_path / "m.cutefuse.onnx.data").exists()


def test_bfloat16_before_its_cast_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, patched = run(tmp_path, graph(CHAIN, VALUES, opset=12), "--dtype", "bf16")
    assert code == 2 and patched is None
    assert "opset 12 has no Cast to bfloat16; convert the model to opset 13" in capsys.readouterr().err


@pytest.mark.parametrize(("opset", "kept"), [(17, 3), (19, 0)])
def test_scales_that_cannot_be_float16_stay_float32(opset: int, kept: int, tmp_path: Path) -> None:
    body = CHAIN.replace("z = Relu(x)", "r = Relu(x) q = QuantizeLinear(r, s, e) z = DequantizeLinear(q, s, e)")
    body = body.replace("v = Conv(d, u)", "t = DequantizeLinear(q, s, e) m = Mul(t, t) v = Conv(d, u)") + " o = Neg(m)"
    values = VALUES | {"s": np.float32(0.03125), "e": np.int8(0)}
    model = graph(body, values, opset=opset, outputs=("y", "o"))
    code, report, patched = run(tmp_path, model, "--dtype", "fp16", "--verify")
    assert code == 0 and report["verify"]["passed"] and len(report["conversion"]["kept_float32"]) == kept
    onnx.checker.check_model(patched, full_check=True)


def test_tensors_that_bodies_read_are_made_before_them(tmp_path: Path) -> None:
    branches = ", ".join(f"{k}_branch = g_{k} () => (float[n,8,9,7] o_{k}) {{ o_{k} = {op}(a) }}"
                         for k, op in (("then", "Neg"), ("else", "Exp")))  # fmt: skip
    body = f"p = If(on) <{branches}> " + CHAIN.replace("(z, b)", "(z, p)")
    model = graph(body, VALUES | weights(u=(8, 24, 1, 1)) | {"on": np.bool_(True)})
    code, report, patched = run(tmp_path, model, "--dtype", "fp16", "--verify")
    assert code == 0 and report["verify"]["passed"]
    onnx.checker.check_model(patched, full_check=True)
