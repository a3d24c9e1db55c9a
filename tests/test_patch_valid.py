"""What --dtype writes passes onnx's checker, or is not written; equal names in two bodies are no obstacle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch, weights
from onnx import TensorProto, helper, numpy_helper

from cutefuse.commands.patch import main
from cutefuse.errors import CutefuseError
from cutefuse.rewrite import retype

BODY = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w) r = Relu(x) "
VALUES = weights(w=(12, 24, 3, 3)) | {"s": np.ones(7, np.float32)}


def normed() -> onnx.ModelProto:
    """A norm that names its statistics, which are float32 whatever its own type is."""
    model = graph(BODY + "y = LayerNormalization(r, s)", VALUES)
    node = next(n for n in model.graph.node if n.op_type == "LayerNormalization")
    node.output.extend(["mean", "deviation"])
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("verify", [False, True])
def test_statistics_that_nobody_reads_keep_their_type(verify: bool, tmp_path: Path) -> None:
    result, patched = run_patch(normed(), tmp_path, dtype="float16", verify=verify)
    assert fused_types(patched) == ["CuteConcatConv2Relu"]
    onnx.checker.check_model(patched, full_check=True)
    kinds = {v.name: v.type.tensor_type.elem_type for v in patched.graph.value_info}  # type: ignore[union-attr]
    assert kinds.get("mean", TensorProto.FLOAT) == TensorProto.FLOAT
    assert not verify or result.report["verify"]["passed"]


def test_statistics_that_somebody_reads_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = normed()
    model.graph.node.append(helper.make_node("Mul", ["mean", "r"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--all", "--dtype", "fp16"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--scope sites" in line and sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx"]


@pytest.mark.parametrize("scope", ["model", "sites"])
def test_an_invalid_result_is_never_written(scope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made it so: here a size that the model notes in another type."""
    from cutefuse.rewrite.passes import apply as module

    right = module.apply_sites

    def breaking(graph_, *rest: object) -> None:
        right(graph_, *rest)
        graph_.model.graph.node.append(helper.make_node("Cast", ["a"], ["broken"], to=TensorProto.FLOAT16))
        graph_.model.graph.value_info.append(helper.make_tensor_value_info("broken", TensorProto.FLOAT, None))

    monkeypatch.setattr(module, "apply_sites", breaking)
    with pytest.raises(CutefuseError, match="invalid"):
        run_patch(graph(BODY + "y = Neg(r)", {"w": VALUES["w"]}), tmp_path, dtype="float16", scope=scope)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]


def branch(name: str, factor: float, nodes: list[onnx.NodeProto] | None = None) -> onnx.GraphProto:
    """y = r * k, with a constant of the same name in every branch."""
    k = numpy_helper.from_array(np.float32(factor), "k")
    own = nodes or [helper.make_node("Mul", ["r", "k"], ["t"]), helper.make_node("Neg", ["t"], ["out"])]
    return helper.make_graph(own, name, [], [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)], [k])


def branched(nested: bool) -> onnx.ModelProto:
    model = graph(BODY + "y = Neg(r)", {"w": VALUES["w"]})
    inner = [helper.make_node("If", ["flag"], ["out"], then_branch=branch("a", 2), else_branch=branch("b", 3))]
    second = branch("else", 5, inner if nested else None)
    model.graph.node[-1].CopyFrom(
        helper.make_node("If", ["flag"], ["y"], then_branch=branch("then", 0.5), else_branch=second)
    )
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_equal_names_in_branches_are_told_apart(nested: bool, seed: int, tmp_path: Path) -> None:
    result, patched = run_patch(branched(nested), tmp_path, dtype="float16", seed=seed)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
    (conversion,) = result.report["verify"]["conversion"]
    assert conversion["max_rel_error"] < 2e-2  # no branch took another one's constant
    onnx.checker.check_model(patched, full_check=True)


def test_names_are_told_apart_where_they_meet_alone() -> None:
    model = branched(True)
    before = [t.name for n in model.graph.node for b in retype.subgraphs(n) for t in b.initializer]
    retype._tell_apart(model.graph, retype._own_names(model.graph))
    names = [t.name for g in _bodies(model.graph) for t in g.initializer]
    assert before == ["k", "k"] and len(set(names)) == len(names) == 4 and "k" in names
    onnx.checker.check_model(model, full_check=True)


def _bodies(graph_: onnx.GraphProto) -> list[onnx.GraphProto]:
    own = [b for n in graph_.node for b in retype.subgraphs(n)]
    return own + [c for b in own for c in _bodies(b)]


def test_a_model_without_float32_is_not_said_to_be_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = weights(dtype="float16", w=(12, 24, 3, 3))
    onnx.save(graph(BODY + "y = Neg(r)", halves, dtype="float16"), str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--all", "--verify", "--dtype", "fp16"]) == 0
    out = capsys.readouterr().out
    assert "--dtype does nothing" in out and "the conversion to float16" not in out
