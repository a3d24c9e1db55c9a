"""Engines of TensorRT for `cutefuse optimize`: built and profiled by trtexec or by the Python API, timed in turns."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from cutefuse.engines import build as engine
from cutefuse.engines import plugins
from cutefuse.engines.artifacts import read_json
from cutefuse.engines.tensorrt import rtx, trtexec
from cutefuse.engines.tensorrt.api import Session
from cutefuse.optimize.bench import Shelf, race
from cutefuse.optimize.loop import Built, Graph

TRTEXEC_ROUNDS = 7  # every sample is a process that loads the engine and runs it for half a second


@dataclass
class TensorRTBench:
    """`kind`: trtexec; tensorrt, the Python API; rtx, TensorRT for RTX.

    `options`: those of trtexec, for building and for running.
    """

    shelf: Shelf
    kind: str
    options: list[str]
    timeout_s: float | None = None
    modes: Sequence[str] = ("",)
    _cache: Path | None = field(default=None, init=False)
    _tool: trtexec.Trtexec | None = field(default=None, init=False)

    def build(self, graph: Graph, modes: Sequence[str]) -> list[Built]:
        """Build with the timing cache of the last build, so that layers that did not change keep their tactics."""
        folder = self.shelf.folder(graph)
        if self._cache is not None and self._cache.is_file():
            shutil.copyfile(self._cache, folder / self._cache.name)
        how = engine.How(self.kind, timeout_s=self.timeout_s)
        files = engine.build(graph.model, folder, self.options, how)
        engine.profile(files.engine, folder, self.options, how)
        self._cache = files.timing_cache
        libraries = plugins.libraries(bool(graph.sites))
        if self.kind == "trtexec":
            return [Built(graph, "", files, partial(self._sample, files.engine, libraries))]
        module = rtx.module() if self.kind == "rtx" else None
        return [Built(graph, "", files, Session(files.engine, self.options, libraries, trt=module))]

    def race(self, engines: Sequence[Built]) -> list[list[float]]:
        if self.kind == "trtexec":
            return race(engines, [e.runner for e in engines], TRTEXEC_ROUNDS)
        return race(engines)

    def check(self, plain: Built, patched: Built) -> None:
        """The outputs of TensorRT's engines are compared by `cutefuse accuracy`, the graphs by the rewriter."""

    def keep(self, engine: Built) -> None:
        self.shelf.hand_over(engine)

    def release(self, engine: Built) -> None:
        if self.kind != "trtexec" and engine.runner:
            engine.runner.close()
        engine.runner = None

    def _sample(self, path: Path, libraries: list[Path]) -> float:
        self._tool = self._tool or trtexec.inspect(trtexec.find() or "trtexec")
        times = path.with_name("race.json")
        command = trtexec.time_command(self._tool, path, times, self.options, libraries)
        trtexec.run(command, path.with_name("race.log"), self.timeout_s, "")
        return median(float(r["computeMs"]) for r in read_json(times)) * 1000
