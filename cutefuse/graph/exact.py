"""What a site's nodes make in float64, for where the unfused model's own type is too small on the way to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from cutefuse.graph.read import ELEM_TYPES


def in_float64(
    model: onnx.ModelProto, folder: Path, tensor: str, inner: Sequence[str], feeds: Mapping[str, np.ndarray],
    fetch: Callable[[Sequence[str]], Sequence[np.ndarray]],
) -> np.ndarray | None:  # fmt: skip
    """`tensor`, computed from the last tensors before it that are finite, by ONNX's reference evaluator.

    inner: what the site makes on the way to it. feeds: the graph's inputs; fetch: values of what its nodes make;
    folder: where weights outside the file lie. None where this cannot be computed.
    """
    try:
        known = {n: v for n, v in zip(inner, fetch(inner), strict=True) if np.isfinite(v).all()} if inner else {}
        nodes, read = _on_the_way(model, tensor, set(inner) - known.keys())
        stored = {t.name: t for t in model.graph.initializer if t.name in read}
        known |= {n: onnx.numpy_helper.to_array(t, str(folder)) for n, t in stored.items()}
        known |= {n: feeds[n] for n in read if n in feeds and n not in known}
        rest = [n for n in read if n not in known]
        known |= dict(zip(rest, fetch(rest), strict=True)) if rest else {}
        values = {n: _wide(np.asarray(known[n])) for n in read}
        return _evaluate(model, nodes, values, tensor)
    except Exception:  # neither runtime's exceptions share a public base class; without this the verdict is stricter
        return None


def _on_the_way(model: onnx.ModelProto, tensor: str, inner: set[str]) -> tuple[list[onnx.NodeProto], list[str]]:
    """The nodes that make `tensor` and the tensors of `inner` which it needs, in graph order, and what they read."""
    maker = {o: i for i, n in enumerate(model.graph.node) for o in n.output if o}
    places: set[int] = set()
    read: dict[str, None] = {}
    ahead = [tensor]
    while ahead:
        name = ahead.pop()
        if name != tensor and name not in inner:
            read[name] = None
        elif maker[name] not in places:
            places.add(maker[name])
            ahead += [i for i in model.graph.node[maker[name]].input if i]
    return [model.graph.node[i] for i in sorted(places)], list(read)


def _wide(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64) if value.dtype.kind == "f" or value.dtype == ml_dtypes.bfloat16 else value


def _evaluate(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], values: Mapping[str, np.ndarray], tensor: str
) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    inputs = [onnx.helper.make_tensor_value_info(n, ELEM_TYPES[v.dtype.name], v.shape) for n, v in values.items()]
    outputs = [onnx.helper.make_empty_tensor_value_info(tensor)]
    part = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "site", inputs, outputs), opset_imports=model.opset_import,
        ir_version=model.ir_version, functions=model.functions,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        (made,) = list(ReferenceEvaluator(part).run([tensor], dict(values)))
    return np.asarray(made)
