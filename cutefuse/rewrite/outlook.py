"""What `patch` would do for other GPUs, and with the model in float16: dry runs, for the first lines of its output."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from cutefuse.errors import CutefuseError
from cutefuse.graph.store import load_model
from cutefuse.rewrite.options import Options
from cutefuse.rewrite.patch import Result, patch
from cutefuse.select.times import device_of

# One of each family beside the target that is assumed: the engine's usual GPUs in servers, workstations and robots.
USUAL = ("A100 SXM4 80GB", "RTX 4090", "Jetson AGX Orin 64GB")
USUAL_RTX = ("A100 SXM4 80GB", "RTX 3090", "RTX 5090")  # TensorRT for RTX has no robots
MAX_NODES = 20_000  # of a model that is weighed more than once
MAX_BYTES = 1 << 29  # of its file, weights inside or not


@dataclass(frozen=True)
class Outlook:
    """One target: GPU and type of the model ("" for that of the file), sites fused, microseconds saved and those of the
    plain network; None where not known."""

    gpu: str
    dtype: str
    fused: int
    gain_us: float | None
    plain_us: float | None

    @property
    def share(self) -> float | None:
        """Of the plain network's time; None where that is not known."""
        return self.gain_us / self.plain_us if self.gain_us is not None and self.plain_us else None


def outlook_of(report: dict[str, Any], dtype: str = "") -> Outlook:
    """What a patch report says of its own target."""
    summary = report["summary"]
    return Outlook(report["prediction"]["gpu"], dtype, summary["fused"], summary["gain_us"], summary["plain_us"])


def foresee(
    source: Path, options: Options, result: Result, gpus: Sequence[str], named: bool = False, measured: bool = False
) -> list[Outlook]:  # fmt: skip
    """The target of a run of `patch` first, then the same choices for other GPUs (names of the table of peaks); and all
    of them once more in float16, where the model is float32 and nothing asked for another type.

    The target alone where times were `measured` for it, and for a large model unless the user `named` the others.
    """
    found = [outlook_of(result.report)]
    large = result.report["summary"]["nodes_before"] > MAX_NODES or _bytes(source) > MAX_BYTES
    if measured or (large and not named):
        return found
    asked = replace(options, dry_run=True, verify=False, idle=())
    targets = [replace(asked, gpu=name, sm=device_of(0, name).sm) for name in gpus]
    found += _weighed(source, targets, "")
    if is_float32(result.report) and not large:
        found += _in_float16(source, [asked, *targets])
    return found


def is_float32(report: dict[str, Any]) -> bool:
    """Whether the sites of a model are in float32 and nothing asked for another type."""
    types = {s["dtype"] for s in report["sites"] if s["dtype"]}
    return report["conversion"] is None and "float32" in types and types <= {"float32"}


def _in_float16(source: Path, targets: Sequence[Options]) -> list[Outlook]:
    """Converted once for all targets; where the converter cannot, one of no GPU that fuses nothing."""
    from cutefuse.rewrite.retype import to_float16

    with tempfile.TemporaryDirectory(prefix="cutefuse_") as folder:
        lowered = Path(folder) / source.name
        try:
            onnx.save(to_float16(load_model(source), source.parent, ())[0], str(lowered))
            return _weighed(lowered, targets, "float16")
        except (CutefuseError, ValueError):  # the second: over protobuf's limit
            return [Outlook("", "float16", 0, None, None)]


def _weighed(source: Path, targets: Sequence[Options], dtype: str) -> list[Outlook]:
    output = source.with_name(f"{source.name}.not_written.onnx")
    return [outlook_of(patch(source, output, options).report, dtype) for options in targets]


def _bytes(source: Path) -> int:
    beside = source.with_name(f"{source.name}.data")
    return source.stat().st_size + (beside.stat().st_size if beside.exists() else 0)
