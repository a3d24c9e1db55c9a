"""`cutefuse trt-check` with a stand-in for trtexec that computes with ONNX Runtime: its report must tell the truth."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import models
from cutefuse.commands import trt_check
from cutefuse.commands.trt_check import FAILED, PASSED, SKIPPED, Check, attempt, main, markdown, worst_error
from cutefuse.engines.artifacts import Artifacts
from cutefuse.engines.tensorrt import rtx

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow  # builds and profiles several engines

# Builds by remembering the model, runs it with ONNX Runtime (the patched model's function bodies), and writes the files
# that trtexec writes. STUB_WRONG bends the patched outputs, STUB_NO_PLUGINS loses the plugin layers.
STUB = """#!{python}
import json, os, sys
print("&&&& RUNNING TensorRT.trtexec [TensorRT v101600] [b32] # trtexec")
if "--help" in sys.argv:
    print("--onnx --saveEngine --loadEngine --exportLayerInfo --exportProfile --exportTimes --timingCacheFile",
          "--profilingVerbosity --skipInference --verbose --dynamicPlugins --staticPlugins --stronglyTyped --fp16",
          "--noDataTransfers --useCudaGraph --useSpinWait --separateProfileRun --shapes --loadInputs --exportOutput",
          "--iterations --duration --warmUp")
    sys.exit(0)
given = dict(a.partition("=")[::2] for a in sys.argv[1:])
def write(option, text):
    if option in given:
        open(given[option], "w").write(text)
if "--onnx" in given:
    import onnx
    model = onnx.load(given["--onnx"])
    fused = [n for n in model.graph.node if n.domain == "cutefuse"]
    kind = "CaskConvolution" if os.environ.get("STUB_NO_PLUGINS") else "PluginV3"
    layers = [{{"Name": n.name, "LayerType": kind, "Inputs": [], "Outputs": []}} for n in fused]
    write("--saveEngine", given["--onnx"])
    write("--exportLayerInfo", json.dumps({{"Layers": layers, "Bindings": []}}))
if "--loadEngine" in given:
    path = open(given["--loadEngine"]).read()
    patched = ".cutefuse." in path
    write("--exportTimes", json.dumps([{{"computeMs": 0.5 if patched else 1.0}}] * 5))
    write("--exportProfile", json.dumps([{{"count": 5}}]))
    write("--exportLayerInfo", json.dumps({{"Layers": [{{"Name": "a", "LayerType": "Convolution"}}], "Bindings": []}}))
    if "--exportOutput" in given:
        import numpy as np, onnxruntime as ort
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        files = dict(w.split(":") for w in given["--loadInputs"].split(","))
        shapes = dict(w.split(":") for w in given.get("--shapes", "").split(",") if w)
        types = {{"tensor(float)": np.float32, "tensor(float16)": np.float16}}
        feed = {{}}
        for i in session.get_inputs():
            shape = [int(d) for d in shapes[i.name].split("x")] if i.name in shapes else i.shape
            feed[i.name] = np.fromfile(files[i.name], types[i.type]).reshape(shape)
        outputs = session.run(None, feed)
        if patched and os.environ.get("STUB_WRONG"):
            outputs[0].flat[7] += 1
        write("--exportOutput", json.dumps([
            {{"name": o.name, "dimensions": "x".join(map(str, y.shape)), "values": y.astype(float).ravel().tolist()}}
            for o, y in zip(session.get_outputs(), outputs)]))
print("&&&& PASSED TensorRT.trtexec")
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trtexec"
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("TRTEXEC", str(path))
    return path


def run(tmp_path: Path, *words: str) -> tuple[int, list[dict]]:
    out = tmp_path / "report"
    model = tmp_path / "bevfusion_fuser.onnx"
    onnx.save(models.build("bevfusion_fuser", small=True), model)
    code = main([str(model), "-o", str(out), *words])
    report = json.loads((out / "trt_check.json").read_text())
    assert (out / "trt_check.md").read_text().startswith("# cutefuse on TensorRT\n")
    return code, report["checks"]


def test_a_right_and_faster_engine_passes_with_its_numbers(tmp_path: Path, stub: Path) -> None:
    code, checks = run(tmp_path)
    by_name = {c["name"]: c for c in checks}
    model = by_name["bevfusion_fuser"]
    assert model["status"] == PASSED, model["text"]
    assert model["numbers"]["speedup"] == pytest.approx(2.0)
    assert model["numbers"]["patched_error"] < 1e-3
    assert by_name["trtexec --staticPlugins"]["status"] == PASSED
    assert by_name["Python load_library"]["status"] in (SKIPPED, FAILED)
    assert code == (1 if any(c["status"] == FAILED for c in checks) else 0)


def test_json_is_the_report_and_nothing_else(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_WRONG", "1")
    code, checks = run(tmp_path, "--json")
    printed = capsys.readouterr()
    assert code == 1 and json.loads(printed.out)["checks"] == checks
    assert "bevfusion_fuser: failed" in printed.err


def test_a_wrong_engine_fails_the_check_and_the_command(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_WRONG", "1")
    code, checks = run(tmp_path)
    [model] = [c for c in checks if c["name"] == "bevfusion_fuser"]
    assert code == 1 and model["status"] == FAILED
    assert "the patched engine's error is" in model["text"]


def test_an_engine_that_silently_lost_its_plugins_fails(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_NO_PLUGINS", "1")
    code, checks = run(tmp_path)
    [model] = [c for c in checks if c["name"] == "bevfusion_fuser"]
    assert code == 1 and model["status"] == FAILED and "plugin" in model["text"]


def test_without_tensorrt_it_says_so_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trt_check.trtexec, "find", lambda: None)
    monkeypatch.setattr(trt_check.importlib.util, "find_spec", lambda name: None)
    assert main(["model.onnx", "-o", str(tmp_path / "report")]) == 2
    assert "no TensorRT was found" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_an_unexpected_exception_becomes_a_failed_check() -> None:
    def body() -> tuple[str, dict[str, float]]:
        raise ZeroDivisionError("surprise")

    assert attempt("x", body) == Check("x", FAILED, "ZeroDivisionError: surprise")


def test_the_error_of_missing_or_nan_outputs_is_infinite() -> None:
    truth = {"y": np.ones((2, 3), np.float32)}
    assert worst_error(truth, {}) == float("inf")
    assert worst_error(truth, {"y": np.ones(5)}) == float("inf")
    assert worst_error(truth, {"y": np.full(6, np.nan)}) == float("inf")
    assert worst_error({"y": np.full(6, np.nan)}, {"y": np.ones(6)}) == float("inf")
    assert worst_error(truth, {"y": np.full(6, 1.25)}) == pytest.approx(0.25)
    assert worst_error({"y": np.zeros(3, np.float32)}, {"y": np.zeros(3)}) == 0


def test_the_markdown_counts_what_passed_failed_and_was_skipped() -> None:
    text = markdown({"GPU": "H200"}, [Check("a", PASSED, "ok"), Check("b", FAILED, "x | y"), Check("c", SKIPPED, "no")])
    assert "| b | failed | x / y |" in text and text.endswith("1 passed, 1 failed, 1 skipped\n")


def test_the_script_checks_the_demo_models_and_refuses_one_that_is_not_there(tmp_path: Path, stub: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts/trt_check.py"), "-o", str(tmp_path / "out"), "--models"]
    done = subprocess.run([*script, "none_such"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: there is no model none_such")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    done = subprocess.run([*script, "bevfusion_fuser", "--dtypes", "float16"], capture_output=True, text=True)
    assert "bevfusion_fuser_float16: passed" in done.stdout, done.stderr
    assert "| bevfusion_fuser_float16 | passed |" in (tmp_path / "out/trt_check.md").read_text()


def test_a_model_without_a_site_is_one_sentence(tmp_path: Path, stub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = (onnx.helper.make_tensor_value_info(n, 1, [2]) for n in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "relu.onnx")
    assert main([str(tmp_path / "relu.onnx"), "-o", str(tmp_path / "report")]) == 2
    assert "relu.onnx could not be patched" in capsys.readouterr().err


# ---- TensorRT for RTX: built by NVIDIA's compiler, run by a stand-in ----


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with TensorRT for RTX and a card of its own, and no TensorRT; engines run in ONNX Runtime."""
    if reason := rtx.available():
        pytest.skip(reason)
    found = importlib.util.find_spec
    monkeypatch.setattr(trt_check.trtexec, "find", lambda: None)
    monkeypatch.setattr(trt_check.importlib.util, "find_spec", lambda n: None if n == "tensorrt" else found(n))
    monkeypatch.setattr(trt_check.rtx, "cannot_run", lambda: None)

    def profile(path: Path, outdir: Path, options: list[str], how: Any) -> None:
        assert how.backend == "rtx"
        Artifacts(path).timing.write_text(json.dumps([{"computeMs": 0.5 if ".cutefuse." in path.name else 1.0}] * 5))

    def infer(files: Artifacts, feed: dict, plugins: list[Path], options: list[str]) -> dict[str, np.ndarray]:
        import onnxruntime as ort

        model = files.engine.parent / files.engine.name.removesuffix(".engine")
        model = model if model.is_file() else files.engine.parent.parent / model.name
        session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        names = [o.name for o in session.get_outputs()]
        return dict(zip(names, session.run(None, feed), strict=True))

    monkeypatch.setattr(trt_check.engine, "profile", profile)
    monkeypatch.setattr(trt_check, "_infer_with_python", infer)


def test_tensorrt_for_rtx_is_built_compared_and_its_copies_counted(tmp_path: Path, card: None) -> None:
    code, checks = run(tmp_path)
    (model,) = [c for c in checks if c["name"] == "bevfusion_fuser"]
    assert model["status"] == PASSED, model["text"]
    assert next(c["status"] for c in checks if c["name"] == "Python load_library") == PASSED
    numbers = model["numbers"]
    assert numbers["speedup"] == pytest.approx(2.0) and numbers["patched_error"] < 1e-3
    assert numbers["patched_copied_mb"] <= numbers["plain_copied_mb"] and "copies" in model["text"]
    assert code == 0
    facts = json.loads((tmp_path / "report/trt_check.json").read_text())["facts"]
    assert facts[rtx.NAME].startswith("1.")


def test_a_machine_without_a_card_is_told_which_ones_it_takes(
    tmp_path: Path, card: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    if rtx.cannot_run() is None or trt_check.trtexec.find() or importlib.util.find_spec("tensorrt"):
        pytest.skip("this machine can run one")
    assert main(["model.onnx", "-o", str(tmp_path / "report")]) == 2
    assert "8.9" in capsys.readouterr().err and not (tmp_path / "report").exists()
