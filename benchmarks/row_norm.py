"""Row norms beside PyTorch eager, torch.compile, Liger and QuACK: one run, interleaved, inputs beyond the L2 cache.

    python benchmarks/row_norm.py --out row_norm.json                    # forward and backward against every peer found
    python benchmarks/row_norm.py --every-tile --large                   # and our other tiles, and tensors of 256 MB

Time is the median over rounds of CUDA graph replays; every variant replays once per round, so that clocks and
temperature are the same for all. Bytes are the least that the operation must move: each operand read or written once.
*copy* is torch.neg into another buffer, one read and one write of the tensor; shares are of its bytes per second.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lib import timing  # noqa: E402
from benchmarks.lib.norm_problems import Problem, problems  # noqa: E402
from cutefuse import kernels  # noqa: E402
from cutefuse.errors import run_command  # noqa: E402
from cutefuse.kernels import Call, Tensor  # noqa: E402
from cutefuse.output import write_json  # noqa: E402

EPSILON = 1e-5
L2_FACTOR = 3  # rotate inputs through this many times the L2 cache
ABSENT = Tensor((0,), "float32")


class Operands:
    """As many sets of tensors as it takes to leave the L2 cache; outputs of ours are allocated once."""

    def __init__(self, torch: Any, p: Problem) -> None:
        self.torch, self.problem = torch, p
        dtype = getattr(torch, p.dtype)
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.sets = max(2, min(64, math.ceil(L2_FACTOR * l2 / p.bytes_moved)))

        def fresh() -> list[Any]:
            return [torch.randn(p.rows, p.columns, device="cuda").to(dtype) for _ in range(self.sets)]

        def empty() -> list[Any]:
            return [torch.empty(p.rows, p.columns, device="cuda", dtype=dtype) for _ in range(self.sets)]

        self.x, self.y = fresh(), empty()
        self.residual = fresh() if p.residual else None
        self.sum = empty() if p.residual and p.direction == "forward" else None
        self.dy = fresh() if p.direction == "backward" else []
        self.gamma = torch.randn(p.columns, device="cuda").to(dtype)
        self.beta = torch.randn(p.columns, device="cuda").to(dtype) if p.layer else None


def describe(t: Any) -> Tensor:
    if t is None:
        return ABSENT
    return Tensor(tuple(t.shape), str(t.dtype).removeprefix("torch."), data=t.data_ptr())


def device_facts(torch: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {"sm": properties.major * 10 + properties.minor, "sm_count": properties.multi_processor_count}


Launch = Callable[[int], Any]  # enqueues set i on the current stream, returns what it made


def ours(o: Operands, tile: int = 0) -> Launch:
    torch, p = o.torch, o.problem
    device = device_facts(torch)
    launchers, keep = [], []
    for i in range(o.sets):
        if p.direction == "forward":
            parameters = [o.gamma, o.beta] if p.layer else [o.gamma]
            inputs = [o.x[i], *([o.residual[i]] if o.residual else []), *parameters]
            outputs = [o.y[i], *([o.sum[i]] if o.sum else [])]
            name = f"Cute{'Add' if p.residual else ''}{'Layer' if p.layer else 'RMS'}Norm"
            call = Call(
                name,
                list(map(describe, inputs)),
                list(map(describe, outputs)),
                {"epsilon": EPSILON},
                config=tile,
                **device,
            )
        else:
            mean, rstd = statistics(o, i)
            dgamma = torch.empty_like(o.gamma)
            dbeta = torch.empty_like(o.gamma) if p.layer else None
            inputs = [o.dy[i], o.residual[i] if o.residual else None, o.x[i], o.gamma, mean if p.layer else None, rstd]
            operands = list(map(describe, inputs)), list(map(describe, [o.y[i], dgamma, dbeta]))
            attrs = {"epsilon": EPSILON, "layer": int(p.layer)}
            size = kernels.workspace_bytes(Call("CuteRowNormBackward", *operands, attrs, **device))
            workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
            keep += [mean, rstd, dgamma, dbeta, workspace]
            call = Call(
                "CuteRowNormBackward", *operands, attrs, workspace=workspace.data_ptr(), workspace_bytes=size, **device
            )
        launchers.append(kernels.Launcher(call))

    def launch(i: int) -> Any:
        launchers[i](torch.cuda.current_stream().cuda_stream)
        return keep

    return launch


def statistics(o: Operands, i: int) -> tuple[Any, Any]:
    x = o.x[i].float()
    mean = x.mean(1) if o.problem.layer else o.torch.zeros(o.problem.rows, device="cuda")
    rstd = ((x - mean[:, None]).square().mean(1) + EPSILON).rsqrt()
    return mean, rstd


def norm_function(torch: Any, p: Problem) -> Callable[..., Any]:
    """The operation in PyTorch: eager peers call it, torch.compile compiles it."""
    import torch.nn.functional as F

    def norm(x: Any, gamma: Any, beta: Any) -> Any:
        shape = (x.shape[-1],)
        return F.layer_norm(x, shape, gamma, beta, EPSILON) if p.layer else F.rms_norm(x, shape, gamma, EPSILON)

    def with_residual(x: Any, gamma: Any, beta: Any, residual: Any) -> Any:
        total = x + residual
        return norm(total, gamma, beta), total

    return with_residual if p.residual else norm


def copy(o: Operands) -> Launch:
    return lambda i: o.torch.neg(o.x[i], out=o.y[i])


def peer(o: Operands, function: Callable[..., Any]) -> Launch:
    """A function of (x, gamma, beta[, residual]), forward, or its autograd backward."""
    torch, p = o.torch, o.problem
    if p.direction == "forward":

        def forward(i: int) -> Any:
            with torch.no_grad():
                return function(o.x[i], o.gamma, o.beta, *([o.residual[i]] if o.residual else []))

        return forward
    leaves = [o.gamma.requires_grad_()] + ([o.beta.requires_grad_()] if o.beta is not None else [])
    graphs = []
    for i in range(o.sets):
        x = o.x[i].detach().requires_grad_()
        graphs.append((x, function(x, o.gamma, o.beta)))

    def backward(i: int) -> Any:
        x, y = graphs[i]
        return torch.autograd.grad(y, [x, *leaves], o.dy[i], retain_graph=True)

    return backward


def optional_peers(torch: Any, p: Problem) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Liger and QuACK where they are installed and have the operation."""
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        if p.kind == "layer":
            yield "liger", lambda x, g, b: LigerLayerNormFunction.apply(x, g, b, EPSILON)
        if p.kind == "rms":
            yield "liger", lambda x, g, b: LigerRMSNormFunction.apply(x, g, EPSILON, 0.0, "llama", False)
    except ImportError:
        pass
    try:
        from quack import layernorm, rmsnorm

        if p.kind == "layer" and p.direction == "forward":
            yield "quack", lambda x, g, b: layernorm(x, g.float(), b.float(), EPSILON)
        if p.kind == "rms":
            yield "quack", lambda x, g, b: rmsnorm(x, g, eps=EPSILON)
    except ImportError:
        pass


def capture(torch: Any, launch: Launch, sets: int, least_us: float) -> tuple[Any, int, Any]:
    """(graph, launches in it, what they made): whole turns through the sets, long enough to time."""
    launch(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(sets):
        launch(i)
    torch.cuda.synchronize()
    estimate_us = (time.perf_counter() - start) * 1e6 / sets
    turns = max(1, min(8, math.ceil(least_us / (estimate_us * sets))))
    graph, made = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(turns):
            # kept until the capture ends: outputs that share memory would be written to the cache alone
            made = [launch(i) for i in range(sets)]
    return graph, turns * sets, made


def measure(torch: Any, launches: dict[str, Launch], sets: int, rounds: int) -> dict[str, float]:
    """Median time in microseconds of one launch, per name; a variant that fails is left out with a note."""
    graphs = {}
    for name, launch in launches.items():
        try:
            graphs[name] = capture(torch, launch, sets, 400.0)
        except Exception as error:  # a peer that cannot do this shape must not end the run
            print(f"  {name} left out: {type(error).__name__} {str(error).splitlines()[0][:120]}", file=sys.stderr)
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(rounds + 1):
        for name, (graph, count, _) in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if round_ > 0:  # the first one warms up
                times[name].append(begin.elapsed_time(end) * 1e3 / count)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def copy_bandwidth(torch: Any) -> float:
    """Bytes read plus written per second by the faster of two copies of 1 GB: the driver's, and a kernel's."""
    source, target = (torch.empty(1 << 28, dtype=torch.float32, device="cuda") for _ in range(2))
    launches = {"driver": lambda i: target.copy_(source), "kernel": lambda i: torch.neg(source, out=target)}
    return 2 * source.numel() * 4 / min(measure(torch, launches, 2, 9).values()) * 1e6


def warm_compile_cache(argv: list[str], workers: int) -> None:
    """torch.compile takes seconds a shape: fill its cache from many processes before the timed one."""
    command = [sys.executable, __file__, *argv, "--compile-only"]
    running = [subprocess.Popen([*command, "--share", f"{i}/{workers}"]) for i in range(workers)]
    for process in running:
        process.wait()


def geometric_means(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for direction in ("forward", "backward"):
        for kind in ("rms", "layer", "add_rms", "add_layer"):
            chosen = [r for r in rows if r["direction"] == direction and r["kind"] == kind and not r["large"]]
            timed = [set(r["time_us"]) for r in chosen]
            for name in sorted(set.intersection(*timed) - {"ours"} if timed else ()):
                ratios = [r["time_us"]["ours"] / r["time_us"][name] for r in chosen]
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                lines.append(f"{direction} {kind}: ours / {name} = {mean:.3f} (geometric mean of {len(ratios)} shapes)")
    return lines


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("row_norm.json"), help="JSON file to write")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 4096, 32768])
    parser.add_argument("--columns", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--kinds", nargs="+", default=["rms", "layer"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"])
    parser.add_argument("--large", action="store_true", help="add tensors of 256 MB")
    parser.add_argument("--every-tile", action="store_true", help="time our other tiles too")
    parser.add_argument("--triton-peers", action="store_true", help="add Liger and QuACK where they are installed")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--budget-s", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument(
        "--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that warm torch.compile"
    )
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def compile_share(torch: Any, todo: list[Problem], share: str) -> None:
    """Let torch.compile see every `of`-th problem from the `i`-th on (share: "i/of"), so that its cache holds them."""
    first, of = map(int, share.split("/"))
    for p in todo[first::of]:
        peer(Operands(torch, p), torch.compile(norm_function(torch, p), dynamic=False))(0)
        torch.compiler.reset()


def launches_of(torch: Any, o: Operands, args: argparse.Namespace) -> dict[str, Launch]:
    """Ours, a copy, and the peers that were asked for, on one problem."""
    p = o.problem
    launches: dict[str, Launch] = {"ours": ours(o), "copy": copy(o)}
    if args.every_tile and p.direction == "forward":
        inputs = [Tensor((p.rows, p.columns), p.dtype)] * (1 + p.residual)
        inputs += [Tensor((p.columns,), p.dtype)] * (1 + p.layer)
        name = f"Cute{'Add' if p.residual else ''}{'Layer' if p.layer else 'RMS'}Norm"
        call = Call(name, inputs, inputs[: 1 + p.residual], {}, **device_facts(torch))
        names = {c["id"]: c["name"] for c in kernels.operator_of(name)["configs"]}
        launches |= {names[tile]: ours(o, tile) for tile in kernels.configs(call)}
    function = norm_function(torch, p)
    launches["eager"] = peer(o, function)
    if not args.no_compile:
        launches["compile"] = peer(o, torch.compile(function, dynamic=False))
    if args.triton_peers:
        launches |= {name: peer(o, f) for name, f in optional_peers(torch, p)}
    return launches


def row_of(torch: Any, p: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """The times of one problem in us, and the rate of ours as a share of the copy's; printed as a line."""
    torch.compiler.reset()
    o = Operands(torch, p)
    times = measure(torch, launches_of(torch, o, args), o.sets, args.rounds)
    copied = 2 * o.x[0].numel() * o.x[0].element_size()
    of_copy = times["copy"] / times["ours"] * p.bytes_moved / copied
    text = "  ".join(f"{n} {t:.2f}" for n, t in times.items())
    print(f"{p.direction} {p.kind} {p.dtype} {p.rows}x{p.columns}: {text}  [{of_copy:.1%} of copy]", flush=True)
    return {**p.__dict__, "bytes": p.bytes_moved, "time_us": times, "of_copy": of_copy}


def machine(torch: Any, bandwidth: float, rounds: int) -> dict[str, Any]:
    """What the figures were taken on; bandwidth: of the copy, in bytes a second."""
    query = "clocks.sm,clocks.mem,temperature.gpu,driver_version"
    clocks = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda,
        "copy_bytes_per_s": bandwidth, "rounds": rounds, "epsilon": EPSILON, "clocks": clocks.stdout.strip(),
    }  # fmt: skip


def run(argv: list[str]) -> int:
    args = parse(argv)
    begin = time.perf_counter()
    timing.require_gpu()
    if not (args.no_compile or args.compile_only) and args.workers > 0:
        warm_compile_cache(argv, args.workers)
        print(f"torch.compile warmed in {time.perf_counter() - begin:.0f} s")
    import torch

    torch.manual_seed(0)
    # Autograd runs a backward on the stream of its forward, and the default one cannot be captured.
    torch.cuda.set_stream(torch.cuda.Stream())
    todo = problems(args)
    if args.compile_only:
        compile_share(torch, todo, args.share)
        return 0
    bandwidth = copy_bandwidth(torch)
    rows: list[dict[str, Any]] = []
    for p in todo:
        if time.perf_counter() - begin > args.budget_s:
            print(f"stopped after {len(rows)} of {len(todo)} problems")
            break
        rows.append(row_of(torch, p, args))
        torch.cuda.empty_cache()
    facts = machine(torch, bandwidth, args.rounds)
    write_json(args.out, {"facts": facts, "rows": rows})
    print(f"{facts['gpu']}, torch {facts['torch']}, copy {bandwidth / 1e12:.2f} TB/s, {facts['clocks']}")
    print("\n".join(geometric_means(rows)))
    return 0


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
