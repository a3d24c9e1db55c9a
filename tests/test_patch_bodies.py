"""Bodies of If, Loop and functions: their sites stay, and what they capture ends a chain."""

from __future__ import annotations

from pathlib import Path

import onnx
from graphs import fused_types, graph, run_patch

JOIN = "c = Concat<axis=1>(a, b) "


def test_sites_in_bodies_of_control_flow_and_functions_are_refused(tmp_path: Path) -> None:
    branch = onnx.parser.parse_graph("then () => (float[n,12,p,q] t) { c = Concat<axis=1>(a, b) t = Conv(c, w, k) }")
    other = onnx.parser.parse_graph("orelse () => (float[n,12,p,q] e) { c = Concat<axis=1>(b, a) e = Conv(c, w, k) }")
    model = graph("t = ReduceSum<keepdims=0>(a) u = Cast<to=9>(t) y = Identity(a)")
    model.graph.node[-1].CopyFrom(
        onnx.helper.make_node("If", ["u"], ["y"], name="choose", then_branch=branch, else_branch=other)
    )
    result, _ = run_patch(model, tmp_path)
    assert [s["reason"].split(";")[0] for s in result.report["sites"]] == ["inside the body of If 'choose'"] * 2


def test_a_tensor_that_a_body_captures_ends_the_chain(tmp_path: Path) -> None:
    branch = onnx.parser.parse_graph("then () => (float[n,12,7,5] t) { t = Neg(x) }")
    other = onnx.parser.parse_graph("orelse () => (float[n,12,7,5] e) { e = Exp(x) }")
    model = graph(JOIN + "x = Conv(c, w, k) y1 = Relu(x) s = ReduceSum<keepdims=0>(a) u = Cast<to=9>(s) y2 = Neg(x)",
                  outputs=("y1", "y2"))  # fmt: skip
    model.graph.node[-1].CopyFrom(onnx.helper.make_node("If", ["u"], ["y2"], then_branch=branch, else_branch=other))
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2"] and result.report["verify"]["passed"]
