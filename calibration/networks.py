"""Whole networks: what is predicted against what torch.compile took, and what is predicted to be left by fusing.

networks_h200.csv holds, for each network and number of images, the microseconds of the plain network under
torch.compile and of its faster plain engine, and the patched network's share of the latter, of one run. Between hosts
the share differs by up to 7 points. Rows called `present` were recorded on 2026-11-24, in a run that nothing was fitted
to, except YOLO's (2026-11-26, before the tiles that enlarge in phases); the others are of earlier kernels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

import models
from calibration import fit, rows
from cutefuse.graph.store import load_model
from cutefuse.match.find import find_sites
from cutefuse.progress import track
from cutefuse.rewrite.patch import Options, patch
from cutefuse.select import rules_torch, times
from cutefuse.select.engines import engine_of
from cutefuse.select.gain import Model
from cutefuse.select.network_time import network_us

ENGINE, GPU = "torch", "H200"
CLOSE = 0.05  # of the plain engine's time
# The constants that the time of a plain network tells something of: where each stands, and its name.
CONSTANTS = {
    "_KERNEL_US": times, "_PASS_SHARE": times, "_JOIN_US": rules_torch,
    "_JOIN_SOURCE_US": rules_torch, "_BETWEEN_US": rules_torch, "_TURN_SHARE": rules_torch, "_SCATTER_US": rules_torch,
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """A row, what is predicted for it, and how much of the plain time each of CONSTANTS moves (both in logarithms)."""

    name: str
    kernels: str
    recorded_us: float
    recorded_share: float
    share: float
    plain_us: float
    slopes: np.ndarray


def judged() -> list[Network]:
    """Every row; takes a few minutes."""
    found, recorded = [], rows.read("networks_h200.csv")
    for row in track(recorded, "predicting networks", len(recorded)):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_network(row, Path(folder)))
    return found


def _network(row: Mapping[str, str], folder: Path) -> Network:
    source = folder / "plain.onnx"
    onnx.save(models.build(row["network"], "float16", batch=int(row["batch"])), str(source))
    options = Options(sm=rows.SM, engine=ENGINE, gpu=GPU, dry_run=True)
    summary = patch(source, folder / "patched.onnx", options).report["summary"]
    compile_us = float(row["plain_compile_us"])
    share = (1 - summary["gain_us"] / summary["plain_us"]) * compile_us / float(row["plain_us"])
    cleaned, _ = find_sites(load_model(source), folder, {}, True)
    model = Model(cleaned.whole, engine_of(ENGINE, sm=rows.SM), times.device_of(rows.SM, GPU))
    plain_us = network_us(model)
    slopes = []
    for name, value in constants().items():
        with changed({name: value * np.exp(fit.STEP)}):
            slopes.append(np.log(network_us(model) / plain_us) / fit.STEP)
    title = f"{row['network']}, {row['batch']} image{'s' if row['batch'] != '1' else ''}"
    return Network(title, row["kernels"], compile_us, float(row["ratio"]), share, plain_us, np.array(slopes))


def constants() -> dict[str, float]:
    return {name: float(getattr(module, name)) for name, module in CONSTANTS.items()}


@contextmanager
def changed(values: Mapping[str, float]) -> Iterator[None]:
    """The model with other constants for a while."""
    before = constants()
    try:
        for name, value in values.items():
            setattr(CONSTANTS[name], name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(CONSTANTS[name], name, value)


def report() -> Iterator[str]:
    """The lines of the report."""
    found = judged()
    for when in ("present", "before"):
        own = [n for n in found if n.kernels == when]
        off = np.array([n.share - n.recorded_share for n in own])
        close = int(np.sum(np.abs(off) <= CLOSE))
        yield (
            f"gains of networks with the kernels called {when}: {close} of {len(own)} within {CLOSE:.0%} of the plain "
            f"time, {np.abs(off).mean():.3f} off in the mean, all together {off.mean():+.3f}"
        )
        yield from (f"  {n.name}: {n.share:.3f} predicted, {n.recorded_share:.3f} recorded" for n in own
                    if abs(n.share - n.recorded_share) > CLOSE)  # fmt: skip
    recorded = np.array([n.recorded_us for n in found])
    plain, slopes = np.log([n.plain_us for n in found]), np.stack([n.slopes for n in found])
    now = constants()

    def predict(values: Mapping[str, float], chosen: np.ndarray) -> np.ndarray:
        """A network's time moves with each constant as it does near its present value."""
        moved = np.log([values[name] / now[name] for name in now])
        return np.exp(plain[chosen] + slopes[chosen] @ moved)

    yield f"plain networks under torch.compile, {len(found)} rows:"
    yield from fit.outcome(predict, recorded, now, hold=0.05)
