"""How the rewriter scales: 10,000 nodes, and a model of more than 2 GB whose weights lie outside it.

    python benchmarks/patch_scale.py [--gigabytes 2.3] [--nodes 10000] [--json FILE]

Each model is patched in a process of its own, so that the peak of resident memory is the rewriter's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import onnx  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.output import write_json  # noqa: E402
from models.net import Config, Net  # noqa: E402

CHANNELS = 512


def many_nodes(path: Path, nodes: int) -> None:
    """Residual blocks of concat, 1x1 and 3x3 convolutions with SiLU, until there are enough nodes."""
    net = Net("many_nodes", Config())
    x = net.input("image", 16, 8, 8)
    y = net.conv(x, 16, 3, "stem", bn=True, act="SiLU")
    while len(net.nodes) < nodes:
        i = len(net.nodes)
        z = net.conv(net.concat([x, y], f"block{i}/Concat"), 16, 1, f"block{i}.mix", bn=True, act="SiLU")
        x, y = y, net.conv(z, 16, 3, f"block{i}.conv", bn=True, act="Relu")
    onnx.save(net.model([y]), str(path))


def many_bytes(path: Path, gigabytes: float) -> None:
    """Concat + 3x3 convolutions whose filters are written straight into one data file."""
    shape = (CHANNELS, 2 * CHANNELS, 3, 3)
    size = int(np.prod(shape)) * 4
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    x, y = "image", "image"
    with path.with_suffix(".data").open("wb") as data:
        for i in range(int(gigabytes * 1e9 / size) + 1):
            nodes.append(helper.make_node("Concat", [x, y], [f"c{i}"], name=f"concat{i}", axis=1))
            nodes.append(helper.make_node("Conv", [f"c{i}", f"w{i}"], [f"x{i}"], name=f"conv{i}", pads=[1] * 4))
            nodes.append(helper.make_node("Relu", [f"x{i}"], [f"y{i}"], name=f"relu{i}"))
            w = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
            for key, value in (("location", path.with_suffix(".data").name), ("offset", data.tell()), ("length", size)):
                w.external_data.add(key=key, value=str(value))
            data.write((rng.standard_normal(shape, dtype=np.float32) * 0.01).data)
            weights.append(w)
            x, y = y, f"y{i}"
    info = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", CHANNELS, 8, 8])
    result = helper.make_tensor_value_info(y, TensorProto.FLOAT, ["n", CHANNELS, 8, 8])
    graph = helper.make_graph(nodes, "many_bytes", [info], [result], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


# ru_maxrss would start at the parent's own size; VmHWM starts anew with the program.
CHILD = """
import re, sys, time
from cutefuse.commands.patch import main
code = main([sys.argv[1], "--json"])
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
print(peak[1], time.process_time(), file=sys.stderr)
sys.exit(code)
"""


def measure(path: Path) -> dict[str, float | int | str]:
    """Patch the model in a child process: seconds, peak resident memory, sizes."""
    size = sum(p.stat().st_size for p in path.parent.iterdir())
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise CutefuseError(f"patching {path.name} failed with exit code {done.returncode}: {done.stderr}")
    summary = json.loads(done.stdout)["summary"]
    peak_kib, cpu_seconds = done.stderr.split()[-2:]
    return {
        "model": path.stem,
        "nodes": summary["nodes_before"],
        "fused": summary["fused"],
        "input_gigabytes": round(size / 1e9, 2),
        "seconds": summary["seconds"],
        "cpu_seconds": round(float(cpu_seconds), 1),
        "peak_megabytes": round(int(peak_kib) / 1024),
    }


def main() -> int:
    """Print one row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.3)
    parser.add_argument("--nodes", type=int, default=10000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, make, size in (("nodes", many_nodes, args.nodes), ("bytes", many_bytes, args.gigabytes)):
            path = Path(folder) / name / f"many_{name}.onnx"
            path.parent.mkdir()
            make(path, size)
            rows.append(measure(path))
            print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    if args.json:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
