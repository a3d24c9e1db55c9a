"""The PyTorch back end from path to path on the CPU, and its layer times from recorded traces and Inductor's code."""

from __future__ import annotations

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
from cutefuse.engine import build as engine
from cutefuse.errors import CutefuseError
from cutefuse.report.reader import find_engines, read_engine

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
    monkeypatch.setattr("cutefuse.engine.trtexec.find", lambda: None)
    monkeypatch.setitem(sys.modules, "tensorrt", None)


@pytest.mark.parametrize("sees_gpu, want", [(True, "torch"), (False, "onnxruntime")])
def test_pytorch_is_the_embedded_engine_where_it_has_a_gpu(
    no_tensorrt: None, monkeypatch: pytest.MonkeyPatch, sees_gpu: bool, want: str
) -> None:
    found = engine.importlib.util.find_spec
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda n: None if n == "tensorrt" else found(n))
    monkeypatch.setattr(engine, "torch_sees_gpu", lambda: sees_gpu)
    assert engine.choose_backend("auto", allow_onnxruntime=True) == want
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
    from cutefuse.engine.torch_gpu import time_interleaved_us

    order: list[tuple[str, int]] = []

    class Fake:
        def __init__(self, name: str, each_us: float) -> None:
            self.name, self.each_us = name, each_us

        def sample_us(self, runs: int) -> float:
            order.append((self.name, runs))
            return self.each_us

    times = time_interleaved_us([Fake("slow", 1000.0), Fake("fast", 100.0)], rounds=3, sample_ms=2.0)  # type: ignore[list-item]
    assert times == [[1000.0] * 3, [100.0] * 3]
    assert order[4:] == [("slow", 2), ("fast", 20)] * 3


def test_an_engine_times_itself_and_its_layers() -> None:
    from cutefuse.engine.torch_gpu import TorchEngine

    made = TorchEngine.build(network(), device="cpu")
    assert made.time_us(rounds=3, sample_ms=1) > 0
    times = made.layer_times_us(runs=3)
    assert list(times) == ["Concat_0", "Conv_1 + BatchNormalization_2 + Relu_3"] and min(times.values()) > 0


@pytest.mark.slow
def test_a_compiled_program_computes_the_same() -> None:
    from cutefuse.engine.torch_gpu import TorchEngine

    plain, compiled = (TorchEngine.build(network(), mode, "cpu") for mode in ("cudnn", "compile"))
    feed = {"a": np.ones((1, 8, 9, 7), np.float32), "b": np.full((1, 16, 9, 7), 0.5, np.float32)}
    want, got = plain(feed)["y"], compiled(feed)["y"]
    assert float((want - got).abs().max()) < 1e-5 < float(want.abs().max())
    assert any("t" in v for source in compiled.kernel_sources for v in source.variables)


# ------------------------------------------------------------------------------------------- kernels and their layers
def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": list(events)}


def region(step: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"cutefuse step {step}", "ts": ts, "dur": dur, "tid": 1}


def launch(correlation: int, ts: float, tid: int = 1) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts, "dur": 1, "tid": tid,
            "args": {"correlation": correlation}}  # fmt: skip


def kernel(name: str, correlation: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": 7, "args": {"correlation": correlation}}


def test_a_kernel_belongs_to_the_step_whose_region_holds_its_launch() -> None:
    from cutefuse.engine.torch_layers import read_trace

    found = read_trace(trace(
        kernel("b", 2, 90, 5), kernel("a", 1, 50, 3), kernel("c", 3, 99, 1), kernel("d", 4, 120, 1),
        region(0, 10, 10), region(1, 30, 10), launch(1, 12), launch(2, 35), launch(3, 36), launch(4, 38, tid=2),
        {"cat": "gpu_memset", "name": "Memset (Device)", "ts": 91, "dur": 2, "args": {"correlation": 9}},
    ))  # fmt: skip
    assert [(k.name, k.step, k.time_us) for k in found] == [
        ("a", 0, 3), ("b", 1, 5), ("Memset (Device)", None, 2), ("c", 1, 1), ("d", None, 1),
    ]  # fmt: skip


def test_an_empty_trace_has_no_kernels() -> None:
    from cutefuse.engine.torch_layers import read_trace, replays

    assert replays(read_trace({})) == []


def steps_of(*names: str) -> list[Any]:
    from cutefuse.engine.torch_graph.program import Step

    return [Step(abs, [f"t{i}"], [f"t{i + 1}"], n, "Relu", {}, [n]) for i, n in enumerate(names)]


def kernels(*rows: tuple[str, float, int | None], launch: int = 1) -> list[Any]:
    from cutefuse.engine.torch_layers import Kernel

    return [Kernel(name, i, time, launch, step) for i, (name, time, step) in enumerate(rows)]


def test_steps_take_their_times_from_the_replays() -> None:
    from cutefuse.engine.torch_layers import replays, step_layers

    by_step = kernels(("k", 9, 0), ("fill", 9, 1), ("m", 9, 1))
    runs = replays([*kernels(("k", 2, None), ("fill", 1, None), ("m", 3, None), launch=5),
                    *kernels(("k", 4, None), ("fill", 1, None), ("m", 5, None), launch=6)])  # fmt: skip
    layers = step_layers(steps_of("one", "two", "view"), by_step, runs)
    assert [(la.name, la.kernels, la.times_us) for la in layers] == [
        ("one", ["k"], [2, 4]), ("two", ["fill", "m"], [4, 6]), ("view", [], []),
    ]  # fmt: skip


CODE = '''
class Runner:
    def call(self, args):
        arg0_1, = args
        # Topologically Sorted Source Nodes: [t1], Original ATen: [aten.convolution]
        buf0 = extern_kernels.convolution(arg0_1, arg1_1, stride=(1, 1), bias=None)
        # Topologically Sorted Source Nodes: [t2, t3], Original ATen: [aten.relu, aten.add]
        stream0 = get_raw_stream(0)
        triton_poi_fused_add_relu_0.run(buf0, 64, stream=stream0)
        # Topologically Sorted Source Nodes: [fused_node], Original ATen: [cutefuse.fused_node]
        buf2 = torch.ops.cutefuse.fused_node.default([buf0, arg2_1], 41)
        # Topologically Sorted Source Nodes: [t5], Original ATen: [aten.relu]
        triton_poi_fused_relu_1.run(buf2, 64, stream=stream0)
        return (buf2, )
        triton_poi_fused_never_2.run(buf2)
'''  # fmt: skip


def test_inductors_code_says_what_each_launch_computes() -> None:
    from cutefuse.engine.torch_layers import KernelSource, kernel_sources

    assert kernel_sources(CODE) == [
        KernelSource("", ("t1",)), KernelSource("triton_poi_fused_add_relu_0", ("t2", "t3")),
        KernelSource("", ("fused_node",), 41), KernelSource("triton_poi_fused_relu_1", ("t5",)),
    ]  # fmt: skip
    assert kernel_sources("print('something else')") == []


@pytest.mark.parametrize(
    "names, want",
    [
        (["cudnn", "triton_poi_fused_add_relu_0", "ours", "triton_poi_fused_relu_1"], [0, 1, 2, 3]),
        (["nchw", "cudnn", "triton_poi_fused_add_relu_0", "ours", "split", "triton_poi_fused_relu_1"],
         [0, 0, 1, 2, 2, 3]),
        (["triton_poi_fused_add_relu_0", "ours", "triton_poi_fused_relu_1"], [1, 2, 3]),
        (["cudnn", "triton_other_9", "ours"], [0, None, None]),
        (["a", "b"], [0, 0]),
        ([], []),
    ],
    ids=["one each", "several of a call", "a call without a kernel", "other code", "no triton", "nothing"],
)  # fmt: skip
def test_kernels_are_laid_beside_the_launches(names: list[str], want: list[int | None]) -> None:
    from cutefuse.engine.torch_layers import align, kernel_sources

    assert align(names, kernel_sources(CODE)) == want


def test_kernels_between_two_of_triton_are_shared_among_the_calls_there() -> None:
    from cutefuse.engine.torch_layers import KernelSource, align

    sources = [KernelSource(""), KernelSource(""), KernelSource("triton_0"), KernelSource("")]
    assert align(["c", "d", "triton_0", "e", "f"], sources) == [0, 1, 2, 3, 3]
    assert align(["c", "c2", "d", "d2", "triton_0"], sources) == [0, 0, 1, 1, 2]


def test_a_compiled_layer_knows_its_steps() -> None:
    from cutefuse.engine.torch_layers import compiled_layers, kernel_sources

    names = ["cudnn", "triton_poi_fused_add_relu_0", "ours", "triton_poi_fused_relu_1"]
    runs = [kernels(*((n, 1.0 + i, None) for n in names)) for i in range(2)]
    layers = compiled_layers(steps_of("conv", "relu", "add", "fused", "last"), kernel_sources(CODE), runs)
    assert [(la.name, [s.name for s in la.steps]) for la in layers] == [
        ("conv", ["conv"]), ("triton_poi_fused_add_relu_0", ["relu", "add"]), ("ours", []), ("last", ["last"]),
    ]  # fmt: skip
    assert all(la.times_us == [1.0, 2.0] for la in layers)
    unknown = compiled_layers(steps_of("conv"), [], runs)
    assert [la.name for la in unknown] == names and not any(la.steps for la in unknown)
    assert compiled_layers(steps_of("conv"), [], []) == []


# ------------------------------------------------------------------------------------------------- fused nodes' memory
@pytest.mark.parametrize(
    "shape, stride, want",
    [
        ((2, 16, 3, 5), (240, 1, 80, 16), 16), ((2, 8, 3, 5), (240, 1, 80, 16), 16), ((1, 8, 1, 1), (8, 1, 8, 8), 8),
        ((2, 1, 3, 5), (15, 15, 5, 1), 1), ((2, 8, 1, 5), (80, 1, 999, 16), 16), ((0, 8, 3, 5), (0, 1, 0, 0), 8),
        ((2, 16, 3, 5), (240, 15, 5, 1), 0), ((2, 16, 3, 5), (240, 1, 96, 16), 0), ((2, 16, 3, 5), (999, 1, 80, 16), 0),
        ((2, 16, 3, 5), (120, 1, 40, 8), 0), ((1, 7, 1, 1), (7, 1, 7, 7), 0),
    ],
)  # fmt: skip
def test_pixels_are_found_in_strides(shape: tuple[int, ...], stride: tuple[int, ...], want: int) -> None:
    import torch

    from cutefuse.engine.torch_graph.fused import pixel_stride

    t = torch.empty(4000).as_strided(shape, stride) if 0 not in shape else torch.empty(shape)
    assert pixel_stride(t) == want


def test_an_engine_frees_its_memory_when_it_is_dropped() -> None:
    import gc
    import weakref

    from cutefuse.engine.torch_gpu import TorchEngine

    made = TorchEngine.build(network(), device="cpu")
    weights_of = [weakref.ref(t) for t in made.constants.values()]
    gc.disable()
    try:
        del made
        assert weights_of and all(w() is None for w in weights_of)
    finally:
        gc.enable()
