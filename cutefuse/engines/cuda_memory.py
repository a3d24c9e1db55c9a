"""The few CUDA runtime functions that running an engine needs, through whichever binding is installed."""

from __future__ import annotations

import ctypes
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutefuse.errors import CutefuseError


class Device(ABC):
    """cudaMalloc, one stream and event timing. `call(name, *args)` returns what the runtime's function wrote."""

    name = ""

    @abstractmethod
    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the CUDA runtime. Raises CutefuseError with its error."""

    def __init__(self) -> None:
        self._open()
        self.stream = int(self.call("cudaStreamCreate"))
        self._buffers: list[int] = []

    @abstractmethod
    def _open(self) -> None:
        """Load the binding. Raises ImportError or OSError where it is not installed."""

    def allocate(self, size_bytes: int) -> int:
        """Zeroed device memory; its address."""
        address = int(self.call("cudaMalloc", max(size_bytes, 1)))
        self._buffers.append(address)
        self.call("cudaMemset", address, 0, max(size_bytes, 1))
        return address

    def upload(self, address: int, data: bytes) -> None:
        self.call("cudaMemcpy", address, data, len(data))

    def download(self, address: int, into: np.ndarray) -> None:
        """Fill a contiguous array from device memory."""
        self.call("cudaMemcpy", into.ctypes.data, address, into.nbytes)

    def synchronize(self) -> None:
        self.call("cudaStreamSynchronize", self.stream)

    def time_ms(self, work: Callable[[], None]) -> float:
        """Device time of what `work` enqueues on the stream."""
        start, end = self.call("cudaEventCreate"), self.call("cudaEventCreate")
        self.call("cudaEventRecord", start, self.stream)
        work()
        self.call("cudaEventRecord", end, self.stream)
        self.call("cudaEventSynchronize", end)
        elapsed_ms = float(self.call("cudaEventElapsedTime", start, end))
        self.call("cudaEventDestroy", start)
        self.call("cudaEventDestroy", end)
        return elapsed_ms

    def close(self) -> None:
        for address in self._buffers:
            self.call("cudaFree", address)
        self._buffers = []
        self.call("cudaStreamDestroy", self.stream)


def _is_upload(args: tuple[Any, ...]) -> bool:
    """Whether cudaMemcpy goes to the device: from bytes, not from an address."""
    return isinstance(args[1], bytes)


class CudaPython(Device):
    """NVIDIA's cuda-python (cuda.bindings.runtime; cuda.cudart in releases before 12.6)."""

    name = "cuda-python"

    def _open(self) -> None:
        try:
            self._runtime: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError:
            self._runtime = importlib.import_module("cuda.cudart")

    def call(self, name: str, *args: Any) -> Any:
        if name == "cudaMemcpy":
            kinds = self._runtime.cudaMemcpyKind
            args = (*args, kinds.cudaMemcpyHostToDevice if _is_upload(args) else kinds.cudaMemcpyDeviceToHost)
        status, *values = getattr(self._runtime, name)(*args)
        if int(status):
            raise CutefuseError(f"{name} failed: {getattr(status, 'name', status)}; check the GPU with nvidia-smi")
        return values[0] if values else None


class PyCuda(Device):
    """PyCUDA, in the context that is current where it is opened, which may be a user's own; else in the primary one, so
    that TensorRT, plugins and other libraries share it.

    A user's stream (pycuda.driver.Stream) may be given; it is used, not owned.
    """

    name = "pycuda"

    def __init__(self, stream: Any = None) -> None:
        self._given = stream
        super().__init__()

    def _open(self) -> None:
        driver: Any = importlib.import_module("pycuda.driver")
        self._driver = driver
        self._checked("cuInit", driver.init)
        if driver.Context.get_current() is None:
            self._checked("cuDevicePrimaryCtxRetain", lambda: importlib.import_module("pycuda.autoprimaryctx"))
        stream = self._checked("cuStreamCreate", driver.Stream) if self._given is None else self._given
        memory: dict[int, Any] = {}

        def malloc(size_bytes: int) -> int:
            block = driver.mem_alloc(size_bytes)
            memory[int(block)] = block
            return int(block)

        def copy(to: int, source: int | bytes, size_bytes: int) -> None:
            if _is_upload((to, source)):
                driver.memcpy_htod(to, source)
            else:
                driver.memcpy_dtoh((ctypes.c_char * size_bytes).from_address(to), source)

        self._calls: dict[str, Callable[..., Any]] = {
            "cudaStreamCreate": lambda: stream.handle,
            "cudaStreamDestroy": lambda handle: None,  # it goes with the last that holds it
            "cudaStreamSynchronize": lambda handle: stream.synchronize(),
            "cudaMalloc": malloc,
            "cudaFree": lambda address: memory.pop(address).free(),
            "cudaMemset": lambda address, value, size_bytes: driver.memset_d8(address, value, size_bytes),
            "cudaMemcpy": copy,
            "cudaEventCreate": driver.Event,
            "cudaEventRecord": lambda event, handle: event.record(stream),
            "cudaEventSynchronize": lambda event: event.synchronize(),
            "cudaEventElapsedTime": lambda start, end: start.time_till(end),
            "cudaEventDestroy": lambda event: None,
        }

    def call(self, name: str, *args: Any) -> Any:
        if self._driver.Context.get_current() is None:
            raise CutefuseError(
                f"{name} needs a current CUDA context, and the one that this device was opened in was popped; push it"
            )
        return self._checked(name, lambda: self._calls[name](*args))

    def _checked(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`; an error of PyCUDA as one sentence."""
        try:
            return work()
        except self._driver.Error as error:
            text = " ".join(str(error).split())
            raise CutefuseError(f"{name} failed: {text}; check the GPU with nvidia-smi") from None


DEVICES: tuple[type[Device], ...] = (CudaPython, PyCuda)


def open_device(stream: Any = None) -> Device:
    """The first binding that works: cuda-python, PyCUDA; $CUTEFUSE_DEVICE picks one by name.

    stream: a pycuda.driver.Stream of the caller, in whose context everything then runs.
    """
    if stream is not None:
        try:
            return PyCuda(stream)
        except ImportError:
            raise CutefuseError(
                "a stream of PyCUDA was given, but pycuda is not installed; run `pip install pycuda`"
            ) from None
    wanted = os.environ.get("CUTEFUSE_DEVICE")
    names = [d.name for d in DEVICES]
    if wanted and wanted not in names:
        raise CutefuseError(f"$CUTEFUSE_DEVICE is {wanted}; allowed are {', '.join(names)}; correct it or unset it")
    for device in DEVICES:
        if wanted in (None, device.name):
            try:
                return device()
            except ImportError:
                continue
    raise CutefuseError("no CUDA binding was found for Python; run `pip install cuda-python` (or pycuda)")


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, as its driver describes it."""

    name: str
    capability: tuple[int, int]  # compute capability: major, minor


def local_gpus() -> tuple[list[Gpu], int] | None:
    """The GPUs of this machine and the driver's CUDA version (1000 * major + 10 * minor); None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, version, major, minor = (ctypes.c_int(0) for _ in range(4))
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return [], 0
    driver.cuDriverGetVersion(ctypes.byref(version))
    found = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGetName(name, 256, index)
        for attribute, value in ((75, major), (76, minor)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
        found.append(Gpu(name.value.decode(), (major.value, minor.value)))
    return found, version.value


def local_sm() -> int:
    """Compute capability * 10 of the first GPU of this machine, asked of its driver; 0 without one."""
    gpus, _ = local_gpus() or ([], 0)
    return 10 * gpus[0].capability[0] + gpus[0].capability[1] if gpus else 0
