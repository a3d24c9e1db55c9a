"""`cutefuse patch`: rewrite an ONNX model so that fused operators replace what TensorRT does not fuse.

Exit codes: 0 patched, 1 verification failed, 2 bad input, 3 nothing to patch.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

from cutefuse import kernels
from cutefuse.commands.build import end_on_sigterm
from cutefuse.commands.choices import add_choices, options_of, sm_of, target_of, tuned, tuner_of
from cutefuse.commands.patch_words import behind_patch, show
from cutefuse.errors import CutefuseError, command_line
from cutefuse.operators.layouts import AUTO, CHOICES, ENGINES, RTX, TENSORRT
from cutefuse.optimize import oracle
from cutefuse.optimize.site_times import best_tiles, pricing
from cutefuse.output import add_json, json_alone, whole_number
from cutefuse.report.analyse.rank import pricing as profiled
from cutefuse.rewrite.options import SCOPES
from cutefuse.rewrite.outlook import USUAL, USUAL_RTX, foresee
from cutefuse.rewrite.patch import default_output, patch
from cutefuse.select.engines import NEWEST
from cutefuse.select.policy import LEAST_SHARE, LEAST_US
from cutefuse.timing.calls import RIVALS


def _microseconds(text: str) -> float:
    units = {"": 1.0, "us": 1.0, "ms": 1e3, "s": 1e6}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no time; write it as 5us")
    return float(found[1]) * units[found[2] or ""]


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="cutefuse patch",
        description="Replace Concat+Conv(+BN+activation), Conv+activation and norms by fused plugin nodes.",
        epilog="exit codes: 0 patched, 1 verification failed, 2 bad input, 3 nothing to patch",
    )  # fmt: skip
    p.add_argument("model", type=Path, help="ONNX file; it is never changed")
    p.add_argument("-o", "--output", type=Path, help="default: model.cutefuse.onnx beside the model")
    p.add_argument("--dry-run", action="store_true", help="show every candidate and its verdict, write nothing")
    add_choices(p)
    p.add_argument("--include-op", action="append", default=[], metavar="OP",
                   help="only this operator (concat_conv, ...)")  # fmt: skip
    p.add_argument("--exclude-op", action="append", default=[], metavar="OP", help="not this operator")
    p.add_argument("--verify", action="store_true",
                   help="run original and patched model on the same inputs and compare")  # fmt: skip
    p.add_argument("--seed", type=whole_number, default=0, help="of the inputs for --verify")
    p.add_argument("--all", action="store_true", dest="all_sites", help="fuse every legal site, whatever it saves")
    p.add_argument("--min-gain", type=_microseconds, dest="min_gain_us", metavar="5us",
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
    p.add_argument("--gpu", action="append", default=[], metavar="NAME",
                   help="GPU that will run the model, as 'A100' or 'RTX 4090', for --sm and the predicted times; "
                        "further ones are compared with it; default: this machine's or the usual of --sm")  # fmt: skip
    p.add_argument("--dtype", choices=("bf16", "fp16"), default="",
                   help="lower the precision first; TensorRT 11 takes it from the file")  # fmt: skip
    p.add_argument("--scope", choices=SCOPES, default="",
                   help="what --dtype lowers; default: model for fp16, sites for bf16")  # fmt: skip
    p.add_argument("--clean", action="store_true",
                   help="write the whole model with constants folded and no-ops removed")  # fmt: skip
    add_json(p)
    p.add_argument("--verbose", action="store_true",
                   help="every candidate with its verdict, nodes, tensors and shapes, not only a few")  # fmt: skip
    return p


def _idle(args: argparse.Namespace) -> list[str]:
    """Sentences about options of the command line that another option leaves nothing to do."""
    found = ["--rival does nothing without --tune"] if args.rival and not args.tune else []
    if timed := "--profile" if args.profile else "--tune" if args.tune else "":
        given = [option for option, value in (("--gpu", args.gpu), ("--trt-version", args.trt_version)) if value]
        if len(args.gpu) > 1:
            found.append(f"further --gpu are not compared with {timed}, whose times are one GPU's")
        found += [f"{option} prices only what {timed} has not timed: what stands beside the sites" for option in given]
    return found


@command_line
def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    end_on_sigterm()
    if args.tune and args.profile:
        raise CutefuseError("--tune and --profile were both given, and a site has one price; give one of them")
    tuner = tuner_of(args.rival or "best") if args.tune else None
    price = pricing(tuner) if tuner else profiled(args.profile, args.model) if args.profile else None
    sm, gpu = target_of(args.gpu, args.sm, args.engine)
    options = options_of(args, sm=sm, gpu=gpu, idle=_idle(args))
    with json_alone(args.json) as show_json:
        output = args.output or default_output(args.model)
        if oracle.is_for(options) and not args.no_compile and not price:
            result = oracle.judged(args.model, output, options)
        else:
            result = patch(args.model, output, options, price, partial(best_tiles, tuner) if tuner else None)
        assumed = result.report["prediction"]["gpu_assumed"] and not sm and args.sm is None
        known = USUAL_RTX if args.engine == RTX else USUAL
        usual = [g for g in known if assumed and not kernels.reject_device(sm_of(g))]
        named, measured = len(args.gpu) > 1, price is not None
        outlooks = foresee(args.model, options, result, args.gpu[1:] or usual, named, measured)
        result.report["prediction"]["targets"] = [asdict(o) for o in outlooks if o.gpu]
        show_json(result.report)
    if not args.json:
        show(result, args.verbose, outlooks, behind_patch(argv))
        if tuner:
            print("\n".join(tuned(tuner)))
    return result.exit_code
