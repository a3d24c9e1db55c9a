"""Sentences say what is so: of bodies, training, dead branches, paths that begin like options, one of a thing."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import bn_weights, fused_types, graph, run_patch, weights
from onnx import TensorProto, helper

from cutefuse.commands import next_step
from cutefuse.commands.unpatch import main as unpatch
from cutefuse.engines.kinds import kind_of

BODY = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w) y = Relu(x)"
VALUES = weights(w=(12, 24, 3, 3))


def test_a_loop_is_not_told_to_be_inlined(tmp_path: Path) -> None:
    model = graph(
        BODY + " z = Loop(n, t, a) <body = l (int64 i, bool k, float[m,8,9,7] s) => (bool o, float[m,8,9,7] r) "
        "{ o = Identity(k) q = Conv(s, v) r = Relu(q) }>",
        VALUES | weights(v=(8, 8, 1, 1)) | {"n": np.int64(2), "t": np.bool_(True)}, outputs=("y", "z"),
    )  # fmt: skip
    result, _ = run_patch(model, tmp_path)
    inside = [s for s in result.report["sites"] if s["status"] == "refused"]
    assert len(inside) == 1 and "Loop" in inside[0]["reason"] and "inline" not in inside[0]["reason"]


def test_a_batch_norm_in_training_mode_is_named_beside_its_conv(tmp_path: Path) -> None:
    body = BODY.replace("y = Relu(x)", "y, m, v = BatchNormalization<training_mode=1>(x, gamma, beta, mean, var)")
    model = graph(body, VALUES | bn_weights())
    result, patched = run_patch(model, tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2"]
    (note,) = result.report["sites"][0]["notes"]
    assert "training mode" in note


def test_a_branch_that_reaches_no_output_is_no_candidate(tmp_path: Path) -> None:
    dead = " d = Concat<axis=1>(b, a) e = Conv(d, w) f = Relu(e) g = Neg(f)"
    result, patched = run_patch(graph(BODY + dead, VALUES), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["summary"]["candidates"] == 1
    alive, patched = run_patch(graph(BODY + dead, VALUES, outputs=("y", "g")), tmp_path)
    assert fused_types(patched) == 2 * ["CuteConcatConv2Relu"] and alive.report["summary"]["candidates"] == 2


def test_a_branch_that_only_a_body_reads_is_alive(tmp_path: Path) -> None:
    body = BODY + (
        " d = Concat<axis=1>(b, a) e = Conv<pads=[1,1,1,1]>(d, w) f = Relu(e) i = Constant<value = bool {1}>() "
        "z = If(i) <then_branch = t () => (float[n,12,9,7] p) { p = Neg(f) }, "
        "else_branch = s () => (float[n,12,9,7] q) { q = Identity(f) }>"
    )
    _, patched = run_patch(graph(body, VALUES, outputs=("y", "z")), tmp_path)
    assert fused_types(patched) == 2 * ["CuteConcatConv2Relu"]


def test_a_path_that_begins_like_an_option_is_written_as_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    next_step.after_patch(Path("-o.cutefuse.onnx"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(" ./-o.cutefuse.onnx" in line and " -o" not in line for line in lines)
    assert next_step.typed("build", Path("m.onnx"), "--dtype", Path("a/-b")).endswith("build m.onnx --dtype a/-b")


def test_one_node_is_no_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_patch(graph(BODY, VALUES), tmp_path)
    assert unpatch([str(tmp_path / "model.cutefuse.onnx")]) == 0
    assert "1 fused node turned" in capsys.readouterr().out


@pytest.mark.parametrize("layer", ["TrainStation", "kTrainStation", "trainStation1"])
def test_a_train_station_is_no_compiled_region(layer: str) -> None:
    assert kind_of(layer, {}, "[trainStation2]") == "noop"
    assert kind_of("myelin", {}, "{ForeignNode[a...b]}") == "foreign"


def test_a_concat_of_thousands_takes_seconds(tmp_path: Path) -> None:
    count, started = 6000, time.process_time()
    names = [f"a{i}" for i in range(count)]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 1, 9, 7]) for n in names]
    nodes = [helper.make_node("Concat", names, ["c"], axis=1), helper.make_node("Conv", ["c", "w"], ["x"]),
             helper.make_node("Relu", ["x"], ["y"])]  # fmt: skip
    stored = [onnx.numpy_helper.from_array(np.ones((8, count, 1, 1), np.float32), "w")]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 9, 7])
    model = helper.make_model(helper.make_graph(nodes, "wide", infos, [out], stored),
                              opset_imports=[helper.make_opsetid("", 17)], ir_version=8)  # fmt: skip
    result, _ = run_patch(model, tmp_path, dry_run=True)
    assert time.process_time() - started < 10
    assert len(result.report["sites"]) == 1
