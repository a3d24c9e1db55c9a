"""Peak rates of GPUs: dense tensor-core and FP32 arithmetic, and memory bandwidth; boards.csv names each source.

A board's peak is (operations per multiprocessor and clock of its architecture) x multiprocessors x boost clock, which
is how NVIDIA computes its own tables; tests compare the products with the published figures. GeForce boards halve
FP16 with FP32 accumulation and TF32: FP16 here is the rate with FP16 accumulation, the true upper bound.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError

# bits of one element
DTYPE_BITS = {
    "FP64": 64, "FP32": 32, "TF32": 32, "FP16": 16, "BF16": 16, "FP8": 8, "FP4": 4, "INT64": 64, "INT32": 32,
    "INT16": 16, "INT8": 8, "INT4": 4, "UINT8": 8, "BOOL": 8, "E8M0": 8,
}  # fmt: skip
# compute capability -> fused multiply-adds per multiprocessor and clock, dense
_FMA_PER_CLOCK: dict[str, dict[str, int]] = {
    "7.0": {"FP32": 64, "FP16": 512, "INT8": 256},
    "7.5": {"FP32": 64, "FP16": 512, "INT8": 1024, "INT4": 2048},
    "8.0": {"FP32": 64, "TF32": 512, "FP16": 1024, "BF16": 1024, "INT8": 2048, "INT4": 4096},
    "8.6": {"FP32": 128, "TF32": 256, "FP16": 512, "BF16": 512, "INT8": 1024, "INT4": 2048},
    "8.7": {"FP32": 128, "TF32": 512, "FP16": 1024, "BF16": 1024, "INT8": 2048, "INT4": 4096},
    "8.9": {"FP32": 128, "TF32": 256, "FP16": 512, "BF16": 512, "FP8": 1024, "INT8": 1024, "INT4": 2048},
    "9.0": {"FP32": 128, "TF32": 1024, "FP16": 2048, "BF16": 2048, "FP8": 4096, "INT8": 4096},
    "10.0": {"FP32": 128, "TF32": 2048, "FP16": 4096, "BF16": 4096, "FP8": 8192, "INT8": 8192, "FP4": 16384},
    "12.0": {"FP32": 128, "TF32": 256, "FP16": 512, "BF16": 512, "FP8": 1024, "INT8": 1024, "FP4": 2048},
}
_GEFORCE_HALF = ("TF32", "BF16")  # half rate on GeForce of 8.6, 8.9 and 12.0
_WIDER = {
    "BF16": ("FP16", "TF32", "FP32"), "FP16": ("FP32",), "TF32": ("FP32",), "FP8": ("INT8", "FP16", "FP32"),
    "INT8": ("FP16", "FP32"), "UINT8": ("INT8", "FP16", "FP32"), "INT4": ("INT8", "FP16"), "FP4": ("FP8", "FP16"),
    "FP64": ("FP32",), "INT32": ("FP32",), "INT64": ("FP32",), "BOOL": ("FP32",), "": ("FP32",),
}  # fmt: skip


@dataclass(frozen=True)
class Roof:
    """What a device allows for some work: `intensity`, `ridge` in FLOP per byte, `bound` "memory" or "compute"."""

    intensity: float
    ridge: float
    bound: str
    attainable_tflops: float
    floor_us: float


@dataclass(frozen=True)
class Peaks:
    """Upper bounds of one device. `tflops`: precision -> 10^12 operations a second; `bandwidth_gbs`: 10^9 bytes/s.

    capability ("9.0"), multiprocessors, memory_gb ("141"; "16/32": sold with either) of a board; "" or 0: not known.
    """

    device: str
    bandwidth_gbs: float
    tflops: dict[str, float]
    source: str
    capability: str = ""
    multiprocessors: int = 0
    memory_gb: str = ""

    @property
    def cores(self) -> int:
        """FP32 lanes, which NVIDIA counts as CUDA cores; 0 where the board is not known."""
        return self.multiprocessors * _FMA_PER_CLOCK[self.capability]["FP32"] if self.capability else 0

    def rate(self, precision: str) -> float | None:
        """Peak in TFLOP/s for a precision; a type without tensor cores here runs at the next wider one's rate."""
        return next((self.tflops[n] for n in (precision, *_WIDER.get(precision, ())) if n in self.tflops), None)

    def roof(self, precision: str, flops: float, size_bytes: float) -> Roof | None:
        """The roof over `flops` operations and `size_bytes` moved; None where the peak of the precision is not known.

        The attainable rate is min(P_peak, I * b_max).
        """
        peak = self.rate(precision)
        if peak is None:
            return None
        intensity, ridge = flops / size_bytes, peak * 1000 / self.bandwidth_gbs
        compute_us, memory_us = flops / peak / 1e6, size_bytes / self.bandwidth_gbs / 1e3
        attainable = min(peak, intensity * self.bandwidth_gbs / 1000)
        bound = "compute" if intensity >= ridge else "memory"
        return Roof(intensity, ridge, bound, attainable, max(compute_us, memory_us))

    def known_roof(self, precision: str, flops: float, size_bytes: float) -> Roof:
        """The same. Raises CutefuseError where the peak of the precision is not known."""
        if found := self.roof(precision, flops, size_bytes):
            return found
        able = sorted(name for name in {*self.tflops, *_WIDER} if name and self.rate(name))
        raise CutefuseError(f"no peak of {self.device} is known for {precision}; choose one of {', '.join(able)}")


def _rates(capability: str, sms: int, clock_ghz: float, geforce: bool) -> dict[str, float]:
    table = _FMA_PER_CLOCK[capability]
    return {
        name: round(fma * (0.5 if geforce and name in _GEFORCE_HALF else 1) * 2 * sms * clock_ghz / 1000, 1)
        for name, fma in table.items()
    }


@cache
def _boards() -> list[tuple[str, Peaks]]:
    """The table: what matches CUDA's names of each device, and its peaks, with the rates that NVIDIA publishes where
    the formula does not give them: FP32 units clock higher than tensor cores, the A10G is a half A10."""
    found = []
    with Path(__file__).with_name("boards.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sms, capability = int(row["multiprocessors"]), row["capability"]
            rates = _rates(capability, sms, float(row["boost_clock_ghz"]), bool(row["geforce"]))
            published = (figure.split("=") for figure in row["published_tflops"].split())
            rates |= {name: float(tflops) for name, tflops in published}
            peaks = Peaks(row["name"], float(row["bandwidth_gbs"]), rates, row["source"], capability, sms,
                          row["memory_gb"])  # fmt: skip
            found.append((row["pattern"], peaks))
    return found


def boards() -> list[Peaks]:
    return [peaks for _, peaks in _boards()]


def by_name(name: str, sms: int | None = None) -> Peaks | None:
    """Peaks of a board by its short name or CUDA device name; the multiprocessor count tells variants apart."""
    name = re.sub(r"\bRTX[- ]?(?=\d)", "RTX ", name, flags=re.I)  # RTX4090 is the RTX 4090
    hits = [b for b in boards() if b.device.lower() == name.lower()]
    hits = hits or [b for pattern, b in _boards() if re.search(pattern, name, re.I)]
    hits = [b for b in hits if sms in (None, b.multiprocessors)] or hits
    return hits[0] if hits else None


def sharing(name: str) -> list[Peaks]:
    """The boards that a person may mean by a name: one by its whole name, else all that have its words."""
    wanted = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w not in ("", "nvidia", "tesla", "geforce")]
    exact = [b for b in boards() if b.device.lower() == " ".join(wanted)]
    # A word may be the beginning of a board's, or of its memory's: "A100-SXM" is the A100 SXM4, "16gb" a size.
    words = [(b, [*b.device.lower().split(), *(f"{gb}gb" for gb in b.memory_gb.split("/"))]) for b in boards()]
    return exact or [b for b, own in words if wanted and all(any(p.startswith(w) for p in own) for w in wanted)]


def board(name: str) -> Peaks:
    """Peaks of the board that a person names with `--peaks`.

    Raises CutefuseError for a name that is in no table, and for one that several boards share ("A100").
    """
    named = sharing(name)
    if len(named) > 1:
        known = ", ".join(b.device for b in named)
        raise CutefuseError(f"--peaks is {name}, which {len(named)} boards share; give one of {known}")
    found = named[0] if named else by_name(name)
    if found is None:
        known = ", ".join(b.device for b in boards())
        raise CutefuseError(f"--peaks is {name}; give auto, measured, a JSON file, or one of {known}")
    return found


def by_device(device: dict[str, Any]) -> Peaks | None:
    """Peaks of the device that trtexec reported: from the table, else computed from its clocks and widths."""
    name = str(device.get("Selected Device", ""))
    sms = device.get("SMs")
    count = int(sms) if isinstance(sms, (int, float)) and sms == sms else None
    known = by_name(name, count) if name else None
    if known:
        return known
    values = [device.get(k) for k in ("Compute Clock Rate", "Memory Clock Rate", "Memory Bus Width")]
    numbers = [float(v) for v in values if isinstance(v, (int, float)) and v == v and 0 < v < 1e6]
    capability = str(device.get("Compute Capability", ""))
    if capability not in _FMA_PER_CLOCK or count is None or len(numbers) < 3:
        return None
    clock_ghz, memory_ghz, bus_bits = numbers
    rates = _rates(capability, count, clock_ghz, "GeForce" in name)
    # Double data rate: two transfers a clock.
    return Peaks(name or f"sm_{capability}", 2 * memory_ghz * bus_bits / 8, rates, "computed from the log's clocks")


def peaks_from(data: Any, where: str) -> Peaks:
    try:
        rates = {str(k).upper(): float(v) for k, v in data["tflops"].items()}
        bandwidth_gbs = float(data["bandwidth_gbs"])
        if not rates or not all(v > 0 and math.isfinite(v) for v in (bandwidth_gbs, *rates.values())):
            raise ValueError("rates must be positive and finite")
        return Peaks(str(data.get("device", where)), bandwidth_gbs, rates, str(data.get("source", where)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CutefuseError(f"{where} holds no peaks ({error}); it needs device, bandwidth_gbs and tflops") from None
