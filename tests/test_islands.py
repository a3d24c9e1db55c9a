"""Islands of NHWC: what belongs to one, where Transposes stand, and that both layouts compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from devices import skip_without_code
from graphs import graph, run_patch, weights
from onnx import ModelProto, helper

from cutefuse import cli
from cutefuse.commands import build, doctor
from cutefuse.errors import CutefuseError
from cutefuse.graph.read import Graph
from cutefuse.graph.shapes import inferred
from cutefuse.graph.verify import verify
from cutefuse.operators.layouts import HWC8, NHWC, RTX, TENSORRT, TORCH, strange
from cutefuse.rewrite import islands
from cutefuse.rewrite import unpatch as rewriting
from cutefuse.rewrite.min_cut import SINK, SOURCE, source_side
from cutefuse.rewrite.unpatch import unpatch

pytestmark = pytest.mark.slow

INPUTS = {"a": "2,8,8,6", "b": "2,16,8,6"}
SITE = "c = Concat<axis=1>(a, b) x = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(x)"
NEXT = "v = Conv<pads=[1,1,1,1]>(u, w2) z = Relu(v)"  # another site, behind u of 16 channels
VALUES = weights(w=(16, 24, 3, 3), k=(16,), w2=(16, 16, 3, 3), wide=(32, 24, 3, 3))


def laid(body: str, folder: Path, *outputs: str, **values: Any) -> ModelProto:
    """The model in layout nhwc, proven to compute what the given one computes."""
    options = {"opset": values.pop("opset", 17), "outputs": outputs or ("z",), "inputs": INPUTS}
    model = graph(body, VALUES | {k: np.asarray(v) for k, v in values.items()}, **options)
    result, patched = run_patch(model, folder, layout="nhwc")
    assert patched is not None and result.report["layout"]["name"] == "nhwc"
    onnx.checker.check_model(patched, full_check=True)
    assert islands.layouts(patched) == {NHWC}
    return patched


def shores(model: ModelProto) -> list[str]:
    """What the Transposes of the main graph read."""
    return sorted(n.input[0] for n in model.graph.node if n.op_type == "Transpose")


def described(model: ModelProto) -> list[tuple[Any, ...]]:
    """What a graph consists of, but for the axes of a Slice, which may be written out."""
    return sorted(
        (n.op_type, n.name, tuple(n.input)[: 3 if n.op_type == "Slice" else None], tuple(n.output))
        for n in model.graph.node
    )


def test_neighbours_have_no_transposes_between_them(tmp_path: Path) -> None:
    patched = laid(f"{SITE.replace('y =', 'u =')} {NEXT}", tmp_path)
    assert shores(patched) == ["a", "b", "z.nhwc"]
    fused = [n for n in patched.graph.node if n.domain == "cutefuse"]
    assert fused[0].output[0] == fused[1].input[0] == "u.nhwc"
    known = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in patched.graph.value_info}
    assert known["u.nhwc"] == [2, 8, 6, 16] and "u" not in known


# What stands between two sites and turns with them, with the constants it needs.
INSIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "an activation": ("u = Sigmoid(y)", {}),
    "a sum with itself": ("u = Add(y, y)", {}),
    "a constant of the channels": ("u = Mul(y, f)", {"f": np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)}),
    "one without the batch": ("u = Sub(f, y)", {"f": np.arange(16, dtype=np.float32).reshape(16, 1, 1)}),
    "a row of the width": ("u = Max(y, f)", {"f": np.linspace(-1, 1, 6, dtype=np.float32)}),
    "a whole image": ("u = Min(y, f)", {"f": np.linspace(-1, 1, 96 * 8, dtype=np.float32).reshape(1, 16, 8, 6)}),
    "a number": ("u = Div(y, f)", {"f": np.float32(3)}),
    "slopes": ("u = PRelu(y, f)", {"f": np.linspace(-1, 1, 16, dtype=np.float32).reshape(16, 1, 1)}),
    "bounds": ("u = Clip(y, f)", {"f": np.float32(0.5)}),
    "types": ("h = Cast<to=10>(y) u = Cast<to=1>(h)", {}),
    "halves that swap": (
        "p, q = Split<axis=1>(y, s) g = Sigmoid(q) u = Concat<axis=-3>(g, p)", {"s": np.int64([8, 8])},
    ),
    "halves of the rows": ("p, q = Split<axis=2>(y, s) u = Concat<axis=2>(q, p)", {"s": np.int64([3, 5])}),
    "ranges": (
        "p = Slice(y, s0, s1, s2) q = Slice(y, s1, s3, s2) g = Exp(p) u = Concat<axis=1>(q, g)",
        {"s0": np.int64([0]), "s1": np.int64([8]), "s2": np.int64([-3]), "s3": np.int64([99])},
    ),
    "a range of rows and columns": (
        "p = Slice(y, s0, s1) q = Slice(y, s0, s1, s2) u = Add(p, q)",
        {"s0": np.int32([0, 0, 1, 1]), "s1": np.int32([9, 16, 7, 5]), "s2": np.int32([0, -3, 2, -1])},
    ),
    "rows as one axis": (
        "f = Reshape(y, flat) e = Reshape(f, whole) u = Sigmoid(e)",
        {"flat": np.int64([0, 16, -1]), "whole": np.int64([2, 16, 8, 6])},
    ),
    "quantisers": (
        "i = QuantizeLinear(y, s, o) u = DequantizeLinear(i, s, o)", {"s": np.float32(0.05), "o": np.int8(0)},
    ),
    "quantisers of channels": (
        "i = QuantizeLinear<axis=1>(y, s, o) u = DequantizeLinear<axis=1>(i, s, o)",
        {"s": np.linspace(0.01, 0.1, 16, dtype=np.float32), "o": np.zeros(16, np.int8)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_what_does_not_care_turns_with_the_sites(name: str, tmp_path: Path) -> None:
    between, values = INSIDE[name]
    patched = laid(f"{SITE} {between} {NEXT}", tmp_path, **values)
    assert shores(patched) == ["a", "b", "z.nhwc"], "nothing stands between the sites"


OUTSIDE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a pool": ("u = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(y)", {}, ["u", "y.nhwc"]),
    "another shape": ("h = Reshape(y, s) t = Tanh(h) u = Reshape(t, r)",
                      {"s": np.int64([2, 16, 48]), "r": np.int64([2, 16, 8, 6])}, ["u", "y.nhwc"]),
    "a softmax": ("u = Softmax<axis=1>(y)", {}, ["u", "y.nhwc"]),
    "a factor that is computed in three axes": ("m = ReduceMean<axes=[0], keepdims=0>(b) u = Mul(y, m)", {},
                                                ["u", "y.nhwc"]),
    "a mean": ("m = GlobalAveragePool(y) g = Sigmoid(m) u = Mul(y, g)", {}, ["g", "y.nhwc"]),
    "rows that fall apart": ("h = Reshape(y, s) u = Reshape(h, r)",
                             {"s": np.int64([2, 32, 24]), "r": np.int64([2, 16, 8, 6])}, ["u", "y.nhwc"]),
    "a Transpose of the model's own": ("t = Transpose<perm=[0,2,3,1]>(y) u = Transpose<perm=[0,3,1,2]>(t)", {},
                                       ["t", "u", "y", "y.nhwc"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_does_care_stays_and_keeps_its_names(name: str, tmp_path: Path) -> None:
    between, values, transposed = OUTSIDE[name]
    patched = laid(f"{SITE} {between} {NEXT}", tmp_path, **values)
    assert shores(patched) == sorted([*transposed, "a", "b", "z.nhwc"])


def test_products_of_pixels_read_the_rows_of_an_island(tmp_path: Path) -> None:
    """Attention over pixels: the model's own Transposes lie beside ours, and engines take both for none."""
    body = f"{SITE} f = Reshape(y, flat) t = Transpose<perm=[0,2,1]>(f) s = MatMul(t, f) p = Softmax<axis=-1>(s) "
    body += f"m = MatMul(p, t) n = Transpose<perm=[0,2,1]>(m) u = Reshape(n, whole) {NEXT}"
    values = {"flat": np.int64([2, 16, 48]), "whole": np.int64([0, 16, 8, 6])}
    patched = laid(body, tmp_path, **values)
    assert shores(patched) == sorted(["a", "b", "f", "f.nhwc", "m", "n", "z.nhwc"])
    assert unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "plain.onnx") == 2
    plain = onnx.load(str(tmp_path / "plain.onnx"))
    assert shores(plain) == ["f", "m"] and verify(tmp_path / "model.onnx", plain, tmp_path, 1e-5, {})["passed"]


def test_a_tensor_has_one_transpose_for_all_its_readers(tmp_path: Path) -> None:
    body = f"{SITE} p = MaxPool<kernel_shape=[2,2]>(y) q = AveragePool<kernel_shape=[2,2]>(y) z = Add(p, q)"
    assert shores(laid(body, tmp_path)) == ["a", "b", "y.nhwc"]
    again = f"{SITE} d = Conv<strides=[2,2]>(c, w) z = Tanh(d)"
    assert shores(laid(again, tmp_path, "y", "z")) == ["a", "b", "y.nhwc", "z.nhwc"]


def test_outputs_and_inputs_of_the_model_keep_name_and_layout(tmp_path: Path) -> None:
    patched = laid(f"{SITE} u = Sigmoid(y) {NEXT}", tmp_path, "y", "u", "z")
    assert [o.name for o in patched.graph.output] == ["y", "u", "z"]
    assert [[d.dim_value for d in i.type.tensor_type.shape.dim] for i in patched.graph.input] == [
        [2, 8, 8, 6], [2, 16, 8, 6],
    ]  # fmt: skip


def test_what_a_convolution_takes_into_its_kernel_stays_beside_it(tmp_path: Path) -> None:
    body = f"h = Conv<group=2>(b, d) g = Sigmoid(h) u = Mul(h, g) {NEXT}"
    patched = laid(body, tmp_path, d=weights(d=(16, 8, 1, 1))["d"])
    assert shores(patched) == ["u", "z.nhwc"]


def test_an_activation_between_the_site_and_a_reshape_is_not_worth_turning(tmp_path: Path) -> None:
    patched = laid(f"{SITE} t = Tanh(y) z = Reshape(t, s)", tmp_path, s=np.int64([2, -1, 1, 1]))
    assert shores(patched) == ["a", "b", "y.nhwc"]
    assert next(n for n in patched.graph.node if n.op_type == "Tanh").input[0] == "y"


def test_the_way_that_moves_fewer_bytes_is_taken(tmp_path: Path) -> None:
    narrow = "p = Slice(y, s0, s1, s2) z = Reshape(p, s)"  # two of 16 channels leave
    cut = {"s0": np.int64([0]), "s1": np.int64([2]), "s2": np.int64([1]), "s": np.int64([2, -1, 1, 1])}
    assert shores(laid(f"{SITE} {narrow}", tmp_path, **cut)) == ["a", "b", "p.nhwc"]


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_unpatching_gives_the_graph_back(name: str, opset: int, tmp_path: Path) -> None:
    between, values = INSIDE[name]
    body = f"{SITE} {between} {NEXT}"
    model = graph(body, VALUES | values, opset=opset, outputs=("z",), inputs=INPUTS)
    plain = {}
    for layout in ("hwc8", "nhwc"):
        folder = tmp_path / layout
        folder.mkdir()
        assert run_patch(model, folder, layout=layout)[1] is not None
        assert unpatch(folder / "model.cutefuse.onnx", folder / "plain.onnx") == 2
        plain[layout] = onnx.load(str(folder / "plain.onnx"))
    assert described(plain["nhwc"]) == described(plain["hwc8"])
    assert verify(tmp_path / "nhwc" / "model.onnx", plain["nhwc"], tmp_path / "nhwc", 1e-5, {})["passed"]


@pytest.mark.parametrize("first, then", [("hwc8", "nhwc"), ("nhwc", "hwc8"), ("nhwc", "nhwc")])
def test_a_patched_model_turns_as_a_whole(first: str, then: str, tmp_path: Path) -> None:
    body = f"{SITE} u = Sigmoid(y) {NEXT}"
    model = graph(body, VALUES, outputs=("z",), inputs=INPUTS)
    _, half = run_patch(model, tmp_path, layout=first, exclude=["Conv_4"])
    assert half is not None
    folder = tmp_path / "again"
    folder.mkdir()
    result, whole = run_patch(half, folder, layout=then)
    assert whole is not None and result.exit_code == 0
    assert islands.layouts(whole) == {NHWC if then == "nhwc" else HWC8}
    assert len([n for n in whole.graph.node if n.domain == "cutefuse"]) == 2
    assert bool(shores(whole)) == (then == "nhwc")
    assert verify(tmp_path / "model.onnx", whole, folder, 1e-5, {})["passed"]


@pytest.mark.parametrize("output", ["y", "u"])
def test_a_lifted_model_has_bodies_of_its_own_layout(output: str, tmp_path: Path) -> None:
    """Else inference takes the sizes of what it makes from a body of the other layout."""
    body = f"{SITE} {NEXT.replace('(u, w2)', '(y, w2)').replace('z =', 'u =')} z = Conv(u, w2b)"
    model = graph(body, VALUES | weights(w2b=(16, 16, 1, 1)), outputs=(output, "z"), inputs=INPUTS)
    _, patched = run_patch(model, tmp_path, layout="nhwc")
    assert patched is not None and islands.lift(patched, tmp_path) >= 2
    known = Graph(patched, tmp_path, inferred(patched))
    assert known.dims(output) == known.dims("z") == (2, 16, 8, 6)
    assert verify(tmp_path / "model.onnx", patched, tmp_path, 1e-5, {})["passed"]


def test_turning_alone_is_worth_writing(tmp_path: Path) -> None:
    _, patched = run_patch(graph(SITE, VALUES, inputs=INPUTS), tmp_path)
    assert patched is not None
    folder = tmp_path / "again"
    folder.mkdir()
    result, turned = run_patch(patched, folder, layout="nhwc")
    assert result.exit_code == 0 and turned is not None and islands.layouts(turned) == {NHWC}
    other = tmp_path / "once more"
    other.mkdir()
    result, none = run_patch(turned, other, layout="nhwc")
    assert result.exit_code == 3 and none is None


@pytest.mark.parametrize("engine, sm, layout", [
    ("tensorrt", 90, "hwc8"), ("tensorrt", 0, "hwc8"), ("tensorrt", 100, "nhwc"), ("tensorrt", 120, "nhwc"),
    ("rtx", 89, "nhwc"), ("rtx", 0, "nhwc"), ("torch", 90, "hwc8"),
])  # fmt: skip
def test_the_target_decides(engine: str, sm: int, layout: str, tmp_path: Path) -> None:
    if sm:
        skip_without_code(sm)
    result, _ = run_patch(graph(SITE, VALUES, inputs=INPUTS), tmp_path, engine=engine, sm=sm)
    assert result.report["layout"] | {"why": ""} == {"name": layout, "asked": "auto", "why": ""}


@pytest.mark.parametrize("edit", ["reshape", "output"])
def test_a_model_that_was_changed_is_refused(edit: str, tmp_path: Path) -> None:
    patched = laid(f"{SITE.replace('y =', 'u =')} {NEXT}", tmp_path)
    if edit == "reshape":
        patched.graph.node.append(helper.make_node("Flatten", ["u.nhwc"], ["flat"]))
        patched.graph.output.append(helper.make_tensor_value_info("flat", 1, [2, 768]))
    else:
        patched.graph.output.append(helper.make_tensor_value_info("u.nhwc", 1, [2, 8, 6, 16]))
    onnx.save(patched, str(tmp_path / "edited.onnx"))
    with pytest.raises(CutefuseError, match="NHWC.*original"):
        unpatch(tmp_path / "edited.onnx", tmp_path / "plain.onnx")
    assert not (tmp_path / "plain.onnx").exists()
    assert cli.main(["patch", str(tmp_path / "edited.onnx"), "--layout", "hwc8"]) == 2


def test_the_cheapest_cut_keeps_few_nodes_with_the_source() -> None:
    edges = {(SOURCE, "a"): 3.0, ("a", "b"): 3.0, ("b", SINK): 3.0, ("a", SINK): 0.5}
    assert source_side(edges) == {SOURCE}
    assert source_side(edges | {(SOURCE, "a"): 9.0}) == {SOURCE, "a"}
    assert source_side(edges | {(SOURCE, "a"): 9.0, ("b", SINK): 1.0}) == {SOURCE, "a", "b"}
    assert source_side({("b", SINK): 1.0}) == {SOURCE}


@pytest.mark.parametrize("layout, engine, sm, word", [
    ("hwc8", RTX, 89, "nhwc"), ("hwc8", TENSORRT, 120, "nhwc"), ("nhwc", TENSORRT, 90, "hwc8"),
    ("nhwc", RTX, 89, ""), ("hwc8", TENSORRT, 90, ""), ("nhwc", TENSORRT, 100, ""), ("nhwc", TORCH, 90, ""),
    ("hwc8", TENSORRT, 0, ""), ("hwc8", "", 90, ""),
])  # fmt: skip
def test_a_model_for_another_target_is_named(layout: str, engine: str, sm: int, word: str) -> None:
    text = strange([layout], engine, sm)
    assert (f"--layout {word}" in text and f"layout {layout}" in text) if word else text == ""


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
def test_doctor_and_build_say_what_a_layout_costs(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_patch(graph(SITE, VALUES, inputs=INPUTS), tmp_path, layout=layout)
    model = str(tmp_path / "model.cutefuse.onnx")
    monkeypatch.setattr(doctor.rtx, "available", lambda: None)
    monkeypatch.setattr(doctor, "tensorrt_versions", list)
    (found,) = doctor.check_layout(Path(model))
    assert (found.status, "--layout nhwc" in found.text) == (
        (doctor.WARNING, True) if layout == "hwc8" else (doctor.OK, False)
    )
    monkeypatch.setattr(build, "choose_backend", lambda *_: "rtx")
    cli.main(["build", model, str(tmp_path / "out"), "--dry-run", "--backend", "rtx"])
    assert ("--layout nhwc" in capsys.readouterr().out) == (layout == "hwc8")


def test_doctor_says_nothing_of_the_layout_of_a_plain_model(tmp_path: Path) -> None:
    onnx.save(graph(SITE, VALUES, inputs=INPUTS), str(tmp_path / "m.onnx"))
    assert doctor.check_layout(tmp_path / "m.onnx") == []


def test_turning_back_infers_no_sizes_from_bodies_of_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as NHWC, three channels are fewer rows than a filter has, and onnx ends the process over a negative size."""
    _, patched = run_patch(graph(f"{SITE} u = Sigmoid(y) {NEXT}", VALUES, outputs=("z",), inputs=INPUTS), tmp_path,
                           layout="nhwc")  # fmt: skip
    assert patched is not None and islands.layouts(patched) == {NHWC}
    onnx.save(patched, str(tmp_path / "p.onnx"))
    seen = []
    infer = rewriting.inferred
    monkeypatch.setattr(rewriting, "inferred", lambda m: seen.extend(m.functions) or infer(m))
    unpatch(tmp_path / "p.onnx", tmp_path / "u.onnx")
    assert patched.functions and not [f.name for f in seen if f in patched.functions]
