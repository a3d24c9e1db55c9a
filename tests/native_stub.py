"""The compiled half of cutefuse.torch on a machine without a GPU: it takes over the CPU, and what it would enqueue is
computed by the operators' formulas over the addresses that it hands to the library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutefuse import kernels
from cutefuse.torch import compiled, conv, launch, norms, pixels

_RUN = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_STREAM = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
STREAM = 77


class Stub:
    """What was planned and run. `reason`: what the library refuses with; `stream_error`: of PyTorch's function;
    `raises`: what the planner raises."""

    def __init__(self) -> None:
        self.planned: list[tuple[Any, ...]] = []
        self.calls: list[dict[str, Any]] = []
        self.reason: bytes | None = None
        self.stream_error = 0
        self.raises: Exception | None = None
        self.workspace_bytes = 0
        self._run, self._stream = _RUN(self._on_run), _STREAM(self._on_stream)

    def plan_norm(self, op_type: str, inputs: Sequence[Any], outputs: Sequence[Any], attrs: Any) -> launch.Plan:
        return *self._planned("norm", op_type, inputs, outputs, attrs), [], []

    def plan_conv(self, inputs: Sequence[Any], op_type: str, *values: Any) -> launch.Plan:
        """As conv.plan, but for the plan itself."""
        with pytest.MonkeyPatch.context() as patch:
            plan = SimpleNamespace(data=b"", workspace_bytes=0)
            patch.setattr(conv, "planned", lambda *_: plan)
            _, _, copies, outputs = conv.plan(inputs, op_type, *values)
        read = [
            t if c == 0 else pixels.widened(t) if c > 0 else t.contiguous() for t, c in zip(inputs, copies, strict=True)
        ]
        made = [pixels.empty_pixels(dims, inputs[0].dtype, "cpu") for *dims, _ in outputs]
        return *self._planned("conv", op_type, read, made, values), copies, outputs

    def _planned(self, *what: Any) -> tuple[bytes, int]:
        if self.raises is not None:
            raise self.raises
        kind, op_type, inputs, outputs, attrs = what
        described = [[None if t is None else (t.shape, t.stride(), t.dtype) for t in ts] for ts in (inputs, outputs)]
        self.planned.append((kind, op_type, *described, attrs))
        return (len(self.planned) - 1).to_bytes(8, "little"), self.workspace_bytes

    def _on_stream(self, _device: int, out: Any) -> int:
        out[0] = STREAM
        return self.stream_error

    def _on_run(self, plan: int, operands: int) -> int | None:
        raw = kernels._Operands.from_address(operands)
        kind, op_type, given, made, attrs = self.planned[ctypes.c_int64.from_address(plan).value]
        inputs = [_tensor(raw.inputs[i], d) for i, d in enumerate(given)]
        outputs = [_tensor(raw.outputs[i], d) for i, d in enumerate(made)]
        self.calls.append({
            "op_type": op_type, "inputs": [raw.inputs[i] or 0 for i in range(len(given))], "stream": raw.stream,
            "workspace": raw.workspace or 0, "bytes": raw.workspace_bytes,
        })  # fmt: skip
        if self.reason is not None:
            return ctypes.cast(ctypes.c_char_p(self.reason), ctypes.c_void_p).value
        results = _conv(op_type, inputs, attrs) if kind == "conv" else _norm(op_type, inputs, outputs, attrs)
        for to, value in zip(outputs, results, strict=True):
            if to is not None:
                to.copy_(value)
        return None


def _tensor(address: int | None, described: Any) -> Any:
    if described is None:
        assert not address
        return None
    shape, stride, dtype = described
    assert address or 0 in shape
    count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def _norm(op_type: str, inputs: list[Any], outputs: list[Any], attrs: Any) -> tuple[Any, ...]:
    if op_type == "CuteRowNormForward":
        return norms.forward_reference(*inputs, attrs["epsilon"], bool(attrs["layer"]))
    return norms.backward_reference(*inputs, None if outputs[2] is None else outputs[2].dtype)


def _conv(op_type: str, inputs: list[Any], values: Any) -> list[Any]:
    return conv.reference(inputs, conv.Attributes(op_type, values))


@contextmanager
def on_cpu(extension: Any) -> Iterator[Stub]:
    """The extension in place of the CPU's operators, and afterwards all as it was."""
    stub, before = Stub(), vars(compiled.loaded).copy()
    assert compiled.loaded.python is not None
    python = SimpleNamespace(
        **vars(compiled.loaded.python) | {"plan_norm": stub.plan_norm, "plan_conv": stub.plan_conv}
    )
    addresses = [compiled.address_of(f) for f in (stub._run, stub._stream)]
    try:
        compiled.enable(extension, "cpu", *addresses, python)
        yield stub
    finally:
        extension.disable()
        vars(compiled.loaded).update(before)
        for name in ("rms_norm", "layer_norm", "row_norm_backward", "packed_conv"):
            # PyTorch remembers what an operator resolved to, and forgets it when Python registers something, not C++.
            getattr(torch.ops.cutefuse, name).default._dispatch_cache.clear()
