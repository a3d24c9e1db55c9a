"""`--tune`: what times the sites on this machine's GPU, and what it did in words."""

from __future__ import annotations

from cutefuse.optimize.site_times import NAMES
from cutefuse.timing.cache import TuneCache
from cutefuse.timing.calls import Tuner


def tuner_of(rival: str) -> Tuner:
    """Times sites against cuDNN, torch.compile or the better of them, with the times that are kept on this machine."""
    from cutefuse.engines.pytorch.graph_times import gpu_timer

    return Tuner(gpu_timer(), TuneCache(), rival)


def tuned(tuner: Tuner) -> list[str]:
    """What was timed, a sentence each."""
    timer, cache = tuner.timer, tuner.cache
    modes = " and ".join(NAMES[mode] for mode in tuner.modes)
    lines = [
        f"tuned on {timer.tiles_machine.split(', cutefuse')[0]}: {tuner.timed} times taken, {tuner.known} known from "
        f"{cache.path}",
        f"the rival is PyTorch's ({modes}), not TensorRT's; --profile compares with a TensorRT engine",
    ]
    return [*lines, *([cache.note] if cache.note else [])]
