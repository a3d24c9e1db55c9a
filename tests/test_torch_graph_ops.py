"""Every operator of the PyTorch back end, alone, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from torch_cases import Const, OpCase, cases

pytestmark = pytest.mark.torch
CASES = cases()
# Operators that are there only to be refused in words.
REFUSED = {"NonZero", "NonMaxSuppression", "Unique", "Compress"}


def model_of(case: OpCase) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The node as a model, and its graph inputs."""
    names, values, inputs, feed = [], [], [], {}
    for i, given in enumerate(case.inputs):
        name = "" if given is None else f"x{i}"
        names.append(name)
        if isinstance(given, Const):
            values.append(numpy_helper.from_array(np.asarray(given.value), name))
        elif given is not None:
            feed[name] = np.asarray(given)
            kind = helper.np_dtype_to_tensor_dtype(feed[name].dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, feed[name].shape))
    outputs = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op_type, names, outputs, name="node", **case.attrs)
    infos = [helper.make_tensor_value_info(o, TensorProto.UNDEFINED, None) for o in outputs]
    graph = helper.make_graph([node], "g", inputs, infos, values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=9)
    inferred = onnx.shape_inference.infer_shapes(model)
    for told, found in zip(model.graph.output, inferred.graph.output, strict=True):
        # Operators that are functions of others are inferred to no type; theirs is that of the first input.
        told.CopyFrom(found if found.type.tensor_type.elem_type else inferred.graph.input[0])
        told.name = found.name
    return model, feed


def truth(case: OpCase, model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    if case.truth == "by hand":  # opsets that neither runtime has any more
        if case.op_type == "TopK":
            order = np.argsort(-case.inputs[0], axis=-1)[:, : case.attrs["k"]]
            return [np.take_along_axis(case.inputs[0], order, -1), order]
        return [case.inputs[0] + case.inputs[1].reshape(-1, 1)]
    if case.truth == "onnx":
        from onnx.reference import ReferenceEvaluator

        return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, feed)]
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return list(session.run(None, feed))


def run(model: onnx.ModelProto, feed: dict[str, Any]) -> dict[str, Any]:
    from cutefuse.engines.pytorch.run import TorchEngine

    engine = TorchEngine.build(model, device="cpu", shapes={k: v.shape for k, v in feed.items()})
    made = engine(feed)
    for name, slot in engine.program.outputs.items():
        shape = (engine.program.shapes | engine.program.constants)[slot]
        assert (made[name].shape, made[name].dtype) == (shape.shape, shape.dtype), "the shape told at load is another"
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_an_operator_computes_what_onnx_runtime_computes(case: OpCase) -> None:
    model, feed = model_of(case)
    for want, (name, got) in zip(truth(case, model, feed), run(model, feed).items(), strict=True):
        assert tuple(got.shape) == want.shape and got.numpy().dtype == want.dtype, name
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got.numpy(), want, rtol=case.tolerance, atol=case.tolerance)
        else:
            np.testing.assert_array_equal(got.numpy(), want)


def test_every_operator_of_the_table_has_a_case() -> None:
    from cutefuse.engines.pytorch.onnx_ops.program import TABLE

    by_onnx = {"DynamicQuantizeLinear", "MeanVarianceNormalization", "Selu", "Shrink", "Softsign", "ThresholdedRelu"}
    assert {case.op_type for case in CASES} | REFUSED == set(TABLE) | by_onnx  # what ONNX itself defines by others


@pytest.mark.parametrize(
    "op_type", ["Relu", "Conv", "MaxPool", "LpPool", "Softmax", "Resize", "MatMul", "Clip", "ReduceMean"]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_operator_keeps_a_type_of_16_bits(op_type: str, dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    case = next(c for c in CASES if c.op_type == op_type)

    def cast(value: Any, to: Any) -> Any:
        if isinstance(value, Const):
            return Const(cast(value.value, to)) if op_type != "Resize" else value
        return value if value is None or value.dtype.kind in "ib" else value.astype(to)

    low = OpCase(op_type, 22, [cast(i, kind) for i in case.inputs], case.attrs)
    wide = OpCase(op_type, 22, [cast(cast(i, kind), np.float32) for i in case.inputs], case.attrs)
    want = truth(wide, *model_of(wide))[0]
    model, feed = model_of(low)
    (got,) = run(model, feed).values()
    assert str(got.dtype) == f"torch.{dtype}"
    error = np.abs(got.float().numpy() - want).max() / np.abs(want).max()
    assert 0 <= error < (2e-2 if dtype == "bfloat16" else 2e-3)


def test_lp_pool_of_float16_sums_squares_beyond_its_largest_number() -> None:
    x = np.full((1, 2, 4, 4), 300, np.float16)
    for pads in ([0, 0, 0, 0], [0, 0, 1, 1]):  # by PyTorch's own pooling, and by ours
        (got,) = run(*model_of(OpCase("LpPool", 22, [x], {"kernel_shape": [2, 2], "pads": pads}))).values()
        assert got.shape[2] == 3 + pads[2] and float(got[0, 0, 0, 0]) == 600


def refusal(case: OpCase) -> str:
    from cutefuse.engines.pytorch.onnx_ops.node import UnsupportedError

    model, feed = model_of(case)
    with pytest.raises(UnsupportedError) as found:
        run(model, feed)
    text = str(found.value)
    assert "\n" not in text and "Traceback" not in text
    return text


X = np.ones((2, 3, 5, 7), np.float32)


@pytest.mark.parametrize(
    "case, words",
    [
        (OpCase("NonZero", 17, [X]), "depends on the data"),
        (OpCase("Reshape", 17, [X, np.array([6, 35])]), "must be known when the model is loaded"),
        (OpCase("TopK", 17, [X, np.array([1])], outputs=2), "must be known"),
        (OpCase("MaxPool", 17, [X], {"kernel_shape": [2, 2]}, outputs=2), "second output"),
        (OpCase("LpPool", 18, [X], {"kernel_shape": [2, 2], "p": 0}), "give 1 or more"),
        (OpCase("LpPool", 18, [X[:, :, 0]], {"kernel_shape": [2, 2]}), "1 spatial axes"),
        (OpCase("CumProd", 26, [X, np.array(1)]), "must be known"),
        (OpCase("CumProd", 26, [X, Const(np.array(4))]), "axis 4"),
        (OpCase("Conv", 17, [X, Const(np.ones((4, 3, 1, 1), np.float32))], {"pads": [-1, 0, 0, 0]}), "negative"),
        (OpCase("Conv", 17, [np.ones((1, 1, 2, 2, 2, 2), np.float32), np.ones((1, 1, 1, 1, 1, 1), np.float32)]),
         "4 spatial axes"),
        (OpCase("BatchNormalization", 17, [X, *(np.ones(3, np.float32) for _ in range(4))], {"training_mode": 1},
                outputs=3), "training mode"),
        (OpCase("QuantizeLinear", 21, [np.ones((4, 2), np.float32), np.ones((2, 2), np.float32)],
                {"axis": 0, "block_size": 2}), "blocked quantisation"),
        (OpCase("GridSample", 20, [np.ones((1, 1, 2, 2, 2), np.float32), np.ones((1, 2, 2, 2, 3), np.float32)],
                {"mode": "cubic"}), "mode cubic of rank 5"),
    ],
    ids=lambda v: v.op_type if isinstance(v, OpCase) else "",
)  # fmt: skip
def test_what_cannot_run_is_refused_in_a_sentence(case: OpCase, words: str) -> None:
    text = refusal(case)
    assert words in text and "node" in text


@pytest.mark.parametrize(
    "op_type, opset, inputs, attrs, words",
    [
        ("Reshape", 17, [X, Const(np.array([4, 4]))], {}, "cannot become"),
        ("Reshape", 17, [X, Const(np.array([-1, -1]))], {}, "cannot become"),
        ("Split", 17, [X, Const(np.array([1, 1]))], {"axis": 1}, "do not add up"),
        ("Squeeze", 17, [X, Const(np.array([1]))], {}, "not all 1"),
        ("Slice", 17, [X, Const(np.array([0])), Const(np.array([1])), Const(np.array([0])), Const(np.array([0]))], {},
         "step is 0"),
        ("Softmax", 17, [X], {"axis": 9}, "axis 9"),
        ("TopK", 17, [X, Const(np.array([99]))], {}, "k is 99"),
        ("Gather", 17, [X, Const(np.array([5]))], {}, "outside of axis"),
        ("MatMul", 17, [X, X], {}, "cannot be computed from inputs [2, 3, 5, 7], [2, 3, 5, 7]"),
        ("Pad", 17, [X, Const(np.array([1, 1]))], {}, "pads do not fit"),
        ("Pad", 17, [X, Const(np.zeros(8, np.int64))], {"mode": "mirror"}, "mode mirror"),
        ("Resize", 17, [X, None, Const(np.ones(3, np.float32))], {}, "do not fit 4 axes"),
        ("Range", 17, [Const(np.array(0)), Const(np.array(5)), Const(np.array(0))], {}, "step is 0"),
        ("ConstantOfShape", 17, [Const(np.array([1 << 40]))], {}, "beyond"),
        ("GroupNormalization", 21, [X, np.ones(3, np.float32), np.ones(3, np.float32)], {"num_groups": 2},
         "do not divide"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_a_model_that_breaks_a_rule_is_refused_in_a_sentence(
    op_type: str, opset: int, inputs: list[Any], attrs: dict[str, Any], words: str
) -> None:
    """Built without shape inference, which would refuse some of them before us."""
    case = OpCase(op_type, opset, inputs, attrs, outputs=2 if op_type in ("Split", "TopK") else 1)
    from cutefuse.engines.pytorch.onnx_ops.node import UnsupportedError
    from cutefuse.engines.pytorch.run import TorchEngine

    names = ["" if i is None else f"x{n}" for n, i in enumerate(inputs)]
    graph_inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(i.dtype), i.shape)
        for n, i in zip(names, inputs, strict=True) if i is not None and not isinstance(i, Const)
    ]  # fmt: skip
    values = [numpy_helper.from_array(i.value, n) for n, i in zip(names, inputs, strict=True) if isinstance(i, Const)]
    made = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(op_type, names, made, name="wrong", **attrs)
    outputs = [helper.make_tensor_value_info(m, TensorProto.UNDEFINED, None) for m in made]
    model = helper.make_model(
        helper.make_graph([node], "g", graph_inputs, outputs, values), opset_imports=[helper.make_opsetid("", opset)]
    )
    with pytest.raises(UnsupportedError) as found:
        TorchEngine.build(model, device="cpu")
    assert words in str(found.value) and "wrong" in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("kernel", "attrs", "calls"),
    [
        ((5, 5), {"pads": [2, 2, 2, 2]}, 2),
        ((7, 4), {"strides": [2, 1], "pads": [3, 1, 3, 1]}, 2),
        ((5, 6), {"dilations": [1, 2], "pads": [0, 2, 0, 2]}, 2),
        ((3, 3), {"pads": [1, 1, 1, 1]}, 1),  # unrolled
        ((25, 1), {}, 1),  # one axis alone
    ],
)
def test_a_large_window_is_pooled_axis_by_axis_where_it_is_compiled(
    kernel: tuple[int, int], attrs: dict[str, list[int]], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import torch.nn.functional as F

    from cutefuse.engines.pytorch.onnx_ops import pooling
    from cutefuse.engines.pytorch.onnx_ops.node import Node

    count = [0]
    pool = F.max_pool2d

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        count[0] += 1
        return pool(*args, **kwargs)

    monkeypatch.setattr(F, "max_pool2d", counted)
    monkeypatch.setitem(pooling._MAX, 2, counted)
    x = torch.randn(2, 3, 26, 17)
    x[1, 2, 11, 5] = float("nan")
    given = {"kernel_shape": list(kernel), **attrs}
    run: Any = pooling.max_pool(Node("pool", "MaxPool", 17, given, [x], 1))
    want = run(x)
    assert count == [1] and bool(want.isnan().any())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(run(x).nan_to_num(9), want.nan_to_num(9)) and count == [1 + calls]


def test_slices_take_what_numpy_takes() -> None:
    """Random ranges: steps of both signs, bounds far outside, axes of no element."""
    import torch

    from cutefuse.engines.pytorch.onnx_ops import program  # noqa: F401  # fills the table
    from cutefuse.engines.pytorch.onnx_ops.node import TABLE, Node

    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = rng.integers(0, 7, rng.integers(1, 5)).tolist()
        axes = rng.permutation(len(shape))[: rng.integers(1, len(shape) + 1)].tolist()
        bounds = [rng.choice([-(2**62), -9, -3, -1, 0, 1, 2, 5, 9, 2**62], len(axes)).tolist() for _ in range(2)]
        steps = rng.choice([-3, -2, -1, 1, 2, 5], len(axes)).tolist()
        index = [slice(None)] * len(shape)
        for axis, start, end, step in zip(axes, *bounds, steps, strict=True):
            index[axis] = slice(start, end, step)
        x = torch.arange(int(np.prod(shape))).reshape(shape)
        known = [torch.tensor(values) for values in (*bounds, axes, steps)]
        got: Any = TABLE["Slice"].build(Node("s", "Slice", 13, {}, [x.to("meta"), *known], 1))
        np.testing.assert_array_equal(got(x).numpy(), x.numpy()[tuple(index)])
