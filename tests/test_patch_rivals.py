"""Shortcuts, enlargements and ranges around convolutions of one source, and sites that want the same node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch, weights

VALUES = weights(w=(16, 16, 3, 3), v=(16, 16, 1, 1), k=(16,), h=(16, 8, 3, 3), n=(24, 24, 1, 1))
VALUES |= {"s": np.float32([1, 1, 2, 2]), "z": np.int64([8, 8]), "g16": np.ones(16, np.float32)}
CONV, POINT = "Conv<pads=[1,1,1,1]>(b, w, k)", "Conv(b, v)"
FLOOR = 'coordinate_transformation_mode="asymmetric", nearest_mode="floor"'
B = {"b": "n,16,8,6"}


def model_of(body: str, *, inputs: dict[str, str] | None = None, **options: object) -> onnx.ModelProto:
    read = {name: value for name, value in VALUES.items() if f" {name})" in body or f" {name}," in body}
    return graph(body, read, inputs=inputs or B, **options)  # type: ignore[arg-type]


def silu(x: str, y: str) -> str:
    return f"{x}g = Sigmoid({x}) {y} = Mul({x}, {x}g) "


AROUND = {
    "a shortcut": (f"x = {CONV} y = Add(x, b)", ["CuteConcatConv1Add"]),
    "a shortcut first": (f"x = {CONV} y = Add(b, x)", ["CuteConcatConv1Add"]),
    "a shortcut before an activation": (f"x = {CONV} u = Add(x, b) y = Relu(u)", ["CuteConcatConv1AddRelu"]),
    "a shortcut before SiLU": (f"x = {CONV} u = Add(x, b) " + silu("u", "y"), ["CuteConcatConv1AddSilu"]),
    "a shortcut after an activation": (f"x = {CONV} u = LeakyRelu(x) y = Add(u, b)", ["CuteConcatConv1LeakyReluAdd"]),
    "a shortcut after SiLU": (f"x = {CONV}" + silu("x", "u") + "y = Add(b, u)", ["CuteConcatConv1SiluAdd"]),
    "a bottleneck": (f"x = {CONV}" + silu("x", "u") + "t = Conv<pads=[1,1,1,1]>(u, w)" + silu("t", "r")
                     + "y = Add(b, r)", ["CuteConcatConv1Silu", "CuteConcatConv1SiluAdd"]),
    "enlarged": (f"u = Resize<{FLOOR}>(b, , s) y = Conv(u, w, k)", ["CuteViewConcatConv1"]),
    "enlarged and activated": (f"u = Resize<{FLOOR}>(b, , s) x = Conv(u, w, k)" + silu("x", "y"),
                               ["CuteViewConcatConv1Silu"]),
    "a range": ("p, q = Split<axis=1>(b, z) y = Conv(q, h)", ["CuteViewConcatConv1"]),
    "a range with a shortcut": ("p, q = Split<axis=1>(b, z) x = Conv<pads=[1,1,1,1]>(q, h) y = Add(b, x)",
                                ["CuteViewConcatConv1Add"]),
    "half of an enlarged tensor": (
        f"u = Resize<{FLOOR}>(b, , s) p, q = Split<axis=1>(u, z) x = Conv(q, h) y = Relu(x)",
        ["CuteViewConcatConv1Relu"]),
    "both halves": ("p, q = Split<axis=1>(b, z) r = Conv(q, h) t = Conv(p, h) y = Sub(r, t)",
                    ["CuteViewConcatConv1"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
def test_a_neighbour_is_fused_with_the_convolution_beside_it(name: str, tmp_path: Path) -> None:
    body, types = AROUND[name]
    result, patched = run_patch(model_of(body), tmp_path)
    assert sorted(fused_types(patched)) == sorted(types) and result.report["verify"]["passed"]
    others = {n.op_type for n in patched.graph.node if n.domain == ""}
    assert others <= {"Sub"} and all("single" in s["takes"] for s in result.report["sites"])


@pytest.mark.parametrize(("without", "types"), [
    (["residual"], ["CuteViewConcatConv1Silu"]), (["upsample"], ["CuteConcatConv1SiluAdd"]),
    (["residual", "upsample"], ["CuteConcatConv1Silu"]), (["single"], []),
])  # fmt: skip
def test_each_neighbour_can_be_left_out(without: list[str], types: list[str], tmp_path: Path) -> None:
    body = f"u = Resize<{FLOOR}>(b, , s) x = Conv<pads=[1,1,1,1]>(u, w)" + silu("x", "t") + "y = Add(t, e)"
    model = model_of(body, inputs=B | {"e": "n,16,16,12"})
    result, patched = run_patch(model, tmp_path, without=without)
    assert fused_types(patched) == types and (not types or result.report["verify"]["passed"])


def test_a_convolution_whose_only_neighbour_is_left_out_is_excluded(tmp_path: Path) -> None:
    result, patched = run_patch(model_of(f"x = {CONV} y = Add(x, b)"), tmp_path, without=["residual"])
    (site,) = result.report["sites"]
    assert patched is None and (site["status"], site["reason"]) == ("excluded", "--without residual")


OTHER_SHAPES = {
    "one channel": ("m = ReduceMean<axes=[1]>(b) y = Add(x, m)", 4),
    "one pixel": ("m = GlobalAveragePool(b) y = Add(x, m)", 4),
    "one image": ("m = ReduceMean<axes=[0]>(b) y = Add(x, m)", 4),
    "a batch of its own": ("y = Add(x, e)", 4),
    "a larger rank": ("m = Unsqueeze(b, zero) y = Add(x, m)", 5),
    "a vector": ("y = Add(x, w6)", 4),
}


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_an_add_of_another_shape_is_no_shortcut(name: str, tmp_path: Path) -> None:
    tail, rank = OTHER_SHAPES[name]
    values = {"v": VALUES["v"]} | ({"zero": np.int64([0])} if "zero" in tail else {})
    values |= {"w6": np.ones(6, np.float32)} if "w6" in tail else {}
    inputs = B | ({"e": "m,16,8,6"} if "(x, e)" in tail else {})
    model = graph(f"x = {POINT} {tail}", values, rank=rank, inputs=inputs)
    result, patched = run_patch(model, tmp_path, verify=False)
    reasons = [s["reason"] for s in result.report["sites"]]
    assert patched is None and len(reasons) == (name != "a vector")
    assert all("only a tensor that is known to have the same sizes can be fused" in r for r in reasons)


def statuses(result: object) -> list[tuple[str, str | None]]:
    return [(s["status"], s["op_type"]) for s in result.report["sites"]]  # type: ignore[attr-defined]


RIVALS = {
    "two bare convolutions": (f"p = {CONV} q = {POINT} y = Add(p, q)",
                              [("fused", "CuteConcatConv1Add"), ("refused", "CuteConcatConv1Add")]),
    "two bare convolutions before ReLU": (
        f"p = {CONV} q = {POINT} u = Add(q, p) y = Relu(u)",
        [("fused", "CuteConcatConv1AddRelu"), ("refused", "CuteConcatConv1AddRelu")]),
    "the first has nothing else": (f"p = {CONV} q = {POINT} r = Tanh(q) y = Add(p, r)",
                                   [("fused", "CuteConcatConv1Add"), ("fused", "CuteConcatConv1Tanh")]),
    "the second has nothing else": (f"q = {POINT} r = Tanh(q) p = {CONV} y = Add(p, r)",
                                    [("fused", "CuteConcatConv1Tanh"), ("fused", "CuteConcatConv1Add")]),
    "both have activations": (f"p = {CONV} t = Tanh(p) q = {POINT} r = Relu(q) y = Add(t, r)",
                              [("fused", "CuteConcatConv1TanhAdd"), ("fused", "CuteConcatConv1Relu")]),
    "a Concat and one source": (f"c = Concat<axis=1>(b, e) p = Conv(c, m) q = {POINT} y = Add(p, q)",
                                [("fused", "CuteConcatConv2"), ("fused", "CuteConcatConv1Add")]),
    "one source and a Concat": (f"c = Concat<axis=1>(b, e) q = {POINT} p = Conv(c, m) y = Add(p, q)",
                                [("fused", "CuteConcatConv1Add"), ("fused", "CuteConcatConv2")]),
    "a chain of shortcuts": (f"p = {CONV} t = Add(p, b) q = Conv(t, v) y = Add(q, t)",
                             [("fused", "CuteConcatConv1Add")] * 2),
    "a sum of three": (f"p = {CONV} q = {POINT} t = Add(p, q) r = Conv(b, v, k) y = Add(r, t)",
                       [("fused", "CuteConcatConv1Add"), ("refused", "CuteConcatConv1Add"),
                        ("fused", "CuteConcatConv1Add")]),
    "one enlargement for two": (
        f"u = Resize<{FLOOR}>(b, , s) p = Conv(u, v) q = Conv<pads=[1,1,1,1]>(u, w) y = Mul(p, q)",
        [("fused", "CuteViewConcatConv1")] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", RIVALS)
def test_of_two_sites_that_want_a_node_as_many_as_can_be_are_fused(name: str, tmp_path: Path) -> None:
    body, wanted = RIVALS[name]
    inputs = B | ({"e": "n,8,8,6"} if "Concat" in body else {})
    read = VALUES | {"m": VALUES["n"][:16]}
    read = {k: v for k, v in read.items() if f" {k})" in body or f" {k}," in body}
    result, patched = run_patch(graph(body, read, inputs=inputs), tmp_path, without=["branches"])
    assert statuses(result) == wanted and result.report["verify"]["passed"]
    for site in result.report["sites"]:
        if site["status"] == "refused":
            assert "Add 'Add_" in site["reason"] and "is fused into the site 'Conv_" in site["reason"]
    assert len(fused_types(patched)) == [status for status, _ in wanted].count("fused")


def test_a_smaller_match_that_has_no_body_in_the_opset_is_refused(tmp_path: Path) -> None:
    wide = "Conv<pads=[2,2,2,2], dilations=[2,2]>"
    body = f"o = {CONV} i = Tanh(o) p = {wide}(i, w) t = Tanh(p) q = Conv(i, v) y = Add(t, q)"
    result, patched = run_patch(model_of(body, opset=10), tmp_path)
    assert statuses(result) == [
        ("fused", "CuteConcatConv1Tanh"), ("refused", "CuteConcatConv1Tanh"), ("fused", "CuteConcatConv1Add"),
    ]  # fmt: skip
    assert "dilations are [2, 2], those of another site" in result.report["sites"][1]["reason"]
    assert result.report["verify"]["passed"]


def test_the_loser_of_an_add_is_fused_when_the_winner_is_excluded(tmp_path: Path) -> None:
    model = model_of(f"p = {CONV} q = {POINT} y = Add(p, q)")
    result, _ = run_patch(model, tmp_path, exclude=["Conv_0"], without=["branches"])
    assert [s["status"] for s in result.report["sites"]] == ["excluded", "fused"]
    assert result.report["verify"]["passed"]


def test_an_enlarged_tensor_that_another_reads_stays_and_is_not_counted(tmp_path: Path) -> None:
    body = f"u = Resize<{FLOOR}>(b, , s) y1 = Conv(u, w) y2 = Neg(u)"
    model = model_of(body, inputs={"b": "1,16,8,6"}, outputs=("y1", "y2"))
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteViewConcatConv1"] and result.report["summary"]["bytes_saved"] == 0
    assert {n.op_type for n in patched.graph.node if n.domain == ""} == {"Resize", "Neg"}


NESTED = weights(w=(12, 24, 3, 3), v=(12, 40, 1, 1), h=(12, 40, 3, 3))
GRU = (
    "x = Concat<axis=1>(a, b) c = Concat<axis=1>(e, x) p = Conv(c, v) z = Sigmoid(p) "
    "d = Concat<axis=1>(x, e) q = Conv(d, v) y1 = Tanh(q) "
)
SIZES = {"a": "1,8,9,7", "b": "1,16,9,7", "e": "1,16,9,7"}


def test_a_concat_inside_two_others_goes_when_both_are_fused(tmp_path: Path) -> None:
    body = GRU + "y2 = Neg(z)"
    result, patched = run_patch(graph(body, {"v": NESTED["v"]}, inputs=SIZES, outputs=("y1", "y2")), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv3Sigmoid", "CuteConcatConv3Tanh"]
    assert {n.op_type for n in patched.graph.node if n.domain == ""} == {"Neg"}
    pixels, stored = 9 * 7 * 4 * 2, 9 * 7 * 12 * 4 * 2
    first, second = (s["bytes_saved"] for s in result.report["sites"])
    assert first == (24 + 40) * pixels + stored, "the inner Concat is counted once"
    assert second == 40 * pixels + stored and result.report["verify"]["passed"]


STAYS = {
    "read by something else": ("y2 = Neg(x)", ["CuteConcatConv2Sigmoid", "CuteConcatConv2Tanh"]),
    "inside a Concat that stays": ("f = Concat<axis=1>(x, a) y2 = Neg(f)",
                                   ["CuteConcatConv2Sigmoid", "CuteConcatConv2Tanh"]),
    "a filter": ("y2 = Conv(r, x)", ["CuteConcatConv2Sigmoid", "CuteConcatConv2Tanh"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_a_concat_inside_others_that_stays_is_a_source_and_not_counted(name: str, tmp_path: Path) -> None:
    tail, types = STAYS[name]
    inputs = SIZES | ({"r": "1,24,19,17"} if "(r, x)" in tail else {})
    body = GRU.replace("z = Sigmoid(p)", "z = Sigmoid(p) y3 = Neg(z)") + tail
    model = graph(body, {"v": NESTED["v"]}, inputs=inputs, outputs=("y1", "y2", "y3"))
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == types and result.report["verify"]["passed"]
    pixels, stored = 9 * 7 * 4 * 2, 9 * 7 * 12 * 4 * 2
    saved = [s["bytes_saved"] for s in result.report["sites"] if s["status"] == "fused"]
    assert saved == [40 * pixels + stored] * 2


def test_an_inner_concat_with_a_convolution_of_its_own_goes_too(tmp_path: Path) -> None:
    body = "x = Concat<axis=1>(a, b) p = Conv(x, w) y1 = Relu(p) c = Concat<axis=1>(x, e) q = Conv(c, h) y2 = Relu(q)"
    model = graph(body, {k: NESTED[k] for k in "wh"}, inputs=SIZES, outputs=("y1", "y2"))
    result, patched = run_patch(model, tmp_path)
    assert [n.op_type for n in patched.graph.node] == ["CuteConcatConv2Relu", "CuteConcatConv3Relu"]
    assert result.report["summary"]["bytes_saved"] == (24 + 40) * 9 * 7 * 4 * 2


def test_an_inner_concat_stays_when_its_other_convolution_is_refused(tmp_path: Path) -> None:
    body = (
        "x = Concat<axis=1>(a, b) p = Conv<group=2>(x, o) y1 = Relu(p) "
        "c = Concat<axis=1>(x, e) q = Conv(c, h) y2 = Relu(q)"
    )
    model = graph(body, {"h": NESTED["h"]} | weights(o=(12, 12, 3, 3)), inputs=SIZES, outputs=("y1", "y2"))
    result, patched = run_patch(model, tmp_path)
    assert {n.op_type for n in patched.graph.node if n.domain == ""} == {"Concat", "Conv", "Relu"}
    assert result.report["summary"]["bytes_saved"] == 40 * 9 * 7 * 4 * 2, "the outer one alone"
    assert fused_types(patched) == ["CuteConcatConv2Relu"], "the inner one exists anyway"
