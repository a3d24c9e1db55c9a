"""Scales and biases of a norm that the graph computes: folded where they are constants, and read where the fused node
does not make what they are computed from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch
from onnx import helper

from cutefuse.errors import CutefuseError
from cutefuse.rewrite.apply import in_order

C = 24
VALUES = {
    "g": np.linspace(0.5, 2, C, dtype=np.float32), "b": np.linspace(-1, 1, C, dtype=np.float32),
    "one": np.float32(1), "last": np.int64([-1]),
}  # fmt: skip
SUM = "x = Add(a, c) "
ONES = "s = Shape<start=-1>(x) m = Expand(one, s) "  # as the dynamo exporter writes a norm without parameters
MEAN = "m = ReduceMean<axes=[0,1], keepdims=0>({}) "


def make(body: str, dtype: str = "float32") -> onnx.ModelProto:
    used = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    stored = {k: v.astype(dtype) if v.dtype == np.float32 else v for k, v in VALUES.items() if k in used}
    return graph(body, stored, dtype=dtype, inputs=dict.fromkeys("ac", f"n,5,{C}"), rank=3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tail", ["y = LayerNormalization(x, m)", "z = LayerNormalization(x, m, b) y = Mul(z, x)"])
def test_a_scale_that_is_computed_from_the_size_of_the_sum_is_stored(tail: str, dtype: str, tmp_path: Path) -> None:
    result, patched = run_patch(make(SUM + ONES + tail, dtype), tmp_path)
    assert fused_types(patched) == ["CuteAddLayerNorm"] and result.report["verify"]["passed"]
    node = next(n for n in patched.graph.node if n.domain == "cutefuse")
    stored = {t.name: t for t in patched.graph.initializer}
    assert list(node.input[:2]) == ["a", "c"] and list(stored[node.input[2]].dims) == [C]
    assert not {"Shape", "Expand", "Add"} & {n.op_type for n in patched.graph.node}


FROM_SUM = {
    "the scale": MEAN.format("x") + "y = LayerNormalization(x, m, b)",
    "the bias": MEAN.format("x") + "y = LayerNormalization(x, g, m)",
    "the scale, in steps": "q = Relu(x) " + MEAN.format("q") + "p = Exp(m) y = LayerNormalization(x, p, b)",
}


@pytest.mark.parametrize("name", FROM_SUM)
def test_a_parameter_that_is_computed_from_the_sum_keeps_the_sum_outside(name: str, tmp_path: Path) -> None:
    result, patched = run_patch(make(SUM + FROM_SUM[name]), tmp_path)
    assert fused_types(patched) == ["CuteLayerNorm"] and result.report["verify"]["passed"]
    assert patched.graph.node[0].op_type == "Add"
    onnx.checker.check_model(patched, full_check=True)


@pytest.mark.parametrize("source", ["a", "c"])
def test_a_parameter_that_is_computed_beside_the_sum_does_not(source: str, tmp_path: Path) -> None:
    result, patched = run_patch(make(SUM + MEAN.format(source) + "y = LayerNormalization(x, m, b)"), tmp_path)
    assert fused_types(patched) == ["CuteAddLayerNorm"] and result.report["verify"]["passed"]


def test_nodes_that_wait_for_each_other_have_no_order() -> None:
    nodes = [helper.make_node("Add", [f"t{i - 1}", "x"], [f"t{i}"], name=f"n{i}") for i in (2, 1)]
    assert [n.name for n in in_order(nodes)] == ["n1", "n2"]
    nodes.append(helper.make_node("Neg", ["t2"], ["t0"], name="n0"))
    with pytest.raises(CutefuseError, match="node 'n2' would read"):
        in_order(nodes)


def test_a_tensor_that_two_nodes_wait_for_is_no_cycle() -> None:
    reads = {"d": ["b", "c"], "c": ["a", "b"], "b": ["a"], "a": ["x"]}
    nodes = [helper.make_node("Sum", inputs, [name], name=name) for name, inputs in reads.items()]
    assert "".join(n.name for n in in_order(nodes)) == "abcd"
