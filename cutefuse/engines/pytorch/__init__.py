"""PyTorch on a GPU as an engine: a program from an ONNX graph, in a CUDA graph, with its layers and tiles timed."""

from __future__ import annotations

from typing import Any

from cutefuse.errors import CutefuseError


def gpu_torch(what: str, otherwise: str) -> Any:
    """PyTorch, for something that needs a GPU. Raises CutefuseError where it is missing, or sees none."""
    try:
        import torch
    except ImportError:
        raise CutefuseError(
            f"{what} needs PyTorch, which is not installed; run `pip install torch`, or {otherwise}"
        ) from None
    if not torch.cuda.is_available():
        raise CutefuseError(
            f"{what} needs a GPU, and PyTorch sees none here; run it on the machine that will run the model, or "
            f"{otherwise}"
        )
    return torch
