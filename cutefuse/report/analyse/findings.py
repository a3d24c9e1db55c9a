"""Findings about an engine in words, each with its cost and its layers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from cutefuse.engines.kinds import is_row_norm, on_tensor_cores
from cutefuse.engines.layers import Layer, moved
from cutefuse.engines.plugins import count_plugins
from cutefuse.report.read.cost import Placement
from cutefuse.report.read.engine import Engine, format_of
from cutefuse.report.read.graph import neighbours
from cutefuse.report.read.moves import moves
from cutefuse.table import counted, time_text

TINY_US = 5.0
_LOW = ("FP16", "BF16", "INT8", "FP8", "FP4", "INT4")
# Channels that tensor cores and vectorised layouts want, per type.
_ALIGNMENT = {"FP16": 8, "BF16": 8, "INT8": 16, "FP8": 16, "TF32": 4}


@dataclass
class Finding:
    """One observation. `cost_us`: time of the layers concerned, an upper bound of what can be won."""

    severity: str  # high, medium, low, info
    title: str
    text: str
    advice: str = ""
    cost_us: float = 0.0
    layers: list[int] = field(default_factory=list)

    def onnx(self, engine: Engine, limit: int = 12) -> list[str]:
        names = dict.fromkeys(n for i in self.layers for n in engine.layers[i].onnx)
        return list(names)[:limit]


def findings(engine: Engine, places: list[Placement | None]) -> list[Finding]:
    """All findings, the costliest first within each severity. `places`: of the layers under the roof."""
    checks = _ON_CPU if engine.on_cpu else _ALL if engine.profiled else _UNTIMED
    found = [finding for check in checks for finding in check(engine)]
    if not engine.on_cpu:  # where small layers leave cores idle, which says nothing about a GPU
        found += _far_from_roof(engine, places)
    order = ("high", "medium", "low", "info")
    return sorted(found, key=lambda f: (order.index(f.severity), -f.cost_us))


def _time(layers: list[Layer]) -> float:
    return sum(layer.time_us or 0.0 for layer in layers)


def _share(engine: Engine, layers: list[Layer]) -> str:
    if not engine.total_us:
        return "not profiled"
    return f"{time_text(_time(layers))}, {100 * _time(layers) / engine.total_us:.1f} % of all layers"


def _about(
    engine: Engine, layers: list[Layer], title: str, text: str, advice: str = "", severity: str = ""
) -> list[Finding]:
    """A finding about these layers; none without layers. `severity`: by their share of the time where it is empty."""
    if not layers:
        return []
    cost_us = _time(layers)
    share = cost_us / engine.total_us if engine.total_us else 0.0
    severity = severity or ("high" if share >= 0.10 else "medium" if share >= 0.03 else "low")
    indices = [layer.index for layer in sorted(layers, key=lambda layer: -(layer.time_us or 0.0))]
    return [Finding(severity, title, text, advice, cost_us, indices)]


def _plugins(engine: Engine) -> list[Finding]:
    if engine.runs_bodies:
        bodies = [layer for layer in engine.layers if engine.in_body(layer)]
        text = "On a CPU fused nodes run their function bodies, in standard operators."
        advice = "Their times are no measure of the kernels: profile on a GPU, with TensorRT or PyTorch."
        return _about(engine, bodies, "Fused nodes run as function bodies", text, advice, "info")
    sites = engine.fused_nodes
    if not sites or engine.on_cpu:
        return []
    count, missing = count_plugins(engine.layers, sites)
    title = f"{count} of {len(sites)} fused nodes run as plugins"
    if missing:
        text = f"The patch report lists {len(sites)} fused nodes; {', '.join(missing[:3])} became ordinary layers."
        advice = "Build with the plugin library (`cutefuse build` adds it); TensorRT 10.6 needs --no-functions."
        return [Finding("high", title, text, advice)]
    layers = [layer for layer in engine.layers if layer.kind == "plugin"]
    text = "Every fused node of the patch report is a plugin layer of this engine."
    return _about(engine, layers, title, text, severity="info")


def _concats(engine: Engine) -> list[Finding]:
    """Copies that only bring tensors together in front of a convolution."""
    _, consumers = neighbours(engine)
    hits = [
        layer for layer in engine.layers
        if layer.kind == "copy" and layer.origin == "concat" and not engine.in_body(layer)  # where a GPU runs a kernel
        and (layer.name.endswith(" copy") or any(engine.layers[c].kind == "conv" for c in consumers[layer.index]))
    ]  # fmt: skip
    text = (
        f"{counted(len(hits), 'layer')} only move data so that tensors lie side by side ({_share(engine, hits)}). "
        "A convolution that reads its sources directly needs none of them."
    )
    advice = "Run `cutefuse patch` on the ONNX model: Concat → Conv → BatchNorm → activation becomes one plugin."
    if engine.fused_nodes:
        advice = "The model is patched already: its patch report says why these were left out."
    reasons = {n.get("reason", "") for n in engine.concats if n.get("action") == "copy"} - {""}
    if reasons:
        text += f" TensorRT's own reasons: {'; '.join(sorted(reasons)[:3])}"
    return _about(engine, hits, "Concatenations are copied in front of convolutions", text, advice)


def _moved(engine: Engine) -> list[Finding]:
    """Of an engine without times: what its copies read and write, and the largest of them."""
    sums = moved(engine.layers)
    if not sums.copy_bytes:
        return []
    share = sums.copy_bytes / sums.all_bytes
    largest = moves(engine)
    text = f"{100 * share:.0f} % of what all layers read and write. The largest: " + "; ".join(
        f"{move.size_bytes / 1e6:.1f} MB: {move.reason}" for move in largest[:3]
    )
    severity = "high" if share >= 0.25 else "medium" if share >= 0.1 else "low"
    return [Finding(severity, sums.text, f"{text}.", layers=[move.index for move in largest])]


def _reformats(engine: Engine) -> list[Finding]:
    groups: dict[tuple[str, str], list[Layer]] = defaultdict(list)
    for layer in engine.layers:
        if layer.kind == "copy" and layer.inputs and layer.outputs:
            if layer.origin in ("reformat", "quantise", "cast"):
                groups[format_of(layer.inputs[0]), format_of(layer.outputs[0])].append(layer)
    producers, consumers = neighbours(engine)
    found = []
    for (before, after), layers in groups.items():
        if _time(layers) < 0.01 * engine.total_us and len(layers) < 4:
            continue
        title = "Copies that change no format"
        if before != after:
            title = f"{counted(len(layers), 'reformat')} {before} → {after}"
        around = {engine.layers[i].kind for lay in layers for i in (*producers[lay.index], *consumers[lay.index])}
        if "plugin" in around:
            advice = "A plugin's format was not accepted by its neighbour; see the formats on the edges of the graph."
        elif before.split(" ")[0] != after.split(" ")[0]:
            advice = "A change of precision: keep neighbours in one type, or move the Q/DQ or Cast node."
        elif not any(producers[lay.index] for lay in layers):
            advice = "At an input of the engine: give the data in that format (--inputIOFormats) and the copy goes."
        else:
            advice = "A change of layout: channels that are multiples of 8 (FP16) or 32 (INT8) keep one layout."
        found += _about(engine, layers, title, f"{_share(engine, layers)}.", advice)
    return found


def _islands(engine: Engine) -> list[Finding]:
    share: dict[str, float] = defaultdict(float)
    for layer in engine.layers:
        if layer.kind in ("conv", "gemm", "plugin"):
            share[layer.precision] += layer.time_us or 1e-3
    dominant = max(share, key=lambda p: share[p], default="")
    if dominant not in _LOW:
        return []
    hits = [
        layer for layer in engine.layers
        if layer.precision in ("FP32", "TF32") and layer.kind not in ("copy", "noop", "plugin", "foreign", "other")
    ]  # fmt: skip
    text = f"The engine computes in {dominant}, these layers in FP32 ({_share(engine, hits)})."
    advice = "Check the Casts around them; norms and softmax may need FP32 sums, convolutions and products do not."
    return _about(engine, hits, f"{counted(len(hits), 'FP32 island')} in a {dominant} engine", text, advice)


def _channels(engine: Engine) -> list[Finding]:
    hits, examples = [], []
    for layer in engine.layers:
        multiple = _ALIGNMENT.get(layer.precision)
        if layer.kind != "conv" or multiple is None or not layer.inputs or len(layer.inputs[0].dims) < 3:
            continue
        if layer.raw.get("Groups", 1) not in (1, None):
            continue
        c, k = layer.inputs[0].dims[1], layer.raw.get("OutMaps")
        if not isinstance(k, int):
            k = layer.outputs[0].dims[1] if layer.outputs and len(layer.outputs[0].dims) > 1 else 0
        bad_in = c > 0 and c % multiple and c > 4  # images have 1, 3 or 4 channels by nature
        if bad_in or (k > 0 and k % multiple):
            hits.append(layer)
            examples.append(f"{layer.label}: C={c}, K={k}, {layer.precision} wants multiples of {multiple}")
    text = f"{'; '.join(examples[:3])}{' …' if len(examples) > 3 else ''} ({_share(engine, hits)})."
    advice = "Pad the channels in the model: tensor cores and vectorised layouts compute the padding anyway."
    return _about(engine, hits, f"{counted(len(hits), 'convolution')} with misaligned channels", text, advice)


def _scalar_convs(engine: Engine) -> list[Finding]:
    slow = [lay for lay in engine.layers if on_tensor_cores(lay.kind, lay.type, lay.tactic) is False]
    depthwise = [lay for lay in slow if lay.raw.get("Groups", 1) not in (1, None) or "epthwise" in lay.type]
    dense = [lay for lay in slow if lay not in depthwise]
    examples = ", ".join(f"{lay.label} ({lay.tactic[:40]})" for lay in dense[:2])
    text = f"Their kernels use no tensor cores ({_share(engine, dense)}): {examples}."
    advice = "FP32 without TF32, INT8 with few channels, or odd shapes; allow FP16 or TF32, or align the channels."
    found = _about(engine, dense, f"{counted(len(dense), 'convolution')} without tensor cores", text, advice)
    if _time(depthwise) > 0.03 * engine.total_us:
        text = f"Depthwise and grouped convolutions are bound by memory ({_share(engine, depthwise)})."
        found += _about(engine, depthwise, counted(len(depthwise), "depthwise convolution"), text, severity="info")
    return found


def _tiny(engine: Engine) -> list[Finding]:
    hits = [lay for lay in engine.layers if lay.time_us is not None and 0 < lay.time_us < TINY_US]
    if len(hits) < 4 or _time(hits) < 0.05 * engine.total_us:
        return []
    text = f"{len(hits)} of {len(engine.layers)} layers take under {TINY_US:g} µs each ({_share(engine, hits)})."
    graphs = "" if engine.inference.get("CUDA Graph") == "Enabled" else ", and run with CUDA graphs"
    advice = f"Launch and drain dominate them: fuse neighbours, raise the batch{graphs}."
    return _about(engine, hits, f"{len(hits)} tiny layers", text, advice)


def _opaque(engine: Engine) -> list[Finding]:
    hits = [lay for lay in engine.layers if lay.kind == "foreign"]
    if _time(hits) < 0.2 * engine.total_us:
        return []
    text = f"TensorRT compiled these regions as a whole ({_share(engine, hits)}); their inside is not profiled."
    advice = "`cutefuse profile-kernels --engine` shows their kernels, by Nsight Systems and Nsight Compute."
    return _about(engine, hits, counted(len(hits), "opaque compiled region"), text, advice, "info")


def _norms(engine: Engine) -> list[Finding]:
    hits = [lay for lay in engine.layers if lay.kind == "norm" and is_row_norm(lay.type, lay.name)]
    if _time(hits) < 0.05 * engine.total_us:
        return []
    text = f"Normalisations run as layers of their own ({_share(engine, hits)})."
    advice = "`cutefuse patch` replaces RMSNorm and LayerNorm, and fuses the residual addition before them."
    return _about(engine, hits, counted(len(hits), "normalisation layer"), text, advice)


def _timing(engine: Engine) -> list[Finding]:
    found = []
    latency_ms, p99_ms = engine.latency_ms, engine.percentile_ms(99)
    if latency_ms and engine.total_us and not 0.75 < engine.total_us / 1000 / latency_ms < 1.25:
        text = f"The layers sum up to {engine.total_us / 1000:.3f} ms, one inference takes {latency_ms:.3f} ms. "
        text += (
            "The profiler ran apart from the timing, and costs time of its own." if engine.on_cpu
            else "Profiling adds an event per layer; parallel streams and CUDA graphs hide launches."
        )  # fmt: skip
        found.append(Finding("info", "Layer times do not add up to the latency", text, "Trust shares, not sums."))
    if latency_ms and p99_ms and p99_ms > 1.2 * latency_ms:
        text = f"p99 is {p99_ms:.3f} ms, the median {latency_ms:.3f} ms."
        advice = (
            "Other work shares the processor, or its clock changes; give more iterations= or fewer threads=."
            if engine.on_cpu else "Lock the clocks, use spin wait, and look for other load."
        )  # fmt: skip
        found.append(Finding("low", "Latency is unsteady", text, advice))
    return found


def _far_from_roof(engine: Engine, places: list[Placement | None]) -> list[Finding]:
    hits = [
        (layer, place) for layer, place in zip(engine.layers, places, strict=True)
        if place and place.percent_of_roof < 30 and (layer.time_us or 0.0) > 0.03 * engine.total_us
        and layer.kind in ("conv", "gemm", "plugin", "pointwise", "norm")
    ]  # fmt: skip
    if not hits:
        return []
    layer, place = min(hits, key=lambda h: h[1].percent_of_roof)
    text = (
        f"{counted(len(hits), 'heavy layer')} below 30 % of what the device allows; the furthest is {layer.label} at "
        f"{place.percent_of_roof:.0f} % ({place.bound}-bound, could take {time_text(place.floor_us)})."
    )
    advice = "Small grids, bad alignment or an unlucky tactic: raise the optimisation level or the batch."
    return _about(engine, [h[0] for h in hits], "Heavy layers far below the roof", text, advice, "medium")


_ALL = (_plugins, _concats, _reformats, _islands, _channels, _scalar_convs, _tiny, _opaque, _norms, _timing)
_UNTIMED = (_moved, _plugins, _islands, _channels, _scalar_convs)
_ON_CPU = (_plugins, _concats, _norms, _timing)  # the others speak of GPUs
