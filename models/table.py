"""`python -m models.table [--out FILE]`: patch every model here, prove it, and write docs/models.md."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

import models
from cutefuse.errors import CutefuseError, run_command
from cutefuse.graph.verify import verify
from cutefuse.match.conv.build import PARALLEL
from cutefuse.match.site import FUSED
from cutefuse.output import write_text
from cutefuse.rewrite.patch import TAKES, Options, Result, patch
from cutefuse.rewrite.unpatch import unpatch
from cutefuse_host import Host, Input
from models import exports, published
from models.packages import page

HEADER = """# What is fused in which model

Written by `python -m models.table`: every model is patched with all its legal sites, proven in ONNX Runtime, given to
the plugin host and unpatched again. The models are this project's own, the graphs of the onnx package and exports of
PyTorch, with random weights, at the small sizes of the generators; `python -m models yolov8s --batch 8` writes one at
the size it is deployed with. [Networks of published packages](#networks-of-published-packages) follow.

- nodes: before and after; sites: candidates / fused nodes / merged with a neighbour on the same sources / refused
- also fused: nodes that read one tensor instead of a Concat (single), enlarged sources (upsample), channel ranges
  (ranges), a residual, a scale, shift and ReLU before the convolution (pre_activation), an average pool in the filter
  (pools), outputs over squares of pixels (spread)
- error: the largest difference of any output or site from the original, over the largest value of its channel; the
  worst of float32 and float16

"""
DIFFERS = "**differs**"
HEADINGS = ("model", "nodes", "sites", "also fused", "error")
COUNTED = ("candidates", "fused", "merged", "refused")
ONNX, TORCH = "onnx package", "torch"

Line = dict[str, Any]


def generated(name: str, dtype: str) -> onnx.ModelProto:
    """A small model of ours: a network for one image, as exporters write it unless told otherwise."""
    return models.build(name, dtype, small=True, batch=1 if name in models.NETWORKS else None)


def sources() -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """(name, origin, model) of everything that the page is about; the origin of a model of ours is empty."""
    for name in (*models.PARTS, *models.NETWORKS):
        for dtype in ("float32", "float16"):
            yield name, "", generated(name, dtype)
    for name in published.names():
        yield name, ONNX, published.load(name)
    if importlib.util.find_spec("torch") is None:
        raise CutefuseError("PyTorch is missing, whose exports the table shows; install torch and onnxscript")
    for name in exports.NAMES:
        tracing = [o for o in exports.TRACING_OPSETS if o >= exports.OLDEST_TRACING.get(name, 0)]
        for dynamo, opsets in ((False, tracing), (True, exports.DYNAMO_OPSETS)):
            for opset in (opsets[0], opsets[-1]):
                with tempfile.TemporaryDirectory() as folder:
                    exports.export(name, Path(folder) / "m.onnx", opset, dynamo)
                    model = onnx.load(str(Path(folder) / "m.onnx"))
                yield name, TORCH, model


def accepted(host: Host, patched: onnx.ModelProto, result: Result) -> int:
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
    return good


def taken_in(result: Result) -> str:
    """What the fused nodes do beyond their plain form."""
    takes = Counter(t for s in result.sites if s.status == FUSED and s.match for t in s.match.takes)
    return ", ".join(f"{takes[t]} {t}" for t in TAKES if t != PARALLEL and takes[t]) or "-"


def worst(proof: dict[str, Any]) -> str:
    """The largest relative error of a verification, or that it failed."""
    if not proof["passed"]:
        return DIFFERS
    return f"{max((o.get('max_rel_error', 0.0) for o in [*proof['outputs'], *proof['sites']]), default=0.0):.1e}"


def measure(host: Host, name: str, origin: str, model: onnx.ModelProto) -> Line:
    """What the rewriter does with one model, as data."""
    with tempfile.TemporaryDirectory() as folder:
        source, output, plain = (Path(folder) / f"{n}.onnx" for n in ("m", "out", "plain"))
        onnx.save(model, str(source))
        result = patch(source, output, Options(all_sites=True, verify=True, shapes=models.one_image(model)))
        proof = result.report["verify"]
        line = {"name": name, "origin": origin, "also": taken_in(result), "accepted": 0, "undone": "-"}
        line |= {key: result.report["summary"][key] for key in (*COUNTED, "nodes_before", "nodes_after", "refused_by")}
        if result.output:
            unpatch(output, plain)
            tolerance = proof["outputs"][0].get("tolerance", 0.0)
            line["undone"] = worst(verify(source, onnx.load(str(plain)), Path(folder), tolerance, {}))
            line["accepted"] = accepted(host, onnx.load(str(output)), result)
    return line | {"error": worst(proof) if proof else "-"}


def row(lines: Sequence[Line]) -> str:
    """One line of the table, of a model in all its types."""
    first = lines[0]
    name = f"{first['name']} ({first['origin']})" if first["origin"] else first["name"]
    cells = [name, f"{first['nodes_before']}/{first['nodes_after']}", "/".join(str(first[key]) for key in COUNTED)]
    return f"| {' | '.join([*cells, first['also'], largest(lines)])} |\n"


def largest(lines: Sequence[Line], key: str = "error") -> str:
    """The largest error of some models; what differs counts as the largest."""
    return max((line[key] for line in lines if line[key] != "-"), key=_size, default="-")


def _size(error: str) -> float:
    return math.inf if error == DIFFERS else float(error)


def sums(lines: Sequence[Line]) -> str:
    """What all models say together."""
    fused = sum(line["fused"] for line in lines)
    causes = sum((Counter(line["refused_by"]) for line in lines), Counter[str]())
    exports = [line for line in lines if line["origin"] == TORCH]
    text = (
        f"Of {len(lines)} files {sum(line['error'] == DIFFERS for line in lines)} differ. The plugin host took "
        f"{sum(line['accepted'] for line in lines)} of {fused} fused nodes through their whole life without a finding. "
        f"After `cutefuse unpatch` the largest difference was {largest(lines, 'undone')}.\n"
    )
    if exports:
        whole = [name for name in dict.fromkeys(line["name"] for line in exports)
                 if not any(line["refused"] for line in exports if line["name"] == name)]  # fmt: skip
        left = dict.fromkeys(line["name"] for line in exports if line["name"] not in whole)
        text += (
            f"\nPyTorch's exports ({len(exports)} files: both exporters, the oldest and the newest opset of each) are "
            f"fused whole for {', '.join(whole)}, and in part or not at all for {', '.join(left) or 'none'}; largest "
            f"difference {largest(exports)}.\n"
        )
    refused = ", ".join(f"{count} {cause}" for cause, count in causes.most_common()) or "nothing"
    return f"{text}\nRefused: {refused}.\n"


def page_of(lines: Sequence[Line]) -> str:
    """The page up to the published packages."""
    shown: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line["origin"] != TORCH:
            shown.setdefault((line["name"], line["origin"]), []).append(line)
    table = f"| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}\n" + "".join(map(row, shown.values()))
    return f"{HEADER}{table}\n{sums(lines)}"


def write(out: Path) -> None:
    """Write the page."""
    host, lines = Host(), list[Line]()
    for name, origin, model in sources():
        lines.append(measure(host, name, origin, model))
        print(json.dumps(lines[-1]), flush=True)
    old = out.read_text(encoding="utf-8") if out.is_file() else ""
    write_text(out, page_of(lines) + (f"\n{packages}" if (packages := page.tail(old)) else ""))


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m models.table`."""
    parser = argparse.ArgumentParser(prog="models.table", description="Patch every model and write the table.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "models.md")
    args = parser.parse_args(argv)
    return run_command(lambda: write(args.out))


if __name__ == "__main__":
    sys.exit(main())
