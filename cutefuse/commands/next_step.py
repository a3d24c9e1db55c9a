"""What to type after a command, with its paths filled in: patch -> build -> process -> compare.

The line stands on stdout behind the command's own, and is left out where the output is JSON.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cutefuse.engines.artifacts import Artifacts, read_json
from cutefuse.engines.plugins import patch_report, read_model
from cutefuse.engines.tensorrt import rtx
from cutefuse.errors import CutefuseError
from cutefuse.report.read.alike import converted, lowered, unlike
from cutefuse.report.read.reader import Engine
from cutefuse.rewrite.unpatch import default_output as undone

# Who began with a script of the checkout may have no `cutefuse` on PATH.
_SCRIPTS = {"patch": "patch_onnx.py", "build": "build_engine.sh", "process": "process_engine.py",
            "compare": "compare_engines.py", "optimize": "optimize_onnx.py"}  # fmt: skip


def typed(command: str, *words: str | Path) -> str:
    """The command as this user types it: as `cutefuse`, as a script of the checkout, or as a module of Python."""
    started = Path(sys.argv[0])
    scripts = started.parent if started.parent.name == "scripts" else started.parent.parent / "scripts"
    script = scripts / _SCRIPTS.get(command, "")
    if started.name in (*_SCRIPTS.values(), "cli.py") and (scripts / _SCRIPTS["patch"]).is_file():
        path = os.path.relpath(script)
        start = ["python", path] if script.suffix == ".py" else [path]
        if not script.is_file():
            start = [f"PYTHONPATH={os.path.relpath(scripts.parent)}", "python", "-m", "cutefuse", command]
    elif started.name == "__main__.py":
        start = ["python", "-m", "cutefuse", command]
    else:
        start = ["cutefuse", command]
    # A path whose name begins like an option is written so that it is none.
    rest = [f"./{w}" if isinstance(w, Path) and str(w).startswith("-") else str(w) for w in words]
    return shlex.join([*start, *rest])


def say(command: str, *words: str | Path, why: str = "") -> None:
    """Print the next step; `why` says what it is for."""
    print(f"next: {typed(command, *words)}{f'  # {why}' if why else ''}")


def after_patch(model: Path, report: Mapping[str, Any]) -> None:
    """`model`: the patched model that was written; `report`: its patch report."""
    if sm := (report.get("compiled") or {}).get("sm"):
        say("build", model, "--backend", "rtx", "--sm", str(sm), why=f"an engine of {rtx.NAME}")
    else:
        say("build", model, why="an engine of TensorRT")
    say("process", model, model.with_suffix(".out"), why="build, profile and report, with any engine that is here")
    if converted(report):
        say("unpatch", model, why=f"{undone(model).name}: as converted, nothing fused; compare with this one")


def after_build(engine: Path) -> None:
    """`engine`: the engine file; what is written of it stays beside it."""
    if backend_of(engine) == "rtx" and rtx.cannot_run():
        say("report", engine.parent, why="layers, formats, copies")
    else:
        say("process", engine, engine.parent, why="profile, report")


def backend_of(engine: Path) -> str:
    """The back end that built an engine, by the metadata beside it; "" where it does not say."""
    with contextlib.suppress(CutefuseError, AttributeError):
        return str(read_json(Artifacts(engine).build_metadata).get("backend", ""))
    return ""


def after_process(source: Path, outdir: Path, words: Sequence[str] = ()) -> None:
    """`source`: the ONNX model that was profiled into `outdir`; for an engine there is nothing to say.

    `words`: options that the engine of the model before has to have too, so that the comparison is of like with like.
    """
    if source.suffix != ".onnx":
        return
    plain, dtype = _before(source)
    if plain is None:
        if any(outdir.glob("*.profile.json")):
            say("rank", outdir, source, why="what fusing would save")
        say("patch", source, *(("--dtype", "fp16") if _is_float32(source) else ()), "--verify")
        return
    kind = backend_of(Artifacts.of(source, outdir).engine)
    found = (p.parent for p in outdir.resolve().parent.glob(f"*/{glob.escape(plain.name)}.engine.graph.json"))
    beside = next((folder for folder in found if backend_of(Artifacts.of(plain, folder).engine) == kind), None)
    if beside is not None:
        say("compare", Path(os.path.relpath(beside)), outdir, why="what was fused, where the time moved")
        return
    if not plain.is_file() and dtype:
        say("unpatch", source, "-o", plain, why=f"the model in {dtype} with nothing fused: like with like")
    elif not plain.is_file():
        return
    before = outdir.with_name(f"{outdir.name}_plain")
    say("process", plain, before, *words, why="the model before it was patched")
    say("compare", before, outdir)


def after_compare(engines: Sequence[Engine]) -> None:
    """Where `patch --dtype` converted the last engine's model and not the first's: how to make a first that it did."""
    first, last = engines[0], engines[-1]
    if not lowered(last) or lowered(first) or not unlike(first, last):
        return
    recorded = last.build.get("Model") or (last.patch or {}).get("output", {}).get("path") or last.name
    model = Path(str(recorded))
    before = last.folder.with_name(f"{last.folder.name}_plain")
    if not undone(model).is_file():
        say("unpatch", model, why=f"{undone(model).name}: as converted, nothing fused")
    say("process", undone(model), before, why="with the options of the patched engine")
    say("compare", before, last.folder, why="like with like")


def _before(model: Path) -> tuple[Path | None, str]:
    """The model that a patched one is to be compared with: the one before it, or where that was converted to another
    type as well, this one undone; and that type. (None, "") for a model that was not patched."""
    report = None
    with contextlib.suppress(CutefuseError):
        report = patch_report(model)
    if not report or not isinstance(report.get("input"), dict):
        return None, ""
    if dtype := converted(report):
        return undone(model), dtype
    before = Path(str(report["input"].get("path")))
    return before if before.is_file() else model.with_name(before.name), ""


def _is_float32(model: Path) -> bool:
    with contextlib.suppress(CutefuseError):
        facts = read_model(model)
        return not facts.low_precision and not facts.quantized
    return False
