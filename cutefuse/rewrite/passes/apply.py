"""The graph as it is written: fused nodes, tanh forms, islands, function bodies."""

from __future__ import annotations

from cutefuse.graph.read import op_counts
from cutefuse.graph.store import Writer, check_written
from cutefuse.operators.layouts import NHWC
from cutefuse.rewrite import islands, tanh_silu
from cutefuse.rewrite.apply import apply_sites
from cutefuse.rewrite.functions import add_bodies
from cutefuse.rewrite.state import State


def run(state: State, out: Writer) -> None:
    """Reads `sites`, `doomed`, `silus` and `layout`; changes `model` and saves it in `out`; leaves `after`.

    Raises CutefuseError for a model that cannot be written, or that a conversion made invalid.
    """
    model, graph = state.model, state.graph
    if state.fused:
        apply_sites(graph, state.fused, state.doomed, out, state.sha256)
    tanh_silu.write(model, state.rewritten)
    if state.layout == NHWC:
        islands.lay(model, state.source.parent)
    if state.options.functions:
        add_bodies(model, graph, {s.name: s.chosen.call for s in state.fused})
    state.after = op_counts(model.graph)
    written = out.save(model)
    if state.options.dtype:
        check_written(written, state.source)
