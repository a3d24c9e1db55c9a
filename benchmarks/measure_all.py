"""Every benchmark of docs/measured.md, one after the other, into one folder.

    python benchmarks/measure_all.py out/                     # about twenty minutes on an H200
    python benchmarks/measure_all.py out/ --limit-s 540       # what fits; a step that would take longer is left out
    python benchmarks/measure_all.py out/ --only networks latency

Each step has its rows in <name>.json, what it printed in <name>.txt and its messages in <name>.log. A step that fails
is named with its last message; the others run all the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from cutefuse.errors import CutefuseError, run_command  # noqa: E402

SMALL_MAPS = ["--tiles", "all", "--warm", "--variants", "ours,ours_sm80,cudnn_precat,cublaslt,cutlass2"]


@dataclass(frozen=True)
class Step:
    """A benchmark, its arguments, how many seconds it takes on an H200, and the option that names its JSON file."""

    program: str
    arguments: list[str]
    expected_s: float
    json: str = "--json"


STEPS = {
    "networks": Step("networks.py", ["--layers", "--markdown"], 420),
    "conv": Step("concat_conv.py", ["--tiles", "all"], 180),
    "latency": Step("concat_conv.py", ["--set", "latency", *SMALL_MAPS], 90),
    "single_source": Step("concat_conv.py", ["--set", "single_source", *SMALL_MAPS], 90),
    "few_filters": Step("concat_conv.py", ["--set", "few_filters", "--tiles", "all"], 60),
    "odd_filters": Step("concat_conv.py", ["--set", "odd_filters", *SMALL_MAPS], 60),
    "few_channels": Step("concat_conv.py", ["--set", "few_channels", *SMALL_MAPS], 60),
    "forms": Step("concat_conv_forms.py", [], 60),
    "forms_float32": Step("concat_conv_forms.py", ["--dtype", "float32"], 60),
    "pre_activation": Step("pre_activation.py", [], 60, json=""),
    "depthwise": Step("depthwise.py", ["--cold"], 60, json=""),
    "windows": Step("windows.py", [], 120),
    "int8": Step("quant_concat_conv.py", [], 60),
    "float8": Step("quant_concat_conv.py", ["--dtype", "float8_e4m3fn"], 60),
    "int8_small": Step("quant_concat_conv.py", ["--set", "latency", "--warm"], 40),
    "float8_small": Step("quant_concat_conv.py", ["--dtype", "float8_e4m3fn", "--set", "latency", "--warm"], 40),
    "row_norm": Step("row_norm.py", ["--large"], 180, json="--out"),
    "launch_cost": Step("launch_cost.py", [], 20),
    "torch_calls": Step("torch_calls.py", [], 40),
    "torch_fuse": Step("torch_fuse.py", [], 90),
}


def run_step(name: str, step: Step, folder: Path) -> str:
    """What is to say about the step: its time, or why it failed."""
    command = [sys.executable, str(FOLDER / step.program), *step.arguments]
    command += [step.json, str(folder / f"{name}.json")] if step.json else []
    started = time.monotonic()
    with (folder / f"{name}.txt").open("w") as printed, (folder / f"{name}.log").open("w") as log:
        code = subprocess.run(command, stdout=printed, stderr=log).returncode
    if code == 0:
        return f"{time.monotonic() - started:.0f} s"
    messages = (folder / f"{name}.log").read_text().strip().splitlines()
    return f"failed with exit code {code}: {messages[-1] if messages else 'without a message'}"


def run(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where all files go; made if it is not there")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"steps to run, of {', '.join(STEPS)}; default: all")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no step that would end later")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.only or []) - set(STEPS)):
        raise CutefuseError(f"there is no step '{unknown[0]}'; choose from {', '.join(STEPS)}")
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CutefuseError(f"{args.folder}: {error.strerror}; choose a folder that can be written to") from None
    ends, failed = time.monotonic() + args.limit_s, False
    for name in args.only or STEPS:
        step = STEPS[name]
        fits = time.monotonic() + step.expected_s <= ends
        said = run_step(name, step, args.folder) if fits else f"left out, it takes about {step.expected_s:.0f} s"
        failed |= said.startswith("failed")
        print(f"{name}: {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command(run))
