"""Options that changed nothing, a sentence each: a pattern that names nothing, a choice that there was not to make."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from onnx import NodeProto

from cutefuse.graph.read import Graph
from cutefuse.graph.scopes import names_of
from cutefuse.rewrite.options import Options
from cutefuse.sites.find import FUSED, LEFT_OUT, Site

FORMS = {
    "single": "reads a single tensor",
    "upsample": "reads an enlarged tensor",
    "ranges": "reads channels of a wider tensor",
    "residual": "is followed by the Add of a residual",
    "alone": "stands alone",
}


def names_at(site: Site, nodes: Sequence[NodeProto]) -> set[str]:
    """What --include and --exclude may call a site with these nodes."""
    return {site.name}.union(*map(names_of, nodes))


def idle(
    graph: Graph, sites: Sequence[Site], found: Collection[str], conversion: Mapping[str, Any] | None, options: Options,
    fuses_tanh: bool,
) -> list[str]:  # fmt: skip
    """Sentences about options without effect on this model.

    found: the forms (`Match.takes`) of the candidates before any choice. conversion: what `--dtype` did, as patch.json
    holds it; `graph` is the model after it. fuses_tanh: whether the engine fuses SiLU's tanh form with a Conv.
    """
    tanh = "--tanh-silu only helps TensorRT 11 and newer; other engines compute SiLU as well either way"
    return [
        *_filters(sites, found, options),
        *_types(graph, sites, conversion, options),
        *([tanh] if options.tanh_silu and not fuses_tanh else []),
        *_figures(graph, sites, options),
    ]


def _filters(sites: Sequence[Site], found: Collection[str], options: Options) -> Iterator[str]:
    asked = options.include or options.exclude
    names = {name for s in sites for name in names_at(s, (*s.around, *s.nodes))} if asked else set[str]()
    for option, patterns in (("--include", options.include), ("--exclude", options.exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                yield f"{option} '{pattern}' names no node of a candidate; nothing was chosen by it"
    stems = {s.op.stem for s in sites}
    for option, chosen in (("--include-op", options.include_op), ("--exclude-op", options.exclude_op)):
        for stem in chosen:
            if stem not in stems:
                yield f"{option} {stem} names no candidate's operator; nothing was chosen by it"
    for form in options.without:
        if form in FORMS and form not in found:
            yield f"--without {form} does nothing: no candidate {FORMS[form]}"


def _types(
    graph: Graph, sites: Sequence[Site], conversion: Mapping[str, Any] | None, options: Options
) -> Iterator[str]:
    if conversion is None:
        if options.scope:
            yield "--scope does nothing without --dtype"
        for pattern in options.keep_float32:
            yield f"--keep-float32 '{pattern}' does nothing without --dtype"
        return
    whole = conversion["scope"] == "model"
    nodes = graph.nodes if whole else [n for s in sites if s.match for n in s.nodes]
    for pattern in options.keep_float32:
        if not any(fnmatchcase(name, pattern) for n in nodes for name in names_of(n)):
            where = "the model" if whole else "a candidate, and --scope sites lowers nothing else"
            yield f"--keep-float32 '{pattern}' names no node of {where}; nothing was kept by it"
    if not conversion["changed"]:
        why = (
            "the model holds no float32 that it would lower"
            if whole
            else "no site that can be fused is float32"
        )
        yield f"--dtype does nothing: {why}"


def _figures(graph: Graph, sites: Sequence[Site], options: Options) -> Iterator[str]:
    for name, dims in options.shapes.items():
        if tuple(dims) == tuple(graph.dims(name) or ()):
            yield f"--input-shape {name}:{'x'.join(map(str, dims))} does nothing: the model has that size"
    chosen = [s for s in sites if s.status in (FUSED, LEFT_OUT)]
    asked = options.min_gain_us is not None and options.min_gain_us >= 0  # `optimize` has a loss of its own
    if asked and options.all_sites:
        yield "--min-gain does nothing with --all"
    elif asked and not chosen:
        yield "--min-gain does nothing: there is no site to choose"
    if options.seed and not options.verify:
        yield "--seed does nothing without --verify"
    if options.verify and options.dry_run:
        yield "--verify does nothing with --dry-run; without it the patched model is run"
