"""Peaks of the device at hand: measured, read from a JSON file, or looked up by name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cutefuse.errors import CutefuseError
from cutefuse.roofline.peaks import Peaks, board, peaks_from


def peaks_for(choice: str) -> Peaks:
    """Peaks by choice: `measured`, a board's name, or a JSON file.

    A JSON file holds {"device": str, "bandwidth_gbs": float, "tflops": {"FP16": float, ...}, "source": str}.
    Raises CutefuseError for a choice that is none of these, and for a name that several boards share.
    """
    if choice == "measured":
        return measure()
    if choice.endswith(".json"):
        return peaks_from(read_json(Path(choice)), choice)
    return board(choice)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CutefuseError(f"{path} cannot be read as JSON ({error}); see `cutefuse roofline --help`") from None


def measure() -> Peaks:
    """Measured roofs: the GPU through PyTorch where there is one, else this CPU through numpy."""
    try:
        import torch
    except ImportError:
        return measure_cpu()
    return _measure_gpu(torch) if torch.cuda.is_available() else measure_cpu()


def _best(work: Callable[[], Any], wait: Callable[[], Any], repeats: int = 7) -> float:
    """Seconds of the fastest of several runs, after a warm-up."""
    times = []
    for _ in range(repeats + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def measure_cpu(size_mib: int = 64, edge: int = 1024) -> Peaks:
    """Copy bandwidth and matrix product rate of this CPU; numpy's BLAS uses all cores, as ONNX Runtime does."""
    source = np.ones(size_mib << 18, np.float32)
    target = np.empty_like(source)
    copy_s = _best(lambda: np.copyto(target, source), lambda: None)
    a = np.ones((edge, edge), np.float32)
    gemm_s = _best(lambda: a @ a, lambda: None)
    rates = {"FP32": round(2 * edge**3 / gemm_s / 1e12, 4)}
    return Peaks("this CPU", round(2 * source.nbytes / copy_s / 1e9, 2), rates, "measured with numpy: copy and SGEMM")


def _measure_gpu(torch: Any) -> Peaks:
    """Copy bandwidth over 1 GiB and matrix products of 8192^3 on the GPU at hand."""
    wait = torch.cuda.synchronize
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy_s = _best(lambda: [target.copy_(source) for _ in range(4)], wait) / 4
    edge = 8192

    def tflops(multiply: Callable[[], Any]) -> float:
        seconds = _best(lambda: [multiply() for _ in range(4)], wait) / 4
        return round(2 * edge**3 / seconds / 1e12, 1)

    rates: dict[str, float] = {}
    for name, dtype in (("FP32", "float32"), ("TF32", "float32"), ("FP16", "float16"), ("BF16", "bfloat16")):
        torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
        a = torch.randn(edge, edge, device="cuda").to(getattr(torch, dtype))
        rates[name] = tflops(partial(torch.matmul, a, a))
    torch.backends.cuda.matmul.allow_tf32 = False
    b = torch.ones(edge, edge, dtype=torch.int8, device="cuda")
    rates["INT8"] = tflops(partial(torch._int_mm, b, b.t()))
    name = torch.cuda.get_device_name()
    bandwidth_gbs = round(2 * source.numel() * source.element_size() / copy_s / 1e9, 1)
    return Peaks(name, bandwidth_gbs, rates, f"measured with PyTorch {torch.__version__} on {name}")
