"""Weights beyond float16: their nodes stay in float32 and are named; bounds and masks are written as before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import bn_weights, graph, weights
from onnx import TensorProto, numpy_helper

from cutefuse.commands.patch import main
from cutefuse.rewrite.overflow import Overflow, overflows
from cutefuse.rewrite.retype import to_float16

CONV = "c = Concat<axis=1>(a, b) x = Conv(c, w, k) "
BN = CONV + "n = BatchNormalization(x, gamma, beta, mean, var) y = Relu(n)"
PLAIN = weights(w=(12, 24, 3, 3), k=(12,)) | bn_weights()
TALL = PLAIN | {"var": np.full(12, 9.8e7, np.float32), "gamma": np.full(12, 1e4, np.float32)}


def run(folder: Path, model: onnx.ModelProto, *options: str, code: int = 0) -> tuple[dict, onnx.ModelProto]:
    onnx.save(model, str(folder / "m.onnx"))
    assert main([str(folder / "m.onnx"), "--all", "--dtype", "fp16", *options]) == code
    path = folder / "m.cutefuse.onnx"
    return json.loads((folder / "m.patch.json").read_text())["conversion"], onnx.load(str(path))


def as_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with its weights as Constant nodes, as Paddle2ONNX writes them."""
    for tensor in reversed(list(model.graph.initializer)):
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[:]
    return model


@pytest.mark.parametrize("stored", ["initializers", "constants", "nameless"])
def test_a_node_whose_weight_overflows_is_named_and_stays_exact(
    stored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = graph(BN, TALL)
    if stored == "constants":
        model = as_constants(model)
    if stored == "nameless":
        for node in model.graph.node:
            node.ClearField("name")
    name = "n" if stored == "nameless" else "BatchNormalization_2"
    conversion, _ = run(tmp_path, model, "--verify")
    assert conversion["overflows"] == [{"node": name, "tensor": "var", "value": pytest.approx(9.8e7)}]
    assert name in conversion["kept_float32"]
    out = capsys.readouterr().out
    assert f"float16 ends at 65504, so {name} ('var' holds 9.8e+07) stays in float32" in out
    report = json.loads((tmp_path / "m.patch.json").read_text())["verify"]
    assert report["passed"] and max(c["max_rel_error"] for c in report["conversion"]) < 5e-3


def test_a_dry_run_names_it_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(graph(BN, TALL), str(tmp_path / "m.onnx"))
    main([str(tmp_path / "m.onnx"), "--all", "--dtype", "fp16", "--dry-run"])
    assert "('var' holds 9.8e+07) stays in float32" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_a_site_whose_filter_overflows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = PLAIN | {"w": PLAIN["w"] * np.float32(1e6)}
    onnx.save(graph(CONV + "y = Relu(x)", large), str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--all", "--dtype", "fp16", "--scope", "sites", "--dry-run"]) == 0
    assert "so Conv_1 ('w' holds " in capsys.readouterr().out
    assert main([str(tmp_path / "m.onnx"), "--all", "--dtype", "bf16", "--dry-run"]) == 0
    assert "stays in float32" not in capsys.readouterr().out


def test_many_are_named_by_the_first_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = CONV + "q0 = Mul(x, v) q1 = Mul(q0, v) q2 = Mul(q1, v) q3 = Mul(q2, v) y = Relu(q3)"
    onnx.save(graph(body, PLAIN | {"v": np.float32(-1e6)}), str(tmp_path / "m.onnx"))
    main([str(tmp_path / "m.onnx"), "--all", "--dtype", "fp16", "--dry-run"])
    assert "Mul_4 ('v' holds -1e+06) and 1 more stay in float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    "body, extra",
    [
        ("y = Relu(x)", {}),
        ("y = Mul(x, v)", {"v": np.float32(65504)}),
        ("y = Clip(x, v, u)", {"v": np.float32(-3.4e38), "u": np.float32(3.4e38)}),
        ("y = Add(x, v)", {"v": np.float32(-3.4e38)}),  # a mask before Softmax
        ("y = Mul(x, v)", {"v": np.float32(np.inf)}),
        ("y = Mul(x, v)", {"v": np.float32(np.nan)}),
        ("q = Greater(x, v) y = Where(q, u, x)", {"v": np.float32(0), "u": np.float32(-1e9)}),
        ("z = Mul(x, e) y = Reshape(z, v)", {"v": np.array([-1, 12, 7, 5]), "e": np.float32(1)}),
    ],
    ids=["plain", "largest", "bounds", "mask", "infinity", "NaN", "where", "integers"],
)
def test_what_float16_can_say_is_no_overflow(body: str, extra: dict[str, np.ndarray]) -> None:
    assert overflows(graph(CONV + body, PLAIN | extra)) == []


def test_the_largest_entry_is_named_with_its_sign() -> None:
    value = np.array([1.0, -2e5, 1e5, np.inf], np.float32).reshape(1, 4, 1, 1).repeat(3, 1)
    model = graph(CONV + "y = Mul(x, v)", PLAIN | {"v": value})
    assert overflows(model) == [Overflow("Mul_2", "v", -2e5)]
    assert overflows(graph(CONV + "y = Add(x, v)", PLAIN | {"v": np.float32(7e4)})) == [Overflow("Add_2", "v", 7e4)]


def test_a_constant_of_a_number_list_is_read(tmp_path: Path) -> None:
    body = "v = Constant<value_floats = [1.0e6]>() i = Constant<value_ints = [1000000]>() f = Cast<to = 1>(i)"
    model = graph(f"{CONV} {body} t = Mul(x, f) y = Mul(t, v)", PLAIN)
    name = model.graph.node[-1].name
    assert to_float16(model, tmp_path, ())[2] == [Overflow(name, "v", 1e6)]


def test_other_weights_are_lowered_all_the_same(tmp_path: Path) -> None:
    _, patched = run(tmp_path, graph(BN, TALL))
    kinds = {t.name: t.data_type for t in patched.graph.initializer}
    assert kinds["var"] == TensorProto.FLOAT and kinds.get("w", TensorProto.FLOAT16) == TensorProto.FLOAT16
    assert numpy_helper.to_array(next(t for t in patched.graph.initializer if t.name == "var")).max() > 9e7
