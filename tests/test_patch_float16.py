"""--dtype fp16 on what ONNX Runtime's converter overlooks, and --verify in types that NumPy does not know."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import INPUTS, graph, weights
from onnx import TensorProto, helper, numpy_helper, parser

from cutefuse.commands.patch import main
from cutefuse.graph.runner import Runner
from cutefuse.rewrite import retype

SITE = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w, k) r = Relu(x) "
VALUES = weights(w=(12, 24, 3, 3), k=(12,))


def run(folder: Path, model: onnx.ModelProto, *options: str) -> tuple[int, onnx.ModelProto | None]:
    source, output = folder / "m.onnx", folder / "m.cutefuse.onnx"
    onnx.save(model, str(source))
    code = main([str(source), "--all", *options])
    return code, onnx.load(str(output)) if output.exists() else None


def check_float16(folder: Path, model: onnx.ModelProto) -> onnx.ModelProto:
    code, patched = run(folder, model, "--dtype", "fp16", "--verify")
    assert code == 0 and patched is not None
    onnx.checker.check_model(patched, full_check=True)
    proof = json.loads((folder / "m.patch.json").read_text())["verify"]
    assert proof["passed"] and max(r["max_rel_error"] for r in proof["conversion"]) < 1e-2
    assert [s["dtype"] for s in json.loads((folder / "m.patch.json").read_text())["sites"]] == ["float16"]
    return patched


@pytest.mark.parametrize("constant", ["value_float = 1.5", "value_floats = [1.5, 2.5]"])
def test_constants_that_are_no_tensors_become_float16(constant: str, tmp_path: Path) -> None:
    pool = "" if "[" not in constant else "q, h = Split<axis=0>(s) "
    body = f"{SITE} s = Constant<{constant}>() {pool} y = Mul(r, {'h' if pool else 's'})"
    check_float16(tmp_path, graph(body, VALUES, opset=13))


def test_such_a_constant_in_a_branch_becomes_float16(tmp_path: Path) -> None:
    model = graph(f"{SITE} y = Neg(r)", VALUES)
    branches = []
    for name, value in (("then_branch", 2.0), ("else_branch", 3.0)):
        nodes = [
            helper.make_node("Constant", [], [f"{name}_k"], value_float=value),
            helper.make_node("Mul", ["r", f"{name}_k"], [f"{name}_y"]),
        ]
        shown = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
        branches.append((name, helper.make_graph(nodes, name, [], [shown])))
    del model.graph.node[-1]
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(helper.make_node("If", ["yes"], ["y"], name="If_3", **dict(branches)))
    check_float16(tmp_path, model)


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    model = graph(f"{SITE} y = Neg(r)", VALUES)
    function = parser.parse_function(
        '<opset_import: ["": 17], domain: "mine"> Scale (v) => (o) '
        "{ k = Constant<value = float {2.5}>() o = Mul(v, k) }"
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("mine", 1))
    model.graph.node[-1].CopyFrom(helper.make_node("Scale", ["r"], ["y"], domain="mine", name="scale"))
    onnx.checker.check_model(model, full_check=True)
    assert not [f for f in check_float16(tmp_path, model).functions if f.domain == "mine"]


def test_an_input_that_is_an_output_stays_in_its_place(tmp_path: Path) -> None:
    model = graph(f"{SITE} y = Neg(r)", VALUES)
    model.graph.output.insert(0, model.graph.input[1])
    patched = check_float16(tmp_path, model)
    assert [o.name for o in patched.graph.output] == ["b", "y"]
    feeds = {n: np.ones([2 if d == "n" else int(d) for d in s.split(",")], np.float32) for n, s in INPUTS.items()}
    assert np.array_equal(Runner(patched, tmp_path)(feeds)[0], feeds["b"])


def refusal(folder: Path, model: onnx.ModelProto, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(folder, model, "--dtype", "fp16") == (2, None)
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    assert not (folder / "m.patch.json").exists()
    return printed


def test_a_weight_that_is_an_output_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = graph(f"{SITE} y = Neg(r)", VALUES)
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [12, 24, 3, 3]))
    assert "output 'w' is a weight, which float16 would round; use --scope sites" in refusal(tmp_path, model, capsys)


def test_the_noted_type_of_a_weight_that_stays_float32_does(tmp_path: Path) -> None:
    """PyTorch's dynamo exporter notes weights as well, and the converter takes a Resize's scales for lowered ones."""
    model = graph(SITE + "y = Resize(r, , s)", VALUES | {"s": np.float32([1, 1, 2, 2])})
    model.graph.value_info.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, [4]))
    patched = check_float16(tmp_path, model)
    (note,) = [v for v in patched.graph.value_info if v.name == "s"]
    assert note.type.tensor_type.elem_type == TensorProto.FLOAT


def test_what_the_converter_makes_invalid_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HammingWindow makes the type that its attribute names, whatever the converter believes."""
    body = f"{SITE} h = HammingWindow<output_datatype=1>(seven) y = Mul(r, h)"
    model = graph(body, {**VALUES, "seven": np.array(7, np.int64)})
    assert "float16 converter makes an invalid model of this one" in refusal(tmp_path, model, capsys)
    code, patched = run(tmp_path, model, "--dtype", "fp16", "--scope", "sites", "--verify")
    assert code == 0 and patched is not None


def test_a_model_that_was_invalid_before_is_not_blamed_on_the_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retype, "fault", lambda model: "a rule that this model has always broken")
    assert run(tmp_path, graph(f"{SITE} y = Neg(r)", VALUES), "--dtype", "fp16")[0] == 0


@pytest.mark.parametrize("damage", ["missing", "offset", "outside"])
def test_weights_that_cannot_be_read_are_one_sentence(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(
        graph(f"{SITE} y = Neg(r)", VALUES), str(source), save_as_external_data=True, location="d", size_threshold=0
    )
    model = onnx.load(str(source), load_external_data=False)
    for t in model.graph.initializer:
        for entry in t.external_data:
            if (entry.key, damage) in (("offset", "offset"), ("location", "outside")):
                entry.value = {"offset": "-9", "outside": "../d"}[damage]
    if damage == "missing":
        (tmp_path / "d").unlink()
    assert "the weights beside the model cannot be read" in refusal(tmp_path, model, capsys)


@pytest.mark.parametrize("inside", [False, True], ids=["bfloat16 throughout", "bfloat16 inside"])
def test_a_norm_in_bfloat16_is_proven(inside: bool, tmp_path: Path) -> None:
    dtype = "float32" if inside else "bfloat16"
    body = "y = LayerNormalization(a, g, h)"
    if inside:
        body = "v = Cast<to=16>(a) n = LayerNormalization(v, g, h) y = Cast<to=1>(n)"
    values = weights(dtype="bfloat16", g=(64,), h=(64,))
    model = graph(body, values, dtype=dtype, inputs={"a": "2,7,64"}, rank=3)
    assert run(tmp_path, model, "--verify")[0] == 0
    proof = json.loads((tmp_path / "m.patch.json").read_text())["verify"]
    assert proof["passed"] and proof["backend"].startswith("onnxruntime") and len(proof["outputs"]) == 1


def test_a_step_behind_a_bfloat16_site_is_no_fault_of_the_site(tmp_path: Path) -> None:
    """QuantizeLinear amplifies roundings to a step; the sites are judged by the unfused model's own values."""
    body = f"{SITE} q = QuantizeLinear(r, step, zero) y = DequantizeLinear(q, step, zero)"
    model = graph(body, {**VALUES, "step": np.float32(0.5), "zero": np.int8(0)})
    assert run(tmp_path, model, "--dtype", "bf16", "--verify")[0] == 0
    proof = json.loads((tmp_path / "m.patch.json").read_text())["verify"]
    assert proof["passed"] and max(r["max_rel_error"] for r in proof["end_to_end"]) > 0.06


def test_a_rounding_in_front_of_a_site_is_no_fault_of_the_site(tmp_path: Path) -> None:
    """ONNX Runtime leaves out the float16 rounding of a node whose result is cast up next, as a body does first."""
    values = {**weights(dtype="float16", g=(64,), h=(64,)), "small": np.float16(0.05)}
    body = "s = Mul(a, small) v = Sigmoid(s) y = LayerNormalization(v, g, h)"
    model = graph(body, values, dtype="float16", inputs={"a": "2,50,64"}, rank=3)
    assert run(tmp_path, model, "--verify")[0] == 0


def test_a_wrong_norm_behind_a_rounding_is_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.operators import row_norm

    values = {**weights(dtype="float16", g=(64,), h=(64,)), "small": np.float16(0.05)}
    body = "s = Mul(a, small) v = Sigmoid(s) y = LayerNormalization(v, g, h)"
    model = graph(body, values, dtype="float16", inputs={"a": "2,50,64"}, rank=3)
    right = row_norm.OPERATOR.function
    monkeypatch.setattr(type(row_norm.OPERATOR), "function", lambda self, *a, **k: _shifted(right(*a, **k)))
    assert run(tmp_path, model, "--verify")[0] == 1


def _shifted(function: onnx.FunctionProto) -> onnx.FunctionProto:
    """A function whose result is doubled."""
    last = function.node[-1]
    name = last.output[0]
    last.output[0] = "before"
    function.node.append(helper.make_node("Add", ["before", "before"], [name]))
    return function
