"""How PyTorch tensors reach the kernel library: types, alignment, cached calls, the current stream."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutefuse import kernels
from cutefuse.errors import CutefuseError
from cutefuse.torch.pixels import ALIGNMENT

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# For the extension: a plan as plain data, the bytes of workspace that it needs; of each input the elements of a pixel
# if it must be copied as an image, else 0; N, K, P, Q and the elements of a pixel of each image to make.
Plan = tuple[bytes, int, list[int], list[list[int]]]
_ABSENT = kernels.Tensor((0,), "float32")


class _Kept(threading.local):
    """What a thread has planned: it writes its own addresses beside its own plans."""

    def __init__(self) -> None:
        self.bound: dict[tuple[Hashable, ...], kernels.Bound] = {}


_kept = _Kept()


def runs_in_library(x: Tensor) -> bool:
    """Whether the kernels take the tensor: on a GPU, in one of their types."""
    return x.is_cuda and x.dtype in NAMES


def sm_of(device: torch.device | None = None) -> int:
    """Compute capability * 10 of a GPU, by default the one that is current."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def dense(t: Tensor) -> Tensor:
    """The tensor without gaps and at an address that 16-byte loads can take."""
    t = t.contiguous()
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


def _describe(t: Tensor | None) -> kernels.Tensor:
    if t is None:
        return _ABSENT
    if t.dtype not in NAMES:
        raise CutefuseError(f"a parameter is {t.dtype}; use float32 or the type of the input")
    return kernels.Tensor(tuple(t.shape), NAMES[t.dtype])


def enqueue(
    key: tuple[Hashable, ...], call: Callable[[], kernels.Call], inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
) -> None:  # fmt: skip
    """Enqueue on the current stream what `call` describes. `key` says all that the call depends on but the device.

    Plans are kept by key, with memory for their addresses: a second call describes nothing and costs one ctypes call.
    """
    operands = [*inputs, *outputs]
    device = next(t for t in operands if t is not None).device
    at = (device.index, *key)
    bound = _kept.bound.get(at)
    if bound is None:
        if len(_kept.bound) >= 1024:  # shapes that never come back must not fill the memory
            _kept.bound.clear()
        bound = _kept.bound[at] = kernels.Bound(planned(call(), device))
    size = bound.plan.workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size > 0 else None
    addresses = [0 if t is None else t.data_ptr() for t in operands]
    bound.bind(addresses, 0 if workspace is None else workspace.data_ptr(), size)
    bound(torch.cuda.current_stream(device).cuda_stream)


def planned(call: kernels.Call, device: torch.device) -> kernels.Plan:
    """A plan is for the device that is current when it is made."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return kernels.Plan(call)


def _call(
    op_type: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], attrs: dict[str, Any]
) -> kernels.Call:
    return kernels.Call(op_type, list(map(_describe, inputs)), list(map(_describe, outputs)), attrs)


def plan(
    op_type: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], attrs: dict[str, Any]
) -> Plan:
    """The plan of a call over dense tensors, for the extension."""
    device = next(t for t in (*inputs, *outputs) if t is not None).device
    made = planned(_call(op_type, inputs, outputs, attrs), device)
    return made.data, made.workspace_bytes, [], []


def run(op_type: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], attrs: dict[str, Any]) -> None:
    """Enqueue an operator on the current stream, its inputs made dense; None is an absent operand."""
    inputs = [None if t is None else dense(t) for t in inputs]
    given = [t for t in (*inputs, *outputs) if t is not None]
    apart = next((t for t in given if t.device != given[0].device), None)
    if apart is not None:
        raise CutefuseError(f"one operand is on {given[0].device}, another on {apart.device}; move both to one device")
    key = (op_type, *attrs.values(), *(None if t is None else (t.shape, t.dtype) for t in (*inputs, *outputs)))
    enqueue(key, lambda: _call(op_type, inputs, outputs, attrs), inputs, outputs)
