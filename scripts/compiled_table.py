#!/usr/bin/env python3
"""What NVIDIA's compiler moves in plain and in patched models: compiled_table.py [MODEL.onnx | NAME ...] [--sm 89 120].

Compiles each model with TensorRT for RTX before and after `cutefuse patch`, on a machine without a GPU, and prints one
line a model and compute capability. --write puts the table into docs/compiled.md, --from reads what --json wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import onnx  # noqa: E402

import cutefuse  # noqa: E402
import models  # noqa: E402
from cutefuse.engines import plugins  # noqa: E402
from cutefuse.engines.tensorrt import rtx  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.output import write_json, write_text  # noqa: E402
from cutefuse.table import aligned  # noqa: E402

PAGE = ROOT / "docs" / "compiled.md"
NAMES = [*models.NETWORKS, "hrnet_head"]
BLOCK = re.compile(r"(<!-- compiled: (?P<options>.*?) -->\n).*?(<!-- /compiled -->)", re.S)
HEADS = ("network", "SM", "plain: copies", "MB", "of all", "patched: copies", "MB", "of all", "plugins",
         "engine MB", "built in s", "peak MiB")  # fmt: skip
PATCH = "--engine rtx"
NOTHING_TO_PATCH = 3


def patch(plain: Path, patched: Path, options: list[str]) -> bool:
    """Patch a model as its user does; False where nothing in it pays."""
    command = [sys.executable, "-m", "cutefuse.cli", "patch", str(plain), "-o", str(patched), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, NOTHING_TO_PATCH):
        raise CutefuseError(done.stderr.strip().removeprefix("error: ") or f"patching {plain.name} failed")
    return done.returncode == 0


def facts(model: Path, sm: int) -> dict[str, Any]:
    """What the compiler makes of a model of one image a run."""
    shapes = models.one_image(onnx.load(model, load_external_data=False))
    graph = rtx.compile_model(model, sm, shapes, plugins.libraries(bool(plugins.read_model(model).fused_nodes)))
    return {
        "copies": graph.moved.copies, "copy_bytes": graph.moved.copy_bytes, "all_bytes": graph.moved.all_bytes,
        "plugins": graph.plugin_layers, "engine_bytes": graph.engine_bytes, "seconds": graph.seconds,
        "peak_mib": graph.peak_mib,
    }  # fmt: skip


def measure(given: str, sms: list[int], options: list[str], folder: Path) -> list[dict[str, Any]]:
    """The rows of one model: an ONNX file, or the name of a network that `models` writes."""
    plain = Path(given)
    if plain.suffix != ".onnx":
        if given not in models.names():
            raise CutefuseError(f"there is no model '{given}'; give an ONNX file or one of {', '.join(models.names())}")
        plain = folder / f"{given}.onnx"
        onnx.save(models.build(given, "float16", batch=1), plain)
    patched, rows = folder / f"{plain.stem}.cutefuse.onnx", list[dict[str, Any]]()
    try:
        for sm in sms:
            try:
                changed, before = patch(plain, patched, [*options, "--sm", str(sm)]), facts(plain, sm)
                sides = {"plain": before, "patched": facts(patched, sm) if changed else before}
            except CutefuseError as error:
                sides = {"error": str(error)}
            rows.append({"name": plain.stem, "sm": sm, **sides})
        return rows
    finally:
        for path in folder.glob(f"{plain.stem}.*"):
            path.unlink()


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the table shows it; what failed names its reason."""
    if "error" in row:
        return [row["name"], str(row["sm"]), row["error"], *[""] * (len(HEADS) - 3)]
    plain, patched = row["plain"], row["patched"]

    def moved(side: dict[str, Any]) -> list[str]:
        return [str(side["copies"]), f"{side['copy_bytes'] / 1e6:.1f}", f"{side['all_bytes'] / 1e6:.0f}"]

    def both(key: str, unit: float, form: str) -> str:
        return "→".join(format(side[key] / unit, form) for side in (plain, patched))

    return [
        row["name"], str(row["sm"]), *moved(plain), *moved(patched), str(patched["plugins"]),
        both("engine_bytes", 1e6, ".1f"), both("seconds", 1, ".1f"), both("peak_mib", 1, ".0f"),
    ]  # fmt: skip


def totals(rows: list[dict[str, Any]], sm: int) -> list[str]:
    """A row of sums over all that was compiled for a compute capability."""
    done = [row for row in rows if "error" not in row and row["sm"] == sm]
    keys = ("copies", "copy_bytes", "all_bytes", "plugins", "engine_bytes", "seconds")
    sums = {side: {key: sum(row[side][key] for row in done) for key in keys} for side in ("plain", "patched")}
    peaks = {side: {"peak_mib": max((row[side]["peak_mib"] for row in done), default=0)} for side in sums}
    return cells({"name": "all", "sm": sm, **{side: sums[side] | peaks[side] for side in sums}})


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [*map(cells, rows), *(totals(rows, sm) for sm in sorted({row["sm"] for row in rows}))]


def write(data: dict[str, Any]) -> None:
    """Put the table between the markers of the page."""
    lines = [f"|{'|'.join(row)}|" for row in (HEADS, ["---", *["---:"] * (len(HEADS) - 1)], *table(data["rows"]))]
    patched = f"`cutefuse patch {shlex.join(data['patch'])} --sm ...`"
    made = f"TensorRT for RTX {data['version']}, {patched}, cutefuse {data['tool']}."
    text, count = BLOCK.subn(
        lambda found: found[1].replace(found["options"], data["command"]) + "\n".join([made, "", *lines, found[3]]),
        PAGE.read_text(encoding="utf-8"),
    )
    if count != 1:
        raise CutefuseError(f"{PAGE} has no place for the table; it is between <!-- compiled: ... --> and its end")
    write_text(PAGE, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=NAMES, metavar="MODEL",
                        help="ONNX files, and names of networks in float16 (all networks)")  # fmt: skip
    parser.add_argument("--sm", type=int, nargs="+", default=[rtx.DEFAULT_SM], help="compute capabilities (89)")
    parser.add_argument("--patch", default=PATCH, metavar="OPTIONS", help=f"of `cutefuse patch`, beside --sm ({PATCH})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="figures that --json wrote")
    parser.add_argument("--write", action="store_true", help="put the table into docs/compiled.md")
    args = parser.parse_args(argv)

    def command() -> int:
        if args.source:
            data = json.loads(args.source.read_text(encoding="utf-8"))
        else:
            if reason := rtx.available():
                raise CutefuseError(reason)
            sms, options = [rtx.check_sm(sm) for sm in args.sm], shlex.split(args.patch)
            given = [] if args.models == NAMES else args.models
            typed = ["python scripts/compiled_table.py", *given, "--sm", *map(str, sms), f"--patch '{args.patch}'"]
            data = {"version": rtx.version(), "tool": cutefuse.__version__, "patch": options, "rows": [],
                    "command": " ".join([*typed, "--write"])}  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                for name in args.models:
                    data["rows"] += measure(name, sms, options, Path(folder))
                    print(f"{name}: done", file=sys.stderr, flush=True)
                    if args.json:
                        write_json(args.json, data)
        print("\n".join(aligned(HEADS, table(data["rows"]), numbers=range(1, len(HEADS)))))
        if args.write:
            write(data)
        return int(any("error" in row for row in data["rows"]))

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
