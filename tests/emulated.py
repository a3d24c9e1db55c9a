"""CUTEFUSE_EMULATED=1: the GPU tests on CPU tensors, with a library whose kernels tests/emulator interprets.

Build it with -DCUTEFUSE_EMULATED=ON and name its folder in CUTEFUSE_LIBRARY_DIR. CUTEFUSE_EMULATED_TYPES says which
number types it holds kernels of; CUTEFUSE_EMULATED_TIMING=early, late or any:<seed> when copies and products that run
beside a thread are done. With CUTEFUSE_EMULATED_MULTIPROCESSORS=4 small problems have many tiles for each of them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cutefuse import kernels

EMULATED = os.environ.get("CUTEFUSE_EMULATED") == "1"
TYPES = os.environ.get("CUTEFUSE_EMULATED_TYPES", "float16").split(",")
# The others measure time, or need torch's own kernels on a GPU or those of the norms.
MODULES = {
    "test_depthwise", "test_few_channels", "test_image_tiles",
    "test_kernels_gpu", "test_kernels_forms_gpu", "test_plan_gpu", "test_plugin_gpu", "test_pre_activation_gpu",
    "test_quant_float8_gpu", "test_quant_gpu", "test_quant_small", "test_quant_sums_gpu",
    "test_side_by_side_gpu", "test_sm90",
    "test_sm90_beside", "test_sm90_forms_gpu", "test_sm90_last_tiles", "test_sm90_patch_rows",
    "test_sm90_phases", "test_sm90_small",
    "test_sm90_tf32", "test_spread", "test_window_gpu",
}  # fmt: skip
MULTIPROCESSORS = {"90": "132", "89": "128", "80": "108"}
TIMINGS = {"early": 0, "late": 1, "any": 2}


def reason_to_skip(module: str, params: dict[str, Any]) -> str:
    """Why a GPU test cannot run here; empty: it can."""
    if module not in MODULES:
        return "not for the emulator: it measures time, needs torch on a GPU, or kernels that are not built for it"
    kind = params.get("dtype", params.get("kind", TYPES[0]))
    if (module, kind) == ("test_plan_gpu", "int8"):
        return "it goes over all tiles, and those of int8 for Ampere are not compiled"
    built = kind in (*TYPES, "int8", "float8_e4m3fn")
    return "" if built else f"the emulated library is built without {kind}; CUTEFUSE_EMULATED_TYPES"


def device_facts() -> tuple[int, int]:
    """(compute capability * 10, multiprocessors) of the device that the library sees."""
    sm = os.environ.get("CUTEFUSE_EMULATED_SM", "90")
    return int(sm), int(os.environ.get("CUTEFUSE_EMULATED_MULTIPROCESSORS", MULTIPROCESSORS[sm]))


def compiled(instance: Any, tiles: Sequence[int]) -> Sequence[int]:
    """The tiles of an instance's call whose kernels the library holds: an emulated one is compiled of some files."""
    if not EMULATED:
        return tiles
    held = []
    for tile in tiles:
        try:
            kernels.Plan(replace(instance.call, config=tile, _keep=[]))
        except kernels.KernelError as error:
            assert "the kernel is not in this library" in str(error), error
        else:
            held.append(tile)
    if not held:
        pytest.skip("the emulated library holds no kernel of this call's tiles")
    return held


def repeats(count: int) -> int:
    """How often to do again what may go another way each time; here it goes the same way."""
    return min(count, 2) if EMULATED else count


@functools.cache
def runtime() -> Any:
    """The stand-in for the CUDA runtime library, as libcutefuse.so has loaded it."""
    library = ctypes.CDLL(os.path.join(os.environ["CUTEFUSE_LIBRARY_DIR"], "libcutefuse_emulator.so"))
    library.cutefuse_emulator_error.restype = ctypes.c_char_p
    timing, _, seed = os.environ.get("CUTEFUSE_EMULATED_TIMING", "").partition(":")
    if timing:
        library.cutefuse_emulator_timing(TIMINGS[timing], ctypes.c_uint64(int(seed or 0)))
    return library


def call(name: str, *arguments: Any) -> None:
    """A function of the runtime library, which must succeed."""
    if getattr(runtime(), name)(*arguments) != 0:
        raise RuntimeError(f"{name}: {runtime().cutefuse_emulator_error().decode()}")


def allow(owner: Any, view: Any) -> None:
    """Let kernels touch a tensor's elements, and nothing around them, as long as its owner lives."""
    if view.numel() > 0:
        data = ctypes.c_void_p(view.data_ptr())
        runtime().cutefuse_emulator_allow(data, ctypes.c_size_t(view.numel() * view.element_size()))
        weakref.finalize(owner, runtime().cutefuse_emulator_forbid, data)


class Stream:
    """What the tests use of torch.cuda.Stream."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        call("cudaStreamCreate", ctypes.byref(handle))
        self.cuda_stream = handle.value or 0


class Graph:
    """What the tests use of torch.cuda.CUDAGraph: a launch, captured; it lives as long as the process."""

    def __init__(self, launch: Callable[[int], None], stream: Stream) -> None:
        handle, graph, self._replay = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(), ctypes.c_void_p()
        call("cudaStreamBeginCapture", handle, 1)
        launch(stream.cuda_stream)
        call("cudaStreamEndCapture", handle, ctypes.byref(graph))
        call("cudaGraphInstantiate", ctypes.byref(self._replay), graph, ctypes.c_uint64(0))

    def replay(self) -> None:
        call("cudaGraphLaunch", self._replay, None)
