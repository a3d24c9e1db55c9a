"""`cutefuse accuracy`: one set of inputs through an engine and through ONNX Runtime, compared by Polygraphy."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cutefuse
from cutefuse.engines.inputs import parse_shapes
from cutefuse.errors import CutefuseError, VerificationError, command_line
from cutefuse.graph.store import load_model
from cutefuse.output import json_alone, parsed, whole_number


def require(package: str) -> None:
    """Raise CutefuseError when a package that the comparison needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise CutefuseError(f"the package {package} is not installed; the comparison needs it: pip install {package}")


def runner(path: Path) -> Any:
    """A Polygraphy runner: ONNX Runtime for *.onnx, TensorRT (with the plugin library loaded) for an engine.

    Raises CutefuseError for a file that is missing or no model, and for an engine that TensorRT is missing for.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise CutefuseError(f"{path} {what}; give an ONNX model or a TensorRT engine")
    if path.suffix == ".onnx":
        load_model(path)  # says in words what is wrong with the file
        from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx

        return OnnxrtRunner(SessionFromOnnx(str(path), providers=["cpu"]), name=f"onnxruntime {path.name}")
    require("tensorrt")
    import tensorrt
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    # Polygraphy's own --plugins only opens a library; this one is registered through getCreators.
    if tensorrt.get_plugin_registry().load_library(str(cutefuse.plugin_path())) is None:
        raise CutefuseError(f"TensorRT does not load {cutefuse.plugin_path()}; see `cutefuse doctor`")
    return TrtRunner(EngineFromBytes(BytesFromPath(str(path))), name=f"tensorrt {path.name}")


def compare(first: Path, second: Path, rtol: float, atol: float, seed: int, given: Mapping[str, Sequence[int]]) -> bool:
    """Whether every output agrees within atol + rtol * |value| on one set of seeded inputs.

    Sizes that are dynamic and not in `given` (input name -> dims) are 1 for Polygraphy. Raises CutefuseError for a name
    that is no input of the model `second`, and where one of the two does not run.
    """
    require("polygraphy")
    os.environ.setdefault("POLYGRAPHY_AUTOINSTALL_DEPS", "0")
    from polygraphy.common import TensorMetadata
    from polygraphy.comparator import Comparator, DataLoader, SimpleCompareFunc

    inputs = [i.name for i in load_model(second).graph.input] if second.suffix == ".onnx" else list(given)
    if unknown := [name for name in given if name not in inputs]:
        raise CutefuseError(f"--shapes names {unknown[0]}, the model's inputs are {', '.join(inputs)}; correct it")
    metadata = TensorMetadata()
    for name, dims in given.items():
        metadata.add(name, dtype=None, shape=dims)
    try:
        results = Comparator.run([runner(first), runner(second)], data_loader=DataLoader(seed, input_metadata=metadata))
        accuracy = Comparator.compare_accuracy(results, compare_func=SimpleCompareFunc(rtol=rtol, atol=atol))
    except CutefuseError:
        raise
    except Exception as error:  # Polygraphy's own and ONNX Runtime's, which share no public base class
        text = " ".join(str(error).split())[:400] or type(error).__name__
        raise CutefuseError(
            f"{first.name} and {second.name} cannot be compared ({text}); check both, or give --shapes"
        ) from None
    return bool(accuracy)


@command_line
def main(argv: list[str] | None = None) -> None:
    """Entry point of `cutefuse accuracy`: exit code 0 equal, 1 different, 2 bad input."""
    parser = argparse.ArgumentParser(prog="cutefuse accuracy", description=__doc__)
    parser.add_argument("engine", type=Path, help="TensorRT engine, or a patched ONNX model")
    parser.add_argument("reference", type=Path, help="the original ONNX model")
    parser.add_argument("--shapes", nargs="*", default=[], metavar="NAME:DIMS", help="input shapes, like x:1x3x64x64")
    parser.add_argument("--rtol", type=float, default=1e-2, help="relative tolerance (1e-2: float16 and TF32)")
    parser.add_argument("--atol", type=float, default=1e-2, help="absolute tolerance")
    parser.add_argument("--seed", type=whole_number, default=0)
    args = parsed(parser, argv)
    given = parse_shapes(",".join(args.shapes))
    with json_alone(args.json) as show:
        equal = compare(args.engine, args.reference, args.rtol, args.atol, args.seed, given)
        show({"equal": equal, "rtol": args.rtol, "atol": args.atol, "seed": args.seed})
    if not equal:
        raise VerificationError(f"{args.engine.name} and {args.reference.name} differ; Polygraphy's lines say where")
    if not args.json:
        print(f"{args.engine.name} and {args.reference.name} agree within {args.atol:g} + {args.rtol:g} * |value|")
