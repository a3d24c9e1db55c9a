"""`cutefuse diff a.onnx b.onnx`: what changed between two models. Exit codes: 0 same, 1 different, 2 bad input.

Nodes are paired by their first output, which rewriting keeps: a fused node stands where its chain's last node stood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from cutefuse.graph.read import TYPE_NAMES, external_fields, op_counts, read_tensor

Change = dict[str, Any]  # name, before, after; None where it does not exist


def compare(a: ModelProto, b: ModelProto, a_folder: Path, b_folder: Path) -> dict[str, list[Change]]:
    """The differences of header, formals, functions, op counts, nodes and initializers; empty lists where equal."""
    before, after = _parts(a, a_folder), _parts(b, b_folder)
    return {part: _changes(before[part], after[part]) for part in before}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    names = dict.fromkeys([*a, *b])
    return [{"name": n, "before": a.get(n), "after": b.get(n)} for n in names if a.get(n) != b.get(n)]


def _parts(model: ModelProto, folder: Path) -> dict[str, Mapping[str, Any]]:
    """What can differ, each thing by its name."""
    graph = model.graph
    return {
        "header": _header(model),
        "inputs": _formals(graph.input),
        "outputs": _formals(graph.output),
        "functions": {
            f"{f.domain}.{f.name}": f"{len(f.node)} nodes, {_digest(f.SerializeToString())}" for f in model.functions
        },
        "ops": op_counts(graph),
        "nodes": {next(iter(n.output), n.name): _node_text(n) for n in graph.node},
        "initializers": {t.name: _tensor_text(t, folder) for t in graph.initializer},
    }


def _header(model: ModelProto) -> dict[str, Any]:
    fields = ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string")
    header = {f: getattr(model, f) for f in fields}
    header |= {f"opset '{o.domain or 'ai.onnx'}'": o.version for o in model.opset_import}
    return header | {f"metadata '{p.key}'": p.value for p in model.metadata_props}


def _formals(infos: Iterable[onnx.ValueInfoProto]) -> dict[str, str]:
    texts = {}
    for info in infos:
        kind = info.type.tensor_type
        dims = [str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]
        texts[info.name] = f"{TYPE_NAMES.get(kind.elem_type, info.type.WhichOneof('value'))}[{','.join(dims)}]"
    return texts


def _node_text(node: NodeProto) -> str:
    attrs = ", ".join(_attribute_text(a) for a in sorted(node.attribute, key=lambda a: a.name))
    kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    origin = f"  [{node.doc_string}]" if node.domain == "cutefuse" and node.doc_string else ""
    return f"{node.name or '(no name)'}: {kind}({', '.join(node.input)}){' {' + attrs + '}' if attrs else ''}{origin}"


def _attribute_text(a: onnx.AttributeProto) -> str:
    simple = {a.INT, a.INTS, a.FLOAT, a.FLOATS, a.STRING, a.STRINGS}
    value = helper.get_attribute_value(a) if a.type in simple else _digest(a.SerializeToString())
    return f"{a.name}={list(value) if a.type in (a.INTS, a.FLOATS, a.STRINGS) else value}"


def _tensor_text(tensor: TensorProto, folder: Path) -> str:
    # The values count, not how they are stored: outside, as raw bytes or as numbers.
    value = read_tensor(tensor, folder)
    place = "" if not external_fields(tensor) else " outside"
    return f"{TYPE_NAMES.get(tensor.data_type, tensor.data_type)}{list(tensor.dims)} {_digest(value.tobytes())}{place}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
