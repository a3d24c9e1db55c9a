"""What a site's nodes make in float64, for where the unfused model's own type is too small on the way to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from cutefuse.graph.cut import needed
from cutefuse.graph.read import ELEM_TYPES
from cutefuse.graph.runner import Runner


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
        nodes, read = needed(model.graph.node, [tensor], lambda name: name not in inner or name in known)
        stored = {t.name: t for t in model.graph.initializer if t.name in read}
        known |= {n: onnx.numpy_helper.to_array(t, str(folder)) for n, t in stored.items()}
        known |= {n: feeds[n] for n in read if n in feeds and n not in known}
        rest = [n for n in read if n not in known]
        known |= dict(zip(rest, fetch(rest), strict=True)) if rest else {}
        given = {n: np.asarray(known[n]) for n in read}
        floats = {n for n, v in given.items() if v.dtype.kind == "f" or v.dtype == ml_dtypes.bfloat16}
        values = {n: v.astype(np.float64) if n in floats else v for n, v in given.items()}
        inputs = [onnx.helper.make_tensor_value_info(n, ELEM_TYPES[v.dtype.name], v.shape) for n, v in values.items()]
        part = onnx.helper.make_model(
            onnx.helper.make_graph(nodes, "site", inputs, [onnx.ValueInfoProto(name=tensor)]),
            opset_imports=model.opset_import, ir_version=model.ir_version, functions=model.functions,
        )  # fmt: skip
        with np.errstate(all="ignore"):
            return np.asarray(Runner(part, folder, reference=True)(values)[0])
    except Exception:  # neither runtime's exceptions share a public base class; without this the verdict is stricter
        return None
