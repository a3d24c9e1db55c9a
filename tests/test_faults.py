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
from cutefuse.graph.read import Graph

SHORTCUT, SAMPLES = FAULTS


def block(body: str, dtype: type = np.float16) -> onnx.ModelProto:
    """A C2f block by default: halves of a tensor, a bottleneck with its shortcut on one, all joined again."""
    w = np.ones((8, 8, 3, 3), np.float32)
    f = np.ones((1, 8, 1, 1), np.float32)
    model = graph(body, {"w": w, "f": f, "half": np.array([8, 8])}, inputs={"a": "1,16,9,7"}, outputs=("y",))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for weight in (t for t in model.graph.initializer if t.name in ("w", "f")):
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight).astype(dtype), weight.name))
    return model


def view(model: onnx.ModelProto) -> Graph:
    return Graph(model, Path())


C2F = """h, x = Split<axis=1>(a, half) c = Conv<pads=[1,1,1,1]>(x, w) s = Sigmoid(c) m = Mul(c, s) r = Add(x, m)
         y = Concat<axis=1>(h, x, r)"""


TANH = "p = Mul(c, f) t = Tanh(p) q = Mul(t, f) g = Add(q, f) m = Mul(c, g)"


def test_the_shortcut_of_a_c2f_block_is_found() -> None:
    (name,) = SHORTCUT.nodes(view(block(C2F)))
    assert name


@pytest.mark.parametrize(
    "body",
    [
        C2F.replace("Add(x, m)", "Add(m, x)"),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", "s = Sigmoid(c) m = Mul(s, c)"),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", "m = Relu(c)"),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", TANH),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", "b = Mul(c, f) d = Add(b, f) m = LeakyRelu(d)"),
    ],
    ids=["other order", "other product", "relu", "silu as tanh", "affine steps"],
)
def test_it_is_found_in_every_order(body: str) -> None:
    assert len(SHORTCUT.nodes(view(block(body)))) == 1


@pytest.mark.parametrize(
    "body",
    [
        C2F.replace("Concat<axis=1>(h, x, r)", "Concat<axis=1>(h, r)"),  # nothing else reads the operand
        C2F.replace("Add(x, m)", "Mul(x, m)"),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", "m = Identity(c)"),
        C2F.replace("c = Conv<pads=[1,1,1,1]>(x, w)", "c = Identity(x)"),
        C2F.replace("Mul(c, s)", "Mul(x, s)"),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", "b = Mul(c, f) m = Add(b, f)"),
        C2F.replace("s = Sigmoid(c) m = Mul(c, s)", "s = Conv<pads=[1,1,1,1]>(x, w) t = Relu(s) m = Mul(c, t)"),
        C2F.replace(
            "s = Sigmoid(c) m = Mul(c, s)", " ".join(f"c{i + 1} = Relu(c{i})" for i in range(20)) + " m = Relu(c20)"
        ).replace("c = Conv", "c0 = Conv"),
    ],
    ids=["no view", "no add", "no activation", "no conv", "another factor", "affine alone", "two convs", "too long"],
)
def test_what_differs_is_not_named(body: str) -> None:
    assert SHORTCUT.nodes(view(block(body))) == []


def test_float32_is_not_named() -> None:
    assert SHORTCUT.nodes(view(block(C2F, np.float32))) == []
    assert SHORTCUT.nodes(view(models.build("yolov8n", "float32", small=True))) == []


def test_a_yolo_meets_it_at_every_bottleneck_until_patch_fuses_them(tmp_path: Path) -> None:
    from cutefuse.cli import main

    path = tmp_path / "yolo.onnx"
    onnx.save(models.build("yolov8n", "float16", small=True), str(path))
    assert len(SHORTCUT.nodes(view(onnx.load(str(path))))) == 6
    assert main(["patch", str(path), "--all", "--sm", "89"]) == 0
    assert SHORTCUT.nodes(view(onnx.load(str(tmp_path / "yolo.cutefuse.onnx")))) == []


def test_grid_samples_are_named() -> None:
    node = onnx.helper.make_node("GridSample", ["x", "g"], ["y"], name="/sample")
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], []))
    assert SAMPLES.nodes(view(model)) == ["/sample"] and SAMPLES.nodes(view(block(C2F))) == []


@pytest.mark.parametrize(
    ("version", "found"),
    [((10, 3), []), ((10, 14), [SAMPLES]), ((11, 1), [SAMPLES]), ((11, 2), [SHORTCUT, SAMPLES]),
     ((11, 2, 1), [SHORTCUT, SAMPLES]), ((12, 0), [SHORTCUT, SAMPLES])],
)  # fmt: skip
def test_faults_are_those_of_the_version(version: tuple[int, ...], found: list[faults.Fault]) -> None:
    assert [f for f in faults.FAULTS if f.concerns(version)] == found


def test_a_mended_fault_ends_with_its_version() -> None:
    mended = faults.Fault("t", "s", (11, 2), (11, 3), "a", lambda _: iter(()))
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


def patched(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    from cutefuse.cli import main

    assert main(["patch", str(path), "--dry-run", "--sm", "89", *words]) in (0, 3)
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def yolo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "yolo.onnx"
    onnx.save(models.build("yolov8n", "float16", small=True), str(path))
    return path


def test_patch_says_which_places_stay_and_which_are_fused(yolo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "reported fault" not in patched(yolo, capsys, "--all"), "nothing is left to say"
    said = patched(yolo, capsys, "--all", "--verbose")
    assert "reported fault of TensorRT 11.2 and newer (https://github.com/NVIDIA/TensorRT/issues/4854)" in said
    assert "all 6 are fused" in said and "such nodes stay outside" not in said
    said = patched(yolo, capsys, "--all", "--exclude", "/model.[24]/*")
    assert "3 of 6 such nodes stay outside: /model.2/m.0/Add, /model.4/m.0/Add, /model.4/m.1/Add; compare" in said
    said = patched(yolo, capsys, "--all", "--exclude", "/model.[246]/m.0/*", "--exclude", "*m.1*")
    assert "5 of 6 such nodes stay outside" in said and "/model.4/m.1/Add and 2 more; compare" in said


def test_a_fused_conv_is_enough(yolo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TensorRT joins nothing with a plugin, so an Add that stays behind one is a kernel of its own."""
    said = patched(yolo, capsys, "--all", "--without", "residual", "--verbose")
    assert "all 6 are fused" in said


def test_the_report_holds_them(yolo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(patched(yolo, capsys, "--all", "--json", "--exclude", "/model.2/*"))
    (fault,) = report["known_faults"]
    assert fault["stays"] == ["/model.2/m.0/Add"] and len(fault["fused"]) == 5 and fault["source"] == SHORTCUT.source


@pytest.mark.parametrize(
    "words", [("--trt-version", "11.1"), ("--trt-version", "10.3"), ("--engine", "torch")], ids=" ".join
)
def test_another_engine_has_no_such_fault(yolo: Path, capsys: pytest.CaptureFixture[str], words: tuple[str]) -> None:
    assert "reported fault" not in patched(yolo, capsys, *words)
    assert json.loads(patched(yolo, capsys, "--json", *words))["known_faults"] == []


def test_a_model_without_such_a_place_is_told_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(block(C2F, np.float32), str(tmp_path / "m.onnx"))
    assert "reported fault" not in patched(tmp_path / "m.onnx", capsys)
