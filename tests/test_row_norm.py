"""Row norms without a GPU: refusals, tiles, bodies in every opset, and which ONNX graphs become which node."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs import fused_types, graph, run_patch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from cutefuse import kernels
from cutefuse.graph.runner import Runner
from cutefuse.kernels import Call, Tensor
from cutefuse.operators.op import Case
from cutefuse.operators.row_norm import OPERATOR
from cutefuse_host import Host, Input

C = 24  # columns of the little graphs
PARAMETERS = {
    "g": np.linspace(0.5, 2, C, dtype=np.float32),
    "b": np.linspace(-1, 1, C, dtype=np.float32),
    "two": np.float32(2),
    "eps": np.float32(1e-5),
    "one": np.float32(1),
    "half": np.float32(0.5),
    "inverse": np.float32(-0.5),
    "last": np.array([-1]),
}


def norm(op_type: str = "CuteAddLayerNorm", dtype: str = "float16", **sizes: object) -> Call:
    case = Case("x", op_type, {"leading": (4, 3), "columns": 64, **sizes})
    return OPERATOR.call(case, dtype)


def with_operand(call: Call, index: int, tensor: Tensor) -> Call:
    operands = [*call.inputs, *call.outputs]
    operands[index] = tensor
    return replace(call, inputs=operands[: len(call.inputs)], outputs=operands[len(call.inputs) :])


# ---- the C interface ------------------------------------------------------------------------------------------------

X = Tensor((4, 3, 64), "float16")
REFUSALS = {
    "int8": (lambda c: with_operand(c, 0, replace(X, dtype="int8")), "use float32, float16 or bfloat16"),
    "scalar": (lambda c: with_operand(c, 0, Tensor((), "float16")), "is a scalar"),
    "no columns": (lambda c: with_operand(c, 0, Tensor((4, 3, 0), "float16")), "1 to 262144 are allowed"),
    "too many columns": (lambda c: with_operand(c, 0, Tensor((4, 3, 262145), "float16")), "1 to 262144"),
    "gaps": (lambda c: with_operand(c, 0, replace(X, ld=70)), "make it contiguous"),
    "channels-last": (lambda c: with_operand(c, 0, replace(X, layout=kernels.CHANNELS_LAST)), "row-major"),
    "residual of another type": (lambda c: with_operand(c, 1, replace(X, dtype="float32")), "insert a Cast"),
    "broadcast residual": (lambda c: with_operand(c, 1, Tensor((1, 3, 64), "float16")), "broadcasting is not done"),
    "residual of another rank": (lambda c: with_operand(c, 1, Tensor((64,), "float16")), "rank 1"),
    "short gamma": (lambda c: with_operand(c, 2, Tensor((63,), "float16")), "vector of 64 is needed"),
    "empty gamma": (lambda c: with_operand(c, 2, Tensor((0,), "float16")), "vector of 64 is needed"),
    "matrix gamma": (lambda c: with_operand(c, 2, Tensor((1, 64), "float16")), "rank 2"),
    "gamma of a third type": (lambda c: with_operand(c, 2, Tensor((64,), "bfloat16")), "use float16 or float32"),
    "beta unlike gamma": (lambda c: with_operand(c, 3, Tensor((64,), "float32")), "a float16 vector of 64"),
    "output of another size": (
        lambda c: with_operand(c, 4, Tensor((4, 2, 64), "float16")),
        "dimension 1 of the output",
    ),
    "sum of another type": (lambda c: with_operand(c, 5, replace(X, dtype="float32")), "the sum is float32"),
    "negative epsilon": (lambda c: replace(c, attrs={"epsilon": -1e-5}), "finite and not negative"),
    "infinite epsilon": (lambda c: replace(c, attrs={"epsilon": math.inf}), "finite and not negative"),
    "NaN epsilon": (lambda c: replace(c, attrs={"epsilon": math.nan}), "finite and not negative"),
    "one input less": (lambda c: replace(c, inputs=c.inputs[:3]), "takes 4 inputs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_why(name: str) -> None:
    change, words = REFUSALS[name]
    reason = kernels.reject(change(norm()))
    assert reason is not None and re.search(re.escape(words), reason), reason
    assert "\n" not in reason and kernels.configs(change(norm())) == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sm", [80, 86, 89, 90])
def test_every_row_has_tiles_on_every_architecture(dtype: str, sm: int) -> None:
    table = {c["id"]: c for c in kernels.operator_of("CuteRMSNorm")["configs"]}
    for columns in (1, 2, 7, 31, 64, 1000, 1024, 4097, 8192, 16384, 16385, 32768, 65536, 131072, 200001, 262144):
        for rows in (0, 1, 8, 100000):
            for op_type in ("CuteRMSNorm", "CuteAddLayerNorm"):
                call = replace(norm(op_type, dtype, leading=(rows,), columns=columns), sm=sm, sm_count=132)
                ids = kernels.configs(call)
                assert ids and len(set(ids)) == len(ids)
                assert all(table[i]["min_sm"] <= sm for i in ids)
                assert set(ids) <= set(kernels.configs(replace(call, sm=0)))
                assert kernels.workspace_bytes(call) == 0


def test_a_row_count_that_is_not_known_yet_is_legal_and_cannot_run() -> None:
    call = norm("CuteRMSNorm", leading=(-1, 3))
    assert kernels.reject(call) is None and kernels.configs(call)
    with pytest.raises(kernels.KernelError, match="still dynamic"):
        kernels.run(call)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8), st.integers(0, 5), st.integers(-(2**63), 2**63 - 1))
def test_any_numbers_get_an_answer(dims: list[int], index: int, ld: int) -> None:
    reason = kernels.reject(with_operand(norm(), index, Tensor(tuple(dims), "float16", ld=ld)))
    assert reason is None or reason.startswith("row_norm: ")


ABSENT = Tensor((0,), "float32")


def training(op_type: str = "CuteRowNormBackward", layer: int = 1, **changes: Tensor) -> Call:
    x, v, s = Tensor((8, 64), "bfloat16"), Tensor((64,), "float32"), Tensor((8,), "float32")
    if op_type == "CuteRowNormForward":
        names = {"x": x, "residual": ABSENT, "gamma": v, "beta": v, "y": x, "sum": ABSENT, "mean": s, "rstd": s}
        inputs = 4
    else:
        names = {"dy": x, "dsum": ABSENT, "x": x, "gamma": v, "mean": s, "rstd": s, "dx": x, "dgamma": v, "dbeta": v}
        inputs = 6
    operands = list((names | changes).values())
    return Call(op_type, operands[:inputs], operands[inputs:], {"layer": layer, "epsilon": 1e-5}, sm=90, sm_count=132)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (training(layer=0), "RMSNorm has no beta"),
        (training(layer=0, dbeta=ABSENT), "RMSNorm's takes none"),
        (training(mean=ABSENT), "takes the saved mean"),
        (training(rstd=Tensor((7,), "float32")), "rstd is float32 of rank 1 and 7 elements"),
        (training(rstd=Tensor((8,), "bfloat16")), "a float32 vector of 8 is needed"),
        (training(dgamma=Tensor((64,), "bfloat16")), "a float32 vector of 64"),
        (training(dsum=Tensor((8, 32), "bfloat16")), "dimension 1 of dsum"),
        (training("CuteRowNormForward", sum=Tensor((8, 64), "bfloat16")), "exactly when there is a residual"),
        (training("CuteRowNormForward", mean=Tensor((64,), "float32")), "mean is"),
    ],
)
def test_training_refusal_says_why(call: Call, words: str) -> None:
    assert re.search(re.escape(words), kernels.reject(call) or "")


def test_backward_workspace_holds_one_row_of_sums_per_part() -> None:
    call = training()
    assert kernels.reject(call) is None
    assert kernels.workspace_bytes(call) % (2 * 64 * 4) == 0 and kernels.workspace_bytes(call) > 0
    assert kernels.workspace_bytes(training(dgamma=ABSENT, dbeta=ABSENT, gamma=ABSENT)) == 0


# ---- bodies ---------------------------------------------------------------------------------------------------------


def run_body(case: Case, opset: int, dtype: str, folder: Path) -> tuple[list[np.ndarray], Call, list[np.ndarray]]:
    call = OPERATOR.call(case, dtype)
    kind = {t: np.dtype(ml_dtypes.bfloat16 if t == "bfloat16" else t) for t in ("float32", "float16", "bfloat16")}
    values = [
        v.astype(np.float32).astype(kind[t.dtype])
        for v, t in zip(OPERATOR.operands(call, np.random.default_rng(0)), call.inputs, strict=True)
    ]
    names, results = [f"i{k}" for k in range(len(values))], [f"o{k}" for k in range(len(call.outputs))]
    epsilon = list(call.attrs["epsilon"])[0]  # type: ignore[arg-type]
    node = helper.make_node(
        call.op_type,
        names,
        results,
        domain="cutefuse",
        epsilon=epsilon,
        plugin_version="1",
        plugin_namespace="cutefuse",
    )

    def infos(items: list[str], tensors: list[Tensor]) -> list[onnx.ValueInfoProto]:
        types = [helper.np_dtype_to_tensor_dtype(kind[t.dtype]) for t in tensors]
        return [helper.make_tensor_value_info(n, k, t.dims) for n, k, t in zip(items, types, tensors, strict=True)]

    model = helper.make_model(
        helper.make_graph([node], "one", infos(names, list(call.inputs)), infos(results, list(call.outputs))),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("cutefuse", 1)],
        functions=[OPERATOR.function(call.op_type, opset, dtype)], ir_version=8 if opset < 21 else 10,
    )  # fmt: skip
    onnx.checker.check_model(model, full_check=True)
    outputs = Runner(model, folder)(dict(zip(names, values, strict=True)))
    return outputs, call, [v.astype(np.float64) for v in values]


@pytest.mark.parametrize("case", OPERATOR.cases(), ids=lambda c: c.name)
def test_the_body_computes_the_reference(case: Case, tmp_path: Path) -> None:
    outputs, call, operands = run_body(case, 17, "float32", tmp_path)
    for y, truth, scale in zip(
        outputs, OPERATOR.reference(call, operands), OPERATOR.magnitude(call, operands), strict=True
    ):
        assert y.shape == truth.shape and np.all(np.abs(y - truth) <= 4e-6 * scale + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [9, 11, 12, 13, 15, 17, 18, 21, 23])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_body_computes_the_reference_in_every_opset(opset: int, dtype: str, tmp_path: Path) -> None:
    unit = {"float32": 4e-6, "float16": 1e-3}[dtype]
    for op_type in ("CuteAddRMSNorm", "CuteAddLayerNorm"):
        case = Case("x", op_type, {"leading": (3, 2), "columns": 40}, {"epsilon": [0.25]})
        outputs, call, operands = run_body(case, opset, dtype, tmp_path)
        for y, truth, scale in zip(
            outputs, OPERATOR.reference(call, operands), OPERATOR.magnitude(call, operands), strict=True
        ):
            assert np.all(np.abs(y - truth) <= unit * scale + unit)


def test_the_float64_reference_agrees_with_the_standards_layer_normalization() -> None:
    from onnx.reference import ReferenceEvaluator

    call = norm("CuteLayerNorm", "float32")
    operands = OPERATOR.operands(call, np.random.default_rng(2))
    node = helper.make_node("LayerNormalization", ["x", "g", "b"], ["y"], epsilon=1e-5)
    infos = [helper.make_tensor_value_info(n, 11, None) for n in "xgb"]
    model = helper.make_model(helper.make_graph([node], "n", infos, [helper.make_tensor_value_info("y", 11, None)]))
    expected = ReferenceEvaluator(model).run(None, dict(zip("xgb", operands, strict=True)))[0]
    assert np.allclose(OPERATOR.reference(call, operands)[0], expected, rtol=1e-5, atol=1e-5)


# ---- ONNX graphs ----------------------------------------------------------------------------------------------------

SQUARES = "p = Pow(x, two) m = ReduceMean<axes=[-1], keepdims=1>(p) e = Add(m, eps) r = Sqrt(e) "
CENTRED = "u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) " + SQUARES.replace("Pow(x", "Pow(d")
SUM = "x = Add(a, c) "
LAYER = "y = LayerNormalization<axis=-1>(x, g, b) "
HALF = "h = Cast<to=1>(x) p = Pow(h, two) m = ReduceMean<axes=[-1]>(p) e = Add(m, eps) r = Sqrt(e) n = Div(h, r) "
POSITIVE = {
    "rms": (SQUARES + "n = Div(x, r) y = Mul(n, g)", "CuteRMSNorm"),
    "rms, gamma first": (SQUARES + "n = Div(x, r) y = Mul(g, n)", "CuteRMSNorm"),
    "rms, reciprocal": (SQUARES + "i = Reciprocal(r) n = Mul(x, i) y = Mul(n, g)", "CuteRMSNorm"),
    "rms, power of -0.5": (
        SQUARES.replace("Sqrt(e)", "Pow(e, inverse)") + "n = Mul(r, x) y = Mul(n, g)", "CuteRMSNorm",
    ),
    "layer, power of 0.5": (
        CENTRED.replace("Sqrt(e)", "Pow(e, half)") + "n = Div(d, r) s = Mul(n, g) y = Add(s, b)", "CuteLayerNorm",
    ),
    "rms, one over": (SQUARES + "i = Div(one, r) n = Mul(i, x) y = Mul(n, g)", "CuteRMSNorm"),
    "rms, x times x": (
        "p = Mul(x, x) m = ReduceMean<axes=[2]>(p) e = Add(eps, m) r = Sqrt(e) n = Div(x, r) y = Mul(n, g)",
        "CuteRMSNorm",
    ),
    "rms without gamma": (SQUARES + "n = Div(x, r) y = Relu(n)", "CuteRMSNorm"),
    "layer": (CENTRED + "n = Div(d, r) s = Mul(n, g) y = Add(s, b)", "CuteLayerNorm"),
    "layer, beta first": (CENTRED + "n = Div(d, r) s = Mul(g, n) y = Add(b, s)", "CuteLayerNorm"),
    "layer without beta": (CENTRED + "n = Div(d, r) s = Mul(n, g) y = Relu(s)", "CuteLayerNorm"),
    "layer without affine": (CENTRED + "n = Div(d, r) y = Relu(n)", "CuteLayerNorm"),
    "LayerNormalization": (LAYER, "CuteLayerNorm"),
    "LayerNormalization, axis 2, no bias": ("y = LayerNormalization<axis=2, epsilon=0.01>(x, g) ", "CuteLayerNorm"),
    "add, sum used twice": (SUM + SQUARES + "n = Div(x, r) z = Mul(n, g) y = Mul(z, x)", "CuteAddRMSNorm"),
    "add, sum used by the norm alone": (SUM + LAYER, "CuteAddLayerNorm"),
    "add, sum is an output": (SUM + "z = LayerNormalization(x, g, b) y = Mul(z, x)", "CuteAddLayerNorm"),
}  # fmt: skip
INPUTS = {"x": f"n,5,{C}"}
PAIR = {"a": f"n,5,{C}", "c": f"n,5,{C}"}


def make(body: str, opset: int = 17, dtype: str = "float32", **changes: np.ndarray) -> onnx.ModelProto:
    used = set(re.findall(r"\w+", body))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    stored = {k: v for k, v in (PARAMETERS | changes).items() if k in used}
    half = {k: v.astype(kind) if v.dtype == np.float32 and k in ("g", "b") else v for k, v in stored.items()}
    inputs = PAIR if body.startswith(SUM) else INPUTS
    return graph(body, half, opset=opset, dtype=dtype, inputs=inputs, rank=3)


@pytest.mark.parametrize("name", POSITIVE)
def test_an_exporters_norm_becomes_one_node_and_computes_the_same(name: str, tmp_path: Path) -> None:
    body, op_type = POSITIVE[name]
    result, patched = run_patch(make(body), tmp_path)
    assert fused_types(patched) == [op_type], [s.reason for s in result.sites]
    assert result.report["verify"]["passed"]
    kept = {n.op_type for n in patched.graph.node if n.domain == ""}
    assert not kept & {"Pow", "ReduceMean", "Sqrt", "Div", "Sub", "LayerNormalization", "Add", "Reciprocal"}


def test_the_axes_of_opset_18_are_an_input(tmp_path: Path) -> None:
    body = "p = Pow(x, two) m = ReduceMean(p, last) e = Add(m, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, g)"
    _, patched = run_patch(make(body, opset=18), tmp_path)
    assert fused_types(patched) == ["CuteRMSNorm"]


def test_rms_normalization_of_opset_23_is_taken(tmp_path: Path) -> None:
    _, patched = run_patch(make("y = RMSNormalization<epsilon=0.001>(x, g)", opset=23), tmp_path)
    assert fused_types(patched) == ["CuteRMSNorm"]


@pytest.mark.parametrize("tail", ["y16 = Cast<to=10>(n) y = Mul(y16, g)", "w = Mul(n, wide) y = Cast<to=10>(w)"])
def test_casts_around_the_norm_are_part_of_it(tail: str, tmp_path: Path) -> None:
    model = make(HALF + tail, dtype="float16", wide=PARAMETERS["g"])
    result, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteRMSNorm"]
    node = next(n for n in patched.graph.node if n.domain == "cutefuse")
    assert node.input[0] == "x" and not [n for n in patched.graph.node if n.op_type == "Cast"]
    [site] = result.sites
    assert site.match is not None and {t.dtype for t in site.match.call.inputs[:1]} == {"float16"}


@pytest.mark.parametrize("before", ["", SUM])
def test_a_single_norm_in_a_float32_island_is_part_of_the_float16_around_it(before: str, tmp_path: Path) -> None:
    body = before + "h = Cast<to=1>(x) n = LayerNormalization(h, wide, shift) y = Cast<to=10>(n)"
    model = make(body, dtype="float16", wide=PARAMETERS["g"], shift=PARAMETERS["b"])
    result, patched = run_patch(model, tmp_path)
    assert [n.op_type for n in patched.graph.node] == ["CuteAddLayerNorm" if before else "CuteLayerNorm"]
    [site] = result.sites
    assert site.match is not None and [t.dtype for t in site.match.call.inputs[-2:]] == ["float32", "float32"]


@pytest.mark.parametrize(
    "body",
    [
        "h = Cast<to=1>(x) n = LayerNormalization(h, wide, shift) z = Cast<to=16>(n) y = Cast<to=10>(z)",  # to bfloat16
        "h = Cast<to=1>(x) n = LayerNormalization(h, wide, shift) z = Cast<to=10>(n) m = Cast<to=10>(n) y = Add(z, m)",
    ],
)
def test_another_island_keeps_its_float32_norm(body: str, tmp_path: Path) -> None:
    model = make(body, dtype="float16", wide=PARAMETERS["g"], shift=PARAMETERS["b"])
    result, _ = run_patch(model, tmp_path)
    assert [t.dtype for s in result.sites if s.match for t in s.match.call.inputs[:1]] == ["float32"]


def test_the_sum_that_something_else_reads_keeps_its_name(tmp_path: Path) -> None:
    _, patched = run_patch(make(POSITIVE["add, sum used twice"][0]), tmp_path)
    node = next(n for n in patched.graph.node if n.domain == "cutefuse")
    assert list(node.input) == ["a", "c", "g"] and node.output[1] == "x"


NEGATIVE = {
    "mean over another axis": (
        "p = Pow(x, two) m = ReduceMean<axes=[1]>(p) e = Add(m, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, g)",
        "axes [1]",
    ),
    "mean over two axes": (
        "p = Pow(x, two) m = ReduceMean<axes=[1,2]>(p) e = Add(m, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, g)",
        "axes [1, 2]",
    ),
    "cube": (SQUARES.replace("two", "three") + "n = Div(x, r) y = Mul(n, g)", None),
    "epsilon per column": (SQUARES.replace("eps", "g") + "n = Div(x, r) y = Mul(n, g)", None),
    "negative epsilon": (SQUARES.replace("eps", "minus") + "n = Div(x, r) y = Mul(n, g)", None),
    "another tensor is divided": (SQUARES + "q = Relu(x) n = Div(q, r) y = Mul(n, g)", None),
    "divided the wrong way": (SQUARES + "n = Div(r, x) y = Mul(n, g)", None),
    "the deviation is used elsewhere": (SQUARES + "n = Div(x, r) z = Mul(n, g) y = Mul(z, r)", None),
    "LayerNormalization over two axes": ("y = LayerNormalization<axis=1>(x, gg, bb) ", "axis 1"),
    "LayerNormalization with statistics": (
        "z, mean = LayerNormalization<axis=-1>(x, g, b) y = Sub(z, mean)", "statistics",
    ),
    "Softmax is no norm": ("y = Softmax(x)", None),
}  # fmt: skip


@pytest.mark.parametrize("name", NEGATIVE)
def test_what_is_no_norm_over_the_last_axis_stays(name: str, tmp_path: Path) -> None:
    body, words = NEGATIVE[name]
    wide = {"gg": np.ones((5, C), np.float32), "bb": np.ones((5, C), np.float32)}
    extra = {"three": np.float32(3), "minus": np.float32(-1), **wide}
    result, patched = run_patch(make(body, **extra), tmp_path)
    assert patched is None and result.exit_code == 3
    reasons = [s.reason for s in result.sites]
    assert reasons == [] if words is None else words in reasons[0]


@pytest.mark.parametrize("scale", [np.ones((5, C)), np.ones((5, 1)), np.ones((1, 1, 1, C))])
def test_a_scale_that_is_no_vector_of_columns_stays_behind_the_norm(scale: np.ndarray, tmp_path: Path) -> None:
    model = make(SQUARES + "n = Div(x, r) q = Mul(n, wide) y = Reshape(q, shape)",
                 wide=scale.astype(np.float32), shape=np.array([-1, 5, C]))  # fmt: skip
    _, patched = run_patch(model, tmp_path)
    assert fused_types(patched) == ["CuteRMSNorm"]
    assert "Mul" in [n.op_type for n in patched.graph.node]


def test_an_add_that_broadcasts_stays_outside(tmp_path: Path) -> None:
    for shape in (f"1,5,{C}", f"m,5,{C}"):
        model = graph(SUM + LAYER, {k: PARAMETERS[k] for k in "gb"}, inputs={"a": f"n,5,{C}", "c": shape}, rank=3)
        _, patched = run_patch(model, tmp_path, verify=False)
        assert fused_types(patched) == ["CuteLayerNorm"]


def test_a_bias_add_stays_outside(tmp_path: Path) -> None:
    _, patched = run_patch(make("x2 = Add(x, b) y = LayerNormalization(x2, g, b)"), tmp_path)
    assert fused_types(patched) == ["CuteLayerNorm"]


def test_a_sum_that_a_branch_reads_is_made_before_it(tmp_path: Path) -> None:
    branches = ", ".join(f"{k}_branch = g_{k} () => (float[n,5,3,8] o_{k}) {{ o_{k} = {op}(s) }}"
                         for k, op in (("then", "Neg"), ("else", "Exp")))  # fmt: skip
    body = f"s = Add(a, b) t = If(on) <{branches}> m = Mul(g, g) r = LayerNormalization(s, m) y = Add(r, t)"
    values = {"g": np.ones(8, np.float32), "on": np.bool_(True)}
    _, patched = run_patch(graph(body, values, inputs={"a": "n,5,3,8", "b": "n,5,3,8"}), tmp_path)
    assert fused_types(patched) == ["CuteAddLayerNorm"]
    onnx.checker.check_model(patched, full_check=True)


def test_the_operator_can_be_excluded(tmp_path: Path) -> None:
    result, patched = run_patch(make(LAYER), tmp_path, exclude_op=["row_norm"])
    assert patched is None and "--exclude-op row_norm" in result.sites[0].reason


# ---- the plugin -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("op_type", ["CuteRMSNorm", "CuteAddRMSNorm", "CuteLayerNorm", "CuteAddLayerNorm"])
def test_the_plugin_lives_through_builder_and_runtime(op_type: str, dtype: str) -> None:
    x = Input((-1, -1, 768), dtype, (1, 1, 768), (4, 128, 768), (8, 512, 768))
    count = 1 + ("Add" in op_type)
    for param in {dtype, "float32"}:
        vectors = [Input((768,), param)] * (1 + ("Layer" in op_type))
        plugin = Host().build((op_type, {"epsilon": 1e-6}), [x] * count + vectors, count).check()
        assert plugin.report["output_shapes"] == [["in0[0]", "in0[1]", "768"]] * count
        (combination,) = plugin.report["combinations"]
        assert combination["tactics"] and combination["workspace_bytes"] == 0
