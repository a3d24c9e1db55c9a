"""ConcatConv's Python half: packing, bodies in every opset, and the float64 reference against ONNX's own."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from cutefuse.conv_math import Geometry, pack, packed_sizes, unpacked
from cutefuse.ops.concat_conv import OPERATOR, make_call
from cutefuse.ops.op import Case
from cutefuse.verify import Runner

CASES = {c.name: c for c in OPERATOR.cases() if "float32" in c.dtypes}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)
)  # fmt: skip
def test_packing_loses_nothing_and_pads_with_zeros(channels: list[int], K: int, R: int, S: int) -> None:
    w = np.arange(1, K * sum(channels) * R * S + 1, dtype=np.float64).reshape(K, sum(channels), R, S)
    matrix = pack(w, channels)
    assert matrix.shape == (K, sum(packed_sizes(channels, (R, S))))
    assert np.array_equal(unpacked(matrix, channels, (R, S)), w)
    assert np.count_nonzero(matrix) == w.size


def test_packed_columns_stand_where_the_kernel_reads_them() -> None:
    # problem.h: [K][source][ceil(C/64)][R][S][64], written out here independently of the code under test.
    channels, (K, R, S) = [70, 8], (2, 3, 2)
    w = np.random.default_rng(0).standard_normal((K, 78, R, S))
    matrix = pack(w, channels)
    for k, c, r, s in ((0, 0, 0, 0), (1, 63, 2, 1), (0, 64, 1, 0), (1, 69, 2, 1), (0, 70, 0, 1), (1, 77, 2, 0)):
        source, local = (0, c) if c < 70 else (1, c - 70)
        block = local // 64
        column = (0, 2 * R * S * 64)[source] + ((block * R + r) * S + s) * 64 + local % 64
        assert matrix[k, column] == w[k, c, r, s]


def model_of(case: Case, opset: int, dtype: str = "float32") -> tuple[onnx.ModelProto, dict, np.ndarray, np.ndarray]:
    """One fused node with its body, its inputs, the float64 truth and its scale."""
    call = OPERATOR.call(case, dtype)
    values = [v.astype(np.float32).astype(dtype) for v in OPERATOR.operands(call, np.random.default_rng(1))]
    values[-1] = values[-1].astype(np.float32)
    names = [f"x{i}" for i in range(len(values))]
    attrs = {k: list(v) for k, v in call.attrs.items()}
    attrs |= {k: attrs[k][0] for k in ("alpha", "lo", "hi")}
    node = helper.make_node(call.op_type, names, ["y"], domain="cutefuse", plugin_version="1",
                            plugin_namespace="cutefuse", **attrs)  # fmt: skip
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [node], "one",
        [helper.make_tensor_value_info(n, kind, t.dims) for n, t in zip(names[:-2], call.inputs, strict=False)],
        [helper.make_tensor_value_info("y", kind, call.outputs[0].dims)],
        [numpy_helper.from_array(v, n) for v, n in zip(values[-2:], names[-2:], strict=True)],
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("cutefuse", 1)]
    body = OPERATOR.function(call.op_type, opset, dtype)
    model = helper.make_model(graph, opset_imports=imports, functions=[body], ir_version=8 if opset < 21 else 10)
    onnx.checker.check_model(model, full_check=True)
    doubles = [v.astype(np.float64) for v in values]
    return model, dict(zip(names[:-2], values, strict=False)), OPERATOR.reference(call, doubles)[0], \
        OPERATOR.magnitude(call, doubles)[0]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_body_computes_the_reference(name: str, tmp_path) -> None:
    model, feeds, truth, scale = model_of(CASES[name], 17)
    y = Runner(model, tmp_path)(feeds)[0]
    assert y.shape == truth.shape
    assert np.all(np.abs(y - truth) <= 2e-6 * scale + 1e-6)


@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13, 14, 15, 18, 21, 24])
@pytest.mark.parametrize("name", ["2_sources_Clip", "1_sources_HardSwish", "strided", "asymmetric_pads"])
def test_the_body_computes_the_reference_in_every_opset(name: str, opset: int, tmp_path) -> None:
    for dtype, unit in (("float32", 2e-6), ("float16", 2e-3)):
        model, feeds, truth, scale = model_of(CASES[name], opset, dtype)
        y = Runner(model, tmp_path)(feeds)[0]
        assert np.all(np.abs(y - truth) <= unit * scale + unit), dtype


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_reference_agrees_with_the_standards_own_convolution(data: st.DataObject) -> None:
    channels = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    R, S = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    pair, quad = st.tuples(*[st.integers(1, 3)] * 2), st.tuples(*[st.integers(0, 3)] * 4)
    geometry = Geometry((R, S), data.draw(pair), data.draw(quad), data.draw(pair))
    H, W = (data.draw(st.integers(g, g + 5)) for g in ((R - 1) * 3 + 1, (S - 1) * 3 + 1))
    call = make_call([(2, c, H, W) for c in channels], 3, geometry, "", "float32", {})
    rng = np.random.default_rng(0)
    operands = OPERATOR.operands(call, rng)
    w = unpacked(operands[-2], channels, (R, S))
    conv = helper.make_node("Conv", ["x", "w", "b"], ["y"], **geometry.attrs())
    infos = [helper.make_tensor_value_info(n, 11, None) for n in "xwb"]
    graph = helper.make_graph([conv], "conv", infos, [helper.make_tensor_value_info("y", 11, None)])
    expected = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])).run(
        None, {"x": np.concatenate(operands[:-2], axis=1), "w": w, "b": operands[-1]}
    )[0]
    (y,) = OPERATOR.reference(call, operands)
    assert y.shape == expected.shape == tuple(call.outputs[0].dims)
    assert np.allclose(y, expected, rtol=1e-12, atol=1e-12)


def test_the_cost_counts_multiply_adds_twice_and_every_operand_once() -> None:
    call = make_call([(2, 64, 8, 8), (2, 32, 8, 8)], 16, Geometry((1, 1)), "Relu", "float16", {})
    cost = OPERATOR.cost(call)
    assert cost.flops == 2 * 2 * 8 * 8 * 96 * 16
    assert cost.bytes_moved == 2 * (2 * 96 * 64 + 16 * 128 + 2 * 16 * 64) + 4 * 16


def test_unknown_sizes_cost_as_one_and_show_as_question_marks() -> None:
    call = make_call([(-1, 64, -1, -1), (-1, 32, -1, -1)], 16, Geometry((3, 3)), "", "float32", {})
    assert OPERATOR.cost(call).flops == 2 * math.prod((96, 16, 9))
    assert OPERATOR.title(call) == "64+32->16 3x3 @?x? linear"
