"""Device memory for the plugin host, and TensorRT's tensor formats in numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from cutefuse.errors import CutefuseError
from cutefuse_host.abi import library

# Channels of one vector. The first kind keeps vectors of channels innermost, [N][C/v][H][W][v]; the second whole
# pixels, [N][H][W][C rounded up to v].
_VECTORS = {"kCHW2": 2, "kCHW4": 4, "kCHW16": 16, "kCHW32": 32}
_PIXELS = {"kHWC": 1, "kHWC8": 8, "kHWC16": 16, "kDHWC": 1, "kDHWC8": 8}
GUARD_BYTES = 256
_GUARD = 0xA5


def _device(name: str, *arguments: Any) -> None:
    """One of the library's device functions. Raises CutefuseError with CUDA's own words where it fails."""
    check(getattr(library(), f"cutefuse_device_{name}")(*arguments))


def check(code: int) -> None:
    """Raises CutefuseError with CUDA's own words for a code that is not 0."""
    if code:
        raise CutefuseError(f"CUDA error {code} in the plugin host: {library().cutefuse_device_error(code).decode()}")


def require_gpu() -> None:
    """Raises CutefuseError where no kernel can run."""
    if not device_count():
        raise CutefuseError("running a plugin needs a CUDA device, and a build with nvcc; none was found here")


def device_count() -> int:
    """CUDA devices that the host sees; 0 in a build without CUDA."""
    return int(library().cutefuse_device_count())


def use_device(index: int) -> None:
    """Make a device current for this thread. Raises CutefuseError where there is none of that index."""
    _device("use", index)


def numpy_type(name: str) -> np.dtype[Any]:
    """The numpy type of a TensorRT data type; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def dtype_name(array: np.ndarray) -> str:
    """TensorRT's name of an array's type."""
    return str(array.dtype)


def packed_shape(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Shape of the memory that a tensor of logical `shape` (channels second) takes in a TensorRT format."""
    if layout == "kLINEAR":
        return tuple(shape)
    n, c, *rest = shape
    if layout in _PIXELS:
        v = _PIXELS[layout]
        return (n, *rest, -(-c // v) * v)
    if layout in _VECTORS:
        v = _VECTORS[layout]
        return (n, -(-c // v), *rest, v)
    raise CutefuseError(f"format {layout} cannot be converted; use kLINEAR, {', '.join([*_PIXELS, *_VECTORS])}")


def pack(array: np.ndarray, layout: str) -> np.ndarray:
    """A linear array in a TensorRT format; pad lanes hold NaN (the largest value for integers)."""
    if layout == "kLINEAR":
        return np.ascontiguousarray(array)
    shape = packed_shape(array.shape, layout)
    channels = shape[-1] if layout in _PIXELS else shape[1] * shape[-1]
    pad = np.nan if array.dtype.kind not in "iub" else np.iinfo(array.dtype).max
    wide = np.full((array.shape[0], channels, *array.shape[2:]), pad, array.dtype)
    wide[:, : array.shape[1]] = array
    if layout in _PIXELS:
        return np.ascontiguousarray(np.moveaxis(wide, 1, -1))
    split = wide.reshape(shape[0], shape[1], shape[-1], *array.shape[2:])
    return np.ascontiguousarray(np.moveaxis(split, 2, -1))


def unpack(packed: np.ndarray, shape: Sequence[int], layout: str) -> np.ndarray:
    """The linear array of logical `shape` behind memory in a TensorRT format; the inverse of pack."""
    if layout == "kLINEAR":
        return packed.reshape(shape)
    whole = packed.reshape(packed_shape(shape, layout))
    if layout in _PIXELS:
        return np.ascontiguousarray(np.moveaxis(whole, -1, 1)[:, : shape[1]])
    wide = np.moveaxis(whole, -1, 2)
    lanes = wide.shape[1] * wide.shape[2]  # not -1: a batch may be empty
    return np.ascontiguousarray(wide.reshape(shape[0], lanes, *shape[2:])[:, : shape[1]])


def pad_lanes(packed: np.ndarray, shape: Sequence[int], layout: str) -> np.ndarray:
    """The lanes of a channels-last buffer that belong to no channel, as one array."""
    if layout not in _PIXELS:
        return packed.reshape(-1)[:0]
    return packed.reshape(packed_shape(shape, layout))[..., shape[1] :]


@dataclass
class Bound:
    """Device pointers of one enqueue, and how to read its outputs back."""

    session: Session
    inputs: list[int]
    outputs: list[int]
    workspace: int
    workspace_bytes: int
    shapes: list[tuple[int, ...]]
    layouts: list[tuple[str, str]]
    run: Callable[[], None] = lambda: None

    @property
    def pointers(self) -> tuple[Any, Any, Any]:
        """Inputs, outputs and workspace as ctypes arguments."""
        into = [(ctypes.c_void_p * max(1, len(p)))(*p) for p in (self.inputs, self.outputs)]
        return into[0], into[1], ctypes.c_void_p(self.workspace or None)

    def packed(self) -> list[np.ndarray]:
        """Run, then copy the outputs back in their formats.

        Raises CutefuseError when a guard byte around an output or the workspace changed.
        """
        self.run()
        _device("wait", self.session.stream)
        results = []
        for i, (pointer, shape, (layout, dtype)) in enumerate(
            zip(self.outputs, self.shapes, self.layouts, strict=True)
        ):
            body = np.empty(packed_shape(shape, layout), numpy_type(dtype))
            found = _guarded(pointer, body.nbytes, f"output {i}")
            results.append(found.view(body.dtype).reshape(body.shape))
        if self.workspace:
            _guarded(self.workspace, self.workspace_bytes, "the workspace")
        return results

    def results(self) -> list[np.ndarray]:
        """Run, then the outputs as linear arrays."""
        return [
            unpack(packed, shape, layout)
            for packed, shape, (layout, _) in zip(self.packed(), self.shapes, self.layouts, strict=True)
        ]


def _guarded(pointer: int, size: int, what: str) -> np.ndarray:
    """The bytes at a device address, when those around them are what they were."""
    raw = np.empty(size + 2 * GUARD_BYTES, np.uint8)
    _device("copy", raw.ctypes.data, pointer - GUARD_BYTES, raw.nbytes)
    if (raw[:GUARD_BYTES] != _GUARD).any() or (raw[GUARD_BYTES + size :] != _GUARD).any():
        raise CutefuseError(f"the plugin wrote outside of {what}")
    return raw[GUARD_BYTES : GUARD_BYTES + size]


class Session:
    """A stream and device memory that are freed together. Raises CutefuseError without a GPU."""

    def __init__(self) -> None:
        require_gpu()
        self._blocks: list[int] = []
        handle = ctypes.c_void_p()
        _device("stream", ctypes.byref(handle))
        self.stream = handle.value or 0

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for block in self._blocks:
            _device("free", block)
        _device("free_stream", self.stream)

    def upload(self, host: np.ndarray) -> int:
        """Device address of a copy of a contiguous array; freed with the session."""
        handle = ctypes.c_void_p()
        _device("alloc", ctypes.byref(handle), max(1, host.nbytes))
        self._blocks.append(handle.value or 0)
        _device("copy", handle.value, host.ctypes.data, host.nbytes)
        # A small copy from pageable memory returns before the device has it, and our stream does not wait for it.
        _device("wait", None)
        return handle.value or 0

    def download(self, address: int, into: np.ndarray) -> None:
        """Wait for the stream, then fill a contiguous array from device memory."""
        _device("wait", self.stream)
        _device("copy", into.ctypes.data, address, into.nbytes)

    def bind(
        self,
        arrays: Sequence[np.ndarray],
        shapes: Sequence[tuple[int, ...]],
        layouts: Sequence[tuple[str, str]],
        workspace_bytes: int,
    ) -> Bound:
        """Upload inputs in their (format, type), make outputs that hold NaN between guard bytes, and a workspace."""
        count = len(arrays)
        inputs = [
            self.upload(pack(np.asarray(array, numpy_type(dtype)), layout))
            for array, (layout, dtype) in zip(arrays, layouts[:count], strict=True)
        ]
        outputs = []
        for shape, (layout, dtype) in zip(shapes, layouts[count:], strict=True):
            body = np.zeros(packed_shape(shape, layout), numpy_type(dtype))
            if body.dtype.kind not in "iub":
                body[...] = np.nan
            guard = np.full(GUARD_BYTES, _GUARD, np.uint8)
            outputs.append(self.upload(np.concatenate([guard, body.reshape(-1).view(np.uint8), guard])) + GUARD_BYTES)
        # The workspace starts as garbage: a plugin may not expect zeros.
        garbage = np.full(workspace_bytes + 2 * GUARD_BYTES, _GUARD, np.uint8)
        workspace = self.upload(garbage) + GUARD_BYTES if workspace_bytes else 0
        return Bound(self, inputs, outputs, workspace, workspace_bytes, list(shapes), list(layouts[count:]))
