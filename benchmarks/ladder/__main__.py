"""The ladder: RMSNorm from one thread per row to the library's kernel, and LayerNorm beside it.

    python benchmarks/ladder                # times, bytes, share of the copy bandwidth, error against float64
    python benchmarks/ladder --ncu          # with Nsight Compute's metrics that explain each step

The steps are in steps.cu, which is compiled with nvcc on first use; docs/ladder.md tells what each step teaches.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
sys.path.insert(0, str(HERE.parent))

import row_norm as bench  # noqa: E402

from cutefuse.errors import CutefuseError, run_command  # noqa: E402
from cutefuse.kernels import Call, Launcher, Tensor  # noqa: E402

STEPS = {
    "RMSNorm v1: one thread per row": 1,
    "RMSNorm v2: block per row, shared-memory tree": 2,
    "RMSNorm warp reduce: one warp per row": 3,
    "RMSNorm v3: block reduce by shuffles, strided loop": 4,
    "RMSNorm v4: v3 with float4": 5,
    "LayerNorm: one thread per row": 6,
}
METRICS = {
    "gpu__time_duration.sum": "duration us",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
    "sm__warps_active.avg.per_cycle_active": "warps/SM",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 %",
    "l1tex__t_sector_hit_rate.pct": "L1 hit %",
}
EPSILON = 1e-5


def build(folder: Path, sm: int) -> Path:
    """Compile steps.cu for the device. Raises CutefuseError when nvcc is missing or refuses it."""
    target = folder / f"libladder_sm{sm}.so"
    source = HERE / "steps.cu"
    if target.is_file() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.so")
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{sm}", "-Xcompiler", "-fPIC", "-shared", "-cudart", "static"]
    try:
        done = subprocess.run([*command, str(source), "-o", str(partial)], capture_output=True, text=True)
    except FileNotFoundError:
        raise CutefuseError(f"{nvcc} was not found; put CUDA's nvcc on the PATH to build the steps") from None
    if done.returncode != 0:
        raise CutefuseError(f"nvcc refused {source.name}: {done.stderr.strip().splitlines()[-1]}")
    os.replace(partial, target)
    return target


class Ladder:
    """One problem in float32, and everything that can solve it: name -> (launch of set i, its outputs)."""

    def __init__(self, torch: Any, library: Path, rows: int, columns: int, compiled: bool) -> None:
        import torch.nn.functional as F

        self.torch, self.rows, self.columns = torch, rows, columns
        self.sets = 4
        self.x = [torch.randn(rows, columns, device="cuda") for _ in range(self.sets)]
        self.y = [torch.empty_like(x) for x in self.x]
        self.gamma = torch.randn(columns, device="cuda")
        self.run = ctypes.CDLL(str(library)).ladder_run
        self.run.restype = ctypes.c_bool
        p = ctypes.c_void_p
        self.run.argtypes = [ctypes.c_int, p, p, p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, p]
        shape = (columns,)

        def rms(x: Any) -> Any:
            return F.rms_norm(x, shape, self.gamma, EPSILON)

        def layer(x: Any) -> Any:
            return F.layer_norm(x, shape, None, None, EPSILON)

        self.launches: dict[str, Callable[[int], Any]] = {name: self.step(step) for name, step in STEPS.items()}
        ours = {"RMSNorm: cutefuse": False, "LayerNorm: cutefuse": True}
        self.launches |= {name: self.ours(is_layer) for name, is_layer in ours.items()}
        for name, function in (("RMSNorm", rms), ("LayerNorm", layer)):
            self.launches[f"{name}: torch eager"] = lambda i, f=function: f(self.x[i])
            if compiled:
                fast = torch.compile(function, dynamic=False)
                self.launches[f"{name}: torch.compile"] = lambda i, f=fast: f(self.x[i])

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def step(self, number: int) -> Callable[[int], Any]:
        def launch(i: int) -> Any:
            operands = self.x[i].data_ptr(), self.gamma.data_ptr(), self.y[i].data_ptr()
            if not self.run(number, *operands, self.rows, self.columns, EPSILON, self.stream()):
                raise CutefuseError(f"this step cannot take rows of {self.columns}")
            return self.y[i]

        return launch

    def ours(self, layer: bool) -> Callable[[int], Any]:
        absent, vector = Tensor((0,), "float32"), Tensor((self.columns,), "float32", data=self.gamma.data_ptr())
        launchers = []
        for x, y in zip(self.x, self.y, strict=True):
            a, b = (Tensor((self.rows, self.columns), "float32", data=t.data_ptr()) for t in (x, y))
            inputs = [a, absent, absent if layer else vector, absent]
            attrs = {"epsilon": EPSILON, "layer": int(layer)}
            launchers.append(Launcher(Call("CuteRowNormForward", inputs, [b, absent, absent, absent], attrs)))

        def launch(i: int) -> Any:
            launchers[i](self.stream())
            return self.y[i]

        return launch

    def error(self, name: str, launch: Callable[[int], Any]) -> float | None:
        """Largest absolute error against float64; None where the step cannot take the shape."""
        self.y[0].fill_(float("nan"))
        try:
            y = launch(0)
        except CutefuseError:
            return None
        self.torch.cuda.synchronize()
        x = self.x[0].double()
        centred = x - x.mean(1, keepdim=True) if name.startswith("Layer") else x
        truth = centred * (centred.square().mean(1, keepdim=True) + EPSILON).rsqrt()
        truth = truth if name.startswith("Layer") else truth * self.gamma.double()
        error = float((y.double() - truth).abs().max())
        if not error < 1e-4:
            raise CutefuseError(f"{name} is wrong: its error against float64 is {error:.3g}")
        return error


def explain(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Nsight Compute's metrics of one launch of each step and of ours, by kernel name."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CutefuseError("ncu was not found; put Nsight Compute on the PATH, or leave --ncu out")
    command = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--metrics", ",".join(METRICS)]
    command += ["--kernel-name", "regex:rms_|layer_v1|row_norm_forward", sys.executable, str(HERE), "--once"]
    done = subprocess.run(
        [*command, "--rows", str(args.rows), "--columns", str(args.columns)], capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode != 0 or len(lines) < 3:
        raise CutefuseError(f"ncu gave no metrics: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    header, units, *rows = csv.reader(io.StringIO("\n".join(lines)))
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        record = dict(zip(header, row, strict=False))
        values = {METRICS[m]: float(record[m].replace(",", "")) for m in METRICS}
        if dict(zip(header, units, strict=False))["gpu__time_duration.sum"] in ("ns", "nsecond"):
            values["duration us"] /= 1000
        name = record["Kernel Name"].split("(")[0]
        found[name if name not in found else f"{name} (LayerNorm)"] = values
    return found


def body(args: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise CutefuseError("the ladder needs a CUDA device; run it on a machine with a GPU")
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    major, minor = torch.cuda.get_device_capability()
    library = args.library or build(HERE.parents[1] / "build" / "ladder", 10 * major + minor)
    ladder = Ladder(torch, library, args.rows, args.columns, compiled=not (args.once or args.no_compile))
    if args.once:
        for name, launch in ladder.launches.items():
            if "torch" not in name:
                ladder.error(name, launch)
        return 0
    errors = {name: ladder.error(name, launch) for name, launch in ladder.launches.items()}
    able = {name: launch for name, launch in ladder.launches.items() if errors[name] is not None}
    times = bench.measure(torch, able, ladder.sets, args.rounds)
    bandwidth = bench.copy_bandwidth(torch)
    moved = 2 * 4 * args.rows * args.columns
    print(f"{args.rows} x {args.columns} float32, {moved / 1e6:.1f} MB, {torch.cuda.get_device_name(0)}, "
          f"copy {bandwidth / 1e12:.2f} TB/s")  # fmt: skip
    print(f"{'step':<52}{'us':>10}{'GB/s':>8}{'of copy':>9}{'max error':>11}")
    for name in ladder.launches:
        if name not in times:
            print(f"{name:<52}{'cannot take this shape':>38}")
            continue
        rate = moved / times[name] * 1e6
        print(f"{name:<52}{times[name]:>10.2f}{rate / 1e9:>8.0f}{rate / bandwidth:>9.1%}{errors[name]:>11.1e}")
    metrics = explain(args) if args.ncu else {}
    if metrics:
        print(f"\n{'kernel':<40}" + "".join(f"{title:>13}" for title in METRICS.values()))
        for name, values in metrics.items():
            print(f"{name[:39]:<40}" + "".join(f"{v:>13.2f}" for v in values.values()))
    if args.out:
        facts = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "copy_bytes_per_s": bandwidth}
        record = {"facts": facts, "rows": args.rows, "columns": args.columns, "time_us": times, "errors": errors}
        args.out.write_text(json.dumps({**record, "ncu": metrics}, indent=1))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="the tutorial's batch of 4 x 1024 tokens")
    parser.add_argument("--columns", type=int, default=512, help="the tutorial's hidden size")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--ncu", action="store_true", help="add Nsight Compute's metrics")
    parser.add_argument("--library", type=Path, help="steps.cu, already compiled")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    return run_command(lambda: body(args))


if __name__ == "__main__":
    sys.exit(main())
