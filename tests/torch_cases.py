"""One-node problems for every operator of the PyTorch back end: odd sizes, both sides of each version's rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

_random = np.random.default_rng(3)


@dataclass(frozen=True)
class Const:
    """An input that is an initializer."""

    value: Any


@dataclass
class OpCase:
    """`inputs`: arrays (graph inputs), Const (initializers) or None (absent). `truth`: who computes it, where ONNX
    Runtime has no such operator on the CPU."""

    op_type: str
    opset: int
    inputs: list[Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    truth: str = "onnxruntime"
    tolerance: float = 2e-5

    @property
    def name(self) -> str:
        text = ",".join(f"{k}={v}" for k, v in self.attrs.items() if not hasattr(v, "dims"))
        sizes = "x".join(str(np.shape(i.value if isinstance(i, Const) else i)) for i in self.inputs if i is not None)
        return f"{self.op_type}-{self.opset}-{sizes}-{text}".replace(" ", "")


def f(*dims: int, dtype: str = "float32") -> np.ndarray:
    return _random.standard_normal(dims).astype(dtype)


def positive(*dims: int) -> np.ndarray:
    return np.abs(f(*dims)) + np.float32(0.1)


def i64(*values: Any) -> Const:
    return Const(np.array(values[0] if len(values) == 1 and isinstance(values[0], list) else values, np.int64))


def f32(*values: float) -> Const:
    return Const(np.array(values, np.float32))


def whole(*dims: int, low: int = -9, high: int = 10, dtype: str = "int64") -> np.ndarray:
    return _random.integers(low, high, dims).astype(dtype)


X = f(2, 3, 5, 7)
ROWS = f(3, 11)


def cases() -> list[OpCase]:
    return [*_elementwise(), *_shapes(), *_indexing(), *_arithmetic_of_rows(), *_images(), *_norms(), *_quantised()]


def _elementwise() -> list[OpCase]:
    found = [OpCase(op, 17, [f(3, 1, 5), f(4, 5)]) for op in ("Add", "Sub", "Mul", "Div", "Less", "Greater",
                                                            "LessOrEqual", "GreaterOrEqual")]  # fmt: skip
    found += [OpCase(op, 17, [f(2, 3), Const(np.array(0.3, np.float32))]) for op in ("Add", "Sub", "Mul", "Div")]
    found += [OpCase(op, 17, [Const(np.array([0.3], np.float32)), f(2, 3)]) for op in ("Add", "Sub", "Mul", "Div")]
    found += [OpCase("Add", 17, [f(3), Const(f(1, 1))]), OpCase("Add", 6, [f(2, 3, 5), f(3)], {"axis": 1,
                                                                                            "broadcast": 1},
                                                                truth="by hand")]  # fmt: skip
    found += [OpCase("Div", 17, [whole(9), whole(9, low=1, high=4)]), OpCase("Div", 17, [whole(9), i64(2)])]
    found += [OpCase("Equal", 17, [whole(9, low=0, high=3), whole(9, low=0, high=3)])]
    bits = [_random.integers(0, 2, (3, 5)).astype(bool) for _ in range(2)]
    found += [OpCase(op, 17, bits) for op in ("And", "Or", "Xor")] + [OpCase("Not", 17, bits[:1])]
    found += [OpCase(op, 17, [bits[0], Const(np.array(True))]) for op in ("And", "Or", "Xor")]
    found += [OpCase(op, 18, [whole(7, dtype="int32"), whole(7, dtype="int32")])
              for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")]  # fmt: skip
    found += [OpCase("BitwiseNot", 18, [whole(7, dtype="int32")])]
    found += [OpCase(op, 17, [f(3, 7)]) for op in (
        "Abs", "Neg", "Exp", "Ceil", "Floor", "Sign", "Erf", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh",
        "Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "HardSwish", "Identity", "LeakyRelu", "Elu", "Selu", "Celu",
        "HardSigmoid", "ThresholdedRelu")]  # fmt: skip
    found += [OpCase(op, 17, [positive(3, 7)]) for op in ("Sqrt", "Log", "Reciprocal")]
    found += [OpCase(op, 17, [(f(3, 7) / 9).astype(np.float32)]) for op in ("Asin", "Acos", "Atanh")]
    found += [OpCase("Acosh", 17, [positive(3, 7) + np.float32(1)]), OpCase("Mish", 18, [f(3, 7)])]
    found += [OpCase("Round", 17, [np.array([-2.5, -0.5, 0.5, 1.5, 2.4], np.float32)])]
    special = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    found += [OpCase("IsNaN", 17, [special]), OpCase("IsInf", 17, [special]),
              OpCase("IsInf", 17, [special], {"detect_negative": 0}), OpCase("IsInf", 17, [special],
                                                                           {"detect_positive": 0})]  # fmt: skip
    found += [OpCase("LeakyRelu", 17, [f(3, 7)], {"alpha": 0.3}), OpCase("Elu", 17, [f(9)], {"alpha": 0.3}),
              OpCase("Celu", 17, [f(9)], {"alpha": 0.3}),
              OpCase("HardSigmoid", 17, [f(9)], {"alpha": 0.4, "beta": 0.3}),
              OpCase("ThresholdedRelu", 17, [f(9)], {"alpha": 0.2}), OpCase("Selu", 17, [f(9)], {"alpha": 1.1}),
              OpCase("Shrink", 17, [f(9)], {"lambd": 0.4, "bias": 0.1}), OpCase("PRelu", 17, [f(2, 3, 5), f(3, 1)]),
              OpCase("Gelu", 20, [f(9)]), OpCase("Gelu", 20, [f(9)], {"approximate": "tanh"}),
              OpCase("Swish", 24, [f(9)], truth="onnx"), OpCase("Swish", 24, [f(9)], {"alpha": 0.5}, truth="onnx"),
              OpCase("Dropout", 17, [f(3, 5)]), OpCase("Dropout", 17, [f(3, 5)], outputs=2)]  # fmt: skip
    found += [OpCase("Clip", 17, [f(9), f32(-0.5).value.reshape(()), np.array(0.5, np.float32)]),
              OpCase("Clip", 17, [f(9), Const(np.array(-0.5, np.float32)), Const(np.array(0.5, np.float32))]),
              OpCase("Clip", 17, [f(9), None, Const(np.array(0.5, np.float32))]), OpCase("Clip", 17, [f(9)]),
              OpCase("Clip", 10, [f(9)], {"min": -0.5, "max": 0.25})]  # fmt: skip
    found += [OpCase("Pow", 17, [positive(5), f(5)]), OpCase("Pow", 17, [f(5), Const(np.array(2.0, np.float32))]),
              OpCase("Pow", 17, [whole(5), Const(np.array(2, np.int64))]),
              OpCase("Mod", 17, [whole(9), whole(9, low=1, high=5)]),
              OpCase("Mod", 17, [f(9), positive(9)], {"fmod": 1}),
              OpCase("Where", 17, [bits[0], f(3, 5), f(5)])]  # fmt: skip
    found += [OpCase(op, 17, [f(3, 5), f(5), f(1, 1)]) for op in ("Sum", "Min", "Max", "Mean")]
    found += [OpCase("Cast", 17, [f(9) * 5], {"to": t}) for t in (
        TensorProto.INT32, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BOOL, TensorProto.INT8)]  # fmt: skip
    found += [OpCase("Cast", 17, [positive(9) * 50], {"to": TensorProto.UINT8}),
              OpCase("CastLike", 17, [f(9), f(1, dtype="float16")])]  # fmt: skip
    return found


def _shapes() -> list[OpCase]:
    ramp = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    return [
        OpCase("Constant", 17, [], {"value_floats": [1.0, 2.5]}), OpCase("Constant", 17, [], {"value_int": 3}),
        OpCase("Constant", 17, [], {"value": helper.make_tensor("v", TensorProto.FLOAT16, [2], [1.0, 0.5])}),
        OpCase("ConstantOfShape", 17, [i64(2, 3)]), OpCase("ConstantOfShape", 17, [i64(3)], {
            "value": helper.make_tensor("v", TensorProto.INT32, [1], [7])}),
        OpCase("Shape", 17, [X]), OpCase("Shape", 17, [X], {"start": 1, "end": -1}), OpCase("Size", 17, [X]),
        OpCase("Range", 17, [Const(np.array(2)), Const(np.array(11)),
                             Const(np.array(3))]),
        OpCase("Range", 17, [Const(np.array(v, np.float32)) for v in (1.0, -0.2, -0.25)]),
        OpCase("EyeLike", 17, [f(3, 5)], {"k": 1}), OpCase("EyeLike", 17, [f(4, 3)], {"dtype": TensorProto.INT64}),
        OpCase("Reshape", 17, [ramp, i64(0, -1)]), OpCase("Reshape", 17, [ramp, i64(4, 3, 2)]),
        OpCase("Reshape", 17, [f(0, 3), i64(0, 5)], {"allowzero": 1}),
        OpCase("Flatten", 17, [X]), OpCase("Flatten", 17, [X], {"axis": -1}), OpCase("Flatten", 17, [X], {"axis": 0}),
        OpCase("Squeeze", 17, [f(1, 3, 1, 2)]), OpCase("Squeeze", 17, [f(1, 3, 1, 2), i64(2)]),
        OpCase("Squeeze", 11, [f(1, 3, 1, 2)], {"axes": [0, -2]}),
        OpCase("Unsqueeze", 17, [f(3, 2), i64(0, -1)]), OpCase("Unsqueeze", 11, [f(3, 2)], {"axes": [1, 3]}),
        OpCase("Transpose", 17, [X], {"perm": [0, 2, 3, 1]}), OpCase("Transpose", 17, [ramp]),
        OpCase("Concat", 17, [f(2, 3, 4), f(2, 5, 4)], {"axis": 1}), OpCase("Concat", 17, [f(3)], {"axis": -1}),
        OpCase("Split", 17, [f(7, 2), i64(3, 4)], {"axis": 0}, outputs=2),
        OpCase("Split", 18, [f(2, 7)], {"axis": -1, "num_outputs": 3}, outputs=3),
        OpCase("Split", 11, [f(2, 7)], {"axis": 1, "split": [1, 6]}, outputs=2),
        OpCase("Split", 17, [f(6)], outputs=3),
        OpCase("Slice", 17, [X, i64(1), i64(9), i64(2)]), OpCase("Slice", 17, [X, i64(-3, 0), i64(-1, 5), i64(3, 2),
                                                                              i64(1, 2)]),
        OpCase("Slice", 17, [ramp, i64(-1), i64(-99), i64(2), i64(-1)]),
        OpCase("Slice", 17, [ramp, i64(3), i64(0), i64(2), i64(-2)]),
        OpCase("Slice", 17, [ramp, i64(2), i64(1), i64(0)]),
        OpCase("Slice", 9, [ramp], {"starts": [1], "ends": [3], "axes": [1]}),
        OpCase("Pad", 17, [X, i64(0, 0, 1, 2, 0, 0, 3, 0)]), OpCase("Pad", 17, [X, i64(0, 0, -1, 0, 0, 1, 0, -2),
                                                                         Const(np.array(1.5, np.float32))]),
        OpCase("Pad", 17, [X, i64(0, 0, 1, 2, 0, 0, 3, 0)], {"mode": "reflect"}),
        OpCase("Pad", 17, [X, i64(0, 0, 1, 2, 0, 0, 3, 9)], {"mode": "edge"}),
        OpCase("Pad", 19, [X, i64(0, 0, 1, 2, 0, 0, 3, 0)], {"mode": "wrap"}),
        OpCase("Pad", 18, [X, i64(1, 2), None, i64(-1)]), OpCase("Pad", 10, [f(2, 3)], {"pads": [1, 0, 0, 2],
                                                                                        "value": 0.5}),
        OpCase("Expand", 17, [f(3, 1), i64(2, 1, 4)]), OpCase("Tile", 17, [f(2, 3), i64(2, 3)]),
        OpCase("DepthToSpace", 17, [f(2, 12, 3, 5)], {"blocksize": 2}),
        OpCase("DepthToSpace", 17, [f(2, 12, 3, 5)], {"blocksize": 2, "mode": "CRD"}),
        OpCase("SpaceToDepth", 17, [f(2, 3, 4, 6)], {"blocksize": 2}),
        OpCase("Trilu", 17, [f(5, 4)]), OpCase("Trilu", 17, [f(5, 4), Const(np.array(-1))], {"upper": 0}),
    ]  # fmt: skip


def _indexing() -> list[OpCase]:
    table, updates = f(5, 7), f(2, 7)
    return [
        OpCase("Gather", 17, [table, whole(2, 3, low=-5, high=5)]),
        OpCase("Gather", 17, [table, i64(4, -1)], {"axis": 1}),
        OpCase("Gather", 17, [table, Const(np.array(-2))], {"axis": 0}), OpCase("Gather", 17, [table, i64(2)]),
        OpCase("GatherElements", 17, [table, whole(2, 7, low=-5, high=5)]),
        OpCase("GatherND", 17, [table, whole(3, 2, low=0, high=5)]), OpCase("GatherND", 17, [table, whole(3, 1, low=-5,
                                                                                                    high=5)]),
        OpCase("GatherND", 17, [f(2, 5, 3), whole(2, 4, 1, low=0, high=5)], {"batch_dims": 1}),
        OpCase("ScatterND", 17, [table, np.array([[4], [-4]]), updates]),
        *(OpCase("ScatterND", 18, [table, np.array([[4], [1]]), updates], {"reduction": r})
          for r in ("add", "mul", "max", "min")),
        OpCase("ScatterElements", 17, [table, np.array([[0, -1, 3, 1, 2, 0, 4]]), f(1, 7)]),
        *(OpCase("ScatterElements", 18, [table, np.array([[0, 4, 3, 1, 2, 0, 4]]), f(1, 7)], {"reduction": r})
          for r in ("add", "mul", "max", "min")),
        OpCase("Scatter", 10, [table, np.array([[0, 1, 3, 1, 2, 0, 4]]), f(1, 7)]),
        OpCase("OneHot", 17, [whole(3, 2, low=-4, high=4), Const(np.array(4)), f32(0.5, 2.0).value]),
        OpCase("OneHot", 17, [whole(3, 2, low=0, high=4), i64(4), np.array([0, 1])], {"axis": 1}),
    ]  # fmt: skip


def _arithmetic_of_rows() -> list[OpCase]:
    kinds = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    found = []
    for kind in kinds:
        x = positive(2, 3, 5)
        found += [OpCase(f"Reduce{kind}", 18, [x, i64(-1, 0)], {"keepdims": 0}), OpCase(f"Reduce{kind}", 18, [x]),
                  OpCase(f"Reduce{kind}", 12, [x], {"axes": [1]})]  # fmt: skip
    found += [OpCase("ReduceSum", 18, [X], {"noop_with_empty_axes": 1}), OpCase("ReduceSum", 13, [whole(3, 5), i64(1)]),
              OpCase("ReduceMean", 18, [whole(3, 5), i64(1)]), OpCase("ReduceMax", 18, [np.array(3.0, np.float32)],
                                                                   {"keepdims": 0})]  # fmt: skip
    for kind in ("Softmax", "LogSoftmax", "Hardmax"):
        found += [OpCase(kind, 17, [X], {"axis": 1}), OpCase(kind, 17, [ROWS]), OpCase(kind, 11, [X], {"axis": 2})]
    found += [OpCase("CumSum", 17, [ROWS, Const(np.array(1))]),
              OpCase("CumSum", 17, [ROWS, Const(np.array(-2))], {"reverse": 1}),
              OpCase("CumSum", 17, [whole(2, 5), Const(np.array(1))], {"exclusive": 1}),
              OpCase("CumSum", 17, [ROWS, Const(np.array(1))], {"exclusive": 1, "reverse": 1})]  # fmt: skip
    found += [OpCase("CumProd", 26, [ROWS, Const(np.array(1))], truth="onnx"),
              OpCase("CumProd", 26, [ROWS, Const(np.array(-2))], {"reverse": 1}, truth="onnx"),
              OpCase("CumProd", 26, [whole(2, 5), Const(np.array(1))], {"exclusive": 1}, truth="onnx"),
              OpCase("CumProd", 26, [ROWS, Const(np.array(1))], {"exclusive": 1, "reverse": 1},
                     truth="onnx")]  # fmt: skip
    ties = np.array([[1, 5, 5, 2], [7, 7, 0, 7]], np.float32)
    for op in ("ArgMax", "ArgMin"):
        found += [OpCase(op, 17, [ROWS], {"axis": 1}), OpCase(op, 17, [ROWS], {"keepdims": 0}),
                  OpCase(op, 17, [ties], {"axis": 1, "select_last_index": 1})]  # fmt: skip
    found += [OpCase("TopK", 17, [ROWS, i64(4)], outputs=2),
              OpCase("TopK", 17, [ROWS, i64(2)], {"axis": 0, "largest": 0},
                                                                    outputs=2),
              OpCase("TopK", 9, [ROWS], {"k": 3}, outputs=2, truth="by hand")]  # fmt: skip
    found += [OpCase("MatMul", 17, [f(2, 1, 3, 5), f(4, 5, 7)]), OpCase("MatMul", 17, [f(5), f(5, 3)]),
              OpCase("Gemm", 17, [f(3, 5), f(5, 4), f(4)]), OpCase("Gemm", 17, [f(3, 5), Const(f(4, 5)), Const(f(4))],
                                                                  {"transB": 1}),
              OpCase("Gemm", 17, [f(5, 3), f(4, 5), f(3, 1)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
              OpCase("Gemm", 17, [f(3, 5), f(5, 4)], {"alpha": 0.5}),
              OpCase("Einsum", 17, [f(2, 3, 5), f(2, 5, 4)], {"equation": "bij, bjk -> bik"}),
              OpCase("Einsum", 17, [f(3, 5)], {"equation": "ij->j"}),
              OpCase("MatMulInteger", 17, [whole(3, 5, low=0, high=256, dtype="uint8"), whole(5, 4, dtype="int8"),
                                           np.array(7, np.uint8), np.array(1, np.int8)]),
              OpCase("MatMulInteger", 17, [whole(3, 5, dtype="int8"), whole(5, 4, dtype="int8")])]  # fmt: skip
    return found


def _images() -> list[OpCase]:
    w, b = Const(f(4, 3, 3, 2)), Const(f(4))
    found = [
        OpCase("Conv", 17, [X, w, b], {"pads": [1, 0, 1, 0]}), OpCase("Conv", 17, [X, f(4, 3, 3, 2)]),
        OpCase("Conv", 17, [X, w, b], {"pads": [0, 1, 2, 0], "strides": [2, 1], "dilations": [1, 3]}),
        OpCase("Conv", 17, [X, w], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        OpCase("Conv", 17, [X, w], {"auto_pad": "SAME_LOWER"}), OpCase("Conv", 17, [X, w], {"auto_pad": "VALID"}),
        OpCase("Conv", 17, [f(1, 6, 5, 5), Const(f(4, 3, 3, 3))], {"group": 2}),
        OpCase("Conv", 17, [f(2, 3, 9), Const(f(4, 3, 3))], {"pads": [2, 1]}),
        OpCase("Conv", 17, [f(1, 2, 4, 5, 6), Const(f(3, 2, 2, 3, 2))], {"pads": [0, 1, 0, 1, 1, 0]}),
    ]  # fmt: skip
    wt = Const(f(3, 4, 3, 2))
    found += [OpCase("ConvTranspose", 17, [X, wt, *rest], attrs) for rest, attrs in (
        ([], {}), ([b], {"strides": [2, 3], "pads": [1, 0, 1, 0]}), ([b], {"strides": [2, 2], "pads": [0, 1, 2, 0]}),
        ([b], {"strides": [2, 2], "output_padding": [1, 1]}), ([], {"dilations": [2, 1]}),
        ([], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}), ([], {"output_shape": [10, 15], "strides": [2, 2]}),
        ([b], {"strides": [3, 3], "output_padding": [2, 1], "pads": [1, 1, 0, 0]}))]  # fmt: skip
    found += [OpCase("ConvTranspose", 17, [f(1, 4, 5, 5), Const(f(4, 2, 3, 3))], {"group": 2}),
              OpCase("ConvTranspose", 17, [f(1, 3, 7), Const(f(3, 2, 4))], {"strides": [2]})]  # fmt: skip
    pools = ({"kernel_shape": [3, 2]}, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]},
             {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
             {"kernel_shape": [3, 3], "pads": [0, 1, 2, 0]},
             {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
             {"kernel_shape": [3, 3], "strides": [3, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1})  # fmt: skip
    found += [OpCase("MaxPool", 17, [X], p) for p in pools] + [OpCase("AveragePool", 19, [X], p) for p in pools]
    found += [OpCase("AveragePool", 19, [X], {**p, "count_include_pad": 1}) for p in pools[:4]]
    found += [OpCase("MaxPool", 17, [X], {"kernel_shape": [2, 2], "dilations": [2, 3]}),
              OpCase("AveragePool", 19, [X], {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [1, 1, 1, 1]}),
              OpCase("MaxPool", 17, [whole(1, 2, 6, 6, dtype="int8")], {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}),
              OpCase("MaxPool", 17, [f(1, 2, 9)], {"kernel_shape": [3]}),
              OpCase("AveragePool", 19, [f(1, 2, 4, 5, 6)], {"kernel_shape": [2, 2, 2], "pads": [1, 0, 0, 0, 0, 0]}),
              OpCase("GlobalAveragePool", 17, [X]), OpCase("GlobalMaxPool", 17, [X])]  # fmt: skip
    found += [OpCase("LpPool", 18, [X], p) for p in pools]
    found += [OpCase("LpPool", 18, [X], {"kernel_shape": [3, 2], "p": p}) for p in (1, 3)]
    found += [
        OpCase("LpPool", 18, [X], {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [1, 1, 1, 1]}),
        OpCase("LpPool", 11, [f(1, 2, 9)], {"kernel_shape": [3], "strides": [2]}),
        OpCase("LpPool", 18, [f(1, 2, 4, 5, 6)], {"kernel_shape": [2, 2, 2], "pads": [1, 0, 0, 0, 0, 0]}),
    ]
    return found + _resized()


def _resized() -> list[OpCase]:
    found = []
    for mode in ("nearest", "linear", "cubic"):
        for kind in ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"):
            for scales in ((1, 1, 2, 3), (1, 1, 0.6, 1.4)):
                rounding = {"nearest_mode": "floor"} if mode == "nearest" and kind == "asymmetric" else {}
                attrs = {"mode": mode, "coordinate_transformation_mode": kind, **rounding}
                found.append(OpCase("Resize", 13, [X, None, f32(*scales)], attrs))
        found.append(OpCase("Resize", 13, [X, None, None, i64(2, 3, 9, 4)], {"mode": mode}))
        found.append(OpCase("Resize", 13, [X, None, None, i64(2, 3, 1, 1)],
                            {"mode": mode, "coordinate_transformation_mode": "pytorch_half_pixel"}))  # fmt: skip
    found += [OpCase("Resize", 13, [X, None, f32(1, 1, 1.7, 2.0)], {"mode": "nearest", "nearest_mode": n})
              for n in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")]  # fmt: skip
    found += [
        OpCase("Resize", 13, [X, None, f32(1, 1, 0.7, 2.0)], {"mode": "cubic", "cubic_coeff_a": -0.5}),
        OpCase("Resize", 13, [X, None, f32(1, 1, 0.7, 2.0)], {"mode": "cubic", "exclude_outside": 1}),
        OpCase("Resize", 18, [X, None, None, i64(3, 4)], {"mode": "linear", "axes": [2, 3], "antialias": 1}),
        OpCase("Resize", 18, [X, None, None, i64(3, 4)], {"mode": "cubic", "axes": [2, 3], "antialias": 1}),
        OpCase("Resize", 18, [X, None, None, i64(9, 9)], {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}),
        OpCase("Resize", 19, [X, None, f32(1.3, 0.6)], {"mode": "linear", "axes": [2, 3],
                                                       "coordinate_transformation_mode": "half_pixel_symmetric"}),
        OpCase("Resize", 13, [X, f32(0, 0, 0.2, -0.1, 1, 1, 0.8, 1.2), None, i64(2, 3, 4, 6)],
               {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 2.0}),
        OpCase("Resize", 13, [f(1, 2, 4, 5, 6), None, f32(1, 1, 2, 2, 2)], {"mode": "linear"}),
        OpCase("Resize", 13, [X, None, f32(1, 1, 1, 1)]), OpCase("Resize", 10, [X, f32(1, 1, 2, 2)]),
        OpCase("Upsample", 9, [X, f32(1, 1, 2, 2)]), OpCase("Upsample", 9, [X, f32(1, 1, 2, 2)], {"mode": "linear"}),
    ]  # fmt: skip
    grid = (f(2, 4, 6, 2) * 0.8).astype(np.float32)
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            found += [OpCase("GridSample", 16, [X, grid], {"mode": mode, "padding_mode": padding, "align_corners": a},
                             tolerance=2e-4) for a in (0, 1)]  # fmt: skip
    return found


def _norms() -> list[OpCase]:
    scale, shift, mean = f(3), f(3), f(3)
    return [
        OpCase("BatchNormalization", 17, [X, Const(scale), Const(shift), Const(mean), Const(positive(3))]),
        OpCase("BatchNormalization", 9, [X, scale, shift, mean, positive(3)], {"epsilon": 0.1}),
        OpCase("InstanceNormalization", 17, [X, scale, shift]),
        OpCase("GroupNormalization", 21, [f(2, 6, 5), f(6), f(6)], {"num_groups": 3}),
        OpCase("GroupNormalization", 18, [f(2, 6, 5), f(3), f(3)], {"num_groups": 3}),
        OpCase("LayerNormalization", 17, [X, f(7), f(7)]), OpCase("LayerNormalization", 17, [X, f(5, 7)], {"axis": 2}),
        OpCase("LayerNormalization", 17, [X, f(7), f(7)], {"epsilon": 0.1}, outputs=3),
        OpCase("LayerNormalization", 17, [X, f(1), f(1)]),
        OpCase("RMSNormalization", 23, [X, f(7)], truth="onnx"),
        OpCase("RMSNormalization", 23, [X, f(5, 7)], {"axis": 2, "epsilon": 0.1}, truth="onnx"),
        OpCase("LpNormalization", 17, [X], {"axis": 1}), OpCase("LpNormalization", 17, [X], {"axis": -1, "p": 1}),
        OpCase("MeanVarianceNormalization", 17, [X], tolerance=1e-4),
        OpCase("LRN", 17, [X], {"size": 3}), OpCase("LRN", 17, [f(1, 7, 3, 2)], {"size": 5, "alpha": 0.3, "bias": 2.0}),
    ]  # fmt: skip


def _quantised() -> list[OpCase]:
    scale, zero = Const(np.array(0.05, np.float32)), Const(np.array(3, np.int8))
    per_axis, zeros = Const(positive(3) / 9), Const(np.array([0, 3, -2], np.int8))
    small = whole(2, 3, 5, low=-128, high=128, dtype="int8")
    return [
        OpCase("QuantizeLinear", 17, [f(2, 3, 5), scale, zero]), OpCase("QuantizeLinear", 17, [f(2, 3, 5) * 9, scale]),
        OpCase("QuantizeLinear", 17, [f(2, 3, 5), per_axis, zeros], {"axis": 1}),
        OpCase("DequantizeLinear", 17, [small, scale, zero]), OpCase("DequantizeLinear", 17, [small, scale]),
        OpCase("DequantizeLinear", 17, [small, per_axis, zeros], {"axis": -2}),
        OpCase("QuantizeLinear", 21, [f(2, 3), Const(np.array(0.1, np.float32))], {"output_dtype": TensorProto.INT8}),
        OpCase("DynamicQuantizeLinear", 17, [f(3, 5)], outputs=3),
    ]  # fmt: skip
