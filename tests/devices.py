"""The architectures that the library knows, and a skip with its reason where this build holds no code for one."""

from __future__ import annotations

import pytest

from cutefuse import kernels

# CUDA programming guide: KiB of shared memory that one block may ask for.
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


def skip_without_code(sm: int) -> None:
    """A build without kernels judges for every architecture, so that it skips none."""
    if reason := kernels.reject_device(sm):
        pytest.skip(reason)
