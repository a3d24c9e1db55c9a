"""The table of engines whose time is predicted: name -> rules."""

from __future__ import annotations

import re

from cutefuse.errors import CutefuseError
from cutefuse.operators.layouts import RTX, TENSORRT, TORCH, rule_of
from cutefuse.select.rules_tensorrt import NEWEST, TANH_SILU, Myelin, TensorRT
from cutefuse.select.rules_torch import TorchCompile
from cutefuse.select.wiring import Engine

__all__ = ["NEWEST", "TANH_SILU", "Engine", "engine_of"]
OLDEST = (10, 0)
_RULES: dict[str, type[Engine]] = {TENSORRT: TensorRT, RTX: Myelin, TORCH: TorchCompile}


def engine_of(name: str, version: str = "", sm: int = 0) -> Engine:
    """The engine of a name and a TensorRT version such as 10.3 or 11.

    Raises CutefuseError for another name, a version that is none, and a TensorRT version for another engine.
    """
    rule_of(name, sm)
    if not version:
        return _RULES[name](name, sm=sm, assumed=name == TENSORRT)
    if name != TENSORRT:  # whose rules alone depend on a version
        raise CutefuseError(f"--trt-version {version} does not go with --engine {name}; leave one of them out")
    found = re.fullmatch(r"(\d+)(?:\.(\d+))?(?:\.\d+)*", version)
    own = (int(found[1]), int(found[2] or 0)) if found else (0, 0)
    if own < OLDEST:
        raise CutefuseError(f"'{version}' is no TensorRT that takes these plugins; give 10.0 or newer, as 10.3 or 11.2")
    return TensorRT(name, own, sm)
