"""Finds the sites of all operators in a model and asks the kernel library about each: fused, or refused and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.clean import Cleaned, clean
from cutefuse.graph.read import Graph, label, nodes_of, subgraphs
from cutefuse.graph.shapes import check_shapes
from cutefuse.match.answer import Finder, Match, Refusal
from cutefuse.match.conv import build as conv
from cutefuse.match.norm import build as norm
from cutefuse.match.quant import build as quant
from cutefuse.match.site import REFUSED, Site
from cutefuse.operators.layouts import HWC8


def finders(alone: bool = False, layout: int = HWC8) -> tuple[Finder, ...]:
    """One finder for each operator. `alone`: convolutions without any neighbour are sites too. `layout`: of the nodes
    that convolutions become."""
    return conv.ConvSites(alone, layout), quant.QuantSites(layout), norm.NormSites()


def find_sites(
    model: ModelProto, folder: Path, shapes: Mapping[str, Sequence[int]] | None = None, alone: bool = False,
    layout: int = HWC8,
) -> tuple[Cleaned, list[Site]]:  # fmt: skip
    """All candidates in graph order, each fused or refused, bodies of control flow and of local functions included.

    They are found in a cleaned copy of the graph; their nodes are those of the model, its no-ops between them included.
    `shapes`: sizes of dynamic inputs, for figures; what is legal holds for any size. `alone`, `layout`: see `finders`.

    Raises CutefuseError for a broken graph: a tensor defined twice, a cycle; and for shapes that contradict the model.
    """
    check_shapes(model, shapes or {})
    cleaned = clean(model, folder)
    return cleaned, sites_of(cleaned, shapes, alone, layout)


def sites_of(
    cleaned: Cleaned, shapes: Mapping[str, Sequence[int]] | None = None, alone: bool = False, layout: int = HWC8
) -> list[Site]:
    """As `find_sites`, in a model that was cleaned; leaves in `whole` the sizes that figures are for."""
    order = {id(n): i for i, n in enumerate(cleaned.whole.nodes)}
    sites = list(_scan(cleaned, order, finders(alone, layout)))
    cleaned.whole.sized = cleaned.sized(shapes) if shapes else cleaned.graph
    for title, body in _nested(model := cleaned.whole.model):
        inner = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, graph=body)
        try:
            graph = Graph(inner, cleaned.whole.folder)
            found = list(_scan(Cleaned(graph, graph), {}, finders()))
        except CutefuseError:  # a body that shadows names is legal ONNX; it is skipped
            continue
        for site in found:
            site.match = None
            site.refuse(REFUSED, f"inside {title}")
            sites.append(site)
    return sites


def _scan(cleaned: Cleaned, order: dict[int, int], finders: Sequence[Finder]) -> Iterator[Site]:
    graph = cleaned.graph
    alive = graph.reaching_outputs()
    for node in graph.nodes:
        for finder in finders if id(node) in alive else ():
            found = finder.match(graph, node) if node.op_type in finder.anchors else None
            if found is None:
                continue
            site = Site(finder, label(node), cleaned.whole)
            if isinstance(found, Refusal):
                nodes = cleaned.originals(found.nodes or (node,))
                site.nodes = sorted(nodes, key=lambda n: order.get(id(n), 0))
                site.refuse(REFUSED, found.reason)
            else:
                found = _in_model(cleaned, found)
                around = {id(n): n for match in found.chain for n in match.nodes}
                site.around = sorted(around.values(), key=lambda n: order.get(id(n), 0))
                site.take(found)
                if reason := kernels.reject(found.call):
                    site.refuse(REFUSED, reason)
            yield site
            break


def _in_model(cleaned: Cleaned, match: Match) -> Match:
    """A match in the cleaned copy as one in the model: tensors have the same names, the nodes are the model's."""
    smaller = _in_model(cleaned, match.otherwise) if match.otherwise else None
    return replace(match, nodes=cleaned.originals(match.nodes), otherwise=smaller)


def _nested(model: ModelProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    def bodies(nodes: Iterable[NodeProto]) -> Iterator[tuple[str, onnx.GraphProto]]:
        for node in nodes:
            for body in subgraphs(node):
                yield f"the body of {node.op_type} '{label(node)}'; only the main graph is rewritten", body
                yield from bodies(body.node)

    yield from bodies(model.graph.node)
    for function in model.functions:
        if function.domain != DOMAIN:
            yield (
                f"the local function '{function.name}'; only the main graph is rewritten, inline it first",
                _body_of(function),
            )


def _body_of(function: onnx.FunctionProto) -> onnx.GraphProto:
    """The nodes of a local function as a graph; what a caller gives as an attribute has a default there."""
    given = {a.name: a for a in function.attribute_proto}
    body = onnx.GraphProto(node=function.node)
    for node in nodes_of(body):
        for i in reversed(range(len(node.attribute))):
            name, own = node.attribute[i].ref_attr_name, node.attribute[i].name
            if name in given:
                node.attribute[i].CopyFrom(given[name])
                node.attribute[i].name = own
            elif name:
                del node.attribute[i]
    return body
