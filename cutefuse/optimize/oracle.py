"""The compiler as judge of a patch: TensorRT for RTX compiles the model before and after, and what it moves decides.

Before patching, its record of the plain model says what the engine removes, fuses and copies by itself. After it, the
copies beside fused nodes are held against those that went: a site that adds more than it removes is left out, and the
model is patched and compiled again.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx import NodeProto

from cutefuse import plugin_path
from cutefuse.engines.layers import CompiledGraph, layer_bytes
from cutefuse.engines.tensorrt import rtx
from cutefuse.errors import CutefuseError
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.read import Graph, label
from cutefuse.graph.store import EXTERNAL_LIMIT, load_model, uses_external_data, writer
from cutefuse.match.site import FUSED
from cutefuse.operators.layouts import NHWC, layout_of
from cutefuse.rewrite.patch import Options, Result, patch, plain_model
from cutefuse.select.compiled import Kernel, Record, removed_bytes

BESIDE = ("conv", "gemm", "attention", "plugin", "noop")  # kinds of layers that a fused node does not replace
VIEWS = ("Transpose", "Identity", "Cast", "Reshape")  # what stands between a copy and the fused node beside it
NEAREST = {100: 120, 103: 120, 110: 121}  # GPUs whose engines it does not build -> the next ones of their family
MOST_TRIALS = 6  # of patching and compiling
_WORTH_BYTES = 16 * 1024  # a smaller difference of copies is no reason


def is_for(options: Options) -> bool:
    """Whether the model's engine is compiled by Myelin, which TensorRT for RTX holds too."""
    return layout_of("auto", options.engine, options.sm) == NHWC


def judged(source: Path, output: Path, options: Options) -> Result:
    """Patch a model for an engine that Myelin compiles, with the compiler's own word on what pays.

    patch.json gets `compiled`: what it made of both models; or why it was not asked, where it is not installed or
    refuses the model, and then the rules of `wiring` decide. Raises CutefuseError as `patch` does.
    """
    sm = NEAREST.get(options.sm, options.sm or rtx.DEFAULT_SM)
    try:
        if reason := rtx.available():
            raise CutefuseError(reason)
        rtx.check_sm(sm)
        plain = _compile_plain(source, options, sm)
    except CutefuseError as error:
        note = f"{error}; rules predicted what {rtx.NAME} would copy"
        return patch(source, output, replace(options, compiler_said={"note": note}))
    record = record_of(plain)
    best = _left_out(source, options, record, plain, sm)
    totals = {"plain": _totals(plain), "patched": _totals(best.compiled) if best.compiled else None}
    said = {"note": "", "sm": sm, "left_out": best.left, **totals}
    return patch(source, output, replace(options, compiled=record, outweighed=best.left, compiler_said=said))


@dataclass(frozen=True)
class _Trial:
    """A patch with some sites left out: what it fused, and what was compiled of it; None where it fused nothing."""

    left: dict[str, str]
    copy_bytes: int
    compiled: CompiledGraph | None
    outweighed: dict[str, str]


def _left_out(source: Path, options: Options, record: Record, plain: CompiledGraph, sm: int) -> _Trial:
    """The trial that copies least. Sites whose copies outweigh what they remove are left out together, or else one by
    one, as long as fewer bytes are copied: what one of them removes may go only beside another one."""
    asked = replace(options, compiled=record, verify=False, dry_run=False)

    def trial(left: dict[str, str]) -> _Trial:
        with tempfile.TemporaryDirectory(prefix="cutefuse-patched-") as folder:
            result = patch(source, Path(folder) / source.name, replace(asked, outweighed=left))
            if result.output is None:
                return _Trial(left, plain.moved.copy_bytes, None, {})
            compiled = rtx.compile_model(result.output, sm, options.shapes, [plugin_path()])
            found = {} if options.all_sites else outweighed(result, record, plain, compiled)
            return _Trial(left, compiled.moved.copy_bytes, compiled, found)

    best, tries = trial({}), 1
    while best.outweighed:
        batches = [best.outweighed, *({name: why} for name, why in best.outweighed.items() if len(best.outweighed) > 1)]
        for batch in batches[: MOST_TRIALS - tries]:
            now, tries = trial(best.left | batch), tries + 1
            if now.copy_bytes < best.copy_bytes:
                best = now
                break
        else:
            break
    return best


def _compile_plain(source: Path, options: Options, sm: int) -> CompiledGraph:
    model = plain_model(source, options)
    with tempfile.TemporaryDirectory(prefix="cutefuse-plain-") as folder:
        path = Path(folder) / source.name
        with writer(path, uses_external_data(model) or model.ByteSize() > EXTERNAL_LIMIT, source) as out:
            out.save(model)
            out.commit()
        return rtx.compile_model(path, sm, options.shapes, [plugin_path()])


def record_of(graph: CompiledGraph) -> Record:
    """The kernels of a compiled graph beside its convolutions and products, and the names of all its nodes."""
    found = [
        Kernel(tuple(layer.onnx), layer_bytes(layer), layer.kind == "copy")
        for layer in graph.layers if layer.kind not in BESIDE and layer.onnx
    ]  # fmt: skip
    return Record(tuple(found), frozenset(name for layer in graph.layers for name in layer.onnx))


def outweighed(result: Result, record: Record, plain: CompiledGraph, patched: CompiledGraph) -> dict[str, str]:
    """The fused sites that add more bytes of copies than they remove, by name, each with the reason.

    A copy beside several fused nodes counts for each of them in equal parts, and so does one that several remove.
    """
    assert result.output is not None
    fused = [s for s in result.sites if s.status == FUSED and s.match]
    owners = Counter(label(n) for s in fused for n in s.nodes)
    graph = Graph(load_model(result.output), result.output.parent)
    beside = _fused_beside(graph)
    bindings = _binding_bytes(plain)
    added: dict[str, float] = defaultdict(float)
    for copy in patched.copies:
        names = {name for node in copy.onnx for name in beside.get(node, ())}
        before = sum(bindings.get(t.name, 0) for t in (*copy.inputs, *copy.outputs))
        for name in names:
            added[name] += max(layer_bytes(copy) - before, 0) / len(names)
    found = {}
    for site in fused:
        gone = {label(n): owners[label(n)] for n in site.nodes}
        removed = removed_bytes(record, gone)
        if added[site.name] > removed + _WORTH_BYTES:
            found[site.name] = (
                f"{rtx.NAME} compiled it: copies beside it move {added[site.name] / 1e6:.2f} MB, those that it removes "
                f"{removed / 1e6:.2f} MB"
            )
    return found


def _binding_bytes(graph: CompiledGraph) -> dict[str, int]:
    """Bytes of the copies that read or write each input and output of a network."""
    ends, found = {*graph.inputs, *graph.outputs}, dict[str, int]()
    for copy in graph.copies:
        for name in {t.name for t in (*copy.inputs, *copy.outputs)} & ends:
            found[name] = found.get(name, 0) + layer_bytes(copy)
    return found


def _fused_beside(graph: Graph) -> dict[str, set[str]]:
    """Name of a node -> the fused nodes that make what it reads or read what it makes, through VIEWS; of a Concat also
    those that read its inputs: it is copied for them, since otherwise its inputs would be written in place."""
    found: dict[str, set[str]] = {}
    for node in graph.nodes:
        beside = [n for t in node.output for n in _ends(graph, t, True)]
        beside += [n for t in node.input for n in _ends(graph, t, False)]
        if node.op_type == "Concat":
            beside += [n for t in node.input for n in _ends(graph, t, True)]
        fused = {label(n) for n in beside if n.domain == DOMAIN}
        found[label(node)] = {label(node)} if node.domain == DOMAIN else fused
    return found


def _ends(graph: Graph, tensor: str, forward: bool) -> list[NodeProto]:
    """The nodes that read a tensor, or without `forward` the one that makes it, through VIEWS."""
    maker = graph.producer(tensor)
    found = []
    for node in graph.users(tensor) if forward else [maker] if maker is not None else []:
        beyond = node.output if forward else node.input
        found += [n for t in beyond for n in _ends(graph, t, forward)] if node.op_type in VIEWS else [node]
    return found


def _totals(graph: CompiledGraph) -> dict[str, Any]:
    return {
        "copies": graph.moved.copies, "copy_bytes": graph.moved.copy_bytes, "bytes": graph.moved.all_bytes,
        "layers": len(graph.layers), "plugins": graph.plugin_layers, "engine_bytes": graph.engine_bytes,
        "build_s": round(graph.seconds, 2), "build_peak_mib": round(graph.peak_mib),
    }  # fmt: skip


def sentence(report: dict[str, Any]) -> str:
    """What the compiler said, from a patch report; "" where it was not asked."""
    told = report.get("compiled")
    if not told or told["note"]:
        return told["note"] if told else ""

    def copies(totals: dict[str, Any] | None) -> str:
        return f"{totals['copies']} copies, {totals['copy_bytes'] / 1e6:.1f} MB" if totals else "not written"

    left = f"; left out as their copies outweigh what they remove: {len(told['left_out'])}" if told["left_out"] else ""
    both = f"plain {copies(told['plain'])}; patched {copies(told['patched'])}"
    return f"{rtx.NAME} compiled for {told['sm'] / 10:.1f}: {both}{left}"
