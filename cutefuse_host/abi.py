"""ctypes binding of the plugin host's flat C interface (cutefuse_host/src/c_api.cpp), and TensorRT's structs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutefuse import load_library, plugin_path
from cutefuse.errors import CutefuseError

MAX_RANK = 8
FORMATS = ("kLINEAR", "kCHW2", "kHWC8", "kCHW4", "kCHW16", "kCHW32", "kDHWC8", "kCDHW32", "kHWC", "kDLA_LINEAR",
           "kDLA_HWC4", "kHWC16", "kDHWC")  # fmt: skip
DATA_TYPES = ("float32", "float16", "int8", "int32", "bool", "uint8", "fp8", "bfloat16", "int64", "int4")
FLOAT32_FIELD, INT32_FIELD, CHAR_FIELD, INT64_FIELD = 1, 5, 6, 10


class HostError(CutefuseError):
    """The plugin broke TensorRT's contract or refused; the text lists what was found."""


class CField(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    ]


class CDims(ctypes.Structure):
    _fields_ = [("rank", ctypes.c_int32), ("d", ctypes.c_int64 * MAX_RANK)]

    @classmethod
    def of(cls, dims: Sequence[int]) -> CDims:
        return cls(len(dims), (ctypes.c_int64 * MAX_RANK)(*dims[:MAX_RANK]))


class CDesc(ctypes.Structure):
    _fields_ = [("dims", CDims), ("type", ctypes.c_int32), ("format", ctypes.c_int32), ("scale", ctypes.c_float)]


class CDynamicDesc(ctypes.Structure):
    _fields_ = [("desc", CDesc), ("min", CDims), ("max", CDims), ("opt", CDims)]


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded libcutefuse_host.so. Raises CutefuseError when it was not built or does not load."""
    lib = load_library(plugin_path("libcutefuse_host.so"))
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
    fields, dynamic, static = ctypes.POINTER(CField), ctypes.POINTER(CDynamicDesc), ctypes.POINTER(CDesc)
    addresses = ctypes.POINTER(ctypes.c_void_p)
    host: dict[str, tuple[Any, list[Any]]] = {
        "error": (text, []),
        "open": (pointer, [text]),
        "close": (None, [pointer]),
        "library": (text, [pointer]),
        "build": (pointer, [pointer, integer, fields, integer, dynamic, integer, integer, integer]),
        "free_build": (None, [pointer]),
        "report": (text, [pointer]),
        "context": (pointer, [pointer, integer, integer]),
        "free_context": (None, [pointer]),
        "set_shapes": (integer, [pointer, ctypes.POINTER(CDims), integer]),
        "output_size": (integer, [pointer, integer, ctypes.POINTER(CDims)]),
        "enqueue": (integer, [pointer, addresses, addresses, pointer, pointer]),
        "time": (integer, [pointer, addresses, addresses, pointer, integer, ctypes.POINTER(ctypes.c_float)]),
        "raw_create": (pointer, [pointer, integer, fields, integer, integer]),
        "raw_free": (None, [pointer]),
        "raw_clone": (pointer, [pointer, integer]),
        "raw_supports": (integer, [pointer, integer, dynamic, integer, integer]),
        "raw_configure": (integer, [pointer, dynamic, integer, integer]),
        "raw_tactics": (integer, [pointer, ctypes.POINTER(integer), integer]),
        "raw_set_tactic": (integer, [pointer, integer]),
        "raw_shape_change": (integer, [pointer, static, integer, integer]),
        "raw_enqueue": (integer, [pointer, static, integer, addresses, addresses, pointer, pointer]),
        "soak": (integer, [pointer, integer, fields, integer, integer]),
    }
    out, size = ctypes.POINTER(pointer), ctypes.c_size_t
    device: dict[str, tuple[Any, list[Any]]] = {
        "count": (integer, []),
        "error": (text, [integer]),
        "use": (integer, [integer]),
        "alloc": (integer, [out, size]),
        "free": (integer, [pointer]),
        "copy": (integer, [pointer, pointer, size]),
        "stream": (integer, [out]),
        "free_stream": (integer, [pointer]),
        "wait": (integer, [pointer]),
    }
    for prefix, signatures in (("host", host), ("device", device)):
        for name, (result, arguments) in signatures.items():
            function = getattr(lib, f"cutefuse_{prefix}_{name}")
            function.restype, function.argtypes = result, arguments
    return lib


def call(name: str, *arguments: Any) -> Any:
    """One function of the interface that returns a handle or a text; raises HostError when that is null."""
    result = getattr(library(), f"cutefuse_host_{name}")(*arguments)
    if result is None:
        raise HostError(f"plugin host: {library().cutefuse_host_error().decode()}")
    return result


@dataclass(frozen=True)
class Field:
    """A plugin field: `type` is TensorRT's PluginFieldType, `data` its bytes, `length` the number of entries."""

    name: str
    type: int
    length: int
    data: bytes


def field_of(name: str, value: Any) -> Field:
    """An attribute as TensorRT's ONNX parser passes it: INT(S) as int32, FLOAT(S) as float32, STRING as char.

    Raises HostError for a value that the parser cannot pass on.
    """
    if isinstance(value, str | bytes):
        raw = (value.encode() if isinstance(value, str) else value) + b"\0"
        return Field(name, CHAR_FIELD, len(raw), raw)
    values = list(value) if isinstance(value, Sequence | np.ndarray) else [value]
    if all(isinstance(v, int | np.integer) for v in values):
        wide = np.asarray(values, np.int64)
        return Field(name, INT32_FIELD, len(values), wide.astype(np.int32).tobytes())
    if all(isinstance(v, float | int | np.floating) for v in values):
        return Field(name, FLOAT32_FIELD, len(values), np.asarray(values, np.float32).tobytes())
    raise HostError(f"attribute '{name}' is {type(value).__name__}; TensorRT's parser takes ints, floats and strings")


def c_fields(fields: Sequence[Field]) -> Any:
    """Fields as a ctypes array, for the duration of one call."""
    array: Any = (CField * max(1, len(fields)))()
    for slot, f in zip(array, fields, strict=False):
        slot.name, slot.type, slot.length = f.name.encode(), f.type, f.length
        slot.data = ctypes.cast(ctypes.c_char_p(f.data), ctypes.c_void_p) if f.data else None
    array._keep = list(fields)  # c_char_p borrows
    return array


@dataclass(frozen=True)
class Input:
    """An input of the network: `dims` with -1 where dynamic, its type, and the optimisation profile's sizes."""

    dims: Sequence[int]
    dtype: str = "float32"
    min: Sequence[int] | None = None
    opt: Sequence[int] | None = None
    max: Sequence[int] | None = None


def dynamic_desc(item: Input, layout: str = "kLINEAR") -> CDynamicDesc:
    """An Input as TensorRT's DynamicPluginTensorDesc; the profile defaults to `dims`, and 1 where that is -1."""
    fixed = [1 if d < 0 else d for d in item.dims]
    desc = CDesc(CDims.of(item.dims), DATA_TYPES.index(item.dtype), FORMATS.index(layout), 0.0)
    bounds = [CDims.of(fixed if b is None else b) for b in (item.min, item.max, item.opt)]
    return CDynamicDesc(desc, *bounds)
