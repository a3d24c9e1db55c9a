"""`needed`: the nodes that make some tensors of given ones, and what they read of these."""

from __future__ import annotations

import pytest
from onnx import helper

from cutefuse.graph.cut import needed

NODES = [
    helper.make_node(op, inputs.split(), outputs.split())
    for op, inputs, outputs in (
        ("Neg", "x", "a"),
        ("Abs", "x", "b"),
        ("Add", "a w", "c"),
        ("Mul", "c a", "d"),
        ("Exp", "b", "a"),  # a second maker of `a`, as where a proof lists a pattern before the graph
    )
]


@pytest.mark.parametrize(
    ("outputs", "given", "ops", "read"),
    [
        (["d"], "", ["Neg", "Add", "Mul"], {"x", "w"}),  # each node once, without the Abs that nothing reads
        (["d"], "c", ["Neg", "Mul"], {"x", "c"}),  # a given tensor ends the way
        (["d"], "a c", ["Mul"], {"a", "c"}),
        (["c"], "c a", ["Add"], {"a", "w"}),  # an output is made although it is given
        (["b", "c"], "", ["Neg", "Abs", "Add"], {"x", "w"}),
        (["x"], "", [], {"x"}),  # what no node makes is read
        ([], "", [], set()),
    ],
)
def test_needed_nodes_stand_in_their_order(outputs: list[str], given: str, ops: list[str], read: set[str]) -> None:
    nodes, names = needed(NODES, outputs, given.split().__contains__)
    assert [n.op_type for n in nodes] == ops
    assert set(names) == read and len(names) == len(read)


def test_an_absent_input_is_not_read() -> None:
    clip = helper.make_node("Clip", ["x", "", "high"], ["y"])
    assert needed([clip], ["y"], lambda name: False) == ([clip], ["high", "x"])
