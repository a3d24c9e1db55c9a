"""`cutefuse profile-torch module:factory`: where a PyTorch module spends its time, and what our operators would remove.

Every submodule becomes a record_function region, so that the tables go by module and class as well as by operator.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError, command_line
from cutefuse.output import json_alone, make_folder, parsed, write_json
from cutefuse.profilers.torch import sums, tables
from cutefuse.profilers.torch.events import Event, on_device
from cutefuse.profilers.torch.inputs import load, parse_inputs, prepare
from cutefuse.profilers.torch.measure import measure
from cutefuse.profilers.torch.spots import hot_spots


@command_line
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cutefuse profile-torch", allow_abbrev=False, description=__doc__)
    parser.add_argument("target", help="module:factory; it returns a module, or (module, inputs)")
    parser.add_argument(
        "--input", "--shape", action="append", default=[], metavar="1x3x224x224",
        help="shape of an input, repeatable; 4x256:int64 for token ids",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="convert module and inputs")
    parser.add_argument("--device", help="cuda or cpu (cuda where there is one)")
    parser.add_argument("--backward", action="store_true", help="training mode, and the backward pass too")
    parser.add_argument("--replace-norms", action="store_true", help="profile again with our norms, and compare")
    parser.add_argument("--iterations", type=int, default=10, help="profiled iterations (10)")
    parser.add_argument("--rows", type=int, default=15, help="rows of each table (15)")
    parser.add_argument("-o", "--outdir", type=Path, default=Path("torch_profile"), help="folder (torch_profile)")
    args = parsed(parser, argv)
    for option, value in (("--iterations", args.iterations), ("--rows", args.rows)):
        if value < 1:
            raise CutefuseError(f"{option} is {value}; give 1 or more")
    given = parse_inputs(args.input)
    try:
        import torch
    except ImportError:
        raise CutefuseError("profile-torch needs PyTorch; install it with `pip install torch`") from None
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    made = load(args.target)
    module, inputs = prepare(torch, made, args.target, given, device, args.dtype or "", args.backward)
    make_folder(args.outdir)

    def profiled(trace: str) -> list[Event]:
        return measure(torch, module, inputs, args.iterations, args.outdir / trace, args.backward)

    before = profiled("trace.json")
    with json_alone(args.json) as show:
        figures = shown(before, args.iterations, args.rows, args.backward)
        if args.replace_norms:
            from cutefuse.torch import replace_norms

            print(f"\n{replace_norms(module)}")
            figures["replaced"] = replaced(before, profiled("trace_replaced.json"), args.iterations)
        write_json(args.outdir / "profile.json", figures)
        show(figures)
        traces = "trace.json and trace_replaced.json" if args.replace_norms else "trace.json"
        written = f"figures in {args.outdir / 'profile.json'}, time line in {traces}"
        print(f"\n{written} (chrome://tracing, ui.perfetto.dev)")
    return 0


def shown(events: Sequence[Event], iterations: int, rows: int, backward: bool = False) -> dict[str, Any]:
    """Print the tables of a profile; returns what profile.json holds."""
    device = on_device(events)
    operators, modules = sums.by_operator(events, iterations), sums.by_region(events, iterations)
    classes, spots = sums.by_class(events, iterations), hot_spots(events, iterations)
    print(tables.operator_table(operators, rows, device))
    print("\n" + tables.module_table("class of modules", classes, rows, device, backward))
    print("\n" + tables.module_table("module", modules, rows, device, backward))
    print("\n" + tables.spots_text(spots))
    return {
        "schema": 2, "iterations": iterations, "device_times": device, "backward": backward,
        "total": sums.total(events, iterations), "operators": operators, "classes": classes, "modules": modules,
        "hot_spots": [vars(s) for s in spots],
    }  # fmt: skip


def replaced(before: Sequence[Event], after: Sequence[Event], iterations: int) -> dict[str, Any]:
    """Print what replacing the norms changed, class by class; returns it with the classes afterwards."""
    rows = sums.compared(before, after, iterations)
    print("\n" + tables.compared_table(rows, on_device(before)))
    return {"classes": sums.by_class(after, iterations), "compared": rows, "total": sums.total(after, iterations)}
