"""Models that cannot be patched, or not be proven: one sentence, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import TWO, graph
from onnx import TensorProto, helper

from cutefuse.commands.patch import main

ROOT = Path(__file__).parent.parent


def broken(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "broken.onnx"
    whole = graph(TWO, outputs=("y1", "y2")).SerializeToString()
    model = onnx.load_from_string(whole)
    if kind == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "text":
        path.write_text("this is no model")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "twice":
        model.graph.node[3].output[0] = "c"
    elif kind == "cycle":
        model.graph.node[0].input[0] = "y1"
    elif kind == "cycle of one":
        model.graph.node[0].input[0] = model.graph.node[0].output[0]
    elif kind == "cycle through a body":
        body = helper.make_graph(
            [helper.make_node("Identity", ["y1"], ["inner"])], "body", [],
            [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
        )  # fmt: skip
        either = helper.make_node("If", ["truth"], ["again"], name="if", then_branch=body, else_branch=body)
        model.graph.initializer.append(helper.make_tensor("truth", TensorProto.BOOL, [], [True]))
        model.graph.node[0].input[0] = "again"
        model.graph.node.insert(0, either)
    elif kind == "short weights":
        model.graph.initializer[0].raw_data = b"1234"
    elif kind == "weights elsewhere":
        t = model.graph.initializer[0]
        t.ClearField("raw_data")
        t.data_location = TensorProto.EXTERNAL
        t.external_data.add(key="location", value="../missing.bin")
    if kind in ("twice", "short weights", "weights elsewhere") or kind.startswith("cycle"):
        path.write_bytes(model.SerializeToString())
    return path


BROKEN = {
    "missing": "does not exist; give an ONNX file",
    "folder": "is a folder",
    "cut": "is not an ONNX model or is truncated|cannot be read",
    "text": "is not an ONNX model",
    "empty": "no ONNX graph|is not an ONNX model",
    "twice": "tensor 'c' is defined twice",
    "cycle": "cycle through node",
    "cycle of one": "cycle through node",
    "cycle through a body": "cycle through node",
    "short weights": "data of tensor 'w' cannot be read",
    "weights elsewhere": "data of tensor 'w'",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_model_is_one_sentence_and_exit_code_2(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    path = broken(tmp_path, kind)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert main([str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(BROKEN[kind], err), err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_an_original_that_cannot_run_is_proven_site_by_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = graph(TWO, outputs=("y1", "y2"))
    model.graph.node.append(helper.make_node("Custom", ["y1"], ["z"], domain="org.some"))
    model.opset_import.append(helper.make_opsetid("org.some", 1))
    model.graph.output.append(helper.make_tensor_value_info("z", 1, [None] * 4))
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--all", "--verify"]) == 0
    told = capsys.readouterr().out
    assert "no output was compared" in told and "site by site" in told
    assert main([str(tmp_path / "m.onnx"), "--all"]) == 0, "custom operators elsewhere do not hinder patching"
