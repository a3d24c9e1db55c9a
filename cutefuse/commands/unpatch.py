"""`cutefuse unpatch`: turn fused nodes back into standard operators."""

from __future__ import annotations

import argparse
from pathlib import Path

from cutefuse.commands.build import end_on_sigterm
from cutefuse.errors import command_line
from cutefuse.output import json_alone, parsed
from cutefuse.rewrite.unpatch import default_output, unpatch
from cutefuse.table import counted


@command_line
def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="cutefuse unpatch", description="Turn fused nodes back into standard operators.")
    p.add_argument("model", type=Path, help="a patched ONNX file; it is never changed")
    p.add_argument("-o", "--output", type=Path, help="default: model.plain.onnx beside the model")
    args = parsed(p, argv)
    end_on_sigterm()
    output = args.output or default_output(args.model)
    with json_alone(args.json) as show:
        count = unpatch(args.model, output)
        show({"output": output, "fused_nodes": count})
        print(f"{counted(count, 'fused node')} turned back into standard operators; wrote {output}")
