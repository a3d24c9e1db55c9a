"""`process_engine.py`: the interface of NVIDIA's script, over trtexec, ONNX Runtime and folders of JSON files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from trtexec_stub import STUB

from cutefuse.commands.process import main
from cutefuse.engines.artifacts import Artifacts
from cutefuse.engines.onnxruntime import run as onnxruntime
from cutefuse.errors import CutefuseError
from cutefuse.report.read.reader import find_engines, read_engine

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "engines"
REPORT = {"html": ".report.html", "csv": ".layers.csv", "json": ".report.json", "svg": ".graph.json.svg"}


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trtexec"
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("TRTEXEC", str(path))
    return path


@pytest.fixture
def no_trtexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTEXEC", raising=False)
    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: None)
    monkeypatch.setattr("cutefuse.engines.tensorrt.rtx.available", lambda: "it is not installed")


def make_model(path: Path, function: bool = False) -> Path:
    """Four convolutions, a concat before the third, which is optionally a fused node; dynamic batch and height."""
    random = np.random.default_rng(0)

    def weight(name: str, *dims: int) -> onnx.TensorProto:
        return numpy_helper.from_array(random.standard_normal(dims).astype(np.float32), name)

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, "H", 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [
        helper.make_node("Conv", ["x", "wa"], ["a"], name="/a/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["x", "wb"], ["b"], name="/b/Conv", pads=[1, 1, 1, 1]),
    ]
    body = [
        helper.make_node("Concat", ["__a", "__b"], ["__cat"], axis=1),
        helper.make_node("Conv", ["__cat", "__w"], ["__conv"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["__conv"], ["__act"]),
        helper.make_node("Identity", ["__act"], ["__y"]),  # goes, and the call's output name with it
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("cutefuse", 1)]
    functions = []
    if function:
        nodes.append(
            helper.make_node("CuteConcatConv2Relu", ["a", "b", "wc"], ["r"], name="/c/Conv", domain="cutefuse")
        )
        functions = [
            helper.make_function("cutefuse", "CuteConcatConv2Relu", ["__a", "__b", "__w"], ["__y"], body, opsets[:1])
        ]
    else:
        nodes += [
            helper.make_node("Concat", ["a", "b"], ["cat"], name="/c/Concat", axis=1),
            helper.make_node("Conv", ["cat", "wc"], ["c"], name="/c/Conv", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"], name="/c/Relu"),
        ]
    nodes.append(helper.make_node("Conv", ["r", "wd"], ["y"], name="/d/Conv"))
    weights = [weight("wa", 4, 3, 3, 3), weight("wb", 4, 3, 3, 3), weight("wc", 8, 8, 3, 3), weight("wd", 2, 8, 1, 1)]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9), str(path))
    return path


def written(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_all_three_steps_run_without_options(stub: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.onnx")
    assert main([str(model), str(tmp_path / "out")]) == 0
    stem = "m.onnx.engine"
    assert written(tmp_path / "out") == {
        stem,
        "timing.cache",
        f"{stem}.build.log",
        f"{stem}.build.metadata.json",
        f"{stem}.graph.json",
        f"{stem}.profile.json",
        f"{stem}.profile.log",
        f"{stem}.profile.metadata.json",
        f"{stem}.timing.json",
        *(stem + suffix for suffix in REPORT.values()),
    }


@pytest.mark.parametrize(
    ("flag", "made"),
    [("-b", "m.onnx.engine"), ("--build-engine", "m.onnx.engine"), ("--build_engine", "m.onnx.engine")],
)
def test_one_step_alone(stub: Path, tmp_path: Path, flag: str, made: str) -> None:
    model = make_model(tmp_path / "m.onnx")
    assert main([str(model), str(tmp_path / "out"), flag]) == 0
    names = written(tmp_path / "out")
    assert made in names and not any("profile" in n or "report" in n for n in names)


def test_steps_can_follow_one_another(stub: Path, tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "m.onnx"), tmp_path / "out"
    for flag in ("-b", "-p", "-d"):
        assert main([str(model), str(out), flag]) == 0
    assert "m.onnx.engine.report.html" in written(out)


def test_an_engine_file_is_profiled_and_drawn(stub: Path, tmp_path: Path) -> None:
    (tmp_path / "net.engine").write_bytes(b"plan")
    assert main([str(tmp_path / "net.engine"), str(tmp_path / "out")]) == 0
    names = written(tmp_path / "out")
    assert {"net.engine.profile.json", "net.engine.report.html"} <= names and "net.engine.build.log" not in names


@pytest.mark.parametrize("flag", ["--print-only", "--print_only"])
def test_print_only_prints_both_commands_and_writes_nothing(
    stub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    model = make_model(tmp_path / "m.onnx")
    assert main([str(model), str(tmp_path / "out"), flag, "fp16", "shapes=x:1x3x16x16"]) == 0
    build, profile = capsys.readouterr().out.strip().splitlines()
    assert "--saveEngine=" in build and "--loadEngine=" in profile
    assert all("--fp16" in line and "--shapes=x:1x3x16x16" in line for line in (build, profile))
    assert not (tmp_path / "out").exists()


def test_a_failing_build_stops_the_pipeline(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_FAIL", "out of memory")
    assert main([str(make_model(tmp_path / "m.onnx")), str(tmp_path / "out")]) == 2
    assert "out of memory" in capsys.readouterr().err
    assert not any("profile" in n for n in written(tmp_path / "out"))


@pytest.mark.parametrize("folder", ["resnet18-a100-fp16", "resnet50-rtx3090-fp32"])
def test_a_folder_of_json_files_is_drawn(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DATA / folder), str(tmp_path / "out")]) == 0
    assert written(tmp_path / "out") == {f"resnet.onnx.engine{suffix}" for suffix in REPORT.values()}
    assert "median latency" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["missing", "text", "empty folder", "bad shapes", "bad option"])
def test_bad_input_is_one_sentence_and_exit_2(
    no_trtexec: None, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    model = make_model(tmp_path / "m.onnx")
    argv = {
        "missing": ["nothing.onnx"],
        "text": ["m.txt"],
        "empty folder": ["empty"],
        "bad shapes": [model.name, "--shapes=x:oops"],
        "bad option": [model.name, "--nonsense"],
    }[kind]
    assert main([str(tmp_path / argv[0]), str(tmp_path / "out"), *argv[1:], "--backend", "onnxruntime"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("error: ") and not any("Traceback" in line for line in err)


def test_onnxruntime_is_the_embedded_engine_and_says_so(
    no_trtexec: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "m.onnx")
    argv = [str(model), str(tmp_path / "out"), "shapes=x:2x3x20x16", "iterations=10", "duration=0.05", "warmUp=5"]
    assert main(argv) == 0
    assert "no TensorRT here: ONNX Runtime on the CPU is the embedded engine" in capsys.readouterr().out
    engine = read_engine(find_engines(tmp_path / "out")[0])
    assert engine.backend == "onnxruntime" and len(engine.latencies_ms) >= 10 and engine.peaks
    by_name = {la.name: la for la in engine.layers}
    assert by_name["/a/Conv"].outputs[0].dims == (2, 4, 20, 16)
    assert all(la.time_us for la in engine.layers)
    assert by_name["/c/Conv"].onnx == ["/c/Conv", "/c/Relu"]  # ONNX Runtime fuses the activation
    assert [la.kind for la in engine.layers].count("conv") == 4
    ranked = json.loads((tmp_path / "out" / "m.onnx.engine.report.json").read_text())["fuse_next"]
    assert [c["node"] for c in ranked] == ["/c/Conv"] and ranked[0]["gain_us"] > 0


def test_function_bodies_are_traced_to_the_fused_node(
    no_trtexec: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "m.onnx", function=True)
    assert (
        main([str(model), str(tmp_path / "out"), "shapes=x:1x3x16x16", "iterations=3", "duration=0.01", "warmUp=1"])
        == 0
    )
    assert "1 fused nodes; TensorRT would run plugins" in capsys.readouterr().out
    engine = read_engine(find_engines(tmp_path / "out")[0])
    inside = [la for la in engine.layers if la.onnx == ["/c/Conv"]]
    assert {la.kind for la in inside} == {"copy", "conv"} and all(la.time_us for la in inside)
    assert {tuple(la.onnx) for la in engine.layers} == {(f"/{n}/Conv",) for n in "abcd"}


def test_unnamed_dynamic_axes_are_filled(tmp_path: Path) -> None:
    files = onnxruntime.profile(
        make_model(tmp_path / "m.onnx"), tmp_path / "out", ["--iterations=1", "--duration=0.01", "--warmUp=1"]
    )
    shapes = json.loads(files.profile_metadata.read_text())["inference_options"]["Input inference shapes"]
    assert shapes == "x=1x3x64x16"


def test_a_plugin_without_body_cannot_run_in_onnxruntime(tmp_path: Path) -> None:
    model = onnx.load(str(make_model(tmp_path / "m.onnx", function=True)))
    del model.functions[:]
    onnx.save(model, str(tmp_path / "m.onnx"))
    with pytest.raises(CutefuseError, match="ONNX Runtime cannot run"):
        onnxruntime.profile(tmp_path / "m.onnx", tmp_path / "out", [])
    assert not any((tmp_path / "out").iterdir())


def test_options_of_tensorrts_builder_are_said_to_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--fp16", "--iterations=1", "--duration=0.01", "--warmUp=1"]
    onnxruntime.profile(make_model(tmp_path / "m.onnx"), tmp_path / "out", words)
    assert "no effect on ONNX Runtime, which runs the model as it is: --fp16\n" in capsys.readouterr().out


def test_onnxruntime_refuses_an_input_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CutefuseError, match="--shapes names z"):
        onnxruntime.profile(make_model(tmp_path / "m.onnx"), tmp_path / "out", ["--shapes=z:1"])


def test_the_script_runs_from_anywhere(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts" / "process_engine.py"),
        str(DATA / "resnet18-a100-fp16"),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "resnet.onnx.engine.report.html").is_file()


def test_without_a_folder_files_go_beside_the_model(no_trtexec: None, tmp_path: Path) -> None:
    """A word with '=' in the place of the folder is an option."""
    model = make_model(tmp_path / "m.onnx")
    words = ["iterations=1", "duration=0.01", "warmUp=1", "shapes=x:1x3x16x16", "--backend", "onnxruntime"]
    assert main([str(model), *words]) == 0
    assert "m.onnx.engine.report.html" in written(tmp_path / "m.out")
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "m.out"}
    assert main([str(tmp_path / "m.out")]) == 0  # a folder of engine JSON: the report is written again
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "m.out"}


def test_an_engine_that_is_built_and_not_run_takes_no_times_of_one_before(
    no_trtexec: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = make_model(tmp_path / "m.onnx"), tmp_path / "out"
    words = ["shapes=x:1x3x16x16", "iterations=1", "duration=0.01", "warmUp=1"]
    assert main([str(model), str(out), "--backend", "onnxruntime", *words]) == 0
    assert read_engine(find_engines(out)[0]).profiled
    monkeypatch.setattr("cutefuse.engines.build.choose_backend", lambda *_, **__: "rtx")
    monkeypatch.setattr("cutefuse.engines.build.build", lambda *_, **__: Artifacts.of(model, out))
    monkeypatch.setattr("cutefuse.engines.tensorrt.rtx.cannot_run", lambda: "no GPU is here")
    assert main([str(model), str(out)]) == 0
    assert not read_engine(find_engines(out)[0]).profiled
