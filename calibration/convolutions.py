"""What cuDNN's convolutions and our own take: errors of both models, and the constants of cuDNN's refitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

import numpy as np

from calibration import fit, rows
from cutefuse import kernels
from cutefuse.select.times import POINTWISE, SPATIAL, Rates, convolution_us, device_of

FILES = {
    "sites_h200.csv": "sites of published packages",
    "network_sites_h200.csv": "sites of the networks of benchmarks/networks.py",
}
UNITS = ("block",)  # of the rates, what is no measured quantity


def report() -> Iterator[str]:
    """The lines of the report."""
    device, sites = device_of(rows.SM, "H200"), {name: rows.site_rows(name) for name in FILES}
    for name, words in FILES.items():
        known = [s for s in sites[name] if kernels.predicted_us(s.call)]
        found = fit.errors(_array(kernels.predicted_us(s.call) for s in known), _array(s.ours_us for s in known))
        yield f"our kernels, {len(known)} {words}: {fit.told(found)}"
    shapes = rows.shape_rows().values()
    found = fit.errors(_array(kernels.predicted_us(c) for c, _ in shapes), _array(us["ours"] for _, us in shapes))
    yield f"our kernels, {len(shapes)} shapes of benchmarks/conv_shapes.json: {fit.told(found)}"
    cudnn_us = _array(convolution_us(rows.convolution_of(c), device) for c, _ in shapes)
    found = fit.errors(cudnn_us, _array(us["cudnn_precat"] for _, us in shapes))
    yield f"cuDNN's, the same shapes, with operands that no cache held as the model assumes: {fit.told(found)}"
    everything = [s for name in FILES for s in sites[name]]
    for title, rates in (("POINTWISE", POINTWISE), ("SPATIAL", SPATIAL)):
        own = [s for s in everything if (s.conv.taps == 1) == (rates is POINTWISE)]
        yield from _refitted(title, rates, own, _array(device.pass_us(2 * s.conv.output_bytes) for s in own))


def _refitted(title: str, rates: Rates, own: list[rows.SiteRow], passes_us: np.ndarray) -> Iterator[str]:
    device, recorded = device_of(rows.SM, "H200"), _array(s.plain_us for s in own)

    def predict(constants: Mapping[str, float], chosen: np.ndarray) -> np.ndarray:
        tried = Rates(**{**asdict(rates), **constants})
        convs = _array(convolution_us(own[i].conv, device, tried) for i in np.flatnonzero(chosen))
        return np.maximum(convs, 0.1) + passes_us[chosen]

    now = {name: value for name, value in asdict(rates).items() if value and name not in UNITS}
    yield f"times.{title}, cuDNN's kernel and the pass behind it, {len(own)} rows:"
    yield from fit.outcome(predict, recorded, now, hold=0.02)


def _array(values: Iterator[float | None]) -> np.ndarray:
    return np.array(list(values), dtype=float)
