"""`python -m models.table [--out FILE]`: patch every model here, prove it, and write docs/models.md."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

import models
from cutefuse.errors import CutefuseError, run_command
from cutefuse.graph.verify import verify
from cutefuse.host import Host, Input
from cutefuse.output import write_text
from cutefuse.rewrite.patch import TAKES, Options, Result, patch
from cutefuse.rewrite.unpatch import unpatch
from cutefuse.sites.conv import PARALLEL
from cutefuse.sites.find import FUSED
from cutefuse.table import scaled
from models import exports, published
from models.packages import page

HEADER = """# What is fused in which model

Written by `python -m models.table`. Every model is generated, exported from PyTorch, or comes with the onnx
package; weights are random. First come parts of networks, then whole networks; those of torchvision, timm, ultralytics
and other packages [follow](#networks-of-published-packages).
Sizes are the small ones of the generators; only verdicts that depend on sizes change with them.
`python -m models yolov8s --batch 8` writes a network at the size it is deployed with.

- sites: candidates / fused nodes / refused, all operators together
- also fused: nodes that read one tensor instead of a Concat (single), with enlarged sources (upsample), with sources
  that are channel ranges (ranges), with a residual; candidates that a neighbour on the same sources computes too
  (merged)
- MB gone: traffic of tensors that the fused graph no longer writes and reads, for one image of the small size
- error: largest difference of any output, and of the result of any site, between original and patched model in ONNX
  Runtime, relative to the largest value of its channel; `undone`: any output after `cutefuse unpatch`
- plugin host: fused nodes whose plugin passed the host's builder and runtime checks without a finding

| model | type | opset | nodes | sites | also fused | MB gone | error | undone | plugin host |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def generated(name: str, dtype: str) -> onnx.ModelProto:
    """A small model of ours: a network for one image, as exporters write it unless told otherwise."""
    return models.build(name, dtype, small=True, batch=1 if name in models.NETWORKS else None)


def sources() -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """(name, type, model) of everything that the table shows."""
    for name in (*models.PARTS, *models.NETWORKS):
        for dtype in ("float32", "float16"):
            yield name, dtype, generated(name, dtype)
    for name in published.names():
        yield f"{name} (onnx package)", "float32", published.load(name)
    if importlib.util.find_spec("torch") is None:
        raise CutefuseError("PyTorch is missing, whose exports the table shows; install torch and onnxscript")
    for name in exports.NAMES:
        tracing = [o for o in exports.TRACING_OPSETS if o >= exports.OLDEST_TRACING.get(name, 0)]
        for dynamo, opsets in ((False, tracing), (True, exports.DYNAMO_OPSETS)):
            for opset in (opsets[0], opsets[-1]):
                with tempfile.TemporaryDirectory() as folder:
                    exports.export(name, Path(folder) / "m.onnx", opset, dynamo)
                    model = onnx.load(str(Path(folder) / "m.onnx"))
                yield f"{name} (torch, {'dynamo' if dynamo else 'tracing'})", "float32", model


def accepted(host: Host, patched: onnx.ModelProto, result: Result) -> str:
    """How many fused nodes the plugin host takes through their whole life without a finding."""
    types = {t.name: onnx.helper.tensor_dtype_to_np_dtype(t.data_type).name for t in patched.graph.initializer}
    nodes = {n.output[0]: n for n in patched.graph.node if n.domain == "cutefuse"}
    good = 0
    sites = [s for s in result.report["sites"] if s["status"] == "fused"]
    for site in sites:
        node = nodes[next(o for o in site["outputs"] if o)]
        shapes = zip(node.input, site["shapes"]["inputs"], strict=True)
        inputs = [Input(tuple(dims), types.get(name, site["dtype"])) for name, dims in shapes]
        good += not [f for f in host.build(node, inputs).findings if f.kind != "warning"]
    return f"{good} of {len(sites)}"


def taken_in(result: Result) -> str:
    """What the fused nodes do beyond their plain form."""
    takes = Counter(t for s in result.sites if s.status == FUSED and s.match for t in s.match.takes)
    counts = {t: takes[t] for t in TAKES if t != PARALLEL} | {"merged": result.report["summary"]["merged"]}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "-"


def worst(proof: dict[str, Any]) -> str:
    """The largest relative error of a verification, or that it failed."""
    if not proof["passed"]:
        return "**differs**"
    return f"{max((o.get('max_rel_error', 0.0) for o in [*proof['outputs'], *proof['sites']]), default=0.0):.1e}"


def row(host: Host, name: str, dtype: str, model: onnx.ModelProto, reasons: Counter[str]) -> str:
    """One line of the table; reasons of refusals are counted."""
    with tempfile.TemporaryDirectory() as folder:
        source, output, plain = (Path(folder) / f"{n}.onnx" for n in ("m", "out", "plain"))
        onnx.save(model, str(source))
        result = patch(source, output, Options(all_sites=True, verify=True, shapes=models.one_image(model)))
        summary = result.report["summary"]
        refused = [s["reason"] for s in result.report["sites"] if s["status"] == "refused"]
        reasons.update(re.sub("'[^']*'", "'...'", reason) for reason in refused)  # names are one model's own
        error = undone = plugins = "-"
        if result.report["verify"]:
            error = worst(result.report["verify"])
        if result.output:
            unpatch(output, plain)
            tolerance = result.report["verify"]["outputs"][0].get("tolerance", 0.0)
            undone = worst(verify(source, onnx.load(str(plain)), Path(folder), tolerance, {}))
            plugins = accepted(host, onnx.load(str(output)), result)
    nodes = f"{summary['nodes_before']} -> {summary['nodes_after']}"
    sites = f"{summary['candidates']} / {summary['fused']} / {summary['refused']}"
    gone = scaled(summary["bytes_saved"], 1e6)
    cells = [name, dtype, result.report["opset"], nodes, sites, taken_in(result), gone, error, undone, plugins]
    return f"| {' | '.join(map(str, cells))} |\n"


def write(out: Path) -> None:
    """Write the page."""
    host, reasons = Host(), Counter[str]()
    text = HEADER
    for name, dtype, model in sources():
        text += row(host, name, dtype, model, reasons)
        print(text.splitlines()[-1], flush=True)
    text += "\n## Refusals\n\n"
    text += "".join(f"- {count} x {reason}\n" for reason, count in sorted(reasons.items())) or "None.\n"
    old = out.read_text(encoding="utf-8") if out.is_file() else ""
    write_text(out, text + (f"\n{packages}" if (packages := page.tail(old)) else ""))


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m models.table`."""
    parser = argparse.ArgumentParser(prog="models.table", description="Patch every model and write the table.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "models.md")
    args = parser.parse_args(argv)
    return run_command(lambda: write(args.out))


if __name__ == "__main__":
    sys.exit(main())
