"""--tanh-silu: SiLUs that stay outside in the form that TensorRT 11 fuses, except where it computes that wrongly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import graphs
import numpy as np
import onnx
import pytest

from cutefuse.commands.patch import main
from cutefuse.match.find import find_sites
from cutefuse.rewrite import tanh_silu
from cutefuse.select.gain import Model
from cutefuse.select.rules_tensorrt import TensorRT
from cutefuse.select.times import device_of

SILU = "c = Conv(a, w) s = Sigmoid(c) y = Mul(c, s)"
VALUES = graphs.weights(w=(8, 8, 1, 1))
INPUTS = {"a": "1,8,12,10"}


def found(body: str, opset: int = 17, dtype: str = "float32", **values: np.ndarray) -> list[tanh_silu.Silu]:
    model = graphs.graph(
        body, graphs.weights(dtype=dtype, w=(8, 8, 1, 1)) | values, inputs=INPUTS, opset=opset, dtype=dtype
    )
    return tanh_silu.find(find_sites(model, Path())[0].whole)


def patched(folder: Path, body: str, *words: str, dtype: str = "float32", **values: np.ndarray) -> onnx.ModelProto:
    model = graphs.graph(body, graphs.weights(dtype=dtype, w=(8, 8, 1, 1)) | values, inputs=INPUTS, dtype=dtype)
    onnx.save(model, str(folder / "m.onnx"))
    assert main([str(folder / "m.onnx"), "--tanh-silu", "--without", "single", *words]) == 0
    return onnx.load(str(folder / "m.cutefuse.onnx"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_silu_outside_is_written_with_tanh_and_computes_the_same(tmp_path: Path, dtype: str) -> None:
    model = patched(tmp_path, SILU, "--verify", dtype=dtype)
    assert Counter(n.op_type for n in model.graph.node) == {"Constant": 1, "Conv": 1, "Mul": 3, "Tanh": 1, "Add": 1}
    assert model.graph.node[-1].output[0] == "y" and not model.functions
    assert all(o.domain != "cutefuse" for o in model.opset_import)
    report = json.loads((tmp_path / "m.patch.json").read_text())
    assert report["verify"]["passed"] and report["silu"] == {"outside": 1, "tanh": ["Mul_2"], "left": {}}
    onnx.checker.check_model(model, full_check=True)


def test_without_the_option_it_is_only_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(graphs.graph(SILU, VALUES, inputs=INPUTS), str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--without", "single"]) == 3
    assert "SiLUs outside: 1; --tanh-silu writes them" in capsys.readouterr().out
    assert main([str(tmp_path / "m.onnx"), "--without", "single", "--trt-version", "10.3"]) == 3
    assert "--tanh-silu" not in capsys.readouterr().out


def test_it_says_that_it_helps_no_other_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patched(tmp_path, SILU, "--trt-version", "10.3")
    assert "--tanh-silu only helps TensorRT 11 and newer" in capsys.readouterr().out


def test_a_silu_that_a_fused_node_computes_is_no_candidate(tmp_path: Path) -> None:
    model = graphs.graph(SILU, VALUES, inputs=INPUTS)
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--tanh-silu", "--all"]) == 0
    report = json.loads((tmp_path / "m.patch.json").read_text())
    assert report["silu"]["outside"] == 0 and report["summary"]["fused"] == 1


@pytest.mark.parametrize(
    "body",
    [
        "c = Conv(a, w) s = Sigmoid(c) m = Mul(c, s) t = Neg(s) y = Add(m, t)",  # the gate has another reader
        "s = Sigmoid(a) m = Mul(a, s) y = Conv(m, w)",  # behind a network's input
        "c = Conv(a, w) s = Sigmoid(c) y = Mul(a, s)",  # a gate of another tensor
        "c = Conv(a, w) s = HardSigmoid(c) y = Mul(c, s)",
        "c = Conv(a, w) y = Mul(c, c)",
        "c = MaxPool<kernel_shape=[1,1]>(a) s = Sigmoid(c) y = Mul(c, s)",
    ],
)
def test_what_is_no_silu_behind_a_convolution(body: str) -> None:
    assert found(body) == []


SPLIT = "p, q = Split<axis=1>(h, halves) "
C2F = (
    "h = Conv(a, w) p, q = Split<axis=1>(h, halves) c = Conv(q, v) s = Sigmoid(c) u = Mul(c, s) "
    "y = Add({first}, {second})"
)
HALVES = {"halves": np.array([4, 4]), **graphs.weights(v=(4, 4, 1, 1))}


@pytest.mark.parametrize(("first", "second"), [("u", "q"), ("q", "u"), ("u", "p")])
def test_a_shortcut_over_a_split_keeps_its_form_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: str, second: str
) -> None:
    body = C2F.format(first=first, second=second)
    (silu,) = found(body, **HALVES)
    assert silu.left == tanh_silu.LEFT
    onnx.save(graphs.graph(body, VALUES | HALVES, inputs=INPUTS), str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--tanh-silu", "--exclude", "*"]) == 3
    assert "NVIDIA/TensorRT 4854" in capsys.readouterr().out


def test_a_shortcut_that_lies_in_a_concat_keeps_its_form() -> None:
    """The report's graph: the summand is also an input of a later Concat."""
    body = SILU.replace("y =", "u =") + " r = Relu(a) z = Add(u, r) k = Concat<axis=1>(z, r) y = Relu(k)"
    assert [s.left for s in found(body)] == [tanh_silu.LEFT]


def test_a_shortcut_over_a_whole_tensor_is_rewritten() -> None:
    body = SILU.replace("y =", "u =") + " r = Relu(a) y = Add(u, r)"
    assert [s.left for s in found(body)] == [""]


def test_names_of_new_tensors_are_free(tmp_path: Path) -> None:
    body = SILU.replace("y =", "u =") + " y = Relu(u)"
    model = graphs.graph(body, VALUES, inputs=INPUTS)
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = model.graph.node[2].input[0] = "u.tanh"
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--tanh-silu", "--without", "single", "--verify"]) == 0
    names = [o for n in onnx.load(str(tmp_path / "m.cutefuse.onnx")).graph.node for o in n.output]
    assert len(names) == len(set(names)) and "u.tanh.1" in names


def test_the_rival_in_tensorrt_11_is_the_tanh_form_except_where_it_is_wrong() -> None:
    def before_us(body: str, version: tuple[int, int]) -> float:
        values = VALUES | HALVES
        cleaned, sites = find_sites(graphs.graph(body, values, inputs={"a": "1,8,128,128"}), Path())
        site = next(s for s in sites if s.match and "Silu" in s.match.call.op_type)
        while site.match and "residual" in site.match.takes:
            assert site.fall_back()
        assert site.match is not None
        model = Model(cleaned.whole, TensorRT("tensorrt", version, 90), device_of(90))
        return model.own(site, site.match).before_us

    assert before_us(SILU, (11, 2)) < before_us(SILU, (10, 3)) - 1.0
    split = C2F.format(first="u", second="q")
    assert before_us(split, (11, 2)) == before_us(split, (10, 3))
