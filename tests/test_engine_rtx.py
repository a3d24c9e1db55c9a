"""TensorRT for RTX as a compiler: real builds where its wheels are installed, and what is said where they are not."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import fake_tensorrt
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_engine_api import Clock

from cutefuse.engines import build as engine
from cutefuse.engines.layers import layer_bytes
from cutefuse.engines.tensorrt import api as tensorrt_api
from cutefuse.engines.tensorrt import rtx
from cutefuse.errors import CutefuseError

REASON = rtx.available()
compiles = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def write_model(path: Path, batch: int | str = 1, dtype: int = TensorProto.FLOAT16, op: str = "Relu") -> Path:
    """Two Convs, a pool, a Concat, a Conv and a Transpose: an input in NCHW, a real Concat, an output that is moved."""
    random, kind = np.random.default_rng(0), helper.tensor_dtype_to_np_dtype(dtype)

    def conv(name: str, source: str, out: str, c: int, k: int) -> tuple[onnx.NodeProto, onnx.TensorProto]:
        filters = numpy_helper.from_array((0.1 * random.standard_normal((k, c, 3, 3))).astype(kind), f"{name}.w")
        return helper.make_node("Conv", [source, filters.name], [out], name=name, pads=[1] * 4), filters

    made = [conv("left", "x", "a", 16, 16), conv("right", "x", "b", 16, 24), conv("last", "cat", "c", 40, 8)]
    (left, right, last), weights = [m[0] for m in made], [m[1] for m in made]
    nodes = [
        left, right, helper.make_node(op, ["a"], ["ra"], name="act"),
        helper.make_node("MaxPool", ["b"], ["pb"], name="pool", kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("Concat", ["ra", "pb"], ["cat"], name="concat", axis=1), last,
        helper.make_node("Transpose", ["c"], ["y"], name="turn", perm=[0, 2, 3, 1]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", dtype, [batch, 16, 20, 20])],
        [helper.make_tensor_value_info("y", dtype, [batch, 20, 20, 8])], weights,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@compiles
def test_the_compiled_graph_holds_layers_tensors_nodes_and_what_is_moved(tmp_path: Path) -> None:
    graph = rtx.compile_model(write_model(tmp_path / "m.onnx"))
    assert (graph.inputs, graph.outputs, graph.plugin_layers) == (("x",), ("y",), 0)
    convs = {node for layer in graph.layers if layer.kind == "conv" for node in layer.onnx}
    assert {"left", "right", "last", "act"} <= convs  # the activation is inside of its convolution
    image, concat = 16 * 20 * 20 * 2, 24 * 20 * 20 * 2  # bytes of x, and of what the pool's output is copied from
    moved = [layer_bytes(layer) for layer in graph.copies]
    assert moved == [2 * image, 2 * concat, 2 * 8 * 20 * 20 * 2] and graph.moved.copy_bytes == sum(moved)
    turn = graph.copies[-1]
    assert turn.onnx == ["turn"] and turn.inputs[0].layout == "HWC" and turn.outputs[0].layout == "linear"
    assert (
        graph.moved.all_bytes > graph.moved.copy_bytes
        and graph.engine_bytes > 0
        and graph.peak_mib > 50
        and graph.seconds > 0
    )


@compiles
def test_dynamic_inputs_are_built_for_the_shapes_given_else_for_one(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.onnx", batch="n")
    one, four = rtx.compile_model(model), rtx.compile_model(model, shapes={"x": (4, 16, 20, 20)})
    assert four.moved.copy_bytes == 4 * one.moved.copy_bytes


@compiles
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sm": 90}, ("9.0", "--gpu")),
        ({"shapes": {"z": (1, 1)}}, ("z", "inputs are x")),
        ({"shapes": {"x": (1, 16)}}, ("x", "profile")),
        ({"libraries": [Path("/nowhere/lib.so")]}, ("plugin library", "/nowhere/lib.so")),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(tmp_path: Path, arguments: dict, words: tuple[str, ...]) -> None:
    model = write_model(tmp_path / "m.onnx", batch="n")
    with pytest.raises(CutefuseError) as failure:
        rtx.compile_model(model, **arguments)
    text = str(failure.value)
    assert all(word in text for word in words) and "\n" not in text and "whole log" not in text


@compiles
def test_the_parsers_reasons_are_quoted(tmp_path: Path) -> None:
    with pytest.raises(CutefuseError, match="parser refused m.onnx: .*act") as failure:
        rtx.compile_model(write_model(tmp_path / "m.onnx", op="NoSuchOperator"))
    assert "\n" not in str(failure.value) and str(tmp_path) not in str(failure.value)
    with pytest.raises(CutefuseError, match="does not exist"):
        rtx.compile_model(tmp_path / "none.onnx")


def cli(command: str, *words: str | Path) -> int:
    main = importlib.import_module(f"cutefuse.commands.{command}").main
    return int(main([str(word) for word in words]))


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without trtexec, TensorRT and a GPU."""
    found = importlib.util.find_spec
    monkeypatch.delenv("TRTEXEC", raising=False)
    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in ("tensorrt", "torch") else found(n))
    monkeypatch.setattr(rtx, "local_sm", lambda: 0)
    monkeypatch.setattr(engine, "torch_sees_gpu", lambda: False)


@compiles
def test_process_builds_and_reports_what_cannot_be_timed(
    tmp_path: Path, bare: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "m.onnx")
    assert cli("process", model, tmp_path / "out", "--gpu", "RTX 4090") == 0
    said = capsys.readouterr().out
    assert "compute capability 8.9" in said and "not profiled" in said and "3 copies" in said
    files = {p.name.removeprefix("m.onnx.engine") for p in (tmp_path / "out").iterdir()}
    assert {"", ".graph.json", ".build.log", ".build.metadata.json", ".report.html", ".layers.csv"} <= files
    assert not {".profile.json", ".timing.json"} & files
    report = json.loads((tmp_path / "out" / "m.onnx.engine.report.json").read_text())
    assert (report["backend"], report["copies"]) == ("rtx", 3)
    graph = rtx.compile_model(model)
    assert (report["copy_bytes"], report["all_bytes"]) == (graph.moved.copy_bytes, graph.moved.all_bytes)


@compiles
def test_a_failed_build_leaves_the_earlier_engine(tmp_path: Path, bare: None) -> None:
    out = tmp_path / "out"
    assert cli("build", write_model(tmp_path / "m.onnx"), out) == 0
    before = (out / "m.onnx.engine").read_bytes()
    assert cli("build", write_model(tmp_path / "m.onnx", op="NoSuchOperator"), out) == 2
    assert (out / "m.onnx.engine").read_bytes() == before
    assert sorted(p.suffix for p in out.iterdir() if p.name.startswith(".")) == []


@compiles
def test_a_compiler_that_ends_the_process_ends_only_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "m.onnx")
    abort = tmp_path / "python"
    abort.write_text("#!/bin/sh\necho \"terminate called after throwing 'std::runtime_error'\" >&2\nkill -6 $$\n")
    abort.chmod(0o755)
    monkeypatch.setattr(rtx.sys, "executable", str(abort))
    with pytest.raises(CutefuseError, match="TensorRT for RTX was killed by signal 6: terminate called"):
        rtx.compile_model(model)
    abort.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(CutefuseError, match="without a result"):
        rtx.compile_model(model)
    abort.write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(CutefuseError, match="TensorRT for RTX was stopped after 0.2 s"):
        rtx.compile_model(model, timeout_s=0.2)


@pytest.mark.parametrize(
    ("missing", "word"), [({"tensorrt_rtx_libs"}, "tensorrt_rtx_libs"), ({"tensorrt_rtx_bindings"}, "pip install")]
)
def test_without_the_wheels_every_command_says_so(
    tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    missing: set[str], word: str,
) -> None:  # fmt: skip
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else found(name))
    model = write_model(tmp_path / "m.onnx")
    for command, words in (("build", ()), ("process", (tmp_path / "o",)), ("optimize", ("-o", tmp_path / "o"))):
        assert cli(command, model, *words, "--backend", "rtx") == 2
        assert "not installed" in (said := capsys.readouterr().err) and word in said and said.count("\n") == 1
    with pytest.raises(CutefuseError, match="not installed"):
        rtx.compile_model(model)
    assert engine.choose_backend("auto", allow_onnxruntime=True) == "onnxruntime"


def test_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.platform, "machine", lambda: "aarch64")
    assert "aarch64" in str(rtx.available())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "H100"), "not for 9.0"),
        (("--sm", "90"), "not for 9.0"),
        (("--sm", "75", "--gpu", "RTX 4090"), "give one"),
        (("--gpu", "abacus"), "abacus"),
        (("--fp16",), "strongly typed"),
        (("--sparsity=enable",), "--sparsity"),
    ],
)
@compiles
def test_options_that_cannot_be_met_are_one_sentence(
    tmp_path: Path, bare: None, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert cli("build", write_model(tmp_path / "m.onnx"), tmp_path / "out", "--backend", "rtx", *words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("error:") == 1 and "Traceback" not in error
    assert not (tmp_path / "out" / "m.onnx.engine").exists()


def test_a_target_is_refused_by_the_other_back_ends(
    tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: "/opt/trtexec")
    assert cli("build", write_model(tmp_path / "m.onnx"), tmp_path / "out", "--sm", "89") == 2
    assert "--backend rtx" in capsys.readouterr().err


@pytest.mark.parametrize(("sm", "here"), [(0, "none is here"), (90, "this one has 9.0"), (103, "this one has 10.3")])
@compiles
def test_times_need_a_gpu_that_it_supports(
    tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sm: int, here: str
) -> None:
    monkeypatch.setattr(rtx, "local_sm", lambda: sm)
    (tmp_path / "m.engine").write_bytes(b"")
    for words in (
        ("process", "-p", tmp_path / "m.engine", tmp_path),
        ("optimize", write_model(tmp_path / "m.onnx"), "-o", tmp_path / "o"),
    ):
        assert cli(*words, "--backend", "rtx") == 2
        assert here in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert rtx.default_sm() == rtx.DEFAULT_SM


def test_where_a_gpu_is_the_engine_is_timed_by_the_same_calls(
    tmp_path: Path, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the bindings: the profile of an engine file, in the files of every other back end."""
    monkeypatch.setattr(rtx, "available", lambda: None)
    monkeypatch.setattr(rtx, "local_sm", lambda: 120)
    monkeypatch.setitem(sys.modules, rtx.BINDINGS, fake_tensorrt)
    monkeypatch.setattr(tensorrt_api, "open_device", Clock)
    assert rtx.default_sm() == 120
    path = tmp_path / "m.onnx.engine"
    path.write_text(json.dumps({"Layers": fake_tensorrt.LAYERS}))
    assert engine.choose_backend("auto") == "rtx"
    files = engine.profile(path, tmp_path, ["--sm=120", "--iterations=3", "--duration=0", "--warmUp=0"])
    names = [record["name"] for record in json.loads(files.profile.read_text())[1:]]
    assert names == [layer["Name"] for layer in fake_tensorrt.LAYERS]
    assert len(json.loads(files.timing.read_text())) == 3
