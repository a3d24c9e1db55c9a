"""The options that `patch` and `optimize` share: which sites, which sizes, which GPU, and what `--tune` times there."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cutefuse import kernels
from cutefuse.commands.doctor import local_gpu
from cutefuse.engines.cuda_memory import local_sm
from cutefuse.engines.pytorch import gpu_torch
from cutefuse.errors import CutefuseError
from cutefuse.operators.layouts import RTX, RTX_CAPABILITIES, TENSORRT
from cutefuse.optimize.site_times import NAMES, gpu_of
from cutefuse.rewrite.options import TAKES, Options
from cutefuse.select.times import device_of
from cutefuse.timing.cache import TuneCache
from cutefuse.timing.calls import Timer, Tuner


def add_choices(p: argparse.ArgumentParser) -> None:
    """Add the shared options, with the fields of Options as their names."""
    p.add_argument("--include", action="append", default=[], metavar="GLOB", help="only sites with a node of this name")
    p.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="no site with a node of this name")
    p.add_argument("--without", action="append", default=[], choices=TAKES,
                   help="do not fuse Convs that read a single tensor, nearest upsampling of a source, sources that are "
                        "channel ranges, the Add of a residual, parallel Convs on the same sources, the "
                        "BatchNormalization and ReLU in front of a Conv, Convs that stand alone, or sums of Convs "
                        "of one tensor")  # fmt: skip
    p.add_argument("--sm", type=_capability, metavar="90",
                   help="compute capability of the GPU that will run the model; operators that only an older "
                        "generation's kernels can fuse stay outside; default: this machine's GPU; 0: any")  # fmt: skip
    p.add_argument("--no-functions", action="store_false", dest="functions",
                   help="leave function bodies out (TensorRT 10.6 and older)")  # fmt: skip
    p.add_argument("--input-shape", action="append", default=[], type=shape_argument, dest="shapes",
                   metavar="NAME:1x3x224x224",
                   help="size of a dynamic input, for figures and engines; the model stays dynamic")  # fmt: skip
    p.add_argument("--keep-float32", action="append", default=[], metavar="GLOB",
                   help="nodes that --dtype must not lower")  # fmt: skip


def options_of(args: argparse.Namespace, **others: Any) -> Options:
    """The Options that a command line names, and `others` in their place."""
    given = {f.name: getattr(args, f.name) for f in fields(Options) if f.name in args} | {"shapes": dict(args.shapes)}
    return Options(**given | others)


def shape_argument(text: str) -> tuple[str, list[int]]:
    """`name:1x3x640x640` of the command line."""
    name, _, dims = text.rpartition(":")
    if not name or not re.fullmatch(r"\d+(x\d+)*", dims):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; write it as name:1x3x224x224")
    return name, [int(d) for d in dims.split("x")]


def _capability(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no compute capability; write 90 for 9.0, or 0 for any GPU")
    return int(text)


def target_of(gpus: Sequence[str], sm: int | None, engine: str = TENSORRT) -> tuple[int, str]:
    """Compute capability (times 10) and name of the first of some GPUs, else of this machine's if the engine takes it.

    Raises CutefuseError for an unknown GPU, a further one without kernels, a name and capability of different GPUs.
    """
    if not gpus:
        own = local_sm()
        if engine == RTX and own not in RTX_CAPABILITIES:
            own = 0
        return own if sm is None else sm, local_gpu() if own and sm in (None, own) else ""
    for name in gpus[1:]:
        if reason := kernels.reject_device(sm_of(name)):
            raise CutefuseError(f"{reason}; leave --gpu '{name}' out")
    named = sm_of(gpus[0])
    if sm not in (None, 0, named):
        raise CutefuseError(
            f"--gpu {gpus[0]} has compute capability {named / 10}, and --sm {sm} is {(sm or 0) / 10}; give one of them"
        )
    return named if sm is None else sm, gpus[0]


def sm_of(gpu: str) -> int:
    """Compute capability (times 10) of a GPU's name. Raises CutefuseError for one that is not known."""
    return device_of(0, gpu).sm


def gpu_timer() -> Timer:
    """The timer of this machine's first GPU. Raises CutefuseError, in one sentence, where there is none."""
    gpu_torch("tuning", "leave --tune out")
    from cutefuse.engines.pytorch.graph_times import GpuTimer
    from cutefuse.torch.launch import sm_of

    if reason := kernels.reject_device(sm_of()):
        raise CutefuseError(f"{reason}; leave --tune out")
    return GpuTimer()


def tuner_of(rival: str) -> Tuner:
    """Times sites against cuDNN, torch.compile or the better of them, with the times that are kept on this machine."""
    return Tuner(gpu_timer(), TuneCache(), rival)


def tuned(tuner: Tuner) -> list[str]:
    """What was timed, a sentence each."""
    cache, modes = tuner.cache, " and ".join(NAMES[mode] for mode in tuner.modes)
    lines = [
        f"tuned on {gpu_of(tuner)}: {tuner.timed} times taken, {tuner.known} known from {cache.path}",
        f"the rival is PyTorch's ({modes}), not TensorRT's; --profile compares with a TensorRT engine",
    ]
    return [*lines, *([cache.note] if cache.note else [])]
