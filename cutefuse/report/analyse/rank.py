"""What to fuse next: the sites that `cutefuse patch` finds, with the layer times of an engine of the same model.

A site saves the time of the layers that fusing it removes: the copies that build a concatenated tensor, and the layers
of other nodes that the fused node computes. A norm saves the time of its layers, less one pass over its tensors.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx import NodeProto

from cutefuse import kernels
from cutefuse.engines.kinds import model_tensor
from cutefuse.engines.layers import Layer
from cutefuse.errors import CutefuseError
from cutefuse.graph.read import Graph, label
from cutefuse.graph.store import load_model
from cutefuse.match.find import find_sites
from cutefuse.match.overlaps import check_overlaps
from cutefuse.match.site import FUSED, Site
from cutefuse.report.read.cost import layer_cost
from cutefuse.report.read.reader import Engine, read_engine
from cutefuse.report.read.sources import one_engine
from cutefuse.rewrite.apply import plan
from cutefuse.roofline.measure import peaks_for
from cutefuse.roofline.peaks import DTYPE_BITS, Peaks, by_device, peaks_from
from cutefuse.select.price import PROFILED, Price, Prices, Pricing

# A row norm of ours moves its bytes at about this share of the peak bandwidth.
_NORM_EFFICIENCY = 0.8
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


@dataclass
class Candidate:
    """One place to fuse. Times in microseconds of the profile; `gain_us` is what fusing it should save, None where the
    profile does not tell. `note` says why a gain is small or not known."""

    node: str
    operator: str
    nodes: list[str]
    layers: list[int] = field(default_factory=list)
    copy_us: float = 0.0
    compute_us: float = 0.0
    separate_us: float = 0.0
    gain_us: float | None = 0.0
    roof_gain_us: float | None = None
    refused: bool = False
    note: str = ""

    @property
    def measured_us(self) -> float:
        return self.copy_us + self.compute_us + self.separate_us


def candidates(engine: Engine, onnx_path: Path, peaks: Peaks | None = None) -> list[Candidate]:
    """All sites of a model with the times of its engine's layers, the greatest gain first, refused ones last.

    Raises CutefuseError when the model cannot be read or does not belong to the profile.
    """
    cleaned, sites = find_sites(load_model(onnx_path), onnx_path.parent)
    graph = cleaned.whole
    check_overlaps(graph, sites)
    found = price(engine, graph, sites, peaks, onnx_path)
    return sorted(found, key=lambda c: (c.refused, -(c.gain_us or 0.0), -c.measured_us))


def price(engine: Engine, graph: Graph, sites: Sequence[Site], peaks: Peaks | None, onnx_path: Path) -> list[Candidate]:
    """What fusing each site would save by a profile, in the order of `sites`: a shared saving is shared by its sites.

    Raises CutefuseError when the profile names no node of the graph.
    """
    times = _Times(engine, graph, sites, peaks)
    if engine.layers and not times.by_node.keys() & {label(n) for n in graph.nodes}:
        raise CutefuseError(f"{onnx_path} shares no node name with the profile {engine.name}; give its model")
    return [times.price(site) for site in sites]


def pricing(profile_dir: Path, onnx_path: Path) -> Pricing:
    """Prices sites by the layer times of a profile, which is read when a price is first asked for.

    What it returns raises CutefuseError as `profile_of` and `price` do.
    """
    read = functools.cache(lambda: profile_of(profile_dir, onnx_path))

    def priced(graph: Graph, sites: Sequence[Site]) -> Prices:
        engine = read()
        gpu = engine.device.get("Selected Device") or "a GPU that it does not name"
        against = f"layer times of {engine.name}, {' '.join(filter(None, (engine.backend, engine.version)))}, on {gpu}"
        ranked = price(engine, graph, sites, engine_peaks(engine), onnx_path)
        found = dict(zip(map(id, sites), ranked, strict=True))
        return lambda site: Price(found[id(site)].gain_us, PROFILED, against, found[id(site)].note)

    return priced


class _Times:
    """The layers of an engine by the nodes of its model, and which nodes go when all sites are fused."""

    def __init__(self, engine: Engine, graph: Graph, sites: Sequence[Site], peaks: Peaks | None) -> None:
        self.engine, self.peaks = engine, peaks
        fused = [s for s in sites if s.status == FUSED]
        doomed = plan(graph, fused)
        self.gone = {label(n) for n in graph.nodes if id(n) in doomed}
        self.by_node: dict[str, list[Layer]] = defaultdict(list)
        for layer in engine.layers:
            for name in layer.onnx:
                self.by_node[name].append(layer)
        self.readers: dict[str, int] = defaultdict(int)  # node -> how many fused sites take it in
        self.claims: dict[int, int] = defaultdict(int)  # layer -> how many fused sites it works for
        self.anchored: set[int] = set()  # layers that compute the anchor of a convolution
        for site in fused:
            for name in {label(n) for n in site.nodes}:
                self.readers[name] += 1
            for layer in self.of(site.nodes):
                self.claims[layer.index] += 1
            if not _is_norm(site):
                self.anchored.update(la.index for la in self.of([site.chosen.nodes[0]]) if la.kind != "copy")

    def of(self, nodes: Sequence[NodeProto]) -> list[Layer]:
        """The layers that work for any of the nodes, each once."""
        found = {la.index: la for n in nodes for la in self.by_node.get(label(n), [])}
        return list(found.values())

    def sum_us(self, layers: Sequence[Layer]) -> float:
        """Their time, each layer's divided among the sites that it works for."""
        return sum((la.time_us or 0.0) / max(self.claims[la.index], 1) for la in layers)

    def price(self, site: Site) -> Candidate:
        result = Candidate(site.name, site.op.stem, [label(n) for n in site.nodes])
        if site.status != FUSED or site.match is None:
            layers = self.of(site.nodes)
            result.layers = [la.index for la in layers]
            result.compute_us = sum(la.time_us or 0.0 for la in layers)
            result.refused = True
            result.note = f"cannot be fused: {site.reason}"
        elif _is_norm(site):
            self._norm(site, result)
        else:
            self._conv(site, result)
        return result

    def _conv(self, site: Site, result: Candidate) -> None:
        conv_layers = [la for la in self.of([site.chosen.nodes[0]]) if la.kind != "copy"]
        moves: dict[int, Layer] = {}
        shares, stays = 1, False
        concats = [n for n in site.nodes if n.op_type == "Concat"]
        for concat in concats:
            found = self._moves(concat)
            moves |= {la.index: la for la in found}
            share = max(self.readers[label(concat)], 1)
            time_us = sum(la.time_us or 0.0 for la in found) / share
            result.copy_us += time_us
            if label(concat) in self.gone:
                result.gain_us = (result.gain_us or 0.0) + time_us
                shares = max(shares, share)
            else:
                stays = True
        separate = [
            la for la in self.of(site.nodes)
            if la.index not in self.anchored and la.index not in moves and set(la.onnx) <= self.gone
        ]  # fmt: skip
        result.layers = [*moves, *(la.index for la in (*conv_layers, *separate))]
        result.compute_us, result.separate_us = self.sum_us(conv_layers), self.sum_us(separate)
        result.gain_us = (result.gain_us or 0.0) + result.separate_us
        if stays:
            result.note = "the concatenated tensor has other readers and stays"
        elif not concats and not separate:
            result.note = "the engine runs no layer of its own for what is around this convolution"
        elif concats and not moves:
            result.note = "the engine runs no copy for this concatenation"
        elif shares > 1:
            result.note = f"the concatenation is shared by {shares} convolutions; fuse all of them"
        if self.peaks and concats and conv_layers and conv_layers[0].inputs and not stays:
            size = conv_layers[0].inputs[0].size_bytes
            # The copy reads and writes every element once; the convolution's own read remains.
            result.roof_gain_us = 2 * size / self.peaks.bandwidth_gbs / 1e3 / shares if size else None

    def _moves(self, concat: NodeProto) -> list[Layer]:
        """The copies that build a concatenated tensor."""
        sources, merged = set(concat.input), concat.output[0]
        return [
            layer for layer in self.engine.layers
            if layer.kind == "copy" and (
                label(concat) in layer.onnx
                or merged in {model_tensor(t.name) for t in layer.outputs if t.name != merged}  # Myelin's: a part of it
                or layer.name.removesuffix(" copy") in sources
                and (layer.origin == "concat" or merged in {t.name for t in layer.outputs})
            )
        ]  # fmt: skip

    def _norm(self, site: Site, result: Candidate) -> None:
        layers = self.of([n for n in site.nodes if label(n) in self.gone])
        result.layers = [la.index for la in layers]
        result.compute_us = self.sum_us(layers)
        result.gain_us = None
        larger = next((la for la in layers if not set(la.onnx) <= self.gone), None)
        size = self._bytes(site, layers)
        if not layers:
            result.note = "the profile has no layer for its nodes"
        elif larger is not None:
            result.note = f"it runs inside a larger layer ({larger.label}), its own time is not known"
        elif size is None:
            result.note = "its sizes are not known; set the shapes of the model's inputs"
        elif self.peaks is None:
            result.note = "the bandwidth of the device is not known; give --peaks"
        else:
            floor_us = size / self.peaks.bandwidth_gbs / 1e3
            result.roof_gain_us = max(result.compute_us - floor_us, 0.0)
            result.gain_us = max(result.compute_us - floor_us / _NORM_EFFICIENCY, 0.0)

    def _bytes(self, site: Site, layers: Sequence[Layer]) -> float | None:
        """What the fused norm reads and writes, in the type that the engine computes in."""
        call = site.chosen.call
        if all(d >= 0 for t in (*call.inputs, *call.outputs) for d in t.dims):
            own = _BITS[call.inputs[0].dtype]
            bits = next((DTYPE_BITS[la.precision] for la in layers if la.precision in DTYPE_BITS), own)
            return site.op.cost(call).bytes_moved * bits / own
        return layer_cost(self.engine, layers[0]).size_bytes if len(layers) == 1 else None


def _is_norm(site: Site) -> bool:
    return bool(kernels.facts(site.chosen.call.op_type)["kind"] == "norm")


def gains(profile_dir: Path, onnx_path: Path) -> dict[str, float | None]:
    """Expected gain in microseconds of fusing each site, by the name of its anchor; None where it is not known.

    A node without a name goes by its first output. `profile_dir` is the output folder of `cutefuse process` for that
    very model (or its graph.json). Raises CutefuseError when the two do not belong together.
    """
    engine = profile_of(profile_dir, onnx_path)
    return {c.node: c.gain_us for c in candidates(engine, onnx_path, engine_peaks(engine)) if not c.refused}


def profile_of(profile_dir: Path, onnx_path: Path) -> Engine:
    """The profiled engine of a model in the output folder of `cutefuse process`. Raises CutefuseError without one."""
    engine = read_engine(one_engine(profile_dir, onnx_path))
    if not engine.profiled:
        raise CutefuseError(f"{profile_dir} holds no layer times (*.profile.json); run `cutefuse process` first")
    return engine


def engine_peaks(engine: Engine) -> Peaks | None:
    """Peaks of the device of a profile: measured ones that the profile carries, else the table's."""
    if engine.peaks:
        return peaks_from(engine.peaks, str(engine.files.get("profile_metadata")))
    return by_device(engine.device)


def peaks_of(choice: str, engine: Engine) -> Peaks | None:
    """The roof that `--peaks` names; `auto`: that of the engine's device, None where it is not known.

    Raises CutefuseError for a choice that is no roof.
    """
    return engine_peaks(engine) if choice == "auto" else peaks_for(choice)
