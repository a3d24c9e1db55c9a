"""What a call of a norm costs a PyTorch program, in microseconds of wall time: ours beside torch.nn.

    python benchmarks/torch_calls.py --json calls.json

A loop of calls as a training script makes them, synchronised at its end; the rounds of ours and torch's alternate, and
the median counts. Forward runs without gradients; forward + backward clears the gradients after every step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from cutefuse.errors import run_command  # noqa: E402
from cutefuse.output import write_json  # noqa: E402

SHAPES = ((64, 128), (4096, 512), (4096, 4096))
DTYPES = ("float32", "bfloat16")
NORMS = ("LayerNorm", "RMSNorm")
DIRECTIONS = ("forward", "forward+backward")


def step_of(module: Any, x: Any, dy: Any, backward: bool) -> Callable[[], Any]:
    """One call as a training or an inference script makes it."""
    import torch

    if not backward:

        def forward() -> Any:
            with torch.no_grad():
                return module(x)

        return forward
    held = [x, *module.parameters()]

    def step() -> None:
        module(x).backward(dy)
        for t in held:
            t.grad = None

    return step


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    import cutefuse.torch as ours
    from benchmarks.lib import timing, wall

    rows = []
    for norm, dtype, (height, width), direction in itertools.product(NORMS, DTYPES, SHAPES, DIRECTIONS):
        kind, backward = getattr(torch, dtype), direction != "forward"
        x = torch.randn(height, width, device="cuda", dtype=kind, requires_grad=backward)
        dy = torch.randn(height, width, device="cuda", dtype=kind)
        epsilon = {"eps": 1e-6} if norm == "RMSNorm" else {}
        modules = {
            name: getattr(room, norm)(width, device="cuda", dtype=kind, **epsilon)
            for name, room in (("ours_us", ours), ("torch_us", torch.nn))
        }
        steps = {name: step_of(module, x, dy, backward) for name, module in modules.items()}
        found = wall.in_turns(steps, args.calls, args.rounds)
        rows.append(
            {"norm": norm, "dtype": dtype, "rows": height, "columns": width, "direction": direction, **found}
            | {"ratio": found["ours_us"] / found["torch_us"]} | timing.device_row()
        )  # fmt: skip
    return rows


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    from benchmarks.lib import markdown

    lines = [["norm", "type", "shape", "direction", "ours", "torch", "ratio"]]
    for row in rows:
        shape = f"({row['rows']}, {row['columns']})"
        figures = [f"{row['ours_us']:.1f}", f"{row['torch_us']:.1f}", f"{row['ratio']:.2f}"]
        lines.append([row["norm"], row["dtype"], shape, row["direction"], *figures])
    return "\n".join(markdown.grid(lines))


def run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300, help="calls in a loop; default 300")
    parser.add_argument("--rounds", type=int, default=7, help="loops of which the median counts; default 7")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    from benchmarks.lib import timing

    timing.require_gpu()
    from cutefuse.torch import compiled

    rows = measure(args)
    print(f"{rows[0]['gpu']}, microseconds of wall time per call; {compiled.state()}")
    print(text(rows))
    if args.json:
        write_json(args.json, rows)
    return 0


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
