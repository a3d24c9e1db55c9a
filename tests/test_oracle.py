"""The compiler as judge of a patch: what it records of the plain model, and which sites its copies outweigh."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from devices import skip_without_code
from onnx import numpy_helper, parser

from cutefuse.commands.patch import main
from cutefuse.engines.tensorrt import rtx
from cutefuse.errors import CutefuseError
from cutefuse.optimize import oracle
from cutefuse.rewrite.patch import Options
from cutefuse.select.compiled import Kernel, Record, removed_bytes

pytestmark = pytest.mark.slow

needs_rtx = pytest.mark.skipif(rtx.available() is not None, reason="TensorRT for RTX is not installed")
RTX = Options(engine="rtx", sm=89)


def w(*dims: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(dims) / 8).astype(np.float16)


def model(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    made = parser.parse_model(text)
    made.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    for i, node in enumerate(made.graph.node):
        node.name = f"{node.op_type}_{i}"
    return made


def decoder() -> onnx.ModelProto:
    """A level of a UNet: TensorRT copies the enlarged tensor and the Concat."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float16[1, 64, 32, 32] x, float16[1, 32, 64, 64] skip) => (float16[1, 32, 64, 64] y) {
      up = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(x, , scales)
      joined = Concat<axis = 1>(up, skip)
      c = Conv<pads = [1, 1, 1, 1]>(joined, w)
      y = Relu(c)
    }"""
    return model(text, w=w(32, 96, 3, 3), scales=np.float32([1, 1, 2, 2]))


def inception() -> onnx.ModelProto:
    """A Concat that TensorRT's convolutions write in place, and that a pooling reads too."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float16[1, 64, 28, 28] x) => (float16[1, 64, 28, 28] y, float16[1, 64, 28, 28] p) {
      a0 = Conv(x, wa) a = Relu(a0)
      b0 = Conv<pads = [1, 1, 1, 1]>(x, wb) b = Relu(b0)
      joined = Concat<axis = 1>(a, b)
      c = Conv<pads = [1, 1, 1, 1]>(joined, wc)
      y = Relu(c)
      p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(joined)
    }"""
    return model(text, wa=w(32, 64, 1, 1), wb=w(32, 64, 3, 3), wc=w(64, 64, 3, 3))


def written(made: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    onnx.save(made, path)
    return path


def test_a_share_of_a_kernel_goes_with_its_nodes() -> None:
    copy, compute = Kernel(("cat", "up"), 1000, True), Kernel(("cat",), 500, False)
    record = Record((copy, compute), frozenset({"cat", "up", "conv"}))
    assert record.of(["up"]) == {copy: 0.5}
    assert record.of(["cat", "up"]) == {copy: 1.0, compute: 1.0}
    assert record.of(["conv"]) == {}
    assert removed_bytes(record, {"cat": 2, "up": 1}) == 1000 / 2 / 2 + 1000 / 2
    assert removed_bytes(record, {"conv": 1}) == 0


def test_engines_of_the_classic_compiler_are_not_asked() -> None:
    assert oracle.is_for(RTX)
    assert oracle.is_for(Options(engine="tensorrt", sm=100))
    assert not oracle.is_for(Options(engine="tensorrt", sm=90))
    assert not oracle.is_for(Options(engine="torch"))


@needs_rtx
def test_copies_of_a_concat_go(tmp_path: Path) -> None:
    source = written(decoder(), tmp_path)
    result = oracle.judged(source, tmp_path / "out.onnx", RTX)
    told = json.loads((tmp_path / "out.patch.json").read_text())["compiled"]
    assert told == result.report["compiled"]
    assert result.report["summary"]["fused"] == 1
    assert not told["left_out"]
    assert told["patched"]["copy_bytes"] < 0.6 * told["plain"]["copy_bytes"]  # its inputs are turned in both
    assert told["patched"]["plugins"] == 1


@needs_rtx
def test_a_concat_that_costs_nothing_stays(tmp_path: Path) -> None:
    source = written(inception(), tmp_path)
    forced = oracle.judged(source, tmp_path / "all.onnx", Options(engine="rtx", sm=89, all_sites=True))
    told = forced.report["compiled"]
    assert forced.report["summary"]["fused"] >= 2
    assert told["patched"]["copy_bytes"] > told["plain"]["copy_bytes"]  # what the judge is for
    result = oracle.judged(source, tmp_path / "out.onnx", Options(engine="rtx", sm=89, min_gain_us=-1e6))
    told = result.report["compiled"]
    assert told["left_out"]
    assert all("MB" in reason for reason in told["left_out"].values())
    left = {s["name"] for s in result.report["sites"] if s["status"] == "left out"}
    assert left == set(told["left_out"])
    after = told["patched"]["copy_bytes"] if told["patched"] else 0
    assert after <= told["plain"]["copy_bytes"]
    assert (tmp_path / "out.onnx").exists() == (result.output is not None)


@needs_rtx
def test_a_dry_run_compiles_and_writes_nothing(tmp_path: Path) -> None:
    source = written(decoder(), tmp_path)
    result = oracle.judged(source, tmp_path / "out.onnx", Options(engine="rtx", sm=89, dry_run=True))
    assert result.report["compiled"]["patched"]["plugins"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("sm", [90, 87])
def test_rules_decide_for_a_gpu_that_it_does_not_build_for(sm: int, tmp_path: Path) -> None:
    skip_without_code(sm)
    result = oracle.judged(written(decoder(), tmp_path), tmp_path / "out.onnx", Options(engine="rtx", sm=sm))
    assert "rules" in result.report["compiled"]["note"]
    assert result.report["summary"]["fused"] == 1


def test_rules_decide_without_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx, "available", lambda: "it is not installed")
    result = oracle.judged(written(decoder(), tmp_path), tmp_path / "out.onnx", RTX)
    assert result.report["compiled"]["note"].startswith("it is not installed")
    assert "rules" in oracle.sentence(result.report)


def test_rules_decide_where_the_compiler_refuses_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CutefuseError("the parser refused it")

    monkeypatch.setattr(rtx, "available", lambda: None)
    monkeypatch.setattr(rtx, "compile_model", refuse)
    result = oracle.judged(written(decoder(), tmp_path), tmp_path / "out.onnx", RTX)
    assert result.report["compiled"]["note"].startswith("the parser refused it")
    assert result.report["summary"]["fused"] == 1


@needs_rtx
def test_the_command_tells_what_the_compiler_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(written(decoder(), tmp_path))
    assert main([source, "--engine", "rtx", "--sm", "89"]) == 0
    out = capsys.readouterr().out
    assert "compiled for 8.9: plain" in out and "--backend rtx --sm 89" in out
    assert main([source, "--engine", "rtx", "--sm", "89", "--no-compile"]) == 0
    assert "compiled" not in capsys.readouterr().out
    assert "compiled" not in json.loads((tmp_path / "m.patch.json").read_text())
