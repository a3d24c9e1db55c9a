"""`--tune`: what times the sites on this machine's GPU, and what it did in words."""

from __future__ import annotations

from cutefuse import kernels
from cutefuse.engines.pytorch import gpu_torch
from cutefuse.errors import CutefuseError
from cutefuse.optimize.site_times import NAMES, gpu_of
from cutefuse.timing.cache import TuneCache
from cutefuse.timing.calls import Timer, Tuner


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
