"""TensorRT for RTX as a compiler: real builds where its wheels are installed, and what is said where they are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cutefuse.engine import rtx
from cutefuse.errors import CutefuseError

REASON = rtx.available()
compiles = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def write_model(path: Path, batch: int | str = 1, dtype: int = TensorProto.FLOAT16, op: str = "Relu") -> Path:
    """Two Convs, a pool, a Concat, a Conv and a Transpose: an input in NCHW, a real Concat, an output that is moved."""
    random, kind = np.random.default_rng(0), helper.tensor_dtype_to_np_dtype(dtype)

    def conv(name: str, source: str, out: str, c: int, k: int) -> tuple[onnx.NodeProto, onnx.TensorProto]:
        filters = numpy_helper.from_array((0.1 * random.standard_normal((k, c, 3, 3))).astype(kind), f"{name}.w")
        return helper.make_node("Conv", [source, filters.name], [out], name=name, pads=[1] * 4), filters

    made = [conv("left", "x", "a", 16, 16), conv("right", "x", "b", 16, 24), conv("last", "cat", "c", 40, 8)]
    (left, right, last), weights = [m[0] for m in made], [m[1] for m in made]
    nodes = [
        left, right, helper.make_node(op, ["a"], ["ra"], name="act"),
        helper.make_node("MaxPool", ["b"], ["pb"], name="pool", kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("Concat", ["ra", "pb"], ["cat"], name="concat", axis=1), last,
        helper.make_node("Transpose", ["c"], ["y"], name="turn", perm=[0, 2, 3, 1]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", dtype, [batch, 16, 20, 20])],
        [helper.make_tensor_value_info("y", dtype, [batch, 20, 20, 8])], weights,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@compiles
def test_the_compiled_graph_holds_layers_tensors_nodes_and_what_is_moved(tmp_path: Path) -> None:
    graph = rtx.compile_model(write_model(tmp_path / "m.onnx"))
    assert (graph.inputs, graph.outputs, graph.plugin_layers) == (("x",), ("y",), 0)
    convs = {node for layer in graph.layers if layer.kind == "conv" for node in layer.onnx_nodes}
    assert {"left", "right", "last", "act"} <= convs  # the activation is inside of its convolution
    image, concat = 16 * 20 * 20 * 2, 24 * 20 * 20 * 2  # bytes of x, and of what the pool's output is copied from
    moved = [layer.bytes_moved for layer in graph.copies]
    assert moved == [2 * image, 2 * concat, 2 * 8 * 20 * 20 * 2] and graph.copy_bytes == sum(moved)
    turn = graph.copies[-1]
    assert turn.onnx_nodes == ("turn",) and turn.inputs[0].layout == "HWC" and turn.outputs[0].layout == "linear"
    assert graph.all_bytes > graph.copy_bytes and graph.engine_bytes > 0 and graph.peak_mib > 50 and graph.seconds > 0


@compiles
def test_dynamic_inputs_are_built_for_the_shapes_given_else_for_one(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.onnx", batch="n")
    one, four = rtx.compile_model(model), rtx.compile_model(model, shapes={"x": (4, 16, 20, 20)})
    assert four.copy_bytes == 4 * one.copy_bytes


@compiles
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sm": 90}, ("9.0", "--gpu")),
        ({"shapes": {"z": (1, 1)}}, ("z", "inputs are x")),
        ({"shapes": {"x": (1, 16)}}, ("x", "profile")),
        ({"libraries": [Path("/nowhere/lib.so")]}, ("plugin library", "/nowhere/lib.so")),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(tmp_path: Path, arguments: dict, words: tuple[str, ...]) -> None:
    model = write_model(tmp_path / "m.onnx", batch="n")
    with pytest.raises(CutefuseError) as failure:
        rtx.compile_model(model, **arguments)
    text = str(failure.value)
    assert all(word in text for word in words) and "\n" not in text and "whole log" not in text


@compiles
def test_the_parsers_reasons_are_quoted(tmp_path: Path) -> None:
    with pytest.raises(CutefuseError, match="parser refused.*act"):
        rtx.compile_model(write_model(tmp_path / "m.onnx", op="NoSuchOperator"))
    with pytest.raises(CutefuseError, match="does not exist"):
        rtx.compile_model(tmp_path / "none.onnx")
