"""Names by which a node may be chosen: its own, those of its tensors, and of the PyTorch modules that it came from."""

from __future__ import annotations

import ast

from onnx import NodeProto

# Where PyTorch's dynamo exporter, whose nodes are called node_conv2d_7, keeps the paths of the modules around a node:
# "['', 'neck', 'neck.0', 'conv2d_7']", and in "namespace" ": Net/neck: Sequential/neck.0: Conv2d/conv2d_7: aten".
SCOPES, NAMESPACE = "pkg.torch.onnx.name_scopes", "namespace"


def scopes(node: NodeProto) -> list[str]:
    """The paths of the modules around a node, outermost first, and its name in PyTorch; [] where it carries none."""
    if not (stored := {p.key: p.value for p in node.metadata_props}):
        return []
    try:
        found = ast.literal_eval(stored.get(SCOPES, "None"))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # another tool wrote it
        found = None
    if not isinstance(found, list | tuple):
        parts = stored.get(NAMESPACE, "").split("/")
        found = [path for path, colon, _ in (p.partition(": ") for p in parts) if colon]
    return [path for path in found if isinstance(path, str) and path]


def names_of(node: NodeProto) -> set[str]:
    """The node's name, its outputs and its scopes."""
    return {name for name in (node.name, *node.output, *scopes(node)) if name}
