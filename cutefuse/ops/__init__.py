"""Operators, one module each; the folder is the list."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from cutefuse.ops.op import FusedOp


@functools.cache
def operators() -> tuple[FusedOp, ...]:
    """All operators, in alphabetical order of their stems."""
    stems = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "op")
    return tuple(importlib.import_module(f"{__name__}.{stem}").OPERATOR for stem in stems)
