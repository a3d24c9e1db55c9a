"""`python -m models [NAME ...] [--out DIR] [--dtype float16] [--batch 8] [--size 640] [--small]`: write ONNX files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import models
from cutefuse.errors import CutefuseError, run_command
from models.net import ELEM


def positive(text: str) -> int:
    """A whole number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Write `<name>-<dtype>[-b<batch>][-<size>].onnx` for every wanted model and type; prints the paths."""
    parser = argparse.ArgumentParser(
        prog="python -m models", description="Write parts of networks and whole networks as ONNX files.",
        epilog="example: python -m models yolov8s --dtype float16 --batch 8 --out networks",
    )  # fmt: skip
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(models.names())}; default: {', '.join(models.DEMO)}"
    )
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="made when missing")
    parser.add_argument("--dtype", nargs="+", choices=sorted(ELEM), default=sorted(ELEM), help="default: both")
    parser.add_argument("--batch", type=positive, metavar="N", help="images in a run; default: dynamic")
    parser.add_argument("--size", type=positive, metavar="ROWS", help="rows of the input; default: as deployed")
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
        marks = "".join(f"-{mark}{value}" for mark, value in (("b", args.batch), ("", args.size)) if value)
        for name in args.names or models.DEMO:
            for dtype in args.dtype:
                try:
                    model = models.build(name, dtype, args.small, args.batch, args.size)
                except ValueError as error:
                    raise CutefuseError(f"{name}: {error}") from None
                path = args.out / f"{name}-{dtype}{marks}.onnx"
                onnx.save(model, str(path))
                print(path)
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
