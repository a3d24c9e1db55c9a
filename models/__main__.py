"""`python -m models --out DIR [names] [--dtype float32 float16] [--small]`: write the demo models as ONNX files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import models
from cutefuse.errors import CutefuseError, run_command
from models.net import ELEM


def main(argv: list[str] | None = None) -> int:
    """Write `<name>-<dtype>.onnx` for every wanted model and type; prints the paths."""
    parser = argparse.ArgumentParser(prog="make_models.py", description="Write the demo models as ONNX files.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(models.names())}; default: {', '.join(models.DEMO)}"
    )
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="made when missing")
    parser.add_argument("--dtype", nargs="+", choices=sorted(ELEM), default=sorted(ELEM), help="default: both")
    parser.add_argument("--small", action="store_true", help="the same topologies with few channels and pixels")
    args = parser.parse_args(argv)

    def command() -> int:
        import onnx

        if unknown := sorted(set(args.names) - set(models.names())):
            raise CutefuseError(f"there is no model '{unknown[0]}'; choose among {', '.join(models.names())}")
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CutefuseError(f"{args.out} cannot be made ({error.strerror}); give another --out") from None
        for name in args.names or models.DEMO:
            for dtype in args.dtype:
                path = args.out / f"{name}-{dtype}.onnx"
                onnx.save(models.build(name, dtype, args.small), str(path))
                print(path)
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
