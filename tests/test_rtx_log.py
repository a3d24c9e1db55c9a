"""What a build log of TensorRT for RTX says of the compiled layers: each fact, odd names, and logs that say nothing."""

from __future__ import annotations

from typing import Any

import pytest

from cutefuse.engines.kinds import copy_origin, kind_of, model_tensor, node_names
from cutefuse.engines.layers import Layer, layer_bytes, read_layers
from cutefuse.engines.tensorrt.rtx_log import layer_information, layer_of

NCHW, NHWC = ("[3,2,1,0]", "(Linear) Row major linear format"), ("[3,0,2,1]", "(NHWC) Channel major format")
BLOCKED = ("[4,1,0,3,2]", "(Arbitrary) Format with stride order = [4,1,0,3,2]")


def tensor(name: str, dims: str, form: tuple[str, str] = NHWC, kind: str = "Half") -> str:
    return (
        f"{{ Name: {name}, Dimensions: [{dims}], Strides: [1,1], StrideOrder: {form[0]}, Datatype: {kind}, "
        f"Format: {form[1]} }}"
    )


def line(name: str, kind: str, ins: list[str], outs: list[str], nodes: str = "", constants: str = "[]") -> str:
    def together(tensors: list[str]) -> str:
        return f"[ {', '.join(tensors)}]" if tensors else "[]"

    return (
        f"Name: {name}, LayerType: {kind}, Inputs: {together(ins)}, Constants: {constants}, "
        f"Outputs: {together(outs)}, TacticName: , StreamId: 0, Metadata: {nodes}"
    )


def log_of(*lines: str) -> str:
    bindings = (
        " Name: x, IOMode: Input, DataType: Half, Dimensions: [1,3,4,4], Location: Device, ProfileInfo: [ { } ]\n"
        " Name: y, IOMode: Output, DataType: Half, Dimensions: [1,8,4,4], Location: Device, ProfileInfo: [ { } ]"
    )
    return (
        f"[11/28/2026-16:00:00] [V] Layers:\n{chr(10).join(lines)}\n\nI/O Tensors:\n{bindings}\n\nEngine Metadata:\n"
        "[11/28/2026-16:00:00] [I] done\n"
    )


def layer(text: str) -> Layer:
    return read_layers({"Layers": [layer_of(text)]}, "a log")[0]


def test_a_layer_has_the_fields_of_trtexecs_layer_information() -> None:
    nodes = "[ONNX Layer: /a/Conv]\x1f[ONNX Layer: /a/Relu]"
    found = layer_of(line("/a/Conv_myl0_1", "correlation", [tensor("t", "1,4,8,8")], [tensor("u", "1,6,8,8")], nodes))
    assert found is not None
    assert list(found) == ["Name", "LayerType", "Inputs", "Constants", "Outputs", "TacticName", "StreamId", "Metadata"]
    assert found["Inputs"] == [
        {"Name": "t", "Dimensions": [1, 4, 8, 8], "Strides": [1, 1], "StrideOrder": [3, 0, 2, 1], "Datatype": "Half",
         "Format": "(NHWC) Channel major format"}
    ]  # fmt: skip
    assert node_names(found["Name"], found) == ["/a/Conv", "/a/Relu"] and found["StreamId"] == 0


def test_names_may_hold_commas_and_brackets() -> None:
    odd = "a, b] [c"
    found = layer_of(
        line(odd, "kgen", [tensor(odd, "1,2,3,4"), tensor("t", "5")], [tensor("u", "")], "[ONNX Layer: n]")
    )
    assert found is not None and found["Name"] == odd
    assert [t["Name"] for t in found["Inputs"]] == [odd, "t"] and found["Outputs"][0]["Dimensions"] == []


def test_a_plugins_workspace_is_no_output() -> None:
    outs = [tensor("u", "1,64,8,8", BLOCKED), tensor("/a/Conv_wksp.1_myl0", "1024", ("[0]", NCHW[1]), "UInt8")]
    found = layer(line("/a/Conv_myl0_1", "custom_layer", [tensor("t", "1,8,8,8")], outs, "[ONNX Layer: /a/Conv]"))
    assert (found.kind, [t.name for t in found.outputs]) == ("plugin", ["u"])
    assert found.outputs[0].layout == "blocked HWC"


def test_the_last_engine_of_a_log_counts() -> None:
    first = log_of(line("old_myl0_0", "gemm", [], []))
    information = layer_information(first + log_of(line("new_myl0_0", "gemm", [], []), line("s", "signal", [], [])))
    assert [la["Name"] for la in information["Layers"]] == ["new_myl0_0", "s"]
    assert [(t["Name"], t["IOMode"], t["Dimensions"]) for t in information["I/O Tensors"]] == [
        ("x", "Input", [1, 3, 4, 4]), ("y", "Output", [1, 8, 4, 4]),
    ]  # fmt: skip


@pytest.mark.parametrize("log", ["", "Layers:\n", "[I] no engine\n", "Name: x, LayerType: kgen", "[V] Layers: none"])
def test_a_log_without_layers_gives_none(log: str) -> None:
    assert layer_information(log)["Layers"] == []


@pytest.mark.parametrize("text", ["", "Name: x", "Name: x, LayerType: kgen, Inputs: [ { Name: t", "Layers:"])
def test_what_is_no_layer_is_left_out(text: str) -> None:
    assert layer_of(text) is None


@pytest.mark.parametrize(
    ("kind", "name", "expected", "origin"),
    [
        ("kgen", "__myl_Move_myl0_3", "copy", "reformat"),
        ("kgen", "__myl_MoveConc_myl0_3", "copy", "concat"),
        ("runtime_function", "__myl_Conc_myl0_3", "copy", "concat"),
        ("kgen", "__myl_SlicConc_myl0_12", "copy", "concat"),
        ("kgen", "__myl_Slic_myl0_12", "copy", "slice"),
        ("kgen", "__myl_Tran_myl0_12", "copy", "shuffle"),
        ("kgen", "__myl_ConcMulAddRelu_myl0_12", "copy", "concat"),
        ("runtime_function", "__myl_CastResiCast_myl0_3", "copy", "cast"),
        # What computes in another type, or moves on its way into a product, is no copy.
        ("kgen", "__myl_CastMeanSubMulMeanAddSqrtDivMulCastMulAdd_myl0_3", "norm", ""),
        ("runtime_fusion", "__myl_SlicFcAdd_myl0_3", "gemm", ""),
        ("runtime_function", "__myl_Resi_myl0_3", "pool", ""),
        ("kgen", "__myl_MulAddRelu_myl0_3", "pointwise", ""),
        ("runtime_fusion", "__myl_CorrSilu_myl0_3", "conv", ""),
        ("kgen", "_gemm_mha_v2_myl0_5", "attention", ""),
        ("correlation", "/Concat/Move_myl0_5", "conv", ""),
        ("custom_layer", "/Slice_myl0_5", "plugin", ""),
        ("signal", "__mye12_myl0_5", "noop", ""),
    ],
)
def test_kinds_of_myelins_kernels(kind: str, name: str, expected: str, origin: str) -> None:
    assert kind_of(kind, {}, name) == expected
    assert not origin or copy_origin(name, {}, kind) == origin


@pytest.mark.parametrize(("name", "nodes"), [("__myl_Move_myl0_3", []), ("/a/Conv_myl0_3", ["/a/Conv"])])
def test_a_kernels_own_name_is_no_onnx_node(name: str, nodes: list[str]) -> None:
    raw: dict[str, Any] = {"Metadata": ""}
    assert node_names(name, raw) == nodes


def test_copies_are_counted_by_what_they_read_and_write() -> None:
    moved = layer(line("__myl_Move_myl0_0", "kgen", [tensor("x", "1,3,4,4", NCHW)], [tensor("t", "1,4,4,4")]))
    kept = layer(line("/a_myl0_0", "correlation", [tensor("x", "1,3,4,4")], [tensor("t", "1,4,4,4", NHWC, "Float")]))
    assert (moved.kind, layer_bytes(moved)) == ("copy", 2 * 16 * 3 + 2 * 16 * 4)
    assert kept.kind == "conv" and kept.outputs[0].size_bytes == 4 * 64


@pytest.mark.parametrize(("name", "reads"), [("__myl_MulLtSele_myl0_0", 1), ("__myl_Conc_myl0_0", 3)])
def test_a_tensor_of_several_steps_is_read_once_and_ranges_of_one_are_each(name: str, reads: int) -> None:
    read = layer(line(name, "kgen", [tensor("x", "1,4,4,4")] * 3, [tensor("t", "1,4,4,4")]))
    assert layer_bytes(read) == 2 * 64 * (reads + 1)


@pytest.mark.parametrize(
    ("name", "tensor_name"),
    [("cat.1_myl0", "cat"), ("/a/Relu_output_0.1_2_myl0", "/a/Relu_output_0"), ("cat_U0.1_myl0", "cat"), ("y", "y"),
     ("t.1", "t.1")],
)  # fmt: skip
def test_tensors_are_traced_to_the_model(name: str, tensor_name: str) -> None:
    assert model_tensor(name) == tensor_name
