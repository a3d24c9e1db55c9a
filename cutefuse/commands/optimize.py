"""`cutefuse optimize`: build the plain engine, patch, build, take back what did not pay, until nothing improves.

Exit codes: 0 a faster engine lies in best/, 1 outputs differ or fused nodes do not run as plugins, 2 bad input or an
engine that cannot be built, 3 nothing pays: best/ is the plain engine, 130 interrupted. Whatever the code, best/ is the
last good engine once the plain one was built.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cutefuse import table
from cutefuse.commands.build import end_on_sigterm, say_idle_timeout, trtexec_options
from cutefuse.commands.choices import add_choices, options_of, target_of, tuner_of
from cutefuse.commands.patch_words import show
from cutefuse.engines.build import BUILDERS, choose_backend
from cutefuse.engines.tensorrt import rtx
from cutefuse.errors import CutefuseError, command_line
from cutefuse.optimize.bench import BEST
from cutefuse.optimize.loop import Limits, Outcome
from cutefuse.optimize.run import DROPPED, KEPT, RECORD, Request, engine_shapes, first_choice, optimize, pages
from cutefuse.optimize.site_times import best_tiles, pricing
from cutefuse.output import add_json, json_alone
from cutefuse.rewrite.patch import patch
from cutefuse.timing.noise import HOW

NOTHING_PAYS = 3


def seconds(text: str) -> float:
    """`300`, `300s`, `5min`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min)?", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"'{text}' is no time limit; write it as 300s or 5min")
    return float(found[1]) * (60 if found[2] == "min" else 1)


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="cutefuse optimize", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Make a network faster on this machine: fuse sites, measure, take back those that do not pay.",
        epilog="Every other option goes to trtexec or to the PyTorch back end (--mode=cudnn, --tiles=guess).\n"
        "exit codes: 0 best/ is faster, 1 outputs differ or plugins are missing, 2 bad input, 3 nothing pays",
    )  # fmt: skip
    p.add_argument("model", type=Path, help="ONNX file; it is never changed")
    p.add_argument("-o", "--output", type=Path, required=True, metavar="DIR",
                   help="folder for plain/, best/, compare.html and optimize.json")  # fmt: skip
    p.add_argument("--backend", choices=BUILDERS, default="auto", help="what builds and runs the engines (auto)")
    p.add_argument("--builds", type=int, default=Limits.builds, metavar="N",
                   help="engine builds at most, the plain one included; cuDNN and torch.compile of one graph are one "
                        f"build ({Limits.builds})")  # fmt: skip
    p.add_argument("--time-limit", type=seconds, metavar="5min", help="begin no build that would end later")
    p.add_argument("--timeout", type=float, metavar="S", help="end trtexec after this many seconds")
    p.add_argument("--dtype", choices=("fp16",), help="convert the model first; both engines compute in this type")
    add_choices(p)
    p.add_argument("--tune", action="store_true", help="choose by times of sites and tiles taken on this GPU first")
    p.add_argument("--verify", action="store_true",
                   help="compare plain and patched outputs: the graphs in ONNX Runtime, with --backend torch also the "
                        "engines")  # fmt: skip
    p.add_argument("--dry-run", action="store_true", help="show the sites that the first patched engine would have")
    add_json(p)
    return p


def progress(outcome: Outcome) -> None:
    """One line for a round that ended."""
    if outcome.verdict is not None:
        return
    this = outcome.rounds[-1]
    times = ", ".join(f"{mode or 'engine'} {us:.1f} us" for mode, us in this.times_us.items())
    best = min(this.verdicts.values(), key=lambda v: v.ratio, default=None)
    parts = [f"{len(this.graph.sites)} sites" if this.graph.sites else "", times,
             f"{best.text} of plain" if best else "", this.decision]  # fmt: skip
    print(f"{this.graph.name} ({this.seconds:.0f} s): {'; '.join(filter(None, parts))}", file=sys.stderr)


def show_result(data: dict[str, Any], out: Path) -> None:
    """The one table of an optimisation, and the faster engine."""
    rows: list[list[str]] = []
    for this in data["rounds"]:
        for mode, us in this["times_us"].items():
            against = this["against_plain"].get(mode)
            name = f"{this['graph']}, {mode}" if mode else this["graph"]
            rows.append([name, f"{us:.1f}", _ratio(against) if against else "", f"{len(this['sites'])} sites"])
    for site in data["sites"]:
        if site["status"] in (KEPT, DROPPED):
            us = "?" if site["measured_us"] is None else f"{site['measured_us']:+.1f}"
            rows.append([f"  {site['name']}", us, site["verdict"] or "", _about(site)])
    table.show(f"{data['model']['path']}, {data['backend']}", ["engine or site", "us", "of plain, verdict", "remarks"],
               rows, numbers=(1,))  # fmt: skip
    print(f"us of a site: plain minus patched layers; of an engine: one inference. {HOW}")
    left = [s for s in data["sites"] if s["status"] not in (KEPT, DROPPED)]
    if left:
        print(f"{len(left)} candidates were not tried; {RECORD} says why")
    for note in data["notes"]:
        print(note)
    verdict = data["verdict"]
    if data["paid"]:
        figures = f"{data['plain_us']:.1f} -> {data['best_us']:.1f} us, {_ratio(verdict)}"
        print(f"faster: {data['kept']}, {figures} of {data['rival']}; {data['builds']} builds; {data['ended']}")
        print(f"wrote {out / BEST}")
    else:
        why = f"the best patched engine takes {_ratio(verdict)} of the plain one's time" if verdict else ""
        print(f"nothing pays: {'; '.join(filter(None, (data['ended'], why)))}; {out / BEST} is the plain engine")


def _ratio(verdict: dict[str, Any]) -> str:
    return f"{verdict['ratio']:.3f} ({verdict['low']:.3f} to {verdict['high']:.3f})"


def _about(site: dict[str, Any]) -> str:
    predicted = f"predicted {site['predicted_us']:+.1f}" if site["predicted_us"] is not None else ""
    others = f"together with {', '.join(site['with'])}" if site["with"] else ""
    return "; ".join(filter(None, (site["status"], predicted, others)))


@command_line
def main(argv: list[str] | None = None) -> int:
    args, rest = make_parser().parse_known_args(argv)
    end_on_sigterm()
    tuner = tuner_of("best") if args.tune else None
    price, tiles = (pricing(tuner), partial(best_tiles, tuner)) if tuner else (None, None)
    sm, gpu = target_of((), args.sm)
    options = options_of(args, sm=sm, gpu=gpu, dtype="")
    dtype = "float16" if args.dtype else ""
    if args.dry_run:
        kind = "torch" if args.backend == "torch" else ""
        with contextlib.suppress(CutefuseError):  # no engine here: the predictions are TensorRT's
            kind = choose_backend(args.backend)
        if args.backend == "auto" and kind == "rtx" and rtx.cannot_run():
            kind = ""  # it builds here, but times nothing
        with json_alone(args.json) as tell:
            shapes = engine_shapes(args.model, options.shapes, kind)
            tried = first_choice(replace(options, dry_run=True, shapes=shapes, dtype=dtype), kind)
            result = patch(args.model, args.output / args.model.name, tried, price, tiles)
            show(result)
            tell(result.report)
        return result.exit_code
    limits = Limits(args.builds, args.time_limit)
    words = trtexec_options(rest)
    request = Request(args.model, args.output, args.backend, words, options, price, tiles, dtype, limits, args.timeout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            say_idle_timeout(args.timeout, args.backend)
            data = optimize(request, progress)
            made = pages(args.output, data["paid"])
    except BaseException:
        if (args.output / BEST).is_dir():
            print(f"{args.output / BEST} holds the last good engine", file=sys.stderr)
        raise
    with json_alone(args.json) as tell:
        show_result(data, args.output)
        print(f"reports: {', '.join(map(str, made))}")
        tell(data)
    return 0 if data["paid"] else NOTHING_PAYS
