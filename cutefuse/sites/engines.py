"""The engines whose time is predicted, and what each computes inside a convolution."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cutefuse.errors import CutefuseError
from cutefuse.ops.layouts import RTX, RTX_ASSUMED, TENSORRT, TORCH, rule_of

NEWEST = (11, 3)  # the newest TensorRT that a fact below is recorded for
OLDEST = (10, 0)
TANH_SILU = (11, 0)  # from here on SiLU is a kernel of its own, and its tanh form is not
ORIN = 87  # TensorRT 10 was seen to compute Conv and SiLU in one layer there, and in two elsewhere


@dataclass(frozen=True)
class Engine:
    """The engine whose time is predicted: `tensorrt`; `rtx`, which is TensorRT for RTX and its compiler Myelin; or
    `torch`, which is torch.compile with cuDNN's convolutions."""

    name: str = TENSORRT
    version: tuple[int, int] = NEWEST
    sm: int = 0
    assumed: bool = False  # nobody named the version

    @property
    def title(self) -> str:
        if self.name == TORCH:
            return "PyTorch (torch.compile)"
        if self.name == RTX:
            return "TensorRT for RTX"
        return f"TensorRT {self.version[0]}.{self.version[1]}"

    def inside(self, activation: str) -> bool:
        """Whether the convolution's own kernel computes the activation.

        TensorRT's catalogue of fusions has Conv with ReLU and Clip. From 11 on it also takes tanh, and so SiLU in its
        tanh form, which `--tanh-silu` writes; this is what a fused SiLU has to beat there.
        """
        if self.name == TORCH:
            return False  # Triton computes bias and activation in one kernel after cuDNN's
        if self.name == RTX:
            return True  # Myelin computes whatever follows a convolution in its kernel, a sum behind it included
        inside = {"", "Relu", "Clip"}
        if self.version >= TANH_SILU:
            inside |= {"Tanh", "Silu"}
        elif self.sm == ORIN:
            inside |= {"Silu"}
        return activation in inside

    @property
    def device_sm(self) -> int:
        """The compute capability (times 10) whose usual GPU stands for one that nobody named; 0: any."""
        return self.sm or (RTX_ASSUMED if self.name == RTX else 0)

    @property
    def merges_pointwise(self) -> bool:
        """Whether 1x1 convolutions of the same tensor become one."""
        return self.name == TENSORRT

    @property
    def reads_ranges(self) -> bool:
        """Whether a convolution reads channels of a wider tensor where they lie; cuDNN's wants them dense."""
        return self.name != TORCH


def engine_of(name: str, version: str = "", sm: int = 0) -> Engine:
    """The engine of a name and a TensorRT version such as 10.3 or 11.

    Raises CutefuseError for another name, a version that is none, and a TensorRT version for PyTorch.
    """
    rule_of(name, sm)
    if not version:
        return Engine(name, sm=sm, assumed=name == TENSORRT)
    if name != TENSORRT:
        raise CutefuseError(f"--trt-version {version} does not go with --engine {name}; leave one of them out")
    found = re.fullmatch(r"(\d+)(?:\.(\d+))?(?:\.\d+)*", version)
    own = (int(found[1]), int(found[2] or 0)) if found else (0, 0)
    if own < OLDEST:
        raise CutefuseError(f"'{version}' is no TensorRT that takes these plugins; give 10.0 or newer, as 10.3 or 11.2")
    return Engine(name, own, sm, assumed=False)
