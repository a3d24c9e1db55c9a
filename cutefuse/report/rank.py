"""What to fuse next: from the layer times of an engine back to the nodes of its ONNX model.

A candidate is a convolution that reads a channel concatenation, or a normalisation. Its measured time is that of the
layers that fusing removes: copies that build the concatenated tensor, and normalisations and activations of their own.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError, run_command
from cutefuse.output import write_json
from cutefuse.report.cost import layer_cost
from cutefuse.report.kinds import copy_origin
from cutefuse.report.reader import Engine, Layer, find_engines, read_engine
from cutefuse.roofline.peaks import Peaks, by_device, peaks_from

_ACTIVATIONS = ("Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh", "HardSwish", "Mul")
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
          "SkipSimplifiedLayerNormalization")  # fmt: skip
# A row norm of ours moves its bytes at about this share of the peak bandwidth.
_NORM_EFFICIENCY = 0.8


@dataclass
class Candidate:
    """One place to fuse. Times in microseconds of the profile; `gain_us` is what fusing it should save."""

    node: str
    operator: str
    nodes: list[str]
    layers: list[int] = field(default_factory=list)
    copy_us: float = 0.0
    compute_us: float = 0.0
    separate_us: float = 0.0
    gain_us: float = 0.0
    roof_gain_us: float | None = None
    note: str = ""

    @property
    def measured_us(self) -> float:
        return self.copy_us + self.compute_us + self.separate_us


def candidates(engine: Engine, onnx_path: Path, peaks: Peaks | None = None) -> list[Candidate]:
    """All candidates of a model with the times of its engine's layers, the greatest gain first.

    Raises CutefuseError when the model cannot be read or does not belong to the profile.
    """
    graph = _graph(onnx_path)
    by_node: dict[str, list[Layer]] = defaultdict(list)
    for layer in engine.layers:
        for name in layer.onnx:
            by_node[name].append(layer)
    names = {_name(n) for n in graph.node}
    if engine.layers and not names & set(by_node):
        raise CutefuseError(
            f"{onnx_path} shares no node name with the profile {engine.name}; give the model it was built from"
        )
    maker = {o: n for n in graph.node for o in n.output if o}
    users: dict[str, list[Any]] = defaultdict(list)
    for node in graph.node:
        for tensor in node.input:
            users[tensor].append(node)
    outputs = {o.name for o in graph.output}
    found = []
    for node in graph.node:
        if node.op_type == "Conv" and node.input and _is_concat(maker.get(node.input[0])):
            concat = maker[node.input[0]]
            shared = [u for u in users[concat.output[0]] if u.op_type == "Conv" and u.input[0] == concat.output[0]]
            stays = len(shared) < len(users[concat.output[0]]) or concat.output[0] in outputs
            found.append(_concat_conv(engine, peaks, by_node, node, concat, _tail(node, users, outputs), shared, stays))
        elif node.op_type in _NORMS:
            found.append(_norm(engine, peaks, by_node, node))
    return sorted(found, key=lambda c: (-c.gain_us, -c.measured_us))


def _graph(path: Path) -> Any:
    import onnx

    try:
        return onnx.load(str(path), load_external_data=False).graph
    except Exception as error:  # protobuf's DecodeError has no stable home
        raise CutefuseError(
            f"{path} cannot be read as an ONNX model ({error}); give the model of this profile"
        ) from None


def _name(node: Any) -> str:
    return str(node.name or (node.output[0] if node.output else ""))


def _is_concat(node: Any) -> bool:
    return (
        node is not None
        and node.op_type == "Concat"
        and any(a.name == "axis" and a.i in (1, -3) for a in node.attribute)
    )


def is_concat_copy(layer: Layer) -> bool:
    """Whether a layer only moves a tensor to its place in a concatenation."""
    return layer.kind == "copy" and copy_origin(layer.name, layer.raw, layer.type) == "concat"


def _tail(conv: Any, users: dict[str, list[Any]], outputs: set[str]) -> list[Any]:
    """BatchNormalization and activation behind a convolution, as far as one consumer follows another."""
    tail: list[Any] = []
    tensor = conv.output[0]
    while tensor not in outputs:
        following = users[tensor]
        if len(following) == 2 and {u.op_type for u in following} == {"Sigmoid", "Mul"}:
            following = sorted(following, key=lambda u: u.op_type == "Mul")
            return [*tail, *following]
        if len(following) != 1:
            break
        node = following[0]
        wanted = ("BatchNormalization", *_ACTIVATIONS[:-1]) if not tail else _ACTIVATIONS[:-1]
        if node.op_type not in wanted:
            break
        tail.append(node)
        if node.op_type != "BatchNormalization":
            break
        tensor = node.output[0]
    return tail


def _concat_conv(
    engine: Engine, peaks: Peaks | None, by_node: dict[str, list[Layer]], conv: Any, concat: Any, tail: list[Any],
    shared: list[Any], stays: bool,
) -> Candidate:  # fmt: skip
    nodes = [concat, conv, *tail]
    result = Candidate(_name(conv), "ConcatConv", [_name(n) for n in nodes])
    conv_layers = [la for la in by_node.get(_name(conv), []) if la.kind != "copy"]
    sources, merged = set(concat.input), concat.output[0]
    copies = [
        layer for layer in engine.layers
        if layer.kind == "copy" and (
            _name(concat) in layer.onnx
            or layer.name.removesuffix(" copy") in sources
            and (is_concat_copy(layer) or merged in {t.name for t in layer.outputs})
        )
    ]  # fmt: skip
    fused = {la.index for la in conv_layers}
    separate = {
        la.index: la
        for n in tail
        for la in by_node.get(_name(n), [])
        if la.index not in fused and la.kind in ("pointwise", "norm")
    }
    result.layers = [la.index for la in (*copies, *conv_layers, *separate.values())]
    # One concatenation that several convolutions read disappears only when all of them are fused: each has its share.
    result.copy_us = sum(la.time_us or 0.0 for la in copies) / max(len(shared), 1)
    result.compute_us = sum(la.time_us or 0.0 for la in conv_layers)
    result.separate_us = sum(la.time_us or 0.0 for la in separate.values())
    result.gain_us = (0.0 if stays else result.copy_us) + result.separate_us
    if stays:
        result.note = "the concatenated tensor has other readers and stays"
    elif not copies:
        result.note = "the engine runs no copy for this concatenation"
    elif len(shared) > 1:
        result.note = f"the concatenation is shared by {len(shared)} convolutions; fuse all of them"
    if peaks and conv_layers and conv_layers[0].inputs and not stays:
        size = conv_layers[0].inputs[0].size_bytes
        # The copy reads and writes every element once; the convolution's own read remains.
        result.roof_gain_us = 2 * size / peaks.bandwidth_gbs / 1e3 / max(len(shared), 1) if size else None
    return result


def _norm(engine: Engine, peaks: Peaks | None, by_node: dict[str, list[Layer]], node: Any) -> Candidate:
    layers = by_node.get(_name(node), [])
    result = Candidate(
        _name(node), "RMSNorm" if "RMS" in node.op_type or "Simplified" in node.op_type else "LayerNorm", [_name(node)]
    )
    result.layers = [la.index for la in layers]
    result.compute_us = sum(la.time_us or 0.0 for la in layers)
    if any(len(la.onnx) > 1 for la in layers):
        result.note = "runs inside a larger layer; its own time is not known"
    elif peaks and layers:
        sizes = [layer_cost(engine, la).size_bytes for la in layers]
        if all(s is not None for s in sizes):
            floor_us = sum(s or 0.0 for s in sizes) / peaks.bandwidth_gbs / 1e3
            result.roof_gain_us = max(result.compute_us - floor_us, 0.0)
            result.gain_us = max(result.compute_us - floor_us / _NORM_EFFICIENCY, 0.0)
    return result


def gains(profile_dir: Path, onnx_path: Path) -> dict[str, float]:
    """Expected gain in microseconds of fusing each node, by the name of its Conv or norm node.

    A node without a name goes by its first output. `profile_dir` is the output folder of `cutefuse process` for that
    very model (or its graph.json). Raises CutefuseError when the two do not belong together.
    """
    engine = _engine_of(profile_dir, onnx_path)
    if not engine.profiled:
        raise CutefuseError(
            f"{profile_dir} holds no layer times (*.profile.json); run `cutefuse process` on the model first"
        )
    return {c.node: c.gain_us for c in candidates(engine, onnx_path, engine_peaks(engine))}


def engine_peaks(engine: Engine) -> Peaks | None:
    """Peaks of the device of a profile: measured ones that the profile carries, else the table's."""
    return (
        peaks_from(engine.peaks, str(engine.files.get("profile_metadata")))
        if engine.peaks
        else by_device(engine.device)
    )


def _engine_of(source: Path, onnx_path: Path) -> Engine:
    found = find_engines(source)
    named = [f for f in found if f["graph"].name.startswith(f"{onnx_path.name}.")]
    if not named and len(found) > 1:
        names = ", ".join(f["graph"].name for f in found[:4])
        raise CutefuseError(
            f"{source} holds several engines ({names}) and none of {onnx_path.name}; give the graph.json"
        )
    return read_engine((named or found)[0])


def main(argv: list[str] | None = None) -> int:
    """`cutefuse rank outdir model.onnx`: the ranking as a table."""
    parser = argparse.ArgumentParser(prog="cutefuse rank", allow_abbrev=False, description="What to fuse next.")
    parser.add_argument("profile", type=Path, help="folder that `cutefuse process` wrote, or a *.graph.json")
    parser.add_argument("model", type=Path, help="the ONNX model of that profile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ranking as JSON")
    args = parser.parse_args(argv)

    def command() -> int:
        engine = _engine_of(args.profile, args.model)
        rows = candidates(engine, args.model, engine_peaks(engine))
        if args.json:
            write_json(args.json, [{**vars(c), "measured_us": c.measured_us} for c in rows])
        if not rows:
            print("nothing to fuse: no Concat feeds a Conv and no normalisation is left")
            return 0
        print(f"{'gain µs':>9}{'copy':>9}{'compute':>9}{'separate':>9}{'roof':>8}  operator    node")
        for c in rows:
            roof = f"{c.roof_gain_us:.1f}" if c.roof_gain_us is not None and math.isfinite(c.roof_gain_us) else "-"
            note = f"  ({c.note})" if c.note else ""
            print(f"{c.gain_us:>9.1f}{c.copy_us:>9.1f}{c.compute_us:>9.1f}{c.separate_us:>9.1f}{roof:>8}  "
                  f"{c.operator:<12}{c.node}{note}")  # fmt: skip
        share = 100 * sum(c.gain_us for c in rows) / engine.total_us if engine.total_us else 0.0
        print(f"in all {sum(c.gain_us for c in rows):.1f} µs, {share:.1f} % of {engine.total_us:.1f} µs in layers")
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
