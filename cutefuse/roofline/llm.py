"""Language models under the roof: intensity of prefill and decode, and where they turn compute-bound.

`P_max = min(P_peak, I * b_max)` with P in FLOP/s, I in FLOP per byte and b in bytes per second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import truediv
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError
from cutefuse.roofline.measure import read_json
from cutefuse.roofline.peaks import DTYPE_BITS, Peaks


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
        # Between the matrix products, activations are written once and read once.
        activations = self.layers * tokens * 4 * (query + kv + self.hidden + self.intermediate)
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
        data = read_json(Path(choice))
        try:
            hidden, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
            model = Transformer(
                Path(choice).parent.name or choice, int(data["num_hidden_layers"]), hidden, heads,
                int(data.get("num_key_value_heads") or heads), int(data.get("head_dim") or hidden // heads),
                int(data["intermediate_size"]), int(data["vocab_size"]),
                gated=str(data.get("hidden_act", "silu")) in ("silu", "swish", "gelu_pytorch_tanh"),
            )  # fmt: skip
            for size in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"):
                if int(data[size]) < 1:
                    raise ValueError(f"{size} is {data[size]}, it must be 1 or more")
            if min(heads, model.kv_heads, model.head_dim) < 1:
                raise ValueError("heads and their size must be 1 or more")
        except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise CutefuseError(
                f"{choice} is no transformer config ({error}); give a Hugging Face config.json"
            ) from None
    else:
        raise CutefuseError(f"--llm is {choice}; give a config.json or one of {', '.join(MODELS)}")
    return replace(model, weight_type=weight_type, kv_type=kv_type)


def crossing(intensity: Callable[[int], float], ridge: float, limit: int = 1 << 24) -> int | None:
    """The least size at which a rising intensity reaches the ridge; None when it never does up to `limit`."""
    found = bisect_left(range(1, limit + 1), ridge, key=intensity) + 1
    return found if found <= limit else None


def llm_view(model: Transformer, peaks: Peaks, batch: int, context: int) -> dict[str, Any]:
    """Prefill against prompt length and decode against batch size: intensity, attainable rate, time, crossing.

    batch: sequences of the prefill rows. context: tokens before a decode step. Raises CutefuseError where the device
    has no peak for the type that the model computes in.
    """
    compute = model.activation_type if model.weight_type in ("INT4", "FP4") else model.weight_type

    def row(work: tuple[float, float], **sizes: int) -> dict[str, Any]:
        roof = peaks.known_roof(compute, *work)
        return {**sizes, "flops": work[0], "bytes": work[1], "intensity": roof.intensity, "bound": roof.bound,
                "floor_ms": roof.floor_us / 1e3, "attainable_tflops": roof.attainable_tflops}  # fmt: skip

    def of_decode(sequences: int) -> float:
        return truediv(*model.decode(sequences, context))

    ridge = peaks.known_roof(compute, 1, 1).ridge
    powers = [2**i for i in range(0, 15)]
    return {
        "model": model.name, "device": peaks.device, "source": peaks.source, "precision": compute, "ridge": ridge,
        "batch": batch, "context": context, "weight_type": model.weight_type, "kv_type": model.kv_type,
        "prefill": [row(model.prefill(batch, n), length=n) for n in powers],
        "decode": [row(model.decode(n, context), batch=n) for n in powers[:11]],
        "prefill_crossing_length": crossing(lambda length: truediv(*model.prefill(batch, length)), ridge),
        "decode_crossing_batch": crossing(of_decode, ridge, 1 << 16),
        "decode_intensity_limit": of_decode(1 << 30),  # what the key-value cache alone allows
    }  # fmt: skip
