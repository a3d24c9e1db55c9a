"""A few lines of builder: layers in, ONNX nodes out, with seeded weights of sensible size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

ELEM = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


class Net:
    """Collects nodes and weights; every method returns the name of the tensor it made."""

    def __init__(self, name: str, dtype: str = "float32", opset: int = 17, seed: int = 0) -> None:
        self.name, self.dtype, self.opset = name, dtype, opset
        self.rng = np.random.default_rng(seed)
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.channels: dict[str, int] = {}

    def input(self, name: str, channels: int, height: int, width: int, batch: str = "batch") -> str:
        """An NCHW graph input with a dynamic batch."""
        self.inputs.append(helper.make_tensor_value_info(name, ELEM[self.dtype], [batch, channels, height, width]))
        self.channels[name] = channels
        return name

    def weight(self, name: str, value: np.ndarray, dtype: str | None = None) -> str:
        """An initializer in the model's type."""
        self.weights.append(numpy_helper.from_array(np.asarray(value).astype(dtype or self.dtype), name))
        return name

    def add(self, op_type: str, inputs: Sequence[str], name: str, channels: int | None = None, **attrs: Any) -> str:
        """Any node with one output, named after the node."""
        output = f"{name}_output_0"
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], name=name, **attrs))
        self.channels[output] = self.channels[inputs[0]] if channels is None else channels
        return output

    def tokens(self, name: str, count: int, width: int) -> str:
        """A graph input of [batch, tokens, width] with a dynamic batch."""
        self.inputs.append(helper.make_tensor_value_info(name, ELEM[self.dtype], ["batch", count, width]))
        self.channels[name] = width
        return name

    def conv(
        self, x: str, filters: int, kernel: int | tuple[int, int], name: str, *, stride: int = 1, dilation: int = 1,
        group: int = 1, bias: bool = True, bn: bool = False, act: str = "",
    ) -> str:  # fmt: skip
        """Conv with 'same' pads, then BatchNormalization and an activation (Relu, SiLU, ...) where wanted."""
        rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        shape = (filters, self.channels[x] // group, rows, columns)
        w = self.rng.standard_normal(shape) * math.sqrt(2 / math.prod(shape[1:]))
        inputs = [x, self.weight(f"{name}.weight", w)]
        if bias and not bn:
            inputs.append(self.weight(f"{name}.bias", 0.1 * self.rng.standard_normal(filters)))
        y = self.add(
            "Conv", inputs, f"/{name}/Conv", filters, kernel_shape=[rows, columns], strides=[stride, stride],
            pads=[rows // 2 * dilation, columns // 2 * dilation] * 2, dilations=[dilation, dilation], group=group,
        )  # fmt: skip
        return self.act(self.batch_norm(y, name) if bn else y, act, name)

    def batch_norm(self, x: str, name: str) -> str:
        """BatchNormalization with statistics that are far from the identity."""
        count = self.channels[x]
        params = {
            "weight": self.rng.uniform(0.5, 1.5, count),
            "bias": 0.1 * self.rng.standard_normal(count),
            "running_mean": 0.1 * self.rng.standard_normal(count),
            "running_var": self.rng.uniform(0.5, 2, count),
        }
        stats = [self.weight(f"{name}.bn.{k}", v) for k, v in params.items()]
        return self.add("BatchNormalization", [x, *stats], f"/{name}/BatchNormalization", epsilon=1e-3)

    def act(self, x: str, act: str, name: str) -> str:
        """An activation; SiLU is written as x * sigmoid(x), as exporters do."""
        if act == "SiLU":
            return self.add("Mul", [x, self.add("Sigmoid", [x], f"/{name}/act/Sigmoid")], f"/{name}/act/Mul")
        return self.add(act, [x], f"/{name}/{act}") if act else x

    def concat(self, xs: Sequence[str], name: str) -> str:
        """Join along channels."""
        return self.add("Concat", xs, f"/{name}", sum(self.channels[x] for x in xs), axis=1)

    def upsample(self, x: str, scale: int, name: str, mode: str = "nearest") -> str:
        """Resize by a whole factor."""
        scales = self.weight(f"{name}.scales", np.array([1, 1, scale, scale]), "float32")
        rules = {"nearest": {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}}
        attrs = rules.get(mode, {"coordinate_transformation_mode": "half_pixel"})
        return self.add("Resize", [x, "", scales], f"/{name}/Resize", mode=mode, **attrs)

    def resize_like(self, x: str, size: int, name: str) -> str:
        """Bilinear Resize to size x size pixels."""
        sizes = self.weight(f"{name}.size", np.array([size, size]), "int64")
        start, end = (self.weight(f"{name}.{k}", np.array([v]), "int64") for k, v in (("start", 0), ("end", 2)))
        shape = self.add("Shape", [x], f"/{name}/Shape")
        kept = self.add("Slice", [shape, start, end], f"/{name}/Slice")
        full = self.add("Concat", [kept, sizes], f"/{name}/Concat", axis=0)
        return self.add("Resize", [x, "", "", full], f"/{name}/Resize", self.channels[x], mode="linear")

    def max_pool(self, x: str, name: str) -> str:
        """2x2 with stride 2."""
        return self.add("MaxPool", [x], f"/{name}/MaxPool", kernel_shape=[2, 2], strides=[2, 2])

    def split(self, x: str, parts: int, name: str) -> list[str]:
        """Equal parts along channels."""
        size = self.channels[x] // parts
        outputs = [f"/{name}/Split_output_{i}" for i in range(parts)]
        sizes = self.weight(f"{name}.sizes", np.full(parts, size), "int64")
        self.nodes.append(helper.make_node("Split", [x, sizes], outputs, name=f"/{name}/Split", axis=1))
        self.channels.update(dict.fromkeys(outputs, size))
        return outputs

    def model(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The finished model, shapes inferred and checked."""
        infos = [helper.make_empty_tensor_value_info(o) for o in outputs]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, infos, self.weights)
        made = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], producer_name="cutefuse models",
            ir_version=8 if self.opset < 21 else 10,
        )  # fmt: skip
        made = onnx.shape_inference.infer_shapes(made, strict_mode=True)
        for output in made.graph.output:  # inference forgets the name of the batch at a Resize
            output.type.tensor_type.shape.dim[0].dim_param = "batch"
        onnx.checker.check_model(made, full_check=True)
        return made
