"""`cutefuse accuracy` on ONNX models: Polygraphy with ONNX Runtime on both sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cutefuse.commands import accuracy

pytest.importorskip("polygraphy")


def scaled(path: Path, factor: float) -> Path:
    """A model y = factor * x over a dynamic number of rows."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", 4]) for n in "xy")
    weight = numpy_helper.from_array(np.float32([factor]), "factor")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "factor"], ["y"])], "scaled", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.slow
def test_equal_models_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [str(scaled(tmp_path / f"{i}.onnx", 2.0)) for i in range(2)]
    assert accuracy.main([*models, "--shapes", "x:3x4"]) == 0
    out, err = capsys.readouterr()
    assert "agree within" in out and "deprecated" not in (out + err).lower()


@pytest.mark.slow
def test_models_that_differ_exit_with_1(tmp_path: Path) -> None:
    assert accuracy.main([str(scaled(tmp_path / "a.onnx", 2.0)), str(scaled(tmp_path / "b.onnx", 2.2))]) == 1


@pytest.mark.parametrize(
    "arguments", [["missing.onnx"], ["broken.onnx"], ["--shapes", "x:3by4"], ["--shapes", "z:3x4"]]
)
def test_bad_input_is_one_sentence(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(scaled(tmp_path / "a.onnx", 1.0))
    (tmp_path / "broken.onnx").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    paths = [arguments[0], model] if arguments[0].endswith(".onnx") else [model, model]
    assert accuracy.main([*paths, *(a for a in arguments if not a.endswith(".onnx"))]) == 2
    assert capsys.readouterr().err.count("error:") == 1


def test_an_engine_without_tensorrt_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = tmp_path / "model.engine"
    engine.write_bytes(b"engine")
    assert accuracy.main([str(engine), str(scaled(tmp_path / "a.onnx", 1.0))]) == 2
    assert "pip install tensorrt" in capsys.readouterr().err
