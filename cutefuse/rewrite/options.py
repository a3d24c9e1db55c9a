"""What a user asks of `patch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cutefuse import kernels
from cutefuse.ops.layouts import AUTO, TENSORRT
from cutefuse.sites.choose import Pricing

TAKES = ("single", "upsample", "ranges", "residual", "parallel", "pre_activation", "alone")


@dataclass(frozen=True)
class Options:
    """What to patch and how; the defaults fuse the sites that should pay in the newest TensorRT."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    include_op: Sequence[str] = ()
    exclude_op: Sequence[str] = ()
    without: Sequence[str] = ()  # of TAKES
    sm: int = 0  # compute capability * 10 of the GPU that will run the model; 0 for any
    functions: bool = True
    verify: bool = False
    seed: int = 0
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dry_run: bool = False
    price: Pricing | None = None  # what was measured of each site, trusted before the model
    min_gain_us: float | None = None  # the least gain of a site; None: see cutefuse.sites.choose.Policy
    # the tiles of calls in the order of the graph; 0 where none is known
    tiles: Callable[[Sequence[kernels.Call | None]], list[int]] | None = None
    dtype: str = ""  # float16 or bfloat16: lower the precision before fusing
    clean: bool = False  # write the cleaned graph, not only the fused sites
    scope: str = ""  # of dtype: "model" (also "" for float16) or the fused "sites" (also "" for bfloat16)
    keep_float32: Sequence[str] = ()
    only: frozenset[str] | None = None  # names of sites; None for all that the filters leave
    all_sites: bool = False  # every legal site, whatever it saves
    engine: str = TENSORRT  # whose time is predicted: one of choose_engine.ENGINES
    trt_version: str = ""  # as 10.3; "" for the newest that is known
    tanh_silu: bool = False  # write the SiLUs that stay outside in the form that TensorRT 11 fuses
    layout: str = AUTO  # of the fused convolutions: one of layouts.CHOICES
    gpu: str = ""  # name of a board in the table of peaks; "" for the usual one of `sm`
    idle: Sequence[str] = ()  # sentences about the caller's own options that have no effect, for the report
