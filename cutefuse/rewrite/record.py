"""patch.json: what was done to a model and why, and where that lies."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cutefuse
from cutefuse.errors import CutefuseError
from cutefuse.match.explain import by_cause
from cutefuse.match.site import EXCLUDED, FUSED, LEFT_OUT, MERGED, REFUSED
from cutefuse.operators.layouts import NAMES, rule_of
from cutefuse.output import indented
from cutefuse.rewrite.passes.plan import total
from cutefuse.rewrite.state import Conversion, State

SCHEMA = 1


def report_of(state: State) -> dict[str, Any]:
    """What patch.json holds of a state that went through the passes, written or not; docs/patch.md names the fields."""
    options, engine, device = state.options, state.engine, state.device
    return {
        "schema": SCHEMA,
        "tool": {"name": "cutefuse", "version": cutefuse.__version__},
        "input": {"path": str(state.source), "sha256": state.sha256},
        "output": {"path": str(state.output)},
        "opset": state.graph.opset,
        "sm": options.sm,
        "layout": {
            "name": NAMES[state.layout], "asked": options.layout, "why": rule_of(options.engine, options.sm).why,
        },
        "conversion": _conversion(state.conversion),
        "unused_options": state.unused_options,
        "clean": state.cleaning,
        "prediction": {
            "fuses_tanh": state.fuses_tanh, "engine": engine.title, "engine_assumed": engine.assumed,
            "gpu": device.name, "gpu_assumed": device.assumed, "gpu_rates": device.peaks.device,
            "gpu_others": list(device.others),
        },
        "input_shapes": {name: list(dims) for name, dims in options.shapes.items()},
        "branches": [asdict(b) for b in state.branches],
        "silu": {
            "outside": len(state.silus), "tanh": [s.name for s in state.rewritten],
            "left": {s.name: s.left for s in state.silus if s.left} if options.tanh_silu else {},
        },
        "known_faults": state.known_faults,
        "sites": [s.as_json() for s in state.sites],
        "verify": state.proof,
        "assumed_shapes": state.assumed,
        "open_inputs": state.open_inputs,
        "summary": _summary(state),
        # Left out where the engine's compiler was not asked.
        **({"compiled": options.compiler_said} if options.compiler_said else {}),
    }  # fmt: skip


def text_of(report: Mapping[str, Any]) -> str:
    """A report as patch.json holds it, escaped to ASCII: a path may hold bytes that are no UTF-8."""
    return indented(report) + "\n"


def report_path(output: Path) -> Path:
    """model.cutefuse.onnx and model.onnx -> model.patch.json, beside it; where that is the report of model.onnx,
    model.cutefuse.onnx -> model.cutefuse.patch.json, which readers look for first. Raises CutefuseError where both are
    reports of other models."""
    name = output.name.removesuffix(".onnx")
    path, other = output, ""
    for stem in dict.fromkeys((name.removesuffix(".cutefuse"), name)):
        path = output.with_name(f"{stem}.patch.json")
        if (other := _reported_there(path)) in ("", output.name):
            return path
    raise CutefuseError(f"{path} is the report of {other}; choose another -o, or move that report")


def _reported_there(report: Path) -> str:
    """The file name of the model that a patch report speaks of; empty where there is none."""
    try:
        return Path(json.loads(report.read_text(encoding="utf-8"))["output"]["path"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _conversion(done: Conversion | None) -> dict[str, Any] | None:
    counted = ("casts", "cast_bytes")  # of sites alone: a whole model's Casts are the converter's
    return {k: v for k, v in asdict(done).items() if done.scope == "sites" or k not in counted} if done else None


def _summary(state: State) -> dict[str, Any]:
    sites, before, after = state.sites, state.before, state.after
    status = Counter(s.status for s in sites)
    saved, cast = total([s.bytes_saved for s in state.fused]), state.conversion.cast_bytes if state.conversion else 0
    return {
        "candidates": len(sites),
        "fused": status[FUSED],
        "merged": status[MERGED],
        "refused": status[REFUSED],
        "refused_by": by_cause(s.reason for s in sites if s.status == REFUSED),
        "excluded": status[EXCLUDED],
        "left_out": status[LEFT_OUT],
        "gain_us": state.saving.gain_us,
        "plain_us": state.saving.plain_us,
        "gain_unknown": sum(s.gain_us is None for s in state.fused),
        "nodes_before": sum(before.values()),
        "nodes_after": sum(after.values()),
        "ops_before": dict(sorted(before.items())),
        "ops_after": dict(sorted(after.items())),
        "bytes_saved": None if saved is None or cast is None else saved - cast,
        "seconds": round(time.perf_counter() - state.started, 3),
    }
