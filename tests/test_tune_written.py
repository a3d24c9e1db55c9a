"""The tiles that `patch --tune` writes into the nodes, and what becomes of them in everything that reads the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import FILTER, graph, run_patch, weights
from onnx import NodeProto, helper
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

from cutefuse import kernels
from cutefuse.engines import plugins
from cutefuse.graph.read import Graph
from cutefuse.graph.verify import verify
from cutefuse.operators.function import graph_call
from cutefuse.rewrite.patch import Result
from cutefuse.rewrite.unpatch import unpatch
from cutefuse.timing.calls import call_key
from cutefuse_host import Host, Input

SIZED = {"a": "1,8,9,7", "b": "1,16,9,7"}
TWO = """c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(x)
         d = Concat<axis=1>(b, a) z = Conv<strides=[2,2]>(d, w) y2 = Relu(z)"""
OTHERS = """n = LayerNormalization<axis=-1>(a, g, h)
            q = QuantizeLinear(a, s, o) r = DequantizeLinear(q, s, o) v = DequantizeLinear(i, s, o)
            c = Concat<axis=1>(r, r) x = Conv(c, v, k) y = Relu(x)"""


def two() -> onnx.ModelProto:
    return graph(TWO, weights(w=FILTER, k=(12,)), inputs=SIZED, outputs=("y", "y2"))


def tuned(model: onnx.ModelProto, folder: Path, tiles: Sequence[int], **options: object) -> tuple[Result, list[int]]:
    """A model patched with these tiles for its sites, and the attribute of each fused node."""
    result, patched = run_patch(model, folder, tiles=lambda calls: list(tiles)[: len(calls)], **options)
    assert patched is not None
    return result, [asked(node) for node in fused(patched)]


def fused(model: onnx.ModelProto) -> list[NodeProto]:
    return [n for n in model.graph.node if n.domain == "cutefuse"]


def asked(node: NodeProto) -> int:
    values = [helper.get_attribute_value(a) for a in node.attribute if a.name == "tile"]
    assert len(values) == 1, "TensorRT's parser warns of an attribute that a node lacks"
    return int(values[0])


def saved(result: Result) -> onnx.ModelProto:
    assert result.output is not None
    return onnx.load(str(result.output))


# ---- what is written ----


def test_every_node_carries_the_tile_that_the_report_names(tmp_path: Path) -> None:
    result, tiles = tuned(two(), tmp_path, [23, 24])
    assert tiles == [23, 24] and result.report["verify"]["passed"]
    report = json.loads((tmp_path / "model.patch.json").read_text())
    assert {s["name"]: s["tile"] for s in report["sites"]} == {n.name: asked(n) for n in fused(saved(result))}
    assert {f.type for n in fused(saved(result)) for f in n.attribute if f.name == "tile"} == {onnx.AttributeProto.INT}


def test_without_tiles_the_nodes_ask_for_none(tmp_path: Path) -> None:
    result, patched = run_patch(two(), tmp_path)
    assert patched is not None and [asked(n) for n in fused(patched)] == [0, 0]
    assert [s.tile for s in result.sites] == [0, 0]


def test_a_site_whose_tile_is_not_known_asks_for_none(tmp_path: Path) -> None:
    _, tiles = tuned(two(), tmp_path, [0, 24])
    assert tiles == [0, 24]


def test_a_norm_and_an_int8_convolution_carry_theirs(tmp_path: Path) -> None:
    scale = {"s": np.float32(0.05), "o": np.int8(0), "i": np.ones((12, 16, 1, 1), np.int8)}
    values = weights(g=(7,), h=(7,), k=(12,)) | scale
    result, tiles = tuned(graph(OTHERS, values, inputs={"a": "1,8,9,7"}, outputs=("n", "y")), tmp_path, [1, 13])
    assert [n.op_type for n in fused(saved(result))] == ["CuteLayerNorm", "CuteQConcatConv2Relu"]
    assert tiles == [1, 13] and result.report["verify"]["passed"]


# ---- function bodies ----


def test_one_body_serves_nodes_that_ask_and_that_do_not(tmp_path: Path) -> None:
    result, tiles = tuned(two(), tmp_path, [23, 0])
    model = saved(result)
    assert tiles == [23, 0] and len({n.op_type for n in fused(model)}) == len(model.functions) == 1
    onnx.checker.check_model(model, full_check=True)
    rng = np.random.default_rng(0)
    feed = {name: rng.standard_normal((1, c, 9, 7)).astype(np.float32) for name, c in (("a", 8), ("b", 16))}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, feed)
    for other in (model, inline_local_functions(model)):
        for y, right in zip(ReferenceEvaluator(other).run(None, feed), expected, strict=True):
            assert np.allclose(y, right, atol=1e-4)


def test_a_body_is_the_same_whatever_its_nodes_ask_for(tmp_path: Path) -> None:
    bodies = []
    for i, tiles in enumerate(([0, 0], [23, 23], [23, 24])):
        (tmp_path / str(i)).mkdir()
        result, _ = tuned(two(), tmp_path / str(i), tiles)
        bodies.append([f.SerializeToString(deterministic=True) for f in saved(result).functions])
    assert bodies[0] == bodies[1] == bodies[2]
    (function,) = saved(result).functions
    assert "tile" not in {a.ref_attr_name for n in function.node for a in n.attribute}


# ---- what reads the model ----


def test_a_second_patch_leaves_the_tiles_of_the_first(tmp_path: Path) -> None:
    first, tiles = tuned(two(), tmp_path, [23], include=["Conv_1"])
    assert tiles == [23]
    (tmp_path / "second").mkdir()
    result, tiles = tuned(saved(first), tmp_path / "second", [24])
    assert tiles == [23, 24] and result.report["verify"]["passed"]
    assert [(len(f.attribute_proto), f.name) for f in saved(result).functions] == [(1, "CuteConcatConv2Relu")]
    (tmp_path / "third").mkdir()
    plain, patched = run_patch(saved(first), tmp_path / "third")
    assert patched is not None and [asked(n) for n in fused(patched)] == [23, 0] and plain.report["verify"]["passed"]


def test_unpatching_leaves_no_tile_behind(tmp_path: Path) -> None:
    result, _ = tuned(two(), tmp_path, [23, 24])
    assert result.output is not None and unpatch(result.output, tmp_path / "plain.onnx") == 2
    plain = onnx.load(str(tmp_path / "plain.onnx"))
    assert not plain.functions and "tile" not in {a.name for n in plain.graph.node for a in n.attribute}
    assert verify(tmp_path / "model.onnx", plain, tmp_path, 1e-5, {})["passed"]


def test_graphsurgeon_keeps_the_tile(tmp_path: Path) -> None:
    gs = pytest.importorskip("onnx_graphsurgeon")
    result, _ = tuned(two(), tmp_path, [23, 0])
    again = gs.export_onnx(gs.import_onnx(saved(result)))
    assert [asked(n) for n in fused(again)] == [23, 0]
    feed = {"a": np.ones((1, 8, 9, 7), np.float32), "b": np.ones((1, 16, 9, 7), np.float32)}
    session = onnxruntime.InferenceSession(again.SerializeToString(), providers=["CPUExecutionProvider"])
    assert len(session.run(None, feed)) == 2


def test_the_plugin_offers_what_the_node_asks_for(tmp_path: Path) -> None:
    result, _ = tuned(two(), tmp_path, [23, 0])
    model = saved(result)
    stored = {t.name: Input(tuple(t.dims), "float32") for t in model.graph.initializer}
    inputs = {"a": Input((1, 8, 9, 7), "float32"), "b": Input((1, 16, 9, 7), "float32")} | stored
    tactics = []
    for node in fused(model):
        plugin = Host().build(node, [inputs[name] for name in node.input]).check()
        tactics += [c["tactics"] for c in plugin.report["combinations"]]
    assert tactics[0] == [23] and len(tactics[1]) > 4


def test_the_call_of_a_node_costs_the_same_whatever_it_asks_for(tmp_path: Path) -> None:
    """So that the engine of a tuned model finds the times that the tuning kept."""
    result, _ = tuned(two(), tmp_path, [23, 0])
    model = saved(result)
    node = fused(model)[0]
    call = graph_call(node, Graph(model, tmp_path, model.graph))
    assert call.attrs["tile"] == [23]
    plain = kernels.Call(call.op_type, call.inputs, call.outputs, {k: v for k, v in call.attrs.items() if k != "tile"})
    assert call_key(call) == call_key(plain)
    other = kernels.Call(call.op_type, call.inputs, call.outputs, {**plain.attrs, "strides": [2, 1]})
    assert call_key(other) != call_key(plain)


def test_an_engine_learns_which_nodes_ask_for_a_tile(tmp_path: Path) -> None:
    result, _ = tuned(two(), tmp_path, [23, 0])
    assert result.output is not None
    first, _ = (n.name for n in fused(saved(result)))
    assert plugins.read_model(result.output).tiles == {first: 23} == plugins.tuned_tiles(result.output)
    assert plugins.read_model(tmp_path / "model.onnx").tiles == {}
