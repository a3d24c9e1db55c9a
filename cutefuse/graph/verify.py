"""Runs two ONNX models on the same seeded inputs and compares every output, with ONNX Runtime where it can."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.graph.read import TYPE_NAMES
from cutefuse.graph.store import load_model

# Sizes tried for axes without a size: (first axis, rows and columns of images, everything else).
FILLS = ((2, 64, 8), (1, 64, 8), (1, 128, 16), (1, 224, 16), (1, 32, 1), (1, 16, 1))
MAX_ELEMENTS = 1 << 30
MAX_PROBES = 64
INTEGER_MISMATCH = 1e-3  # share of integer outputs that may flip: an argmax between two equal scores is not an error


def seeded_inputs(
    model: onnx.ModelProto, fill: Sequence[int], shapes: Mapping[str, Sequence[int]], seed: int
) -> dict[str, np.ndarray]:
    """Random values for every graph input; an axis name has one size everywhere.

    Raises VerificationError for an input that is no tensor or too large, CutefuseError when `shapes` contradicts it.
    """
    rng = np.random.default_rng(seed)
    stored = {t.name for t in model.graph.initializer}
    sizes: dict[str, int] = {}
    inputs = {}
    for info in model.graph.input:
        if info.name in stored:
            continue
        kind = info.type.tensor_type
        if not info.type.HasField("tensor_type") or kind.elem_type not in TYPE_NAMES or not kind.HasField("shape"):
            raise VerificationError(f"input '{info.name}' is no tensor of known rank and type; nothing is proven")
        dims = []
        for axis, d in enumerate(kind.shape.dim):
            default = fill[0] if axis == 0 else fill[1] if len(kind.shape.dim) == 4 and axis >= 2 else fill[2]
            size = d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None
            dims.append(
                size if size is not None else sizes.setdefault(d.dim_param, default) if d.dim_param else default
            )
        if info.name in shapes:
            given = list(shapes[info.name])
            if len(given) != len(dims):
                raise CutefuseError(f"--input-shape gives '{info.name}' {len(given)} axes, it has {len(dims)}")
            dims = given
            sizes.update((d.dim_param, s) for d, s in zip(kind.shape.dim, dims, strict=True) if d.dim_param)
        if math.prod(dims) > MAX_ELEMENTS:
            raise VerificationError(f"input '{info.name}' has {math.prod(dims)} elements; give a smaller --input-shape")
        inputs[info.name] = _random(rng, dims, TYPE_NAMES[kind.elem_type])
    return inputs


def _random(rng: np.random.Generator, dims: Sequence[int], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.random(dims) < 0.5
    if "int" in dtype:
        return rng.integers(0, 2, dims).astype(dtype)
    return rng.standard_normal(dims).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


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
        # Beyond, sums and layouts are fused into convolutions, which fails on some valid graphs, the original's too.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return lambda feeds: session.run(self.outputs, feeds)

    def _with_reference(self, model: onnx.ModelProto, folder: Path) -> Any:
        from onnx.inliner import inline_local_functions
        from onnx.reference import ReferenceEvaluator

        whole = onnx.ModelProto()
        whole.CopyFrom(model)
        onnx.external_data_helper.load_external_data_for_model(whole, str(folder))
        # Inlined, because the evaluator does not pass attribute references on to every operator.
        evaluator = ReferenceEvaluator(inline_local_functions(whole))
        return lambda feeds: evaluator.run(self.outputs, feeds)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> list[Any]:
        return list(self._run(dict(feeds)))


def original_runner(model: onnx.ModelProto, folder: Path) -> Runner:
    """The original by ONNX Runtime if that can load it (bfloat16 convolutions and the newest opsets it cannot).

    Raises VerificationError when nothing here can run it.
    """
    try:
        return Runner(model, folder)
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        reason = " ".join(str(error).split())
    try:
        # Only for what ONNX Runtime lacks: the evaluator also runs invalid models, and some old operators wrongly.
        if any(text in reason for text in ("NOT_IMPLEMENTED", "under development")):
            return Runner(model, folder, reference=True)
        raise VerificationError
    except Exception:
        raise VerificationError(
            f"the original does not run here ({reason}); nothing is proven, drop --verify"
        ) from None


def compare(expected: Any, actual: Any, tolerance: float, same_type: bool = True) -> dict[str, Any]:
    """Figures of one tensor: errors relative to its largest absolute value, cosine, verdict."""
    a, b = np.asarray(expected), np.asarray(actual)
    if a.shape != b.shape or (same_type and a.dtype != b.dtype):
        return {"passed": False, "why": f"{b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"}
    if a.dtype.kind not in "fV" and a.dtype != ml_dtypes.bfloat16:
        wrong = float(np.mean(a != b)) if a.size else 0.0
        # int8 is a quantised number: where it was rounded from two neighbours, many values may be one step apart.
        steps = np.abs(a.astype(np.int64) - b.astype(np.int64)).max(initial=0) if a.dtype == np.int8 else np.inf
        near = steps <= tolerance * np.abs(a.astype(np.int64)).max(initial=0)
        return {"passed": bool(wrong <= INTEGER_MISMATCH or near), "mismatch_share": wrong}
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return {"passed": False, "why": "NaN or infinity appears in one of the two only"}
    a, b = a[finite], b[finite]
    scale = float(np.abs(a).max(initial=0.0))
    error = float(np.abs(a - b).max(initial=0.0))
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return {
        "passed": error <= tolerance * scale if scale else error == 0.0,
        "max_abs_error": error,
        "max_rel_error": error / scale if scale else error,
        "max_abs_value": scale,
        "cosine": float(a @ b / norm) if norm else 1.0,
        "tolerance": tolerance,
    }


def verify(
    original: Path, patched: onnx.ModelProto, folder: Path, tolerance: float, shapes: Mapping[str, Sequence[int]],
    seed: int = 0, probes: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:  # fmt: skip
    """Compare an ONNX file with its patched model (weights in `folder`), on all outputs and on `probes`.

    Probes are (site, tensor) in graph order: tensors of both models that become outputs for the comparison, at most
    MAX_PROBES of them. Rounding that the model itself blows up (a QuantizeLinear takes another step) is no fault of the
    patch: where the plain comparison fails, every site and output is computed again from the original's values of the
    probed tensors, and that verdict counts; the plain figures are then under "end_to_end".

    Raises VerificationError when the original cannot be run: without a truth nothing is proven.
    """
    model = load_model(original)
    outputs = [o.name for o in model.graph.output]
    shared = _made(model) & _made(patched)
    probes = [p for p in probes if p[1] in shared][:: -(-len(probes) // MAX_PROBES) or 1]
    for probed in (
        [t for _, t in probes if t not in outputs],
        [],
    ):  # a tensor whose type ONNX Runtime cannot infer only costs the probes
        try:
            runner = original_runner(_with_outputs(model, probed), original.parent)
            break
        except VerificationError:
            if not probed:
                raise
    expected, feeds = _truth(runner, model, shapes, seed)
    report: dict[str, Any] = {
        "seed": seed, "backend": runner.backend, "inputs": {k: list(v.shape) for k, v in feeds.items()}, "outputs": [],
        "sites": [],
    }  # fmt: skip
    try:
        actual = Runner(_with_outputs(patched, probed), folder, runner.reference)(feeds)
    except Exception as error:
        report.update(passed=False, why=f"the patched model does not run: {' '.join(str(error).split())}")
        return report
    names = [*outputs, *probed]
    results = _compare_all(expected, actual, tolerance, len(outputs))
    sites = {tensor for _, tensor in probes}
    if sites and not _passed(results):
        pairs = zip(names, expected, actual, strict=True)
        given = {n: np.asarray(a).astype(np.asarray(b).dtype) for n, a, b in pairs if n in sites}
        try:
            again = Runner(_with_given(_with_outputs(patched, probed), given), folder, runner.reference)(feeds | given)
            local = _compare_all(expected, again, tolerance, len(outputs))
        except Exception:  # ONNX Runtime's exceptions share no public base class; the plain verdict stands
            local = results
        if _passed(local):
            report["end_to_end"] = [{"name": name, **r} for name, r in zip(outputs, results, strict=False)]
            results = local
    of_tensor = dict(zip(names, results, strict=True))
    report["outputs"] = [{"name": name, **of_tensor[name]} for name in outputs]
    report["sites"] = [{"name": site, **of_tensor[t]} for site, t in probes if t in of_tensor]
    report["passed"] = _passed(results)
    if wrong := next((s["name"] for s in report["sites"] if not s["passed"]), None):
        report["first_wrong_site"] = wrong
    return report


def _compare_all(
    expected: Sequence[Any], actual: Sequence[Any], tolerance: float, outputs: int
) -> list[dict[str, Any]]:
    pairs = zip(expected, actual, strict=True)
    return [compare(a, b, tolerance, same_type=i < outputs) for i, (a, b) in enumerate(pairs)]


def _passed(results: Sequence[Mapping[str, Any]]) -> bool:
    return all(r["passed"] for r in results)


def _made(model: onnx.ModelProto) -> set[str]:
    return {o for n in model.graph.node for o in n.output if o}


def _with_outputs(model: onnx.ModelProto, probes: Sequence[str]) -> onnx.ModelProto:
    if not probes:
        return model
    probed = onnx.ModelProto()
    probed.CopyFrom(model)
    probed.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in probes)
    return probed


def _with_given(model: onnx.ModelProto, given: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model whose nodes read `given` instead of what it makes of these tensors; its outputs show what it makes."""
    forced = onnx.ModelProto()
    forced.CopyFrom(model)
    made = {t: f"{t}.made" for t in given}
    for node in forced.graph.node:
        node.output[:] = [made.get(o, o) for o in node.output]
    for output in forced.graph.output:
        output.name = made.get(output.name, output.name)
    for name, value in given.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        forced.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, value.shape))
    return forced


def _truth(
    runner: Runner, model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], seed: int
) -> tuple[list[Any], dict[str, np.ndarray]]:
    reason = ""
    for fill in FILLS:
        feeds = seeded_inputs(model, fill, shapes, seed)
        try:
            return runner(feeds), feeds
        except Exception as error:
            reason = " ".join(str(error).split())
    raise VerificationError(
        f"the original does not run on the inputs that were tried ({reason}); nothing is proven, give --input-shape"
    )
