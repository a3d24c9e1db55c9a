"""What to type after a command, with its paths filled in: patch -> build -> process -> compare.

The line stands on stdout behind the command's own, and is left out where the output is JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from onnx import TensorProto

from cutefuse.errors import CutefuseError
from cutefuse.graph.store import load_model

_LOWER = {TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.UINT8, TensorProto.FLOAT8E4M3FN}
# Who began with a script of the checkout may have no `cutefuse` on PATH.
_SCRIPTS = {"patch": "patch_onnx.py", "build": "build_engine.sh", "process": "process_engine.py",
            "compare": "compare_engines.py", "optimize": "optimize_onnx.py"}  # fmt: skip


def typed(command: str, *words: str | Path) -> str:
    """The command as this user types it: as `cutefuse`, as a script of the checkout, or as a module of Python."""
    started = Path(sys.argv[0])
    scripts = started.parent if started.parent.name == "scripts" else started.parent.parent / "scripts"
    script = scripts / _SCRIPTS.get(command, "")
    if started.name in (*_SCRIPTS.values(), "cli.py") and script.is_file():
        path = os.path.relpath(script)
        start = ["python", path] if script.suffix == ".py" else [path]
    elif started.name == "__main__.py":
        start = ["python", "-m", "cutefuse", command]
    else:
        start = ["cutefuse", command]
    return " ".join(shlex.quote(str(word)) for word in (*start, *words))


def say(command: str, *words: str | Path, why: str = "") -> None:
    """Print the next step; `why` says what it is for."""
    print(f"next: {typed(command, *words)}{f'  # {why}' if why else ''}")


def after_patch(model: Path) -> None:
    """`model`: the patched model that was written."""
    say("build", model, why="an engine of TensorRT")
    say("process", model, model.with_suffix(".out"), why="build, profile and report, with any engine that is here")


def after_build(engine: Path) -> None:
    """`engine`: the engine file; what is written of it stays beside it."""
    say("process", engine, engine.parent, why="profile, report")


def after_process(source: Path, outdir: Path) -> None:
    """`source`: the ONNX model that was profiled into `outdir`; for an engine there is nothing to say."""
    if source.suffix != ".onnx":
        return
    plain = _plain_model(source, outdir)
    if plain is None:
        say("rank", outdir, source, why="what fusing would save")
        say("patch", source, *(["--dtype", "fp16"] if holds_float32(source) else []), "--verify")
        return
    beside = next((p.parent for p in outdir.resolve().parent.glob(f"*/{plain.name}.engine.graph.json")), None)
    if beside is not None:
        say("compare", os.path.relpath(beside), outdir, why="what was fused, where the time moved")
    elif plain.is_file():
        before = outdir.with_name(f"{outdir.name}_plain")
        say("process", plain, before, why="the model before it was patched")
        say("compare", before, outdir)


def holds_float32(model: Path) -> bool:
    """Whether a model's weights are float32 and none of 16 bits or less: TensorRT 11 computes in the file's types."""
    try:
        types = {t.data_type for t in load_model(model).graph.initializer if len(t.dims) > 1}
    except CutefuseError:
        return False
    return TensorProto.FLOAT in types and not types & _LOWER


def _plain_model(model: Path, outdir: Path) -> Path | None:
    """The model that was patched into this one, by the patch report beside either; None for one not patched."""
    for folder in (outdir, model.parent):
        for report in sorted(folder.glob("*.patch.json")):
            try:
                data = json.loads(report.read_text(encoding="utf-8"))
                paths = [Path(data[key]["path"] if isinstance(data[key], dict) else data[key])
                         for key in ("input", "output")]  # fmt: skip
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if paths[1].name == model.name:
                return paths[0] if paths[0].is_file() else model.with_name(paths[0].name)
    return None
