"""Build and profile engines: trtexec, TensorRT's Python API, TensorRT for RTX, PyTorch, or ONNX Runtime.

Every function is path -> path and writes the files that trtexec and NVIDIA's engine explorer write (see `files`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cutefuse.engines import plugins
from cutefuse.engines.artifacts import Artifacts, build_metadata, profile_metadata, read_json, whole_or_nothing
from cutefuse.engines.layers import read_layers
from cutefuse.engines.tensorrt import api, rtx, trtexec
from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.output import make_folder, write_json

BACKENDS = ("auto", "trtexec", "tensorrt", "torch", "rtx", "onnxruntime")
BUILDERS = BACKENDS[:-1]  # ONNX Runtime has no engine file
NAMES = {"tensorrt": "TensorRT's Python API", "rtx": rtx.NAME, "torch": "PyTorch", "onnxruntime": "ONNX Runtime"}
NO_TENSORRT = (
    "no TensorRT was found: neither trtexec ($TRTEXEC, PATH) nor the Python package; install NVIDIA's TensorRT "
    "(a container or .deb has trtexec; `pip install tensorrt` has the Python package; TensorRT for RTX, "
    "`pip install 'cutefuse[rtx]'`, builds without a GPU)"
)


def choose_backend(backend: str, allow_onnxruntime: bool = False) -> str:
    """The engine that `auto` means on this machine. Raises CutefuseError when the wanted one is missing."""
    if backend == "onnxruntime" and not allow_onnxruntime:
        raise CutefuseError(
            "onnxruntime builds no engine file; use `cutefuse process --backend onnxruntime` to profile with it"
        )
    if backend != "auto":
        if reason := _missing(backend):
            raise CutefuseError(reason)
        return backend
    for kind in ("trtexec", "tensorrt", "torch", "rtx", *(["onnxruntime"] if allow_onnxruntime else [])):
        if not _missing(kind) and (kind != "torch" or torch_sees_gpu()):
            return kind
    on_cpu = ", or `pip install onnxruntime` to profile on the CPU" if allow_onnxruntime else ""
    raise CutefuseError(NO_TENSORRT + on_cpu)


def _missing(kind: str) -> str | None:
    """Why a back end is not here, in one sentence; None where it is."""
    if kind == "trtexec":
        lacks = "trtexec was not found; put it on PATH or set $TRTEXEC, or use another --backend"
        return None if trtexec.find() else lacks
    if kind == "rtx":
        return rtx.available()
    name = {"torch": "PyTorch", "tensorrt": "the Python package tensorrt", "onnxruntime": "ONNX Runtime"}[kind]
    lacks = f"{name} is not installed; run `pip install {kind}`, or use another --backend"
    return None if importlib.util.find_spec(kind) else lacks


def torch_sees_gpu() -> bool:
    """Whether PyTorch is here and finds a GPU. It is imported only where there is a driver: that takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    if not importlib.util.find_spec("torch"):
        return False
    import torch

    return bool(torch.cuda.is_available())


@dataclass(frozen=True)
class How:
    """How an engine is built and run.

    use_plugins: False builds fused nodes from their function bodies, and loads no plugin library. timeout_s: seconds
    until a process that builds is ended. dry_run: print the command, write nothing. assume_version: TensorRT's, of a
    dry run on a machine without trtexec.
    """

    backend: str = "auto"
    use_plugins: bool = True
    timeout_s: float | None = None
    dry_run: bool = False
    assume_version: str | None = None

    def kind(self, allow_onnxruntime: bool = False) -> str:
        """The back end that is meant, as `choose_backend` finds it."""
        if self.dry_run and self.assume_version:
            return "trtexec"
        return choose_backend(self.backend, allow_onnxruntime)

    def trtexec(self) -> trtexec.Trtexec:
        """The trtexec of this machine, or one of the version that a dry run assumes."""
        if self.dry_run and self.assume_version:
            return trtexec.assumed(self.assume_version)
        return trtexec.inspect(trtexec.find() or "trtexec")


def build(model: Path, outdir: Path, options: Sequence[str] = (), how: How = How()) -> Artifacts:
    """Build an engine from an ONNX model and count its plugin layers against the patch report.

    Args:
        model: ONNX file. outdir: folder for engine, graph JSON, log, metadata and timing cache; made when missing.
        options: further trtexec options, with their dashes.
    Raises: CutefuseError (exit 2); VerificationError (exit 1) when fewer fused nodes run as plugins than were patched.
    """
    facts, words, files, kind = plugins.read_model(model), list(options), Artifacts.of(model, outdir), how.kind()
    sites = plugins.fused_sites(model, facts) if how.use_plugins and kind != "torch" else {}
    if how.dry_run and kind != "trtexec":
        print(f"# {NAMES[kind]} would build {files.engine} from {model}; there is no command to print")
        return files
    given = [Path(w.partition("=")[2]) for w in words if w.startswith(("--dynamicPlugins=", "--staticPlugins="))]
    libraries = [] if given else plugins.libraries(bool(sites))
    command: list[str] = []
    if kind == "trtexec":
        tool = how.trtexec()
        plugins.check_version(facts, sites, tool.version)
        command = trtexec.build_command(tool, model, files, words, libraries, facts.low_precision)
        print(shlex.join(command))
        if how.dry_run:
            return files
    make_folder(outdir)
    with whole_or_nothing(files.engine, files.graph, files.build_metadata):
        if kind == "trtexec":
            title = f"building {files.engine.name} with TensorRT {tool.version_text}"
            log = trtexec.run(command, files.build_log, how.timeout_s, title, makes=files.engine)
            write_json(files.build_metadata, {**build_metadata(log), "command": shlex.join(command)})
        elif kind == "torch":
            from cutefuse.engines.pytorch import files as torch_files

            torch_files.build(model, files, words, how.use_plugins)
        elif kind == "rtx":
            print(rtx.build(model, files, words, libraries or given, how.timeout_s))
        else:
            api.build(model, files, words, libraries or given, facts.low_precision)
        _report_plugins(files, sites)
    plugins.keep_report(model, outdir)
    return files


def profile(engine: Path, outdir: Path, options: Sequence[str] = (), how: How = How()) -> Artifacts:
    """Time an engine file as a whole and layer by layer: profile, timing, graph and metadata JSON in `outdir`.

    Args:
        engine: the file that `build` wrote; of PyTorch and ONNX Runtime an ONNX model. outdir: made when missing.
        options: as of `build`.
    Raises: CutefuseError (exit 2) for an engine that is missing, or that cannot be run here.
    """
    if not how.dry_run and not engine.is_file():
        raise CutefuseError(f"engine {engine} does not exist; build it first with `cutefuse build`")
    words, files = list(options), Artifacts.of(engine, outdir)
    libraries = plugins.library_if_built() if how.use_plugins else []
    kind = how.kind(how.backend == "onnxruntime")
    if how.dry_run and kind != "trtexec":
        print(f"# {NAMES[kind]} would profile {engine}; there is no command to print")
        return files
    if kind == "onnxruntime":
        from cutefuse.engines.onnxruntime import run as onnxruntime

        return onnxruntime.profile(engine, outdir, words)
    command: list[str] = []
    if kind == "trtexec":
        tool = how.trtexec()
        command = trtexec.profile_command(tool, engine, files, words, libraries)
        print(shlex.join(command))
        if how.dry_run:
            return files
    make_folder(outdir)
    with whole_or_nothing(files.graph, files.profile, files.timing, files.profile_metadata, files.build_metadata):
        if kind == "trtexec":
            title = f"profiling {engine.name} with TensorRT {tool.version_text}"
            log = trtexec.run(command, files.profile_log, how.timeout_s, title, makes=files.profile)
            write_json(files.profile_metadata, {**profile_metadata(log), "command": shlex.join(command)})
        elif kind == "torch":
            from cutefuse.engines.pytorch import files as torch_files

            torch_files.profile(engine, files, words, how.use_plugins)
        else:
            api.profile(engine, files, words, libraries, rtx.module() if kind == "rtx" else None)
    return files


def _report_plugins(files: Artifacts, sites: dict[str, str]) -> None:
    if not sites:
        return
    if not files.graph.is_file():
        raise VerificationError(
            f"no layer information was written to {files.graph}, so plugin layers cannot be counted"
        )
    print(plugins.verify_plugins(read_layers(read_json(files.graph), files.graph.name), sites))
