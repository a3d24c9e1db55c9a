"""The device layer over PyCUDA: a user's context and stream, and errors in one sentence. PyCUDA is a stand-in here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cutefuse.engines import cuda_memory as device
from cutefuse.errors import CutefuseError


class FakeDriver(ModuleType):
    """pycuda.driver as far as it is used: a stack of contexts, memory that belongs to one, streams, events."""

    class Error(Exception):
        pass

    class MemoryError(Error):
        pass

    class LogicError(Error):
        pass

    def __init__(self) -> None:
        super().__init__("pycuda.driver")
        driver = self
        self.stack: list[str] = []
        self.log: list[tuple[Any, ...]] = []
        self.free_bytes = 1 << 20
        self.missing_gpu = False

        class Context:
            @staticmethod
            def get_current() -> str | None:
                return driver.stack[-1] if driver.stack else None

        class Stream:
            def __init__(self) -> None:
                driver.need_context("cuStreamCreate")
                self.handle = 100 + len(driver.log)
                driver.log.append(("stream", driver.stack[-1]))

            def synchronize(self) -> None:
                driver.log.append(("synchronize", self.handle))

        class Event:
            def record(self, stream: Any) -> None:
                driver.log.append(("record", stream.handle))

            def synchronize(self) -> None:
                pass

            def time_till(self, end: Any) -> float:
                return 0.25

        self.Context, self.Stream, self.Event = Context, Stream, Event

    def need_context(self, what: str) -> None:
        if not self.stack:
            raise self.LogicError(f"{what} failed: invalid device context")

    def init(self) -> None:
        if self.missing_gpu:
            raise self.Error("cuInit failed: no CUDA-capable device is detected")

    def mem_alloc(self, size_bytes: int) -> Any:
        self.need_context("cuMemAlloc")
        if size_bytes > self.free_bytes:
            raise self.MemoryError("cuMemAlloc failed: out of memory")
        driver, context = self, self.stack[-1]

        class Block(int):
            def free(self) -> None:
                driver.log.append(("free", int(self)))

        self.log.append(("alloc", size_bytes, context))
        return Block(4096 * len(self.log))

    def memset_d8(self, address: int, value: int, size_bytes: int) -> None:
        self.log.append(("memset", value, size_bytes))

    def memcpy_htod(self, address: int, data: bytes) -> None:
        self.log.append(("memcpy", data))

    def memcpy_dtoh(self, into: Any, address: int) -> None:
        into[:] = bytes(range(len(into)))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """PyCUDA whose autoprimaryctx pushes "primary" the first time that it is imported."""
    fake = FakeDriver()

    class Finder:
        @staticmethod
        def import_module(name: str) -> Any:
            if name == "pycuda.autoprimaryctx":
                fake.stack.append("primary")
            elif name != "pycuda.driver":
                raise ImportError(name)
            return fake

    monkeypatch.setattr(device, "importlib", Finder)
    return fake


def test_a_users_context_is_used_and_stays_as_it_is(driver: FakeDriver) -> None:
    driver.stack = ["the user's"]
    found = device.open_device()
    assert found.name == "pycuda"
    address = found.allocate(100)
    assert ("alloc", 100, "the user's") in driver.log and ("memset", 0, 100) in driver.log
    found.upload(address, b"abc")
    found.close()
    assert driver.stack == ["the user's"] and ("free", address) in driver.log


def test_device_memory_is_read_back(driver: FakeDriver) -> None:
    driver.stack = ["the user's"]
    into = np.full(4, 255, np.uint8)
    device.open_device().download(4096, into)
    assert into.tolist() == [0, 1, 2, 3]


def test_a_users_stream_carries_the_work(driver: FakeDriver) -> None:
    driver.stack = ["the user's"]
    stream = driver.Stream()
    found = device.open_device(stream)
    assert found.stream == stream.handle and sum(entry[0] == "stream" for entry in driver.log) == 1
    assert found.time_ms(lambda: None) == 0.25
    found.synchronize()
    assert {e[1] for e in driver.log if e[0] in ("record", "synchronize")} == {stream.handle}


def test_without_a_context_the_primary_one_is_taken(driver: FakeDriver) -> None:
    device.open_device()
    assert driver.stack == ["primary"] and ("stream", "primary") in driver.log


def refusal(work: Any) -> str:
    with pytest.raises(CutefuseError) as caught:
        work()
    text = str(caught.value)
    assert "\n" not in text and caught.value.__cause__ is None
    return text


def test_a_popped_context_is_one_sentence(driver: FakeDriver) -> None:
    driver.stack = ["the user's"]
    found = device.open_device()
    driver.stack = []
    assert "cudaMalloc needs a current CUDA context" in refusal(lambda: found.allocate(1))


def test_memory_that_does_not_fit_is_one_sentence(driver: FakeDriver) -> None:
    found = device.open_device()
    assert "cuMemAlloc failed: out of memory" in refusal(lambda: found.allocate(1 << 30))


def test_a_machine_without_gpu_is_one_sentence(driver: FakeDriver) -> None:
    driver.missing_gpu = True
    assert "no CUDA-capable device" in refusal(device.open_device)


def test_a_stream_without_pycuda_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    assert "pycuda is not installed" in refusal(lambda: device.open_device(object()))
