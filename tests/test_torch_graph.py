"""ONNX models as PyTorch programs: networks against ONNX Runtime, folding, function bodies, merged steps, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import float64
import numpy as np
import onnx
import pytest
from graphs import FILTER, bn_weights, graph, run_patch, weights
from onnx import TensorProto, helper, numpy_helper

import models
from cutefuse.engines.inputs import resolve, seeded
from cutefuse.errors import CutefuseError

pytestmark = pytest.mark.torch


def engine_of(model: Any, **options: Any) -> Any:
    from cutefuse.engines.pytorch.run import TorchEngine

    return TorchEngine.build(model, device="cpu", **options)


def in_onnx_runtime(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in model.graph.output], session.run(None, feed), strict=True))


def error_of(model: onnx.ModelProto, engine: Any = None, shapes: dict[str, tuple[int, ...]] | None = None) -> float:
    """Largest difference to ONNX Runtime, over the largest output."""
    from cutefuse.engines.inputs import input_specs

    engine = engine or engine_of(model, shapes=shapes)
    feed = seeded(input_specs(model), resolve(input_specs(model), shapes or {}))
    made, want = engine(feed), in_onnx_runtime(model, feed)
    assert all(made[name].numpy().dtype == want[name].dtype for name in want)
    return float64.error(made, want)


@pytest.mark.parametrize(
    "name, dtype", [*((name, "float32") for name in models.names()), *((name, "float16") for name in models.DEMO)]
)
def test_a_network_and_its_patched_form_compute_what_onnx_runtime_computes(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """All three lie within the roundings of their type from the float64 values, so that each judges the others."""
    from cutefuse.rewrite.patch import Options, patch

    model = models.build(name, dtype, small=True)
    feed, limit = float64.feed_of(model), float64.rounding_limit(model, dtype)
    exact = float64.exact(model, feed)
    assert float64.error(in_onnx_runtime(model, feed), exact) < limit
    assert float64.error(engine_of(model)(feed), exact) < limit
    onnx.save(model, str(tmp_path / "m.onnx"))
    if patch(tmp_path / "m.onnx", tmp_path / "p.onnx", Options(all_sites=True)).output is None:
        return
    patched = onnx.load(str(tmp_path / "p.onnx"))
    assert any(node.domain == "cutefuse" for node in patched.graph.node)
    assert float64.error(engine_of(patched)(feed), exact) < limit


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_faint_fault_is_seen(dtype: str) -> None:
    """A filter near the end that is a twentieth too large; beside float32 also filters and images of 11 bits."""
    model = models.build("unet", dtype, small=True)
    feed, limit = float64.feed_of(model), float64.rounding_limit(model, dtype)
    exact = float64.exact(model, feed)
    if dtype == "float32":
        assert 5 * limit < float64.error(float64.in_tf32(model, feed), exact)
    conv = [node for node in model.graph.node if node.op_type == "Conv"][-3]
    weight = next(i for i in model.graph.initializer if i.name == conv.input[1])
    values = numpy_helper.to_array(weight) * np.array(1.05, dtype)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    assert float64.error(engine_of(model)(feed), exact) > limit


@pytest.mark.parametrize("functions", [True, False])
def test_a_fused_node_runs_its_body_also_where_the_model_carries_none(functions: bool, tmp_path: Path) -> None:
    model = graph("c = Concat<axis=1>(a, b) d = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(d)", inputs={
        "a": "n,8,9,7", "b": "n,16,9,7"})  # fmt: skip
    _, patched = run_patch(model, tmp_path, functions=functions)
    assert patched is not None and bool(patched.functions) == functions
    feed = {"a": np.ones((2, 8, 9, 7), np.float32), "b": np.full((2, 16, 9, 7), 0.5, np.float32)}
    shapes = {name: value.shape for name, value in feed.items()}
    plain, fused = (engine_of(m, shapes=shapes)(feed)["y"] for m in (model, patched))
    assert fused.shape == (2, 12, 9, 7) and float((plain - fused).abs().max()) < 1e-5 < float(plain.abs().max())


# ------------------------------------------------------------------------------------------- what is computed at load
def op_types(engine: Any) -> list[str]:
    return [step.op_type for step in engine.program.steps]


def test_arithmetic_over_shapes_is_done_at_load() -> None:
    body = """
        s = Shape(a) n = Gather<axis=0>(s, zero) m = Unsqueeze(n, at) t = Concat<axis=0>(m, minus) y = Reshape(a, t)
    """
    values = {"zero": np.array(0), "at": np.array([0]), "minus": np.array([-1])}
    model = graph(body, values, inputs={"a": "n,8,9,7"}, rank=2)
    engine = engine_of(model, shapes={"a": (3, 8, 9, 7)})
    assert op_types(engine) == ["Reshape"] and tuple(engine()["y"].shape) == (3, 504)
    assert error_of(model, shapes={"a": (3, 8, 9, 7)}) == 0


def test_a_constant_output_and_an_input_that_is_the_output_are_given_back() -> None:
    values = {"v": np.array([1.5, 2.5], np.float32)}
    model = graph("y = Add(v, v) z = Identity(a)", values, inputs={"a": "2"}, outputs=("y", "z"), rank=1)
    made = engine_of(model)({"a": np.array([7, 8], np.float32)})
    assert made["y"].tolist() == [3, 5] and made["z"].tolist() == [7, 8]


def test_nodes_that_nobody_reads_do_not_run() -> None:
    model = graph("d = Sigmoid(a) y = Relu(a)", {}, inputs={"a": "2,3"}, rank=2)
    assert op_types(engine_of(model)) == ["Relu"]


def test_a_local_function_is_opened_with_its_attributes_and_defaults() -> None:
    body = [
        helper.make_node("LeakyRelu", ["p"], ["q"]),
        helper.make_node("Constant", [], ["c"]),
        helper.make_node("Mul", ["q", "c"], ["r"]),
    ]
    body[0].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    body[1].attribute.append(
        onnx.AttributeProto(name="value_float", ref_attr_name="factor", type=onnx.AttributeProto.FLOAT)
    )
    function = helper.make_function(
        "mine", "Leak", ["p"], ["r"], body, [helper.make_opsetid("", 17)], ["slope"],
        attribute_protos=[helper.make_attribute("factor", 3.0)],
    )  # fmt: skip
    node = helper.make_node("Leak", ["a"], ["y"], domain="mine", slope=0.5)
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "ay"]
    model = helper.make_model(
        helper.make_graph([node], "g", info[:1], info[1:]), functions=[function],
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)],
    )  # fmt: skip
    assert engine_of(model)({"a": np.array([-2, 2], np.float32)})["y"].tolist() == [-3, 6]


def branching(condition: np.ndarray | None) -> onnx.ModelProto:
    def branch(name: str, op_type: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(op_type, ["a"], [name])], name, [], [out])

    node = helper.make_node("If", ["c"], ["y"], name="choice", then_branch=branch("t", "Neg"),
                            else_branch=branch("e", "Abs"))  # fmt: skip
    a = helper.make_tensor_value_info("a", TensorProto.FLOAT, [2])
    c = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    known = [] if condition is None else [numpy_helper.from_array(condition, "c")]
    made = helper.make_graph([node], "g", [a] if known else [a, c], [y], known)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("value, want", [(True, [-1, 2]), (False, [1, 2])])
def test_a_branch_is_taken_at_load(value: bool, want: list[float]) -> None:
    assert engine_of(branching(np.array(value)))({"a": np.array([1, -2], np.float32)})["y"].tolist() == want


def test_a_branch_over_data_is_refused() -> None:
    with pytest.raises(CutefuseError, match="If 'choice': its condition depends on the data"):
        engine_of(branching(None))


# ----------------------------------------------------------------------------------------------------- merged steps
CONV = "c = Conv<pads=[1,1,1,1]>(a, w, k)"
SMALL = {"a": "2,24,9,7"}


@pytest.mark.parametrize(
    "body, values, want",
    [
        (f"{CONV} y = Relu(c)", {}, ["Conv"]),
        (f"{CONV} n = BatchNormalization(c, gamma, beta, mean, var) y = Relu(n)", bn_weights(), ["Conv"]),
        (f"{CONV} n = BatchNormalization(c, gamma, beta, mean, var) s = Sigmoid(n) y = Mul(s, n)", bn_weights(),
         ["Conv", "Silu"]),
        (f"{CONV} d = Sigmoid(c) e = Conv<pads=[1,1,1,1]>(a, w, k) r = Add(d, e) y = Relu(r)", {},
         ["Conv", "Sigmoid", "Conv"]),
        (f"{CONV} s = Sigmoid(c) y = Mul(c, s)", {}, ["Conv", "Silu"]),
    ],
    ids=["relu", "norm and relu", "norm and silu", "shortcut", "silu"],
)  # fmt: skip
def test_neighbours_become_one_step(body: str, values: dict[str, np.ndarray], want: list[str]) -> None:
    model = graph(body, weights(w=FILTER, k=(12,)) | values, inputs=SMALL)
    engine = engine_of(model)
    assert op_types(engine) == want and error_of(model, engine) < 1e-5
    named = {n for step in engine.program.steps for n in step.nodes}
    assert named == {node.name for node in model.graph.node}


@pytest.mark.parametrize(
    "body, values, want",
    [
        (f"{CONV} r = Relu(c) y = Add(r, c)", {}, ["Conv", "Relu", "Add"]),
        (f"{CONV} n = BatchNormalization(c, gamma, beta, mean, var) y = Add(n, c)", bn_weights(),
         ["Conv", "BatchNormalization", "Add"]),
        (f"{CONV} s = Sigmoid(c) y = Mul(s, a2)", {}, ["Conv", "Sigmoid", "Mul"]),
        (f"{CONV} s = Sigmoid(c) m = Mul(s, c) y = Add(m, s)", {}, ["Conv", "Sigmoid", "Mul", "Add"]),
        (f"{CONV} r = Add(c, one) y = Relu(r)", {"one": np.ones((12, 1, 1), np.float32)}, ["Conv", "Add", "Relu"]),
        ("c = Conv<pads=[1,0,0,1]>(a, w, k) y = Relu(c)", {}, ["Conv", "Relu"]),
    ],
    ids=["relu read twice", "norm read twice", "another factor", "gate read twice", "sum broadcasts", "odd pads"],
)  # fmt: skip
def test_what_others_read_or_cudnn_has_not_stays_apart(
    body: str, values: dict[str, np.ndarray], want: list[str]
) -> None:
    inputs = SMALL | ({"a2": "2,12,9,7"} if "a2" in body else {})
    model = graph(body, weights(w=FILTER, k=(12,)) | values, inputs=inputs)
    engine = engine_of(model)
    assert op_types(engine) == want and error_of(model, engine) < 1e-5


def test_a_compiler_gets_convolutions_and_activations_apart() -> None:
    from cutefuse.engines.inputs import input_specs
    from cutefuse.engines.pytorch.onnx_ops.merge import merge
    from cutefuse.engines.pytorch.onnx_ops.program import load

    model = graph(f"{CONV} y = Relu(c)", inputs=SMALL)
    program = load(model, resolve(input_specs(model), {}), fused=False)
    merge(program, convolutions=False)
    assert [step.op_type for step in program.steps] == ["Conv", "Relu"]


def test_images_stay_in_channels_last_memory() -> None:
    import torch

    body = "c = Conv<pads=[1,1,1,1]>(a, w, k) p = MaxPool<kernel_shape=[2,2]>(c) y = Concat<axis=1>(p, p)"
    engine = engine_of(graph(body, inputs=SMALL))
    for slot in (*engine.program.inputs.values(), *(s for step in engine.program.steps for s in step.outputs)):
        assert engine.program.shapes[slot].is_contiguous(memory_format=torch.channels_last), slot
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in engine.run())


# ----------------------------------------------------------------------------------------------------- dynamic shapes
def test_dynamic_axes_take_the_given_shape() -> None:
    model = graph("y = Relu(a)", {}, inputs={"a": "n,3,h,5"})
    assert tuple(engine_of(model)()["y"].shape) == (1, 3, 64, 5)
    assert tuple(engine_of(model, shapes={"a": (4, 3, 7, 5)})()["y"].shape) == (4, 3, 7, 5)


def test_axes_of_one_name_get_one_size() -> None:
    model = graph("y = Add(a, b)", {}, inputs={"a": "n,3", "b": "n,3"}, rank=2)
    assert tuple(engine_of(model, shapes={"b": (6, 3)})()["y"].shape) == (6, 3)


@pytest.mark.parametrize(
    "shapes, words",
    [
        ({"a": (4, 3, 7, 6)}, "gives a 4x3x7x6, the model has nx3xhx5"),
        ({"a": (4, 3)}, "gives a 4x3"),
        ({"q": (1,)}, "names q, the model's inputs are a"),
    ],
)
def test_a_shape_that_contradicts_the_model_is_refused(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(CutefuseError, match=words):
        engine_of(graph("y = Relu(a)", {}, inputs={"a": "n,3,h,5"}), shapes=shapes)


# ----------------------------------------------------------------------------------------------------------- refusals
def raw(nodes: list[onnx.NodeProto], **domains: int) -> onnx.ModelProto:
    """A model that the checker need not like."""
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "ay"]
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(d, v) for d, v in domains.items())]
    return helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=opsets)


def test_all_operators_that_are_missing_are_named_at_once() -> None:
    nodes = [
        helper.make_node("LSTM", ["a"], ["b"]), helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Magic", ["c"], ["y"], domain="elsewhere"),
    ]  # fmt: skip
    with pytest.raises(CutefuseError, match="does not know LSTM, Magic of domain elsewhere; use TensorRT or ONNX"):
        engine_of(raw(nodes, elsewhere=1))


@pytest.mark.parametrize(
    "model, words",
    [
        (raw([helper.make_node("Relu", ["nowhere"], ["y"])]), "Relu reads 'nowhere', which nothing makes"),
        (raw([helper.make_node("Relu", ["a"], ["b"])]), "no node makes the output y"),
        (raw([helper.make_node("Cast", ["a"], ["y"], to=TensorProto.STRING)]), "has element type STRING"),
        (raw([helper.make_node("CuteUnknown1", ["a"], ["y"], domain="cutefuse")], cutefuse=1), "CuteUnknown1"),
    ],
    ids=["input", "output", "type", "op_type"],
)
def test_a_model_that_is_not_whole_is_refused(model: onnx.ModelProto, words: str) -> None:
    with pytest.raises(CutefuseError, match=words):
        engine_of(model)


def test_an_input_that_is_no_tensor_is_refused() -> None:
    model = raw([helper.make_node("Relu", ["a"], ["y"])])
    model.graph.input[0].type.CopyFrom(helper.make_sequence_type_proto(model.graph.input[0].type))
    with pytest.raises(CutefuseError, match="input a is no tensor"):
        engine_of(model)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mode": "fast"}, "mode fast is unknown; choose one of cudnn, compile"),
        ({"device": "cuda:99"}, "device cuda:99 does not exist"),
        ({"device": "abacus"}, "device abacus is unknown"),
        ({"device": "meta"}, "neither cpu nor cuda"),
    ],
)
def test_an_engine_that_cannot_be_had_is_refused(options: dict[str, str], words: str) -> None:
    from cutefuse.engines.pytorch.run import TorchEngine

    with pytest.raises(CutefuseError, match=words):
        TorchEngine.build(graph("y = Relu(a)", {}, inputs={"a": "2"}, rank=1), **{"device": "cpu", **options})


@pytest.mark.parametrize(
    "feed, words",
    [({"b": np.ones(2, np.float32)}, "no input b; its inputs are a"), ({"a": np.ones(3, np.float32)}, "built for")],
)
def test_a_feed_that_does_not_fit_is_refused(feed: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(CutefuseError, match=words):
        engine_of(graph("y = Relu(a)", {}, inputs={"a": "2"}, rank=1))(feed)


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\xff\xff nonsense")
    with pytest.raises(CutefuseError, match="is not an ONNX model"):
        engine_of(tmp_path / "m.onnx")
    with pytest.raises(CutefuseError, match="does not exist"):
        engine_of(tmp_path / "none.onnx")
