"""What to run so that the kernels of an engine's layers can be told from those of its start-up."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cutefuse.engines import build, plugins
from cutefuse.engines.artifacts import Artifacts
from cutefuse.engines.tensorrt import trtexec
from cutefuse.engines.tensorrt.api import Session
from cutefuse.errors import CutefuseError
from cutefuse.profilers.kernels.cases import DRIVER, torch_with_gpu
from cutefuse.profilers.kernels.drive import INFERENCE, LAYER
from cutefuse.report.read.reader import Engine, find_engines, read_engine

TENSORRT_DOMAIN = "TensorRT"  # of its NVTX ranges: one for an inference, inside of it one for every layer
_SMALL_BYTES = 1 << 16  # the file that stands for an engine of PyTorch


@dataclass(frozen=True)
class Target:
    """An engine and the program that runs its layers inside of NVTX ranges.

    `nvtx`: the expression of --nvtx-include that reaches the layers and not the start-up. `per_layer`: every layer has
    a range of its own; else the kernels come in the order of the layers.
    """

    path: Path
    command: list[str]
    nvtx: str
    layers: Engine | None = None
    per_layer: bool = True

    @cached_property
    def _names(self) -> dict[str, int]:
        """Name -> index of the first layer of that name."""
        return {layer.name: layer.index for layer in reversed(self.layers.layers if self.layers else [])}

    def layer_of(self, text: str) -> int | None:
        """Index of the layer that a range belongs to; None for a range that is no layer's."""
        name = re.sub(r" \[profile \d+\]$", "", text.removeprefix(f"{TENSORRT_DOMAIN}:").removeprefix(":"))
        return self._names.get(name.removeprefix(LAYER))


def of_torch(path: Path) -> bool:
    """Whether a file is a model or an engine file of the PyTorch back end, not an engine of TensorRT."""
    if path.suffix == ".onnx":
        return True
    try:
        return path.stat().st_size < _SMALL_BYTES and b"cutefuse torch engine" in path.read_bytes()
    except OSError as error:
        raise CutefuseError(
            f"engine {path} cannot be read ({error.strerror}); build it with `cutefuse build`"
        ) from None


def target(path: Path, outdir: Path, inferences: int, version: str | None) -> Target:
    """What to run for an engine file, or for an ONNX model by PyTorch. Nothing is run here.

    version: TensorRT's, for a trtexec that is not installed here; None takes the installed one.
    Raises CutefuseError where trtexec is missing, or the file is.
    """
    graphs = (Artifacts.of(path, folder).graph for folder in (path.parent, outdir))
    graph = next(filter(Path.is_file, graphs), None)
    layers = read_engine(find_engines(graph)[0]) if graph else None
    if of_torch(path):
        per_layer = '"--mode=compile"' not in (path.read_text(encoding="utf-8") if path.suffix != ".onnx" else "")
        command = [sys.executable, "-m", DRIVER, "engine", str(path), str(inferences)]
        return Target(path, command, f"{INFERENCE}/", layers, per_layer)
    if not version and not trtexec.find():
        raise CutefuseError(
            "trtexec was not found, which runs an engine of TensorRT here; put it on PATH or set $TRTEXEC, or see the "
            "commands with --dry-run --trt-version 10.3"
        )
    tool = trtexec.assumed(version) if version else trtexec.inspect(trtexec.find() or "")
    command = [tool.path, f"--loadEngine={path}", "--profilingVerbosity=detailed", f"--iterations={inferences}"]
    command += ["--duration=0", "--warmUp=0", *(f"--dynamicPlugins={p}" for p in plugins.library_if_built())]
    # A CUDA graph hides the ranges: TensorRT 10 runs without one unless asked, 11 with one.
    command += ["--noCudaGraph"] if tool.version[0] >= 11 else ["--noDataTransfers"]
    return Target(path, command, f"regex:{TENSORRT_DOMAIN}@.+/", layers)


def with_layers(found: Target, outdir: Path, inferences: int) -> Target:
    """The same target with the engine's layers and their times; the engine is profiled where they are not there."""
    if found.layers is not None and found.layers.profiled:
        return found
    build.profile(found.path, outdir, ["--duration=0.5"], build.How("torch" if of_torch(found.path) else "auto"))
    return target(found.path, outdir, inferences, None)


def sampler(path: Path) -> Callable[[int], float]:
    """Times inferences of an engine that stays loaded, by PyTorch or by TensorRT's Python API: runs -> mean time in
    microseconds. Raises CutefuseError where neither can load it."""
    if of_torch(path):
        from cutefuse.engines.pytorch.files import load

        torch_with_gpu()
        return load(path).sample_us
    if not importlib.util.find_spec("tensorrt"):
        raise CutefuseError(
            "an engine of TensorRT is timed beside a load by its Python package, which is not installed; run "
            "`pip install tensorrt`, or time trtexec yourself while the load runs"
        )
    return Session(path, [], plugins.library_if_built()).sample_us
