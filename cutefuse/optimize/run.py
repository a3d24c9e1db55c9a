"""`cutefuse optimize` as a function: the loop over this machine's engine and the rewriter, and the pages at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cutefuse
from cutefuse.engines import build as engines
from cutefuse.engines import plugins
from cutefuse.engines.inputs import input_specs, resolve, shapes_text
from cutefuse.engines.tensorrt import api, rtx, trtexec
from cutefuse.errors import VerificationError
from cutefuse.graph.store import load_model, sha256_of, uses_external_data, writer
from cutefuse.match.site import FUSED, LEFT_OUT, MERGED
from cutefuse.operators.layouts import TENSORRT, engine_of_backend
from cutefuse.optimize.bench import BEST, PLAIN, Shelf
from cutefuse.optimize.bench_tensorrt import TensorRTBench
from cutefuse.optimize.loop import Bench, Built, Graph, Limits, Loop, Outcome, Worth
from cutefuse.optimize.worth import worths
from cutefuse.output import write_json
from cutefuse.report.read.reader import find_engines, read_engine
from cutefuse.report.write import write, write_compare
from cutefuse.rewrite.passes.select import Tiles
from cutefuse.rewrite.patch import Options, Result, patch
from cutefuse.rewrite.prove import failure
from cutefuse.rewrite.retype import to_float16
from cutefuse.select.price import Pricing

SCHEMA = 1
RECORD = "optimize.json"
FIRST_GAIN_US = -1.0  # predictions err: a site that should lose less than this is tried, and measurement decides
KEPT, DROPPED = "kept", "taken back"


@dataclass(frozen=True)
class Request:
    """What to optimise, by which engine, within which limits.

    `options`: for trtexec or the PyTorch back end, with their dashes. `patch`: filters, target GPU, shapes and `verify`
    of the rewriter. `price`, `tiles`: times of sites and of their calls, for the first patched graph. `dtype`: float16
    converts the model first, so that both engines compute in it.
    """

    model: Path
    out: Path
    backend: str = "auto"
    options: Sequence[str] = ()
    patch: Options = Options()
    price: Pricing | None = None
    tiles: Tiles | None = None
    dtype: str = ""
    limits: Limits = Limits()
    timeout_s: float | None = None


@dataclass
class Rewriter:
    """Writes the graphs of one optimisation. `results`: what the rewriter said of each patched graph."""

    source: Path
    shelf: Shelf
    options: Options
    price: Pricing | None = None
    tiles: Tiles | None = None
    results: list[Result] = field(default_factory=list)

    def plain(self) -> Graph:
        return Graph(PLAIN, self.source)

    def patched(self, only: frozenset[str] | None) -> Graph | None:
        """Raises VerificationError where the options ask for a comparison and the patched graph fails it."""
        name = f"patched {len(self.results) + 1}"
        folder = self.shelf.folder(Graph(name, self.source))
        output = folder / f"{self.source.name.removesuffix('.onnx')}.cutefuse.onnx"
        # The sites that are left after the first graph have been measured, which is better than any price.
        options, price = (self.options, self.price) if only is None else (replace(self.options, only=only), None)
        result = patch(self.source, output, options, price, self.tiles)
        self.results.append(result)
        if result.exit_code == 1:
            why = failure(result.report["verify"])
            raise VerificationError(f"{name} computes something else ({why}); the last good engine stays")
        if result.output is None:
            return None
        return Graph(name, output, tuple(s.name for s in result.sites if s.status in (FUSED, MERGED)))

    def why_none(self) -> str:
        left_out = sum(s.status == LEFT_OUT for s in self.results[-1].sites)
        return f"by prediction none of {left_out} sites pays" if left_out else "no site can be fused"

    def worth(self, plain: Built, patched: Built) -> list[Worth]:
        pair = [read_engine(find_engines(e.files.graph)[0]) for e in (plain, patched)]
        return worths(pair[0], pair[1], self.results[-1].report["sites"])


def optimize(request: Request, seen: Callable[[Outcome], None] = lambda outcome: None) -> dict[str, Any]:
    """Find the sites that pay in this machine's engine; returns what optimize.json holds.

    Writes into `out`: plain/ and best/ (model, engine, profile, report), compare.html, optimize.json. `best/` is the
    plain engine until a patched one was faster beyond noise, and is replaced as a whole. `seen` is called after every
    round. Raises CutefuseError, VerificationError; `out` then keeps the last good engine.
    """
    facts = plugins.read_model(request.model)
    kind = engines.choose_backend(request.backend)
    if kind == "rtx":
        rtx.module()  # says so where there is no GPU to take times on
    shelf = Shelf(request.out)
    with shelf.open():
        source = _converted(request, shelf) if request.dtype else request.model
        options = replace(first_choice(request.patch, kind), keep_float32=())  # the conversion is done
        options = replace(options, shapes=engine_shapes(request.model, options.shapes, kind))
        kept = () if request.dtype else request.patch.keep_float32
        unused = [f"--keep-float32 '{p}' does nothing without --dtype" for p in kept]
        rewriter = Rewriter(source, shelf, options, request.price, request.tiles)
        bench = _bench(kind, request, shelf)
        head = {
            "schema": SCHEMA, "tool": {"name": "cutefuse", "version": cutefuse.__version__},
            "model": {"path": str(request.model), "sha256": sha256_of(request.model), "dtype": request.dtype or None,
                      "fused_before": len(facts.fused_nodes)},
            "backend": kind, "options": list(request.options),
            "limits": {"builds": request.limits.builds, "time_s": request.limits.time_s},
        }  # fmt: skip

        def record(outcome: Outcome) -> dict[str, Any]:
            data = {**head, **outcome.as_json(), "paid": outcome.paid, "sites": sites(outcome, rewriter.results)}
            data["notes"] = [*getattr(bench, "notes", []), *unused]
            data["notes"] += rewriter.results[0].report["unused_options"] if rewriter.results else []
            write_json(request.out / RECORD, data)
            return data

        def changed(outcome: Outcome) -> None:
            record(outcome)
            seen(outcome)

        loop = Loop(bench, rewriter, request.limits, changed)
        try:
            loop.run()
        except BaseException as error:
            loop.outcome.ended = f"ended early: {error or type(error).__name__}"
            with contextlib.suppress(Exception):  # the first error is the one to tell
                record(loop.outcome)
            raise
        return record(loop.outcome)


def pages(out: Path, paid: bool) -> list[Path]:
    """The reports of the plain and of the best engine, and the page that compares them."""
    made = [write(out / PLAIN, out / PLAIN, quiet=True), write(out / BEST, out / BEST, quiet=True)]
    if paid:
        made.append(out / "compare.html")
        write_compare([out / PLAIN, out / BEST], made[-1], quiet=True)
    return made


def sites(outcome: Outcome, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Every candidate of the model: what was predicted, what was measured last, and what became of it.

    `measured_us` is the gain of `with` together, sites that could not be judged apart.
    """
    if not results:
        return []
    kept = set(outcome.kept.graph.sites) if outcome.kept else set()
    tried = {name for r in outcome.rounds for name in r.graph.sites}
    latest = {name: w for r in outcome.rounds for w in r.worths for name in w.sites}
    rows = []
    for site in results[0].report["sites"]:
        name, worth = site["name"], latest.get(site["name"])
        status = KEPT if name in kept else DROPPED if name in tried else site["status"]
        rows.append({
            "name": name, "operator": site["operator"], "title": site["title"], "status": status,
            "reason": "" if name in tried else site["reason"], "predicted_us": site["gain_us"],
            "measured_us": worth.gain_us if worth else None, "noise_us": worth.noise_us if worth else None,
            "with": [s for s in worth.sites if s != name] if worth else [],
            "verdict": worth.verdict if worth else None,
        })  # fmt: skip
    return rows


def first_choice(options: Options, kind: str) -> Options:
    """The options of the first patched graph: predictions for this engine, and every site that may pay in it."""
    version = trtexec.inspect(trtexec.find() or "trtexec").version if kind == "trtexec" else None
    version = api.version() if kind == "tensorrt" else version
    # TensorRT 10.6 and older build the function bodies instead of the plugins.
    bodies = options.functions and (version is None or version >= plugins.PLUGINS_FIRST)
    text = ".".join(map(str, version[:2])) if version else options.trt_version
    least_us = FIRST_GAIN_US if options.min_gain_us is None and not options.all_sites else options.min_gain_us
    engine = engine_of_backend(kind) or TENSORRT
    return replace(options, functions=bodies, engine=engine, trt_version=text, min_gain_us=least_us)


def engine_shapes(model: Path, given: Mapping[str, Sequence[int]], kind: str) -> dict[str, Sequence[int]]:
    """The sizes of dynamic inputs that the engine will have, so that predictions are for these: those given, else what
    the back end takes for an open batch (1). Other open axes stay open in TensorRT, which builds them for 1 too."""
    specs = input_specs(load_model(model))
    open_axes = {s.name: [a for a, d in enumerate(s.dims) if not isinstance(d, int)] for s in specs}
    if kind != "torch" and any(axes not in ([], [0]) for name, axes in open_axes.items() if name not in given):
        return dict(given)
    return {name: size for name, size in resolve(specs, given).items() if open_axes[name]}


def _bench(kind: str, request: Request, shelf: Shelf) -> Bench:
    # --shapes names inputs with dynamic axes; TensorRT takes none for the others.
    specs = input_specs(load_model(request.model))
    dynamic = {s.name for s in specs if any(not isinstance(d, int) for d in s.dims)}
    given = {name: dims for name, dims in request.patch.shapes.items() if name in dynamic}
    words = [*request.options, *([f"--shapes={shapes_text(given)}"] if given else [])]
    if kind == "torch":
        from cutefuse.engines.pytorch.files import options_of
        from cutefuse.engines.pytorch.run import MODES
        from cutefuse.optimize.bench_torch import TorchBench

        options_of(words)  # a wrong one is refused before anything runs
        modes = [w.partition("=")[2] for w in words if w.startswith("--mode=")]
        others = [w for w in words if not w.startswith("--mode=")]
        return TorchBench(shelf, others, request.patch.verify, modes[-1:] or MODES)
    return TensorRTBench(shelf, kind, words, request.timeout_s)


def _converted(request: Request, shelf: Shelf) -> Path:
    """The model in float16, in a file of its own."""
    model = load_model(request.model)
    external = uses_external_data(model)
    model, *_ = to_float16(model, request.model.parent, request.patch.keep_float32)
    path = shelf.folder(Graph(PLAIN, request.model)) / request.model.name
    with writer(path, external, request.model) as out:
        out.save(model)
        out.commit()
    return path
