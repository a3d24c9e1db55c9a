"""Average pools and slices of every other pixel that a convolution's filter computes as well: where they go into it,
that it is the same function, and what stays."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from float64 import widened
from graphs import fused_types, graph, run_patch, weights
from onnx.reference import ReferenceEvaluator

from cutefuse.match.answer import Constant, Match
from cutefuse.match.find import find_sites
from cutefuse.operators.concat_conv import OPERATOR
from cutefuse.operators.layouts import HWC8, NHWC
from cutefuse.rewrite.unpatch import unpatch
from cutefuse.select.compiled import Kernel, Record

IMAGE = {"i": "2,6,15,13"}
END = " q = Conv(p, w, k) y = Relu(q)"
POOLS = {  # name -> the pool, and the kernel, strides and pads that the fused filter has
    "ResNet-D": ("kernel_shape=[2,2], strides=[2,2]", [2, 2], [2, 2], [0] * 4),
    "Inception": ("kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1", [3, 3], [1, 1], [1] * 4),
    "ResNeSt": ("kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], count_include_pad=1", [3, 3], [2, 2], [1] * 4),
    "one pixel of four": ("kernel_shape=[1,1], strides=[2,2]", [1, 1], [2, 2], [0] * 4),
    "one side": ("kernel_shape=[1,3], strides=[3,1], pads=[0,2,0,1], count_include_pad=1", [1, 3], [3, 1],
                 [0, 2, 0, 1]),
    "same": ('kernel_shape=[2,3], strides=[2,2], auto_pad="SAME_UPPER", count_include_pad=1', [2, 3], [2, 2],
             [0, 1, 1, 1]),
    "rounded up to nothing": ("kernel_shape=[3,3], strides=[2,2], ceil_mode=1", [3, 3], [2, 2], [0] * 4),
}  # fmt: skip


def pooled(attributes: str, after: str = END, **options: object) -> onnx.ModelProto:
    values = weights(w=(10, 6, 1, 1), k=(10,), v=(10, 6, 3, 3), g=(6, 1, 3, 3))
    used = {n: v for n, v in values.items() if n in after.replace(")", " ").replace(",", " ").split()}
    body = f"p = AveragePool<{attributes}>(i)"
    return graph(body + after, used, **{"inputs": IMAGE, **options})  # type: ignore[arg-type]


def chain(model: onnx.ModelProto, layout: int = HWC8) -> list[Match]:
    """The matches of the model's last site, the largest first."""
    sites = [s for s in find_sites(model, Path(), layout=layout)[1] if s.match]
    match, found = sites[-1].match if sites else None, list[Match]()
    while match is not None:
        found.append(match)
        match = match.otherwise
    return found


def difference(model: onnx.ModelProto, match: Match, special: float = 0.0) -> float:
    """The error of the fused node against the model in float64, on random inputs; `special` is one of their numbers."""
    rng = np.random.default_rng(5)
    feed = {}
    for value in model.graph.input:
        dims = [d.dim_value or 3 for d in value.type.tensor_type.shape.dim]
        feed[value.name] = rng.standard_normal(dims)
        if special:
            feed[value.name][1, 2, 3, 4] = special
    operands = [np.asarray(o.make(), np.float64) if isinstance(o, Constant) else feed[str(o)] for o in match.inputs]
    with np.errstate(invalid="ignore"):  # infinity times zero
        (got,) = OPERATOR.reference(match.call, operands)
        (expected,) = ReferenceEvaluator(widened(model)).run(["y"], feed)
    finite = np.isfinite(expected)
    assert got.shape == expected.shape and np.array_equal(np.isnan(got), np.isnan(expected))
    assert np.array_equal(got[~finite], expected[~finite], equal_nan=True) and bool(special) == (not finite.all())
    return float(np.abs(got[finite] - expected[finite]).max() / np.abs(expected[finite]).max())


@pytest.mark.parametrize("special", [0.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", [HWC8, NHWC])
@pytest.mark.parametrize("name", POOLS)
def test_a_pool_goes_into_the_filter_behind_it(name: str, layout: int, special: float) -> None:
    attributes, kernel, strides, pads = POOLS[name]
    model = pooled(attributes, END.replace("Relu", "LeakyRelu"))
    match, *smaller = chain(model, layout)
    assert [n.op_type for n in match.nodes] == ["Conv", "AveragePool", "LeakyRelu"] and match.read == ("i",)
    attrs = match.call.attrs
    assert [list(attrs[n]) for n in ("kernel_shape", "strides", "pads")] == [kernel, strides, pads]  # type: ignore[call-overload]
    assert attrs["layout"] == [layout] and "pools" in match.takes
    assert [m.read for m in smaller] == [("p",)], "without its pool it is a site too"
    # A NaN or infinity at a pixel that no mean takes leaves everything finite.
    seen = special if (3 - pads[0]) % strides[0] < kernel[0] and (4 + pads[1]) % strides[1] < kernel[1] else 0.0
    if seen == special:
        assert difference(model, match, special) < 2e-7


def test_a_pool_of_a_concat_takes_both_in(tmp_path: Path) -> None:
    """Inception's branch: all convolutions and the pool read the sources, so that the Concat goes."""
    body = (
        "c = Concat<axis=1>(a, b) p = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(c) "
        "q = Conv(p, w, k) r = Relu(q) s = Conv(c, u) t = Relu(s) y = Add(r, t)"
    )
    values = weights(w=(10, 24, 1, 1), k=(10,), u=(10, 24, 1, 1))
    result, patched = run_patch(graph(body, values), tmp_path, without=["residual"])
    assert patched is not None and result.report["verify"]["passed"]
    assert [n.op_type for n in patched.graph.node] == ["CuteConcatConv2Relu"] * 2 + ["Add"]
    model = graph(body.split(" s = ")[0].replace("r = Relu", "y = Relu"), {n: values[n] for n in "wk"},
                  inputs={"a": "2,8,9,7", "b": "2,16,9,7"})  # fmt: skip
    assert [m.read for m in chain(model)] == [("a", "b"), ("c",), ("p",)]
    assert all(difference(model, m) < 2e-7 for m in chain(model)[:1])


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("opset", [11, 17])
def test_a_pool_and_a_convolution_alone_are_a_site(opset: int, layout: str, tmp_path: Path) -> None:
    """ResNet-D's shortcut, with nothing behind it and a batch of any size, in float16."""
    model = pooled("kernel_shape=[2,2], strides=[2,2]", " y = Conv<strides=[2,1]>(p, w)", dtype="float32", opset=opset,
                   inputs={"i": "n,6,h,v"})  # fmt: skip
    result, patched = run_patch(model, tmp_path, layout=layout, dtype="fp16")
    assert result.report["verify"]["passed"] and fused_types(patched) == ["CuteImageConcatConv1"]
    (site,) = result.report["sites"]
    assert site["takes"] == ["image", "pools", "single"] and not site["notes"]
    unpatch(tmp_path / "model.cutefuse.onnx", tmp_path / "u.onnx")
    assert {n.op_type for n in onnx.load(str(tmp_path / "u.onnx")).graph.node} >= {"Conv"}
    (tmp_path / "without").mkdir()
    result, patched = run_patch(model, tmp_path / "without", layout=layout, dtype="fp16", without=["pools"])
    assert fused_types(patched) == [] and result.report["sites"][0]["status"] == "excluded"


def test_a_normalisation_behind_it_and_a_residual_go_into_it_too(tmp_path: Path) -> None:
    names = ("gamma", "beta", "mean", "var")
    body = (
        "p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(i) q = Conv(p, w) "
        "n = BatchNormalization(q, gamma, beta, mean, var) s = Add(n, r) y = Relu(s)"
    )
    values = weights(w=(10, 6, 1, 1), **{n: (10,) for n in names})
    model = graph(body, values, inputs=IMAGE | {"r": "2,10,7,6"})
    match = chain(model)[0]
    assert [n.op_type for n in match.nodes] == ["Conv", "AveragePool", "BatchNormalization", "Add", "Relu"]
    assert difference(model, match) < 1e-6
    result, _ = run_patch(model, tmp_path)
    assert result.report["verify"]["passed"]


STAY = {  # name -> the pool, what is behind it, words of the note ("" for none)
    "fewer pixels at the border": ("kernel_shape=[3,3], pads=[1,1,1,1]", END, "count_include_pad=0"),
    "the same by auto_pad": ('kernel_shape=[3,3], auto_pad="SAME_LOWER"', END, "count_include_pad=0"),
    "rounded up": ("kernel_shape=[2,2], strides=[2,2], ceil_mode=1", END, "ceil_mode=1"),
    "a filter of nine taps": ("kernel_shape=[2,2]", END.replace(", w,", ", v,"), "1x1 Conv"),
    "a padded filter": ("kernel_shape=[2,2]", END.replace("Conv", "Conv<pads=[0,1,0,0]>"), "without padding"),
    "a dilated pool": ("kernel_shape=[2,2], dilations=[1,2]", END, "dilations"),
    "another reader": ("kernel_shape=[2,2]", END + " z = Relu(p)", ""),
    "an output": ("kernel_shape=[2,2]", END, ""),
    "a depthwise filter": ("kernel_shape=[2,2]", " q = Conv<group=6>(p, g) y = Relu(q)", ""),
}


@pytest.mark.parametrize("name", STAY)
def test_a_pool_stays_where_no_filter_computes_it(name: str, tmp_path: Path) -> None:
    attributes, after, words = STAY[name]
    outputs = ("y", "z") if "z =" in after else ("y", "p") if name == "an output" else ("y",)
    model = pooled(attributes, after, opset=19, outputs=outputs)
    result, patched = run_patch(model, tmp_path)
    kinds = [n.op_type for n in patched.graph.node] if patched else []
    assert "AveragePool" in kinds or not kinds
    (site,) = [s for s in result.report["sites"] if s["name"].startswith("Conv")]
    assert "pools" not in site["takes"]
    if words:
        assert [words in note and "AveragePool" in note for note in site["notes"]] == [True]


def test_a_pool_that_rounds_up_stays_where_the_size_is_open(tmp_path: Path) -> None:
    model = pooled(POOLS["rounded up to nothing"][0], inputs={"i": "n,6,h,15"})
    result, patched = run_patch(model, tmp_path, shapes={"i": (1, 6, 15, 15)})
    assert patched is not None and [n.op_type for n in patched.graph.node] == ["AveragePool", "CuteConcatConv1Relu"]
    assert "ceil_mode" in result.report["sites"][0]["notes"][0]


def test_a_refused_pool_is_told_of_where_nothing_else_is_fused(tmp_path: Path) -> None:
    model = pooled("kernel_shape=[2,2], strides=[2,2], ceil_mode=1", " y = Conv(p, w)")
    result, patched = run_patch(model, tmp_path)
    (site,) = result.report["sites"]
    assert patched is None and site["status"] == "refused" and "ceil_mode=1" in site["reason"]


# --------------------------------------------------------------------------------------------------------- Focus
CORNERS = ((0, 0), (1, 0), (0, 1), (1, 1))
FOCUS_END = " x = Conv<pads=[1,1,1,1]>(c, w, k) y = Relu(x)"


def focus(
    corners: tuple[tuple[int, int], ...] = CORNERS, in_one: bool = True, end: int = 2**31 - 1, after: str = FOCUS_END,
    dtype: str = "float32", size: str = "n,3,h,v", step: int = 2, more: str = "", outputs: tuple[str, ...] = ("y",),
) -> onnx.ModelProto:  # fmt: skip
    """A stem over slices of the image that begin at these rows and columns: one Slice for both axes or two."""
    ints = {"ends": [end] * 2, "end": [end], "axes": [2, -1], "rows": [2], "columns": [3], "steps": [step] * 2,
            "step": [step]}  # fmt: skip
    body = ""
    for j, (row, column) in enumerate(corners):
        if in_one:
            ints[f"f{j}"] = [row, column]
            body += f"s{j} = Slice(i, f{j}, ends, axes, steps) "
        else:
            ints |= {f"r{row}": [row], f"c{column}": [column]}
            body += f"h{j} = Slice(i, r{row}, end, rows, step) s{j} = Slice(h{j}, c{column}, end, columns, step) "
    body += f"c = Concat<axis=1>({', '.join(f's{j}' for j in range(len(corners)))})" + after + more
    values = weights(dtype=dtype, w=(16, 3 * len(corners), 3, 3), k=(16,))
    values |= {n: np.array(v, np.int64) for n, v in ints.items() if f" {n}," in body or f" {n})" in body}
    return graph(body, values, inputs={"i": size}, dtype=dtype, outputs=outputs)


@pytest.mark.parametrize("layout", [HWC8, NHWC])
@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize("corners", list(itertools.permutations(CORNERS))[::3])
def test_slices_in_any_order_are_one_convolution_of_the_image(
    corners: tuple[tuple[int, int], ...], in_one: bool, layout: int
) -> None:
    model = focus(corners, in_one, size="2,3,18,14", end=18)
    match, *smaller = chain(model, layout)
    attrs = match.call.attrs
    assert match.read == ("i",) and list(attrs["kernel_shape"]) == [6, 6]  # type: ignore[call-overload]
    assert (list(attrs["strides"]), list(attrs["pads"])) == ([2, 2], [2] * 4)  # type: ignore[call-overload]
    assert [m.read for m in smaller] == [("s0", "s1", "s2", "s3")]
    assert difference(model, match) < 1e-7 and difference(model, match, np.inf) < 1e-7


@pytest.mark.parametrize("after", [
    " x = Conv<pads=[0,1,2,3], strides=[1,2]>(c, w) y = Relu(x)", ' x = Conv<auto_pad="SAME_LOWER">(c, w) y = Tanh(x)',
])  # fmt: skip
def test_strides_and_pads_of_the_slices_are_those_of_the_image_twice(after: str) -> None:
    model = focus(after=after, size="2,3,18,14")
    assert chain(model)[0].read == ("i",) and difference(model, chain(model)[0]) < 1e-7


@pytest.mark.parametrize("layout", ["hwc8", "nhwc"])
@pytest.mark.parametrize("after", ["Focus", "SpaceToDepth", "thirds"])
def test_a_focus_is_an_image_site(after: str, layout: str, tmp_path: Path) -> None:
    """Of the network's image, of any size, in float16."""
    if after == "SpaceToDepth":
        values = weights(dtype="float16", w=(16, 12, 3, 3), k=(16,))
        model = graph("c = SpaceToDepth<blocksize=2>(i)" + FOCUS_END, values, inputs={"i": "n,3,h,v"}, dtype="float16")
        shape = (1, 3, 16, 22)
    elif after == "thirds":
        corners = tuple(itertools.product(range(3), range(3)))
        tap = " x = Conv(c, w, k) y = Relu(x)"
        model, shape = focus(corners, step=3, dtype="float16", after=tap), (2, 3, 21, 15)
        model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(
            weights(dtype="float16", w=(16, 27, 2, 2))["w"], "w"))  # fmt: skip
    else:
        model, shape = focus(dtype="float16"), (2, 3, 26, 18)
    result, patched = run_patch(model, tmp_path, layout=layout, shapes={"i": shape})
    assert result.report["verify"]["passed"] and patched is not None
    assert [n.op_type for n in patched.graph.node if n.op_type != "Transpose"] == ["CuteImageConcatConv1Relu"]
    assert {"image", "pools"} <= set(result.report["sites"][0]["takes"])
    _, patched = run_patch(model, tmp_path, layout=layout, without=["pools"], verify=False)
    kept = [n.op_type for n in patched.graph.node] if patched else ["Slice", "SpaceToDepth"]
    assert {"Slice", "SpaceToDepth"} & set(kept)


NO_FOCUS = {
    "one corner twice": {"corners": ((0, 0), (1, 0), (0, 1), (0, 1))},
    "a corner missing": {"corners": CORNERS[:3]},
    "another start": {"corners": ((0, 0), (3, 0), (0, 1), (3, 1))},
    "a part of the image": {"end": 16, "size": "2,3,18,16"},
    "an end that may cut": {"end": 640},
    "every third": {"step": 3},
    "a dilated filter": {"after": " x = Conv<pads=[2,2,2,2], dilations=[2,2]>(c, w, k) y = Relu(x)"},
    "another reader": {"more": " z = Neg(c)", "outputs": ("y", "z")},
}


@pytest.mark.parametrize("name", NO_FOCUS)
def test_other_slices_stay(name: str) -> None:
    assert "pools" not in set().union(*(m.takes for m in chain(focus(**NO_FOCUS[name]))))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- the price
def priced(model: onnx.ModelProto, folder: Path, **options: object) -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    result, _ = run_patch(model, folder, all_sites=False, dry_run=True, **options)
    (site,) = [s for s in result.report["sites"] if "Conv" in s["name"]]
    return {"gain": 0.0, **site["gain_parts"], "takes": site["takes"], "status": site["status"]}


def shortcut(size: str, filters: int, kernel: int, engine: str) -> onnx.ModelProto:
    channels = int(size.split(",")[1])
    values = weights(dtype="float16", w=(filters, channels, 1, 1), k=(filters,))
    body = f"p = AveragePool<kernel_shape=[{kernel},{kernel}], strides=[2,2]>(i) q = Conv(p, w, k) y = Tanh(q)"
    return graph(body, values, inputs={"i": size}, dtype="float16")


@pytest.mark.parametrize("engine", ["torch", "tensorrt"])
def test_the_price_decides_whether_a_pool_pays(engine: str, tmp_path: Path) -> None:
    """Few products beside a pass over the pool's pixels pay, many do not, and then its convolution alone is fused."""
    given = {"engine": engine, "sm": 90, "gpu": "H200"}
    small = priced(shortcut("1,64,56,56", 64, 2, engine), tmp_path / "s", **given)
    assert small["status"] == "fused" and "pools" in small["takes"] and small["neighbours"] > 1.0  # type: ignore[operator]
    large = priced(shortcut("8,1024,28,28", 2048, 4, engine), tmp_path / "l", **given)
    assert large["takes"] == ["single"] and large["status"] == ("fused" if engine == "torch" else "left out")


def test_the_pool_counts_what_the_compiler_recorded(tmp_path: Path) -> None:
    model = shortcut("1,64,56,56", 64, 2, "rtx")
    kernel = Kernel(("AveragePool_0",), 5 * 64 * 28 * 28 * 2, False)
    record = Record((kernel,), frozenset({"AveragePool_0", "Conv_1", "Tanh_2"}))
    site = priced(model, tmp_path / "a", engine="rtx", sm=89, compiled=record)
    twice = Record((Kernel(kernel.nodes, 2 * kernel.traffic_bytes, False),), record.known)
    more = priced(model, tmp_path / "b", engine="rtx", sm=89, compiled=twice)
    assert "pools" in site["takes"] and 1.3 < site["neighbours"] < more["neighbours"]  # type: ignore[operator]
    assert site["engine_kernels"] < -site["our_kernels"], "ours multiplies four times as much"  # type: ignore[operator]


def test_the_slices_of_a_focus_count_once_in_rtx(tmp_path: Path) -> None:
    """Myelin sorts and joins them in one kernel, which reads the image as it is given."""
    model = focus(in_one=False, dtype="float16", size="1,3,640,640")
    kernel = Kernel(("Slice_7", "Concat_8"), 4 * 3 * 640 * 640, True)
    record = Record((kernel,), frozenset({"Slice_7", "Concat_8", "Conv_9", "Relu_10"}))
    site = priced(model, tmp_path / "a", engine="rtx", sm=89, compiled=record)
    assert {"pools", "image"} <= set(site["takes"]) and "widened" not in site  # type: ignore[call-overload]
    assert site["engine_kernels"] == -site["our_kernels"]  # type: ignore[operator]
    assert site["neighbours"] == pytest.approx(1.3 + 4 * 3 * 640 * 640 / 1008e3, rel=1e-3)
