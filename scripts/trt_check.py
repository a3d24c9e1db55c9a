#!/usr/bin/env python3
"""`cutefuse trt-check` on the demo models of this clone: trt_check.py [-o outdir] [--models unet]."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import onnx  # noqa: E402

import models  # noqa: E402
from cutefuse.commands.trt_check import backend_here, check, exit_code  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.operators.layouts import RTX  # noqa: E402
from cutefuse.output import make_folder  # noqa: E402

DTYPES = ("float32", "float16")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--outdir", type=Path, default=Path("trt_check"), help="folder for models and report")
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        help="models to build; by default the demo's four networks, and in TensorRT parts of others",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="types to build them in")
    parser.add_argument("--full-size", action="store_true", help="real sizes instead of small ones")
    args = parser.parse_args(argv)

    def command() -> int:
        if unknown := set(args.models) - set(models.names()):
            raise CutefuseError(f"there is no model {min(unknown)}; choose from {', '.join(models.names())}")
        backend = backend_here()  # before anything is written
        names = args.models or (sorted(models.DEMO) if backend == RTX else sorted({*models.PARTS, *models.DEMO}))
        make_folder(args.outdir)
        paths = [args.outdir / f"{name}_{dtype}.onnx" for name in names for dtype in args.dtypes]
        for path in paths:
            name, _, dtype = path.stem.rpartition("_")
            onnx.save(models.build(name, dtype, not args.full_size), path)
        return exit_code(check(paths, args.outdir))

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
