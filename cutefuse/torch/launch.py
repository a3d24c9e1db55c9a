"""How PyTorch tensors reach the kernel library: types, alignment, cached calls, the current stream."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutefuse import kernels
from cutefuse.errors import CutefuseError

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ABSENT = kernels.Tensor((0,), "float32")
_ALIGNMENT = 16
_local = threading.local()  # launchers are changed by every call, so each thread has its own


def runs_in_library(x: Tensor) -> bool:
    """Whether the kernels take the tensor: on a GPU, in one of their types."""
    return x.is_cuda and x.dtype in NAMES


def aligned(t: Tensor | None) -> Tensor | None:
    """The tensor without gaps and at an address that 16-byte loads can take."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone()


def _describe(t: Tensor | None) -> kernels.Tensor:
    if t is None:
        return _ABSENT
    if t.dtype not in NAMES:
        raise CutefuseError(f"a parameter is {t.dtype}; use float32 or the type of the input")
    return kernels.Tensor(tuple(t.shape), NAMES[t.dtype])


def device_facts(index: int | None) -> tuple[int, int]:
    """(compute capability * 10, multiprocessors) of a device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def run(op_type: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], attrs: dict[str, Any]) -> None:
    """Enqueue on the current stream. Lowered calls are kept per shape: a second call costs one ctypes call."""
    operands = (*inputs, *outputs)
    device = next(t for t in operands if t is not None).device
    key = (op_type, device.index, *attrs.values(), *(None if t is None else (t.shape, t.dtype) for t in operands))
    known = _local.__dict__.setdefault("launchers", {})
    if key not in known:
        if len(known) >= 1024:  # shapes that never come back must not fill the memory
            known.clear()
        sm, sm_count = device_facts(device.index)
        call = kernels.Call(
            op_type, list(map(_describe, inputs)), list(map(_describe, outputs)), attrs, sm=sm, sm_count=sm_count
        )
        known[key] = kernels.Launcher(call), kernels.workspace_bytes(call)
    launcher, size = known[key]
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size > 0 else None
    addresses = [0 if t is None else t.data_ptr() for t in operands]
    with torch.cuda.device(device):
        launcher.bind(addresses, 0 if workspace is None else workspace.data_ptr())
        launcher(torch.cuda.current_stream().cuda_stream)
