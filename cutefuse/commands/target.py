"""The GPU that will run a model: as the command line names it, else this machine's."""

from __future__ import annotations

from collections.abc import Sequence

from cutefuse import kernels
from cutefuse.commands.doctor import local_gpu
from cutefuse.engines.cuda_memory import local_sm
from cutefuse.errors import CutefuseError
from cutefuse.select.times import device_of


def target_of(gpus: Sequence[str], sm: int | None) -> tuple[int, str]:
    """Compute capability (times 10) and name of the first of some GPUs, or of this machine's where none is named.

    Raises CutefuseError for a GPU that is not known, for a further one without kernels, and for a name and a compute
    capability of different GPUs.
    """
    if not gpus:
        own = local_sm()
        return own if sm is None else sm, local_gpu() if sm in (None, own) else ""
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
