"""Sizes that a model notes and its inputs contradict are not believed; sizes go through GroupNormalization."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch, weights
from onnx import TensorProto, helper

from cutefuse.graph.shapes import inferred
from cutefuse.match import after as chain

BODY = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w) g = Sigmoid(x) z = Mul(x, g) y = Add(z, one)"
INPUTS = {"a": "1,8,9,7", "b": "1,16,9,7", "one": "1,12,9,7"}


def stale(open_axes: dict[str, int | str | None], body: str = BODY) -> onnx.ModelProto:
    """A model whose sizes were noted for a batch of one, before the batch of a and b was opened by hand."""
    model = onnx.shape_inference.infer_shapes(graph(body, weights(w=(12, 24, 3, 3)), inputs=INPUTS))
    for info in (*model.graph.input, *model.graph.output):
        if info.name in open_axes:
            dim, size = info.type.tensor_type.shape.dim[0], open_axes[info.name]
            dim.Clear()
            if isinstance(size, int):
                dim.dim_value = size
            elif size:
                dim.dim_param = size
    return model


OPENED = {
    "a name": {"a": "n", "b": "n"},
    "two names": {"a": "n", "b": "m"},
    "no name": {"a": None, "b": None},
    "minus one": {"a": -1, "b": -1},
    "another number": {"a": 4, "b": 4},
}


@pytest.mark.parametrize("name", OPENED)
def test_a_residual_of_one_image_is_not_added_to_several(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(stale(OPENED[name]), tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2Silu"]
    told = result.report["clean"]["stale_sizes"]
    assert "'c'" in told and "1x24x9x7" in told


def test_a_stale_output_is_named_too(tmp_path: Path) -> None:
    model = stale({"a": "n", "b": "n", "one": "n"})
    del model.graph.value_info[:]
    result, patched = run_patch(model, tmp_path)
    assert "'y'" in result.report["clean"]["stale_sizes"] and result.report["verify"]["passed"]
    assert fused_types(patched) == ["CuteConcatConv2SiluAdd"]


@pytest.mark.parametrize("name", ["right", "named otherwise", "of another operator's output", "without sizes"])
def test_notes_that_the_inputs_do_not_contradict_are_believed(name: str, tmp_path: Path) -> None:
    batch = "n" if name == "named otherwise" else "1"
    model = graph(
        BODY, weights(w=(12, 24, 3, 3)), inputs={k: v.replace("1,", f"{batch},", 1) for k, v in INPUTS.items()}
    )
    if name == "right":
        model = onnx.shape_inference.infer_shapes(model)
    elif name == "named otherwise":
        model.graph.value_info.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 12, 9, 7]))
    elif name == "of another operator's output":
        model.graph.node.append(helper.make_node("Theirs", ["a"], ["t"], domain="their.domain"))
        model.opset_import.append(helper.make_opsetid("their.domain", 1))
        model.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, [7, 7]))
    else:
        model.graph.value_info.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    result, patched = run_patch(model, tmp_path, verify=False)
    assert result.report["clean"]["stale_sizes"] == "" and fused_types(patched) == ["CuteConcatConv2SiluAdd"]


@pytest.mark.parametrize("residual", [INPUTS["one"], "1,12,1,1", "1,1,9,7"])
def test_a_proof_compares_the_sizes_that_a_fused_node_takes_for_equal(
    residual: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever made the sizes look equal: the bodies broadcast, and the kernels do not."""
    right = chain.residual_after

    def believing(graph_: object, tensor: str, shape: object) -> object:
        found = right(graph_, tensor, shape)  # type: ignore[arg-type]
        node = graph_.only_user(tensor)  # type: ignore[attr-defined]
        return found or ((node, "one") if node is not None and node.op_type == "Add" else None)

    monkeypatch.setattr(chain, "residual_after", believing)
    model = graph(BODY, weights(w=(12, 24, 3, 3)), inputs={"a": "n,8,9,7", "b": "n,16,9,7", "one": residual})
    result, patched = run_patch(model, tmp_path)
    proof = result.report["verify"]
    assert patched is None and result.exit_code == 1 and not proof["passed"]
    assert proof["first_wrong_site"] == "Conv_1" and "'one' is " in proof["sites"][0]["why"]
    same, patched = run_patch(model, tmp_path, shapes={"a": (1, 8, 9, 7), "b": (1, 16, 9, 7)})
    assert (patched is not None) == (residual == INPUTS["one"]) == same.report["verify"]["passed"]


SAME = {
    "GroupNormalization 21": ("GroupNormalization<num_groups=2>(a, s, s)", 21, ""),
    "GroupNormalization 18": ("GroupNormalization<num_groups=2>(a, t, t)", 18, ""),
    "MeanVarianceNormalization": ("MeanVarianceNormalization(a)", 17, ""),
    "ONNX Runtime's Gelu": ("com.microsoft.Gelu(a)", 17, "com.microsoft"),
    "ONNX Runtime's QuickGelu": ("com.microsoft.QuickGelu(a)", 17, "com.microsoft"),
}


@pytest.mark.parametrize("batch", ["1", "n"])
@pytest.mark.parametrize("name", SAME)
def test_sizes_go_through_operators_that_onnx_infers_nothing_of(name: str, batch: str, tmp_path: Path) -> None:
    text, opset, domain = SAME[name]
    values = weights(w=(8, 8, 3, 3)) | {"s": np.ones(8, np.float32), "t": np.ones(2, np.float32)}
    used = {k: v for k, v in values.items() if k == "w" or f", {k})" in text}
    plain = graph("h = Relu(a) x = Conv<pads=[1,1,1,1]>(h, w) r = Relu(x) y = Add(r, a)", {"w": values["w"]},
                  opset=opset, inputs={"a": f"{batch},8,9,7"})  # fmt: skip
    op_type = text.split("<")[0].split("(")[0].rpartition(".")[2]
    node = helper.make_node(op_type, ["a", *[k for k in used if k != "w"] * 2], ["h"], domain=domain, name="norm")
    if "num_groups" in text:
        node.attribute.append(helper.make_attribute("num_groups", 2))
    plain.graph.node[0].CopyFrom(node)
    if domain:
        plain.opset_import.append(helper.make_opsetid(domain, 1))
    plain.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in used.items() if k != "w")
    plain.graph.node[3].input[1] = "h"  # the residual is what the operator made
    result, patched = run_patch(plain, tmp_path, verify="GroupNormalization 18" not in name)
    assert fused_types(patched)[-1:] == ["CuteConcatConv1ReluAdd"]
    assert all(s["flops"] is not None for s in result.report["sites"] if s["op_type"]) or batch == "n"


def test_an_operator_of_another_domain_keeps_no_size() -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("GroupNormalization", ["a"], ["y"], domain="their.domain")], "g",
            [helper.make_tensor_value_info("a", TensorProto.FLOAT, [1, 8, 9, 7])],
            [helper.make_empty_tensor_value_info("y")],
        ), opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("their.domain", 1)],
    )  # fmt: skip
    assert not inferred(model).output[0].type.tensor_type.HasField("shape")


def test_a_group_norm_of_opset_18_is_a_row_of_its_own(tmp_path: Path) -> None:
    values = weights(w=(8, 8, 3, 3)) | {"t": np.ones(2, np.float32)}
    model = graph(
        "h = Relu(a) x = Conv<pads=[1,1,1,1]>(h, w) y = Relu(x)", {"w": values["w"]}, opset=18, inputs={"a": "1,8,9,7"}
    )
    model.graph.node[0].CopyFrom(
        helper.make_node("GroupNormalization", ["a", "t", "t"], ["h"], name="norm", num_groups=2)
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(values["t"], "t"))
    result, _ = run_patch(model, tmp_path, dry_run=True)
    assert [(s["name"], s["operator"]) for s in result.report["sites"]][0] == ("norm", "row_norm")
