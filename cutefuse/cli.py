"""`cutefuse <command>`: one lazy table from command to module, so that a command imports only what it needs."""

from __future__ import annotations

import importlib
import sys

import cutefuse
from cutefuse.errors import drop_output

# command -> help. Its module, cutefuse.commands.<command>, has main(argv: list[str] | None) -> int.
COMMANDS: dict[str, str] = {
    "patch": "rewrite an ONNX model to use the fused operators",
    "unpatch": "turn fused nodes back into standard operators",
    "diff": "show what changed between two ONNX models",
    "doctor": "what this machine has, what is missing, and what to do about it",
    "build": "build an engine with trtexec or TensorRT's Python API",
    "process": "build, profile and draw an engine, and write a report",
    "optimize": "fuse what pays on this machine: build, measure, take back, hand over the faster engine",
    "report": "write an HTML report of a folder of engine JSON files",
    "compare": "compare two or more engines, layer by layer",
    "accuracy": "compare what an engine and an ONNX model compute, with Polygraphy",
    "rank": "rank what to fuse next from the profile of an engine",
    "roofline": "peaks of GPUs, measured peaks, layers and language models under the roof",
    "profile-torch": "profile a PyTorch module; what our operators would remove",
    "profile-kernels": "Nsight Compute metrics of our kernels, side by side",
    "trt-check": "check the plugins on a machine with TensorRT and write a report",
    "completion": "print a script that completes commands, options and files",
}

# command -> a line that can be typed.
EXAMPLES: dict[str, str] = {
    "patch": "cutefuse patch model.onnx --dtype fp16 --verify",
    "unpatch": "cutefuse unpatch model.cutefuse.onnx -o model.plain.onnx",
    "diff": "cutefuse diff model.onnx model.cutefuse.onnx",
    "doctor": "cutefuse doctor",
    "build": "cutefuse build model.cutefuse.onnx engines/ --shapes=images:1x3x640x640",
    "process": "cutefuse process model.cutefuse.onnx patched/ --iterations=100",
    "optimize": "cutefuse optimize model.onnx -o best/ --time-limit 10min",
    "report": "cutefuse report engines/ --peaks H200",
    "compare": "cutefuse compare plain/ patched/ -o compare.html",
    "accuracy": "cutefuse accuracy engines/model.cutefuse.onnx.engine model.onnx --shapes images:1x3x640x640",
    "rank": "cutefuse rank plain/ model.onnx",
    "roofline": "cutefuse roofline --llm llama-3-8b --peaks H200 --context 2048",
    "profile-torch": "cutefuse profile-torch package.module:factory --input 1x3x512x512 --dtype float16",
    "profile-kernels": "cutefuse profile-kernels --op concat_conv --list",
    "trt-check": "cutefuse trt-check model.onnx -o trt_check/",
    "completion": 'eval "$(cutefuse completion bash)"',
}

EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "it ran, and the answer is no: outputs or models differ, fused nodes are no plugins, doctor misses something",
    2: "the input or this machine does not allow it; one sentence says why, and nothing half-written is left",
    3: "nothing to do: no site to patch or to turn back, or no fused site that pays",
    130: "interrupted with Ctrl-C",
    141: "the reader of its output, as `head`, left before the end",
    143: "ended with SIGTERM; children have been ended too",
}

FIRST_STEPS = """a first time, each command naming the next:
  cutefuse patch model.onnx --dtype fp16 --verify  # float32 export -> model.cutefuse.onnx in float16, fused, compared
  cutefuse unpatch model.cutefuse.onnx             # -> model.plain.onnx, in float16 too, to compare with
  cutefuse process model.plain.onnx plain/         # build, profile and report it
  cutefuse process model.cutefuse.onnx patched/    # and the patched one
  cutefuse compare plain/ patched/                 # what was fused, where the time moved"""


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script: dispatches to the command's own main."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        return drop_output()


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: cutefuse <command> [options]\n\ncommands:")
        for name, text in COMMANDS.items():
            print(f"  {name:<{width}}  {text}")
        print(f"\n{FIRST_STEPS}\n\nexit codes:")
        for code, text in EXIT_CODES.items():
            print(f"  {code:>3}  {text}")
        return 0 if args else 2
    if args[0] == "--version":
        print(f"cutefuse {cutefuse.__version__}")
        return 0
    if args[0] not in COMMANDS:
        print(f"error: unknown command '{args[0]}'; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        ended: int = importlib.import_module(f"cutefuse.commands.{args[0].replace('-', '_')}").main(args[1:])
    except SystemExit as end:
        if end.code in (0, None) and {"-h", "--help"} & set(args[1:]):
            print(f"\nexample: {EXAMPLES[args[0]]}")
        raise
    except KeyboardInterrupt:  # while the command's modules are still being imported
        print("error: interrupted", file=sys.stderr)
        return 130
    return ended


if __name__ == "__main__":
    sys.exit(main())
