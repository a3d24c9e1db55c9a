"""TensorRT's Python API as a backend: its files, the options it honours and refuses (tests/fake_tensorrt.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_tensorrt
import numpy as np
import pytest
from onnx import TensorProto
from test_engine import make_model

from cutefuse.commands.build import main
from cutefuse.engines import build as engine
from cutefuse.engines import cuda_memory as device
from cutefuse.engines.inputs import parse_shapes
from cutefuse.engines.tensorrt import api as tensorrt_api
from cutefuse.errors import CutefuseError


class Clock(device.Device):
    """A device that hands out addresses and times everything at half a millisecond."""

    name = "clock"
    allocated: list[int] = []

    def _open(self) -> None:
        Clock.allocated = []

    def call(self, name: str, *args: Any) -> Any:
        if name == "cudaMalloc":
            Clock.allocated.append(args[0])
            return 4096 * len(Clock.allocated)
        return 1

    def time_ms(self, work: Callable[[], None]) -> float:
        work()
        return 0.5


@pytest.fixture(autouse=True)
def tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr(fake_tensorrt, "__version__", "10.16.0")
    monkeypatch.setattr(
        engine.importlib.util, "find_spec", lambda name: SimpleNamespace() if name == "tensorrt" else None
    )
    monkeypatch.setattr("cutefuse.engines.tensorrt.trtexec.find", lambda: None)
    monkeypatch.setattr(tensorrt_api, "open_device", Clock)
    (tmp_path / "libcutefuse.so").write_bytes(b"")
    monkeypatch.setenv("CUTEFUSE_LIBRARY_DIR", str(tmp_path))
    fake_tensorrt.calls.clear()
    return fake_tensorrt


def test_the_same_files_as_from_trtexec_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "m.onnx", fused=1)
    assert (
        main(
            [
                str(model),
                str(tmp_path / "out"),
                "--minShapes=x:1x8x4x4",
                "--optShapes=x:2x8x4x4",
                "--maxShapes=x:4x8x4x4",
            ]
        )
        == 0
    )
    assert "1 of 1 fused nodes run as plugins" in capsys.readouterr().out
    files = engine.profile(
        tmp_path / "out" / "m.onnx.engine", tmp_path / "out", ["--iterations=20", "--duration=0", "--warmUp=0"]
    )
    assert {p.name.removeprefix("m.onnx.engine") for p in (tmp_path / "out").iterdir()} == {
        "",
        ".graph.json",
        ".build.log",
        ".build.metadata.json",
        ".profile.json",
        ".profile.log",
        ".profile.metadata.json",
        ".timing.json",
        "timing.cache",
    }
    assert json.loads(files.build_metadata.read_text())["concats"][0]["action"] == "copy"
    records = json.loads(files.profile.read_text())
    assert records[0]["count"] >= 20 and records[1]["averageMs"] == 0.25 and records[1]["percentage"] == 50
    summary = json.loads(files.profile_metadata.read_text())["performance_summary"]
    assert len(json.loads(files.timing.read_text())) == 20 and summary["Latency"] == [0.5] * 7
    assert (
        fake_tensorrt.calls.count("load libcutefuse.so") == 3
    )  # builder, runtime after the build, runtime of the profile
    assert "profile x (1, 8, 4, 4) (2, 8, 4, 4) (4, 8, 4, 4)" in fake_tensorrt.calls


def test_buffers_are_padded_for_vector_formats_and_shapes_come_from_the_profile(tmp_path: Path) -> None:
    engine.build(make_model(tmp_path / "m.onnx"), tmp_path / "out")
    engine.profile(
        tmp_path / "out" / "m.onnx.engine", tmp_path / "out", ["--iterations=1", "--duration=0", "--warmUp=0"]
    )
    assert Clock.allocated == [2 * 16 * 4 * 4 * 2, 1 * 16 * 4 * 4 * 2]


def test_a_session_computes_from_the_inputs_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, Any]] = []

    class Memory(Clock):
        def upload(self, address: int, data: bytes) -> None:
            order.append(("upload", (address, data)))

        def download(self, address: int, into: np.ndarray) -> None:
            order.append(("download", address))
            into[...] = 3

        def synchronize(self) -> None:
            order.append(("wait", None))

    monkeypatch.setattr(tensorrt_api, "open_device", Memory)
    engine.build(make_model(tmp_path / "m.onnx"), tmp_path / "out")
    session = tensorrt_api.Session(tmp_path / "out" / "m.onnx.engine", ["--shapes=x:3x8x4x4"], [])
    x = np.arange(3 * 8 * 4 * 4, dtype=np.float16).reshape(3, 8, 4, 4)
    found = session.outputs({"x": x.transpose(0, 1, 3, 2)})
    assert found.keys() == {"y"} and found["y"].shape == (1, 8, 4, 4) and found["y"].dtype == np.float16
    assert (found["y"] == 3).all()
    assert order == [
        ("upload", (4096, x.transpose(0, 1, 3, 2).copy().tobytes())), ("wait", None), ("download", 8192)
    ]  # fmt: skip
    monkeypatch.setattr(session.context, "execute_async_v3", lambda stream: False)
    with pytest.raises(CutefuseError, match="could not run the engine"):
        session.outputs({"x": x})


def test_the_timing_cache_is_used_again(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.onnx")
    engine.build(model, tmp_path / "out")
    engine.build(model, tmp_path / "out")
    assert [c for c in fake_tensorrt.calls if c.startswith("cache")] == ["cache b''", "cache b'timings'"]


def test_types_follow_version_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half, full = make_model(tmp_path / "h.onnx", dtype=TensorProto.FLOAT16), make_model(tmp_path / "f.onnx")
    for model, options in ((half, []), (full, []), (full, ["--fp16", "--noTF32", "--memPoolSize=workspace:64"])):
        engine.build(model, tmp_path / "out", options)
    assert [c for c in fake_tensorrt.calls if c.startswith("network")] == ["network 2", "network 0", "network 0"]
    assert {"flag FP16", "no TF32", f"pool {64 << 20}"} <= set(fake_tensorrt.calls)
    monkeypatch.setattr(fake_tensorrt, "__version__", "11.1.0")
    fake_tensorrt.calls.clear()
    engine.build(half, tmp_path / "out")
    assert "network 0" in fake_tensorrt.calls  # 11 is always strongly typed
    with pytest.raises(CutefuseError, match="strongly typed"):
        engine.build(full, tmp_path / "out", ["--fp16"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--sparsity=enable"], "not supported when building through"),
        (["--builderOptimizationLevel=high"], "needs a number"),
        (["--shapes=x:big"], "not of the form"),
        (["--memPoolSize=tacticDRAM:1"], "workspace:<MiB>"),
        (["--builderOptimizationLevel=5"], "no tactic was found"),
        (["--dynamicPlugins=/broken.so"], "could not load the plugin library"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(tmp_path: Path, options: list[str], reason: str) -> None:
    model = make_model(tmp_path / "m.onnx")
    with pytest.raises(CutefuseError, match=reason):
        engine.build(model, tmp_path / "out", options)
    assert not (tmp_path / "out" / "m.onnx.engine").exists()


def test_the_parsers_reasons_are_quoted(tmp_path: Path) -> None:
    with pytest.raises(CutefuseError, match="node 0 is not supported"):
        engine.build(make_model(tmp_path / "unparsable.onnx"), tmp_path / "out")
    assert (tmp_path / "out" / "unparsable.onnx.engine.build.log").is_file()


def test_an_engine_of_another_version_and_a_shape_outside_are_told(tmp_path: Path) -> None:
    (tmp_path / "old.engine").write_bytes(b"other")
    with pytest.raises(CutefuseError, match="another version"):
        engine.profile(tmp_path / "old.engine", tmp_path / "out")
    engine.build(make_model(tmp_path / "m.onnx"), tmp_path / "out")
    with pytest.raises(CutefuseError, match="outside of the engine's profile"):
        engine.profile(tmp_path / "out" / "m.onnx.engine", tmp_path / "out", ["--shapes=x:9x8x4x4"])
    assert not (tmp_path / "out" / "m.onnx.engine.profile.json").exists()


def test_shapes_of_scalars_and_names_with_colons() -> None:
    assert parse_shapes("a:0:1x2,b:scalar,c:") == {"a:0": (1, 2), "b": (), "c": ()}


def test_the_wanted_cuda_binding_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEFUSE_DEVICE", "abacus")
    with pytest.raises(CutefuseError, match="allowed are cuda-python, pycuda;"):
        device.open_device()


def test_cuda_python_is_called_by_its_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, tuple[Any, ...]]] = []

    class Runtime:
        cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)

        def __getattr__(self, name: str) -> Any:
            results = {
                "cudaMalloc": (0, 4096),
                "cudaStreamCreate": (0, 7),
                "cudaEventCreate": (0, 9),
                "cudaEventElapsedTime": (0, 1.5),
            }

            def call(*args: Any) -> tuple[Any, ...]:
                done.append((name, args))
                return results.get(name, (0,))

            return call

    monkeypatch.setattr(device.importlib, "import_module", lambda name: Runtime())
    gpu = device.CudaPython()
    assert gpu.stream == 7 and gpu.allocate(10) == 4096 and gpu.time_ms(lambda: None) == 1.5
    gpu.upload(4096, b"data")
    into = np.zeros(8, np.uint8)
    gpu.download(4096, into)
    gpu.close()
    assert ("cudaMemcpy", (into.ctypes.data, 4096, 8, 2)) in done
    assert ("cudaMemcpy", (4096, b"data", 4, 1)) in done and ("cudaFree", (4096,)) in done
    assert ("cudaEventRecord", (9, 7)) in done and ("cudaMemset", (4096, 0, 10)) in done


def test_a_failing_cuda_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaStreamCreate=lambda: (2, 0))
    monkeypatch.setattr(device.importlib, "import_module", lambda name: runtime)
    with pytest.raises(CutefuseError, match="cudaStreamCreate failed: 2"):
        device.CudaPython()
