"""What the patched file holds: everything that is not rewritten, the plugin's contract, new names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import FILTER, TWO, graph, weights
from onnx import TensorProto, helper, numpy_helper

from cutefuse.commands.patch import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(graph(TWO, outputs=("y1", "y2")), str(path))
    return path


def rich_model() -> onnx.ModelProto:
    """A model with everything that a careless rewriter loses."""
    model = graph(TWO + " z = Sin(y1)", outputs=("y1", "y2", "z"))
    model.doc_string, model.producer_name, model.domain, model.model_version = "a doc", "somebody", "org.some", 7
    model.metadata_props.add(key="author", value="someone")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    g = model.graph
    g.doc_string, g.node[-1].doc_string = "graph doc", "node doc"
    g.node[-1].metadata_props.add(key="origin", value="layer 5")
    g.value_info.append(helper.make_tensor_value_info("x1", 1, None))
    g.value_info.append(helper.make_tensor_value_info("y1", 1, ["n", 12, 7, 5], doc_string="kept"))
    g.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "unused_before"))
    g.quantization_annotation.add(tensor_name="z")
    g.quantization_annotation.add(tensor_name="x1")
    return model


def test_everything_that_is_not_rewritten_survives(tmp_path: Path) -> None:
    model = rich_model()
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--verify"]) == 0
    patched = onnx.load(str(tmp_path / "m.cutefuse.onnx"))
    for field in ("doc_string", "producer_name", "domain", "model_version", "ir_version"):
        assert getattr(patched, field) == getattr(model, field), field
    assert list(patched.metadata_props)[: len(model.metadata_props)] == list(model.metadata_props)
    assert list(patched.opset_import)[: len(model.opset_import)] == list(model.opset_import)
    assert patched.opset_import[-1].domain == "cutefuse"
    g = patched.graph
    assert list(g.input) == list(model.graph.input) and list(g.output) == list(model.graph.output)
    assert (g.name, g.doc_string) == (model.graph.name, "graph doc")
    assert [n.name for n in g.node] == ["Conv_1", "Conv_4", "Sin_6"] and g.node[-1] == model.graph.node[-1]
    assert [v.name for v in g.value_info] == ["y1"] and g.value_info[0].doc_string == "kept"
    assert [q.tensor_name for q in g.quantization_annotation] == ["z"]
    assert "unused_before" in {t.name for t in g.initializer}, "what was superfluous before is none of our business"
    assert "w" not in {t.name for t in g.initializer}


def test_the_nodes_carry_the_contract_of_the_plugin(source: Path) -> None:
    assert main([str(source)]) == 0
    patched = onnx.load(str(source.with_name("model.cutefuse.onnx")))
    node = patched.graph.node[0]
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert (node.domain, node.op_type, node.name) == ("cutefuse", "CuteConcatConv2Relu", "Conv_1")
    assert attrs == {
        "channels": [8, 16], "kernel_shape": [3, 3], "strides": [1, 1], "pads": [0] * 4, "dilations": [1, 1],
        "packed_sizes": [576, 576], "alpha": np.float32(0.01), "lo": np.float32(-3.402823466e38),
        "hi": np.float32(3.402823466e38), "channel_starts": [0], "upsample": [1], "output_channels": [0],
        "residual_start": 0, "layout": 0, "tile": 0,
        "plugin_version": b"1", "plugin_namespace": b"cutefuse",
    }  # fmt: skip
    assert node.doc_string == "cutefuse: Concat_0, Conv_1, Relu_2"
    stored = {t.name: t for t in patched.graph.initializer}
    w, b = stored["Conv_1.packed_weight"], stored["Conv_1.bias"]
    assert list(node.input) == ["a", "b", w.name, b.name]
    assert (w.data_type, list(w.dims)) == (TensorProto.FLOAT, [12, 1152])
    assert (b.data_type, list(b.dims)) == (TensorProto.FLOAT, [12])
    assert {f.name for f in patched.functions} == {"CuteConcatConv2Relu", "CuteConcatConv2Tanh"}


def test_new_names_clash_with_nothing(tmp_path: Path) -> None:
    values = weights(w=FILTER, k=(12,)) | {"Conv_1.packed_weight": np.float32(2)}
    model = graph("c = Concat<axis=1>(a, b) x = Conv(c, w, k) y = Relu(x)", values)
    model.graph.node.append(helper.make_node("Pow", ["y", "Conv_1.packed_weight"], ["z"], name=""))
    model.graph.output[0].name = "z"
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--verify"]) == 0
    names = [t.name for t in onnx.load(str(tmp_path / "m.cutefuse.onnx")).graph.initializer]
    assert len(names) == len(set(names)) == 3


def test_nodes_without_names_are_called_after_their_tensors(tmp_path: Path) -> None:
    model = graph("c = Concat<axis=1>(a, b) x = Conv(c, w, k) y = Relu(x)")
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert main([str(tmp_path / "m.onnx"), "--include", "x"]) == 0
    assert onnx.load(str(tmp_path / "m.cutefuse.onnx")).graph.node[0].name == "x"
