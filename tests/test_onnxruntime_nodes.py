"""Layers that ONNX Runtime makes of a function body bear the name of the fused node, in float32 and float16."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

import models
from cutefuse.engines.onnxruntime import nodes as onnxruntime_nodes
from cutefuse.engines.onnxruntime import run as onnxruntime
from cutefuse.graph.body import DOMAIN
from cutefuse.report.analyse.compare import compare
from cutefuse.report.read.reader import Engine, find_engines, read_engine
from cutefuse.rewrite.patch import Options, patch

pytestmark = pytest.mark.slow

QUICK = ["--iterations=1", "--duration=0", "--warmUp=0"]


@pytest.fixture(scope="module", params=["float32", "float16"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine, Engine]:
    folder = tmp_path_factory.mktemp(request.param)
    onnx.save(models.build("yolov8n", "float32", small=True, batch=1), str(folder / "m.onnx"))
    dtype = "float16" if request.param == "float16" else ""
    result = patch(folder / "m.onnx", folder / "m.cutefuse.onnx", Options(sm=90, all_sites=True, dtype=dtype))
    assert result.output
    for name, out in (("m.onnx", "plain"), ("m.cutefuse.onnx", "patched")):
        onnxruntime.profile(folder / name, folder / out, QUICK)
    plain, patched = (read_engine(find_engines(folder / out)[0]) for out in ("plain", "patched"))
    return result.output, plain, patched


def calls(path: Path) -> dict[str, Any]:
    model = onnx.load(str(path))
    nodes = [*model.graph.node]
    return {n.name: n for n in nodes if n.domain == DOMAIN}


def test_every_fused_convolution_bears_the_name_of_its_node(engines: tuple[Path, Engine, Engine]) -> None:
    path, _, patched = engines
    fused = calls(path)
    convs = Counter(la.onnx[0] for la in patched.layers if la.kind == "conv" and la.onnx and la.onnx[0] in fused)
    assert len(fused) > 20 and set(convs) == set(fused)
    assert not [la.name for la in patched.layers if la.name.startswith(("Conv_", "FusedConv_"))]
    named = {la.name for la in patched.layers if la.kind == "conv"}
    assert set(fused) <= named and not [la.name for la in patched.layers if "_inlfunc_" in la.name]


def test_a_layer_of_a_body_is_told_by_what_it_makes(engines: tuple[Path, Engine, Engine]) -> None:
    """All calls of one op_type share one body: what leads back to the call is the tensor that the body makes."""
    path, _, patched = engines
    made = {o: name for name, node in calls(path).items() for o in node.output}
    checked = 0
    for layer in patched.layers:
        for tensor in layer.outputs:
            name = onnxruntime_nodes.original(tensor.name)
            if name in made and layer.kind != "copy":
                assert made[name] in layer.onnx
                checked += 1
    assert checked > 20


def test_a_comparison_aligns_bodies_with_what_they_replaced(engines: tuple[Path, Engine, Engine]) -> None:
    path, plain, patched = engines
    rows = compare([plain, patched]).rows
    by_name = {la.name: row for row in rows for la in row.layers[0]}
    for name in calls(path):
        row = by_name[name]
        assert name in {n for la in row.layers[1] for n in la.onnx}, name
    convs = [r for r in rows if any(la.kind == "conv" for la in r.layers[0])]
    assert convs and not [r.label for r in convs if not r.layers[1]]


def node(op_type: str, inputs: list[str], outputs: list[str], name: str = "") -> Any:
    return SimpleNamespace(op_type=op_type, input=inputs, output=outputs, name=name)


def graph(*nodes: Any, functions: tuple[str, ...] = ()) -> Any:
    inputs = [SimpleNamespace(name=name) for name in ("x", "z")]
    return SimpleNamespace(
        graph=SimpleNamespace(node=list(nodes), input=inputs), functions=[SimpleNamespace(name=f) for f in functions]
    )


def test_names_stay_apart_and_nodes_outside_keep_theirs() -> None:
    model = graph(
        node("CuteF", ["x"], ["a"], "/one"), node("CuteF", ["a"], ["b"], "/two"), node("Relu", ["b"], ["y"], "/r"),
        functions=("CuteF",),
    )  # fmt: skip
    first, second = "_inlfunc_CuteF___cutefuse_t", "InsertedPrecisionFreeCast__inlfunc_CuteF_token_0___cutefuse_t"
    optimised = SimpleNamespace(
        node=[
            node("Conv", ["x"], [first]), node("Mul", [first], ["InsertedPrecisionFreeCast_a"]),
            node("Conv", ["InsertedPrecisionFreeCast_a"], [second]), node("Mul", [second], ["b"]),
            node("Relu", ["b"], ["y"], "/r"), node("Cast", ["w"], ["v"]), node("Cast", ["u"], ["t"]),
        ]
    )  # fmt: skip
    origins = onnxruntime_nodes.origins(model, optimised)
    assert origins == [["/one"], ["/one"], ["/two"], ["/two"], ["/r"], [], []]
    names = onnxruntime_nodes.names(model, optimised, origins)
    assert names == ["/one", "/one/Mul", "/two", "/two/Mul", "/r", "Cast_5", "Cast_6"]


def test_a_body_whose_output_is_lost_belongs_to_the_call_of_its_inputs() -> None:
    model = graph(
        node("CuteF", ["x"], ["a"], "/one"), node("CuteF", ["z"], ["b"], "/two"), node("CuteFx", ["z"], ["c"], "/no"),
        functions=("CuteF", "CuteFx"),
    )  # fmt: skip
    optimised = SimpleNamespace(node=[node("Conv", ["z"], ["_inlfunc_CuteF_token_3___cutefuse_t"])])
    assert onnxruntime_nodes.origins(model, optimised) == [["/two"]]
    lost = SimpleNamespace(node=[node("Conv", ["elsewhere"], ["_inlfunc_CuteF_token_3___cutefuse_t"])])
    assert onnxruntime_nodes.origins(model, lost) == [[]]
