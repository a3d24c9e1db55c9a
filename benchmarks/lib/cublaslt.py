"""cuBLASLt as a peer of 1x1 filters, through the library that PyTorch has loaded: bias in its epilogue, no activation.

A 1x1 filter over dense channels-last pixels is one matrix product. Columns are contiguous to cuBLAS, so it computes
y[K,pixels] = w[C,K]^T x[C,pixels] + bias[K] (cuBLAS documentation, "Using the cuBLASLt API").
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from cutefuse.errors import CutefuseError

CANDIDATES = 16  # of its heuristics, best guess first
WORKSPACE_BYTES = 32 << 20

# Values of cublasLt.h and library_types.h.
_COMPUTE_32F, _REAL = 68, {"float32": 0, "float16": 2, "bfloat16": 14}
_TRANSA, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_EPILOGUE_BIAS, _TRANSPOSED, _MAX_WORKSPACE_BYTES = 4, 1, 1


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", ctypes.c_uint64 * 8), ("workspace_bytes", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


@functools.cache
def _library() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    import torch

    name = f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        raise CutefuseError(f"{name} was not found beside PyTorch; leave cublaslt out of --variants") from None
    handle = ctypes.c_void_p()
    _check(library.cublasLtCreate(ctypes.byref(handle)))
    return library, handle


def _check(status: int) -> None:
    if status:
        raise CutefuseError(f"cuBLASLt answered status {status}; leave cublaslt out of --variants")


class Product:
    """y = w x + b for one set of operands; `run(i, stream)` enqueues the i-th of `count` algorithms."""

    def __init__(self, dtype: str, sizes: tuple[int, int, int], addresses: tuple[int, int, int, int]) -> None:
        """`sizes` are pixels, C and K; `addresses` those of x [pixels,C], w [K,C], b [K] and y [pixels,K]."""
        import torch

        pixels, channels, filters = sizes
        self.x, self.w, bias, self.y = (ctypes.c_void_p(a) for a in addresses)
        self.lt, self.handle = _library()
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.product = ctypes.c_void_p()
        _check(self.lt.cublasLtMatmulDescCreate(ctypes.byref(self.product), _COMPUTE_32F, _REAL["float32"]))
        self._set(_TRANSA, ctypes.c_int(_TRANSPOSED))
        self._set(_EPILOGUE, ctypes.c_int(_EPILOGUE_BIAS))
        self._set(_BIAS_POINTER, bias)
        self.layouts = [
            self._layout(dtype, *shape) for shape in ((channels, filters), (channels, pixels), (filters, pixels))
        ]
        self.found = self._heuristics()

    def _set(self, attribute: int, value: Any) -> None:
        _check(
            self.lt.cublasLtMatmulDescSetAttribute(
                self.product, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
            )
        )

    def _layout(self, dtype: str, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        _check(self.lt.cublasLtMatrixLayoutCreate(ctypes.byref(layout), _REAL[dtype], *sizes))
        return layout

    def _heuristics(self) -> Any:
        preference, count = ctypes.c_void_p(), ctypes.c_int()
        _check(self.lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        limit = ctypes.c_size_t(WORKSPACE_BYTES)
        _check(
            self.lt.cublasLtMatmulPreferenceSetAttribute(
                preference, _MAX_WORKSPACE_BYTES, ctypes.byref(limit), ctypes.c_size_t(ctypes.sizeof(limit))
            )
        )
        found = (_Heuristic * CANDIDATES)()
        w, x, y = self.layouts
        _check(
            self.lt.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.product, w, x, y, y, preference, CANDIDATES, found, ctypes.byref(count)
            )
        )
        _check(self.lt.cublasLtMatmulPreferenceDestroy(preference))
        return [h for h in found[: count.value] if h.state == 0]

    @property
    def count(self) -> int:
        return len(self.found)

    def run(self, candidate: int, stream: int) -> None:
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        w, x, y = self.layouts
        _check(
            self.lt.cublasLtMatmul(
                self.handle, self.product, ctypes.byref(one), self.w, w, self.x, x, ctypes.byref(zero), self.y, y,
                self.y, y, ctypes.byref(self.found[candidate].algo), ctypes.c_void_p(self.workspace.data_ptr()),
                ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(stream),
            )
        )  # fmt: skip
