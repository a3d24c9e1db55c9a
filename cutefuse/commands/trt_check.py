"""`cutefuse trt-check`: what only a machine with TensorRT, or a GPU that TensorRT for RTX runs on, can show, in one
file to attach to an issue.

It loads the plugin library in every way that TensorRT offers, builds models plain and patched, compares what
both engines compute with ONNX Runtime, and times them. Writes trt_check.json and trt_check.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from cutefuse import plugin_path
from cutefuse.commands import doctor
from cutefuse.engines import build as engine
from cutefuse.engines.artifacts import Artifacts, read_json
from cutefuse.engines.cuda_memory import local_sm
from cutefuse.engines.inputs import shapes_text
from cutefuse.engines.layers import moved, read_layers
from cutefuse.engines.onnxruntime.run import seeded_inputs
from cutefuse.engines.tensorrt import rtx, trtexec
from cutefuse.engines.tensorrt.api import Session
from cutefuse.errors import CutefuseError, command_line
from cutefuse.graph.store import load_model
from cutefuse.match.site import FUSED
from cutefuse.operators.layouts import RTX, engine_of_backend
from cutefuse.output import json_alone, make_folder, parsed, write_json, write_text
from cutefuse.rewrite.patch import Options, patch

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_TIMEOUT_S = 900.0  # of a command
PROBE = "CuteConcatConv2Relu"
# One rounding of the type that the products go through; TF32 and float16 keep 10 bits, bfloat16 keeps 7.
EPSILON = {"float32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 2.0**-7}

LOAD_LIBRARY = """
import sys, tensorrt as trt
registry = trt.get_plugin_registry()
assert registry.load_library(sys.argv[1]) is not None, "load_library returned None"
assert registry.get_creator(sys.argv[2], "1", "cutefuse") is not None, f"{sys.argv[2]} is not in the registry"
"""
SELF_REGISTER = """
import ctypes, sys, tensorrt as trt
ctypes.CDLL(sys.argv[1])
found = trt.get_plugin_registry().get_creator(sys.argv[2], "1", "cutefuse")
assert found is not None, f"{sys.argv[2]} is not in the registry"
"""


def backend_here() -> str:
    """The back end that is checked: TensorRT where it is, or TensorRT for RTX where a GPU of its own is.

    Raises CutefuseError where neither is.
    """
    if trtexec.find() or importlib.util.find_spec("tensorrt"):
        return engine.choose_backend("auto")
    if reason := rtx.cannot_run():
        raise CutefuseError(f"no TensorRT was found on this machine; install it and put trtexec on PATH. {reason}")
    return RTX


@dataclass
class Check:
    """One question and its answer; `text` says what was seen."""

    name: str
    status: str
    text: str
    numbers: dict[str, float] = field(default_factory=dict)


def attempt(name: str, body: Callable[[], tuple[str, dict[str, float]]]) -> Check:
    """Run one check; whatever it raises becomes a failed check, so that the others still run."""
    try:
        text, numbers = body()
        return Check(name, PASSED, text, numbers)
    except CutefuseError as error:
        return Check(name, FAILED, str(error))
    except Exception as error:  # a report that names an unexpected failure is worth more than a traceback
        return Check(name, FAILED, f"{type(error).__name__}: {error}")


def run_text(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """Output of a command. Raises CutefuseError with its last lines when it fails."""
    try:
        where = {**os.environ, **(environment or {})}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S, env=where)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CutefuseError(f"{command[0]} did not run: {error}") from None
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        last = " / ".join(text.splitlines()[-6:])
        raise CutefuseError(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return text


def facts() -> dict[str, str]:
    """The machine: what `cutefuse doctor` finds of it, and the GPU's driver and clocks."""
    found = {f.name: f.text for f in doctor.findings() if f.status == doctor.OK}
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm", "--format=csv,noheader"]
        found["GPU"] = run_text(query).strip()
    except CutefuseError as error:
        found["GPU"] = f"unknown ({error})"
    return found


def loading_checks(smallest: Path) -> list[Check]:
    """Every documented way to load the library, each in a process of its own."""
    register = str(plugin_path("libcutefuse_register.so"))
    commands: dict[str, list[str]] = {}
    load, by_trtexec = "Python load_library", "trtexec --staticPlugins"
    if importlib.util.find_spec("tensorrt"):
        commands[load] = _in_python(LOAD_LIBRARY, plugin_path())
        commands["Python ctypes with self-registration"] = _in_python(SELF_REGISTER, register)
    elif backend_here() == RTX:
        commands[load] = _in_python(LOAD_LIBRARY.replace("tensorrt as", f"{rtx.BINDINGS} as"), plugin_path())
    if tool := trtexec.find():
        commands[by_trtexec] = [tool, f"--onnx={smallest}", "--skipInference", f"--staticPlugins={register}"]
    lacking = {load: "the Python package tensorrt is not installed", by_trtexec: "trtexec was not found"}
    checks = [attempt(name, functools.partial(_quietly, command)) for name, command in commands.items()]
    checks += [Check(name, SKIPPED, why) for name, why in lacking.items() if name not in commands]
    return [*checks, _polygraphy(smallest, register)]


def _in_python(script: str, library: str | Path) -> list[str]:
    return [sys.executable, "-c", script, str(library), PROBE]


def _quietly(command: list[str], environment: Mapping[str, str] | None = None) -> tuple[str, dict[str, float]]:
    run_text(command, environment)
    return shlex.join([part for part in command if "\n" not in part]), {}


def _polygraphy(model: Path, register: str) -> Check:
    name = "polygraphy --plugins"
    if not (importlib.util.find_spec("polygraphy") and importlib.util.find_spec("tensorrt")):
        return Check(name, SKIPPED, "polygraphy and the Python package tensorrt are not both installed")

    def body() -> tuple[str, dict[str, float]]:
        # Polygraphy loads plugin libraries before TensorRT, which therefore must be there from the start.
        script = "import tensorrt; print([l.split()[-1] for l in open('/proc/self/maps') if 'libnvinfer.so' in l][0])"
        library = run_text([sys.executable, "-c", script]).split()[-1]
        command = [sys.executable, "-m", "polygraphy", "run", str(model), "--trt", f"--plugins={register}"]
        return _quietly(command, {"LD_PRELOAD": library})

    return attempt(name, body)


def patched_twin(plain: Path, outdir: Path) -> tuple[Path, str]:
    """The patched model and the type of its fused nodes. Raises CutefuseError when ONNX Runtime sees a difference."""
    patched = outdir / f"{plain.name.removesuffix('.onnx')}.cutefuse.onnx"
    kind = engine_of_backend(backend_here())
    result = patch(plain, patched, Options(all_sites=True, verify=True, sm=local_sm(), engine=kind))
    if result.exit_code:
        raise CutefuseError(f"{plain.name} could not be patched (exit code {result.exit_code}); see its patch.json")
    return patched, next(s.match.call.outputs[0].dtype for s in result.sites if s.status == FUSED and s.match)


def infer(
    files: Artifacts, feed: Mapping[str, np.ndarray], plugins: list[Path], options: list[str], outdir: Path
) -> dict[str, np.ndarray]:
    """Outputs of an engine, through trtexec or, where that is missing, TensorRT's Python API."""
    tool = trtexec.find()
    if not tool:  # of TensorRT for RTX there is none
        return _infer_with_python(files, feed, plugins, options)
    words = []
    for name, array in feed.items():
        raw = outdir / f"{name}.raw"
        raw.write_bytes(np.ascontiguousarray(array).tobytes())
        words.append(f"{name}:{raw}")
    out = outdir / "output.json"
    command = [tool, f"--loadEngine={files.engine}", *options, f"--loadInputs={','.join(words)}"]
    command += [f"--exportOutput={out}", "--iterations=1", "--duration=0", "--warmUp=0"]
    command += [f"--dynamicPlugins={p}" for p in plugins]
    run_text(command)
    return {
        entry["name"]: np.array(entry["values"], np.float64).reshape([int(d) for d in entry["dimensions"].split("x")])
        for entry in json.loads(out.read_text(encoding="utf-8"))
    }


def _infer_with_python(
    files: Artifacts, feed: Mapping[str, np.ndarray], plugins: list[Path], options: list[str]
) -> dict[str, np.ndarray]:
    trt = rtx.module() if backend_here() == RTX else None
    with contextlib.closing(Session(files.engine, options, plugins, trt=trt)) as session:
        return {name: array.astype(np.float64) for name, array in session.outputs(feed).items()}


def model_check(plain: Path, outdir: Path) -> Check:
    """Build, run and time one model plain and patched."""

    def body() -> tuple[str, dict[str, float]]:
        how = engine.How(backend_here())
        patched, dtype = patched_twin(plain, outdir)
        session = onnxruntime.InferenceSession(str(plain), providers=["CPUExecutionProvider"])
        feed = seeded_inputs(load_model(plain), {})
        truth = dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))
        shapes = [f"--shapes={shapes_text({name: array.shape for name, array in feed.items()})}"]
        options = shapes if any(not isinstance(d, int) for i in session.get_inputs() for d in i.shape) else []
        numbers: dict[str, float] = {}
        for kind, model, plugins in (("plain", plain, []), ("patched", patched, [plugin_path()])):
            files = engine.build(model, outdir, options, how)
            engine.profile(files.engine, outdir, options, how)
            sums = moved(read_layers(read_json(files.graph), files.graph.name))
            numbers |= {f"{kind}_copies": sums.copies, f"{kind}_copied_mb": sums.copy_bytes / 1e6}
            times = json.loads(files.timing.read_text(encoding="utf-8"))
            numbers[f"{kind}_us"] = 1000 * statistics.median(t["computeMs"] for t in times)
            numbers[f"{kind}_error"] = worst_error(truth, infer(files, feed, plugins, options, outdir))
        numbers["speedup"] = numbers["plain_us"] / numbers["patched_us"]
        allowed = 2 * numbers["plain_error"] + EPSILON[dtype]
        if not numbers["patched_error"] <= allowed:
            raise CutefuseError(
                f"the patched engine's error is {numbers['patched_error']:.3g} of the largest output, "
                f"{allowed:.3g} is allowed (plain engine: {numbers['plain_error']:.3g})"
            )
        return (
            f"{numbers['plain_us']:.1f} us plain, {numbers['patched_us']:.1f} us patched ({numbers['speedup']:.2f}x), "
            f"copies {numbers['plain_copies']:.0f} ({numbers['plain_copied_mb']:.1f} MB) plain, "
            f"{numbers['patched_copies']:.0f} ({numbers['patched_copied_mb']:.1f} MB) patched, "
            f"error {numbers['plain_error']:.2g} plain, {numbers['patched_error']:.2g} patched"
        ), numbers

    return attempt(plain.stem, body)


def worst_error(truth: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> float:
    """Largest difference, relative to each output's largest value.

    It is infinite when an output is missing or not finite, in `outputs` or in the truth: NaN would compare as no error.
    """
    worst = 0.0
    for name, expected in truth.items():
        got = outputs.get(name)
        if got is None or got.size != expected.size or not np.isfinite(got).all():
            return math.inf
        wide = expected.astype(np.float64)
        if not np.isfinite(wide).all():
            return math.inf
        scale = float(np.abs(wide).max()) or 1.0
        worst = max(worst, float(np.abs(got.reshape(wide.shape) - wide).max()) / scale)
    return worst


def markdown(found: Mapping[str, str], checks: list[Check]) -> str:
    lines = ["# cutefuse on TensorRT", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in found.items()), ""]
    lines += ["| check | result | |", "|---|---|---|"]
    lines += [f"| {c.name} | {c.status} | {c.text.replace('|', '/')} |" for c in checks]
    failed = sum(c.status == FAILED for c in checks)
    skipped = sum(c.status == SKIPPED for c in checks)
    lines += ["", f"{len(checks) - failed - skipped} passed, {failed} failed, {skipped} skipped"]
    return "\n".join(lines) + "\n"


def check(models: Sequence[Path], outdir: Path) -> dict[str, Any]:
    """Run every check, print and write the report; returns what trt_check.json holds.

    Raises CutefuseError without TensorRT.
    """
    backend_here()  # before anything is written
    make_folder(outdir)
    found = facts()
    checks = loading_checks(patched_twin(models[0], outdir)[0])
    for model in models:
        checks.append(model_check(model, outdir))
        print(f"{checks[-1].name}: {checks[-1].status}: {checks[-1].text}", flush=True)
    report = {"schema": 1, "facts": found, "checks": [asdict(c) for c in checks]}
    write_json(outdir / "trt_check.json", report)
    text = markdown(found, checks)
    write_text(outdir / "trt_check.md", text)
    print(f"\n{text}\nattach {outdir / 'trt_check.json'} to an issue; it holds all of this")
    return report


def exit_code(report: Mapping[str, Any]) -> int:
    return 1 if any(c["status"] == FAILED for c in report["checks"]) else 0


@command_line
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cutefuse trt-check", description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="ONNX models; `make trt-check` in a clone brings its own")
    parser.add_argument("-o", "--outdir", type=Path, default=Path("trt_check"), help="folder for models and report")
    arguments = parsed(parser, argv)
    with json_alone(arguments.json) as show:
        report = check(arguments.models, arguments.outdir)
        show(report)
    return exit_code(report)
