"""What the GPU that will run the model has kernels for; elsewhere sites take a smaller match, or stay outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cutefuse import kernels
from cutefuse.match.conv.image import IMAGE
from cutefuse.match.site import FUSED, Site


def judge_device(sites: Sequence[Site], sm: int) -> None:
    """Take a smaller match, or refuse the site, where the kernels of a compute capability (times 10) cannot run it.

    For any GPU (0) the site gets a note where only some have kernels for its number type.
    """
    for site in (s for s in sites if s.status == FUSED):
        left = site.settle(lambda match: kernels.reject(replace(match.call, sm=sm, _keep=[])))
        if left and sm == 0 and (note := _only_on(site.chosen.call)):
            site.take(replace(site.chosen, notes=(*site.chosen.notes, note)))


def _only_on(call: kernels.Call) -> str:
    """Which GPUs alone have tiles for the number type of a call; "" where every GPU has one."""
    dtype = call.dtype
    tiles = [c for c in kernels.operator_of(call.op_type)["configs"] if dtype in c["types"]]
    if not tiles or not all(c["needs"] for c in tiles):
        return ""
    return f"{dtype} has kernels for {kernels.gpus_of(tiles[0])}; --sm names the GPU that will run the model"


def suit_device(sites: Sequence[Site], sm: int) -> None:
    """Fall back to the first smaller match with tiles of the GPU's generation, unless it copies the network's image."""
    for site in (s for s in sites if s.status == FUSED and s.finder.own_tiles_first):
        largest = site.chosen
        suited = (m for m in largest.chain if IMAGE in m.takes or kernels.made_for(m.call, sm))
        smaller = next(suited, largest)
        if smaller is largest:
            continue
        left = ", ".join(sorted(largest.takes - smaller.takes))
        note = f"{left} left outside: compute capability {sm // 10}.{sm % 10} has faster kernels without; see --sm"
        site.take(replace(smaller, notes=(*smaller.notes, note)))
