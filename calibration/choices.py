"""`python -m calibration.choices`: which sites `patch` chooses in every model of models/, without a GPU.

One line for each site: model, images, engine, site, its state, and what it saves in microseconds. Write one file before
a change of the prices and one after it; `diff` shows whose choice changed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

import models
from cutefuse.rewrite.patch import Options, patch

# `compiled` is never given: rules alone decide, as with --no-compile.
ENGINES: dict[str, dict[str, Any]] = {
    "tensorrt": {"engine": "tensorrt", "sm": 90},
    "tensorrt-10.3": {"engine": "tensorrt", "trt_version": "10.3", "sm": 80},
    "rtx": {"engine": "rtx", "sm": 89},
    "torch": {"engine": "torch", "sm": 90},
}


def choices(name: str, batch: int, folder: Path) -> Iterator[str]:
    """The lines of one model, for each of ENGINES."""
    source = folder / "model.onnx"
    onnx.save(models.build(name, "float16", batch=batch), str(source))
    for engine, options in ENGINES.items():
        report = patch(source, folder / "out.onnx", Options(dry_run=True, **options)).report
        for site in report["sites"]:
            gain_us = site["gain_us"]
            told = "-" if gain_us is None else f"{gain_us:.1f}"
            yield f"{name} {batch} {engine} {site['name']} {site['status'].replace(' ', '_')} {told}"
        summary = report["summary"]
        yield f"{name} {batch} {engine} sum fused={summary['fused']} {summary['gain_us']} of {summary['plain_us']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=models.names(), help="their names (default: all)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="images in a run (default: 1)")
    args = parser.parse_args(argv)
    for name in args.models:
        for batch in args.batch:
            with tempfile.TemporaryDirectory() as folder:
                print(*choices(name, batch, Path(folder)), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
