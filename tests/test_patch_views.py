"""Enlarged and sliced sources: what is read in place, proven equal, and what stays outside, with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import FILTER, INPUTS, fused_types, graph, run_patch, weights
from onnx import helper

from cutefuse.errors import CutefuseError
from cutefuse.graph.runner import Runner
from cutefuse.graph.verify import verify
from cutefuse.match.before import repeats_pixels
from cutefuse.rewrite.patch import Options, patch
from cutefuse.rewrite.unpatch import unpatch

pytestmark = pytest.mark.slow

SMALL = {"a": "n,8,4,3", "b": "n,16,8,6"}
CONV = "c = Concat<axis=1>({}) x = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(x)"
RULES = 'coordinate_transformation_mode="{}", nearest_mode="{}"'
FLOOR = RULES.format("asymmetric", "floor")
UP = "u = Resize<" + FLOOR + ">(a, , s) " + CONV.format("u, b")
SCALES = np.float32([1, 1, 2, 2])
MODES = ("asymmetric", "half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "tf_half_pixel_for_nn",
         "align_corners", "tf_crop_and_resize")  # fmt: skip
ROUNDINGS = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")


def patched_node(model: onnx.ModelProto | None) -> tuple[onnx.NodeProto, dict]:
    assert model is not None
    (node,) = (n for n in model.graph.node if n.domain == "cutefuse")
    return node, {a.name: helper.get_attribute_value(a) for a in node.attribute}


def kinds(model: onnx.ModelProto) -> set[str]:
    return {n.op_type for n in model.graph.node if n.domain == ""}


@pytest.mark.parametrize("factor", [2, 3, 4, 5])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("mode", MODES)
def test_the_modes_that_repeat_pixels_are_those_of_the_standard(
    mode: str, rounding: str, factor: int, tmp_path: Path
) -> None:
    node = helper.make_node("Resize", ["x", "r", "s"], ["y"], mode="nearest", coordinate_transformation_mode=mode,
                            nearest_mode=rounding)  # fmt: skip
    infos = [helper.make_tensor_value_info(n, 1, [None] * rank) for n, rank in (("x", 4), ("r", 1), ("s", 1))]
    made = helper.make_graph([node], "resize", infos, [helper.make_tensor_value_info("y", 1, [None] * 4)])
    opset = 19 if mode == "half_pixel_symmetric" else 11
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    # ONNX's evaluator lacks the mode that opset 11 alone had.
    run = Runner(model, tmp_path, reference=mode != "tf_half_pixel_for_nn")
    images = [np.arange(4 * h * w, dtype=np.float32).reshape(1, 4, h, w) for h, w in ((1, 1), (1, 5), (4, 3), (7, 6))]
    operands = {"r": np.float32([0, 0, 0.1, 0, 1, 1, 0.8, 1]), "s": np.float32([1, 1, factor, factor])}
    equal = all(np.array_equal(run({"x": x, **operands})[0], x.repeat(factor, 2).repeat(factor, 3)) for x in images)
    if mode == "align_corners":  # hangs on sizes, and on the last bit of a coordinate where it repeats pixels
        assert not repeats_pixels(mode, rounding, factor)
    else:
        assert repeats_pixels(mode, rounding, factor) == equal


def test_unknown_modes_repeat_nothing() -> None:
    assert not repeats_pixels("cubic", "floor", 2) and not repeats_pixels("asymmetric", "up", 2)


def test_sizes_of_a_fused_tensor_stay_known(tmp_path: Path) -> None:
    tail = "s = Shape(z) p = Slice(s, zero, two) t = Shape(v) h = Slice(t, two, four) q = Concat<axis=0>(p, h) "
    body = CONV.format("a, b").replace("y =", "v =") + tail + " y = Resize(z, , , q) e = Neg(v)"
    values = {"zero": np.int64([0]), "two": np.int64([2]), "four": np.int64([4])} | weights(w=FILTER, k=(12,))
    made = graph(body, values, inputs=INPUTS | {"z": "n,4,3,3"}, outputs=("y", "e"))
    result, patched = run_patch(made, tmp_path, all_sites=True)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
    (info,) = patched.graph.value_info  # type: ignore[union-attr]
    sizes = [d.dim_value or d.dim_param for d in info.type.tensor_type.shape.dim]
    assert info.name == "v" and sizes == ["n", 12, 9, 7]


SIZES = "s = Shape(a) p = Slice(s, zero, two) "
ENLARGED = {
    "scales": (UP, 17, {"s": SCALES}),
    "pytorch's nearest-exact": (UP.replace("asymmetric", "half_pixel").replace("floor", "round_prefer_ceil"), 17,
                                {"s": SCALES}),
    "defaults of opset 13": ("u = Resize(a, , s) " + CONV.format("u, b"), 13, {"s": SCALES}),
    "tensorflow's in opset 11": (
        "u = Resize<" + RULES.format("tf_half_pixel_for_nn", "floor") + ">(a, r, s) " + CONV.format("u, b"), 12,
        {"s": SCALES, "r": np.zeros(0, np.float32)}),
    "static sizes": (UP.replace("(a, , s)", "(a, , , q)").replace("Resize<", "Resize<"), 17,
                     {"q": np.int64([1, 8, 8, 6])}),
    "sizes from the batch": (SIZES + "q = Concat<axis=0>(p, e) " + UP.replace("(a, , s)", "(a, , , q)"), 17,
                             {"zero": np.int64([0]), "two": np.int64([2]), "e": np.int64([8, 6])}),
    "sizes as products": (
        "s = Shape(a) n0 = Gather(s, i0) n1 = Gather(s, i1) h = Gather(s, i2) v = Gather(s, i3) h2 = Mul(h, f) "
        "v2 = Mul(f, v) q = Concat<axis=0>(n0, n1, h2, v2) " + UP.replace("(a, , s)", "(a, , , q)"), 17,
        {f"i{i}": np.int64([i]) for i in range(4)} | {"f": np.int64([2])}),
    "axes of opset 18": (UP.replace("Resize<", "Resize<axes=[3,2], "), 18, {"s": np.float32([2, 2])}),
    "through an Identity": (UP.replace("(u, b)", "(v, b)").replace("c =", "v = Identity(u) c ="), 17, {"s": SCALES}),
    "in two steps": (
        "t = Resize<" + FLOOR + ">(a, , s1) u = Resize<"
        + RULES.format("half_pixel", "round_prefer_floor") + ">(t, , s2) " + CONV.format("u, b"), 17,
        {"s1": np.float32([1, 1, 2, 2]), "s2": np.float32([1, 1, 2, 2])}),
    "half of it": (
        UP.replace("Concat<axis=1>(u, b)", "Concat<axis=1>(v, b)").replace("c =", "v = Slice(u, four, eight, one) c ="),
        17, {"s": SCALES, "four": np.int64([4]), "eight": np.int64([8]), "one": np.int64([1])}),
}  # fmt: skip


@pytest.mark.parametrize("name", ENLARGED)
def test_an_enlarged_source_is_read_in_place(name: str, tmp_path: Path) -> None:
    body, opset, values = ENLARGED[name]
    stored = weights(w=(12, 20 if name == "half of it" else 24, 3, 3), k=(12,)) | values
    factor = 4 if name == "in two steps" else 2
    inputs = SMALL if factor == 2 else {"a": "n,8,2,3", "b": "n,16,8,12"}
    static = {"a": "1,8,4,3", "b": "1,16,8,6"} if name == "static sizes" else inputs
    result, patched = run_patch(graph(body, stored, opset=opset, inputs=static), tmp_path)
    node, attrs = patched_node(patched)
    assert node.op_type == "CuteViewConcatConv2Relu" and list(node.input[:2]) == ["a", "b"]
    assert attrs["upsample"] == [factor, 1] and attrs["channel_starts"] == [4 if name == "half of it" else 0, 0]
    assert kinds(patched) == set() and result.report["verify"]["passed"]
    onnx.checker.check_model(patched, full_check=True)
    assert result.report["sites"][0]["notes"] == []


RAISED = "f = Cast<to=1>(a) r = Resize<" + FLOOR + ">(f, , s) u = Cast<to=10>(r) " + CONV.format("u, b")


def test_a_resize_in_float32_between_casts_is_read_in_place_in_float16(tmp_path: Path) -> None:
    model = graph(RAISED, weights(dtype="float16", w=FILTER, k=(12,)) | {"s": SCALES}, inputs=SMALL, dtype="float16")
    _, patched = run_patch(model, tmp_path)
    node, attributes = patched_node(patched)
    assert node.input[0] == "a" and attributes["upsample"] == [2, 1] and kinds(patched) == set()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (RAISED.replace(FLOOR, 'mode="linear"'), "linear"),
        (RAISED.replace(FLOOR, RULES.format("half_pixel", "ceil")), "ceil"),
        (RAISED.replace("Cast<to=1>(a)", "Cast<to=11>(a)"), ""),  # float64, which nobody converts around
    ],
)
def test_another_resize_between_casts_stays(body: str, says: str, tmp_path: Path) -> None:
    model = graph(body, weights(dtype="float16", w=FILTER, k=(12,)) | {"s": SCALES}, inputs=SMALL, dtype="float16")
    result, patched = run_patch(model, tmp_path)
    assert kinds(patched) == {"Cast", "Resize"}
    assert says in " ".join(note for s in result.sites if s.match for note in s.match.notes)


def test_an_enlarged_source_of_unknown_size_is_read_in_place(tmp_path: Path) -> None:
    inputs = {"a": "n,8,h,q", "b": "n,16,p,r"}
    model = graph(UP, weights(w=FILTER, k=(12,)) | {"s": SCALES}, inputs=inputs)
    shapes = {"a": (2, 8, 5, 4), "b": (2, 16, 10, 8)}
    result, patched = run_patch(model, tmp_path, shapes=shapes)
    assert fused_types(patched) == ["CuteViewConcatConv2Relu"] and result.report["verify"]["passed"]


def test_the_traffic_of_an_enlarged_tensor_is_counted_when_it_goes(tmp_path: Path) -> None:
    values = weights(w=FILTER, k=(12,)) | {"s": SCALES}
    sizes = {"a": (1, 8, 4, 3), "b": (1, 16, 8, 6)}
    result, _ = run_patch(graph(UP, values, inputs=SMALL), tmp_path, shapes=sizes)
    assert result.report["summary"]["bytes_saved"] == 2 * 4 * 8 * 6 * (24 + 8)
    both = UP.replace("y = Relu(x)", "y1 = Relu(x) y2 = Neg(u)")
    (tmp_path / "model.cutefuse.onnx").unlink()
    both_model = graph(both, values, inputs=SMALL, outputs=("y1", "y2"))
    result, patched = run_patch(both_model, tmp_path, shapes=sizes)
    assert fused_types(patched) == ["CuteViewConcatConv2Relu"] and kinds(patched) == {"Resize", "Neg"}
    assert result.report["summary"]["bytes_saved"] == 2 * 4 * 8 * 6 * 24


OLD = {
    7: "u = Upsample<scales=[1.0, 1.0, 2.0, 2.0]>(a) ",
    9: "u = Upsample(a, s) ",
    10: "u = Resize(a, s) ",
    11: "u = Resize<" + FLOOR + ">(a, r, s) ",
}


@pytest.mark.parametrize("opset", OLD)
def test_old_opsets_have_no_body_for_a_view_and_fuse_the_concat_only(opset: int, tmp_path: Path) -> None:
    values = weights(w=FILTER, k=(12,)) | ({"s": SCALES} if opset > 7 else {})
    values |= {"r": np.zeros(0, np.float32)} if opset == 11 else {}
    model = graph(OLD[opset] + CONV.format("u, b"), values, opset=opset, inputs=SMALL)
    if opset > 7:
        result, patched = run_patch(model, tmp_path)
        assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
        (tmp_path / "model.cutefuse.onnx").unlink()
        (tmp_path / "model.patch.json").unlink()
    _, patched = run_patch(model, tmp_path, verify=False, functions=False)
    node, attrs = patched_node(patched)
    assert node.op_type == "CuteViewConcatConv2Relu" and attrs["upsample"] == [2, 1]


def test_without_bodies_an_old_opset_can_neither_be_verified_nor_undone(tmp_path: Path) -> None:
    values = weights(w=FILTER, k=(12,)) | {"s": SCALES, "r": np.zeros(0, np.float32)}
    onnx.save(graph(OLD[11] + CONV.format("u, b"), values, opset=11, inputs=SMALL), str(tmp_path / "m.onnx"))
    output = tmp_path / "p.onnx"
    with pytest.raises(CutefuseError, match="CuteViewConcatConv2Relu has no standard form before opset 12"):
        patch(tmp_path / "m.onnx", output, Options(all_sites=True, functions=False, verify=True))
    assert not output.exists()
    assert patch(tmp_path / "m.onnx", output, Options(all_sites=True, functions=False)).exit_code == 0
    with pytest.raises(CutefuseError, match="convert the model before it is patched"):
        unpatch(output, tmp_path / "plain.onnx")


@pytest.mark.parametrize("opset", [9, 10, 11])
def test_the_nearest_of_old_opsets_repeats_pixels(opset: int, tmp_path: Path) -> None:
    values = {"s": np.float32([1, 1, 3, 3])} | ({"r": np.zeros(0, np.float32)} if opset == 11 else {})
    model = graph(OLD[opset].replace("u =", "y ="), values, opset=opset, inputs={"a": "n,8,4,3"})
    x = np.random.default_rng(0).standard_normal((2, 8, 4, 3)).astype(np.float32)
    assert np.array_equal(Runner(model, tmp_path)({"a": x})[0], x.repeat(3, 2).repeat(3, 3))


def resize(attrs: str, operands: str = "a, , s") -> str:
    return f"u = Resize<{attrs}>({operands}) " + CONV.format("u, b")


STAYS = {
    "bilinear": (resize('mode="linear"'), {"s": SCALES}, "mode=linear; only nearest"),
    "cubic": (resize('mode="cubic"'), {"s": SCALES}, "mode=cubic; only nearest"),
    "aligned corners": (resize(RULES.format("align_corners", "floor")), {"s": SCALES},
                        "coordinate_transformation_mode=align_corners with nearest_mode=floor does not repeat"),
    "rounded up": (resize(RULES.format("asymmetric", "ceil")), {"s": SCALES}, "nearest_mode=ceil does not repeat"),
    "half pixels cut off": (resize(RULES.format("half_pixel", "floor")), {"s": SCALES}, "half_pixel with"),
    "asymmetric rounded up": (resize(RULES.format("asymmetric", "round_prefer_ceil")), {"s": SCALES},
                              "nearest_mode=round_prefer_ceil does not repeat each pixel 2 times"),
    "a crop": (resize(RULES.format("tf_crop_and_resize", "floor"), "a, r, s"),
               {"s": SCALES, "r": np.float32([0, 0, 0, 0, 1, 1, 1, 1])}, "tf_crop_and_resize with"),
    "factors that differ": (resize(FLOOR), {"s": np.float32([1, 1, 2, 4])}, "one whole number"),
    "a broken factor": (resize(FLOOR), {"s": np.float32([1, 1, 1.5, 1.5])}, "one whole number"),
    "smaller": (resize(FLOOR), {"s": np.float32([1, 1, 0.5, 0.5])}, "one whole number"),
    "the batch too": (resize(FLOOR), {"s": np.float32([2, 1, 2, 2])}, "1 for N and C"),
    "channels too": (resize(FLOOR), {"s": np.float32([1, 2, 2, 2])}, "1 for N and C"),
    "scales of the caller": ("s = Abs(t) " + resize(FLOOR), {"t": SCALES}, "are not known"),
    "a factor beyond the kernel's": (resize(FLOOR), {"s": np.float32([1, 1, 65, 65])},
                                     "one whole number"),
    "sizes of another tensor": (
        "t = Shape(b) o = Shape(a) h = Slice(t, two, four) n = Slice(o, zero, two) q = Concat<axis=0>(n, h) "
        + resize(FLOOR, "a, , , q"),
        {"zero": np.int64([0]), "two": np.int64([2]), "four": np.int64([4])}, "are not known"),
    "sizes that wrap around": (
        SIZES + "t = Slice(s, two, four) r = Cast<to=2>(t) v = Cast<to=7>(r) h = Mul(v, two) q = Concat<axis=0>(p, h) "
        + resize(FLOOR, "a, , , q"),
        {"zero": np.int64([0]), "two": np.int64([2]), "four": np.int64([4])}, "are not known"),
    "sizes from a matrix": (
        SIZES + "t = Gather(s, m) v = Squeeze(t, zero) h = Mul(v, two) q = Concat<axis=0>(p, h) "
        + resize(FLOOR, "a, , , q"),
        {"zero": np.int64([0]), "two": np.int64([2]), "m": np.int64([[2, 3]])}, "are not known"),
    "a size that keeps the aspect": (
        resize(FLOOR + ', axes=[2,3], keep_aspect_ratio_policy="not_larger"', "a, , , q"),
        {"q": np.int64([8, 6])}, "are not known"),
}  # fmt: skip
STAYS_INPUTS = {
    "factors that differ": {"a": "n,8,4,3", "b": "n,16,8,12"}, "a broken factor": {"a": "n,8,4,4", "b": "n,16,6,6"},
    "smaller": {"a": "n,8,4,4", "b": "n,16,2,2"}, "the batch too": {"a": "1,8,4,3", "b": "2,16,8,6"},
    "channels too": {"a": "n,4,4,3", "b": "n,16,8,6"}, "sizes of another tensor": {"a": "n,8,p,q", "b": "n,16,h,v"},
    "a factor beyond the kernel's": {"a": "n,8,1,1", "b": "n,16,65,65"},
    "sizes that wrap around": {"a": "n,8,h,v", "b": "n,16,p,q"},
    "sizes from a matrix": {"a": "n,8,h,v", "b": "n,16,p,q"},
    "a size that keeps the aspect": {"a": "1,8,4,3", "b": "1,16,8,6"},
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_another_resize_stays_with_its_reason_and_the_concat_is_fused(name: str, tmp_path: Path) -> None:
    body, values, reason = STAYS[name]
    opset = 18 if "aspect" in name else 17
    model = graph(body, weights(w=FILTER, k=(12,)) | values, opset=opset, inputs=STAYS_INPUTS.get(name, SMALL))
    if name == "scales of the caller":  # nothing infers what a computed factor gives
        model.graph.input.append(helper.make_tensor_value_info("t", 1, [4]))
        model.graph.value_info.append(helper.make_tensor_value_info("u", 1, ["n", 8, 8, 6]))
    shapes = {"a": (2, 8, 4, 3), "b": (2, 16, 8, 6)} if name.startswith("sizes ") else {}
    shapes = {"a": (1, 8, 4, 257), "b": (1, 16, 8, 2)} if "wrap" in name else shapes
    result, patched = run_patch(model, tmp_path, shapes=shapes)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and "Resize" in kinds(patched)
    (note,) = result.report["sites"][0]["notes"]
    assert "Resize 'Resize_" in note and reason in note and result.report["verify"]["passed"]


WIDE = {"a": "n,32,8,6", "b": "n,16,8,6"}
SPLIT = "p, q = Split<axis=1>(a, z) "
ENDS = {"z": np.int64([16, 16])}
BOUNDS = {"lo": np.int64([16]), "hi": np.int64([2**63 - 1]), "one": np.int64([1]), "step": np.int64([1])}
RANGES = {
    "C2f: the whole of a Split and one part again": (
        SPLIT + "t = Conv(q, v) " + CONV.format("p, q, t"), ENDS | weights(v=(16, 16, 1, 1)), 48,
        "CuteConcatConv2Relu", "32+16->12"),
    "one half": (SPLIT + "y2 = Neg(p) " + CONV.format("q, b"), ENDS, 32, "CuteViewConcatConv2Relu", "[16:32]+16->12"),
    "halves swapped": (SPLIT + CONV.format("q, p"), ENDS, 32, "CuteViewConcatConv2Relu", "[16:32]+[0:16]->12"),
    "a Slice to the end": ("p = Slice(a, lo, hi, one) " + CONV.format("p, b"), BOUNDS, 32, "CuteViewConcatConv2Relu",
                           "[16:32]+16->12"),
    "a Slice from the end": ("p = Slice(a, m, hi, n3, step) " + CONV.format("b, p"),
                             BOUNDS | {"m": np.int64([-24]), "n3": np.int64([-3])}, 40, "CuteViewConcatConv2Relu",
                             "16+[8:32]->12"),
    "a Slice of a Split": (SPLIT + "r = Slice(q, e, hi, one) " + CONV.format("r, b"),
                           ENDS | BOUNDS | {"e": np.int64([8])}, 24, "CuteViewConcatConv2Relu", "[24:32]+16->12"),
    "neighbours with an odd border": (
        "p, q, r = Split<axis=1>(a, z) " + CONV.format("p, q, b"), {"z": np.int64([13, 11, 8])}, 40,
        "CuteViewConcatConv2Relu", "[0:24]+16->12"),
    "ten parts of one tensor": (
        ", ".join(f"p{i}" for i in range(10)) + " = Split<axis=1>(a, z) "
        + CONV.format(", ".join(f"p{i}" for i in range(10))), {"z": np.int64([4] * 8 + [0, 0])[[*range(8), 8, 9]]
                                                              + np.int64([0] * 6 + [-2, -2, 2, 2])}, 32,
        "CuteConcatConv1Relu", "32->12"),
}  # fmt: skip


@pytest.mark.parametrize("name", RANGES)
def test_a_channel_range_is_read_in_place(name: str, tmp_path: Path) -> None:
    body, values, channels, op_type, title = RANGES[name]
    outputs = ("y", "y2") if "y2" in body else ("y",)
    stored = weights(w=(12, channels, 3, 3), k=(12,)) | values
    result, patched = run_patch(graph(body, stored, inputs=WIDE, outputs=outputs), tmp_path)
    before = ["CuteViewConcatConv1"] if "C2f" in name else []  # its bottleneck reads a range as well
    assert fused_types(patched) == [*before, op_type] and result.report["verify"]["passed"]
    assert result.report["sites"][-1]["title"].startswith(title) and result.report["sites"][-1]["notes"] == []
    assert "Concat" not in kinds(patched) and ("Split" in kinds(patched)) == ("y2" in body)


@pytest.mark.parametrize(("opset", "body"), [
    (12, "p, q = Split<axis=1, split=[16,16]>(a) "), (12, "p, q = Split<axis=-3>(a) "),
    (13, "p, q = Split<axis=1>(a) "), (18, "p, q = Split<axis=1, num_outputs=2>(a) "), (18, SPLIT),
])  # fmt: skip
def test_the_splits_of_all_opsets_are_read(opset: int, body: str, tmp_path: Path) -> None:
    stored = weights(w=(12, 32, 3, 3), k=(12,)) | (ENDS if "z" in body else {})
    result, patched = run_patch(graph(body + CONV.format("q, b"), stored, opset=opset, inputs=WIDE), tmp_path)
    assert result.report["sites"][0]["title"].startswith("[16:32]+16") and result.report["verify"]["passed"]
    assert patched_node(patched)[1]["channel_starts"] == [16, 0]


def test_a_slice_with_attributes_is_read_without_bodies(tmp_path: Path) -> None:
    body = "p = Slice<axes=[1], starts=[16], ends=[32]>(a) " + CONV.format("p, b")
    model = graph(body, weights(w=(12, 32, 3, 3), k=(12,)), opset=9, inputs=WIDE)
    _, patched = run_patch(model, tmp_path, verify=False, functions=False)
    assert patched_node(patched)[1]["channel_starts"] == [16, 0]


WHOLE = {
    "every second channel": ("p = Slice(a, zero, hi, one, two) " + CONV.format("p, b"),
                             BOUNDS | {"zero": np.int64([0]), "two": np.int64([2])}, 32),
    "rows": ("p = Slice(a, zero, four, two) r = Slice(b, zero, four, two) " + CONV.format("p, r"),
             {"zero": np.int64([0]), "four": np.int64([4]), "two": np.int64([2])}, 48),
    "channels and rows": (
        "p = Slice(a, zero, ends, axes) r = Slice(b, z1, four, two) " + CONV.format("p, r"),
        {"zero": np.int64([0, 0]), "ends": np.int64([16, 4]), "axes": np.int64([1, 2]), "z1": np.int64([0]),
         "four": np.int64([4]), "two": np.int64([2])}, 32),
    "channels backwards": ("p = Slice(a, m, f, one, back) " + CONV.format("p, b"),
                           BOUNDS | {"m": np.int64([15]), "f": np.int64([-33]), "back": np.int64([-1])}, 32),
    "a split of rows": ("p, q = Split<axis=2>(a) r, t = Split<axis=2>(b) " + CONV.format("p, r"), {}, 48),
    "a computed start": ("q = ReduceSum<keepdims=0>(a) r = Sub(q, q) i = Cast<to=7>(r) lo = Add(i, t) "
                         "p = Slice(a, lo, hi, one) " + CONV.format("p, b"),
                         BOUNDS | {"t": np.int64([16])}, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_other_parts_stay_tensors_of_their_own(name: str, tmp_path: Path) -> None:
    body, values, channels = WHOLE[name]
    stored = weights(w=(12, channels, 3, 3), k=(12,)) | {k: v for k, v in values.items() if f"{k} = " not in body}
    result, patched = run_patch(graph(body, stored, inputs=WIDE), tmp_path)
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
    assert kinds(patched) & {"Slice", "Split"}


def test_a_range_that_starts_between_vectors_stays_and_the_others_are_views(tmp_path: Path) -> None:
    body = "p, q, r = Split<axis=1>(a, z) " + CONV.format("q, b, r")
    stored = weights(w=(12, 44, 3, 3), k=(12,), dtype="float16") | {"z": np.int64([4, 12, 16])}
    result, patched = run_patch(graph(body, stored, dtype="float16", inputs=WIDE), tmp_path)
    assert result.report["sites"][0]["title"].startswith("12+16+[16:32]->12") and result.report["verify"]["passed"]
    assert fused_types(patched) == ["CuteViewConcatConv3Relu"] and "Split" in kinds(patched)
    (note,) = result.report["sites"][0]["notes"]
    assert note.startswith("'q' is read as it is: concat_conv: ") and "multiple of 8" in note


def test_a_range_of_float32_that_float16_cannot_start_at_is_a_tensor_of_its_own_there(tmp_path: Path) -> None:
    body = "p, q = Split<axis=1>(a, z) " + CONV.format("q, b")
    stored = weights(w=(12, 36, 3, 3), k=(12,)) | {"z": np.int64([12, 20])}
    result, patched = run_patch(graph(body, stored, inputs=WIDE), tmp_path)
    assert fused_types(patched) == ["CuteViewConcatConv2Relu"]
    (tmp_path / "model.cutefuse.onnx").unlink()
    result, patched = run_patch(graph(body, stored, inputs=WIDE), tmp_path, dtype="float16", scope="sites")
    assert fused_types(patched) == ["CuteConcatConv2Relu"] and result.report["verify"]["passed"]
    assert "Split" in kinds(patched) and result.report["conversion"]["kept_float32"] == []


BOTH = "p, q = Split<axis=1>(b, z) u = Resize<" + FLOOR + ">(a, , s) " + CONV.format("u, q")


VIEW, PLAIN = "CuteViewConcatConv2Relu", "CuteConcatConv2Relu"


@pytest.mark.parametrize(("without", "op_type", "kept"), [
    ([], VIEW, set()), (["upsample"], VIEW, {"Resize"}), (["ranges"], VIEW, {"Split"}),
    (["ranges", "upsample"], PLAIN, {"Resize", "Split"}),
])  # fmt: skip
def test_each_kind_of_view_can_be_left_out(without: list[str], op_type: str, kept: set[str], tmp_path: Path) -> None:
    values = weights(w=(12, 16, 3, 3), k=(12,)) | {"s": SCALES, "z": np.int64([8, 8])}
    result, patched = run_patch(graph(BOTH, values, inputs=SMALL), tmp_path, without=without)
    assert fused_types(patched) == [op_type] and kinds(patched) == kept and result.report["verify"]["passed"]
    inside = {n.split("_")[0] for n in result.report["sites"][0]["nodes"]}
    assert inside == {"Split", "Resize", "Concat", "Conv", "Relu"} - kept


def test_a_site_that_is_legal_as_a_view_only_is_left_out_without_views(tmp_path: Path) -> None:
    body, values, channels, _, _ = RANGES["ten parts of one tensor"]
    stored = weights(w=(12, channels, 3, 3), k=(12,)) | values
    result, patched = run_patch(graph(body, stored, inputs=WIDE), tmp_path, without=["ranges"])
    assert patched is None and result.report["sites"][0]["reason"] == "--without ranges"


# ---- residuals that are channel ranges ----

BRANCH = "p, q = Split<axis=1>(b, half) {before} x = Conv<pads=[1,1,1,1]>({source}, w, k) {after}"
RANGED = {
    "the second half, after the activation": (
        BRANCH.format(before="", source="q", after="g = Sigmoid(x) m = Mul(x, g) y = Add(q, m)"),
        "CuteViewConcatConv1SiluAdd", 8),
    "the first half, before it": (BRANCH.format(before="", source="q", after="t = Add(x, p) y = Relu(t)"),
                                  "CuteViewConcatConv1AddRelu", 0),
    "a range of another tensor than the source's": (
        BRANCH.format(before="", source="a", after="t = Add(x, q) y = Relu(t)"), "CuteViewConcatConv1AddRelu", 8),
    "by a Slice": ("s = Slice(b, four, twelve, one) x = Conv<pads=[1,1,1,1]>(a, w, k) t = Add(x, s) y = Tanh(t)",
                   "CuteViewConcatConv1AddTanh", None),
}  # fmt: skip
RANGE_VALUES = weights(w=(8, 8, 3, 3), k=(8,)) | {
    n: np.int64([v]) for n, v in {"four": 4, "twelve": 12, "one": 1}.items()
} | {"half": np.int64([8, 8])}  # fmt: skip


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("name", [n for n in RANGED if n != "by a Slice"])
def test_a_residual_that_is_a_range_is_read_in_place(name: str, layout: str, tmp_path: Path) -> None:
    body, op_type, start = RANGED[name]
    result, patched = run_patch(graph(body, RANGE_VALUES), tmp_path, layout=layout)
    node, attrs = patched_node(patched)
    assert (node.op_type, attrs["residual_start"]) == (op_type, start)
    assert result.report["verify"]["passed"] and not kinds(patched) & {"Split", "Slice", "Add", "Conv"}
    assert {"residual", "ranges"} <= set(result.report["sites"][0]["takes"])
    assert unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "plain.onnx") == 1
    assert verify(tmp_path / "model.onnx", onnx.load(str(tmp_path / "plain.onnx")), tmp_path, 1e-5, {})["passed"]


# What keeps the range a tensor of its own: float16 channels that begin inside a 16-byte vector, a user's choice,
# a range along another axis, and one that is not only added.
APART = {
    "not on a vector": (RANGED["by a Slice"][0], {"dtype": "float16"}, {}),
    "--without ranges": (RANGED["a range of another tensor than the source's"][0], {}, {"without": ["ranges"]}),
    "of rows": ("p, q = Split<axis=2>(c9, rows) x = Conv<pads=[1,1,1,1]>(a, w, k) t = Add(x, q) y = Relu(t)",
                {"inputs": {"a": "n,8,4,6", "c9": "n,8,8,6"}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name, layout", [(n, "hwc8") for n in APART] + [(n, "nhwc") for n in list(APART)[1:]])
def test_other_residuals_are_tensors_of_their_own(name: str, layout: str, tmp_path: Path) -> None:
    body, shape, options = APART[name]
    dtype = shape.get("dtype", "float32")
    values = {k: v.astype(dtype) if v.dtype == np.float32 else v for k, v in RANGE_VALUES.items()}
    model = graph(body, values | {"rows": np.int64([4, 4])}, **shape)
    _, patched = run_patch(model, tmp_path, layout=layout, **options)
    node, attrs = patched_node(patched)
    assert attrs["residual_start"] == 0 and "View" not in node.op_type
    assert kinds(patched) & {"Split", "Slice"}
