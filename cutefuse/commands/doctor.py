"""`cutefuse doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cutefuse
from cutefuse import kernels
from cutefuse.engines.cuda_memory import local_gpus, local_sm
from cutefuse.engines.plugins import read_model
from cutefuse.engines.tensorrt import rtx, trtexec
from cutefuse.errors import CutefuseError, command_line
from cutefuse.graph import faults
from cutefuse.graph.read import Graph
from cutefuse.graph.store import load_model
from cutefuse.operators.layouts import RTX, TENSORRT, strange
from cutefuse.output import json_alone, parsed
from cutefuse.roofline.peaks import by_name
from cutefuse.table import some

OK, OPTIONAL, WARNING, MISSING = "ok", "optional", "warning", "missing"


@dataclass(frozen=True)
class Finding:
    """One check. `advice` says what to do when something is missing, "" when there is nothing to do."""

    name: str
    status: str  # ok; optional: cutefuse works without it; warning; missing: something the user wants will fail
    text: str
    advice: str = ""


def check_library() -> list[Finding]:
    """The plugin library: is it there, does it load, was it built with kernels and for which architectures."""
    try:
        path, facts = cutefuse.plugin_path(), kernels.describe()
    except (CutefuseError, OSError, AttributeError) as error:
        advice = "run `make setup`, or `pip install` a wheel built on a Linux whose glibc is not newer than this one's"
        return [Finding("library", MISSING, str(error), advice)]
    found = [Finding("library", OK, f"{path}, version {facts['version']}")]
    if facts["version"] != cutefuse.__version__:
        advice = "build the library again: make setup"
        found.append(Finding("library version", MISSING, f"package {cutefuse.__version__}", advice))
    if facts["cuda"]:
        operators = ", ".join(op["name"] for op in facts["ops"])
        found.append(Finding("kernels", OK, f"{operators}; {kernels.code_inside()}"))
    else:
        advice = "install nvcc 12.4 or newer and build again: make setup"
        found.append(Finding("kernels", OPTIONAL, "without CUDA: rewriting and reports work, kernels do not", advice))
    return found


def check_gpu() -> list[Finding]:
    """Driver and devices, through the driver's own library; and whether the kernels were built for them."""
    found = local_gpus()
    if found is None:
        return [Finding("GPU", OPTIONAL, "no NVIDIA driver", "engines are built and run on a machine that has one")]
    gpus, version = found
    if not gpus:
        return [Finding("GPU", OPTIONAL, "the driver reports no device", "check nvidia-smi")]
    driver = judge_driver(version // 1000, version % 1000 // 10)
    return [driver, *(judge_device(gpu.name, *gpu.capability) for gpu in gpus)]


def local_gpu() -> str:
    """The name of the first GPU of this machine where its peak rates are known; "" otherwise."""
    gpus, _ = local_gpus() or ([], 0)
    return gpus[0].name if gpus and by_name(gpus[0].name) else ""


def _library() -> dict[str, Any]:
    """What the plugin library says of itself; empty where there is none that loads."""
    try:
        return kernels.describe()
    except (CutefuseError, OSError, AttributeError):
        return {}


def judge_driver(major: int, minor: int) -> Finding:
    """Whether the driver, by the CUDA version that it reports, is new enough for the CUDA runtime in the library."""
    label = f"CUDA {major}.{minor}"
    inside = str(_library().get("cuda_version", ""))
    if inside and major < int(inside.split(".")[0]):
        advice = f"update the driver, or build the library with nvcc {major}.{minor} or older: make setup"
        return Finding("driver", MISSING, f"{label}, older than CUDA {inside} that the kernels were built with", advice)
    return Finding("driver", OK, label)


def judge_device(name: str, major: int, minor: int) -> Finding:
    """Whether machine code of the library runs on a device, as the library itself judges."""
    label, capability = f"{name}, compute capability {major}.{minor}", 10 * major + minor
    library = _library()
    if not library:
        return Finding("GPU", MISSING, f"{label}, and no library", "run `make setup`")
    reason = kernels.reject_device(capability)
    if reason:
        return Finding("GPU", MISSING, label, reason)
    if not library["cuda"]:
        return Finding("GPU", MISSING, f"{label}, and no kernels", f"build them: make setup ARCHS={capability}")
    how = {a["sm"]: a["code"] for a in library["architectures"]}.get(capability, "PTX")
    slow = ", which the driver compiles when a kernel is first used" if how == "PTX" else ""
    return Finding("GPU", OK, f"{label}: {how}{slow}")


def check_tensorrt() -> list[Finding]:
    """trtexec, the Python package and TensorRT for RTX: each builds engines."""
    found = []
    path = trtexec.find()
    if path is None:
        advice = "install TensorRT's tar or deb, or set $TRTEXEC; without it ONNX Runtime is the embedded engine"
        found.append(Finding("trtexec", OPTIONAL, "not on PATH and not in $TRTEXEC", advice))
    else:
        try:
            found.append(Finding("trtexec", OK, f"{path}, TensorRT {trtexec.inspect(path).version_text}"))
        except CutefuseError as error:
            found.append(Finding("trtexec", MISSING, str(error), "check that it starts: trtexec --help"))
    found.append(check_package("tensorrt", "pip install tensorrt (builds engines from Python without trtexec)"))
    reason = rtx.available()
    text = f"{rtx.version()}: builds engines, {'which run on this GPU' if not rtx.cannot_run() else 'runs none here'}"
    found.append(Finding(rtx.NAME, OPTIONAL, *reason.split("; ")) if reason else Finding(rtx.NAME, OK, text))
    return found


def tensorrt_versions() -> list[tuple[int, ...]]:
    """The versions of TensorRT on this machine: of trtexec and of the Python package."""
    texts = []
    with contextlib.suppress(CutefuseError):
        texts += [trtexec.inspect(path).version_text] if (path := trtexec.find()) else []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        texts.append(importlib.metadata.version("tensorrt"))
    return sorted({tuple(int(part) for part in re.findall(r"\d+", text)[:2]) for text in texts})


def check_faults(model: Path | None, versions: list[tuple[int, ...]]) -> list[Finding]:
    """Reported faults of TensorRT: of the versions here, else of any; with a model, those that it meets."""
    graph = Graph(load_model(model), model.parent) if model else None
    found = []
    for fault in faults.FAULTS:
        nodes = fault.nodes(graph) if graph is not None else []
        if (versions and not any(map(fault.concerns, versions))) or (not nodes and (graph is not None or not versions)):
            continue
        where = f"; here {some(nodes, 3)}" if nodes else ""
        text = f"{fault.title} (reported for TensorRT {fault.versions}: {fault.source}){where}"
        advice = f"{fault.advice}; compare outputs: cutefuse accuracy engine model.onnx"
        found.append(Finding("TensorRT fault", WARNING, text, advice))
    return found


def check_layout(model: Path) -> list[Finding]:
    """Whether the engines of this machine take the layout that a model was patched for."""
    found = read_model(model).layouts
    engines = [TENSORRT] if tensorrt_versions() else []
    engines += [RTX] if rtx.available() is None else []
    costs = list(filter(None, (strange(found, engine, local_sm()) for engine in engines)))
    if costs or not found:
        return [Finding("layout", WARNING, cost) for cost in costs]
    return [Finding("layout", OK, f"the model was patched for layout {' and '.join(sorted(found))}")]


def check_package(name: str, advice: str) -> Finding:
    """A Python package by its distribution, without importing it."""
    try:
        return Finding(name, OK, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, OPTIONAL, "not installed", advice)


def check_program(name: str, advice: str) -> Finding:
    """A program on PATH and the last line of its version message."""
    path = shutil.which(name)
    if path is None:
        return Finding(name, OPTIONAL, "not on PATH", advice)
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, MISSING, f"{path} does not start ({error})", advice)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return Finding(name, OK, lines[-1].strip() if lines else path)


def findings(model: Path | None = None) -> list[Finding]:
    """All checks, in the order in which a deployment needs them; with a model, what of it reported faults concern."""
    found = [Finding("Python", OK, f"{platform.python_version()} on {platform.platform()}")]
    found += check_library() + check_gpu() + check_tensorrt()
    found += check_faults(model, tensorrt_versions())
    found += check_layout(model) if model else []
    return [
        *found,
        check_program("nvcc", "needed to build kernels only"),
        check_program("ncu", "part of the CUDA toolkit; needed by `cutefuse profile-kernels` only"),
        check_program("nsys", "Nsight Systems; used by `cutefuse profile-kernels --engine` where it is"),
        check_package("onnx", "pip install onnx"),
        check_package("onnxruntime", "pip install onnxruntime (for --verify, and the embedded engine on the CPU)"),
        check_package("torch", "pip install torch (the embedded engine on a GPU, cutefuse.torch, profile-torch)"),
        check_package("polygraphy", "pip install polygraphy (comparisons of engines)"),
    ]


@command_line
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cutefuse doctor", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?",
                        help="ONNX model; its nodes are named that reported faults of TensorRT concern")  # fmt: skip
    args = parsed(parser, argv)
    with json_alone(args.json) as show:
        found = findings(args.model)
        show([asdict(f) for f in found])
    if not args.json:
        width = max(len(f.name) for f in found)
        for f in found:
            advice = f"\n{'':<{width + 11}}-> {f.advice}" if f.status != OK and f.advice else ""
            print(f"{f.status:<9} {f.name:<{width}} {f.text}{advice}")
    return int(any(f.status == MISSING for f in found))
