"""Models in float64: what a network computes without the roundings of its own type, and how far those may lead.

Errors are the largest difference over the largest exact value of an output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from cutefuse.engines.inputs import resolve, seeded

Outputs = dict[str, np.ndarray]
_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16)
_KEPT = {"Resize": (1, 2), "Upsample": (1,)}  # region and factors stay float32
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Errors of layers add up like a random walk, so with the root of their number. A layer of 16-bit results rounds once,
# its sums being wider; one of float32 rounds at every step of sums over some hundred products. The factors are 1.2 to
# 1.5 times the largest that ONNX Runtime and PyTorch need on the networks of models/: 27 and 5.
_ROUNDINGS = {"float32": 40 * 2.0**-24, "float16": 6 * 2.0**-11}


def rounding_limit(model: onnx.ModelProto, dtype: str) -> float:
    """The error that a network's float32 or float16 roundings may add up to, by its depth."""
    depths: dict[str, int] = {}
    for node in model.graph.node:
        depth = max((depths.get(i, 0) for i in node.input), default=0) + (node.op_type in _PRODUCTS)
        depths |= dict.fromkeys(node.output, depth)
    return _ROUNDINGS[dtype] * math.sqrt(max(1, *(depths.get(o.name, 0) for o in model.graph.output)))


def widened(model: onnx.ModelProto, to: int = TensorProto.DOUBLE) -> onnx.ModelProto:
    """A copy of a float32 or float16 model without local functions whose tensors are float64, or float32."""
    assert not model.functions, "widen the plain model, of which the patched one is a rewriting"
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    kept = {n.input[i] for n in graph.node for i in _KEPT.get(n.op_type, ()) if i < len(n.input)}
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _NARROW:
            value.type.tensor_type.elem_type = to
    for tensor in graph.initializer:
        if tensor.name not in kept:
            _widen(tensor, to)
    _widen_nodes(graph.node, kept, to)
    return wide


def _widen(tensor: TensorProto, to: int) -> None:
    if tensor.data_type in _NARROW:
        kind = onnx.helper.tensor_dtype_to_np_dtype(to)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(kind), tensor.name))


def _widen_nodes(nodes: Iterable[NodeProto], kept: set[str], to: int) -> None:
    for node in nodes:
        assert node.op_type not in ("QuantizeLinear", "DequantizeLinear", "If"), f"{node.op_type} is not widened"
        for a in node.attribute:
            if a.HasField("t") and not kept & set(node.output):
                _widen(a.t, to)
            elif node.op_type == "Cast" and a.name == "to" and a.i in _NARROW:
                a.i = to


def feed_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The inputs that an engine of the model starts with."""
    from cutefuse.engines.inputs import input_specs

    specs = input_specs(model)
    return seeded(specs, resolve(specs, {}))


def exact(model: onnx.ModelProto, feed: Mapping[str, np.ndarray] | None = None) -> Outputs:
    """The outputs in float64, on the CPU."""
    return _run(model, feed, None)


def in_tf32(model: onnx.ModelProto, feed: Mapping[str, np.ndarray] | None = None) -> Outputs:
    """The outputs in float64, but with the factors of every convolution rounded to the 11 bits of TF32."""
    import torch

    def rounded(x: Any) -> Any:
        mantissa, exponent = torch.frexp(x)  # 0.5 <= |mantissa| < 1
        return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)

    return _run(model, feed, rounded)


def _run(
    model: onnx.ModelProto, feed: Mapping[str, np.ndarray] | None, rounded: Callable[[Any], Any] | None
) -> Outputs:
    from cutefuse.engines.pytorch.run import TorchEngine

    engine = TorchEngine.build(widened(model), device="cpu")
    if rounded is not None:
        for i, step in enumerate(engine.program.steps):
            if step.op_type == "Conv":
                run = lambda x, w, *rest, of=step.run: of(rounded(x), rounded(w), *rest)  # noqa: E731
                engine.program.steps[i] = replace(step, run=run)
        engine._function = engine.program.function(engine.constants)
    wide = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in (feed or feed_of(model)).items()}
    return {name: value.numpy() for name, value in engine(wide).items()}


def error(got: Mapping[str, Any], want: Outputs) -> float:
    """The largest error of all outputs; infinity where a value is not finite."""
    assert list(got) == list(want)
    worst = 0.0
    for a, b in zip(got.values(), want.values(), strict=True):
        array = np.asarray(a if isinstance(a, np.ndarray) else a.cpu().double().numpy(), np.float64)
        assert array.shape == b.shape and np.isfinite(b).all() and np.abs(b).max() > 0
        finite = np.isfinite(array).all()
        worst = max(worst, float(np.abs(array - b).max() / np.abs(b).max()) if finite else float("inf"))
    return worst
