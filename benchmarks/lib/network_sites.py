"""What a model of the choice is fitted to: each fused site with its sizes, its time, and the times of what it replaced.

A layer of a compiled program may compute nodes of several sites: each gets the share of its nodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cutefuse import kernels

Rows = list[dict[str, Any]]


def layer_rows(layers: Sequence[Any]) -> Rows:
    """Layers of an engine in order: name, the nodes of its model that it computes, median us, the first kernel."""
    rows = []
    for layer in layers:
        if layer.times_us:
            nodes = list(dict.fromkeys(n for step in layer.steps for n in step.nodes))
            time_us = statistics.median(layer.times_us)
            rows.append({"name": layer.name, "nodes": nodes, "us": time_us, "kernel": layer.kernels[0][:80]})
    return rows


def site_rows(report: Mapping[str, Any]) -> Rows:
    """The sites of a patch.json in short: what became of each, and what was predicted."""
    keys = ("name", "title", "op_type", "status", "reason", "takes", "gain_us", "basis", "flops", "bytes_moved",
            "bytes_saved")  # fmt: skip
    return [{k: s[k] for k in keys if k in s} for s in report["sites"]]


def call_row(call: Any) -> dict[str, Any]:
    """Sizes and attributes of a call; of a convolution N, H, W and strides by name too."""
    facts = kernels.facts(call.op_type)
    row: dict[str, Any] = {
        "op_type": call.op_type, "dtype": call.inputs[0].dtype,
        "inputs": [list(t.dims) for t in call.inputs], "outputs": [list(t.dims) for t in call.outputs],
        "attrs": {k: list(v) if isinstance(v, (list, tuple)) else v for k, v in call.attrs.items()},
        "activation": facts.get("activation"), "residual": facts.get("residual"), "view": facts.get("view"),
    }  # fmt: skip
    if facts["kind"] == "convolution":
        sources = call.inputs[: facts["sources"]]
        out, (R, S) = call.outputs[0].dims, call.attrs["kernel_shape"]
        row |= {
            "N": out[0], "H": max(t.dims[2] for t in sources), "W": max(t.dims[3] for t in sources),
            "C": [t.dims[1] for t in sources], "K": [t.dims[1] for t in call.outputs], "R": R, "S": S,
            "P": out[2], "Q": out[3], "stride": list(call.attrs["strides"]),
        }  # fmt: skip
    return row


def share_us(layers: Rows, nodes: Sequence[str]) -> float:
    """Microseconds of the layers that compute some nodes, each by how many of its nodes these are."""
    wanted = set(nodes)
    return sum(layer["us"] * len(wanted & set(layer["nodes"])) / max(len(layer["nodes"]), 1) for layer in layers)


def fitted(
    sites: Sequence[Any], plain: Mapping[str, Rows], patched: Mapping[str, Rows], tiles: Mapping[str, str]
) -> Rows:
    """One row for each fused site: its call, `ours_us` and `plain_us` in each mode, and the layers that it replaced.

    sites: of `cutefuse.match.find`, fused. plain, patched: mode -> layers. tiles: fused node -> name of its tile.
    """
    rows = []
    for site in sites:
        report = site.as_json()
        nodes = report["nodes"]
        row = {
            "name": site.name, "nodes": nodes, "views": report["takes"], "flops": report["flops"],
            "bytes_moved": report["bytes_moved"], "bytes_saved": report["bytes_saved"], "tile": tiles.get(site.name),
        }  # fmt: skip
        row |= call_row(site.match.call)
        row["ours_us"] = {mode: share_us(layers, [site.name]) for mode, layers in patched.items()}
        row["plain_us"] = {mode: share_us(layers, nodes) for mode, layers in plain.items()}
        row["plain_layers"] = {
            mode: [x["name"] for x in layers if set(nodes) & set(x["nodes"])] for mode, layers in plain.items()
        }
        rows.append(row)
    return rows
