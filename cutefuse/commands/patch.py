"""`cutefuse patch`: rewrite an ONNX model so that fused operators replace what TensorRT does not fuse.

Exit codes: 0 patched, 1 verification failed, 2 bad input, 3 nothing to patch.
"""

from __future__ import annotations

import argparse
import functools
import gc
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from cutefuse import kernels
from cutefuse.commands.build import end_on_sigterm
from cutefuse.commands.doctor import local_gpu
from cutefuse.commands.patch_words import behind_patch, show
from cutefuse.engine.device import local_sm
from cutefuse.engine.tune import RIVALS, Tuner
from cutefuse.engine.tune_cache import TuneCache
from cutefuse.errors import CutefuseError, run_command
from cutefuse.graph.read import Graph
from cutefuse.ops.layouts import AUTO, CHOICES, ENGINES, RTX, RTX_CAPABILITIES, TENSORRT
from cutefuse.output import add_json, json_alone, whole_number
from cutefuse.report import oracle
from cutefuse.report.tuned import NAMES, best_tiles, pricing
from cutefuse.rewrite.outlook import USUAL, USUAL_RTX, foresee
from cutefuse.rewrite.patch import TAKES, Options, default_output, patch
from cutefuse.sites.choose import LEAST_SHARE, LEAST_US, Pricing
from cutefuse.sites.choose_cost import device_of
from cutefuse.sites.engines import NEWEST
from cutefuse.sites.find import Site

DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


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
                   help=f"leave out sites that save less; default: {LEAST_US:g}us, or "
                        f"{100 * LEAST_SHARE:g} %% of a site's cost if more; unknown gains are left out")  # fmt: skip
    p.add_argument("--no-compile", action="store_true",
                   help="let rules alone predict what TensorRT for RTX, or TensorRT on Blackwell, would copy; without "
                        "it the compiler of TensorRT for RTX tells, where it is installed")  # fmt: skip
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
    p.add_argument(
        "--gpu",
        action="append",
        default=[],
        metavar="NAME",
        help="GPU that will run the model, as 'A100' or 'RTX 4090', for --sm and the predicted times; "
        "further ones are compared with it; default: this machine's, or the usual one of --sm",
    )
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
    p.add_argument(
        "--verbose",
        action="store_true",
        help="every candidate with its verdict, nodes, tensors and shapes, not only those that matter",
    )
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
        if args.engine == RTX and own not in RTX_CAPABILITIES:
            own = 0
        sm = own if args.sm is None else args.sm
        return sm, local_gpu() if own and sm == own else ""
    for name in args.gpu[1:]:
        if reason := kernels.reject_device(sm_of(name)):
            raise CutefuseError(f"{reason}; leave --gpu '{name}' out")
    sm = sm_of(args.gpu[0])
    if args.sm not in (None, 0, sm):
        raise CutefuseError(
            f"--gpu {args.gpu[0]} has compute capability {sm / 10}, and --sm {args.sm} is {args.sm / 10}; "
            "give one of them"
        )
    return sm if args.sm is None else args.sm, args.gpu[0]


def sm_of(gpu: str) -> int:
    """Compute capability (times 10) of a GPU's name. Raises CutefuseError for one that is not known."""
    return device_of(0, gpu).sm


def _idle(args: argparse.Namespace) -> list[str]:
    """Sentences about options of the command line that another option leaves nothing to do."""
    found = ["--rival does nothing without --tune"] if args.rival and not args.tune else []
    if timed := "--profile" if args.profile else "--tune" if args.tune else "":
        given = [option for option, value in (("--gpu", args.gpu), ("--trt-version", args.trt_version)) if value]
        found += (
            [f"further --gpu are not compared with {timed}, whose times are one GPU's"] if len(args.gpu) > 1 else []
        )
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
            output = args.output or default_output(args.model)
            asks = oracle.is_for(options) and not args.no_compile and not options.price
            result = (oracle.judged if asks else patch)(args.model, output, options)
            assumed = result.report["prediction"]["gpu_assumed"] and not sm and args.sm is None
            known = USUAL_RTX if args.engine == RTX else USUAL
            usual = [g for g in known if assumed and not kernels.reject_device(sm_of(g))]
            outlooks = foresee(args.model, options, result, args.gpu[1:] or usual, named=len(args.gpu) > 1)
            result.report["prediction"]["targets"] = [asdict(o) for o in outlooks]
            show_json(result.report)
        if not args.json:
            show(result, args.verbose, outlooks, behind_patch(argv))
            if tuner:
                print(_tuned(tuner))
        return result.exit_code

    looks = gc.isenabled()
    gc.disable()  # a model's nodes live to the end: looking for garbage among them takes a third of a long run
    try:
        return run_command(command)
    finally:
        if looks:
            gc.enable()


if __name__ == "__main__":
    sys.exit(main())
