"""Copies in reports and comparisons: their number, their bytes and their reasons, with times and without."""

from __future__ import annotations

import json
from pathlib import Path

import engine_files as ef
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_rtx_log import BLOCKED, NCHW, line, log_of, tensor

from cutefuse.engines.layers import moved
from cutefuse.engines.tensorrt.rtx_log import layer_information
from cutefuse.errors import CutefuseError
from cutefuse.report.analyse.compare import compare
from cutefuse.report.analyse.rank import candidates
from cutefuse.report.read.moves import moves
from cutefuse.report.read.reader import Engine, find_engines, read_engine
from cutefuse.report.write import write, write_compare

X, SMALL = "1,16,8,8", 2 * 16 * 64  # a tensor and its bytes
PLAIN = log_of(
    line("__myl_Tran_myl0_0", "kgen", [tensor("x", X, NCHW)], [tensor("t0", X)]),
    line("/a/Conv_myl0_1", "correlation", [tensor("t0", X)], [tensor("t1", X)], "[ONNX Layer: /a/Conv]"),
    line("/b/Conv_myl0_2", "correlation", [tensor("t0", X)], [tensor("t2", X)], "[ONNX Layer: /b/Conv]"),
    line("__myl_Conc_myl0_3", "runtime_function", [tensor("t1", X), tensor("t2", X)], [tensor("t3", "1,32,8,8")],
         "[ONNX Layer: /Concat]"),
    line("/c/Conv_myl0_4", "correlation", [tensor("t3", "1,32,8,8")], [tensor("y", X)], "[ONNX Layer: /c/Conv]"),
)  # fmt: skip
PATCHED = log_of(
    line("__myl_Tran_myl0_0", "kgen", [tensor("x", X, NCHW)], [tensor("t0", X)]),
    line("/a/Conv_myl0_1", "correlation", [tensor("t0", X)], [tensor("t1", X)], "[ONNX Layer: /a/Conv]"),
    line("__myl_Move_myl0_2", "kgen", [tensor("t1", X)], [tensor("p1", X, BLOCKED)]),
    line("__myl_Move_myl0_3", "kgen", [tensor("t1", X)], [tensor("p2", X)]),
    line("/c/Conv_myl0_4", "custom_layer", [tensor("p1", X, BLOCKED), tensor("p2", X)], [tensor("y", X)],
         "[ONNX Layer: /c/Conv]"),
)  # fmt: skip


def store(folder: Path, log: str, name: str = "m.onnx") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.engine.graph.json").write_text(json.dumps(layer_information(log)))
    (folder / f"{name}.engine.build.metadata.json").write_text(json.dumps({"backend": "rtx", "build_options": {}}))
    return folder


def engine_of(folder: Path, log: str) -> Engine:
    return read_engine(find_engines(store(folder, log))[0])


def test_each_copy_has_its_bytes_and_its_reason(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, PLAIN)
    joined, turned = moves(engine)
    assert (joined.origin, joined.size_bytes) == ("concat", 4 * SMALL)
    assert "2 tensors" in joined.reason and "/a/Conv" in joined.reason and "for convolution /c/Conv" in joined.reason
    assert (turned.origin, turned.size_bytes) == ("shuffle", 2 * SMALL)
    assert "linear becomes HWC from input x" in turned.reason and "/a/Conv, convolution /b/Conv" in turned.reason
    sums = moved(engine.layers)
    assert (sums.copies, sums.copy_bytes, sums.all_bytes) == (2, 6 * SMALL, 6 * SMALL + 7 * SMALL)


def test_a_copy_onto_the_same_and_one_for_a_plugin_are_told_apart(tmp_path: Path) -> None:
    reasons = [move.reason for move in moves(engine_of(tmp_path, PATCHED))]
    assert any("HWC becomes blocked HWC" in r and "for plugin /c/Conv" in r for r in reasons)
    assert any("the same again in HWC" in r for r in reasons)


def test_what_a_kernel_computes_on_the_way_is_said(tmp_path: Path) -> None:
    log = PLAIN.replace("__myl_Conc_myl0_3", "__myl_ConcMulAddRelu_myl0_3")
    assert "Mul, Add, Relu" in moves(engine_of(tmp_path, log))[0].reason


@pytest.mark.parametrize("kind", ["NoOp", "Signal"])
def test_what_moves_nothing_counts_nothing(tmp_path: Path, kind: str) -> None:
    (tmp_path / "g.graph.json").write_text(
        json.dumps({"Layers": [{"Name": "view", "LayerType": kind, "Inputs": [], "Outputs": []}]})
    )
    sums = moved(read_engine(find_engines(tmp_path)[0]).layers)
    assert (sums.copies, sums.copy_bytes, sums.all_bytes) == (0, 0, 0)


def test_the_page_of_an_engine_without_times_shows_copies_kinds_and_formats(tmp_path: Path) -> None:
    page = write(store(tmp_path, PLAIN), tmp_path, quiet=True).read_text()
    assert 'id="traffic"' in page and 'id="copies"' in page and 'id="time"' not in page
    assert "FP16 HWC (5)" in page and "convolutions (3)" in page and "2 tensors side by side" in page
    report = json.loads((tmp_path / "m.onnx.engine.report.json").read_text())
    assert (report["copies"], report["copy_bytes"], len(report["moves"])) == (2, 6 * SMALL, 2)
    assert [f["severity"] for f in report["findings"] if "copies move" in f["title"]] == ["high"]


def test_compare_says_what_copies_came_and_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = store(tmp_path / "plain", PLAIN), store(tmp_path / "patched", PATCHED)
    write_compare([before, after], page := tmp_path / "c.html")
    assert "copies: 2 → 3 (+1)" in capsys.readouterr().out
    assert 'id="moved"' in page.read_text() and 'href="#aligned"' not in page.read_text()
    data = json.loads(page.with_suffix(".json").read_text())
    assert data["copies"] == [2, 3] and data["copy_bytes"] == [6 * SMALL, 6 * SMALL]
    rows = sorted((row["copies"], row["copy_bytes"]) for row in data["rows"] if any(row["copies"]))
    assert rows == [([0, 2], [0, 4 * SMALL]), ([1, 0], [4 * SMALL, 0])]  # of the plugin and of the Concat


def test_the_same_engine_twice_has_no_rows(tmp_path: Path) -> None:
    pair = [engine_of(tmp_path / name, PLAIN) for name in ("a", "b")]
    found = compare(pair)
    assert found.rows == [] and "2 → 2 (+0)" in found.copies_text


def test_engines_of_classic_tensorrt_say_it_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = ef.write_pair(tmp_path)
    part, image = 64 * 64 * 64 * 2, 8 * 64 * 64  # bytes of a source of the Concat, elements of the input
    assert moved(read_engine(find_engines(before)[0]).layers).copy_bytes == 2 * 2 * part + image * (4 + 2)
    write_compare([before, after], page := tmp_path / "c.html")
    assert "copies: 3 → 1 (-2)" in capsys.readouterr().out and 'id="kinds"' in page.read_text()


def test_an_engine_with_times_and_one_without_are_not_compared(tmp_path: Path) -> None:
    timed, _ = ef.write_pair(tmp_path)
    with pytest.raises(CutefuseError, match="holds no layer times"):
        write_compare([timed, store(tmp_path / "untimed", PLAIN)], tmp_path / "c.html")


def test_a_copy_into_a_tensor_that_others_write_as_well_is_a_concatenation(tmp_path: Path) -> None:
    log = log_of(
        line("/a/Conv_myl0_0", "correlation", [tensor("x", X)], [tensor("cat.1_myl0", X)], "[ONNX Layer: /a/Conv]"),
        line("__myl_Move_myl0_1", "kgen", [tensor("x", X)], [tensor("cat.1_myl0", X)]),
        line("/c/Conv_myl0_2", "correlation", [tensor("cat.1_myl0", "1,32,8,8")], [tensor("y", X)]),
    )  # fmt: skip
    (move,) = moves(engine_of(tmp_path, log))
    assert move.origin == "concat" and "joint tensor" in move.reason and "/c/Conv" in move.reason


@pytest.mark.parametrize("written", ["cat.1_myl0", "other.1_myl0"])
def test_rank_finds_the_copies_of_a_concat_in_myelins_layers(tmp_path: Path, written: str) -> None:
    """The pool's output is copied into the tensor that the Conv reads; the profile gives that copy 20 us."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="/a"),
        helper.make_node("MaxPool", ["x"], ["b"], name="/pool", kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("Concat", ["a", "b"], ["cat"], name="/Concat", axis=1),
        helper.make_node("Conv", ["cat", "w"], ["c"], name="/c/Conv", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["y"], name="/c/Relu"),
    ]
    info = helper.make_tensor_value_info
    weights = [numpy_helper.from_array(random.standard_normal((16, 32, 3, 3)).astype("f2"), "w")]
    inputs, outputs = ([info(name, TensorProto.FLOAT16, [1, 16, 8, 8])] for name in ("x", "y"))
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, weights), opset_imports=[helper.make_opsetid("", 17)]
    )
    onnx.save(model, tmp_path / "m.onnx")
    log = log_of(
        line("__myl_Relu_myl0_0", "kgen", [tensor("x", X)], [tensor("cat.1_myl0", X)], "[ONNX Layer: /a]"),
        line("/pool_myl0_1", "maxpool", [tensor("x", X)], [tensor("t", X)], "[ONNX Layer: /pool]"),
        line("__myl_Move_myl0_2", "kgen", [tensor("t", X)], [tensor(written, X)]),
        line("/c/Conv_myl0_3", "correlation", [tensor("cat.1_myl0", "1,32,8,8")], [tensor("y", X)],
             "[ONNX Layer: /c/Conv][ONNX Layer: /c/Relu]"),
    )  # fmt: skip
    layers = layer_information(log)["Layers"]
    ef.write_engine(tmp_path, "m.onnx", layers, [5.0, 6.0, 20.0, 30.0], 0.07)
    (found,) = candidates(read_engine(find_engines(tmp_path)[0]), tmp_path / "m.onnx", None)
    assert found.copy_us == (20.0 if written.startswith("cat") else 0.0)
