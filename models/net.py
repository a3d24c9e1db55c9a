"""A few lines of builder: layers in, ONNX nodes out, with seeded weights that keep activations near one.

Nodes, names and attributes are those that PyTorch's tracing exporter writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from models import moments
from models.moments import Moments

ELEM = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
FILTERED = ("Conv", "ConvTranspose", "Gemm")
DYNAMIC = "batch"  # name of the dimension


@dataclass(frozen=True)
class Config:
    """What may differ between two builds of a model; `models.build` says what each field means."""

    dtype: str = "float32"
    small: bool = False
    batch: int | None = None
    size: int | None = None

    def pixels(self, full: int, small: int, multiple: int) -> int:
        """Rows of the input. Raises ValueError for a size that the network's strides do not divide."""
        size = self.size or (small if self.small else full)
        if size < multiple or size % multiple:
            raise ValueError(f"--size {size} is not possible; give a multiple of {multiple}, for example {full}")
        return size


class Net:
    """Collects nodes and weights; every method returns the name of the tensor it made.

    With `thin` a small configuration takes an eighth of the filters of each layer of 32 or more. images: how many
    images one element of the batch has. deviation: standard deviation of what a filter yields.
    """

    def __init__(
        self, name: str, config: Config, *, thin: bool = False, images: int = 1, deviation: float = 1.0,
        opset: int = 17, seed: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.dtype, self.opset = name, config.dtype, opset
        self.batch = None if config.batch is None else config.batch * images
        self.thin = thin and config.small
        self.rng = np.random.default_rng(seed)
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.channels: dict[str, int] = {}
        self.deviation = deviation
        self.moments: dict[str, Moments] = {}  # estimates, of inputs with mean 0 and variance 1

    def input(self, name: str, *dims: int) -> str:
        """A graph input of [batch, *dims]."""
        batch = DYNAMIC if self.batch is None else self.batch
        self.inputs.append(helper.make_tensor_value_info(name, ELEM[self.dtype], [batch, *dims]))
        self.channels[name] = dims[0]
        return name

    def tokens(self, name: str, count: int, width: int) -> str:
        """A graph input of [batch, count, width]."""
        self.input(name, count, width)
        self.channels[name] = width
        return name

    def weight(self, name: str, value: np.ndarray, dtype: str | None = None) -> str:
        """An initializer in the model's type."""
        name = name.replace("/", ".")
        self.weights.append(numpy_helper.from_array(np.asarray(value).astype(dtype or self.dtype), name))
        return name

    def add(self, op_type: str, inputs: Sequence[str], name: str, channels: int | None = None, **attrs: Any) -> str:
        """Any node with one output, named after the node."""
        output = f"{name}_output_0"
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], name=name, **attrs))
        self.channels[output] = self.channels[inputs[0]] if channels is None else channels
        self.moments[output] = self._moments(op_type, inputs, attrs)
        return output

    def _moments(self, op_type: str, inputs: Sequence[str], attrs: dict[str, Any]) -> Moments:
        xs = [self.moments.get(name, Moments()) for name in inputs]
        if op_type in FILTERED:
            return Moments(0, self.deviation**2)
        if op_type in moments.FUNCTIONS:
            return moments.elementwise(op_type, xs[0])
        if op_type == "Add":
            return moments.total(xs)
        if op_type == "Mul":
            return moments.product(xs)
        if op_type == "Concat":
            return moments.joined(xs, [self.channels.get(name, 1) for name in inputs])
        if op_type == "MaxPool":
            return moments.largest(xs[0], math.prod(attrs["kernel_shape"]))
        return xs[0]

    def filters(self, count: int) -> int:
        """The number of filters of a layer that has `count` at full size."""
        return max(8, count // 64 * 8) if self.thin and count >= 32 else count

    def _filters(self, x: str, outputs: int, fan_in: int) -> np.ndarray:
        """Random values [outputs, fan_in] whose sum is zero for each output, as if a BatchNormalization took the mean.

        Otherwise the means of the channels, which no image changes, outgrow all else after a dozen layers.
        """
        w = self.rng.standard_normal((outputs, fan_in), np.float32)
        w -= w.mean(axis=1, keepdims=True)
        return w * np.float32(self.deviation / math.sqrt(fan_in * self.moments.get(x, Moments()).variance))

    def _bias(self, count: int, name: str) -> str:
        return self.weight(f"{name}.bias", 0.1 * self.rng.standard_normal(count))

    def conv(
        self, x: str, filters: int, kernel: int | tuple[int, int], name: str, *, stride: int = 1, dilation: int = 1,
        pad: int | None = None, group: int = 1, bias: bool = True, bn: bool = False, act: str = "",
    ) -> str:  # fmt: skip
        """Conv with 'same' pads unless given, then BatchNormalization and an activation (Relu, SiLU, ...) where wanted.

        A BatchNormalization that the exporter has folded is the Conv's bias.
        """
        return self._conv(x, self.filters(filters), kernel, name, stride, dilation, pad, group, bias, bn, act)

    def depthwise(self, x: str, kernel: int, name: str, *, dilation: int = 1, bias: bool = True, act: str = "") -> str:
        """Conv with one filter for each channel."""
        count = self.channels[x]
        return self._conv(x, count, kernel, name, 1, dilation, None, count, bias, False, act)

    def _conv(
        self, x: str, filters: int, kernel: int | tuple[int, int], name: str, stride: int, dilation: int,
        pad: int | None, group: int, bias: bool, bn: bool, act: str,
    ) -> str:  # fmt: skip
        rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        shape = (filters, self.channels[x] // group, rows, columns)
        w = self._filters(x, filters, math.prod(shape[1:])).reshape(shape)
        inputs = [x, self.weight(f"{name}.weight", w)]
        if bias and not bn:
            inputs.append(self._bias(filters, name))
        pads = [rows // 2 * dilation, columns // 2 * dilation] if pad is None else [pad, pad]
        y = self.add(
            "Conv", inputs, f"/{name}/Conv", filters, dilations=[dilation, dilation], group=group,
            kernel_shape=[rows, columns], pads=pads * 2, strides=[stride, stride],
        )  # fmt: skip
        return self.act(self.batch_norm(y, name) if bn else y, act, name)

    def conv_transpose(self, x: str, filters: int, stride: int, name: str) -> str:
        """ConvTranspose whose filter is as large as its stride, without bias."""
        filters = self.filters(filters)
        w = self._filters(x, filters * stride**2, self.channels[x]).T.reshape(-1, filters, stride, stride)
        inputs = [x, self.weight(f"{name}.weight", w)]
        return self.add(
            "ConvTranspose", inputs, f"/{name}/ConvTranspose", filters, dilations=[1, 1], group=1,
            kernel_shape=[stride, stride], pads=[0] * 4, strides=[stride, stride],
        )  # fmt: skip

    def linear(self, x: str, features: int, name: str, flatten: str = "Flatten") -> str:
        """Flatten, whose node has the name `flatten`, and a fully connected layer."""
        features = self.filters(features)
        x = self.add("Flatten", [x], f"/{flatten}", axis=1)
        w = self._filters(x, features, self.channels[x])
        inputs = [x, self.weight(f"{name}.weight", w), self._bias(features, name)]
        return self.add("Gemm", inputs, f"/{name}/Gemm", features, alpha=1.0, beta=1.0, transB=1)

    def batch_norm(self, x: str, name: str, epsilon: float = 1e-3) -> str:
        """BatchNormalization with statistics that are far from the identity."""
        count = self.channels[x]
        params = {
            "weight": self.rng.uniform(0.5, 1.5, count),
            "bias": 0.1 * self.rng.standard_normal(count),
            "running_mean": 0.1 * self.rng.standard_normal(count),
            "running_var": self.rng.uniform(0.5, 2, count),
        }
        stats = [self.weight(f"{name}.bn.{k}", v) for k, v in params.items()]
        return self.add("BatchNormalization", [x, *stats], f"/{name}/BatchNormalization", epsilon=epsilon, momentum=0.9,
                        training_mode=0)  # fmt: skip

    def act(self, x: str, act: str, name: str) -> str:
        """An activation; SiLU is written as x * sigmoid(x), as exporters do."""
        if act == "SiLU":
            y = self.add("Mul", [x, self.add("Sigmoid", [x], f"/{name}/act/Sigmoid")], f"/{name}/act/Mul")
            self.moments[y] = moments.elementwise("SiLU", self.moments[x])
            return y
        return self.add(act, [x], f"/{name}/{act}") if act else x

    def concat(self, xs: Sequence[str], name: str) -> str:
        """Join along channels."""
        return self.add("Concat", xs, f"/{name}", sum(self.channels[x] for x in xs), axis=1)

    def reshape(self, x: str, shape: Sequence[int], name: str, channels: int) -> str:
        """Reshape to [batch, *shape]; the node has the name itself."""
        dims = self.weight(f"{name}.shape", np.array([self.batch or 0, *shape]), "int64")
        return self.add("Reshape", [x, dims], f"/{name}", channels, allowzero=0)

    def _resize(self, inputs: list[str], name: str, mode: str, align_corners: bool) -> str:
        rule = "align_corners" if align_corners else "asymmetric" if mode == "nearest" else "half_pixel"
        return self.add(
            "Resize", inputs, f"/{name}/Resize", coordinate_transformation_mode=rule, cubic_coeff_a=-0.75, mode=mode,
            nearest_mode="floor",
        )  # fmt: skip

    def upsample(self, x: str, scale: int, name: str, mode: str = "nearest", align_corners: bool = False) -> str:
        """Resize by a whole factor."""
        scales = self.weight(f"{name}.scales", np.array([1, 1, scale, scale]), "float32")
        return self._resize([x, "", scales], name, mode, align_corners)

    def resize(self, x: str, rows: int, columns: int, name: str, mode: str = "linear") -> str:
        """Resize to a size: a constant where the batch is known, else computed from the tensor's own."""
        if self.batch is not None:
            dims = np.array([self.batch, self.channels[x], rows, columns])
            return self._resize([x, "", "", self.weight(f"{name}.sizes", dims, "int64")], name, mode, False)
        start, end, sizes = (
            self.weight(f"{name}.{k}", np.array(v), "int64")
            for k, v in (("start", [0]), ("end", [2]), ("size", [rows, columns]))
        )
        shape = self.add("Shape", [x], f"/{name}/Shape")
        full = self.add("Concat", [self.add("Slice", [shape, start, end], f"/{name}/Slice"), sizes],
                        f"/{name}/Concat", axis=0)  # fmt: skip
        return self._resize([x, "", "", full], name, mode, False)

    def max_pool(
        self, x: str, name: str, kernel: int = 2, stride: int = 2, pad: int = 0, ceil_mode: bool = False
    ) -> str:
        """MaxPool over a square window."""
        return self.add(
            "MaxPool", [x], f"/{name}/MaxPool", ceil_mode=int(ceil_mode), dilations=[1, 1],
            kernel_shape=[kernel, kernel], pads=[pad] * 4, strides=[stride, stride],
        )  # fmt: skip

    def avg_pool(self, x: str, name: str, kernel: int, stride: int, pad: int = 0) -> str:
        """AveragePool over a square window, pads counted."""
        return self.add(
            "AveragePool", [x], f"/{name}/AveragePool", ceil_mode=0, count_include_pad=1,
            kernel_shape=[kernel, kernel], pads=[pad] * 4, strides=[stride, stride],
        )  # fmt: skip

    def split(self, x: str, sizes: Sequence[int], name: str, axis: int = 1) -> list[str]:
        """Consecutive ranges of an axis, along the channels unless said."""
        outputs = [f"/{name}/Split_output_{i}" for i in range(len(sizes))]
        stored = self.weight(f"{name}.split", np.array(sizes), "int64")
        self.nodes.append(helper.make_node("Split", [x, stored], outputs, name=f"/{name}/Split", axis=axis))
        self.channels.update(zip(outputs, sizes, strict=True))
        self.moments.update(dict.fromkeys(outputs, self.moments.get(x, Moments())))
        return outputs

    def model(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The finished model, shapes inferred and checked."""
        infos = [helper.make_empty_tensor_value_info(o) for o in outputs]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, infos, self.weights)
        made = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], producer_name="cutefuse models",
            ir_version=8 if self.opset < 21 else 10,
        )  # fmt: skip
        made = onnx.shape_inference.infer_shapes(made, strict_mode=True, data_prop=True)
        if self.batch is None:
            for output in made.graph.output:  # inference forgets the name of the batch at a Resize
                output.type.tensor_type.shape.dim[0].dim_param = DYNAMIC
        onnx.checker.check_model(made, full_check=True)
        return made
