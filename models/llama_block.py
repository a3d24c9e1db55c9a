"""A small Llama-style decoder in PyTorch, its norms written as model code writes them, and what replacing them changes.

python models/llama_block.py            # on a GPU: torch.profiler before and after, times, kernels, memory
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cutefuse.torch import replace_norms  # noqa: E402


@dataclass(frozen=True)
class Config:
    """Sizes as in the Llama papers; the defaults are the tutorial's model: 16 layers of 512."""

    layers: int = 16
    dim: int = 512
    heads: int = 16
    kv_heads: int = 4
    intermediate: int = 1024
    vocabulary: int = 8192


class LlamaRMSNorm(nn.Module):
    """As transformers defines it: six kernels and three temporaries for one read and one write."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.dim // c.heads
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.kv = nn.Linear(c.dim, 2 * c.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2 * self.kv_heads, self.head_dim).transpose(1, 2).chunk(2, 1)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = LlamaRMSNorm(c.dim), LlamaRMSNorm(c.dim)
        self.attention = Attention(c)
        self.gate = nn.Linear(c.dim, c.intermediate, bias=False)
        self.up = nn.Linear(c.dim, c.intermediate, bias=False)
        self.down = nn.Linear(c.intermediate, c.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        n = self.ffn_norm(h)
        return h + self.down(F.silu(self.gate(n)) * self.up(n))


class Llama(nn.Module):
    """Token ids [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocabulary, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = LlamaRMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(config: Config | None = None, seed: int = 0) -> Llama:
    """The model with seeded weights, on the CPU in float32."""
    torch.manual_seed(seed)
    return Llama(config or Config()).eval()


def measure(model: Llama, tokens: Tensor, training: bool) -> dict[str, Any]:
    """Kernels, device time in us and temporary memory in MB of one step, and torch.profiler's table."""
    from torch.profiler import ProfilerActivity, profile

    def step() -> None:
        with torch.set_grad_enabled(training):
            y = model(tokens)
            if training:
                y.float().square().mean().backward()
                model.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "kernels": len(kernels),
        "device_us": sum(e.device_time for e in kernels),
        "temporary_mb": (torch.cuda.max_memory_allocated() - start) / 1e6,
        "table": profiler.key_averages().table(sort_by="self_device_time_total", row_limit=12),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--table", action="store_true", help="print torch.profiler's tables too")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: the profile needs a CUDA device; the operators themselves also run on the CPU", file=sys.stderr)
        return 2
    tokens = torch.randint(0, Config.vocabulary, (args.batch, args.length), device="cuda")
    model = make().cuda().bfloat16()
    for training in (False, True):
        plain = make().cuda().bfloat16()
        fused = make().cuda().bfloat16()
        count = len(replace_norms(fused).replaced)
        before, after = measure(plain, tokens, training), measure(fused, tokens, training)
        print(
            f"{'training step' if training else 'inference'}, {count} norms replaced, {torch.cuda.get_device_name(0)}"
        )
        for name, unit in (("kernels", ""), ("device_us", "us"), ("temporary_mb", "MB")):
            print(f"  {name:<14}{before[name]:>10.1f} -> {after[name]:.1f} {unit}")
        if args.table:
            print(before["table"], after["table"], sep="\n")
    with torch.no_grad():
        truth = make().cuda().double()(tokens)
        errors = [float((m(tokens).double() - truth).norm() / truth.norm()) for m in (model, fused)]
    print(f"relative error against float64: {errors[0]:.2e} -> {errors[1]:.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
