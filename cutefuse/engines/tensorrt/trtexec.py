"""trtexec: finding it, knowing its version and flags, and running it. Flags differ between TensorRT 10.0 and 11.x."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutefuse.engines.artifacts import Artifacts, log_errors, tensorrt_version
from cutefuse.errors import CutefuseError
from cutefuse.progress import spinner

# Flags that TensorRT 11 no longer knows: its engines are always strongly typed, calibration is gone.
REMOVED_IN_11 = frozenset(
    "--fp16 --bf16 --fp8 --int8 --int4 --best --calib --calibProfile --layerPrecisions --layerOutputTypes "
    "--precisionConstraints --restricted --weightless".split()
)
# First release that knows the flag, for those that came after 10.0.
FIRST_SEEN = {
    "--stripAllWeights": (10, 1), "--int4": (10, 1), "--runtimePlatform": (10, 2), "--maxTactics": (10, 4),
    "--monitorMemory": (10, 6), "--asyncFileReader": (10, 7), "--tilingOptimizationLevel": (10, 8),
    "--l2LimitForTiling": (10, 8), "--markUnfusedTensorsAsDebugTensors": (10, 12), "--saveAllDebugTensors": (10, 12),
    "--distributiveIndependence": (10, 12), "--remoteAutoTuningConfig": (10, 13), "--refitFromOnnx": (10, 14),
    "--decomposableAttentions": (10, 14), "--enablePluginOverride": (10, 15), "--cpuOnly": (10, 15),
    "--adjustForDLA": (10, 16), "--includeDataTransfers": (11, 0), "--noCudaGraph": (11, 0), "--noSpinWait": (11, 0),
    "--atol": (11, 1), "--rtol": (11, 1), "--loadRefOutputs": (11, 1), "--tuneBuildRoutes": (11, 1),
}  # fmt: skip
PRECISION_FLAGS = frozenset("--fp16 --bf16 --fp8 --int8 --int4 --best --stronglyTyped".split())
# Options that trtexec parses and does not list in its help.
UNLISTED = frozenset("--plugins --streams --useRuntime --distributiveIndependence --tuningResultFile".split())
# Options that this tool sets itself: the paths of inputs and outputs.
OWN = frozenset("--onnx --saveEngine --loadEngine --exportLayerInfo --exportProfile --exportTimes --help".split())
_QUIET = ("--noDataTransfers", "--useCudaGraph", "--useSpinWait")  # 11 does so by itself


@dataclass(frozen=True)
class Trtexec:
    """One trtexec: how to call it, which version it is, and the options its help lists (empty when unknown)."""

    path: str
    version: tuple[int, int, int]
    options: frozenset[str] = frozenset()

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))

    def check(self, options: list[str]) -> None:
        """Raise CutefuseError for an option that this version does not know."""
        for option in options:
            name = option.partition("=")[0]
            if name in OWN:
                raise CutefuseError(f"{name} is set by cutefuse itself; leave it out of the trtexec options")
            if self.version[0] >= 11 and name in REMOVED_IN_11:
                raise CutefuseError(
                    f"{name} was given, but TensorRT {self.version_text} builds strongly typed engines and has no such "
                    f"option; convert the ONNX model to that precision and leave {name} out"
                )
            if name in FIRST_SEEN and self.version[:2] < FIRST_SEEN[name]:
                first = ".".join(map(str, FIRST_SEEN[name]))
                raise CutefuseError(
                    f"{name} needs TensorRT {first}, this trtexec is {self.version_text}; leave the option out"
                )
            if self.options and name not in self.options | UNLISTED:
                raise CutefuseError(
                    f"{name} is not an option of trtexec {self.version_text}; see `{self.path} --help` for those it has"
                )


def find() -> str | None:
    """Path of trtexec: $TRTEXEC, then PATH, then the folder of NVIDIA's containers and Debian packages."""
    override = os.environ.get("TRTEXEC")
    if override:
        found = shutil.which(override)
        if not found:
            raise CutefuseError(f"$TRTEXEC is {override}, which is no executable file; correct it or unset it")
        return found
    return shutil.which("trtexec") or shutil.which("/usr/src/tensorrt/bin/trtexec")


def inspect(path: str) -> Trtexec:
    """Ask trtexec for its version (banner) and options (help text)."""
    try:
        help_text = subprocess.run(
            [path, "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CutefuseError(
            f"{path} --help did not answer ({error}); check that TensorRT's libraries are found"
        ) from None
    options = frozenset(re.findall(r"--[A-Za-z][A-Za-z0-9]*", help_text))
    version = tensorrt_version(help_text)
    if version is None:
        if "--onnx" not in options:
            raise CutefuseError(
                f"{path} does not look like trtexec: {log_errors(help_text)}; set $TRTEXEC to the right one"
            )
        version = (10, 0, 0) if "--fp16" in options else (11, 0, 0)
    if version < (10, 0, 0):
        text = ".".join(map(str, version))
        raise CutefuseError(
            f"{path} is TensorRT {text}; IPluginV3 plugins need 10.0 or newer; set $TRTEXEC to such a one"
        )
    return Trtexec(path, version, options)


def assumed(text: str) -> Trtexec:
    """A trtexec that is not installed here, for --dry-run with --trt-version."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if not numbers or int(numbers[1]) < 10:
        raise CutefuseError(f"--trt-version is {text}; give a version such as 10.3 or 11.1, 10.0 or newer")
    return Trtexec("trtexec", (int(numbers[1]), int(numbers[2]), int(numbers[3] or 0)))


def build_command(
    trtexec: Trtexec, model: Path, files: Artifacts, options: list[str], plugins: list[Path], low_precision: bool
) -> list[str]:
    """Command that builds an engine and writes its layer information.

    `low_precision`: the model holds float16 or bfloat16 tensors. TensorRT 10 then needs to be told that types are the
    model's own (--stronglyTyped); 11 takes them as they are.
    """
    own = [f"--onnx={model}", f"--saveEngine={files.engine}", f"--exportLayerInfo={files.graph}",
           f"--timingCacheFile={files.timing_cache}", "--profilingVerbosity=detailed", "--skipInference",
           "--verbose"]  # fmt: skip
    own += _dynamic(plugins)
    if low_precision and trtexec.version[0] == 10 and not {o.partition("=")[0] for o in options} & PRECISION_FLAGS:
        own.append("--stronglyTyped")
    return _command(trtexec, own, options)


def profile_command(
    trtexec: Trtexec, engine: Path, files: Artifacts, options: list[str], plugins: list[Path]
) -> list[str]:
    """Command that times an engine as a whole and, in a separate run, layer by layer.

    The build's options are given again: trtexec takes the shapes of the timed run from --shapes or --optShapes.
    """
    own = [f"--loadEngine={engine}", f"--exportTimes={files.timing}", f"--exportProfile={files.profile}",
           f"--exportLayerInfo={files.graph}", "--profilingVerbosity=detailed", "--verbose"]  # fmt: skip
    own += [*_QUIET, "--separateProfileRun"] if trtexec.version[0] == 10 else []
    return _command(trtexec, own + _dynamic(plugins), options)


def time_command(trtexec: Trtexec, engine: Path, times: Path, options: list[str], plugins: list[Path]) -> list[str]:
    """Command that times an engine as a whole for half a second, into `times`."""
    own = [f"--loadEngine={engine}", f"--exportTimes={times}", "--duration=0.5"]
    own += _QUIET if trtexec.version[0] == 10 else []
    return _command(trtexec, own + _dynamic(plugins), options)


def _dynamic(plugins: list[Path]) -> list[str]:
    return [f"--dynamicPlugins={path}" for path in plugins]


def _command(trtexec: Trtexec, own: list[str], options: list[str]) -> list[str]:
    """Our options and the user's; one that repeats ours replaces it (trtexec refuses some options given twice)."""
    trtexec.check(options)
    repeatable = {"--dynamicPlugins", "--staticPlugins", "--setPluginsToSerialize"}
    names = {o.partition("=")[0] for o in options} - repeatable
    kept = [o for o in own if o.partition("=")[0] not in names]
    return [trtexec.path, *kept, *(o for o in options if o not in own)]


def run(
    command: list[str], log: Path, timeout_s: float | None, title: str, name: str = "trtexec",
    makes: Path | None = None, **where: Any,
) -> str:  # fmt: skip
    """Run trtexec, write its output to `log`, return the text; no progress is shown without a title.

    `name`: of another program that builds; `makes`: a file that it has to write; `where`: its folder (cwd) and
    environment (env).
    A failure keeps the log and raises CutefuseError.
    On timeout, Ctrl-C or SIGTERM the whole process group is ended: trtexec leaves no orphan on the GPU.
    """
    with log.open("wb") as sink:
        sink.write(f"# {shlex.join(command)}\n".encode())
        sink.flush()
        try:
            child = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, **where)
        except OSError as error:
            raise CutefuseError(
                f"{command[0]} cannot be started ({error.strerror}); set $TRTEXEC to a working trtexec"
            ) from None
        try:
            with spinner(title) if title else nullcontext():
                code = child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_group(child)
            raise CutefuseError(
                f"{name} was stopped after {timeout_s:g} s (--timeout); its log is {log}; allow it more time"
            ) from None
        except BaseException:
            end_group(child)
            raise
    text = log.read_text(encoding="utf-8", errors="replace")
    if code:
        reason = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise CutefuseError(f"{name} {reason}: {log_errors(text)}; the whole log is {log}")
    if makes and not makes.is_file():
        raise CutefuseError(f"{name} ended well but wrote no {makes.name}; see {log}")
    return text


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, and whatever it started: asked first, then killed."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)
            return
