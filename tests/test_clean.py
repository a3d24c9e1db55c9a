"""What is folded and removed before sites are found, what is left, and that only fused sites change a model."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import FILTER, INPUTS, bn_weights, fused_types, graph, run_patch, weights
from onnx import TensorProto, helper, numpy_helper

from cutefuse.errors import CutefuseError
from cutefuse.graph import fold
from cutefuse.graph.clean import Cleaned, clean
from cutefuse.graph.fold import MAX_ELEMENTS
from cutefuse.graph.read import replace_nodes, run_node

CONCAT, CONV = "c = Concat<axis=1>(a, b)", "y = Conv<pads=[1,1,1,1]>({}, w, k)"
SMALL = {"a": "2,8,9,7", "b": "2,16,9,7"}


def ints(**values: Sequence[int]) -> dict[str, np.ndarray]:
    return {name: np.array(v, dtype=np.int64) for name, v in values.items()}


def stored(**values: Sequence[int]) -> dict[str, np.ndarray]:
    """The filter, the bias and vectors of integers."""
    return weights(w=FILTER, k=(12,)) | ints(**values)


def cleaned(model: onnx.ModelProto) -> Cleaned:
    return clean(model, Path("."))


# name -> (nodes between the Concat c and the Conv, the tensor that the Conv reads, stored integers)
NO_OPS: dict[str, tuple[str, str, dict[str, Sequence[int]]]] = {
    "slice to the end": ("s = Slice(c, zero, end, one)", "s", {"zero": [0], "end": [2**63 - 1], "one": [1]}),
    "slice of all channels": ("s = Slice(c, zero, n, one)", "s", {"zero": [0], "n": [24], "one": [1]}),
    "slice by a negative start": ("s = Slice(c, lo, n, one)", "s", {"lo": [-24], "n": [24], "one": [1]}),
    "slices of two axes": ("s = Slice(c, z, e, ax)", "s", {"z": [0, 0], "e": [99, 2**31 - 1], "ax": [-3, 0]}),
    "identities": ("i = Identity(c) j = Identity(i) s = Identity(j)", "s", {}),
    "cast to its own type": ("s = Cast<to=1>(c)", "s", {}),
    "pad by nothing": ("s = Pad(c, p)", "s", {"p": [0] * 8}),
    "reflect by nothing": ('s = Pad<mode="reflect">(c, p)', "s", {"p": [0] * 8}),
    "one after the other": ("i = Pad(c, p) j = Cast<to=1>(i) s = Identity(j)", "s", {"p": [0] * 8}),
}  # fmt: skip
KEPT: dict[str, tuple[str, str, dict[str, Sequence[int]]]] = {
    "slice that cuts a row": ("s = Slice(c, z, e, ax)", "s", {"z": [1], "e": [2**63 - 1], "ax": [2]}),
    "slice that cuts the end": ("s = Slice(c, z, e, ax)", "s", {"z": [0], "e": [-1], "ax": [3]}),
    "slice with a step": ("s = Slice(c, z, e, ax, st)", "s", {"z": [0], "e": [99], "ax": [2], "st": [2]}),
    "slice that turns around": ("s = Slice(c, z, e, ax, st)", "s", {"z": [-1], "e": [-99], "ax": [2], "st": [-1]}),
    "slice of an unknown batch": ("s = Slice(c, z, e, ax)", "s", {"z": [0], "e": [4], "ax": [0]}),
    "cast to another type and back": ("h = Cast<to=10>(c) s = Cast<to=1>(h)", "s", {}),
    "pad that reflects": ("s = Pad<mode=\"reflect\">(c, p)", "s", {"p": [0, 0, 1, 0, 0, 0, 0, 0]}),
    "pad that cuts": ("s = Pad(c, p)", "s", {"p": [0, 0, -1, 0, 0, 0, 1, 0]}),
    "pad by a computed size": ("i = Shape(c) j = Sub(i, i) p = Concat<axis=0>(j, j) s = Pad(c, p)", "s", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_OPS)
def test_a_node_without_effect_hides_no_site(name: str, tmp_path: Path) -> None:
    nodes, tensor, numbers = NO_OPS[name]
    model = graph(f"{CONCAT} {nodes} {CONV.format(tensor)}", stored(**numbers))
    result, patched = run_patch(model, tmp_path)
    assert patched is not None and [n.op_type for n in patched.graph.node] == ["CuteConcatConv2"]
    assert result.report["verify"]["passed"]
    assert not set(numbers) & {t.name for t in patched.graph.initializer}, "what only the no-ops read goes as well"
    assert set(result.report["clean"]["no_ops"]) >= {tensor} and result.report["clean"]["left"] == ""


@pytest.mark.parametrize("name", KEPT)
def test_a_node_with_an_effect_stays(name: str, tmp_path: Path) -> None:
    nodes, tensor, numbers = KEPT[name]
    model = graph(f"{CONCAT} {nodes} {CONV.format(tensor)}", stored(**numbers))
    found = cleaned(model)
    assert tensor not in found.no_ops
    assert [n.op_type for n in found.graph.nodes][-2:] == [model.graph.node[-2].op_type, "Conv"]
    assert run_patch(model, tmp_path)[1] is None


def test_no_ops_are_seen_through_wherever_a_site_reads(tmp_path: Path) -> None:
    """Before the Concat, around the activation, and in a parameter."""
    body = (
        "ia = Identity(a) pb = Pad(b, p) c = Concat<axis=1>(ia, pb) wi = Identity(w) o = Conv<pads=[1,1,1,1]>(c, wi, k)"
        " q = Cast<to=1>(o) r = Identity(q) g = Sigmoid(q) y = Mul(r, g)"
    )
    result, patched = run_patch(graph(body, stored(p=[0] * 8)), tmp_path)
    assert patched is not None and [n.op_type for n in patched.graph.node] == ["CuteConcatConv2Silu"]
    assert list(patched.graph.node[0].input)[:2] == ["a", "b"]


def test_a_no_op_that_others_read_stays_for_them(tmp_path: Path) -> None:
    body = f"{CONCAT} s = Identity(c) {CONV.format('s')} z = Neg(s)"
    _, patched = run_patch(graph(body, outputs=("y", "z")), tmp_path)
    assert patched is not None
    assert [n.op_type for n in patched.graph.node] == ["Concat", "Identity", "CuteConcatConv2", "Neg"]


def test_a_no_op_that_is_a_graph_output_stays(tmp_path: Path) -> None:
    body = f"{CONCAT} s = Identity(c) {CONV.format('s')}"
    model = graph(body, outputs=("y", "s"))
    assert cleaned(model).no_ops == {}
    _, patched = run_patch(model, tmp_path)
    assert patched is not None and [o.name for o in patched.graph.output] == ["y", "s"]
    assert [n.op_type for n in patched.graph.node] == ["Concat", "Identity", "CuteConcatConv2"]


def with_body(inner: Sequence[onnx.NodeProto], body: str, **options: object) -> onnx.ModelProto:
    """A graph whose last node is an If over the given nodes, which make "z" from tensors of the graph."""
    model = graph(body, **options)  # type: ignore[arg-type]
    branch = helper.make_graph(inner, "branch", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(helper.make_node("If", ["yes"], ["z"], "if", then_branch=branch, else_branch=branch))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    return model


def test_what_a_body_reads_stays(tmp_path: Path) -> None:
    model = with_body([helper.make_node("Neg", ["s"], ["inner"])], f"{CONCAT} s = Identity(c) {CONV.format('s')}")
    assert cleaned(model).no_ops == {}
    _, patched = run_patch(model, tmp_path)
    assert patched is not None
    assert [n.op_type for n in patched.graph.node] == ["Concat", "Identity", "CuteConcatConv2", "If"]


def test_bodies_are_not_cleaned() -> None:
    inner = [helper.make_node("Identity", ["c"], ["t"]), helper.make_node("Neg", ["t"], ["inner"])]
    found = cleaned(with_body(inner, f"{CONCAT} {CONV.format('c')}"))
    branch = found.graph.nodes[-1].attribute[0].g
    assert [n.op_type for n in branch.node] == ["Identity", "Neg"] and found.no_ops == {} == found.folded


def test_a_body_may_use_a_name_of_the_graph_again() -> None:
    """The body's own s hides the graph's: both stay what they are."""
    inner = [helper.make_node("Neg", ["c"], ["s"]), helper.make_node("Abs", ["s"], ["inner"])]
    found = cleaned(with_body(inner, f"{CONCAT} s = Identity(c) {CONV.format('s')}"))
    assert found.no_ops == {} and list(found.graph.nodes[1].output) == ["s"]


def folds(body: str, values: Mapping[str, np.ndarray], inputs: Mapping[str, str] = SMALL, **more: object) -> Cleaned:
    return cleaned(graph(body, values, inputs=inputs, **more))  # type: ignore[arg-type]


def test_a_computed_batch_norm_is_folded_into_the_filter(tmp_path: Path) -> None:
    bn = bn_weights()
    var = bn.pop("var")
    values = weights(w=FILTER, k=(12,)) | bn | {"deviation": np.sqrt(var), "two": np.float32(2)}
    norm = "v = Pow(deviation, two) y = BatchNormalization(o, gamma, beta, mean, v)"
    body = f"{CONCAT} o = Conv<pads=[1,1,1,1]>(c, w, k) {norm}"
    found = folds(body, values, INPUTS)
    np.testing.assert_allclose(numpy_helper.to_array(found.folded["v"]), var.astype(np.float64), rtol=1e-6)
    result, patched = run_patch(graph(body, values), tmp_path)
    assert patched is not None and [n.op_type for n in patched.graph.node] == ["CuteConcatConv2"]
    assert result.report["clean"]["folded"] == ["v"] and result.report["verify"]["passed"]


def test_a_computed_scale_of_a_resize_is_folded(tmp_path: Path) -> None:
    values = weights(w=FILTER, k=(12,)) | {"ones": np.ones(2, np.float32), "two": np.array([2.0], np.float32)}
    values |= ints(n=[2])
    body = (
        't = Expand(two, n) s = Concat<axis=0>(ones, t) u = Resize<coordinate_transformation_mode="asymmetric", '
        'mode="nearest", nearest_mode="floor">(a, , s) c = Concat<axis=1>(u, b) y = Conv<pads=[1,1,1,1]>(c, w, k)'
    )
    result, patched = run_patch(graph(body, values, inputs={"a": "n,8,4,5", "b": "n,16,8,10"}), tmp_path)
    assert fused_types(patched) == ["CuteViewConcatConv2"] and result.report["sites"][0]["takes"] == ["upsample"]
    assert patched is not None and [n.op_type for n in patched.graph.node] == ["CuteViewConcatConv2"]


def test_sizes_of_known_tensors_are_folded_and_of_dynamic_ones_not() -> None:
    body = "i = Shape(a) h = Shape<start=2>(a) e = Gather(i, at) r = Add(h, one) y = Relu(a)"
    values = ints(at=[1], one=[1])
    found = folds(body, values, {"a": "n,8,9,7"})
    expected = {"h": [9, 7], "e": [8], "r": [10, 8]}
    assert {name: list(numpy_helper.to_array(t)) for name, t in found.folded.items()} == expected
    assert folds(body, values, {"a": "3,8,9,7"}).folded.keys() == {"i", "h", "e", "r"}


RANDOM = {
    "normal": "k = RandomNormal<shape=[12], seed=1.0>()",
    "uniform": "k = RandomUniform<shape=[12]>()",
    "normal like": "k = RandomNormalLike(bias)",
    "bernoulli": "k = Bernoulli(bias)",
    "after arithmetic": "t = Abs(bias) k = RandomUniformLike(t)",
    "before arithmetic": "t = RandomNormalLike(bias) k = Abs(t)",
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_values_are_never_folded(name: str, tmp_path: Path) -> None:
    body = f"{RANDOM[name]} {CONCAT} {CONV.format('c')}"
    values = weights(w=FILTER) | {"bias": np.full(12, 0.5, np.float32)}
    found = folds(body, values)
    assert "k" not in found.folded
    result, patched = run_patch(graph(body, values), tmp_path)
    assert patched is None and "computed at run time" in result.report["sites"][0]["reason"]


def test_a_huge_constant_is_not_expanded(tmp_path: Path) -> None:
    values = weights(w=FILTER, k=(12,)) | ints(huge=[1, 1, 1 << 20, 1 << 12]) | {"one": np.float32(1)}
    body = f"{CONCAT} {CONV.format('c')} e = Expand(one, huge) z = ReduceSum<keepdims=1>(e)"
    tracemalloc.start()
    found = folds(body, values, outputs=("y", "z"))
    assert found.folded == {} and found.note == ""
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    result, patched = run_patch(graph(body, values, outputs=("y", "z")), tmp_path, verify=False)
    assert patched is not None and {"Expand", "ReduceSum"} <= {n.op_type for n in patched.graph.node}


@pytest.mark.parametrize("extra, folded", [(0, {"e"}), (1, set())])
def test_the_largest_constant_that_is_folded(extra: int, folded: set[str]) -> None:
    values = ints(size=[MAX_ELEMENTS + extra]) | {"one": np.float32(1)}
    assert folds("e = Expand(one, size) y = Add(e, x)", values, {"x": "1"}, rank=1).folded.keys() == folded


def test_a_large_filter_is_neither_read_nor_copied() -> None:
    """Its data is missing: whoever reads it fails."""
    model = graph(f"wt = Transpose<perm=[0,1,2,3]>(w) {CONCAT} y = Conv<pads=[1,1,1,1]>(c, wt, k)")
    filter_ = next(t for t in model.graph.initializer if t.name == "w")
    filter_.ClearField("raw_data")
    del filter_.dims[:]
    filter_.dims.extend((3000, 24, 3, 3))
    filter_.data_location = TensorProto.EXTERNAL
    filter_.external_data.add(key="location", value="missing.bin")
    found = cleaned(model)
    assert found.folded == {} and found.graph.initializers["w"] is found.whole.initializers["w"]


def test_a_constant_that_is_a_graph_output_stays(tmp_path: Path) -> None:
    values = weights(w=FILTER, half=(12,))
    body = f"k = Add(half, half) {CONCAT} {CONV.format('c')}"
    model = graph(body, values)
    model.graph.output.append(helper.make_tensor_value_info("k", TensorProto.FLOAT, [12]))
    assert cleaned(model).folded == {}
    _, patched = run_patch(model, tmp_path)
    assert patched is not None and [n.op_type for n in patched.graph.node] == ["Add", "CuteConcatConv2"]


def test_an_initializer_that_callers_may_replace_is_no_constant() -> None:
    model = graph(f"k = Abs(bias) {CONCAT} {CONV.format('c')}", weights(w=FILTER, bias=(12,)))
    model.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [12]))
    assert cleaned(model).folded == {}


def test_quantisers_of_constants_stay() -> None:
    values = {"s": np.float32(0.1), "q": np.ones(12, np.int8)}
    assert folds("k = DequantizeLinear(q, s) y = Add(k, x)", values, {"x": "12"}, rank=1, opset=17).folded == {}


def test_a_custom_operator_stays_and_all_around_it_is_folded() -> None:
    model = graph("k = Add(half, half) t = Abs(k) y = Add(t, x)", weights(half=(12,)), inputs={"x": "12"}, rank=1)
    model.graph.node[1].domain = "acme"
    model.opset_import.add(domain="acme", version=1)
    found = cleaned(model)
    assert found.folded.keys() == {"k"} and [n.domain for n in found.graph.nodes] == ["acme", ""]


@pytest.mark.parametrize("made", [None, [np.array([0.5])], [np.array([0, 0])]], ids=["nothing", "type", "size"])
def test_a_constant_that_cannot_be_evaluated_is_named_once(
    made: list[np.ndarray] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = weights(w=FILTER, k=(12,)) | ints(zero=[0])
    body = f"d = Div(zero, zero) e = Add(zero, zero) {CONCAT} {CONV.format('c')}"
    monkeypatch.setattr(
        "cutefuse.graph.fold.run_node", lambda node, *rest: made if node.op_type == "Div" else [np.array([0])]
    )
    model = graph(body, values)
    found = cleaned(model)
    assert found.note.startswith("1 constant could not be folded, first 'Div_0', which")
    assert found.folded.keys() >= {"e"} and "d" not in found.folded
    result, patched = run_patch(model, tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2"] and result.report["clean"]["left"] == found.note


def test_damaged_data_folds_nothing_and_is_told(tmp_path: Path) -> None:
    model = graph(
        f"{CONCAT} {CONV.format('c')} d = Abs(h) z = Add(d, y)", weights(w=FILTER, k=(12,), h=(7,)), outputs=("z",)
    )
    damaged = next(t for t in model.graph.initializer if t.name == "h")
    damaged.raw_data = damaged.raw_data[:-4]
    found = cleaned(model)
    assert found.folded == {} and found.note.startswith("no constant was folded: the data of tensor 'h' cannot be read")
    result, patched = run_patch(model, tmp_path, verify=False)
    assert fused_types(patched) == ["CuteConcatConv2"] and result.report["clean"]["left"] == found.note


def test_each_constant_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = list[str]()
    monkeypatch.setattr(fold, "run_node", lambda node, *rest: evaluated.append(node.output[0]) or run_node(node, *rest))
    found = folds("s = Add(h, h) t = Abs(s) u = Neg(t) y = Add(u, x)", weights(h=(12,)), {"x": "12"}, rank=1)
    assert found.folded.keys() == {"s", "t", "u"} and evaluated == ["s", "t", "u"]


def test_a_bound_that_is_left_out_is_no_operand() -> None:
    values = {"h": np.array([-3, 0.5, 7], np.float32), "m": np.array(2, np.float32)}
    found = folds('k = Clip(h, "", m) y = Add(k, x)', values, {"x": "3"}, rank=1)
    np.testing.assert_array_equal(numpy_helper.to_array(found.folded["k"]), [-3, 0.5, 2])


def text_of(items: Sequence[onnx.NodeProto]) -> list[bytes]:
    return [n.SerializeToString(deterministic=True) for n in items]


CLUTTER = (
    "ka = Add(h, h) sa = Identity(a) "
    + f"{CONCAT} ps = Pad(c, p) {CONV.format('ps')} "
    + "i = Shape(a) g = Gather(i, at) pa = Cast<to=1>(sa) q = Pad(pa, p) z = Add(q, kk)"
)


def clutter() -> onnx.ModelProto:
    values = stored(p=[0] * 8, at=[1]) | weights(2, h=(7,)) | {"kk": np.ones(7, np.float32)}
    model = graph(CLUTTER, values, outputs=("y", "z"))
    model.graph.node[1].doc_string = "kept"
    model.metadata_props.add(key="author", value="someone")
    return model


def test_nothing_but_the_site_changes(tmp_path: Path) -> None:
    """Node by node: constants, no-ops and dead nodes away from the site are the same bytes in the same order."""
    model = clutter()
    _, patched = run_patch(model, tmp_path)
    assert patched is not None
    gone = {"c", "ps", "y"}
    ours = [n for n in patched.graph.node if n.domain == "cutefuse"]
    assert len(ours) == 1 and list(ours[0].output) == ["y"]
    rest = [n for n in patched.graph.node if n.domain != "cutefuse"]
    assert text_of(rest) == text_of([n for n in model.graph.node if not gone & set(n.output)])
    kept = {t.name: t.SerializeToString() for t in model.graph.initializer if t.name not in ("w", "k")}
    after = {t.name: t.SerializeToString() for t in patched.graph.initializer}
    assert kept == {name: after[name] for name in kept}
    assert list(patched.graph.input) == list(model.graph.input) and list(patched.graph.output) == list(
        model.graph.output
    )


def test_a_model_without_sites_is_not_touched(tmp_path: Path) -> None:
    model = graph("s = Identity(a) t = Pad(s, p) y = Relu(t)", ints(p=[0] * 8))
    before = model.SerializeToString(deterministic=True)
    cleaned(model)
    assert model.SerializeToString(deterministic=True) == before
    result, patched = run_patch(model, tmp_path)
    assert patched is None and result.exit_code == 3


def test_clean_writes_the_cleaned_graph(tmp_path: Path) -> None:
    result, patched = run_patch(clutter(), tmp_path, clean=True)
    assert patched is not None and result.report["verify"]["passed"] and result.report["clean"]["written"]
    assert [n.op_type for n in patched.graph.node] == ["CuteConcatConv2", "Shape", "Add"]
    assert list(patched.graph.node[-1].input) == ["a", "kk"]
    onnx.checker.check_model(str(tmp_path / "model.cutefuse.onnx"))
    stored_now = {t.name for t in patched.graph.initializer}
    assert not {"h", "p", "at"} & stored_now and "kk" in stored_now


def test_unknown_sizes_are_told_and_input_shape_fills_them(tmp_path: Path) -> None:
    body = f"{CONCAT} {CONV.format('c')}"
    model = graph(body, inputs={"a": "n,8,h,v", "b": "n,16,h,v"})
    unknown, _ = run_patch(model, tmp_path)
    (site,) = unknown.report["sites"]
    assert (site["flops"], site["bytes_moved"], site["bytes_saved"]) == (None, None, None)
    assert unknown.report["summary"]["bytes_saved"] is None
    shapes = {"a": [3, 8, 20, 10], "b": [3, 16, 20, 10]}
    filled, patched = run_patch(model, tmp_path, shapes=shapes)
    (site,) = filled.report["sites"]
    assert site["flops"] == 2 * 3 * 12 * 200 * 24 * 9 and site["bytes_saved"] == 2 * 3 * 24 * 200 * 4
    assert filled.report["summary"]["bytes_saved"] == site["bytes_saved"]
    assert site["shapes"]["inputs"][0] == [-1, 8, -1, -1], "the model's own sizes"
    assert patched is not None and list(patched.graph.input) == list(model.graph.input)
    assert [d.dim_param for d in patched.graph.input[0].type.tensor_type.shape.dim] == ["n", "", "h", "v"]


def test_a_size_given_for_the_figures_makes_nothing_legal(tmp_path: Path) -> None:
    """A Slice without effect on the given size alone cuts others."""
    values = stored(z=[0], e=[20], ax=[2])
    model = graph(
        f"{CONCAT} s = Slice(c, z, e, ax) {CONV.format('s')}", values, inputs={"a": "n,8,h,7", "b": "n,16,h,7"}
    )
    _, patched = run_patch(model, tmp_path, shapes={"a": [1, 8, 20, 7], "b": [1, 16, 20, 7]})
    assert patched is None


@pytest.mark.parametrize(
    "shapes, words",
    [
        ({"x": [1]}, "'x'"),
        ({"a": [1, 8, 9]}, "'a' 3 axes, it has 4"),
        ({"a": [1, 9, 9, 7]}, "'a' 1x9x9x7, the model has ?x8x9x7"),
    ],
)
def test_a_wrong_input_shape_is_refused(shapes: dict[str, list[int]], words: str, tmp_path: Path) -> None:
    with pytest.raises(CutefuseError) as error:
        run_patch(graph(f"{CONCAT} {CONV.format('c')}"), tmp_path, shapes=shapes)
    assert "--input-shape" in str(error.value) and words in str(error.value)


def test_the_report_says_what_was_cleaned(tmp_path: Path) -> None:
    run_patch(clutter(), tmp_path)
    report = json.loads((tmp_path / "model.patch.json").read_text())["clean"]
    assert report == {"written": False, "folded": ["g", "ka"], "no_ops": ["pa", "ps", "q", "sa"], "left": "",
                      "stale_sizes": ""}  # fmt: skip


def test_what_only_replaced_nodes_read_or_made_goes_with_them() -> None:
    """A weight stays that a node still reads, a body captures, the graph gives out or nobody read before."""
    names = ("gone", "read", "captured", "given", "idle")
    stored = [numpy_helper.from_array(np.ones(2, np.float32), name) for name in names]
    known = {
        n: helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "z", "s", "t", "u", "y", *names)
    }
    branch = helper.make_graph([helper.make_node("Neg", ["captured"], ["n"])], "b", [], [onnx.ValueInfoProto(name="n")])
    nodes = [
        helper.make_node("Add", ["x", "gone"], ["s"]), helper.make_node("Mul", ["s", "z"], ["t"]),
        helper.make_node("If", ["c"], ["u"], then_branch=branch, else_branch=branch),
        helper.make_node("Sum", ["t", "u", "read", "captured", "given"], ["y"]),
    ]  # fmt: skip
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    formals = [known["x"], known["z"], condition, known["gone"], known["read"]]
    proto = helper.make_graph(nodes, "g", formals, [known["y"], known["given"]], stored)
    proto.value_info.extend(known[n] for n in ("s", "t", "u"))
    proto.quantization_annotation.extend(onnx.TensorAnnotation(tensor_name=n) for n in ("s", "t"))
    replace_nodes(
        proto, [helper.make_node("Relu", ["x"], ["t"]), nodes[2], helper.make_node("Sum", ["t", "read"], ["y"])]
    )
    assert [n.op_type for n in proto.node] == ["Relu", "If", "Sum"]
    assert [t.name for t in proto.initializer] == ["read", "captured", "given", "idle"]
    assert [v.name for v in proto.input] == ["x", "z", "c", "read"] and [v.name for v in proto.value_info] == ["t", "u"]
    assert [q.tensor_name for q in proto.quantization_annotation] == ["t"]
