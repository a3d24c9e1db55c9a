"""Building and profiling engines against a stand-in for trtexec (tests/trtexec_stub.py): no TensorRT is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from trtexec_stub import STUB

from cutefuse.commands.build import main
from cutefuse.engines import build as engine
from cutefuse.engines import plugins
from cutefuse.engines.artifacts import (
    Artifacts,
    concat_notes,
    log_sections,
    profile_metadata,
    tensorrt_version,
    whole_or_nothing,
)
from cutefuse.engines.layers import read_layers
from cutefuse.engines.tensorrt import trtexec
from cutefuse.errors import CutefuseError, VerificationError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trtexec that is found through $TRTEXEC, and a plugin library that is only a file."""
    path = tmp_path / "bin" / "trtexec"
    path.parent.mkdir()
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("TRTEXEC", str(path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcutefuse.so").write_bytes(b"")
    monkeypatch.setenv("CUTEFUSE_LIBRARY_DIR", str(tmp_path / "lib"))
    return path


@pytest.fixture
def no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTEXEC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)


def make_model(path: Path, fused: int = 0, dtype: int = TensorProto.FLOAT) -> Path:
    """Relu nodes, `fused` of them in our domain with a function body."""
    nodes, last = [helper.make_node("Relu", ["x"], ["a"], name="conv_first")], "a"
    for i in range(fused):
        nodes.append(helper.make_node("CuteConcatConv1Relu", [last], [f"f{i}"], name=f"fused_{i}", domain="cutefuse"))
        last = f"f{i}"
    nodes.append(helper.make_node("Relu", [last], ["y"], name="act_last"))
    x = helper.make_tensor_value_info("x", dtype, ["N", 8, 4, 4])
    y = helper.make_tensor_value_info("y", dtype, ["N", 8, 4, 4])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("cutefuse", 1)]
    body = [helper.make_node("Relu", ["__x"], ["__y"], name="body")]
    function = helper.make_function("cutefuse", "CuteConcatConv1Relu", ["__x"], ["__y"], body, opsets[:1])
    graph = helper.make_graph(nodes, "g", [x], [y])
    model = helper.make_model(graph, opset_imports=opsets, functions=[function] if fused else [], ir_version=9)
    onnx.save(model, str(path))
    return path


def dry(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main([*argv, "--dry-run"]) == 0
    return capsys.readouterr().out.split()


def test_a_build_writes_engine_layers_log_metadata_and_timing_cache(stub: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.onnx")
    assert main([str(model), str(tmp_path / "out" / "deep"), "--builderOptimizationLevel=2"]) == 0
    names = {p.name for p in (tmp_path / "out" / "deep").iterdir()}
    assert names == {
        "m.onnx.engine",
        "m.onnx.engine.graph.json",
        "m.onnx.engine.build.log",
        "m.onnx.engine.build.metadata.json",
        "timing.cache",
    }
    metadata = json.loads((tmp_path / "out" / "deep" / "m.onnx.engine.build.metadata.json").read_text())
    assert metadata["tensorrt_version"] == "10.16.0"
    assert metadata["model_options"]["Model"].endswith("m.onnx:x")  # a value keeps its colons
    assert metadata["device_information"]["Memory Clock Rate"] == 3.201
    assert [n["action"] for n in metadata["concats"]] == ["eliminate", "copy"]
    assert metadata["concats"][1]["reason"] == "input is not movable."


def test_fused_nodes_get_the_plugin_library_and_are_counted(
    stub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "m.onnx", fused=2)
    assert main([str(model), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "--dynamicPlugins=" in out and "libcutefuse.so" in out
    assert "2 of 2 fused nodes run as plugins" in out


def test_a_model_without_fused_nodes_gets_no_plugin_library(
    stub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "dynamicPlugins" not in " ".join(dry(capsys, str(make_model(tmp_path / "m.onnx"))))


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_plugin_layers_than_fused_nodes_fail_and_leave_no_engine(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    monkeypatch.setenv("STUB_PLUGINS", str(count))
    model = make_model(tmp_path / "m.onnx", fused=2)
    assert main([str(model), str(tmp_path / "out")]) == 1
    assert f"{count} of 2 fused nodes run as plugins; TensorRT built the function bodies" in capsys.readouterr().err
    assert not (tmp_path / "out" / "m.onnx.engine").exists()


def test_the_patch_report_says_which_nodes_must_be_plugins(stub: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.cutefuse.onnx", fused=2)
    sites = [
        {"name": "fused_0", "op_type": "CuteConcatConv1Relu", "status": "fused"},
        {"name": "fused_1", "op_type": "CuteConcatConv1Relu", "status": "fused"},
        {"name": "fused_2", "op_type": "CuteConcatConv1Relu", "status": "fused"},
        {"name": "other", "op_type": "CuteConcatConv1Relu", "status": "refused", "reason": "groups"},
    ]
    report = {"schema": 1, "output": "m.cutefuse.onnx", "sites": sites}
    (tmp_path / "m.patch.json").write_text(json.dumps(report))
    with pytest.raises(VerificationError, match="2 of 3 fused nodes run as plugins"):
        engine.build(model, tmp_path / "out")


@pytest.mark.parametrize("version, code", [("100600", 2), ("100700", 0)])
def test_bodies_that_would_hide_the_plugins_are_refused_before_the_build(
    stub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, code: int
) -> None:
    argv = [str(make_model(tmp_path / "m.onnx", fused=1)), str(tmp_path / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STUB_VERSION", version)
        assert main(argv) == code and main([*argv, "--no-plugins"]) == 0
        assert ("10.6.0 builds the function body of CuteConcatConv1Relu" in capsys.readouterr().err) == (code == 2)


def test_names_only_layer_information_cannot_pass_as_counted(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_NAMES_ONLY", "1")
    with pytest.raises(VerificationError, match="names only"):
        engine.build(make_model(tmp_path / "m.onnx", fused=1), tmp_path / "out")


def test_plugin_layers_are_matched_by_type_when_tensorrt_renames_them() -> None:
    layers = read_layers([{"Name": "renamed", "LayerType": "PluginV3", "PluginType": "CuteConcatConv2Relu"}], "a file")
    assert plugins.count_plugins(layers, {"a": "CuteConcatConv2Relu"}) == (1, [])
    assert plugins.count_plugins(layers, {"a": "CuteRMSNorm"}) == (0, ["a"])
    assert plugins.count_plugins(layers, {"a": "CuteConcatConv2Relu", "b": "CuteConcatConv2Relu"})[0] == 1


def test_a_plugin_of_somebody_else_does_not_count() -> None:
    layers = read_layers([{"Name": "nms", "LayerType": "PluginV2", "PluginType": "BatchedNMS_TRT"}], "a file")
    assert plugins.count_plugins(layers, {"a": "CuteConcatConv2Relu"}) == (0, ["a"])


def test_float16_models_are_strongly_typed_on_tensorrt_10_only(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half, full = make_model(tmp_path / "h.onnx", dtype=TensorProto.FLOAT16), make_model(tmp_path / "f.onnx")
    assert "--stronglyTyped" in dry(capsys, str(half))
    assert "--stronglyTyped" not in dry(capsys, str(half), "--fp16")
    assert "--stronglyTyped" not in dry(capsys, str(full))
    monkeypatch.setenv("STUB_VERSION", "110100")
    assert "--stronglyTyped" not in dry(capsys, str(half))


def test_tensorrt_11_refuses_fp16_before_trtexec_is_run(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_VERSION", "110100")
    assert main([str(make_model(tmp_path / "m.onnx")), str(tmp_path / "out"), "--fp16"]) == 2
    assert "strongly typed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--noSuchThing", "--saveEngine=x", "-fp16", "--tilingOptimizationLevel=2"])
def test_options_that_trtexec_would_refuse_are_refused_first(stub: Path, tmp_path: Path, option: str) -> None:
    assert main([str(make_model(tmp_path / "m.onnx")), str(tmp_path / "out"), option]) == 2
    assert not (tmp_path / "out").exists()


def test_a_new_option_is_refused_by_an_old_tensorrt() -> None:
    with pytest.raises(CutefuseError, match="needs TensorRT 10.8"):
        trtexec.assumed("10.3").check(["--tilingOptimizationLevel=2"])
    trtexec.assumed("10.8").check(["--tilingOptimizationLevel=2"])


def test_profiling_flags_follow_the_version(tmp_path: Path) -> None:
    files = Artifacts(tmp_path / "m.engine")
    old = trtexec.profile_command(trtexec.assumed("10.3"), files.engine, files, [], [])
    new = trtexec.profile_command(trtexec.assumed("11.1"), files.engine, files, [], [])
    assert {"--noDataTransfers", "--useCudaGraph", "--separateProfileRun", "--useSpinWait"} <= set(old)
    by_itself = "--stronglyTyped --noDataTransfers --useCudaGraph --useSpinWait --separateProfileRun"  # in TensorRT 11
    assert not set(by_itself.split()) & set(new)


def test_an_option_of_the_user_replaces_ours_and_nothing_comes_twice(tmp_path: Path) -> None:
    files = Artifacts(tmp_path / "m.engine")
    options = ["--profilingVerbosity=none", "--verbose"]
    command = trtexec.build_command(trtexec.assumed("10.3"), tmp_path / "m.onnx", files, options, [], False)
    names = [c.partition("=")[0] for c in command]
    assert len(names) == len(set(names)) and "--profilingVerbosity=none" in command


def test_dry_run_prints_what_is_run_and_writes_nothing(
    stub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make_model(tmp_path / "a b.onnx"), tmp_path / "out"
    assert main([str(model), str(out), "--dry-run"]) == 0
    printed = capsys.readouterr().out.strip()
    assert not out.exists()
    assert main([str(model), str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == printed
    assert (out / "a b.onnx.engine.build.log").read_text().splitlines()[0] == f"# {printed}"


def test_dry_run_needs_no_trtexec_when_the_version_is_given(
    no_tensorrt: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "m.onnx", dtype=TensorProto.FLOAT16)
    assert "--stronglyTyped" in dry(capsys, str(model), "--trt-version", "10.3")
    assert "--stronglyTyped" not in dry(capsys, str(model), "--trt-version", "11.1")
    assert main([str(model), "--dry-run", "--trt-version", "8.6"]) == 2


def test_without_any_tensorrt_one_sentence_and_exit_2(
    no_tensorrt: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(make_model(tmp_path / "m.onnx"))]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install tensorrt" in err


def test_a_wrong_trtexec_variable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRTEXEC", "/no/such/trtexec")
    with pytest.raises(CutefuseError, match=r"\$TRTEXEC is /no/such/trtexec"):
        engine.build(make_model(tmp_path / "m.onnx"), tmp_path / "out")


def test_something_else_called_trtexec_is_refused(stub: Path, tmp_path: Path) -> None:
    stub.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(CutefuseError, match="does not look like trtexec"):
        engine.build(make_model(tmp_path / "m.onnx"), tmp_path / "out")


def test_tensorrt_8_is_too_old(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_VERSION", "8601")
    with pytest.raises(CutefuseError, match="TensorRT 8.6.1"):
        engine.build(make_model(tmp_path / "m.onnx"), tmp_path / "out")


def test_a_failing_trtexec_is_quoted_and_the_earlier_engine_survives(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make_model(tmp_path / "m.onnx"), tmp_path / "out"
    assert main([str(model), str(out)]) == 0
    monkeypatch.setenv("STUB_FAIL", "Error Code 4: no kernel for node conv_first")
    assert main([str(model), str(out)]) == 2
    err = capsys.readouterr().err
    assert "no kernel for node conv_first" in err and "build.log" in err and "Traceback" not in err
    assert (out / "m.onnx.engine").read_text() == "engine bytes"
    assert not [p for p in out.iterdir() if p.name.startswith(".")]


def test_a_first_build_that_fails_leaves_only_its_log(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", "no")
    assert main([str(make_model(tmp_path / "m.onnx")), str(tmp_path / "out")]) == 2
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"m.onnx.engine.build.log"}


def test_a_timeout_ends_trtexec_and_leaves_no_half_engine(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_SLEEP", "60")
    monkeypatch.setenv("STUB_PID", str(tmp_path / "pid"))
    assert main([str(make_model(tmp_path / "m.onnx")), str(tmp_path / "out"), "--timeout", "2"]) == 2
    assert "after 2 s" in capsys.readouterr().err
    assert not (tmp_path / "out" / "m.onnx.engine").exists()
    assert gone(int((tmp_path / "pid").read_text()))


def test_sigterm_ends_trtexec_too(stub: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.onnx")
    environment = {**os.environ, "STUB_SLEEP": "60", "STUB_PID": str(tmp_path / "pid"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cutefuse.cli", "build", str(model), str(tmp_path / "out")]
    tool = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.time() < deadline:
        time.sleep(0.05)
    tool.send_signal(signal.SIGTERM)
    assert tool.wait(timeout=30) != 0
    assert gone(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "out" / "m.onnx.engine").exists()


def gone(pid: int) -> bool:
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "holds no ONNX graph"),
        (b"not a model", "is not an ONNX model"),
        (b"\x08\x07\x12\x04test", "holds no ONNX graph"),
    ],
)
def test_a_file_that_is_no_model_is_one_sentence(
    stub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    assert main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path} {words}")


def test_a_broken_patch_report_is_one_sentence(stub: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.onnx", fused=1)
    (tmp_path / "m.patch.json").write_text("{")
    with pytest.raises(CutefuseError, match="is no patch report"):
        engine.build(model, tmp_path / "out")


def test_profiling_writes_what_the_engine_explorer_writes(stub: Path, tmp_path: Path) -> None:
    files = engine.build(make_model(tmp_path / "m.onnx"), tmp_path / "out")
    engine.profile(files.engine, tmp_path / "out")
    metadata = json.loads(files.profile_metadata.read_text())
    summary = metadata["performance_summary"]
    assert summary["Throughput"] == 900.5 and summary["Latency"] == [1.0, 2.0, 1.1, 1.05, 1.5, 1.9]
    assert metadata["percentiles"] == [90.0, 99.0]
    assert metadata["warnings"] and "Enqueue Time" in metadata["warnings"][0]
    assert json.loads(files.profile.read_text())[0] == {"count": 100}
    assert files.timing.is_file()


def test_a_missing_engine_is_named(stub: Path, tmp_path: Path) -> None:
    with pytest.raises(CutefuseError, match=r"nothing\.engine does not exist"):
        engine.profile(tmp_path / "nothing.engine", tmp_path)


def test_versions_are_read_from_old_and_new_banners() -> None:
    assert tensorrt_version("&&&& RUNNING TensorRT.trtexec [TensorRT v101600] [b1]") == (10, 16, 0)
    assert tensorrt_version("[TensorRT v110100]") == (11, 1, 0)
    assert tensorrt_version("[TensorRT v8601]") == (8, 6, 1)
    assert tensorrt_version("[I] TensorRT version: 10.3.0") == (10, 3, 0)
    assert tensorrt_version("nothing") is None


def test_logs_of_strange_shape_are_read_without_error() -> None:
    assert log_sections("=== A ===\nno stamp: 1\n") == {"A": {}}
    assert profile_metadata("") == {
        "performance_summary": {},
        "percentiles": [],
        "inference_options": {},
        "device_information": {},
        "tensorrt_version": None,
        "warnings": [],
    }
    assert concat_notes("Retargeting a to b")[0]["action"] == "retarget"


def test_outputs_come_back_when_a_block_fails(tmp_path: Path) -> None:
    kept, made = tmp_path / "kept", tmp_path / "made"
    kept.write_text("old")
    with pytest.raises(ValueError), whole_or_nothing(kept, made):
        kept.write_text("half")
        made.write_text("half")
        raise ValueError
    assert kept.read_text() == "old" and not made.exists() and len(list(tmp_path.iterdir())) == 1


def test_the_shell_script_calls_the_command(stub: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.onnx")
    command = [str(ROOT / "scripts" / "build_engine.sh"), str(model), str(tmp_path / "out"), "--fp16"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--fp16" in done.stdout and (tmp_path / "out" / "m.onnx.engine").is_file()
