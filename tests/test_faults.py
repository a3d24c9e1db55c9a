"""Reported faults of TensorRT: which versions, which nodes of a model, and what `doctor` says of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph

import models
from cutefuse.commands import doctor
from cutefuse.graph import faults
from cutefuse.graph.faults import FAULTS

SHORTCUT, SAMPLES = FAULTS


def block(body: str, dtype: type = np.float16) -> onnx.ModelProto:
    """A C2f block by default: halves of a tensor, a bottleneck with its shortcut on one, all joined again."""
    w = np.ones((8, 8, 3, 3), np.float32)
    model = graph(body, {"w": w, "half": np.array([8, 8])}, inputs={"a": "1,16,9,7"}, outputs=("y",))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = next(t for t in model.graph.initializer if t.name == "w")
    weight.CopyFrom(onnx.numpy_helper.from_array(w.astype(dtype), "w"))
    return model


C2F = """h, x = Split<axis=1>(a, half) c = Conv<pads=[1,1,1,1]>(x, w) s = Sigmoid(c) m = Mul(c, s) r = Add(x, m)
         y = Concat<axis=1>(h, x, r)"""


def test_the_shortcut_of_a_c2f_block_is_found() -> None:
    (name,) = faults._shortcuts_over_views(block(C2F))
    assert name


@pytest.mark.parametrize(
    "body",
    [
        C2F.replace("Add(x, m)", "Add(m, x)"),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", "s = Sigmoid(c) m = Mul(s, c)"),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", "m = Relu(c)"),
    ],
    ids=["other order", "other product", "relu"],
)
def test_it_is_found_in_every_order(body: str) -> None:
    assert len(faults._shortcuts_over_views(block(body))) == 1


@pytest.mark.parametrize(
    "body",
    [
        C2F.replace("Concat<axis=1>(h, x, r)", "Concat<axis=1>(h, r)"),  # nothing else reads the operand
        C2F.replace("Add(x, m)", "Mul(x, m)"),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", "m = Identity(c)"),
        C2F.replace("c = Conv<pads=[1,1,1,1]>(x, w)", "c = Identity(x)"),
        C2F.replace("Mul(c, s)", "Mul(x, s)"),
    ],
    ids=["no view", "no add", "no activation", "no conv", "another factor"],
)
def test_what_differs_is_not_named(body: str) -> None:
    assert faults._shortcuts_over_views(block(body)) == []


def test_float32_is_not_named() -> None:
    assert faults._shortcuts_over_views(block(C2F, np.float32)) == []
    assert faults._shortcuts_over_views(models.build("yolov8n", "float32", small=True)) == []


def test_a_yolo_meets_it_at_every_bottleneck_until_patch_fuses_them(tmp_path: Path) -> None:
    from cutefuse.cli import main

    path = tmp_path / "yolo.onnx"
    onnx.save(models.build("yolov8n", "float16", small=True), str(path))
    assert len(faults._shortcuts_over_views(onnx.load(str(path)))) == 6
    assert main(["patch", str(path), "--all", "--sm", "89"]) == 0
    assert faults._shortcuts_over_views(onnx.load(str(tmp_path / "yolo.cutefuse.onnx"))) == []


def test_grid_samples_are_named() -> None:
    node = onnx.helper.make_node("GridSample", ["x", "g"], ["y"], name="/sample")
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], []))
    assert SAMPLES.nodes(model) == ["/sample"] and SAMPLES.nodes(block(C2F)) == []


@pytest.mark.parametrize(
    ("version", "found"),
    [((10, 3), []), ((10, 14), [SAMPLES]), ((11, 1), [SAMPLES]), ((11, 2), [SHORTCUT, SAMPLES]),
     ((11, 2, 1), [SHORTCUT, SAMPLES]), ((12, 0), [SHORTCUT, SAMPLES])],
)  # fmt: skip
def test_faults_are_those_of_the_version(version: tuple[int, ...], found: list[faults.Fault]) -> None:
    assert faults.known(version) == found


def test_a_mended_fault_ends_with_its_version() -> None:
    mended = faults.Fault("t", "s", (11, 2), (11, 3), "a", lambda _: [])
    assert [mended.concerns(v) for v in ((11, 1), (11, 2), (11, 3, 5), (11, 4))] == [False, True, True, False]
    assert mended.versions == "11.2 to 11.3" and SHORTCUT.versions == "11.2 and newer"


def test_doctor_names_the_faults_of_the_installed_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [f.name for f in doctor.check_faults(None, [(11, 2)])] == ["TensorRT fault"] * 2
    assert doctor.check_faults(None, [(10, 3)]) == [] and doctor.check_faults(None, []) == []


def test_doctor_names_the_nodes_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(models.build("yolov8n", "float16", small=True), str(path))
    (found,) = doctor.check_faults(path, [])
    assert "/model.2/m.0/Add, /model.4/m.0/Add, /model.4/m.1/Add and 3 more" in found.text
    assert found.status == doctor.WARNING and "issues/4854" in found.text and "cutefuse accuracy" in found.advice
    assert doctor.check_faults(path, [(11, 2)]) == [found] and doctor.check_faults(path, [(11, 1)]) == []


def test_a_warning_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(block(C2F), str(path))
    without = doctor.main(["--json"])
    capsys.readouterr()
    assert doctor.main([str(path), "--json"]) == without
    assert "warning" in [f["status"] for f in json.loads(capsys.readouterr().out)]
    assert doctor.main([str(tmp_path / "none.onnx")]) == 2
