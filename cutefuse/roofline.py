"""The roofline model: peaks of a device (table or measured), and the intensity of transformer inference.

`P_max = min(P_peak, I * b_max)` with P in FLOP/s, I in FLOP per byte and b in bytes per second.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutefuse.engine.files import write_json
from cutefuse.errors import CutefuseError, run_command
from cutefuse.report.peaks import Peaks, boards, by_device, by_name, peaks_from
from cutefuse.report.tensors import DTYPE_BITS


# ------------------------------------------------------------------------------------------------ peaks of a device
def peaks_for(choice: str, device: dict[str, Any] | None = None) -> Peaks | None:
    """Peaks by choice: `auto` (the device that the profile names), `measured`, a board's name, or a JSON file.

    A JSON file holds {"device": str, "bandwidth_gbs": float, "tflops": {"FP16": float, ...}, "source": str}.
    Raises CutefuseError for a choice that is none of these.
    """
    if choice == "auto":
        return by_device(device or {})
    if choice == "measured":
        return measure()
    if choice.endswith(".json"):
        return peaks_from(_read(Path(choice)), choice)
    known = by_name(choice)
    if known is None:
        names = ", ".join(b.device for b in boards())
        raise CutefuseError(f"--peaks is {choice}; give auto, measured, a JSON file, or one of {names}")
    return known


def _read(path: Path) -> Any:
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
    import numpy as np

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
    rates: dict[str, float] = {}
    for name, dtype, tf32 in (
        ("FP32", torch.float32, False),
        ("TF32", torch.float32, True),
        ("FP16", torch.float16, False),
        ("BF16", torch.bfloat16, False),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a = torch.randn(edge, edge, device="cuda").to(dtype)
        gemm_s = _best(lambda a=a: [a @ a for _ in range(4)], wait) / 4  # type: ignore[misc]
        rates[name] = round(2 * edge**3 / gemm_s / 1e12, 1)
    torch.backends.cuda.matmul.allow_tf32 = False
    if hasattr(torch, "_int_mm"):
        b = torch.ones(edge, edge, dtype=torch.int8, device="cuda")
        gemm_s = _best(lambda: [torch._int_mm(b, b.t()) for _ in range(4)], wait) / 4
        rates["INT8"] = round(2 * edge**3 / gemm_s / 1e12, 1)
    name = torch.cuda.get_device_name()
    size_bytes = source.numel() * source.element_size()
    return Peaks(
        name, round(2 * size_bytes / copy_s / 1e9, 1), rates, f"measured with PyTorch {torch.__version__} on {name}"
    )


# ------------------------------------------------------------------------------------------------ transformers
@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer by its sizes, all in elements; types by name (FP16, INT8, INT4, ...)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    gated: bool = True
    weight_type: str = "FP16"
    kv_type: str = "FP16"
    activation_type: str = "FP16"

    @property
    def block_weights(self) -> int:
        """Weights of all blocks (attention and MLP), in elements."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (query + 2 * kv) + query * self.hidden
        return self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    def prefill(self, batch: int, length: int) -> tuple[float, float]:
        """(FLOPs, bytes) of reading a prompt: causal attention in one fused kernel, logits of the last token only."""
        return self._pass(batch, length, 0)

    def decode(self, batch: int, context: int) -> tuple[float, float]:
        """(FLOPs, bytes) of one new token per sequence, after `context` tokens."""
        return self._pass(batch, 1, context)

    def _pass(self, batch: int, new: int, context: int) -> tuple[float, float]:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tokens = batch * new
        # Each new token attends to the context and to the new tokens up to itself.
        pairs = batch * (new * context + new * (new + 1) / 2)
        flops: float = 2 * tokens * self.block_weights + 2 * batch * self.head_weights
        flops += self.layers * 4 * pairs * query
        weight_bytes = (self.block_weights + self.head_weights) * DTYPE_BITS[self.weight_type] / 8
        # Keys and values: the context is read, the new ones are written and read back.
        kv_elements = self.layers * 2 * kv * batch * (context + 2 * new)
        # Between the matrix products activations cross memory once out and once in.
        activations = (
            self.layers * tokens * 2 * (query + 2 * kv + query + self.hidden + 2 * self.intermediate + self.hidden)
        )
        size = weight_bytes + kv_elements * DTYPE_BITS[self.kv_type] / 8
        return flops, size + (activations + batch * self.vocabulary) * DTYPE_BITS[self.activation_type] / 8


MODELS = {
    m.name: m
    for m in (
        Transformer("gpt2", 12, 768, 12, 12, 64, 3072, 50257, gated=False),
        Transformer("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        Transformer("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        Transformer("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        Transformer("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000),
        Transformer("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
    )
}


def transformer_from(choice: str, weight_type: str = "FP16", kv_type: str = "FP16") -> Transformer:
    """A known model's sizes, or those of a Hugging Face config.json. Raises CutefuseError for anything else."""
    for kind in (weight_type, kv_type):
        if kind not in DTYPE_BITS:
            raise CutefuseError(f"data type {kind} is unknown; choose one of {', '.join(sorted(DTYPE_BITS))}")
    if choice in MODELS:
        model = MODELS[choice]
    elif choice.endswith(".json"):
        data = _read(Path(choice))
        try:
            hidden, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
            model = Transformer(
                Path(choice).parent.name or choice, int(data["num_hidden_layers"]), hidden, heads,
                int(data.get("num_key_value_heads") or heads), int(data.get("head_dim") or hidden // heads),
                int(data["intermediate_size"]), int(data["vocab_size"]),
                gated=str(data.get("hidden_act", "silu")) in ("silu", "swish", "gelu_pytorch_tanh"),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise CutefuseError(
                f"{choice} is no transformer config ({error}); give a Hugging Face config.json"
            ) from None
    else:
        raise CutefuseError(f"--llm is {choice}; give a config.json or one of {', '.join(MODELS)}")
    from dataclasses import replace

    return replace(model, weight_type=weight_type, kv_type=kv_type)


def crossing(intensity: Callable[[int], float], ridge: float, limit: int = 1 << 24) -> int | None:
    """The least size at which a rising intensity reaches the ridge; None when it never does up to `limit`."""
    if intensity(limit) < ridge:
        return None
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if intensity(middle) >= ridge else (middle + 1, high)
    return low


def llm_view(model: Transformer, peaks: Peaks, batch: int, context: int) -> dict[str, Any]:
    """Prefill against prompt length and decode against batch size: intensity, attainable rate, time, crossing."""
    compute = model.activation_type if model.weight_type in ("INT4", "FP4") else model.weight_type
    ridge = peaks.ridge(compute) or math.inf

    def row(flops: float, size: float, **sizes: int) -> dict[str, Any]:
        intensity = flops / size
        floor_us = peaks.floor_us(compute, flops, size) or math.nan
        return {
            **sizes,
            "flops": flops,
            "bytes": size,
            "intensity": intensity,
            "bound": "compute" if intensity >= ridge else "memory",
            "floor_ms": floor_us / 1e3,
            "attainable_tflops": peaks.attainable_tflops(compute, intensity),
        }

    powers = [2**i for i in range(0, 15)]

    def of_prefill(n: int) -> float:
        flops, size = model.prefill(batch, n)
        return flops / size

    def of_decode(n: int) -> float:
        flops, size = model.decode(n, context)
        return flops / size

    return {
        "model": model.name, "device": peaks.device, "source": peaks.source, "precision": compute, "ridge": ridge,
        "batch": batch, "context": context, "weight_type": model.weight_type, "kv_type": model.kv_type,
        "prefill": [row(*model.prefill(batch, n), length=n) for n in powers],
        "decode": [row(*model.decode(n, context), batch=n) for n in powers[:11]],
        "prefill_crossing_length": crossing(of_prefill, ridge),
        "decode_crossing_batch": crossing(of_decode, ridge, 1 << 16),
        "decode_intensity_limit": _decode_limit(model, context),
    }  # fmt: skip


def _decode_limit(model: Transformer, context: int) -> float:
    """Intensity of decoding for an endless batch: what the key-value cache alone allows."""
    flops, size = model.decode(1 << 30, context)
    return flops / size


def main(argv: list[str] | None = None) -> int:
    """`cutefuse roofline`: the table of peaks, measured peaks, or the view of a language model."""
    parser = argparse.ArgumentParser(prog="cutefuse roofline", allow_abbrev=False, description=__doc__)
    parser.add_argument("--peaks", default=None, help="board name, JSON file or 'measured'; without it the whole table")
    parser.add_argument("--llm", metavar="MODEL", help="config.json or a name: " + ", ".join(MODELS))
    parser.add_argument("--batch", type=int, default=1, help="batch of the prefill rows (1)")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a decode step (1024)")
    parser.add_argument("--weights", default="FP16", help="type of the weights (FP16)")
    parser.add_argument("--kv", default="FP16", help="type of the key-value cache (FP16)")
    parser.add_argument("-o", "--output", type=Path, help="also write the figures (.json) or a page (.html)")
    args = parser.parse_args(argv)

    def command() -> int:
        if args.batch < 1 or args.context < 0:
            raise CutefuseError(
                f"batch {args.batch} and context {args.context}: batch must be 1 or more, context 0 or more"
            )
        if not args.llm:
            rows = [peaks_for(args.peaks)] if args.peaks else list(boards())
            _print_peaks([r for r in rows if r])
            if args.output:
                write_json(args.output, [vars(r) for r in rows if r])
            return 0
        peaks = peaks_for(args.peaks or "H200")
        assert peaks is not None
        view = llm_view(
            transformer_from(args.llm, args.weights.upper(), args.kv.upper()), peaks, args.batch, args.context
        )
        _print_llm(view)
        if args.output and args.output.suffix == ".html":
            from cutefuse.report.pages import write_llm_page

            write_llm_page(view, peaks, args.output)
        elif args.output:
            write_json(args.output, view)
        return 0

    return run_command(command)


def _print_peaks(rows: list[Peaks]) -> None:
    names = [n for n in ("FP32", "TF32", "FP16", "BF16", "FP8", "INT8", "FP4") if any(n in r.tflops for r in rows)]
    print(f"{'device':<24}{'GB/s':>8}" + "".join(f"{n:>9}" for n in names) + "   FP16 ridge (FLOP/B)")
    for r in rows:
        cells = "".join(f"{r.tflops[n]:>9.4g}" if n in r.tflops else f"{'-':>9}" for n in names)
        print(f"{r.device:<24}{r.bandwidth_gbs:>8.4g}{cells}   {r.ridge('FP16') or 0:>8.0f}   {r.source}")
    print("TFLOP/s, dense; GeForce: FP16 with FP16 accumulation")


def _print_llm(view: dict[str, Any]) -> None:
    print(
        f"{view['model']} ({view['weight_type']} weights, {view['kv_type']} cache) on {view['device']}: "
        f"ridge {view['ridge']:.0f} FLOP/byte ({view['precision']})"
    )
    for phase, key, other in (
        ("prefill", "length", f"batch {view['batch']}"),
        ("decode", "batch", f"context {view['context']}"),
    ):
        print(f"\n{phase} ({other})\n{key:>8}{'FLOP/byte':>12}{'bound':>10}{'TFLOP/s max':>13}{'least ms':>11}")
        for r in view[phase]:
            print(
                f"{r[key]:>8}{r['intensity']:>12.2f}{r['bound']:>10}{r['attainable_tflops']:>13.1f}"
                + f"{r['floor_ms']:>11.3f}"
            )
    length, batch = view["prefill_crossing_length"], view["decode_crossing_batch"]
    print(f"\nprefill turns compute-bound at {length} tokens" if length else "\nprefill stays memory-bound")
    limit = f"(an endless batch reaches {view['decode_intensity_limit']:.1f} FLOP/byte: the cache is read per sequence)"
    print(f"decode turns compute-bound at batch {batch} {limit}" if batch else f"decode stays memory-bound {limit}")


if __name__ == "__main__":
    sys.exit(main())
