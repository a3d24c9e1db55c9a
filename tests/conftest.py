"""Markers: `gpu` tests skip without a CUDA device, without importing torch to find out. `--share` cuts a long run."""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
from collections.abc import Iterator

import emulated
import examples  # noqa: F401  registers a profile before pytest loads the one that is asked for
import pytest

pytest.register_assert_rewrite("optimize_runs")  # a plugin of some tests, imported by them first


@functools.cache
def has_gpu() -> bool:
    """Whether the CUDA driver reports a device, or one is emulated."""
    if emulated.EMULATED:
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="1/1", metavar="I/N", help="only every N-th test, from the I-th on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, config.getoption("--share").split("/"))
    items[:] = items[first - 1 :: step]
    if emulated.EMULATED:
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if "gpu" in item.keywords and (why := emulated.reason_to_skip(item.path.stem, params)):
                item.add_marker(pytest.mark.skip(reason=why))  # what the emulated library cannot run, named each time
    if has_gpu():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")  # CI has none; `make gpu-test` runs these where one is
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def own_times(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times that engines of GPU tests take lie beside the tests' files, not in the user's cache."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A command that ran inside a test has left its handler of SIGTERM, which would make `kill` end a test alone."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None:
        signal.signal(signal.SIGTERM, before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    checks = sys.modules.get("gpu_checks")  # imported by the tests of kernels alone
    if checks is not None and checks.WORST:
        text = ", ".join(f"{kind} {error:.3f}" for kind, error in sorted(checks.WORST.items()))
        terminalreporter.write_line(f"largest error of a convolution, over its bound against float64: {text}")
