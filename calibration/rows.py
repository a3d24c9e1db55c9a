"""The recorded rows of calibration/data, as the calls and convolutions that they time.

All were taken on H200s, inside CUDA graphs. networks_h200.csv: whole networks (driver 580.159.04, torch 2.11.0, cuDNN
9.19). sites_h200.csv: convolutions of published packages, ours and torch.compile's with the pass behind it.
network_sites_h200.csv: those of benchmarks/networks.py. tiles_h200.csv, tiles_8bit_h200.csv, random_layers_h200.csv:
every tile of a shape in one run, of random layers those within 25 % of the fastest. tiles_int8_ordered_h200.csv:
sources in the order of their scales and with bounded sums, as `patch` writes them. near_h200.csv: the tiles within 10 %
of the fastest alone.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cutefuse.graph.numbers import FLOAT8, INT8
from cutefuse.kernels import Call
from cutefuse.operators import quant_concat_conv, quant_math
from cutefuse.operators.conv_call import make_call
from cutefuse.operators.conv_form import Form, Source
from cutefuse.operators.conv_math import Geometry
from cutefuse.select.times import Convolution

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
ACTIVATIONS = {"none": "", "-": "", "relu": "Relu", "silu": "Silu", "sigmoid": "Sigmoid"}
SM, MULTIPROCESSORS = 90, 132
Tiles = dict[str, float]  # name of a tile -> microseconds


@dataclass(frozen=True)
class SiteRow:
    """A convolution with bias and activation inside a network: ours, and torch.compile's two kernels."""

    call: Call
    conv: Convolution
    ours_us: float
    plain_us: float


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file of calibration/data."""
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def shapes(*names: str) -> dict[str, dict[str, Any]]:
    """Name of a shape -> the shape, of sets in benchmarks/."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        text = (ROOT / f"benchmarks/{name}_shapes.json").read_text()
        found |= {s["name"]: s for s in json.loads(text)["shapes"]}
    return found


def call_of(shape: Mapping[str, Any], batch: int | None = None, activation: str | None = None) -> Call:
    """The float16 call of a shape on Hopper; with another batch or activation (a suffix of op_type) where given."""
    n = shape["N"] if batch is None else batch
    sources = [Source((n, c, shape["H"], shape["W"]), c) for c in shape["C"]]
    suffix = ACTIVATIONS[shape.get("activation", "relu")] if activation is None else activation
    form = Form(len(sources), suffix, residual=shape.get("residual", ""))
    return _on_hopper(make_call(form, sources, (shape["K"],), _geometry(shape), "float16", {}))


def site_rows(name: str) -> list[SiteRow]:
    """The rows of sites_h200.csv or network_sites_h200.csv: one image in float16."""
    found = []
    for row in read(name):
        n = {key: int(value) for key, value in row.items() if key not in ("activation", "ours_us", "plain_us")}
        shape = n | {"N": 1, "C": [n["C"]], "stride": (n["stride_h"], n["stride_w"])}
        shape["pads"] = (n["top"], n["left"], n["bottom"], n["right"])
        call = call_of(shape, activation=row["activation"].strip("-"))
        found.append(SiteRow(call, convolution_of(call), float(row["ours_us"]), float(row["plain_us"])))
    return found


def shape_rows() -> dict[str, tuple[Call, dict[str, float]]]:
    """Name of a shape of benchmarks/conv_shapes.json -> its call, and its times, with operands in no cache."""
    found: dict[str, tuple[Call, dict[str, float]]] = {n: (call_of(s), {}) for n, s in shapes("conv").items()}
    for row in json.loads((ROOT / "benchmarks/results/concat_conv_h200.json").read_text()):
        if row["shape"] in found and row.get("best", True):
            times_us = found[row["shape"]][1]
            times_us[row["variant"]] = min(row["time_us"], times_us.get(row["variant"], math.inf))
    return found


def convolution_of(call: Call) -> Convolution:
    """The same convolution over one tensor, as an engine computes it."""
    attrs, (N, _, H, W), (_, K, P, Q) = dict[str, Any](call.attrs), call.inputs[0].dims, call.outputs[0].dims
    return Convolution(N, sum(attrs["channels"]), H, W, K, P, Q, math.prod(attrs["kernel_shape"]), "float16")


def tile_sets() -> dict[str, list[tuple[str, Call, Tiles]]]:
    """What is called so -> name, call and times of each of its shapes."""
    known = shapes("conv", "latency", "single_source", "few_channels")
    sets: dict[str, list[tuple[str, Call, Tiles]]] = {}
    sets["float16, benchmark shapes"] = [
        (name, call_of(known[name]), tiles) for (name,), tiles in _tiles("tiles_h200.csv").items()
    ]
    sets["float16, images"] = [
        (name, call_of(known[name]), tiles) for (name,), tiles in _tiles("tiles_images_h200.csv").items()
    ]
    kinds = {"random layers": "random", "early layers of few channels": "early", "1x1 layers": "short",
             "3x3 layers": "patch"}  # fmt: skip
    for title, name in kinds.items():
        layers = _tiles(f"{name}_layers_h200.csv")
        sets[f"float16, {title}"] = [(" ".join(layer), _random_call(layer), tiles) for layer, tiles in layers.items()]
    near = [(row["shape"], _near_call(row), dict.fromkeys(row["near"].split(), 1.0)) for row in read("near_h200.csv")]
    sets["float16, enlarged, odd and pre-activated sources"] = near
    for (dtype, scales, name), tiles in _tiles("tiles_8bit_h200.csv").items():
        factors = [0.5 + (i if scales == "own" else 0) for i in range(len(known[name]["C"]))]
        call = _quantised(known[name], range(len(factors)), factors, dtype, None)
        sets.setdefault(f"{dtype}, {scales} scale{'s' if scales == 'own' else ''}", []).append((name, call, tiles))
    for (name, bound), tiles in _tiles("tiles_int8_ordered_h200.csv").items():
        factors = [0.5 + 0.75 * ((3 * i) % 4) for i in range(len(known[name]["C"]))]
        order = quant_math.order_of(factors)
        call = _quantised(known[name], order, [factors[i] for i in order], "int8", int(bound))
        sets.setdefault("int8, in the order of scales", []).append((name, call, tiles))
    return sets


def _tiles(name: str) -> dict[tuple[str, ...], Tiles]:
    """What a row is of -> its tiles."""
    found: dict[tuple[str, ...], Tiles] = defaultdict(dict)
    for row in read(name):
        key = tuple(value for column, value in row.items() if column not in ("tile", "time_us"))
        found[key][row["tile"]] = float(row["time_us"])
    return found


def _random_call(layer: Sequence[str]) -> Call:
    """Of the columns in front of the tile; some files have a residual behind the activation."""
    n, h, w, k, r, s, stride = (int(layer[i]) for i in (0, 1, 2, 4, 5, 6, 7))
    shape = {"N": n, "H": h, "W": w, "C": [int(c) for c in layer[3].split("+")], "K": k, "R": r, "S": s}
    shape |= {"stride": (stride, stride), "pads": (r // 2, s // 2, r // 2, s // 2)}
    return call_of(shape | {"residual": "".join(layer[9:])}, activation=ACTIVATIONS[layer[8]])


def _near_call(row: Mapping[str, str]) -> Call:
    n, h, w, k, taps, pre = (int(row[c]) for c in ("N", "H", "W", "K", "taps", "pre_activated"))
    channels, factors = ([int(x) for x in row[c].split("+")] for c in ("C", "enlarged_by"))
    sources = [Source((n, c, h // f, w // f), c, upsample=f) for c, f in zip(channels, factors, strict=True)]
    form = Form(len(sources), "Relu", view=max(factors) > 1, pre_activated=bool(pre))
    geometry = Geometry((taps, taps), pads=(taps // 2,) * 4)
    return _on_hopper(make_call(form, sources, [k], geometry, "float16", {}))


def _quantised(
    shape: Mapping[str, Any], order: Sequence[int], scales: Sequence[float], dtype: str, bound: int | None
) -> Call:
    dims = [(shape["N"], shape["C"][i], shape["H"], shape["W"]) for i in order]
    plain = quant_concat_conv.plain_of(dims, shape["K"], _geometry(shape), ACTIVATIONS[shape["activation"]], {})
    number = {n.name: n for n in (INT8, FLOAT8)}[dtype]
    bounds = () if bound is None else (bound,)
    return _on_hopper(quant_concat_conv.make_call(plain, scales, "float16", None, number, *bounds))


def _geometry(shape: Mapping[str, Any]) -> Geometry:
    return Geometry(
        (shape["R"], shape["S"]), tuple(shape.get("stride", (1, 1))), tuple(shape.get("pads", (0, 0, 0, 0))),
        tuple(shape.get("dilation", (1, 1))),
    )  # fmt: skip


def _on_hopper(call: Call) -> Call:
    return replace(call, sm=SM, sm_count=MULTIPROCESSORS, _keep=[])
