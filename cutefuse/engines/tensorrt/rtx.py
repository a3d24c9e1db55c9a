"""TensorRT for RTX: NVIDIA's compiler, installed by pip, which builds engines on machines without a GPU.

Building runs in a process of its own (`rtx_worker`): the library takes one logger a process, and ends the process on
some faults. A record of the compiled layers comes out of its log, since no engine can be inspected without a GPU.
Running needs a GPU of `CAPABILITIES`, and makes the same calls as TensorRT's Python API; that part has not run yet.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cutefuse.engines.artifacts import Artifacts, concat_notes
from cutefuse.engines.cuda_memory import local_sm
from cutefuse.engines.inputs import shapes_text
from cutefuse.engines.layers import CompiledGraph, read_layers
from cutefuse.engines.records import write_build
from cutefuse.engines.tensorrt import api, trtexec
from cutefuse.engines.tensorrt.api import TARGET
from cutefuse.engines.tensorrt.rtx_log import layer_information
from cutefuse.errors import CutefuseError
from cutefuse.operators.layouts import RTX_ASSUMED, RTX_CAPABILITIES
from cutefuse.output import write_json

NAME = "TensorRT for RTX"
CAPABILITIES, DEFAULT_SM = RTX_CAPABILITIES, RTX_ASSUMED
_KNOWN = ", ".join(f"{sm / 10:.1f}" for sm in CAPABILITIES)
LIBRARIES, BINDINGS = "tensorrt_rtx_libs", "tensorrt_rtx_bindings"
_LIBRARY = "libtensorrt_rtx.so"  # by this name the ONNX parser opens what lies in the package as libtensorrt_rtx.so.1


def available() -> str | None:
    """Why TensorRT for RTX cannot build here, in one sentence; None where it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"{NAME} comes for x86-64 Linux, and this is {platform.machine()} {sys.platform}; use another --backend"
    missing = [name for name in (LIBRARIES, BINDINGS) if importlib.util.find_spec(name) is None]
    if missing:
        return f"{NAME} is not installed ({missing[0]} is missing); run `pip install 'cutefuse[rtx]'`"
    return None


def version() -> str:
    """Of the package that is installed; "" where none is."""
    try:
        return importlib.metadata.version("tensorrt-rtx-cu13-bindings")
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_sm(sm: int) -> int:
    """A compute capability (times 10) that can be built for. Raises CutefuseError for any other."""
    if sm not in CAPABILITIES:
        raise CutefuseError(
            f"{NAME} builds for compute capability {_KNOWN}, not for {sm / 10:.1f}; choose one of them with --sm or "
            "--gpu, or use another --backend"
        )
    return sm


def default_sm() -> int:
    """What is built for unless the user says so: this machine's GPU where it can be, else an Ada one."""
    own = local_sm()
    return own if own in CAPABILITIES else DEFAULT_SM


def compile_model(
    model_path: Path | str,
    sm: int = DEFAULT_SM,
    shapes: Mapping[str, Sequence[int]] | None = None,
    libraries: Sequence[Path] = (),
    timeout_s: float | None = None,
) -> CompiledGraph:
    """Compile an ONNX model and keep nothing but the record of its layers.

    Args:
        sm: compute capability * 10, one of CAPABILITIES. libraries: plugin libraries to load first.
        shapes: sizes of dynamic inputs by name; a dynamic axis of any other input is built for 1.
        timeout_s: seconds until the compiler is ended.
    Raises: CutefuseError where it is not installed, or where the parser or the builder refuses the model.
    """
    words = [f"{TARGET}={sm}", *([f"--shapes={shapes_text(shapes)}"] if shapes else [])]
    with tempfile.TemporaryDirectory(prefix="cutefuse-rtx-") as folder:
        log = Path(folder) / "build.log"
        try:
            return _compile(Path(model_path), log, None, words, libraries, timeout_s, "")[0]
        except CutefuseError as error:  # its log goes with the folder
            raise type(error)(str(error).replace(f"; the whole log is {log}", "")) from None


def build(
    model: Path, files: Artifacts, words: Sequence[str], libraries: Sequence[Path], timeout_s: float | None = None
) -> str:
    """Build an engine file; writes engine, log, layer information in trtexec's schema, and metadata.

    Returns what the compiler made of the model, in one line.
    """
    graph, information, version = _compile(
        model, files.build_log, files.engine, words, libraries, timeout_s, f"building {files.engine.name} with {NAME}"
    )
    write_json(files.graph, information)
    options = {
        "Precision": "strongly typed", "Target": f"compute capability {graph.sm / 10:.1f}",
        "Build time (s)": round(graph.seconds, 2), "Peak memory (MiB)": round(graph.peak_mib),
    }  # fmt: skip
    concats = concat_notes(files.build_log.read_text(encoding="utf-8", errors="replace"))
    write_build(files, model, options, backend="rtx", tensorrt_version=version, concats=concats)
    return (
        f"{NAME} for compute capability {graph.sm / 10:.1f}: {len(graph.layers)} layers; {graph.moved.text}; "
        f"built in {graph.seconds:.1f} s and {graph.peak_mib:.0f} MiB"
    )


def _compile(
    model: Path, log: Path, engine: Path | None, words: Sequence[str], libraries: Sequence[Path],
    timeout_s: float | None, title: str,
) -> tuple[CompiledGraph, dict[str, Any], str]:  # fmt: skip
    """The compiled graph, the layer information that it came from, and the version of the compiler."""
    if reason := available():
        raise CutefuseError(reason)
    options = options_of(words)
    if not model.is_file():
        raise CutefuseError(f"{model} does not exist; give an ONNX model")
    with tempfile.TemporaryDirectory(prefix="cutefuse-rtx-") as scratch:
        request, answer = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        work = {
            "model": str(model.resolve()), "engine": str(engine.resolve()) if engine else None, "options": options,
            "libraries": [str(Path(path).resolve()) for path in libraries], "answer": str(answer),
        }  # fmt: skip
        request.write_text(json.dumps(work), encoding="utf-8")
        command = [sys.executable, "-m", "cutefuse.engines.tensorrt.rtx_worker", str(request)]
        text = trtexec.run(command, log, timeout_s, title, NAME, cwd=scratch, env=_environment(Path(scratch)))
        try:
            result = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise CutefuseError(f"{NAME} ended without a result; the whole log is {log}") from None
    if "error" in result:
        raise CutefuseError(f"{result['error']}; the whole log is {log}")
    information = layer_information(text)
    if not information["Layers"]:
        raise CutefuseError(f"{NAME} {result['version']} wrote no layers into its log; the whole log is {log}")
    bindings = [(t["Name"], t["IOMode"].lower()) for t in information["I/O Tensors"]]
    graph = CompiledGraph(
        tuple(read_layers(information, log.name)),
        tuple(name for name, mode in bindings if mode == "input"),
        tuple(name for name, mode in bindings if mode == "output"),
        result["engine_bytes"], result["seconds"], result["peak_mib"], int(options[TARGET]),
    )  # fmt: skip
    return graph, information, result["version"]


def options_of(words: Sequence[str]) -> dict[str, str]:
    """trtexec's options that apply here, and `--sm` in any case. Raises CutefuseError for any other."""
    options = api.options_of(words)
    api.refuse_precisions(options, NAME)
    target = options.get(TARGET, str(default_sm()))
    if not target.isdecimal():
        raise CutefuseError(f"{TARGET}={target} is no compute capability; write {TARGET}=89 for 8.9")
    return {**options, TARGET: str(check_sm(int(target)))}


def _environment(folder: Path) -> dict[str, str]:
    """What the worker needs: our package, those of this process, and the library under the name that is asked for."""
    spec = importlib.util.find_spec(LIBRARIES)
    places = list(spec.submodule_search_locations or []) if spec else []
    found = next((p for place in places for p in sorted(Path(place).glob(f"{_LIBRARY}*"))), None)
    if found is None:
        raise CutefuseError(f"the package {LIBRARIES} holds no {_LIBRARY}; install it again")
    (folder / _LIBRARY).symlink_to(found)
    ours = str(Path(__file__).resolve().parents[3])
    modules = [ours, *(p for p in sys.path if p and p != ours and os.path.isabs(p))]
    libraries = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(modules), "LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def cannot_run() -> str | None:
    """Why engines cannot be timed here, in one sentence; None where they can."""
    if reason := available():
        return reason
    sm = local_sm()
    if sm in CAPABILITIES:
        return None
    here = f"this one has {sm / 10:.1f}" if sm else "none is here"
    return f"{NAME} builds engines anywhere, but times them on a GPU of compute capability {_KNOWN} alone, and {here}"


def module() -> Any:
    """The Python package that runs engines. Raises CutefuseError where `cannot_run`."""
    if reason := cannot_run():
        raise CutefuseError(f"{reason}; take such a machine, or another --backend")
    return importlib.import_module(BINDINGS)
