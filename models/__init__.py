"""Small generators of real topologies: ONNX only, seeded random weights, no downloads.

Each module holds one model, `build(dtype, small) -> onnx.ModelProto`, but those in SHARED.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

SHARED = ("exports", "llama_block", "net", "published", "table")  # modules of this folder that hold no generator
DEMO = ("bevfusion_fuser", "hrnet_head", "unet", "yolo_neck")  # what `make demo` shows


def names() -> list[str]:
    """All models, in alphabetical order."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in SHARED and not m.name.startswith("_"))


def build(name: str, dtype: str = "float32", small: bool = False) -> Any:
    """The onnx.ModelProto of a model in float32 or float16; `small` keeps the topology and shrinks its sizes."""
    return importlib.import_module(f"models.{name}").build(dtype, small)
