"""Runs an ONNX model: with ONNX Runtime, or with ONNX's reference evaluator what that does not know."""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from cutefuse.errors import VerificationError

# Optimisers of ONNX Runtime that change results: the first rounds the bias of a Conv between Q and DQ nodes to steps
# that underflow in float16, the second joins a float16 LayerNorm with the Cast behind it to a node of two types, which
# no session takes, the third drops a rounding where an int8 Q and DQ follow a Q and DQ of another scale.
WRONG = ["WeightBiasQuantization", "LayerNormFusionL1", "DoubleQDQPairsRemover"]
# ONNX Runtime's types that NumPy knows through ml_dtypes alone.
UNKNOWN_TO_NUMPY = {
    "tensor(bfloat16)": np.dtype(ml_dtypes.bfloat16), "tensor(float8e4m3fn)": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip


# What ONNX Runtime says of an operator that it has not.
_LACKS = re.compile(r"is not a registered function/op|No Op registered for|NOT_IMPLEMENTED")


class LacksOperator(VerificationError):
    """A model cannot be run here as a whole, because an operator is known to nothing that runs models."""


class Runner:
    """A model that can be run: by ONNX Runtime, or by ONNX's reference evaluator for what that does not know."""

    def __init__(self, model: onnx.ModelProto, folder: Path, reference: bool = False) -> None:
        self.outputs = [o.name for o in model.graph.output]
        self.reference = reference
        self._run = self._with_reference(model, folder) if reference else self._with_onnxruntime(model, folder)

    @property
    def backend(self) -> str:
        import onnxruntime as ort

        name = f"onnx {onnx.__version__} reference evaluator"
        return name if self.reference else f"onnxruntime {ort.__version__}"

    def _with_onnxruntime(self, model: onnx.ModelProto, folder: Path) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        # Higher levels fuse sums and layouts into convolutions, which fails on some valid graphs, unpatched ones too.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
        session = ort.InferenceSession(
            _told_apart(model).SerializeToString(), options, providers=["CPUExecutionProvider"],
            disabled_optimizers=WRONG,
        )  # fmt: skip
        kinds = {o.name: UNKNOWN_TO_NUMPY.get(o.type) for o in session.get_outputs()}
        tensors = [o.name for o in session.get_outputs() if o.type.startswith("tensor(")]
        others = [name for name in self.outputs if name not in tensors]  # sequences, maps and optional values

        def run(feeds: Mapping[str, np.ndarray]) -> list[Any]:
            values = session.run_with_ort_values(tensors, {n: _as_fed(v) for n, v in feeds.items()}) if tensors else []
            made = {n: _as_made(v, kinds[n]) for n, v in zip(tensors, values, strict=True)}
            made |= dict(zip(others, session.run(others, dict(feeds)), strict=True)) if others else {}
            return [made[n] for n in self.outputs]

        return run

    def _with_reference(self, model: onnx.ModelProto, folder: Path) -> Any:
        from onnx.inliner import inline_local_functions
        from onnx.reference import ReferenceEvaluator

        whole = deepcopy(model)
        onnx.external_data_helper.load_external_data_for_model(whole, str(folder))
        # Inlined, because the evaluator does not pass attribute references on to every operator.
        evaluator = ReferenceEvaluator(inline_local_functions(whole))
        return lambda feeds: evaluator.run(self.outputs, feeds)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> list[Any]:
        return list(self._run(dict(feeds)))


def _told_apart(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, without the names that several nodes share: ONNX allows these, ONNX Runtime does not."""
    counts = Counter(n.name for n in model.graph.node)
    if all(count == 1 or not name for name, count in counts.items()):
        return model
    apart = deepcopy(model)
    for node in apart.graph.node:
        if counts[node.name] > 1:
            node.ClearField("name")
    return apart


def _as_fed(value: np.ndarray) -> Any:
    """A graph input as ONNX Runtime takes it: NumPy has no float8 and no bfloat16 of its own."""
    import onnxruntime as ort

    if value.dtype not in UNKNOWN_TO_NUMPY.values():
        return ort.OrtValue.ortvalue_from_numpy(value)
    kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    bits = np.ascontiguousarray(value).view(f"u{value.itemsize}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)


def _as_made(value: Any, dtype: np.dtype | None) -> Any:
    """A graph output of ONNX Runtime, which gives no array of the types in UNKNOWN_TO_NUMPY."""
    if dtype is None:
        return value.numpy()
    shape = value.shape()
    data = ctypes.string_at(value.data_ptr(), math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


def unfused_runner(model: onnx.ModelProto, folder: Path) -> Runner:
    """An unfused model by ONNX Runtime if that can load it (bfloat16 convolutions and the newest opsets it cannot).

    Raises VerificationError when nothing here can run it.
    """
    try:
        return Runner(model, folder)
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        reason = " ".join(str(error).split())
    # Only for what ONNX Runtime lacks: the evaluator also runs invalid models, and some old operators wrongly.
    if any(text in reason for text in ("NOT_IMPLEMENTED", "under development")):
        with suppress(Exception):
            return Runner(model, folder, reference=True)
    kind = LacksOperator if _LACKS.search(reason) else VerificationError
    raise kind(f"the original does not run here ({reason}); nothing is proven, drop --verify")
