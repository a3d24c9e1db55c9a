"""Outputs that are spread over squares of pixels: of a ConvTranspose whose filter is as large as its strides, and of a
Conv with a DepthToSpace behind it, before or after its activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from onnx import NodeProto

from cutefuse.graph.read import Graph, attribute, label
from cutefuse.match.after import Affine, Chain, chains_after
from cutefuse.match.conv.read import Facts
from cutefuse.operators.conv_form import most_spread

SPREAD = "spread"


def spread_of(graph: Graph, conv: NodeProto, facts: Facts) -> tuple[Facts, Chain, tuple[str, ...]] | str | None:
    """What a convolution and the nodes behind it compute, and the tensors that engines write and read again there; or
    why its DepthToSpace stays. None where outputs are not spread."""
    filters = facts.weight_dims[0]
    if facts.transposed:
        chain = chains_after(graph, conv.output[0], filters // facts.spread**2)[0]
        steps = _mapped(chain.steps, facts.of_channels)
        return facts, replace(chain, steps=steps, stored=""), tuple(filter(None, [chain.stored]))
    before = chains_after(graph, conv.output[0], filters)[0]
    move = graph.only_user(before.output)
    if move is None or not graph.is_op(move, "DepthToSpace"):
        return None
    size = attribute(move, "blocksize", 0)
    if not 2 <= size <= most_spread() or filters % size**2:
        possible = f"blocksize 2 to {most_spread()} with a multiple of its square as channels can be fused"
        return f"DepthToSpace '{label(move)}' stays: its blocksize is {size} of {filters} channels; {possible}"
    facts = replace(facts, spread=size, by_channel=attribute(move, "mode", "DCR") == "CRD")
    after = chains_after(graph, move.output[0], filters // size**2)[0]
    if before.suffix:  # the last thing that the kernels compute
        after = Chain((), before.suffix, before.params, (), move.output[0])
    steps = (*_mapped(before.steps, facts.placed), *_mapped(after.steps, facts.of_channels))
    chain = replace(after, steps=steps, nodes=(*before.nodes, move, *after.nodes), stored="")
    return facts, chain, tuple(filter(None, [before.stored, move.input[0], after.stored]))


def _mapped(steps: Sequence[Affine], place: Callable[[np.ndarray], np.ndarray]) -> tuple[Affine, ...]:
    """The same steps, of our filters."""

    def mapped(step: Affine) -> Affine:
        def make() -> tuple[np.ndarray, np.ndarray]:
            scale, shift = step.make()
            return place(scale), place(shift)

        return replace(step, make=make)

    return tuple(map(mapped, steps))
