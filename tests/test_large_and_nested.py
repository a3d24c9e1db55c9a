"""Models beyond what a converter or an inliner takes: one sentence, at once, with the way out; never a traceback."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch, weights
from onnx import TensorProto, helper

from cutefuse.commands.patch import main
from cutefuse.graph import store
from cutefuse.rewrite.unpatch import unpatch

BODY = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w) y = Relu(x)"
THEIRS = "loc"


def with_functions(functions: list[onnx.FunctionProto], call: onnx.NodeProto) -> onnx.ModelProto:
    model = graph(BODY, weights(w=(12, 24, 3, 3)))
    model.graph.node.append(call)
    model.opset_import.append(helper.make_opsetid(THEIRS, 1))
    model.functions.extend(functions)
    return model


def function(
    name: str, body: list[onnx.NodeProto], attributes: tuple[str, ...] = (), defaults=()
) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(THEIRS, 1)]
    return helper.make_function(THEIRS, name, ["i"], ["o"], body, imports, attributes, list(defaults))


def refer(node: onnx.NodeProto, name: str, kind: int) -> onnx.NodeProto:
    """The node with an attribute that its function's caller gives."""
    node.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=name, type=kind))
    return node


INTS, INT, FLOAT = onnx.AttributeProto.INTS, onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT
FILTER = helper.make_node("Constant", [], ["f"], value=onnx.numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32)))
SCALE = helper.make_node("Constant", [], ["s"], value=onnx.numpy_helper.from_array(np.ones(7, np.float32)))
REFERRING = {
    "pads": ([FILTER, refer(helper.make_node("Conv", ["i", "f"], ["x"], name="inner"), "pads", INTS),
              helper.make_node("Relu", ["x"], ["o"])], {"pads": [0, 0, 0, 0]}),
    "group": ([FILTER, refer(helper.make_node("Conv", ["i", "f"], ["x"], name="inner"), "group", INT),
               helper.make_node("Relu", ["x"], ["o"])], {"group": 1}),
    "axis": ([FILTER, refer(helper.make_node("Concat", ["i"], ["x"]), "axis", INT),
              helper.make_node("Conv", ["x", "f"], ["o"], name="inner")], {"axis": 1}),
    "alpha": ([FILTER, helper.make_node("Conv", ["i", "f"], ["x"], name="inner"),
               refer(helper.make_node("LeakyRelu", ["x"], ["o"]), "alpha", FLOAT)], {"alpha": 0.5}),
    "epsilon": ([SCALE, refer(helper.make_node("LayerNormalization", ["i", "s"], ["o"], name="inner"), "epsilon",
                              FLOAT)], {"epsilon": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("with_defaults", [False, True])
@pytest.mark.parametrize("name", REFERRING)
def test_attributes_that_a_caller_gives_are_no_obstacle(name: str, with_defaults: bool, tmp_path: Path) -> None:
    nodes, given = REFERRING[name]
    defaults = [helper.make_attribute(k, v) for k, v in given.items()] if with_defaults else []
    own = function("F", nodes, () if with_defaults else tuple(given), defaults)
    model = with_functions([own], helper.make_node("F", ["a"], ["z"], domain=THEIRS, **given))
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
    inside = [s for s in result.report["sites"] if s["name"] == "inner"]
    assert [s["status"] for s in inside] == ["refused"] and "local function 'F'" in inside[0]["reason"]


def test_such_an_attribute_in_the_main_graph_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = graph(BODY, weights(w=(12, 24, 3, 3)))
    refer(model.graph.node[2], "alpha", FLOAT)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert main([str(tmp_path / "m.onnx"), "--all"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "attribute of a local function" in line


def chain(count: int, circle: bool) -> onnx.ModelProto:
    """Functions that call each other one by one, the last one the first where they make a circle."""
    functions = []
    for i in range(count):
        last = i == count - 1
        node = helper.make_node("Abs", ["i"], ["o"])
        if circle or not last:
            node = helper.make_node(f"F{(i + 1) % count}", ["i"], ["o"], domain=THEIRS)
        functions.append(function(f"F{i}", [node]))
    return with_functions(functions, helper.make_node("F0", ["a"], ["z"], domain=THEIRS))


@pytest.mark.parametrize("count, circle", [(1, True), (3, True), (400, False)])
def test_functions_that_cannot_be_inlined_are_left_alone_or_one_sentence(
    count: int, circle: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "m.onnx", tmp_path / "m.cutefuse.onnx"
    source.write_bytes(chain(count, circle).SerializeToString())
    assert main([str(source), "--all", "--dtype", "fp16"]) == 2 and not output.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "--scope sites" in line
    assert main([str(source), "--all", "--dtype", "fp16", "--scope", "sites"]) == 0
    assert main([str(source), "--all"]) == 0
    assert unpatch(output, tmp_path / "plain.onnx") == 1
    plain = onnx.load(str(tmp_path / "plain.onnx"))
    assert len(plain.functions) == count and not fused_types(plain)


def large(folder: Path, sizes: list[int]) -> Path:
    """A model with matrices of so many MiB in a file full of holes."""
    model = graph(BODY, weights(w=(12, 24, 3, 3)))
    offset = 0
    for i, size in enumerate(sizes):
        t = TensorProto(name=f"t{i}", data_type=TensorProto.FLOAT, dims=(size << 10, 256))
        t.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "m.bin"), ("offset", str(offset)), ("length", str(size << 20))):
            t.external_data.add(key=key, value=value)
        offset += size << 20
        model.graph.initializer.append(t)
        model.graph.node.append(helper.make_node("Gather", [t.name, "at"], [f"g{i}"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, np.int64), "at"))
    with (folder / "m.bin").open("wb") as file:
        file.truncate(offset)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize("sizes", [[3000], [500] * 5])
def test_a_model_too_large_to_convert_is_known_from_its_sizes(
    sizes: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, started = large(tmp_path, sizes), time.perf_counter()
    for words in ([], ["--dry-run"]):
        assert main([str(source), "--all", "--dtype", "fp16", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "GB" in line and "--scope sites" in line
    assert time.perf_counter() - started < 5
    assert main([str(source), "--all", "--dtype", "fp16", "--scope", "sites", "--dry-run"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.bin", "m.onnx"]


def test_a_model_that_protobuf_cannot_measure_has_the_size_of_its_weights() -> None:
    model = graph(BODY, weights(w=(12, 24, 3, 3)))

    class Large:
        graph = model.graph

        def ByteSize(self) -> int:
            raise ValueError("Failed to serialize proto")

    assert store.size_of(model) == model.ByteSize()
    assert store.size_of(Large()) == 4 * 12 * 24 * 9  # type: ignore[arg-type]
