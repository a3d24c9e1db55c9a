"""One network on one GPU: patch it, build plain and patched engines, compare what they compute, time them in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from float64 import widened
from onnx import TensorProto

from benchmarks.lib import network_sites, timing
from benchmarks.lib.network_model import in_float16
from benchmarks.lib.pool import Talk, sentence

PLAIN = "plain"
MODES = ("cudnn", "compile")
ROUNDING = 2.0**-11  # of float16
WARM_ROUNDS = 3


@dataclass(frozen=True)
class Task:
    """One network at one batch; what the arguments of benchmarks/networks.py say."""

    network: str
    batch: int
    variants: tuple[str, ...]
    folder: Path
    device: str = "cuda"
    layers: bool = False
    small: bool = False
    rounds: int = 15
    sample_ms: float = 4.0
    file: Path | None = None  # an ONNX model that is none of models/

    @property
    def key(self) -> tuple[str, int]:
        return self.network, self.batch

    @property
    def own_folder(self) -> Path:
        return self.folder / f"{self.network}.b{self.batch}"

    @property
    def plain(self) -> Path:
        """The network as it is measured, before any rewriting."""
        return self.own_folder / "plain.onnx"


@dataclass
class Variant:
    """A patched network. `model` is None where nothing was fused: it is the plain one."""

    report: dict[str, Any]
    sites: Sequence[Any]  # those that were fused
    model: Path | None
    tiles: Mapping[str, int] = field(default_factory=dict)  # fused node -> id, where they were measured
    facts: Mapping[str, Any] = field(default_factory=dict)  # more for its row
    same_as: str = ""  # the variant before it that fused the same nodes


def take_default(plain: Path, output: Path, sm: int) -> Variant:
    """What `cutefuse patch --engine torch` does by itself."""
    return _patched(plain, output, sm)


def take_all(plain: Path, output: Path, sm: int) -> Variant:
    """Every legal site, whether it pays or not."""
    return _patched(plain, output, sm, all_sites=True)


def take_tuned(plain: Path, output: Path, sm: int) -> Variant:
    """What `cutefuse patch --tune` does; the times are kept beside the model, for this run alone."""
    from cutefuse.commands.choices import gpu_timer
    from cutefuse.optimize.site_times import best_tiles, pricing
    from cutefuse.timing.cache import TuneCache
    from cutefuse.timing.calls import Tuner

    tuner = Tuner(gpu_timer(), TuneCache(plain.with_name("tune.json")))
    found = _patched(plain, output, sm, price=pricing(tuner), tiles=partial(best_tiles, tuner))
    return replace(found, tiles={s.name: s.tile for s in found.sites if s.tile})


def take_optimized(plain: Path, output: Path, sm: int) -> Variant:
    """What `cutefuse optimize --backend torch` keeps: the plain network where nothing paid."""
    from cutefuse.optimize.run import KEPT, Request, optimize
    from cutefuse.rewrite.patch import Options

    begin = time.monotonic()
    data = optimize(Request(plain, output.with_suffix(""), "torch", ("--duration=0.2",), Options(sm=sm)))
    kept = frozenset(s["name"] for s in data["sites"] if s["status"] == KEPT)
    found = _patched(plain, output, sm, only=kept)
    keys = ("builds", "kept", "plain_us", "best_us", "ended", "notes")
    facts = {k: data[k] for k in keys if k in data} | {"seconds": round(time.monotonic() - begin, 1)}
    return replace(found, facts={"optimize": facts})


VARIANTS: dict[str, Callable[[Path, Path, int], Variant]] = {
    "default": take_default,
    "all": take_all,
    "tune": take_tuned,
    "optimize": take_optimized,
}


def _patched(plain: Path, output: Path, sm: int, **options: Any) -> Variant:
    from cutefuse.match.site import FUSED
    from cutefuse.operators.layouts import TORCH
    from cutefuse.rewrite.patch import Options, patch

    measured = {name: options.pop(name) for name in ("price", "tiles") if name in options}
    result = patch(plain, output, Options(sm=sm, engine=TORCH, **options), **measured)
    return Variant(result.report, [s for s in result.sites if s.status == FUSED], result.output)


def measure(task: Task, talk: Talk) -> dict[str, Any]:
    """The row of one network. What a variant lacks is in `failures`, by variant and mode."""
    import onnx
    import torch

    from cutefuse.engines.pytorch.lock import share_gpu
    from cutefuse.engines.pytorch.run import TorchEngine, time_interleaved_us

    torch.set_num_threads(1)
    share_gpu(talk.quiet)
    clock = _Clock()
    gpu = task.device != "cpu"
    task.own_folder.mkdir(parents=True, exist_ok=True)
    paths = {PLAIN: task.plain}
    onnx.save(in_float16(task), str(paths[PLAIN]))
    major, minor = torch.cuda.get_device_capability() if gpu else (0, 0)
    sm = 10 * major + minor
    row: dict[str, Any] = {"network": task.network, "batch": task.batch, "dtype": "float16", "failures": {}}
    variants = _variants(task, paths[PLAIN], sm, row["failures"])
    _free(gpu)  # what tuning and optimising built
    paths |= {name: v.model for name, v in variants.items() if v.model and not v.same_as}
    clock.lap("patch")
    talk.say(f"patched after {clock.total_s:.0f} s, {', '.join(f'{k} {len(v.sites)}' for k, v in variants.items())}")

    engines: dict[tuple[str, str], Any] = {}
    for mode in MODES:
        for name, path in paths.items():
            tiles = variants[name].tiles if name in variants else {}
            try:
                engines[name, mode] = TorchEngine.build(path, mode, task.device, tiles=tiles)
            except Exception as error:  # one mode that a network cannot take must not cost the others
                row["failures"][f"{name} {mode}"] = sentence(error)
            clock.lap(f"build_{mode}")
    _free(gpu)  # what cuDNN tried with; other networks are built on the same GPU
    talk.say(f"built {len(engines)} engines after {clock.total_s:.0f} s")
    if not any(name == PLAIN for name, _ in engines):
        row["failure"] = f"no plain engine: {next(iter(row['failures'].values()))}"
        return row

    with talk.quiet():
        exact = TorchEngine.build(widened(onnx.load(paths[PLAIN]), TensorProto.FLOAT), "cudnn", task.device, tf32=False)
        row["errors"] = compare(engines, exact)
        del exact
        _free(gpu)
        layers = {}
        if task.layers:
            wanted = _richest(variants)
            layers = {
                key: network_sites.layer_rows(e.layers(10)) for key, e in engines.items() if key[0] in (PLAIN, wanted)
            }
    clock.lap("compare")
    with talk.alone():
        time_interleaved_us(list(engines.values()), WARM_ROUNDS, task.sample_ms)
        samples = time_interleaved_us(list(engines.values()), task.rounds, task.sample_ms)
        if gpu:
            row |= timing.device_row() | timing.clocks()
    clock.lap("time")
    row |= summary(dict(zip(engines, samples, strict=True)), variants)
    row["tiles"] = {name: tile_facts(e) for (name, _), e in engines.items() if name != PLAIN}
    if task.layers:
        row |= _layer_facts(layers, variants, engines)
    row["seconds"] = clock.laps
    talk.say(f"timed after {clock.total_s:.0f} s")
    return row


def _free(gpu: bool) -> None:
    """Give the GPU's memory back that nothing needs."""
    import torch

    gc.collect()
    if gpu:
        torch.cuda.empty_cache()


class _Clock:
    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._start

    def lap(self, name: str) -> None:
        """Add the seconds since the last lap to a name."""
        now = time.monotonic()
        self.laps[name] = round(self.laps.get(name, 0.0) + now - self._last, 2)
        self._last = now


def _variants(task: Task, plain: Path, sm: int, failures: dict[str, str]) -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for name in task.variants:
        try:
            variant = VARIANTS[name](plain, plain.with_name(f"{name}.onnx"), sm)
        except Exception as error:  # a variant that cannot be made must not cost the others
            failures[name] = sentence(error)
            continue
        own = _fused_of(variant)
        variant.same_as = next((k for k, v in found.items() if not v.same_as and _fused_of(v) == own), "")
        found[name] = variant
    return found


def _fused_of(variant: Variant) -> Any:
    return sorted((s.name, s.match.call.op_type) for s in variant.sites), dict(variant.tiles)


def _richest(variants: Mapping[str, Variant]) -> str:
    """The variant that fused most, of those that have an engine of their own."""
    own = [name for name, v in variants.items() if v.model and not v.same_as]
    return max(own, key=lambda name: len(variants[name].sites), default="")


def compare(engines: Mapping[tuple[str, str], Any], exact: Any) -> dict[str, dict[str, Any]]:
    """For each "variant mode": output tensor -> its largest difference from what `exact` computes, the plain network in
    a wider type, over the largest value of that; None for a NaN that the other has not. All get the same inputs."""
    feed = {name: tensor.clone() for name, tensor in next(iter(engines.values())).inputs.items()}
    want = exact(feed)
    found: dict[str, dict[str, Any]] = {}
    for key, engine in engines.items():
        got = engine(feed)
        found[" ".join(key)] = {name: _error(got[name], want[name]) for name in want}
        del got
    return found


def _error(got: Any, want: Any) -> float | None:
    got, want = got.double(), want.double()
    if bool((got.isnan() & ~want.isnan()).any()):
        return None
    largest = float(want.nan_to_num().abs().max()) or 1.0
    return float((got - want).nan_to_num().abs().max()) / largest


def summary(samples: Mapping[tuple[str, str], Sequence[float]], variants: Mapping[str, Variant]) -> dict[str, Any]:
    """Times of each variant by mode, and its ratio: the best of its modes over the best plain one, in the same rounds.

    p20 and p80 of the ratio are over the rounds. A variant without a fused node is the plain network: ratio 1.
    """
    plain, plain_times = _times(samples, PLAIN)
    found: dict[str, Any] = {PLAIN: plain}
    for name, variant in variants.items():
        counted = [s for s in variant.report["sites"] if s["status"] == "fused"]
        source = PLAIN if variant.model is None else variant.same_as or name
        own, times = _times(samples, source)
        if variant.same_as:
            own["same_as"] = variant.same_as
        own |= {"sites": len(counted), "candidates": len(variant.report["sites"]), **variant.facts}
        own["report"] = network_sites.site_rows(variant.report)
        if times and plain_times:
            rounds = sorted(a / b for a, b in zip(times, plain_times, strict=True))
            own["ratio"] = own["best_us"] / plain["best_us"]
            own["ratio_p20"], own["ratio_p80"] = _at(rounds, 0.2), _at(rounds, 0.8)
            summary_ = variant.report["summary"]
            together_us = summary_["gain_us"]  # a saving that sites share counts once
            if together_us is not None and not summary_["gain_unknown"]:
                own["predicted_gain_us"] = together_us
                # A share of the time that the same model gives the network: what slows all of it down cancels. Both
                # are of torch.compile, even where plain cuDNN is the faster engine.
                rival_us = plain.get("compile_us") if variant.model else None
                share = together_us / summary_["plain_us"] if together_us and summary_["plain_us"] else 0.0
                if not together_us or summary_["plain_us"]:
                    own["predicted"] = (1 - share) * (rival_us or plain["best_us"]) / plain["best_us"]
        found[name] = own
    return {"variants": found}


def _times(samples: Mapping[tuple[str, str], Sequence[float]], name: str) -> tuple[dict[str, Any], Sequence[float]]:
    """Median, p20 and p80 of each mode, the best mode, and the samples of that one."""
    row: dict[str, Any] = {}
    for mode in MODES:
        if (name, mode) in samples:
            values = sorted(samples[name, mode])
            row[f"{mode}_us"] = statistics.median(values)
            row[f"{mode}_p20_us"], row[f"{mode}_p80_us"] = _at(values, 0.2), _at(values, 0.8)
    timed = [mode for mode in MODES if f"{mode}_us" in row]
    if not timed:
        return row, []
    best = min(timed, key=lambda mode: row[f"{mode}_us"])
    return row | {"best": best, "best_us": row[f"{best}_us"]}, samples[name, best]


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def _layer_facts(
    layers: Mapping[tuple[str, str], Any], variants: Mapping[str, Variant], engines: Mapping[tuple[str, str], Any]
) -> dict[str, Any]:  # fmt: skip
    wanted = _richest(variants)
    by_variant = {name: {m: layers[n, m] for n, m in layers if n == name} for name in (PLAIN, wanted) if name}
    found: dict[str, Any] = {"layers": by_variant, "layers_of": wanted}
    if wanted:
        fused = [n for key, e in engines.items() if key[0] == wanted for n in e.program.fused]
        tiles = {node.name: node.tile_name for node in fused}
        found["sites"] = network_sites.fitted(variants[wanted].sites, by_variant[PLAIN], by_variant[wanted], tiles)
    return found


def tile_facts(engine: Any) -> dict[str, int]:
    """How many fused nodes of an engine have a tile that was timed, that was given, and that is not the first guess."""
    nodes = engine.program.fused
    return {
        "timed": sum(n.tile_from == "timed" for n in nodes), "given": sum(n.tile_from == "given" for n in nodes),
        "not_first_guess": sum(n.tile != n.tiles()[0] for n in nodes),
    }  # fmt: skip
