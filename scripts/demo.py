"""The main job on real topologies, end to end: models, patch, proof, plugins, engines, profile, report.

Every step is a command that a user can type, printed before it runs; the last lines are tables and the report's path.
Without TensorRT and without a GPU, TensorRT for RTX builds the engines of all models in float16, and the last table
holds what they copy, plain and patched; where that is not installed, ONNX Runtime is the embedded engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cutefuse.engines.build import choose_backend  # noqa: E402
from cutefuse.engines.layers import moved  # noqa: E402
from cutefuse.engines.tensorrt import rtx  # noqa: E402
from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.report.read.reader import find_engines, read_engine  # noqa: E402
from cutefuse.table import scaled  # noqa: E402
from models import one_image  # noqa: E402

PROFILED = "yolo_neck-float{}"  # the model whose plain and patched engines are profiled and compared


def step(title: str, *command: str | Path, quiet: bool = True) -> None:
    """Print and run one command; its output is shown only when it fails or on request."""
    shown = " ".join(os.path.relpath(c, ROOT) if isinstance(c, Path) else c for c in command)
    print(f"\n{title}" if title else "", end="\n" if title else "")
    print(f"  $ {'python ' if str(command[0]).endswith('.py') else ''}{shown}", flush=True)
    runnable = [sys.executable] if str(command[0]).endswith(".py") else []
    environment = {**os.environ, "PYTHON": sys.executable}  # what build_engine.sh takes
    words = [*runnable, *map(str, command)]
    done = subprocess.run(words, cwd=ROOT, capture_output=quiet, text=True, env=environment)
    if done.returncode != 0:
        raise CutefuseError(
            f"'{shown}' failed with exit code {done.returncode}:\n{done.stdout or ''}{done.stderr or ''}"
        )


def accepted_plugins(model: Path, report: dict[str, Any]) -> str:
    """Drive every fused node of a patched model through the plugin host; 'n of m'."""
    from cutefuse.graph.read import Graph
    from cutefuse_host import Host, Input

    graph = Graph(onnx.load(str(model), load_external_data=False), model.parent)
    nodes = {node.name: node for node in graph.nodes if node.domain == "cutefuse"}
    sites = [s for s in report["sites"] if s["status"] == "fused"]
    host, accepted = Host(), 0
    for site in sites:
        node = nodes[site["name"]]
        inputs = [Input(graph.dims(name) or (), graph.dtype(name) or site["dtype"]) for name in node.input]
        findings = [f for f in host.build(node, inputs).findings if f.kind != "warning"]
        accepted += not findings
    return f"{accepted} of {len(sites)}"


def latency(folder: Path) -> tuple[float, str]:
    """(median latency in ms, backend) from the report that process_engine.py wrote."""
    report = json.loads(next(folder.glob("*.report.json")).read_text())
    return float(report["latency_ms"]), str(report["backend"])


def main() -> int:
    """Entry point of `make demo`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "demo_out", help="folder (demo_out)")
    parser.add_argument("--small", action="store_true", help="reduced widths and sizes")
    args = parser.parse_args()

    def command() -> None:
        start, out = time.monotonic(), args.output.resolve()
        models, scripts = out / "models", Path(ROOT / "scripts")
        size = ["--small"] if args.small else []
        compiled = choose_backend("auto", allow_onnxruntime=True) == "rtx"
        target = ["--engine", "rtx", "--sm", str(rtx.default_sm())] if compiled else []
        step("1. demo models, with onnx alone and a fixed seed", scripts / "make_models.py", "--out", models, *size)
        rows: list[dict[str, Any]] = []
        plain = sorted(p for p in models.glob("*.onnx") if ".cutefuse" not in p.name)
        for i, path in enumerate(plain):
            title = (
                "2. patch each (every legal site: the small sizes of a demo say nothing about what pays), prove with "
                "ONNX Runtime that only the graph changed, take each plugin through the host"
            )
            sizes = one_image(onnx.load(path, load_external_data=False))
            shapes = [f"--input-shape={name}:{'x'.join(map(str, dims))}" for name, dims in sizes.items()]
            step(title if i == 0 else "", scripts / "patch_onnx.py", path, "--all", "--verify", *target, *shapes)
            report = json.loads(path.with_suffix("").with_suffix(".patch.json").read_text())
            plugins = accepted_plugins(path.with_suffix(".cutefuse.onnx"), report)
            rows.append({"model": path.stem, **report["summary"], "error": worst_error(report), "plugins": plugins})
        profiled = PROFILED.format(16 if compiled else 32)
        before, after = out / "engine_plain", out / "engine_patched"
        title = "3. engines: build, " + ("draw" if compiled else "profile, draw")
        for suffix, folder in ((".onnx", before), (".cutefuse.onnx", after)):
            step(title, scripts / "process_engine.py", models / f"{profiled}{suffix}", folder, quiet=False)
            title = ""
        others = [p for p in plain if compiled and p.stem.endswith("float16") and p.stem != profiled]
        for i, path in enumerate(others):
            for suffix, folder in ((".onnx", before), (".cutefuse.onnx", after)):
                title = "   and those of the other models in float16" if i == 0 and folder == before else ""
                step(title, scripts / "build_engine.sh", path.with_suffix(suffix), folder)
        page = out / "compare.html"
        files = [next(f.glob(f"{profiled}*.graph.json")) for f in (before, after)]
        step("4. compare them", scripts / "compare_engines.py", *files, "-o", page)
        print_table(rows)
        if compiled:
            print_compiled(sorted([*others, models / f"{profiled}.onnx"]), before, after)
        else:
            print_latencies(profiled, before, after)
        print("\nyour own model: . .venv/bin/activate && cutefuse patch model.onnx --verify")
        print(f"\nreports: {next(after.glob('*.report.html'))}\n         {page}\n{time.monotonic() - start:.0f} s")

    return run_command(command)


def print_latencies(model: str, before: Path, after: Path) -> None:
    """Median latencies of the two engines, and what they say."""
    for name, folder in (("plain", before), ("patched", after)):
        ms, backend = latency(folder)
        print(f"{model}, {name}: {ms:.2f} ms on {backend}")
    if backend == "onnxruntime":
        print("(ONNX Runtime runs the function bodies of the fused nodes: these times say nothing about the plugins)")


def print_compiled(plain: list[Path], before: Path, after: Path) -> None:
    """What TensorRT for RTX made of each model: its copies and what they move, plain and patched."""
    print(
        "\nengines of TensorRT for RTX, built and not run: copies, and the MB that they read and write in one inference"
    )
    print(f"{'model':<26}{'layers':>13}{'plugins':>9}{'copies':>13}{'MB copied':>18}{'of all MB':>18}")
    for path in plain:
        pair = [read_engine(find_engines(f / f"{path.stem}{suffix}.engine.graph.json")[0])
                for f, suffix in ((before, ".onnx"), (after, ".cutefuse.onnx"))]  # fmt: skip
        sums, plugins = [moved(engine.layers) for engine in pair], sum(la.kind == "plugin" for la in pair[1].layers)

        def both(values: Iterable[float], form: str = "d") -> str:
            return " -> ".join(format(value, form) for value in values)

        copied, whole = [m.copy_bytes / 1e6 for m in sums], [m.all_bytes / 1e6 for m in sums]
        print(
            f"{path.stem:<26}{both(len(e.layers) for e in pair):>13}{plugins:>9}{both(m.copies for m in sums):>13}"
            f"{both(copied, '.1f'):>18}{both(whole, '.1f'):>18}"
        )
    print("(every legal site was fused here; without --all, patch leaves out what adds more copies than it removes)")


def worst_error(report: dict[str, Any]) -> float:
    """Largest relative error over the outputs that `--verify` wrote."""
    return max(float(o["max_rel_error"]) for o in report["verify"]["outputs"])


def print_table(rows: list[dict[str, Any]]) -> None:
    """The result, one line a model."""
    print(f"\n{'model':<26}{'sites':>7}{'nodes':>13}{'MB saved':>10}{'worst error':>13}{'plugins accepted':>18}")
    for r in rows:
        nodes, sites = f"{r['nodes_before']} -> {r['nodes_after']}", f"{r['fused']}/{r['candidates']}"
        saved = scaled(r["bytes_saved"], 1e6)
        print(f"{r['model']:<26}{sites:>7}{nodes:>13}{saved:>10}{r['error']:>13.1e}{r['plugins']:>18}")


if __name__ == "__main__":
    sys.exit(main())
