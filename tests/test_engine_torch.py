"""The PyTorch back end from path to path on the CPU, and its layer times from recorded traces and Inductor's code."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import FILTER, bn_weights, graph, run_patch, weights

from cutefuse.commands.build import main as build
from cutefuse.commands.process import main as process
from cutefuse.engines import build as engine
from cutefuse.errors import CutefuseError
from cutefuse.report.read.reader import find_engines, read_engine

pytestmark = pytest.mark.torch
QUICK = ["--iterations=2", "--duration=0.02", "--warmUp=1"]
BODY = """c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k)
          n = BatchNormalization(d, gamma, beta, mean, var) y = Relu(n)"""


def network() -> onnx.ModelProto:
    return graph(BODY, weights(w=FILTER, k=(12,)) | bn_weights())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(network(), str(tmp_path / "m.onnx"))
    return tmp_path / "m.onnx"


def run(model: Path, *words: str) -> int:
    return process([str(model), str(model.parent / "out"), "--backend", "torch", *QUICK, *words])


def test_process_writes_what_the_report_reads(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--shapes=a:2x8x9x7,b:2x16x9x7", "--fp16") == 0
    assert "no effect on PyTorch, which runs the model as it is: --fp16" in capsys.readouterr().out
    found = read_engine(find_engines(model.parent / "out")[0])
    assert found.backend == "torch" and found.on_cpu and found.peaks and len(found.latencies_ms) >= 2
    assert found.inference["Input inference shapes"] == "a=2x8x9x7,b=2x16x9x7"
    assert [(la.type, la.onnx) for la in found.layers] == [
        ("Concat", ["Concat_0"]), ("Conv", ["Conv_1", "BatchNormalization_2", "Relu_3"]),
    ]  # fmt: skip
    conv = found.layers[1]
    assert conv.kind == "conv" and conv.time_us and conv.outputs[0].dims == (2, 12, 9, 7)
    assert conv.raw["Kernel"] == [3, 3] and conv.raw["Weights"] == {"Type": "FP32", "Count": 12 * 24 * 9}
    assert conv.raw["HasBias"] == 1 and conv.raw["Activation"] == "RELU"
    assert found.layers[0].outputs[0].layout == "HWC8" and conv.precision == "FP32"
    assert (found.inputs, found.outputs) == (["a", "b"], ["y"])
    page = (model.parent / "out" / "m.onnx.engine.report.html").read_text()
    assert "profiled with PyTorch, not with TensorRT" in page


def test_an_engine_is_built_and_profiled_later(model: Path) -> None:
    out = model.parent / "out"
    assert build([str(model), str(out), "--backend", "torch", "--shapes=a:3x8x9x7"]) == 0
    made = json.loads((out / "m.onnx.engine").read_text())
    assert made["model"] == str(model) and made["options"] == ["--shapes=a:3x8x9x7"]
    assert not (out / "m.onnx.engine.profile.json").exists()
    assert process([str(out / "m.onnx.engine"), str(out), "--backend", "torch", "-p", *QUICK]) == 0
    shapes = json.loads((out / "m.onnx.engine.profile.metadata.json").read_text())["inference_options"]
    assert shapes["Input inference shapes"] == "a=3x8x9x7,b=3x16x9x7"


def test_a_patched_model_says_that_the_bodies_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, patched = run_patch(network(), tmp_path)
    assert patched is not None
    assert run(tmp_path / "model.cutefuse.onnx") == 0
    assert "on the CPU the 1 fused nodes run their function bodies" in capsys.readouterr().out
    found = read_engine(find_engines(tmp_path / "out")[0])
    (fused,) = {n.name for n in patched.graph.node if n.domain == "cutefuse"}
    assert all(fused in layer.onnx for layer in found.layers) and found.patch is not None
    report = json.loads((tmp_path / "out" / "model.cutefuse.onnx.engine.report.json").read_text())
    assert not any("plugins" in f["title"] for f in report["findings"])


@pytest.mark.parametrize(
    "words, text",
    [
        (["--threads=2"], "--threads means nothing to the PyTorch back end"),
        (["--mode=fast"], "--mode=fast is unknown; choose one of cudnn, compile"),
        (["--iterations=many"], "--iterations=many needs a number"),
        (["--shapes=q:1x2"], "--shapes names q"),
        (["--shapes=a:oops"], "shape a:oops is not of the form"),
        (["--device=cuda:7"], "device cuda:7 does not exist"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert run(model, *words) == 2
    assert text in capsys.readouterr().err.splitlines()[-1]
    assert not list((model.parent / "out").glob("*.json"))


def test_a_missing_operator_ends_with_one_sentence_and_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = onnx.helper.make_node("Magic", ["a"], ["y"], domain="elsewhere")
    info = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in "ay"]
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("elsewhere", 1)]
    made = onnx.helper.make_model(onnx.helper.make_graph([node], "g", info[:1], info[1:]), opset_imports=opsets)
    onnx.save(made, str(tmp_path / "m.onnx"))
    assert run(tmp_path / "m.onnx") == 2
    assert "does not know Magic of domain elsewhere" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_failed_profile_leaves_the_last_one(model: Path) -> None:
    assert run(model) == 0
    before = {p: p.read_bytes() for p in (model.parent / "out").glob("*.json")}
    assert before and run(model, "--shapes=a:1x9x9x7") == 2
    assert {p: p.read_bytes() for p in (model.parent / "out").glob("*.json")} == before


@pytest.mark.parametrize("text", ["", "{}", '{"format": "other", "model": "m.onnx", "options": []}', "[1]"])
def test_an_engine_of_someone_else_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.engine").write_text(text)
    assert process([str(tmp_path / "e.engine"), str(tmp_path / "out"), "--backend", "torch", *QUICK]) == 2
    assert "is no engine of the PyTorch back end" in capsys.readouterr().err


def test_a_dry_run_loads_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--dry-run") == 0
    assert "there is no command to print" in capsys.readouterr().out and not (model.parent / "out").exists()


# --------------------------------------------------------------------------------------------------- the default
@pytest.fixture
def no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: None)
    monkeypatch.setitem(sys.modules, "tensorrt", None)


@pytest.mark.parametrize("sees_gpu, want", [(True, "torch"), (False, "onnxruntime")])
def test_pytorch_is_the_embedded_engine_where_it_has_a_gpu(
    no_tensorrt: None, monkeypatch: pytest.MonkeyPatch, sees_gpu: bool, want: str
) -> None:
    found = engine.importlib.util.find_spec
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda n: None if n == "tensorrt" else found(n))
    monkeypatch.setattr(engine, "torch_sees_gpu", lambda: sees_gpu)
    monkeypatch.setattr(engine.rtx, "available", lambda: "it is not installed")
    assert engine.choose_backend("auto", allow_onnxruntime=True) == want
    monkeypatch.setattr(
        engine.rtx, "available", lambda: None
    )  # without a GPU before ONNX Runtime, never before PyTorch
    assert engine.choose_backend("auto", allow_onnxruntime=True) == ("torch" if sees_gpu else "rtx")
    assert engine.choose_backend("onnxruntime", allow_onnxruntime=True) == "onnxruntime"
    assert engine.choose_backend("torch") == "torch"


def test_without_a_gpu_nothing_builds_by_itself(no_tensorrt: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda n: None)
    monkeypatch.setattr(engine, "torch_sees_gpu", lambda: False)
    with pytest.raises(CutefuseError, match="no TensorRT was found"):
        engine.choose_backend("auto")
    with pytest.raises(CutefuseError, match="PyTorch is not installed"):
        engine.choose_backend("torch")


# ------------------------------------------------------------------------------------------------ times of engines
def test_times_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.engines.pytorch.run import time_interleaved_us

    order: list[tuple[str, int]] = []

    class Fake:
        def __init__(self, name: str, each_us: float) -> None:
            self.name, self.each_us = name, each_us

        def sample_us(self, runs: int) -> float:
            order.append((self.name, runs))
            return self.each_us

    times = time_interleaved_us([Fake("slow", 1000.0), Fake("fast", 100.0)], rounds=3, sample_ms=2.0)  # type: ignore[list-item]
    assert times == [[1000.0] * 3, [100.0] * 3]
    slow, fast = ("slow", 2), ("fast", 20)
    assert order[4:] == [slow, fast, fast, slow, slow, fast]


def test_an_engine_times_itself_and_its_layers() -> None:
    from cutefuse.engines.pytorch.run import TorchEngine

    made = TorchEngine.build(network(), device="cpu")
    assert made.time_us(rounds=3, sample_ms=1) > 0
    times = made.layer_times_us(runs=3)
    assert list(times) == ["Concat_0", "Conv_1 + BatchNormalization_2 + Relu_3"] and min(times.values()) > 0


@pytest.mark.parametrize("failures", [1, 2])
def test_what_inductors_patterns_fail_on_compiles_without_them(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on Segformer's attention, whose keys are fewer than its queries."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor import config, utils

    from cutefuse.engines.pytorch.run import TorchEngine

    class Mismatch(BackendCompilerFailed):
        def __init__(self) -> None:
            Exception.__init__(self, "backend='inductor' raised:\nRuntimeError: sizes do not fit")

    patterns = list[bool]()

    def compiled(function: Any, *inputs: Any) -> Any:
        patterns.append(config.pattern_matcher)
        if len(patterns) <= failures:
            raise Mismatch
        return None, []

    monkeypatch.setattr(utils, "run_and_get_code", compiled)
    if failures == 1:
        engine = TorchEngine.build(network(), "compile", "cpu")
        assert any(
            "without inductor's patterns, which fail here: RuntimeError: sizes" in n for n in engine.program.notes
        )
    else:
        with pytest.raises(
            CutefuseError, match=r"cannot take the model \(RuntimeError: sizes do not fit\); use --mode"
        ):
            TorchEngine.build(network(), "compile", "cpu")
    assert patterns == [True, False] and config.pattern_matcher


@pytest.mark.slow
def test_a_compiled_program_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.engines.pytorch.run import TorchEngine

    entered = []

    @contextlib.contextmanager
    def quiet() -> Any:
        entered.append(True)
        yield

    monkeypatch.setattr("cutefuse.engines.pytorch.lock._quiet", quiet)
    plain, compiled = (TorchEngine.build(network(), mode, "cpu") for mode in ("cudnn", "compile"))
    assert entered == [True]  # where Inductor's result runs first
    feed = {"a": np.ones((1, 8, 9, 7), np.float32), "b": np.full((1, 16, 9, 7), 0.5, np.float32)}
    want, got = plain(feed)["y"], compiled(feed)["y"]
    assert float((want - got).abs().max()) < 1e-5 < float(want.abs().max())
    assert any("t" in v for source in compiled.kernel_sources for v in source.variables)


def with_fused_kernel(monkeypatch: pytest.MonkeyPatch, fused: Any) -> Any:
    """An engine after its check of merged steps, where `fused(result)` stands for cuDNN's fused kernel."""
    from cutefuse.engines.pytorch.onnx_ops.convolution import ConvolutionRelu
    from cutefuse.engines.pytorch.run import TorchEngine

    made, real = TorchEngine.build(network(), device="cpu"), ConvolutionRelu.__call__
    monkeypatch.setattr(
        ConvolutionRelu, "__call__", lambda self, *xs: real(self, *xs) if self.apart else fused(real(self, *xs))
    )
    made._check_merges()
    return made


def refuse(y: Any) -> Any:
    raise RuntimeError("Unable to find an engine to execute this computation")


@pytest.mark.parametrize(
    "fused, apart", [(lambda y: y, False), (refuse, True), (lambda y: y * float("nan"), True)],
    ids=["sound", "no kernel", "reads old memory"],
)  # fmt: skip
def test_a_convolution_and_its_activation_part_where_the_fused_kernel_does_not_do(
    monkeypatch: pytest.MonkeyPatch, fused: Any, apart: bool
) -> None:
    made = with_fused_kernel(monkeypatch, fused)
    assert [step.run.apart for step in made.program.steps if step.op_type == "Conv"] == [apart]


def test_a_network_that_makes_nan_by_itself_stays_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.engines.pytorch.run import TorchEngine

    model = network()
    bias = next(i for i in model.graph.initializer if i.name == "k")
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(12, np.nan, np.float32), "k"))
    made = TorchEngine.build(model, device="cpu")
    made._check_merges()
    assert not made.program.steps[-1].run.apart


def test_a_step_that_is_not_merged_and_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.engines.pytorch.run import TorchEngine

    made = TorchEngine.build(network(), device="cpu")
    made.program.steps[0].run = refuse
    with pytest.raises(CutefuseError, match=r"Concat_0 cannot run on cpu \(.*"):
        made.program.steps[0].inputs = made.program.steps[0].inputs[:1]
        made._check_merges()


def test_an_engine_frees_its_memory_when_it_is_dropped() -> None:
    import gc
    import weakref

    from cutefuse.engines.pytorch.run import TorchEngine

    made = TorchEngine.build(network(), device="cpu")
    weights_of = [weakref.ref(t) for t in made.constants.values()]
    gc.disable()
    try:
        del made
        assert weights_of and all(w() is None for w in weights_of)
    finally:
        gc.enable()
