"""Residual additions, and convolutions side by side on one Concat: fused into one node and proven equal, or not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import FILTER, bn_weights, fused_types, graph, run_patch, weights

JOIN = "c = Concat<axis=1>(a, b) "
CONV = JOIN + "x = Conv<pads=[1,1,1,1]>(c, w, k) "
INPUTS = {"a": "n,8,9,7", "b": "n,16,9,7", "z": "n,12,9,7"}
VALUES = weights(w=FILTER, k=(12,)) | bn_weights()
SWITCH = {"g": np.full((12, 1, 1), 0.5, np.float32)}

RESIDUAL = {
    "no activation": (CONV + "y = Add(x, z)", "CuteConcatConv2Add"),
    "the other way round": (CONV + "y = Add(z, x)", "CuteConcatConv2Add"),
    "before relu": (CONV + "s = Add(x, z) y = Relu(s)", "CuteConcatConv2AddRelu"),
    "before silu": (CONV + "s = Add(x, z) t = Sigmoid(s) y = Mul(s, t)", "CuteConcatConv2AddSilu"),
    "after batch norm, before relu": (
        CONV + "v = BatchNormalization(x, gamma, beta, mean, var) s = Add(v, z) y = Relu(s)", "CuteConcatConv2AddRelu"),
    "after a scale": (CONV + "v = Mul(x, g) y = Add(v, z)", "CuteConcatConv2Add"),
    "after relu": (CONV + "v = Relu(x) y = Add(v, z)", "CuteConcatConv2ReluAdd"),
    "after silu": (CONV + "t = Sigmoid(x) v = Mul(x, t) y = Add(z, v)", "CuteConcatConv2SiluAdd"),
    "after leaky relu": (CONV + "v = LeakyRelu<alpha=0.25>(x) y = Add(v, z)", "CuteConcatConv2LeakyReluAdd"),
    "of something computed later": (CONV + "v = Relu(x) e = Exp(z) y = Add(v, e)", "CuteConcatConv2ReluAdd"),
}  # fmt: skip


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", RESIDUAL)
def test_a_residual_is_taken_in(name: str, opset: int, tmp_path: Path) -> None:
    body, op_type = RESIDUAL[name]
    result, patched = run_patch(graph(body, VALUES | SWITCH, opset=opset, inputs=INPUTS), tmp_path)
    assert fused_types(patched) == [op_type] and result.report["verify"]["passed"]
    assert {n.op_type for n in patched.graph.node if n.domain == ""} <= {"Exp"}
    fused = next(n for n in patched.graph.node if n.domain == "cutefuse")
    assert len(fused.input) == 5 and fused.input[4] == ("e" if "later" in name else "z")
    onnx.checker.check_model(patched, full_check=True)


OUTSIDE = {
    "one value per image": (CONV + "y = Add(x, z)", {"z": "n,12,1,1"}, "CuteConcatConv2"),
    "one image for all": (CONV + "y = Add(x, z)", {"z": "1,12,9,7"}, "CuteConcatConv2"),
    "one row for all": (CONV + "y = Add(x, z)", {"z": "n,12,1,7"}, "CuteConcatConv2"),
    "another batch": (CONV + "y = Add(x, z)", {"z": "m,12,9,7"}, "CuteConcatConv2"),
    "unknown sizes": (CONV + "y = Add(x, z)", {"z": "n,12,h,q"}, "CuteConcatConv2"),
    "a larger tensor": ("c = Concat<axis=1>(a, b) x = Conv(c, w1) y = Add(x, z)", {"a": "n,8,1,1", "b": "n,16,1,1"},
                        "CuteConcatConv2"),
    "itself": (CONV + "y = Add(x, x)", {}, "CuteConcatConv2"),
    "its own activation": (CONV + "v = Relu(x) y = Add(v, x)", {}, "CuteConcatConv2"),
    "read twice": (CONV + "v = Relu(x) s = Add(v, z) t = Neg(v) y = Mul(s, t)", {}, "CuteConcatConv2Relu"),
    "a difference": (CONV + "v = Relu(x) y = Sub(v, z)", {}, "CuteConcatConv2Relu"),
    "batch norm after it": (CONV + "s = Add(x, z) y = BatchNormalization(s, gamma, beta, mean, var)", {},
                            "CuteConcatConv2Add"),
    "a second activation": (CONV + "v = Relu(x) s = Add(v, z) y = Tanh(s)", {}, "CuteConcatConv2ReluAdd"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_no_residual_stays_behind_the_fused_node(name: str, tmp_path: Path) -> None:
    body, changes, op_type = OUTSIDE[name]
    values = VALUES | weights(w1=(12, 24, 1, 1))
    shapes = {"a": (2, 8, 9, 7), "b": (2, 16, 9, 7), "z": (2, 12, 9, 7)} if name == "unknown sizes" else {}
    shapes = {"a": (1, 8, 9, 7), "b": (1, 16, 9, 7), "z": (1, 12, 9, 7)} if name == "another batch" else shapes
    result, patched = run_patch(graph(body, values, inputs=INPUTS | changes), tmp_path, shapes=shapes)
    assert fused_types(patched) == [op_type] and result.report["verify"]["passed"]
    assert [n.op_type for n in patched.graph.node if "y" in n.output] == re.findall(r"\by = (\w+)", body)


def test_a_sum_that_is_a_graph_output_ends_the_chain(tmp_path: Path) -> None:
    body = CONV + "y1 = Add(x, z) y2 = Relu(y1)"
    result, patched = run_patch(graph(body, VALUES, inputs=INPUTS, outputs=("y1", "y2")), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Add"] and result.report["verify"]["passed"]


def test_of_two_convolutions_that_are_added_one_takes_the_other_as_its_residual(tmp_path: Path) -> None:
    body = CONV + "v = Relu(x) d = Concat<axis=1>(b, a) u = Conv<pads=[1,1,1,1]>(d, w) t = Tanh(u) y = Add(v, t)"
    result, patched = run_patch(graph(body, VALUES), tmp_path)
    assert sorted(fused_types(patched)) == ["CuteConcatConv2ReluAdd", "CuteConcatConv2Tanh"]
    assert result.report["verify"]["passed"] and result.report["summary"]["refused"] == 0
    assert all(n.domain == "cutefuse" for n in patched.graph.node)


def test_a_residual_that_a_norm_needs_too_leaves_the_norm_its_fusion(tmp_path: Path) -> None:
    body = CONV + "v = Relu(x) s = Add(v, z) y = LayerNormalization(s, g, h)"
    values = VALUES | weights(g=(7,), h=(7,))
    result, patched = run_patch(graph(body, values, inputs=INPUTS), tmp_path)
    assert result.report["summary"]["refused"] == 0 and result.report["verify"]["passed"]
    assert fused_types(patched)[0].startswith("CuteConcatConv2Relu") and len(fused_types(patched)) == 2


def test_residuals_can_be_switched_off(tmp_path: Path) -> None:
    _, patched = run_patch(graph(CONV + "y = Add(x, z)", VALUES, inputs=INPUTS), tmp_path, without=["residual"])
    assert fused_types(patched) == ["CuteConcatConv2"]


def test_views_and_residuals_go_together(tmp_path: Path) -> None:
    body = "u = Resize(a, , s) c = Concat<axis=1>(u, b) x = Conv<pads=[1,1,1,1]>(c, w, k) r = Add(x, z) y = Relu(r)"
    inputs = {"a": "n,8,4,3", "b": "n,16,8,6", "z": "n,12,8,6"}
    result, patched = run_patch(graph(body, VALUES | {"s": np.float32([1, 1, 2, 2])}, inputs=inputs), tmp_path)
    assert fused_types(patched) == ["CuteViewConcatConv2AddRelu"] and result.report["verify"]["passed"]


def pair(first: str, second: str, tail: tuple[str, str] = ("Relu(x1)", "Relu(x2)")) -> str:
    return JOIN + f"x1 = Conv{first} x2 = Conv{second} y1 = {tail[0]} y2 = {tail[1]}"


PARALLEL = weights(w=(16, 24, 3, 3), k=(16,)) | weights(1, v=(8, 24, 3, 3), h=(8,)) | weights(2, u=(5, 24, 3, 3))
TOGETHER = {
    "two": (pair("(c, w, k)", "(c, v)"), ("y1", "y2"), "CuteConcatConv2x2Relu", ["y1", "y2"]),
    "two of equal strides": (pair("<strides=[2,1]>(c, w)", "<strides=[2,1]>(c, v, h)", ("Sigmoid(x1)", "Sigmoid(x2)")),
                             ("y1", "y2"), "CuteConcatConv2x2Sigmoid", ["y1", "y2"]),
    "an odd one last": (pair("(c, u)", "(c, v)"), ("y1", "y2"), "CuteConcatConv2x2Relu", ["y2", "y1"]),
    "three": (pair("(c, w)", "(c, v)") + " x3 = Conv(c, u) y3 = Relu(x3)", ("y1", "y2", "y3"), "CuteConcatConv2x3Relu",
              ["y1", "y2", "y3"]),
    "four of equal filters": (
        pair("(c, w)", "(c, w)") + " x3 = Conv(c, w) y3 = Relu(x3) x4 = Conv(c, w) y4 = Relu(x4)",
        ("y1", "y2", "y3", "y4"), "CuteConcatConv2x4Relu", ["y1", "y2", "y3", "y4"]),
    "two concats of the same tensors": (
        pair("(c, w, k)", "(d, v)").replace("c =", "d = Concat<axis=1>(a, b) c ="), ("y1", "y2"),
        "CuteConcatConv2x2Relu", ["y1", "y2"]),
    "with a batch norm of its own": (
        JOIN + "x1 = Conv(c, w, k) y1 = Relu(x1) x2 = Conv(c, v) t = BatchNormalization(x2, gamma, beta, mean, var) "
        "y2 = Relu(t)", ("y1", "y2"), "CuteConcatConv2x2Relu", ["y1", "y2"]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", TOGETHER)
def test_convolutions_side_by_side_become_one(name: str, dtype: str, tmp_path: Path) -> None:
    body, outputs, op_type, order = TOGETHER[name]
    values = {k: v.astype(dtype) for k, v in (PARALLEL | bn_weights(8)).items()}
    result, patched = run_patch(graph(body, values, outputs=outputs, dtype=dtype), tmp_path)
    assert fused_types(patched) == [op_type] and result.report["verify"]["passed"]
    assert len(patched.graph.node) == 1 and list(patched.graph.node[0].output) == order
    statuses = [s["status"] for s in result.report["sites"]]
    assert statuses == ["fused"] + ["merged"] * (len(order) - 1)
    assert result.report["summary"]["merged"] == len(order) - 1
    assert all("computes it too" in s["reason"] for s in result.report["sites"][1:])
    onnx.checker.check_model(patched, full_check=True)


def test_five_side_by_side_become_a_four_and_a_one(tmp_path: Path) -> None:
    body = JOIN + " ".join(f"x{i} = Conv(c, w) y{i} = Relu(x{i})" for i in range(5))
    result, patched = run_patch(graph(body, PARALLEL, outputs=[f"y{i}" for i in range(5)]), tmp_path)
    assert sorted(fused_types(patched)) == ["CuteConcatConv2Relu", "CuteConcatConv2x4Relu"]
    assert result.report["verify"]["passed"]


APART = {
    "strides": (pair("<strides=[2,2]>(c, w)", "(c, v)"), PARALLEL),
    "pads": (pair("<pads=[1,1,1,1]>(c, w)", "(c, v)"), PARALLEL),
    "dilations": (pair("<dilations=[2,2]>(c, w)", "(c, v)"), PARALLEL),
    "filter sizes": (pair("(c, w)", "(c, v)"), PARALLEL | weights(v=(8, 24, 1, 1))),
    "activations": (pair("(c, w)", "(c, v)", ("Relu(x1)", "Tanh(x2)")), PARALLEL),
    "slopes": (pair("(c, w)", "(c, v)", ("LeakyRelu<alpha=0.1>(x1)", "LeakyRelu<alpha=0.2>(x2)")), PARALLEL),
    "sources": (pair("(c, w)", "(d, v)").replace("c =", "d = Concat<axis=1>(b, a) c ="), PARALLEL),
    "two odd filter counts": (pair("(c, u)", "(c, v)"), PARALLEL | weights(v=(7, 24, 3, 3))),
    "one behind the other": (
        JOIN + "x1 = Conv<pads=[1,1,1,1]>(c, v) y1 = Relu(x1) d = Concat<axis=1>(y1, b) "
        "x2 = Conv<pads=[1,1,1,1]>(d, v) y2 = Relu(x2)", PARALLEL),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_convolutions_that_differ_stay_two(name: str, tmp_path: Path) -> None:
    body, values = APART[name]
    result, patched = run_patch(graph(body, values, outputs=("y1", "y2")), tmp_path)
    assert len(fused_types(patched)) == 2 and not any("x2" in t for t in fused_types(patched))
    assert result.report["verify"]["passed"] and result.report["summary"]["merged"] == 0


def test_one_that_is_excluded_or_has_a_residual_stays_alone(tmp_path: Path) -> None:
    body = (
        JOIN
        + " ".join(f"x{i} = Conv(c, w) v{i} = Relu(x{i})" for i in range(3))
        + (" y0 = Neg(v0) y1 = Add(v1, z) y2 = Neg(v2)")
    )
    model = graph(body, PARALLEL, inputs={"a": "n,8,9,7", "b": "n,16,9,7", "z": "n,16,7,5"}, outputs=("y0", "y1", "y2"))
    result, patched = run_patch(model, tmp_path, exclude=["Conv_5"])
    assert fused_types(patched) == ["CuteConcatConv2Relu", "CuteConcatConv2ReluAdd"]
    assert "Conv" in {n.op_type for n in patched.graph.node} and result.report["verify"]["passed"]


def test_merging_can_be_switched_off(tmp_path: Path) -> None:
    model = graph(pair("(c, w)", "(c, v)"), PARALLEL, outputs=("y1", "y2"))
    _, patched = run_patch(model, tmp_path, without=["parallel"])
    assert fused_types(patched) == ["CuteConcatConv2Relu"] * 2


def test_before_cast_like_sites_of_two_types_have_no_body_in_common(tmp_path: Path) -> None:
    halves = (
        "ha = Cast<to=10>(a) hb = Cast<to=10>(b) e = Concat<axis=1>(ha, hb) "
        "x3 = Conv(e, q) r3 = Relu(x3) y3 = Cast<to=1>(r3)"
    )
    body = pair("(c, w)", "(c, v)") + " " + halves
    values = PARALLEL | weights(dtype="float16", q=(8, 24, 3, 3))

    def patched_in(opset: int, **options: object) -> list[str]:
        for name in ("model.cutefuse.onnx", "model.patch.json"):
            (tmp_path / name).unlink(missing_ok=True)
        model = graph(body, values, opset=opset, outputs=("y1", "y2", "y3"))
        result, patched = run_patch(model, tmp_path, **options)
        assert result.report["verify"] is None or result.report["verify"]["passed"]
        return sorted(fused_types(patched))

    both = ["CuteConcatConv2Relu", "CuteConcatConv2x2Relu"]
    assert patched_in(13) == both[1:], "the float16 one is refused, so that the others may merge"
    assert patched_in(13, functions=False, verify=False) == [both[0]] * 3
    assert patched_in(15) == both


def test_merged_sites_can_be_lowered_and_undone(tmp_path: Path) -> None:
    from cutefuse.rewrite.unpatch import unpatch

    model = graph(pair("(c, w)", "(c, v)"), PARALLEL, outputs=("y1", "y2"))
    result, patched = run_patch(model, tmp_path, dtype="float16", scope="sites")
    assert fused_types(patched) == ["CuteConcatConv2x2Relu"] and result.report["verify"]["passed"]
    assert [n.op_type for n in patched.graph.node].count("Cast") == 4
    assert unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "plain.onnx") == 1
    plain = onnx.load(str(tmp_path / "plain.onnx"))
    kinds = [n.op_type for n in plain.graph.node]
    assert kinds.count("Conv") == 2 and "Split" not in kinds and not fused_types(plain)


# Hopper's own kernels enlarge for filters of stride 1 and take no float32, whether they are built or not.
ON_HOPPER = {
    "residual": (CONV + "s = Add(x, z) y = Relu(s)", ["CuteConcatConv2AddRelu"], ""),
    "upsample": ("u = Resize(q, , t) c = Concat<axis=1>(u, b) x = Conv(c, w, k) y = Relu(x)",
                 ["CuteViewConcatConv2Relu"], ""),
    "upsample and stride": (
        "u = Resize(q, , t) c = Concat<axis=1>(u, b) x = Conv<strides=[2, 2]>(c, w, k) y = Relu(x)",
        ["CuteConcatConv2Relu"], "upsample left outside"),
    "a range": ("p, r = Split<axis=1>(b, h) c = Concat<axis=1>(r, a) x = Conv(c, v, k) y = Relu(x)",
                ["CuteViewConcatConv2Relu"], ""),
    "a range and upsample": (
        "p, r = Split<axis=1>(b, h) u = Resize(q, , t) c = Concat<axis=1>(r, u) x = Conv(c, v, k) y = Relu(x)",
        ["CuteViewConcatConv2Relu"], ""),
    "side by side": (JOIN + "x = Conv(c, w, k) t1 = Relu(x) x2 = Conv(c, w) t2 = Relu(x2) y = Sub(t1, t2)",
                     ["CuteConcatConv2x2Relu"], ""),
    "plain": (CONV + "y = Relu(x)", ["CuteConcatConv2Relu"], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_HOPPER)
def test_what_hoppers_own_kernels_cannot_take_in_is_left_outside_for_hopper(name: str, tmp_path: Path) -> None:
    body, op_types, note = ON_HOPPER[name]
    values = weights(dtype="float16", w=(16, 24, 3, 3), v=(16, 16, 3, 3), k=(16,))
    values |= {"t": np.float32([1, 1, 2, 2]), "h": np.int64([8, 8])}
    inputs = {"a": "n,8,8,6", "b": "n,16,8,6", "q": "n,8,4,3", "z": "n,16,8,6"}
    model = graph(body, values, dtype="float16", inputs=inputs)
    result, patched = run_patch(model, tmp_path, sm=90)
    assert fused_types(patched) == op_types and result.report["verify"]["passed"] and result.report["sm"] == 90
    notes = " ".join(result.report["sites"][0]["notes"])
    assert notes.startswith(note) and ("compute capability 9.0" in notes) == bool(note)
    same_elsewhere = name != "upsample and stride"
    for sm in (0, 80, 86):
        (tmp_path / "model.cutefuse.onnx").unlink()
        result, patched = run_patch(model, tmp_path, sm=sm, verify=False)
        assert len(fused_types(patched)) == 1 and (fused_types(patched) == op_types) == same_elsewhere
        assert result.report["sites"][0]["notes"] == []
