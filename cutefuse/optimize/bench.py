"""The engines of one optimisation, on disk: built in a hidden folder, handed over whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cutefuse.engines.artifacts import whole_or_nothing
from cutefuse.errors import CutefuseError
from cutefuse.optimize.loop import Built, Graph
from cutefuse.output import make_folder
from cutefuse.progress import spinner
from cutefuse.timing.noise import interleave, steady

_SMALL_BYTES = 1 << 20
ROUNDS, _SAMPLE_US = 31, 5000.0  # of a race
PLAIN, BEST = "plain", "best"  # the folders that are handed over


def race(
    engines: Sequence[Built], samplers: Sequence[Callable[[], float]] = (), rounds: int = ROUNDS
) -> list[list[float]]:
    """Times of engines in turns, in microseconds: the mean of each sample. samplers: one an engine; none for loaded
    engines, whose runner's `sample_us(n)` is the mean time of n inferences."""
    with spinner(f"timing {', '.join(e.title for e in engines)} in turns"):
        return interleave(samplers or [steady(e.runner.sample_us, _SAMPLE_US) for e in engines], rounds)


class Shelf:
    """The folder of an optimisation: `work` while it runs, `plain/` and `best/` for good."""

    def __init__(self, out: Path) -> None:
        self.out, self.work = out, out / ".work"
        self._has_plain = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make the folders, and remove what is left of the work in any case."""
        make_folder(self.out)
        self._recover()
        shutil.rmtree(self.work, ignore_errors=True)
        make_folder(self.work)
        try:
            yield
        finally:
            shutil.rmtree(self.work, ignore_errors=True)

    def folder(self, graph: Graph, mode: str = "") -> Path:
        """Where a graph's engine is built."""
        folder = self.work / graph.name.replace(" ", "-") / mode
        make_folder(folder)
        return folder

    def hand_over(self, engine: Built) -> None:
        """Make this engine `best/`; the plain one also becomes `plain/`."""
        if not engine.graph.sites and not self._has_plain:
            self._place(engine, PLAIN)
            self._has_plain = True
        self._place(engine, BEST)

    def _place(self, engine: Built, name: str) -> None:
        target, beside = self.out / name, self.out / f".{name}.new"
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            model = final = engine.graph.model
            if model.is_relative_to(self.work):
                final = target / model.name
                stem = model.name.removesuffix(".onnx").removesuffix(".cutefuse")
                for path in (model, model.with_name(f"{model.name}.data"), model.with_name(f"{stem}.patch.json")):
                    if path.is_file():
                        shutil.copy2(path, beside / path.name)
            made = engine.files.engine
            for path in made.parent.iterdir():
                if path.name.startswith(made.name) or path.name == engine.files.timing_cache.name:
                    shutil.copy2(path, beside / path.name)
            _point(beside, final)
            with whole_or_nothing(target):
                os.replace(beside, target)
        except OSError as error:
            raise CutefuseError(
                f"{target} cannot be written ({error.strerror}), what it held before stays; free space or choose "
                "another -o"
            ) from None
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _recover(self) -> None:
        """Put back what a run that was killed between two renames had set aside."""
        for name in (PLAIN, BEST):
            old = self.out / f".{name}.previous"
            if old.is_dir() and not (self.out / name).exists():
                os.replace(old, self.out / name)
            shutil.rmtree(old, ignore_errors=True)


def _point(folder: Path, model: Path) -> None:
    """Let the files in a folder name the model where it will lie."""
    for path in folder.iterdir():
        if path.name.endswith(".build.metadata.json"):
            _edit(path, lambda data: data.get("model_options", {}).update({"Model": str(model.resolve())}))
        elif path.name.endswith(".patch.json"):
            _edit(path, lambda data: data.update({"output": {"path": str(model)}}))
        elif path.name == f"{model.name}.engine" and path.stat().st_size < _SMALL_BYTES:  # of PyTorch, not TensorRT
            _edit(path, lambda data: data.update({"model": str(model.resolve())}) if "model" in data else None)


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON: an engine of TensorRT, which names no model
        return
    change(data)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
