"""Models of torchvision and timm beside themselves after `cutefuse.torch.fuse`, eagerly and compiled, one run.

    python benchmarks/torch_fuse.py --batch 8 --models torchvision.resnet50 timm.hrnet_w18_small --json fuse.json

Microseconds of a CUDA graph's replay, in turns, the median counts; and of wall time a call in a loop that is
synchronised at its end. Random weights, float16, channels-last; the error is the largest difference from the float32
model relative to its largest output.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.output import write_json  # noqa: E402

MODELS = ("torchvision.resnet50", "torchvision.googlenet", "timm.hrnet_w18_small")
COLUMNS = ("eager", "fused", "compiled", "compiled fused")
SIDE = 224


def model_of(name: str) -> Any:
    """A model by the package and the name of its maker, with random weights. Raises CutefuseError without it."""
    import torch

    package, _, maker = name.partition(".")
    try:
        room = importlib.import_module("timm" if package == "timm" else "torchvision.models")
        torch.manual_seed(0)
        named = {"aux_logits": False, "init_weights": False} if maker == "googlenet" else {}
        made = room.create_model(maker) if package == "timm" else getattr(room, maker)(**named)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise CutefuseError(f"{name} cannot be made ({error}); install {package}, or name another model") from None
    for part in made.modules():  # fresh statistics would make every BatchNorm an identity
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
    return made.eval().cuda().to(memory_format=torch.channels_last)


def captured(call: Callable[[Any], Any], x: Any) -> Any:
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(x)
    return graph


def measure(name: str, batch: int, all_sites: bool) -> dict[str, Any]:
    import torch

    from benchmarks.lib import timing, wall
    from cutefuse.torch import compiled, fuse

    with torch.no_grad():
        made = model_of(name)
        x = torch.randn(batch, 3, SIDE, SIDE, device="cuda").to(memory_format=torch.channels_last)
        want = made(x)
        made, x = made.half(), x.half()
        fused = fuse(made, (x,), all_sites=all_sites)
        calls = dict(
            zip(COLUMNS, (made, fused, torch.compile(made), torch.compile(fused, fullgraph=True)), strict=True)
        )
        scale = want.abs().max()
        errors = {k: float((call(x).float() - want).abs().max() / scale) for k, call in calls.items()}
        graphs = {k: captured(call, x) for k, call in calls.items()}
        graph_us = wall.in_turns({k: g.replay for k, g in graphs.items()}, 10, 9)
        call_us = wall.in_turns({k: functools.partial(call, x) for k, call in calls.items()}, 10, 5)
    report = fused.report
    return {
        "model": name, "batch": batch, "all_sites": all_sites, "fused": len(report.taken), "left": len(report.left),
        "graph_us": graph_us, "wall_us": call_us, "errors": errors, "state": compiled.state(), **timing.device_row(),
    }  # fmt: skip


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; ratios are of times under torch.compile."""
    from benchmarks.lib import markdown

    lines = [["model", "batch", "fused", "time", *COLUMNS, "ratio"]]
    for row in rows:
        for kind in ("graph_us", "wall_us"):
            times = row[kind]
            ratio = f"{times['compiled fused'] / times['compiled']:.3f}"
            count = f"{row['fused']} of {row['fused'] + row['left']}"
            lines.append([row["model"], str(row["batch"]), count, kind.removesuffix("_us"),
                          *(f"{times[c]:.0f}" for c in COLUMNS), ratio])  # fmt: skip
    return "\n".join(markdown.grid(lines))


def run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="PACKAGE.NAME")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--all-sites", action="store_true", help="every legal site, whatever it is predicted to save")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    from benchmarks.lib import timing

    timing.require_gpu()
    rows = []
    for name in args.models:
        rows.append(measure(name, args.batch, args.all_sites))
        print(text(rows[-1:]).splitlines()[-2], flush=True)
        if args.json:
            write_json(args.json, rows)
    print(f"{rows[0]['gpu']}, microseconds; {rows[0]['state']}")
    print(text(rows))
    return 0


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
