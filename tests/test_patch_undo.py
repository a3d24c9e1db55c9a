"""`cutefuse unpatch` and `cutefuse diff`: the way back, and what changed in between."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import FILTER, bn_weights, graph, run_patch, weights
from onnx import numpy_helper

from cutefuse import cli
from cutefuse.graph.verify import verify
from cutefuse.rewrite.unpatch import unpatch

TWO = (
    "c = Concat<axis=1>(a, b) x1 = Conv<pads=[1,1,1,1]>(c, w, k) y1 = LeakyRelu(x1) "
    "d = Concat<axis=1>(b, a) x2 = Conv<strides=[2,2]>(d, w) g = Sigmoid(x2) y2 = Mul(x2, g)"
)


AROUND = {
    "enlarged": ("u = Resize(a, , s) c = Concat<axis=1>(u, b) x = Conv(c, w) y = Relu(x)",
                 ["Resize", "Concat", "Conv", "Relu"]),
    "a range": ("p, q = Split<axis=1>(b, z) u = Resize(a, , s) c = Concat<axis=1>(u, q) x = Conv(c, v) y = Relu(x)",
                ["Resize", "Slice", "Concat", "Conv", "Relu"]),
    "a residual": ("u = Resize(a, , s) c = Concat<axis=1>(u, b) x = Conv(c, w3) t = Add(x, e) y = Tanh(t)",
                   ["Resize", "Concat", "Conv", "Add", "Tanh"]),
    "side by side": ("c = Concat<axis=1>(e, b) p = Conv(c, w3) r = Relu(p) q = Conv(c, w3) t = Relu(q) y = Sub(r, t)",
                     ["Concat", "Conv", "Conv", "Relu", "Relu", "Sub"]),
}  # fmt: skip


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("name", AROUND)
def test_what_a_site_took_in_comes_back_and_nothing_that_changes_nothing(name: str, opset: int, tmp_path: Path) -> None:
    body, ops = AROUND[name]
    sizes = {"s": np.float32([1, 1, 2, 2]), "z": np.int64([8, 8])}
    values = weights(w=(8, 24, 3, 3), w3=(8, 24, 1, 1), v=(8, 16, 3, 3)) | sizes
    inputs = {"a": "n,8,4,3", "b": "n,16,8,6", "e": "n,8,8,6"}
    onnx.save(graph(body, values, opset=opset, inputs=inputs), str(tmp_path / "m.onnx"))
    assert cli.main(["patch", str(tmp_path / "m.onnx"), "--all", "--verify"]) == 0
    assert unpatch(tmp_path / "m.cutefuse.onnx", tmp_path / "plain.onnx") == 1
    plain = onnx.load(str(tmp_path / "plain.onnx"))
    assert sorted(n.op_type for n in plain.graph.node) == sorted(ops)
    assert verify(tmp_path / "m.onnx", plain, tmp_path, 1e-5, {})["passed"]
    read = {name for n in plain.graph.node for name in n.input}
    assert {t.name for t in plain.graph.initializer} - read <= {*values}, "what was superfluous before, nothing new"


@pytest.mark.parametrize("dtype, opset", [("float32", 17), ("float16", 17), ("float16", 20), ("bfloat16", 17)])
@pytest.mark.parametrize("body", ["y = LayerNormalization<axis=-1>(a, g, h)",
                                  "s = Add(a, b) n = LayerNormalization<axis=-1>(s, g, h) y = Add(n, s)"])  # fmt: skip
def test_a_layer_norm_comes_back_as_one_operator(body: str, dtype: str, opset: int, tmp_path: Path) -> None:
    """Written in steps, with Casts around them, it would copy more than the model that it is compared for."""
    model = graph(body, weights(dtype=dtype, g=(64,), h=(64,)), opset=opset, dtype=dtype, rank=3,
                  inputs={"a": "1,9,64", "b": "1,9,64"})  # fmt: skip
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert cli.main(["patch", str(tmp_path / "m.onnx"), "--all"]) == 0
    assert unpatch(tmp_path / "m.cutefuse.onnx", tmp_path / "plain.onnx") == 1
    plain = onnx.load(str(tmp_path / "plain.onnx"))
    ops = [n.op_type for n in plain.graph.node if dtype != "bfloat16" or not n.op_type.startswith("Cast")]
    assert ops == [n.op_type for n in model.graph.node]
    if dtype != "bfloat16":
        assert verify(tmp_path / "m.onnx", plain, tmp_path, 1e-5, {})["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("functions", [[], ["--no-functions"]])
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 21])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_unpatching_gives_the_standard_operators_and_filters_back(
    opset: int, dtype: str, functions: list[str], tmp_path: Path
) -> None:
    model = graph(TWO, weights(dtype=dtype, w=FILTER, k=(12,)), opset=opset, dtype=dtype, outputs=("y1", "y2"))
    source = tmp_path / "m.onnx"
    onnx.save(model, str(source))
    assert cli.main(["patch", str(source), "--all", *functions]) == 0
    assert cli.main(["unpatch", str(tmp_path / "m.cutefuse.onnx")]) == 0
    plain = onnx.load(str(tmp_path / "m.plain.onnx"))
    onnx.checker.check_model(plain, full_check=True)
    assert [n.op_type for n in plain.graph.node] == [n.op_type for n in model.graph.node]
    assert {n.name for n in plain.graph.node if n.op_type == "Conv"} == {"Conv_1", "Conv_4"}
    assert not plain.functions and {o.domain for o in plain.opset_import} == {""} and not plain.metadata_props
    stored = {t.name: numpy_helper.to_array(t) for t in plain.graph.initializer}
    original = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert np.array_equal(stored["Conv_1.weight"], original["w"])
    assert np.array_equal(stored["Conv_1.bias"], original["k"])
    assert verify(source, plain, tmp_path, 1e-3 if dtype == "float16" else 1e-6, {})["passed"]


def test_a_folded_batch_norm_stays_folded(tmp_path: Path) -> None:
    body = "c = Concat<axis=1>(a, b) x = Conv(c, w, k) z = BatchNormalization(x, gamma, beta, mean, var) y = Relu(z)"
    onnx.save(graph(body, weights(w=FILTER, k=(12,)) | bn_weights()), str(tmp_path / "m.onnx"))
    assert cli.main(["patch", str(tmp_path / "m.onnx"), "--all"]) == 0
    assert unpatch(tmp_path / "m.cutefuse.onnx", tmp_path / "p.onnx") == 1
    plain = onnx.load(str(tmp_path / "p.onnx"))
    assert [n.op_type for n in plain.graph.node] == ["Concat", "Conv", "Relu"]
    assert verify(tmp_path / "m.onnx", plain, tmp_path, 1e-5, {})["passed"]


def test_other_functions_and_nodes_are_not_inlined(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "mine": 1]>
    test (float[n,8,9,7] a, float[n,16,9,7] b) => (float[n,12,p,q] y)
    { c = Concat<axis=1>(a, b) x = Conv(c, w) y = mine.twice(x) }
    <domain: "mine", opset_import: ["": 17]> twice (x) => (y) { y = Add(x, x) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(weights(w=FILTER)["w"], "w"))
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert cli.main(["patch", str(tmp_path / "m.onnx"), "--all", "--verify"]) == 0
    assert cli.main(["unpatch", str(tmp_path / "m.cutefuse.onnx")]) == 0
    plain = onnx.load(str(tmp_path / "m.plain.onnx"))
    assert [f.name for f in plain.functions] == ["twice"]
    assert [n.op_type for n in plain.graph.node] == ["Concat", "Conv", "twice"]


def test_a_model_without_fused_nodes_is_nothing_to_undo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(graph(TWO, outputs=("y1", "y2")), str(tmp_path / "m.onnx"))
    assert cli.main(["unpatch", str(tmp_path / "m.onnx")]) == 3
    assert "holds no fused node" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_a_fused_node_of_an_unknown_kind_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(graph(TWO, outputs=("y1", "y2")), str(tmp_path / "m.onnx"))
    assert cli.main(["patch", str(tmp_path / "m.onnx"), "--all", "--no-functions"]) == 0
    model = onnx.load(str(tmp_path / "m.cutefuse.onnx"))
    model.graph.node[0].op_type = "CuteFuture"
    onnx.save(model, str(tmp_path / "f.onnx"))
    assert cli.main(["unpatch", str(tmp_path / "f.onnx")]) == 2
    assert "CuteFuture is not in the library" in capsys.readouterr().err
    assert not (tmp_path / "f.plain.onnx").exists()


@pytest.mark.parametrize(("argument", "reason"), [("missing.onnx", "does not exist"), (".", "is a folder")])
def test_inputs_that_are_no_models_are_one_sentence(argument: str, reason: str, tmp_path: Path, capsys) -> None:
    assert cli.main(["unpatch", str(tmp_path / argument)]) == 2
    assert cli.main(["diff", str(tmp_path / argument), str(tmp_path / argument)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"error: {tmp_path / argument} {reason}; give an ONNX file"] * 2


def test_diff_names_what_patching_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(graph(TWO, outputs=("y1", "y2")), str(source))
    assert cli.main(["patch", str(source), "--all", "--exclude", "Conv_4"]) == 0
    capsys.readouterr()
    assert cli.main(["diff", str(source), str(tmp_path / "m.cutefuse.onnx"), "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)
    assert {c["name"]: (c["before"], c["after"]) for c in changes["ops"]} == {
        "Concat": (2, 1), "Conv": (2, 1), "LeakyRelu": (1, None), "CuteConcatConv2LeakyRelu": (None, 1),
    }  # fmt: skip
    assert [c["name"] for c in changes["nodes"]] == ["c", "x1", "y1"]
    assert "[cutefuse: Concat_0, Conv_1, LeakyRelu_2]" in changes["nodes"][2]["after"]
    assert changes["inputs"] == changes["outputs"] == []
    assert {c["name"] for c in changes["initializers"]} == {"k", "Conv_1.packed_weight", "Conv_1.bias"}
    assert cli.main(["diff", str(source), str(tmp_path / "m.cutefuse.onnx")]) == 1
    assert "  + Conv_1: cutefuse.CuteConcatConv2LeakyRelu(a, b," in capsys.readouterr().out


def test_equal_models_do_not_differ_however_their_weights_are_stored(tmp_path: Path, capsys) -> None:
    model = graph(TWO, outputs=("y1", "y2"))
    onnx.save(model, str(tmp_path / "a.onnx"))
    for t in model.graph.initializer:
        value = numpy_helper.to_array(t)
        t.ClearField("raw_data")
        t.float_data.extend(value.ravel().tolist())
    onnx.save(model, str(tmp_path / "b.onnx"))
    assert cli.main(["diff", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")]) == 0
    assert capsys.readouterr().out == "the models are the same\n"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda m: m.graph.node[1].attribute[0].ints.__setitem__(0, 2), "nodes"),
        (lambda m: m.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros(FILTER, np.float32), "w")),
         "initializers"),
        (lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 11), "inputs"),
        (lambda m: setattr(m, "doc_string", "new"), "header"),
    ],
)  # fmt: skip
def test_every_kind_of_change_is_seen(change, part: str, tmp_path: Path, capsys) -> None:
    model = graph(TWO, outputs=("y1", "y2"))
    onnx.save(model, str(tmp_path / "a.onnx"))
    change(model)
    onnx.save(model, str(tmp_path / "b.onnx"))
    assert cli.main(["diff", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx"), "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)
    assert [k for k, v in changes.items() if v] == [part]


def test_nodes_without_results_are_passed_over(tmp_path: Path) -> None:
    _, patched = run_patch(graph("c = Concat<axis=1>(a, b) x = Conv(c, w, k) y = Relu(x)"), tmp_path)
    assert patched is not None
    patched.graph.node.append(onnx.helper.make_node("Relu", ["a"], []))
    onnx.save(patched, str(tmp_path / "odd.onnx"))
    assert unpatch(tmp_path / "odd.onnx", tmp_path / "plain.onnx") == 1
