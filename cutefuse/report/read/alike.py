"""Whether two engines differ by more than what was fused: the type they compute in, what ran them, and on what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cutefuse.engines.layers import layer_bytes
from cutefuse.report.read.engine import Engine

_COMPUTES = ("conv", "gemm", "plugin", "attention")
_LEAST_SHARE = 0.25  # of a mixed engine's work: more of the other's type than this, and both are called mixed
_SHORT = {"float16": "FP16", "bfloat16": "BF16"}
RUNNERS = {"onnxruntime": "ONNX Runtime", "torch": "PyTorch", "rtx": "TensorRT for RTX"}


def types(engine: Engine) -> dict[str, float]:
    """The types of convolutions and products, TF32 as FP32, with shares of the time, or without times of the bytes."""
    found: dict[str, float] = defaultdict(float)
    for layer in engine.layers:
        if layer.kind in _COMPUTES and layer.precision:
            weight = layer.time_us or 0.0 if engine.profiled else float(layer_bytes(layer))
            found["FP32" if layer.precision == "TF32" else layer.precision] += weight
    total = sum(found.values())
    return {t: w / total for t, w in sorted(found.items(), key=lambda item: -item[1])} if total else {}


def converted(report: Mapping[str, Any] | None) -> str:
    """The type that `patch --dtype` converted a model to; empty where it has the types of the one before it."""
    about = (report or {}).get("conversion")
    return str(about.get("dtype") or "") if isinstance(about, dict) and about.get("changed") else ""


def lowered(engine: Engine) -> str:
    """The type that an engine's model was converted to; empty where it was not."""
    dtype = converted(engine.patch)
    return _SHORT.get(dtype, dtype)


def unlike(first: Engine, last: Engine) -> str:
    """What besides fusing makes the engines differ, in words; empty where nothing is known to."""
    a, b = types(first), types(last)
    found = []
    if a and b and next(iter(a)) != next(iter(b)):
        one, other = next(iter(a)), next(iter(b))
        if a.get(other, 0.0) < _LEAST_SHARE or b.get(one, 0.0) < _LEAST_SHARE:
            found.append(f"the first computes in {one}, the last in {other}")
    patched = Path(str((last.patch or {}).get("input", {}).get("path", ""))).name
    if not found and lowered(last) and not lowered(first) and first.name == patched:
        found.append(f"the last's model was converted to {lowered(last)} by `patch --dtype`, the first's was not")
    if first.backend != last.backend:
        one, other = (RUNNERS.get(e.backend, "TensorRT") for e in (first, last))
        found.append(f"the first is of {one}, the last of {other}")
    else:
        boards = [str(e.device.get("Selected Device", "")) for e in (first, last)]
        if all(boards) and boards[0] != boards[1]:
            found.append(f"the first ran on {boards[0]}, the last on {boards[1]}")
    return "; ".join(found)
