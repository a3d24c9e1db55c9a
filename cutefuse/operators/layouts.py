"""How the activations of fused convolutions lie in memory, and which layout each engine takes without copies.

`hwc8`: logical NCHW tensors in TensorRT's kHWC8 and its like, pixels padded to whole vectors. `nhwc`: NHWC tensors in
kLINEAR, dense pixels. The attribute `layout` of a node says which one it has.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cutefuse.errors import CutefuseError

TENSORRT, RTX, TORCH = ENGINES = ("tensorrt", "rtx", "torch")
RTX_CAPABILITIES = (75, 80, 86, 89, 120, 121)  # compute capabilities (times 10) that TensorRT for RTX builds for
RTX_ASSUMED = 89  # what it builds for where nobody names one: Ada
LAYOUT = "layout"  # the attribute of a fused convolution, and its values:
HWC8, NHWC = 0, 1
TO_NCHW, TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)  # axes of a Transpose
NAMES = ("hwc8", "nhwc")
AUTO = "auto"
CHOICES = (AUTO, *NAMES)
BLACKWELL = 100  # the first compute capability (times 10) of Blackwell: B200 10.0, Thor 11.0, RTX 50 12.0


@dataclass(frozen=True)
class Rule:
    """The layout that an engine takes without copies on GPUs from compute capability `sm` (times 10) on. `why` and
    `otherwise`, what nodes of the other layout cost there, are parts of sentences."""

    engine: str
    sm: int
    layout: int
    title: str
    why: str
    otherwise: str


# The last rule that fits counts. From NVIDIA's public build logs, and from engines that TensorRT for RTX built.
RULES = (
    Rule(TENSORRT, 0, HWC8, "TensorRT on GPUs before Blackwell",
         "its own convolutions and plugins read kHWC8", "each Transpose at their shores is a kernel that copies"),
    Rule(TENSORRT, BLACKWELL, NHWC, "TensorRT on Blackwell",
         "its compiler (Myelin) keeps NHWC and gives kHWC8 by copying", "each tensor beside them is copied"),
    Rule(RTX, 0, NHWC, "TensorRT for RTX",
         "its compiler (Myelin) keeps NHWC and gives kHWC8 by copying", "each tensor beside them is copied"),
    Rule(TORCH, 0, HWC8, "PyTorch", "its channels-last tensors are these pixels", "nothing"),
)  # fmt: skip


def rule_of(engine: str, sm: int) -> Rule:
    """The rule of an engine on a GPU; `sm` 0 stands for any GPU, of which most are older than Blackwell.

    Raises CutefuseError for a name that is no engine's.
    """
    if engine not in ENGINES:
        raise CutefuseError(f"there is no engine '{engine}'; choose one of {', '.join(ENGINES)}")
    return next(r for r in reversed(RULES) if r.engine == engine and r.sm <= sm)


def layout_of(choice: str, engine: str, sm: int) -> int:
    """The layout that one of CHOICES means for an engine on a GPU."""
    return rule_of(engine, sm).layout if choice == AUTO else NAMES.index(choice)


def engine_of_backend(kind: str) -> str:
    """The engine that a back end builds or runs; "" for one without fused nodes of its own."""
    return {"trtexec": TENSORRT, "tensorrt": TENSORRT, "rtx": RTX, "torch": TORCH}.get(kind, "")


def strange(found: Collection[str], engine: str, sm: int) -> str:
    """What it costs to build a model whose fused convolutions have these layouts for an engine on a GPU, as a sentence;
    "" where it costs nothing, and where that hangs on a GPU that is not known (`sm` 0)."""
    if engine not in ENGINES or (engine == TENSORRT and not sm):
        return ""
    rule = rule_of(engine, sm)
    other = sorted(set(found) - {NAMES[rule.layout]})
    if not other or engine == TORCH:
        return ""
    return (
        f"the model was patched for layout {other[0]}, and {rule.title} takes {NAMES[rule.layout]}, since {rule.why}: "
        f"{rule.otherwise}; patch it again with --layout {NAMES[rule.layout]}"
    )
