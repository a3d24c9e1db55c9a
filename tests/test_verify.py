"""Verification: by channel, fusion and conversion apart, models that amplify rounding errors; no wrong site passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import bn_weights, graph, run_patch, weights

import models
from cutefuse.commands.patch_words import show
from cutefuse.graph.closeness import compare
from cutefuse.match.conv import read as conv_facts
from cutefuse.rewrite.patch import Options, patch

pytestmark = pytest.mark.slow

# Folding the BatchNormalization rounds the weights anew; the quantiser behind it makes whole steps of that.
BLOCK = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w) n = BatchNormalization(x, gamma, beta, mean, var) "
STEPS = BLOCK + "r = Relu(n) q = QuantizeLinear(r, s, e) y = DequantizeLinear(q, s, e)"
CHAIN = STEPS.replace("y = Deq", "d = Deq") + " g = Concat<axis=1>(d, a) y = Conv(g, u)"
INPUTS = {"a": "2,8,40,40", "b": "2,16,40,40"}


def stepping_model(body: str = STEPS, **more: np.ndarray) -> onnx.ModelProto:
    values = weights(dtype="float16", w=(12, 24, 3, 3), u=(4, 20, 1, 1)) | bn_weights(dtype="float16")
    values |= {"s": np.float16(0.25), "e": np.uint8(0)} | more
    used = {k: v for k, v in values.items() if f"{k})" in body or f"{k}," in body}
    return graph(body, used, opset=19, dtype="float16", inputs=INPUTS)


def wrong_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    right = conv_facts.pack
    monkeypatch.setattr(conv_facts, "pack", lambda w, *of: right(w[:, ::-1], *of))


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("body", [STEPS, CHAIN])
def test_a_step_that_a_quantiser_takes_elsewhere_is_no_fault_of_the_patch(
    body: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, patched = run_patch(stepping_model(body), tmp_path, layout=layout)
    proof: dict[str, Any] = result.report["verify"]
    assert patched is not None and proof["passed"]
    assert proof["end_to_end"][0]["max_rel_error"] > proof["outputs"][0]["tolerance"] > 0
    assert all(r["max_rel_error"] <= r["tolerance"] for r in (*proof["outputs"], *proof["sites"]))
    show(result, verbose=False)
    assert "amplifies rounding errors" in capsys.readouterr().out


def test_a_model_without_steps_is_judged_end_to_end(tmp_path: Path) -> None:
    result, _ = run_patch(stepping_model(BLOCK + "y = Relu(n)"), tmp_path)
    assert result.report["verify"]["passed"] and "end_to_end" not in result.report["verify"]


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("body", [STEPS, CHAIN, BLOCK + "y = Relu(n)"])
def test_a_wrong_site_fails_on_its_own_inputs_too(
    body: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_packing(monkeypatch)
    result, patched = run_patch(stepping_model(body), tmp_path, layout=layout)
    proof = result.report["verify"]
    assert result.exit_code == 1 and patched is None
    assert not proof["passed"] and proof["first_wrong_site"] == "Conv_1" and "end_to_end" not in proof


@pytest.mark.parametrize("external", [False, True])
def test_a_failed_proof_leaves_the_files_of_an_earlier_run(
    external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "model.onnx", tmp_path / "model.cutefuse.onnx"
    onnx.save(stepping_model(STEPS), str(source), save_as_external_data=external, size_threshold=0)
    assert patch(source, output, Options(verify=True, all_sites=True)).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == (5 if external else 3)
    wrong_packing(monkeypatch)
    result = patch(source, output, Options(verify=True, all_sites=True))
    assert result.exit_code == 1 and result.output is None and not result.report["verify"]["passed"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    show(result)
    assert "earlier run" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
def test_a_wrong_site_behind_a_step_is_found(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = conv_facts.pack
    monkeypatch.setattr(conv_facts, "pack", lambda w, *of: right(w if len(w) == 12 else w + np.float16(0.01), *of))
    result, patched = run_patch(stepping_model(CHAIN), tmp_path, layout=layout)
    assert result.exit_code == 1 and patched is None and "end_to_end" not in result.report["verify"]


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
def test_a_change_outside_of_every_site_fails(layout: str, tmp_path: Path) -> None:
    from cutefuse.graph.verify import Probe, verify

    model = stepping_model(STEPS)
    _, patched = run_patch(model, tmp_path, layout=layout)
    assert patched is not None
    scale = next(t for t in patched.graph.initializer if t.name == "s")
    scale.CopyFrom(onnx.numpy_helper.from_array(np.float16(0.375), "s"))
    report = verify(tmp_path / "model.onnx", patched, tmp_path, 4e-3, {}, probes=[Probe("site", "r")])
    assert not report["passed"] and "end_to_end" not in report


def test_without_a_probe_nothing_is_forgiven(tmp_path: Path) -> None:
    from cutefuse.graph.verify import verify

    _, patched = run_patch(stepping_model(STEPS), tmp_path)
    assert patched is not None
    assert not verify(tmp_path / "model.onnx", patched, tmp_path, 4e-3, {})["passed"]


def test_int8_values_may_be_a_step_apart_and_no_more() -> None:
    values = np.arange(-120, 121, dtype=np.int8)
    assert compare(values, values + np.int8(1), 2e-2)["passed"]
    assert not compare(values, values + np.int8(4), 2e-2)["passed"]
    assert not compare(values.astype(np.int64), values.astype(np.int64) + 1, 2e-2)["passed"]


# Twenty-six convolutions one after the other, each in float16 between tensors of a float32 graph.
LOW: dict[str, Any] = {"dtype": "float16", "scope": "sites"}


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
def test_a_chain_of_lowered_sites_is_judged_site_by_site(layout: str, tmp_path: Path) -> None:
    result, patched = run_patch(models.build("squeezenet1_1", small=True, batch=1), tmp_path, **LOW, layout=layout)
    proof = result.report["verify"]
    assert patched is not None and proof["passed"] and len(proof["sites"]) == 26
    largest = max(o["max_rel_error"] for o in proof["end_to_end"])
    assert largest > proof["tolerance"] > max(s["max_rel_error"] for s in proof["sites"])


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
def test_a_wrong_site_in_a_chain_of_lowered_sites_is_found(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.build("squeezenet1_1", small=True, batch=1)
    filters = [tuple(t.dims) for t in model.graph.initializer if len(t.dims) == 4]
    assert filters.count(filters[-1]) == 1, "one filter alone is wrong"
    right = conv_facts.pack
    wrong = np.float32(1.02)
    monkeypatch.setattr(conv_facts, "pack", lambda w, *of: right(w * wrong if w.shape == filters[-1] else w, *of))
    result, patched = run_patch(model, tmp_path, **LOW, layout=layout)
    proof = result.report["verify"]
    assert patched is None and not proof["passed"] and "end_to_end" not in proof


def test_an_input_without_axes_gets_a_value_of_its_type(tmp_path: Path) -> None:
    model = graph("c = Concat<axis=1>(a, b) x = Conv(c, w, k) r = Relu(x) t = Tanh(r) y = Add(r, t)")
    model.graph.node[-1].CopyFrom(onnx.helper.make_node("Where", ["flag", "r", "t"], ["y"], name="choice"))
    model.graph.input.append(onnx.helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, []))
    result, patched = run_patch(model, tmp_path)
    assert patched is not None and result.report["verify"]["passed"]


def test_nodes_that_share_a_name_are_proven(tmp_path: Path) -> None:
    model = graph("c = Concat<axis=1>(a, b) x = Conv(c, w, k) r = Relu(x) d = Concat<axis=1>(b, a) z = Conv(d, w, k) "
                  "t = Tanh(z) y = Add(r, t)")  # fmt: skip
    for node in model.graph.node:
        node.name = "n"
    result, patched = run_patch(model, tmp_path)
    assert patched is not None and len(result.report["verify"]["sites"]) == 2 and result.report["verify"]["passed"]
    assert len({n.name for n in patched.graph.node}) > 1, "what is fused has a name of its own"
