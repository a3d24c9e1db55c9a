"""Options that changed nothing, a sentence each: a pattern that names nothing, a choice that there was not to make."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from cutefuse.graph.scopes import names_of
from cutefuse.match.site import FUSED, LEFT_OUT
from cutefuse.rewrite.passes.filter import names_at
from cutefuse.rewrite.state import State

FORMS = {
    "single": "reads a single tensor",
    "upsample": "reads an enlarged tensor",
    "ranges": "reads channels of a wider tensor",
    "residual": "is followed by the Add of a residual",
    "alone": "stands alone",
    "image": "reads the network's image",
    "depthwise": "is depthwise",
    "pools": "stands behind an average pool or slices that its filter can compute",
    "spread": "is a ConvTranspose or has a DepthToSpace behind it",
}


def run(state: State) -> None:
    """Reads what the passes found; leaves `unused_options`, sentences about options without effect."""
    tanh = "--tanh-silu only helps TensorRT 11 and newer; other engines compute SiLU as well either way"
    options = state.options
    state.unused_options = [
        *options.idle,
        *_filters(state),
        *_types(state),
        *([tanh] if options.tanh_silu and not state.fuses_tanh else []),
        *_figures(state),
    ]


def _filters(state: State) -> Iterator[str]:
    sites, options = state.sites, state.options
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
        if form in FORMS and form not in state.forms:
            yield f"--without {form} does nothing: no candidate {FORMS[form]}"


def _types(state: State) -> Iterator[str]:
    conversion, options = state.conversion, state.options
    if conversion is None:
        if options.scope:
            yield "--scope does nothing without --dtype"
        for pattern in options.keep_float32:
            yield f"--keep-float32 '{pattern}' does nothing without --dtype"
        return
    whole = conversion.scope == "model"
    nodes = state.graph.nodes if whole else [n for s in state.sites if s.match for n in s.nodes]
    for pattern in options.keep_float32:
        if not any(fnmatchcase(name, pattern) for n in nodes for name in names_of(n)):
            where = "the model" if whole else "a candidate, and --scope sites lowers nothing else"
            yield f"--keep-float32 '{pattern}' names no node of {where}; nothing was kept by it"
    if not conversion.changed:
        of_model, of_sites = "the model holds no float32 that it would lower", "no site that can be fused is float32"
        yield f"--dtype does nothing: {of_model if whole else of_sites}"


def _figures(state: State) -> Iterator[str]:
    options = state.options
    for name, dims in options.shapes.items():
        if tuple(dims) == tuple(state.graph.dims(name) or ()):
            yield f"--input-shape {name}:{'x'.join(map(str, dims))} does nothing: the model has that size"
    chosen = [s for s in state.sites if s.status in (FUSED, LEFT_OUT)]
    asked = options.min_gain_us is not None and options.min_gain_us >= 0  # `optimize` has a loss of its own
    if asked and options.all_sites:
        yield "--min-gain does nothing with --all"
    elif asked and not chosen:
        yield "--min-gain does nothing: there is no site to choose"
    if options.seed and not options.verify:
        yield "--seed does nothing without --verify"
    if options.verify and options.dry_run:
        yield "--verify does nothing with --dry-run; without it the patched model is run"
