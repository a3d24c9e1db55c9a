"""What --verify tells apart: channels of one tensor, the fusion from the type conversion, sites that were compared from
sites that were not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs import INPUTS, fused_types, graph, run_patch, weights

from cutefuse.commands.patch import main
from cutefuse.commands.patch_words import show
from cutefuse.graph import verify
from cutefuse.graph.closeness import Judge, compare
from cutefuse.graph.exact import in_float64
from cutefuse.match.conv import read as conv_facts
from cutefuse.operators import conv_body

pytestmark = pytest.mark.slow

SITE = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(x)"
TWO = (
    "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w, k) z = Relu(x) "
    "d = Concat<axis=1>(z, b) v = Conv(d, u) y = Tanh(v)"
)
VALUES = weights(w=(16, 24, 3, 3), k=(16,), u=(8, 32, 1, 1))
BIG = {"big": np.float32(6e4), "small": np.float32(1e-4)}
# A detection transformer picks its queries by score: scores that float16 makes equal change places.
PICKS = "f = Reshape(y, flat) top, i = TopK<axis=1>(f, many)"


def small_channel(dtype: str, activation: str) -> onnx.ModelProto:
    """A site whose channel 5 has values a hundred times smaller than the others'."""
    values = weights(dtype=dtype, w=(12, 24, 3, 3), k=(12,))
    values["w"][5] *= 0.01
    values["k"][5] *= 0.01
    return graph(SITE.replace("Relu", activation), values, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("activation", ["Relu", "Tanh"])
def test_a_wrong_channel_of_small_values_is_found(
    activation: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = conv_facts.pack

    def wrong(w: np.ndarray, *of: Any) -> np.ndarray:
        w = w.copy()
        w[5] *= 1.2  # within 1 % of the largest value of all channels
        return right(w, *of)

    model = small_channel(dtype, activation)
    assert run_patch(model, tmp_path)[0].report["verify"]["passed"]
    (tmp_path / "model.cutefuse.onnx").unlink()
    monkeypatch.setattr(conv_facts, "pack", wrong)
    result, patched = run_patch(model, tmp_path)
    proof = result.report["verify"]
    assert result.exit_code == 1 and patched is None and proof["first_wrong_site"] == "Conv_1"
    site = proof["sites"][0]
    assert (site["axis"], site["channel"]) == (1, 5) and site["max_rel_error"] > 0.1
    assert site["max_abs_error"] <= 1e-2 * site["max_abs_value"], "by the whole tensor it would have passed in float16"


def rounded(rng: np.random.Generator, *dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal values, and the same with errors of a thousandth of what is normal."""
    a = rng.standard_normal(dims)
    return a, a + 1e-3 * rng.standard_normal(dims)


@pytest.mark.parametrize("axis", [1, 2])
def test_floats_are_judged_by_feature_map_and_by_feature(axis: int) -> None:
    rng = np.random.default_rng(0)
    scale = np.ones((1, 6, 5))
    np.moveaxis(scale, axis, 0)[3] = 1e-2
    a, b = (scale * v for v in rounded(rng, 4, 6, 5))
    assert compare(a, b, 1e-2)["passed"]
    np.moveaxis(b, axis, 0)[3] *= 1.1
    found = compare(a, b, 1e-2)
    assert not found["passed"] and (found["axis"], found["channel"]) == (axis, 3) and found["max_rel_error"] > 0.02
    assert found["max_abs_error"] < 1e-2 * found["max_abs_value"]


def test_channels_of_few_values_are_judged_together() -> None:
    a = np.array([[1.0, 1e-4], [2.0, 1e-4]])
    b = a + 1e-3
    assert compare(a, b, 1e-2)["passed"], "two values are small by chance"
    assert not compare(np.repeat(a, 4, 0), np.repeat(b, 4, 0), 1e-2)["passed"]
    assert not compare(a, a + 0.1, 1e-2)["passed"]


def test_a_channel_of_zeros_must_stay_nearly_zero() -> None:
    a = np.ones((2, 3, 8))
    a[:, 1] = 0
    assert compare(a, a, 1e-2)["passed"]
    assert not compare(a, a + 1e-5, 1e-2)["passed"] and compare(a, a + 1e-9, 1e-2)["passed"]
    assert not compare(0 * a, 0 * a + 1e-9, 1e-2)["passed"], "zeros have no rounding errors"


def test_a_channel_that_the_activation_empties_has_the_errors_of_its_sums() -> None:
    rng = np.random.default_rng(0)
    a, b = rounded(rng, 2, 3, 8, 8)
    shift = a[:, 1].max() - 2e-3  # what Relu leaves of channel 1 is as small as the errors
    a[:, 1] -= shift
    b[:, 1] -= shift
    fetched: list[list[str]] = []

    def judge(actual: np.ndarray) -> dict[str, Any]:
        def fetch(tensors: Any) -> list[Any]:
            fetched.append(list(tensors))
            return [a]

        return Judge(["y", "z"], 1, [np.maximum(a, 0)] * 2, 1e-2, {"z": ["x"]}, fetch)([np.maximum(a, 0), actual])["z"]

    plain = compare(np.maximum(a, 0), np.maximum(b, 0), 1e-2)
    assert not plain["passed"] and plain["channel"] == 1
    assert judge(np.maximum(b, 0))["passed"] and fetched == [["x"]]
    wrong = b.copy()
    wrong[:, 1] += 0.1
    assert not judge(np.maximum(wrong, 0))["passed"], "an error of the sums is one still"
    wrong = b.copy()
    wrong[:, 2] *= 1.1
    assert not judge(np.maximum(wrong, 0))["passed"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_that_overflow_in_one_of_the_two_are_judged_by_float64_and_apart(dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    exact = np.random.default_rng(0).standard_normal((2, 3, 4, 4))
    exact[0, 1, 0, :3] = float(ml_dtypes.finfo(kind).max) / 4
    right, unfused = exact.astype(kind), exact.astype(kind)
    unfused[0, 1, 0, :3] = np.inf
    assert compare(unfused, unfused, 1e-2)["passed"] and not compare(unfused, right, 1e-2)["passed"]
    found = compare(unfused, right, 1e-2, exact=exact)
    assert found["passed"] and found["overflows"] == 3
    for place, wrong in (((0, 1, 0, 0), 0.0), ((0, 1, 0, 1), np.nan), ((0, 1, 0, 2), -np.inf), ((1, 2, 0, 0), 9.0)):
        actual = right.copy()
        actual[place] = wrong
        assert not compare(unfused, actual, 1e-2, exact=exact)["passed"], place
    exact[0, 1, 0, 0] = np.inf
    assert not compare(unfused, right, 1e-2, exact=exact)["passed"], "too large in float64 as well"


# x * relu6(x + 3) / 6 has six times its value on the way.
HARD_SWISH = SITE.replace("y = Relu(x)", "h = Add(x, three) l = Clip(h, zero, six) m = Mul(x, l) y = Div(m, six)")


@pytest.mark.parametrize("opset", [11, 17])
def test_a_site_that_overflows_on_the_way_is_judged_by_float64(
    opset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = weights(w=(12, 24, 3, 3), k=(12,), u=(8, 12, 1, 1))
    values |= {name: np.float32(v) for name, v in (("three", 3), ("zero", 0), ("six", 6))}
    values["w"][5], values["k"][5] = 0, 0
    values["w"][5, 3, 1, 1] = np.finfo(np.float32).max / 8
    # Infinities go on to another site and the output, which are right on the unfused model's own values alone.
    model = graph(f"{HARD_SWISH} o = Conv(y, u) p = Relu(o)", values, opset=opset, outputs=("p",))
    result, patched = run_patch(model, tmp_path)
    proof = result.report["verify"]
    assert fused_types(patched)[0] == "CuteConcatConv2HardSwish" and proof["passed"], proof
    site = next(s for s in proof["sites"] if s["tensor"] == "y")
    assert site["overflows"] > 10 and proof["end_to_end"]
    show(result, verbose=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "overflows inside Conv_1" in said

    right = conv_body.activate

    def wrong(body: Any, suffix: str, y: str, dtype: str) -> str:
        limit = body.constant(np.finfo(np.float32).max / 5, "float32")  # wrong only where the unfused model overflows
        return body.add("Clip", right(body, suffix, y, dtype), "", limit)

    monkeypatch.setattr(conv_body, "activate", wrong)
    (tmp_path / "model.cutefuse.onnx").unlink()
    result, patched = run_patch(model, tmp_path)
    assert result.exit_code == 1 and patched is None and result.report["verify"]["first_wrong_site"] == "Conv_1"


def test_float64_begins_behind_the_last_tensor_that_is_finite(tmp_path: Path) -> None:
    w = np.full((1, 1, 1, 1), 3e38, np.float32)
    model = graph("x = Conv(a, w) y = Mul(x, part)", {"w": w, "part": np.float32(0.25)}, inputs={"a": "1,1,2,2"})
    a = np.float32([[[[1, 2], [-3, 0.5]]]])
    made = {"x": np.float32([[[[3e38, np.inf], [-np.inf, 1.5e38]]]])}
    asked: list[str] = []

    def fetch(tensors: Any) -> list[Any]:
        asked.extend(tensors)
        return [made[t] for t in tensors]

    def found() -> Any:
        return in_float64(model, tmp_path, "y", ["x"], {"a": a}, fetch)

    np.testing.assert_allclose(found(), a.astype(np.float64) * 0.75e38, rtol=1e-6)
    made["x"] = np.full_like(a, 4.0)
    np.testing.assert_array_equal(found(), np.full(a.shape, 1.0))
    assert asked == ["x", "x"]
    del made["x"]
    assert found() is None


def test_quantised_numbers_are_judged_by_channel_too() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((2, 4, 16, 16)) * np.array([40, 40, 1.5, 40])[:, None, None]
    a = np.rint(exact).astype(np.int8)
    b = np.rint(exact * (1 + 2e-3 * rng.standard_normal(exact.shape))).astype(np.int8)
    assert (a != b).mean() > 5e-3 and compare(a, b, 1e-2)["passed"], "a step at ties, more often in wide channels"
    wrong = b.copy()
    wrong[:, 2] = a[:, 2] - np.sign(a[:, 2])
    found = compare(a, wrong, 1e-2)
    assert found["max_steps"] == 1 and not found["passed"], "in a channel of few steps one step is no tie"
    assert compare(a[:, :2], b[:, :2], 1e-2)["passed"] and not compare(a, b + np.int8(2), 1e-2)["passed"]


def picking_model() -> onnx.ModelProto:
    values = VALUES | {"flat": np.array([2, -1]), "many": np.array([300])}
    inputs = {k: v.replace("n", "2").replace("9,7", "20,20") for k, v in INPUTS.items()}
    model = graph(f"{TWO} {PICKS}", values, inputs=inputs, outputs=("top",), rank=2)
    model.graph.output.append(onnx.helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [2, 300]))
    return model


def patched_by(model: onnx.ModelProto, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    onnx.save(model, str(folder / "m.onnx"))
    code = main([str(folder / "m.onnx"), "--verify", *options])
    return code, json.loads((folder / "m.patch.json").read_text())["verify"]


def test_what_the_conversion_changes_is_no_fault_of_the_fusion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, proof = patched_by(picking_model(), tmp_path, "--dtype", "fp16")
    assert code == 0 and proof["passed"] and [s["name"] for s in proof["sites"]] == ["Conv_1", "Conv_4"]
    converted = {r["name"]: r for r in proof["conversion"]}
    assert converted["i"]["mismatch_share"] > 0.1, "float16 alone picks other places"
    assert all(r["passed"] for r in (*proof["outputs"], *proof["sites"]))
    out = capsys.readouterr().out
    assert "float16 itself changes" in out and "2 of 2 fused sites" in out


def test_a_wrong_site_is_found_behind_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = conv_facts.pack
    monkeypatch.setattr(conv_facts, "pack", lambda w, *of: right(w * (1.1 if len(w) == 8 else 1), *of))
    code, proof = patched_by(picking_model(), tmp_path, "--dtype", "fp16")
    assert code == 1 and not proof["passed"] and proof["first_wrong_site"] == "Conv_4"
    assert not (tmp_path / "m.cutefuse.onnx").exists()


def test_without_a_conversion_there_is_nothing_to_say_about_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--all"], ["--all", "--dtype", "fp16", "--scope", "sites"]):
        code, proof = patched_by(picking_model(), tmp_path, *options)
        assert code == 0 and "conversion" not in proof and "the conversion" not in capsys.readouterr().out


def test_a_conversion_that_overflows_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = graph(
        TWO.replace("y = Tanh(v)", "h = Mul(v, big) p = Mul(h, big) q = Mul(p, small) y = Mul(q, small)"), VALUES | BIG
    )
    code, proof = patched_by(model, tmp_path, "--dtype", "fp16")
    assert code == 1 and not proof["passed"] and "why" in proof["conversion"][0]
    assert "makes NaN or infinity of output 'y'; keep nodes in float32" in capsys.readouterr().err


def test_large_converted_models_are_run_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.graph import store

    moved: list[Path] = []
    write = onnx.external_data_helper.write_external_data_tensors
    monkeypatch.setattr(store, "EXTERNAL_LIMIT", 100)
    monkeypatch.setattr(
        onnx.external_data_helper, "write_external_data_tensors", lambda m, f: [moved.append(Path(f)), write(m, f)]
    )
    code, proof = patched_by(picking_model(), tmp_path, "--dtype", "fp16")
    assert code == 0 and proof["passed"] and moved and not moved[0].exists()


def test_sites_that_were_not_compared_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "MAX_SITES", 1)
    code, proof = patched_by(graph(TWO, VALUES), tmp_path)
    assert code == 0 and [s["name"] for s in proof["sites"]] == ["Conv_1"]
    assert proof["unprobed"] == [{"name": "Conv_4", "why": "of many sites only 1 are compared by themselves"}]
    out = capsys.readouterr().out
    assert "1 of 2 fused sites" in out and "compared through the outputs alone: Conv_4 (of many sites" in out


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_results_that_stay_in_another_type_between_sites_are_compared(dtype: str, tmp_path: Path) -> None:
    code, proof = patched_by(graph(TWO, VALUES), tmp_path, "--dtype", dtype, "--scope", "sites")
    assert code == 0 and not proof["unprobed"]
    assert [(s["name"], s["tensor"]) for s in proof["sites"]] == [("Conv_1", "z"), ("Conv_4", "y")]
    assert all(1e-5 < s["max_rel_error"] for s in proof["sites"])
    patched = onnx.load(str(tmp_path / "m.cutefuse.onnx"))
    assert "z" not in {o for n in patched.graph.node for o in n.output}, "the written model has no Cast for it"


def test_a_result_that_one_model_lacks_is_named(tmp_path: Path) -> None:
    _, patched = run_patch(graph(TWO, VALUES), tmp_path)
    probes = [verify.Probe("first", "z"), verify.Probe("second", "x")]
    proof = verify.verify(tmp_path / "model.onnx", patched, tmp_path, 1e-3, {}, probes=probes)
    assert proof["passed"] and [s["name"] for s in proof["sites"]] == ["first"] and proof["fused_sites"] == 2
    assert proof["unprobed"] == [{"name": "second", "why": "its result is no tensor of both models"}]


def test_probes_that_cannot_be_typed_leave_the_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.errors import VerificationError

    whole = verify.unfused_runner

    def runner(model: onnx.ModelProto, folder: Path) -> verify.Runner:
        if len(model.graph.output) > 1:
            raise VerificationError("no type for the tensor 'z'")
        return whole(model, folder)

    monkeypatch.setattr(verify, "unfused_runner", runner)
    code, proof = patched_by(graph(TWO, VALUES), tmp_path)
    assert code == 0 and proof["passed"] and not proof["sites"] and len(proof["outputs"]) == 1
    assert [s["name"] for s in proof["unprobed"]] == ["Conv_1", "Conv_4"]
    assert {s["why"] for s in proof["unprobed"]} == {"no type for the tensor 'z'"}


def test_a_site_with_two_results_is_one_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "c = Concat<axis=1>(a, b) x1 = Conv(c, w, k) y1 = Relu(x1) x2 = Conv(c, w2, k) y2 = Relu(x2)"
    values = weights(w=(16, 24, 3, 3), k=(16,), w2=(16, 24, 3, 3))
    result, patched = run_patch(graph(body, values, outputs=("y1", "y2")), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2x2Relu"]
    proof = result.report["verify"]
    assert len(proof["sites"]) == proof["fused_sites"] == 1 and proof["sites"][0]["tensor"] in ("y1", "y2")
    show(result, verbose=False)
    out = capsys.readouterr().out
    assert "2 outputs" in out and "1 of 1 fused site compared" in out


def test_the_sizes_of_the_inputs_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = patched_by(graph(TWO, VALUES), tmp_path, "--all", "--input-shape", "a:3x8x9x7")
    assert code == 0 and "on a 3x8x9x7, b 3x16x9x7, 1 random input" in capsys.readouterr().out
