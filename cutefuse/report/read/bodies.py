"""What a fused node stands for: the nodes that it replaced, and the layers that its function body became."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cutefuse.engines.layers import Layer
from cutefuse.graph.body import FORMAL
from cutefuse.match.site import FUSED, MERGED

_ANCHORS = ("conv", "norm")


def replaced(sites: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """By the sites of a patch report: the nodes that each fused node replaced, and the maker of each fused tensor.

    A merged site is computed by the fused node that makes its outputs.
    """
    nodes: dict[str, list[str]] = {}
    made_by: dict[str, str] = {}
    for status in (FUSED, MERGED):
        for site in (s for s in sites if s["status"] == status):
            name = site["name"]
            if status == FUSED:
                made_by |= dict.fromkeys(site.get("outputs", ()), name)
            else:
                name = next((made_by[o] for o in site.get("outputs", ()) if o in made_by), "")
            nodes.setdefault(name, []).extend(site["nodes"])
    return nodes, made_by


def is_inside(name: str) -> bool:
    """Whether a name was made of one inside a body: it is the same in every call, and says nothing to a reader."""
    return FORMAL in name


def owners(layers: Sequence[Layer], made_by: Mapping[str, str]) -> dict[int, str]:
    """The fused node of each layer of a body, backwards from the tensors that fused nodes make (tensor -> node)."""
    readers: dict[str, list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        for tensor in layer.inputs:
            readers[tensor.name].append(index)
    found: dict[int, str] = {}
    for index in reversed(range(len(layers))):
        layer = layers[index]
        if not is_inside(layer.name):
            continue
        own = next((made_by[t.name] for t in layer.outputs if t.name in made_by), None)
        behind = (found.get(i) for t in layer.outputs for i in readers[t.name] if i > index)
        own = own or next(filter(None, behind), None)
        if own is not None:
            found[index] = own
    return found


def title(layer: Layer, nodes: Sequence[str]) -> str:
    """What pages call a layer: the name of its fused node where its own is one of the inside of a body."""
    if not nodes or not is_inside(layer.name):
        return layer.name
    return nodes[0] if layer.kind in _ANCHORS else f"{nodes[0]}/{layer.type}"
