"""A proof says what it compared, and does not call verified what equal values do not prove."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph, run_patch, weights
from onnx import TensorProto, helper

from cutefuse.commands.patch import main, show
from cutefuse.graph.closeness import compare

BODY = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w) r = Relu(x) "


def model(body: str, outputs: tuple[str, ...] = ("y",), **more: np.ndarray) -> onnx.ModelProto:
    return graph(BODY + body, weights(w=(12, 24, 3, 3)) | more, outputs=outputs)


NAN, INF, ZERO, BIG = (np.float32(v) for v in (np.nan, np.inf, 0, 1e30))
SILENT = {
    "all NaN": ("y = Mul(r, s)", NAN), "all infinite": ("t = Exp(r) y = Add(t, s)", INF),
    "NaN from infinities": ("t = Add(r, s) y = Sub(t, t)", INF),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_an_output_without_a_finite_value_proves_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, value = SILENT[name]
    result, patched = run_patch(model(body, s=value), tmp_path)
    assert patched is None and result.exit_code == 1
    why = result.report["verify"]["why"]
    assert why.startswith("nothing is proven") and "'y'" in why and "NaN" in why
    assert len(result.report["verify"]["seeds_tried"]) > 1
    show(result, verbose=False)
    told = capsys.readouterr()
    assert "verified with" not in told.out and "nothing is proven" in told.err


def test_a_site_without_a_finite_value_proves_nothing(tmp_path: Path) -> None:
    body = "t = Mul(r, s) u = Concat<axis=1>(t, t) v = Conv(u, q) z = Relu(v) n = IsNaN(z) "
    body += "e = Where(n, o, z) y = Add(e, r)"
    values = weights(q=(12, 24, 1, 1)) | {"s": NAN, "o": np.float32(3)}
    result, patched = run_patch(model(body, **values), tmp_path)
    assert patched is None and "site" in result.report["verify"]["why"]


@pytest.mark.parametrize("value", [ZERO, np.float32(7)])
def test_an_output_of_one_value_is_not_called_verified(
    value: np.float32, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "t = Mul(r, o) y = Add(t, s)"
    result, patched = run_patch(model(body, s=value, o=ZERO), tmp_path)
    assert patched is not None and result.report["verify"]["passed"]  # the site itself was compared
    show(result, verbose=False)
    out = capsys.readouterr().out
    assert "verified" not in out and f"output 'y' is {value:g} everywhere" in out


def test_a_site_and_an_output_of_one_value_prove_nothing(tmp_path: Path) -> None:
    dead = graph(BODY.replace("(c, w)", "(c, w, k)").replace("r = ", "y = "),
                 weights(w=(12, 24, 3, 3)) | {"k": np.full(12, -1e4, np.float32)})  # fmt: skip
    result, patched = run_patch(dead, tmp_path)
    assert patched is None and "is 0 everywhere" in result.report["verify"]["why"]


def test_a_further_seed_is_tried_where_the_first_says_nothing(tmp_path: Path) -> None:
    """exp overflows on normal inputs times 1e3, and not on smaller ones."""
    body = "t = Mul(r, s) e = Exp(t) f = Exp(e) y = Sub(f, f)"
    result, patched = run_patch(
        model(body.replace("y = Sub(f, f)", "g = ReduceMax<keepdims=1>(f) y = Sub(g, f)"), s=np.float32(8)), tmp_path
    )
    proof = result.report["verify"]
    assert patched is not None and proof["passed"]
    assert len(proof["seeds_tried"]) > 1 and proof["seed"] == proof["seeds_tried"][-1] != 0
    assert 0 < proof["outputs"][0]["compared"]


def test_values_that_were_not_compared_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, patched = run_patch(model("t = Sub(r, s) y = Sqrt(t)", s=np.float32(0.3)), tmp_path)
    (output,) = result.report["verify"]["outputs"]
    assert patched is not None and 0 < output["compared"] < output["values"]
    show(result, verbose=False)
    assert f"{output['values'] - output['compared']} of {output['values']} of 'y'" in capsys.readouterr().out


def test_an_output_that_no_fused_node_reaches_need_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, patched = run_patch(model("y = Neg(r) n = Mul(a, s)", ("y", "n"), s=NAN), tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    assert len(result.report["verify"]["seeds_tried"]) == 1


def test_everything_finite_is_verified_with_the_first_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, _ = run_patch(model("y = Neg(r)"), tmp_path)
    proof = result.report["verify"]
    assert proof["seeds_tried"] == [proof["seed"]] == [0]
    assert all(r["values"] == r["compared"] for r in (*proof["outputs"], *proof["sites"]))
    show(result, verbose=False)
    out = capsys.readouterr().out
    assert "verified with" in out and "not compared" not in out


def sequence(body: list[onnx.NodeProto]) -> onnx.ModelProto:
    made = model("y = Neg(r)")
    made.graph.node.extend(body)
    made.graph.output.append(helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None))
    onnx.checker.check_model(made)
    return made


SPLIT = [helper.make_node("SplitToSequence", ["r"], ["parts"], axis=1)]


def test_a_sequence_is_compared_tensor_by_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, patched = run_patch(sequence(SPLIT), tmp_path)
    assert patched is not None and result.report["verify"]["passed"]
    by_name = {r["name"]: r for r in result.report["verify"]["outputs"]}
    assert by_name["parts"]["values"] == by_name["y"]["values"] and "max_rel_error" in by_name["parts"]


def test_a_wrong_sequence_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutefuse.match.conv import read as conv_facts

    right = conv_facts.pack
    monkeypatch.setattr(conv_facts, "pack", lambda w, *of: right(w[:, ::-1], *of))
    only = sequence(SPLIT)
    del only.graph.output[0]
    result, patched = run_patch(only, tmp_path)
    assert patched is None and not result.report["verify"]["passed"]


A = np.arange(6, dtype=np.float32).reshape(2, 3)
SEQUENCES = [
    ([A, A[:1]], [A, A[:1]], True), ([A, A[:1]], [A, 2 * A[:1]], False), ([A], [A, A], False), ([], [], True),
    ([A], [A.astype(np.float16)], False), ({1: 0.5, 2: 0.25}, {1: 0.5, 2: 0.25}, True), ({1: 0.5}, {2: 0.5}, False),
    ([{1: 0.5}], [{1: 0.75}], False),
]  # fmt: skip


@pytest.mark.parametrize("expected, actual, right", SEQUENCES)
def test_sequences_and_maps_have_figures(expected: object, actual: object, right: bool) -> None:
    found = compare(expected, actual, 1e-3)
    assert found["passed"] == right and (
        right or "why" in found or found.get("max_rel_error", found.get("mismatch_share")) > 0
    )


def test_a_scalar_input_is_named_with_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = model("y = Mul(r, s)", s=ZERO)
    made.graph.input.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, []))
    made.graph.initializer.remove(next(t for t in made.graph.initializer if t.name == "s"))
    onnx.save(made, str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--all", "--verify"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("verified")]
    assert "s ," not in line and "s :" not in line and "s (one number)" in line


def test_a_residual_that_is_some_channels_of_a_wider_tensor_is_none_of_other_sizes(tmp_path: Path) -> None:
    body = "p, q = Split<axis=1>(s) x = Conv<pads=[1,1,1,1]>(p, w) r = Relu(x) y = Add(r, q)"
    made = graph(body, weights(w=(8, 8, 3, 3)), inputs={"s": "1,16,8,8"})
    result, patched = run_patch(made, tmp_path)
    (node,) = (n for n in patched.graph.node if n.domain == "cutefuse") if patched else (None,)
    assert node is not None and node.op_type == "CuteViewConcatConv1ReluAdd" and result.report["verify"]["passed"]
