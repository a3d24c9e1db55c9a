"""`cutefuse patch`: rewrite an ONNX model so that fused operators replace what TensorRT does not fuse.

Exit codes: 0 patched, 1 verification failed, 2 bad input, 3 nothing to patch.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cutefuse import table
from cutefuse.commands import next_step
from cutefuse.commands.build import end_on_sigterm
from cutefuse.commands.doctor import local_gpu
from cutefuse.engine.device import local_sm
from cutefuse.engine.tune import RIVALS, Tuner
from cutefuse.engine.tune_cache import TuneCache
from cutefuse.errors import CutefuseError, run_command
from cutefuse.graph.read import Graph
from cutefuse.ops.layouts import AUTO, CHOICES, ENGINES, TENSORRT
from cutefuse.output import add_json, json_alone, whole_number
from cutefuse.report.tuned import NAMES, best_tiles, pricing
from cutefuse.rewrite.patch import TAKES, Options, Result, default_output, patch, report_path
from cutefuse.rewrite.prove import failure, words
from cutefuse.sites.causes import sentence
from cutefuse.sites.choose import LEAST_SHARE, LEAST_US, Pricing
from cutefuse.sites.choose_cost import device_of
from cutefuse.sites.engines import NEWEST
from cutefuse.sites.find import EXCLUDED, FUSED, LEFT_OUT, MERGED, Site

BASES = {"profile": "a profile", "tuned": "times taken on this GPU", "model": "a model"}
LIMITS = {"float16": "float16 ends at 65504", "bfloat16": "bfloat16 ends at 3.39e38"}
MOST_NAMED = 3  # nodes that a sentence names
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def show(result: Result, verbose: bool) -> None:
    """Print the candidates, the change and the verdict."""
    rows = []
    for s in result.report["sites"]:
        gflop = table.scaled(s["flops"], 1e9) if s["op_type"] else ""
        saved = table.scaled(s["bytes_saved"], 1e6) if s["status"] == FUSED else ""
        gain = ("?" if s["gain_us"] is None else f"{s['gain_us']:.1f}") if s["status"] == FUSED else ""
        notes = f" ({'; '.join(s['notes'])})" if s["notes"] else ""
        verdict = f"fused as {s['op_type']}" if s["status"] == FUSED else f"{s['status']}: {s['reason']}"
        rows.append([s["name"], s["title"] or s["operator"], s["dtype"] or "", gflop, saved, gain, verdict + notes])
    headings = ["site", "problem", "type", "GFLOP", "MB saved", "us saved", "verdict"]
    table.show("candidates", headings, rows, numbers=(3, 4, 5))
    if verbose:
        for s in result.report["sites"]:
            print(f"{s['name']}: nodes {', '.join(s['nodes'])}; inputs {', '.join(s['inputs'])}; shapes {s['shapes']}")
    summary = result.report["summary"]
    old, new = summary["ops_before"], summary["ops_after"]
    changed = [[op, old.get(op, 0), new.get(op, 0)] for op in sorted({*old, *new}) if old.get(op, 0) != new.get(op, 0)]
    if changed:
        changed.append(["all nodes", summary["nodes_before"], summary["nodes_after"]])
        table.show("nodes", ["op_type", "before", "after"], changed, numbers=(1, 2))
    statuses = (FUSED, MERGED, LEFT_OUT, "refused", EXCLUDED)
    counts = ", ".join(
        f"{count} {status}" for status in statuses if (count := summary[status.replace(" ", "_")]) or status == FUSED
    )
    saved = table.scaled(summary["bytes_saved"], 1e6)
    print(f"{summary['candidates']} candidates: {counts}; {saved} MB of traffic gone; {summary['seconds']} s")
    if summary["refused_by"]:
        print(sentence(summary["refused_by"]))
    for line in (*_prediction(result.report), *_silus(result.report)):
        print(line)
    if saved == "?" or any(s["op_type"] and s["flops"] is None for s in result.report["sites"]):
        print("?: the sizes are not known; where an input's are open, --input-shape NAME:1x3x640x640 gives them")
    if (conversion := result.report["conversion"]) and conversion["overflows"]:
        print(_overflows(conversion["overflows"], LIMITS[conversion["dtype"]]))
    for fault in result.report["known_faults"]:
        print(_fault(fault))
    for unused in result.report["unused_options"]:
        print(unused)
    if left := result.report["clean"]["left"]:
        print(left)
    if proof := result.report["verify"]:
        if proof["passed"]:
            print("\n".join(words(proof, (result.report["conversion"] or {}).get("dtype", ""))))
        else:
            print(f"error: verification failed ({failure(proof)}); no model was written", file=sys.stderr)
    if result.output:
        print(f"wrote {result.output} and {report_path(result.output)}")
        next_step.after_patch(result.output)
    elif result.exit_code == 3:
        print(_nothing(summary))


def _prediction(report: dict[str, Any]) -> list[str]:
    """Sentences on what the fused sites should save together, by whose word, and what is not known."""
    summary, about = report["summary"], report["prediction"]
    if not summary[FUSED] and not summary["left_out"]:
        return []
    engine = about["engine"] + (", the newest known (--trt-version names another)" if about["engine_assumed"] else "")
    gpu = about["gpu"] + (" (--gpu names another)" if about["gpu_assumed"] else "")
    if others := about["gpu_others"]:
        gpu += f" (the name fits {', '.join(others)} too: --gpu takes the whole one)"
    bases = Counter(s["basis"] for s in report["sites"] if s["status"] == FUSED and s["basis"])
    found = []
    if summary["gain_us"] is not None and bases:
        by = " and ".join(f"{count} by {BASES[basis]}" for basis, count in sorted(bases.items()))
        found.append(f"predicted: {summary['gain_us']:.1f} us saved together, {by}")
    found.append(f"the model's engine is {engine}, on {gpu}")
    if casts := (report["conversion"] or {}).get("casts"):
        dtype, size = report["conversion"]["dtype"], table.scaled(report["conversion"]["cast_bytes"], 1e6)
        which = "1 Cast" if casts == 1 else f"{casts} Casts"
        found.append(f"{which} to and from {dtype} stand beside the fused nodes; both totals count their {size} MB")
    if unknown := summary["gain_unknown"]:
        found.append(f"what {unknown} of the fused sites save is not known; --min-gain leaves such sites out")
    return found


def _silus(report: dict[str, Any]) -> list[str]:
    """What became of the SiLUs outside, where the engine could compute them inside a convolution."""
    silu, found = report["silu"], []
    if silu["tanh"]:
        found.append(
            f"{len(silu['tanh'])} SiLUs outside are written with tanh, which TensorRT 11 computes inside the Conv"
        )
    elif silu["outside"] and report["prediction"]["fuses_tanh"]:
        found.append(
            f"{silu['outside']} SiLUs stay outside; --tanh-silu writes them as TensorRT 11 computes them inside"
        )
    why = {reason: [n for n, r in silu["left"].items() if r == reason] for reason in silu["left"].values()}
    return found + [f"{len(names)} SiLUs keep their form ({names[0]}, ...): {reason}" for reason, names in why.items()]


def _fault(fault: dict[str, Any]) -> str:
    """What a known fault of TensorRT does, and to which nodes of this model."""
    stays, fused = fault["stays"], fault["fused"]
    more = f" and {len(stays) - MOST_NAMED} more" if len(stays) > MOST_NAMED else ""
    count = f"{len(stays)} of {len(stays) + len(fused)} such nodes stay outside: {', '.join(stays[:MOST_NAMED])}{more}"
    rest = f"{count}; compare the engine with the model (cutefuse accuracy)" if stays else f"all {len(fused)} are fused"
    about = f"reported fault of TensorRT {fault['versions']} ({fault['source']}): {fault['title']}"
    return f"{about}; {fault['advice']}; {rest}"


def _overflows(found: list[dict[str, Any]], limit: str) -> str:
    """Which nodes stay in float32 because of their weights."""
    named = [f"{o['node']} ('{o['tensor']}' holds {o['value']:.3g})" for o in found[:MOST_NAMED]]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"{limit}, so {', '.join(named)}{more} {'stays' if len(found) == 1 else 'stay'} in float32"


def _nothing(summary: dict[str, Any]) -> str:
    if summary["left_out"]:
        return "no site would pay; nothing was written (--all fuses every legal site)"
    return "nothing to patch; nothing was written"


def shape_argument(text: str) -> tuple[str, list[int]]:
    """`name:1x3x640x640` of the command line."""
    name, _, dims = text.rpartition(":")
    if not name or not re.fullmatch(r"\d+(x\d+)*", dims):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; write it as name:1x3x224x224")
    return name, [int(d) for d in dims.split("x")]


def _microseconds(text: str) -> float:
    units = {"": 1.0, "us": 1.0, "ms": 1e3, "s": 1e6}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no time; write it as 5us")
    return float(found[1]) * units[found[2] or ""]


def _capability(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no compute capability; write 90 for 9.0, or 0 for any GPU")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="cutefuse patch",
        description="Replace Concat+Conv(+BN+activation), Conv+activation and norms by fused plugin nodes.",
        epilog="exit codes: 0 patched, 1 verification failed, 2 bad input, 3 nothing to patch",
    )  # fmt: skip
    p.add_argument("model", type=Path, help="ONNX file; it is never changed")
    p.add_argument("-o", "--output", type=Path, help="default: model.cutefuse.onnx beside the model")
    p.add_argument("--dry-run", action="store_true", help="show every candidate and its verdict, write nothing")
    p.add_argument("--include", action="append", default=[], metavar="GLOB", help="only sites with a node of this name")
    p.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="no site with a node of this name")
    p.add_argument(
        "--include-op", action="append", default=[], metavar="OP", help="only this operator (concat_conv, ...)"
    )
    p.add_argument("--exclude-op", action="append", default=[], metavar="OP", help="not this operator")
    p.add_argument("--without", action="append", default=[], choices=TAKES,
                   help="do not fuse Convs that read a single tensor, nearest upsampling of a source, sources that are "
                        "channel ranges, the Add of a residual, parallel Convs on the same sources, the "
                        "BatchNormalization and ReLU in front of a Conv, or Convs that stand alone")  # fmt: skip
    p.add_argument("--sm", type=_capability, metavar="90",
                   help="compute capability of the GPU that will run the model; operators that only an older "
                        "generation's kernels can fuse stay outside; default: this machine's GPU; 0: any")  # fmt: skip
    p.add_argument("--no-functions", action="store_true", help="leave function bodies out (TensorRT 10.6 and older)")
    p.add_argument(
        "--verify", action="store_true", help="run original and patched model on the same inputs and compare"
    )
    p.add_argument("--input-shape", action="append", default=[], type=shape_argument, metavar="NAME:1x3x224x224",
                   help="size of a dynamic input, for the figures and --verify; the model stays dynamic")  # fmt: skip
    p.add_argument("--seed", type=whole_number, default=0, help="of the inputs for --verify")
    p.add_argument("--all", action="store_true", dest="all_sites", help="fuse every legal site, whatever it saves")
    p.add_argument("--min-gain", type=_microseconds, metavar="5us",
                   help=f"leave out sites that save less, or nobody knows what; default: {LEAST_US:g}us, or "
                        f"{100 * LEAST_SHARE:g} %% of a site's cost if more; unknown ones are fused")  # fmt: skip
    p.add_argument("--profile", type=Path, metavar="DIR", help="profile of the unpatched engine: its times choose")
    p.add_argument("--tune", action="store_true",
                   help="time each site on this machine's GPU: its best tile, which its node then asks for, and what "
                        "PyTorch takes for the nodes that it replaces; times are kept for the next run")  # fmt: skip
    p.add_argument("--rival", choices=sorted(RIVALS),
                   help="what --tune compares with: cuDNN's kernels, torch.compile, or the better of the two; default: "
                        "best")  # fmt: skip
    p.add_argument("--engine", choices=ENGINES, default=TENSORRT, help="whose time is predicted; default: tensorrt")
    p.add_argument("--layout", choices=CHOICES, default=AUTO,
                   help="how tensors of fused convolutions lie: hwc8, for TensorRT before Blackwell, or nhwc, for "
                        "TensorRT on Blackwell and TensorRT for RTX; default: as --engine and --sm tell")  # fmt: skip
    p.add_argument("--trt-version", default="", metavar="10.3",
                   help=f"TensorRT that will build the engine; default: {'.'.join(map(str, NEWEST))}")  # fmt: skip
    p.add_argument("--tanh-silu", action="store_true",
                   help="write the SiLUs that stay outside as x * (0.5 * tanh(0.5 * x) + 0.5), which TensorRT 11 "
                        "computes inside the convolution")  # fmt: skip
    p.add_argument("--gpu", default="", metavar="NAME",
                   help="GPU that will run the model, as 'A100' or 'RTX 4090', for --sm and the predicted times; "
                        "default: this machine's, or the usual one of --sm")  # fmt: skip
    p.add_argument(
        "--dtype", choices=sorted(DTYPES), help="lower the precision first; TensorRT 11 takes it from the file"
    )
    p.add_argument(
        "--scope", choices=("model", "sites"), help="what --dtype lowers; default: model for fp16, sites for bf16"
    )
    p.add_argument(
        "--keep-float32", action="append", default=[], metavar="GLOB", help="nodes that --dtype must not lower"
    )
    p.add_argument(
        "--clean", action="store_true", help="write the whole model with constants folded and no-ops removed"
    )
    add_json(p)
    p.add_argument("--verbose", action="store_true", help="also list the nodes, tensors and shapes of every site")
    return p


def tuner_of(rival: str) -> Tuner:
    """Times sites against cuDNN, torch.compile or the better of them, with the times that are kept on this machine."""
    from cutefuse.engine.tune_timer import gpu_timer

    return Tuner(gpu_timer(), TuneCache(), rival)


def _tuned(tuner: Tuner) -> str:
    """What was timed, as a sentence each."""
    timer, cache = tuner.timer, tuner.cache
    modes = " and ".join(NAMES[mode] for mode in tuner.modes)
    lines = [
        f"tuned on {timer.tiles_machine.split(', cutefuse')[0]}: {tuner.timed} times taken, {tuner.known} known from "
        f"{cache.path}",
        f"the rival is PyTorch's ({modes}), not TensorRT's; --profile compares with a TensorRT engine",
    ]
    return "\n".join([*lines, *([cache.note] if cache.note else [])])


def _pricing(model: Path, profile: Path | None) -> Pricing | None:
    if profile is None:
        return None

    from cutefuse.report import rank

    read = functools.cache(rank.profile_of)

    def price(graph: Graph, sites: Sequence[Site]) -> list[rank.Candidate]:
        engine = read(profile, model)
        return rank.price(engine, graph, sites, rank.engine_peaks(engine), model)

    return price


def _target(args: argparse.Namespace) -> tuple[int, str]:
    """Compute capability (times 10) and name of the GPU that will run the model: as asked, else of this machine.

    Raises CutefuseError for a GPU that is not known, and for a name and a compute capability of different GPUs.
    """
    if not args.gpu:
        own = local_sm()
        sm = own if args.sm is None else args.sm
        return sm, local_gpu() if sm == own else ""
    sm = device_of(0, args.gpu).sm
    if args.sm not in (None, 0, sm):
        raise CutefuseError(
            f"--gpu {args.gpu} has compute capability {sm / 10}, and --sm {args.sm} is {args.sm / 10}; give one of them"
        )
    return sm if args.sm is None else args.sm, args.gpu


def _idle(args: argparse.Namespace) -> list[str]:
    """Sentences about options of the command line that another option leaves nothing to do."""
    found = ["--rival does nothing without --tune"] if args.rival and not args.tune else []
    if timed := "--profile" if args.profile else "--tune" if args.tune else "":
        given = [option for option, value in (("--gpu", args.gpu), ("--trt-version", args.trt_version)) if value]
        found += [f"{option} prices only what {timed} has not timed: what stands beside the sites" for option in given]
    return found


def main(argv: list[str] | None = None) -> int:
    """Entry point of `cutefuse patch` and scripts/patch_onnx.py."""
    args = make_parser().parse_args(argv)

    def command() -> int:
        end_on_sigterm()
        if args.tune and args.profile:
            raise CutefuseError("--tune and --profile were both given, and a site has one price; give one of them")
        tuner = tuner_of(args.rival or "best") if args.tune else None
        sm, gpu = _target(args)
        options = Options(
            include=args.include, exclude=args.exclude, include_op=args.include_op, exclude_op=args.exclude_op,
            without=args.without, sm=sm, functions=not args.no_functions, verify=args.verify, seed=args.seed,
            shapes=dict(args.input_shape), dry_run=args.dry_run,
            price=pricing(tuner) if tuner else _pricing(args.model, args.profile),
            tiles=partial(best_tiles, tuner) if tuner else None, min_gain_us=args.min_gain,
            dtype=DTYPES.get(args.dtype, ""), clean=args.clean, scope=args.scope or "", keep_float32=args.keep_float32,
            all_sites=args.all_sites, tanh_silu=args.tanh_silu, engine=args.engine, trt_version=args.trt_version,
            gpu=gpu, layout=args.layout, idle=_idle(args),
        )  # fmt: skip
        with json_alone(args.json) as show_json:
            result = patch(args.model, args.output or default_output(args.model), options)
            show_json(result.report)
        if not args.json:
            show(result, args.verbose)
            if tuner:
                print(_tuned(tuner))
        return result.exit_code

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
