"""Which models need the plugin library, and whether an engine really runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

import cutefuse
from cutefuse.engines.layers import Layer
from cutefuse.errors import CutefuseError, VerificationError
from cutefuse.graph.body import DOMAIN, TILE
from cutefuse.graph.store import load_model
from cutefuse.operators.layouts import HWC8, LAYOUT, NAMES, NHWC
from cutefuse.output import write_json

PLUGINS_FIRST = (10, 7, 0)  # from this TensorRT on a plugin comes before a function body of the same name


@dataclass(frozen=True)
class ModelFacts:
    """Facts about an ONNX model that the engine step needs, read without external weights."""

    fused_nodes: dict[str, str]  # node name -> op_type of the nodes in our domain
    low_precision: bool  # float16 or bfloat16 weights, inputs or outputs
    quantized: bool
    bodies: frozenset[str]  # op_types of our domain that the model carries a function body for
    tiles: dict[str, int]  # node name -> the tile that it asks for, of those that ask for one
    layouts: frozenset[str] = frozenset()  # of ops.layouts.NAMES, those of the fused convolutions


def read_model(path: Path) -> ModelFacts:
    """Facts of an ONNX file. Raises CutefuseError for a file that is missing or no ONNX model."""
    model = load_model(path)
    half = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    types = {v.type.tensor_type.elem_type for v in values} | {i.data_type for i in model.graph.initializer}
    ours = [n for n in model.graph.node if n.domain == DOMAIN]
    bodies = frozenset(f.name for f in model.functions if f.domain == DOMAIN)
    quantized = any(n.op_type == "DequantizeLinear" for n in model.graph.node)
    asked = {n.name: a.i for n in ours for a in n.attribute if a.name == TILE and a.i}
    layouts = {next((a.i for a in n.attribute if a.name == LAYOUT), HWC8) for n in ours if "Conv" in n.op_type}
    return ModelFacts(
        {n.name: n.op_type for n in ours}, bool(types & half), quantized, bodies, asked,
        frozenset(NAMES[i] for i in layouts if i in (HWC8, NHWC)),
    )  # fmt: skip


def patch_report(model: Path) -> dict[str, Any] | None:
    """The rewriter's report on a patched model, `<model>.patch.json` beside it; None where none describes this file."""
    path = report_path(model)
    if path is None:
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(report.get("sites"), list):
            raise ValueError("it has no list 'sites'")
    except (ValueError, AttributeError, OSError) as error:
        raise CutefuseError(f"{path} is no patch report ({error}); run `cutefuse patch` again") from None
    return dict(report) if speaks_of(report, model.name) else None


def report_path(model: Path) -> Path | None:
    """Where the patch report of a model lies: `m.patch.json` for `m.onnx` and for `m.cutefuse.onnx`."""
    stem = model.name.removesuffix(".onnx")
    places = (model.with_name(f"{name}.patch.json") for name in (stem, stem.removesuffix(".cutefuse")))
    return next((path for path in places if path.is_file()), None)


def keep_report(model: Path, outdir: Path) -> None:
    """Put a copy of the model's patch report beside the engine's files, where the engine report looks for it."""
    report = patch_report(model)
    if report is not None:
        write_json(outdir / f"{model.name.removesuffix('.onnx')}.patch.json", report)


def speaks_of(report: dict[str, Any], *names: str) -> bool:
    """Whether a patch report describes one of these model files; one that names no output describes any."""
    output = report.get("output")
    path = output.get("path") if isinstance(output, dict) else output
    return not path or Path(str(path)).name in names


def tuned_tiles(model: Path) -> dict[str, int]:
    """Name of a fused node -> id of the tile that `cutefuse patch --tune` found fastest, from the patch report."""
    sites = _reported(model) or {}
    return {name: int(s["tile"]) for name, s in sites.items() if isinstance(s.get("tile"), int) and s["tile"]}


def fused_sites(model: Path, facts: ModelFacts) -> dict[str, str]:
    """Name -> op_type of each fused node that the engine must run as a plugin.

    The patch report decides when it describes this file; without a report the model's own nodes decide.
    """
    sites = _reported(model)
    return facts.fused_nodes if sites is None else {name: str(s.get("op_type", "")) for name, s in sites.items()}


def _reported(model: Path) -> dict[str, dict[str, Any]] | None:
    """Name -> entry of each fused site of the patch report; None where no report describes this file."""
    report = patch_report(model)
    if report is None:
        return None
    fused = [s for s in report["sites"] if isinstance(s, dict) and s.get("status") == "fused" and s.get("name")]
    return {str(site["name"]): site for site in fused}


def libraries(fused: bool) -> list[Path]:
    """The plugin library, when it is needed: passed to trtexec only for models with fused nodes."""
    return [cutefuse.plugin_path()] if fused else []


def library_if_built() -> list[Path]:
    """The plugin library for an engine file, which does not say whether it needs one."""
    try:
        return [cutefuse.plugin_path()]
    except CutefuseError:
        return []


def count_plugins(layers: Sequence[Layer], sites: dict[str, str]) -> tuple[int, list[str]]:
    """How many of the fused nodes run as plugin layers, and the names of those that do not.

    A layer is matched by the node's name first (TensorRT keeps it, or lists it in the metadata), then by op_type.
    """
    free = [layer for layer in layers if layer.kind == "plugin"]

    def missing(names: list[str], runs: Callable[[str, Layer], bool]) -> list[str]:
        """The names that no free layer runs; a layer runs one."""
        left = []
        for name in names:
            hit = next((layer for layer in free if runs(name, layer)), None)
            if hit is None:
                left.append(name)
            else:
                free.remove(hit)
        return left

    by_name = missing(
        sorted(sites, key=len, reverse=True), lambda name, layer: name == layer.name or name in layer.onnx
    )
    left = missing(by_name, lambda name, layer: bool(sites[name]) and sites[name] in f"{layer.name} {layer.raw}")
    return len(sites) - len(left), sorted(left)


def check_version(facts: ModelFacts, sites: dict[str, str], version: tuple[int, int, int]) -> None:
    """Raise CutefuseError where TensorRT would build function bodies although the plugin library is there."""
    hidden = sorted(set(sites.values()) & facts.bodies)
    if hidden and version < PLUGINS_FIRST:
        raise CutefuseError(
            f"TensorRT {'.'.join(map(str, version))} builds the function body of {hidden[0]} instead of its plugin; "
            "patch the model with --no-functions, take TensorRT 10.7 or newer, or build with --no-plugins"
        )


def verify_plugins(layers: Sequence[Layer], sites: dict[str, str]) -> str:
    """'N of M fused nodes run as plugins'; raises VerificationError when N < M."""
    if all(layer.raw.keys() == {"Name"} for layer in layers):
        raise VerificationError(
            "the layer information holds names only, so plugin layers cannot be counted; "
            "build with --profilingVerbosity=detailed"
        )
    count, missing = count_plugins(layers, sites)
    text = f"{count} of {len(sites)} fused nodes run as plugins"
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise VerificationError(
            f"{text}; TensorRT built the function bodies of {names} instead: the plugin library is missing (give it "
            "with --dynamicPlugins), or TensorRT is 10.6 or older and prefers bodies (patch with --no-functions)"
        )
    return text
