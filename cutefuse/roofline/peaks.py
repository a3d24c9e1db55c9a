"""Peak rates of GPUs: dense tensor-core and FP32 arithmetic, and memory bandwidth, each with its source.

A board's peak is (operations per multiprocessor and clock of its architecture) x multiprocessors x boost clock, which
is how NVIDIA computes its own tables; tests compare the products with the published figures. GeForce boards halve
FP16 with FP32 accumulation and TF32: FP16 here is the rate with FP16 accumulation, the true upper bound.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from cutefuse.errors import CutefuseError

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
# Published rates that the formula does not give: FP32 units clock higher than tensor cores, the A10G is a half A10.
_PUBLISHED = {
    "H100 SXM": {"FP32": 66.9}, "H200": {"FP32": 66.9}, "H100 NVL": {"FP32": 60.0}, "H200 NVL": {"FP32": 60.0},
    "H100 PCIe": {"FP32": 51.2}, "B200": {"FP32": 75.0}, "L40S": {"TF32": 183.0, "FP16": 362.1, "BF16": 362.1},
    "A10G": {"TF32": 35.0, "FP16": 70.0, "BF16": 70.0, "INT8": 140.0, "INT4": 280.0},
}  # fmt: skip

_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_TURING = "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf"  # noqa: E501
_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"  # noqa: E501
_A10 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_ORIN = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/gtcf21/jetson-orin/nvidia-jetson-agx-orin-technical-brief.pdf"
)
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_B200 = "https://resources.nvidia.com/en-us-blackwell-architecture"
_RTX50 = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"

# name, pattern on the CUDA device name, compute capability, multiprocessors, boost clock GHz, GB/s, memory in GB
# ("16/32": sold with either), GeForce, source
_Board = tuple[str, str, str, int, float, float, str, bool, str]
_BOARDS: tuple[_Board, ...] = (
    ("V100 SXM2", r"\bV100\b.*SXM", "7.0", 80, 1.53, 900, "16/32", False, _V100),
    ("V100 PCIe", r"\bV100\b", "7.0", 80, 1.37, 900, "16/32", False, _V100),
    ("TITAN RTX", r"TITAN RTX", "7.5", 72, 1.77, 672, "24", False, _TURING),
    ("T4", r"\bT4\b", "7.5", 40, 1.59, 320, "16", False, _TURING),
    ("A100 80GB PCIe", r"\bA100 80GB PCIe", "8.0", 108, 1.41, 1935, "80", False, _A100),
    ("A100 SXM4 80GB", r"\bA100\b.*80GB", "8.0", 108, 1.41, 2039, "80", False, _A100),
    ("A100 40GB", r"\bA100\b", "8.0", 108, 1.41, 1555, "40", False, _A100),
    ("A30", r"\bA30\b", "8.0", 56, 1.44, 933, "24", False, _A100),
    ("A10", r"\bA10\b", "8.6", 72, 1.695, 600, "24", False, _A10),
    ("A10G", r"\bA10G\b", "8.6", 80, 1.71, 600, "24", False, _A10),
    ("A40", r"\bA40\b", "8.6", 84, 1.74, 696, "48", False, _GA102),
    ("RTX 3060 Ti", r"RTX 3060 Ti", "8.6", 38, 1.665, 448, "8", True, _GA102),
    ("RTX 3060", r"RTX 3060", "8.6", 28, 1.777, 360, "12", True, _GA102),
    ("RTX 3070 Ti", r"RTX 3070 Ti", "8.6", 48, 1.77, 608, "8", True, _GA102),
    ("RTX 3070", r"RTX 3070", "8.6", 46, 1.725, 448, "8", True, _GA102),
    ("RTX 3080 Ti", r"RTX 3080 Ti", "8.6", 80, 1.665, 912, "12", True, _GA102),
    ("RTX 3080", r"RTX 3080", "8.6", 68, 1.71, 760, "10", True, _GA102),
    ("RTX 3090 Ti", r"RTX 3090 Ti", "8.6", 84, 1.86, 1008, "24", True, _GA102),
    ("RTX 3090", r"RTX 3090", "8.6", 82, 1.695, 936, "24", True, _GA102),
    ("Jetson AGX Orin 64GB", r"\bOrin\b", "8.7", 16, 1.3, 204.8, "64", False, _ORIN),
    ("Jetson AGX Orin 32GB", r"\bOrin\b", "8.7", 14, 0.93, 204.8, "32", False, _ORIN),
    ("Jetson Orin NX 16GB", r"\bOrin\b", "8.7", 8, 0.918, 102.4, "16", False, _ORIN),
    ("L4", r"\bL4\b", "8.9", 58, 2.04, 300, "24", False, _ADA),
    ("L40S", r"\bL40S\b", "8.9", 142, 2.52, 864, "48", False, _ADA),
    ("RTX 4060 Ti", r"RTX 4060 Ti", "8.9", 34, 2.535, 288, "8/16", True, _ADA),
    ("RTX 4060", r"RTX 4060", "8.9", 24, 2.46, 272, "8", True, _ADA),
    ("RTX 4070 Ti SUPER", r"RTX 4070 Ti SUPER", "8.9", 66, 2.61, 672, "16", True, _ADA),
    ("RTX 4070 Ti", r"RTX 4070 Ti", "8.9", 60, 2.61, 504, "12", True, _ADA),
    ("RTX 4070 SUPER", r"RTX 4070 SUPER", "8.9", 56, 2.475, 504, "12", True, _ADA),
    ("RTX 4070", r"RTX 4070", "8.9", 46, 2.475, 504, "12", True, _ADA),
    ("RTX 4080 SUPER", r"RTX 4080 SUPER", "8.9", 80, 2.55, 736, "16", True, _ADA),
    ("RTX 4080", r"RTX 4080", "8.9", 76, 2.505, 717, "16", True, _ADA),
    ("RTX 4090", r"RTX 4090", "8.9", 128, 2.52, 1008, "24", True, _ADA),
    ("H100 PCIe", r"\bH100 PCIe", "9.0", 114, 1.62, 2039, "80", False, _H100),
    ("H100 NVL", r"\bH100 NVL", "9.0", 132, 1.545, 3938, "94", False, _H100),
    ("H100 SXM", r"\bH100\b", "9.0", 132, 1.83, 3352, "80", False, _H100),
    ("H200 NVL", r"\bH200 NVL", "9.0", 132, 1.545, 4800, "141", False, _H200),
    ("H200", r"\bH200\b", "9.0", 132, 1.83, 4800, "141", False, _H200),
    ("B200", r"\bB200\b", "10.0", 148, 1.856, 8000, "180", False, _B200),
    ("RTX 5090", r"RTX 5090", "12.0", 170, 2.407, 1792, "32", True, _RTX50),
)


@dataclass(frozen=True)
class Peaks:
    """Upper bounds of one device. `tflops`: precision -> 10^12 operations a second; `bandwidth_gbs`: 10^9 bytes/s.

    capability ("9.0"), multiprocessors and memory_gb ("141"; "16/32": sold with either) of a board of the table; "" and
    0 where they are not known.
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
        for name in (precision, *_WIDER.get(precision, ())):
            if name in self.tflops:
                return self.tflops[name]
        return None

    def require(self, precision: str) -> None:
        """Raises CutefuseError where `rate` knows nothing of a precision."""
        if self.rate(precision) is None:
            able = sorted(name for name in {*self.tflops, *_WIDER} if name and self.rate(name))
            raise CutefuseError(f"no peak of {self.device} is known for {precision}; choose one of {', '.join(able)}")

    def attainable_tflops(self, precision: str, intensity: float) -> float | None:
        """min(P_peak, I * b_max): `intensity` in FLOP per byte, result in TFLOP/s."""
        peak = self.rate(precision)
        return None if peak is None else min(peak, intensity * self.bandwidth_gbs / 1000)

    def ridge(self, precision: str) -> float | None:
        """FLOP per byte at which the roof turns flat."""
        peak = self.rate(precision)
        return None if peak is None else peak * 1000 / self.bandwidth_gbs

    def floor_us(self, precision: str, flops: float, size_bytes: float) -> float | None:
        """The least time in which this device can do `flops` and move `size_bytes`."""
        peak = self.rate(precision)
        memory_us = size_bytes / self.bandwidth_gbs / 1e3
        return None if peak is None else max(flops / peak / 1e6, memory_us)


_WIDER = {
    "BF16": ("FP16", "TF32", "FP32"), "FP16": ("FP32",), "TF32": ("FP32",), "FP8": ("INT8", "FP16", "FP32"),
    "INT8": ("FP16", "FP32"), "UINT8": ("INT8", "FP16", "FP32"), "INT4": ("INT8", "FP16"), "FP4": ("FP8", "FP16"),
    "FP64": ("FP32",), "INT32": ("FP32",), "INT64": ("FP32",), "BOOL": ("FP32",), "": ("FP32",),
}  # fmt: skip


def _rates(capability: str, sms: int, clock_ghz: float, geforce: bool) -> dict[str, float]:
    table = _FMA_PER_CLOCK[capability]
    return {
        name: round(fma * (0.5 if geforce and name in _GEFORCE_HALF else 1) * 2 * sms * clock_ghz / 1000, 1)
        for name, fma in table.items()
    }


def _board(b: _Board) -> Peaks:
    name, _, capability, sms, clock_ghz, bandwidth_gbs, memory_gb, geforce, source = b
    rates = {**_rates(capability, sms, clock_ghz, geforce), **_PUBLISHED.get(name, {})}
    return Peaks(name, bandwidth_gbs, rates, source, capability, sms, memory_gb)


def boards() -> list[Peaks]:
    """The whole table."""
    return [_board(b) for b in _BOARDS]


def by_name(name: str, sms: int | None = None) -> Peaks | None:
    """Peaks of a board by its short name or CUDA device name; the multiprocessor count tells variants apart."""
    name = re.sub(r"\bRTX[- ]?(?=\d)", "RTX ", name, flags=re.I)  # RTX4090 is the RTX 4090
    for exact in (True, False):
        hits = [b for b in _BOARDS if (b[0].lower() == name.lower() if exact else re.search(b[1], name, re.I))]
        hits = [b for b in hits if sms in (None, b[3])] or hits
        if hits:
            return _board(hits[0])
    return None


def sharing(name: str) -> list[Peaks]:
    """The boards that a person may mean by a name: one by its whole name, else all that have its words."""
    wanted = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w not in ("", "nvidia", "tesla", "geforce")]
    exact = [b for b in _BOARDS if b[0].lower() == " ".join(wanted)]
    # A word may be the beginning of a board's: "A100-SXM" is the A100 SXM4.
    return [_board(b) for b in exact or [b for b in _BOARDS if wanted and all(_begins(b, word) for word in wanted)]]


def board(name: str) -> Peaks:
    """Peaks of the board that a person names with `--peaks`.

    Raises CutefuseError for a name that is in no table, and for one that several boards share ("A100").
    """
    named = sharing(name)
    if len(named) > 1:
        raise CutefuseError(
            f"--peaks is {name}, which {len(named)} boards share; give one of {', '.join(b.device for b in named)}"
        )
    found = named[0] if named else by_name(name)
    if found is None:
        known = ", ".join(b[0] for b in _BOARDS)
        raise CutefuseError(f"--peaks is {name}; give auto, measured, a JSON file, or one of {known}")
    return found


def _begins(board: _Board, word: str) -> bool:
    """Whether a word of the board's name, or of its memory ("16gb"), begins so."""
    return any(part.startswith(word) for part in [*board[0].lower().split(), *(f"{m}gb" for m in board[6].split("/"))])


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
    return Peaks(
        name or f"sm_{capability}", 2 * memory_ghz * bus_bits / 8, rates, "computed from the log's device information"
    )


def peaks_from(data: Any, where: str) -> Peaks:
    """Peaks from their JSON form."""
    try:
        rates = {str(k).upper(): float(v) for k, v in data["tflops"].items()}
        bandwidth_gbs = float(data["bandwidth_gbs"])
        if not rates or not all(v > 0 and math.isfinite(v) for v in (bandwidth_gbs, *rates.values())):
            raise ValueError("rates must be positive and finite")
        return Peaks(str(data.get("device", where)), bandwidth_gbs, rates, str(data.get("source", where)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CutefuseError(f"{where} holds no peaks ({error}); it needs device, bandwidth_gbs and tflops") from None
