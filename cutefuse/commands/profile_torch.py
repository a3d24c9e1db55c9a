"""`cutefuse profile-torch module:factory`: where a PyTorch module spends its time, and what our operators would remove.

Every submodule becomes a record_function region, so that the table can be read by module as well as by operator.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutefuse.errors import CutefuseError, run_command
from cutefuse.output import add_json, json_alone, make_folder, write_json
from cutefuse.progress import track

REGION = "module:"  # prefix of our regions; "<path> (<class>)" follows
_NORM = re.compile(r"\((?!.*Batch)(?!.*Instance)(?!.*Group)\w*(?:RMS|Layer)\w*Norm\w*\)$")
_CONVS = ("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution")
_ACTIVATIONS = frozenset(
    f"aten::{name}{place}"
    for name in "relu silu leaky_relu hardswish sigmoid tanh clamp hardtanh".split()
    for place in ("", "_")
)


@dataclass
class Event:
    """One operator or region on the host's time line, with the device time of everything inside it, in microseconds."""

    name: str
    start_us: float
    end_us: float
    device_us: float
    self_device_us: float
    self_cpu_us: float
    shapes: list[Any] = field(default_factory=list)
    memory_bytes: int = 0
    parent: int = -1
    thread: int = 0

    @property
    def is_region(self) -> bool:
        return self.name.startswith(REGION)


@dataclass
class HotSpot:
    """A pattern that one of our operators replaces: its measured `time_us`, and what fusing saves, `removable_us`."""

    operator: str
    where: str
    time_us: float
    removable_us: float
    count: int
    text: str


# ------------------------------------------------------------------------------------------------- analysis
def by_operator(events: list[Event], iterations: int) -> list[dict[str, Any]]:
    """Operators by self device time (self CPU time without a device), per iteration."""
    return _grouped([e for e in events if not e.is_region], iterations, "self")


def by_region(events: list[Event], iterations: int) -> list[dict[str, Any]]:
    """Modules by their whole device time (CPU time without a device), per iteration."""
    return _grouped([e for e in events if e.is_region], iterations, "whole")


def _grouped(events: list[Event], iterations: int, by: str) -> list[dict[str, Any]]:
    groups: dict[str, list[Event]] = defaultdict(list)
    for e in events:
        groups[e.name.removeprefix(REGION)].append(e)
    rows = [
        {
            "name": name,
            "calls": len(es) / iterations,
            "self_device_us": sum(e.self_device_us for e in es) / iterations,
            "device_us": sum(e.device_us for e in es) / iterations,
            "self_cpu_us": sum(e.self_cpu_us for e in es) / iterations,
            "cpu_us": sum(e.end_us - e.start_us for e in es) / iterations,
            "memory_bytes": sum(e.memory_bytes for e in es) / iterations,
        }
        for name, es in groups.items()
    ]
    device = any(e.device_us for e in events)
    key = (
        ("self_device_us" if by == "self" else "device_us") if device else ("self_cpu_us" if by == "self" else "cpu_us")
    )
    return sorted(rows, key=lambda r: -r[key])


def hot_spots(events: list[Event], iterations: int) -> list[HotSpot]:
    """Concatenations that feed convolutions, and row norms, with what fusing them would remove."""
    device = any(e.device_us for e in events)

    def cost(e: Event) -> float:
        return e.device_us if device else e.end_us - e.start_us

    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    top = _sequence(events)
    for position, e in enumerate(top):
        if e.name == "aten::cat":
            following = top[position + 1 : position + 5]
            conv = next((n for n in following if n.name in _CONVS and _reads(n, e)), None)
            if conv is not None:
                after = top[top.index(conv) + 1 : top.index(conv) + 3]
                tail = [n for n in after if n.name in _ACTIVATIONS or n.name == "aten::batch_norm"]
                extra = sum(map(cost, tail))
                found[("ConcatConv", _where(events, conv))].append((cost(e) + cost(conv) + extra, cost(e) + extra))
        elif e.name in ("aten::layer_norm", "aten::rms_norm") and not _inside_norm(events, e):
            found[("LayerNorm" if "layer" in e.name else "RMSNorm", _where(events, e))].append((cost(e), 0.0))
    children: dict[int, list[Event]] = defaultdict(list)
    for e in events:
        if not e.is_region:
            children[e.parent].append(e)
    for index, e in enumerate(events):
        if e.is_region and _NORM.search(e.name):
            inside = children[index]
            several = sum(cost(c) > 0 for c in inside) > 1
            # Each kernel of an unfused norm reads and writes the rows; the fused kernel does so once.
            removable = cost(e) * (1 - 1 / len(inside)) if several else 0.0
            kind = "RMSNorm" if "RMS" in e.name else "LayerNorm"
            found[(kind, e.name.removeprefix(REGION))].append((cost(e), removable))
    spots = []
    for (operator, where), costs in found.items():
        total, gone = (sum(c[i] for c in costs) / iterations for i in (0, 1))
        text = {"ConcatConv": "torch.cat copies every source before the convolution reads it back"}.get(
            operator,
            "one kernel can read and write the rows once"
            if gone
            else "already one kernel; ours also adds the residual",
        )
        spots.append(HotSpot(operator, where, total, gone, round(len(costs) / iterations), text))
    return sorted(spots, key=lambda s: (-s.removable_us, -s.time_us))


def _sequence(events: list[Event]) -> list[Event]:
    """Operators that the modules themselves call, in order: those not called by another operator."""
    outer = [e for e in events if not e.is_region and (e.parent < 0 or events[e.parent].is_region)]
    return sorted(outer, key=lambda e: e.start_us)


def _reads(conv: Event, cat: Event) -> bool:
    """Whether the convolution's channels are those of the concatenation, as far as shapes were recorded."""
    shape = conv.shapes[0] if conv.shapes and isinstance(conv.shapes[0], list) else None
    sources = (
        [s for s in cat.shapes[0] if isinstance(s, list)] if cat.shapes and isinstance(cat.shapes[0], list) else []
    )
    if not shape or len(shape) < 3 or not sources or any(len(s) < 2 for s in sources):
        return True
    return sum(int(s[1]) for s in sources) == int(shape[1])


def _where(events: list[Event], e: Event) -> str:
    while e.parent >= 0 and not events[e.parent].is_region:
        e = events[e.parent]
    return events[e.parent].name.removeprefix(REGION) if e.parent >= 0 else "(top level)"


def _inside_norm(events: list[Event], e: Event) -> bool:
    return e.parent >= 0 and events[e.parent].is_region and bool(_NORM.search(events[e.parent].name))


# ------------------------------------------------------------------------------------------------- measuring
def load(target: str) -> Any:
    """What `module:factory` returns when called. Raises CutefuseError when it cannot be imported or called."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not attribute:
        raise CutefuseError(f"{target} is not of the form module:factory; give for example my_models:make_unet")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
        return factory()  # type: ignore[operator]
    except (ImportError, AttributeError) as error:
        raise CutefuseError(f"{target} cannot be found ({error}); check the module and PYTHONPATH") from None
    except TypeError as error:
        raise CutefuseError(f"{target} cannot be called without arguments ({error}); wrap it in a factory") from None
    finally:
        sys.path.pop(0)


def parse_shapes(words: list[str]) -> list[tuple[int, ...]]:
    """`1x3x224x224` of the command line."""
    try:
        return [tuple(int(d) for d in word.split("x")) for word in words]
    except ValueError:
        raise CutefuseError(f"--shape {' '.join(words)} is not of the form 1x3x224x224; correct it") from None


def add_regions(torch: Any, module: Any) -> list[Any]:
    """Hooks that open a record_function region around every submodule; returns their handles."""
    handles = []
    for name, part in module.named_modules():
        title = f"{REGION}{name or '(whole)'} ({type(part).__name__})"
        open_regions: list[Any] = []

        def enter(_m: Any, _a: Any, title: str = title, stack: list[Any] = open_regions) -> None:
            stack.append(torch.profiler.record_function(title))
            stack[-1].__enter__()

        def leave(_m: Any, _a: Any, _r: Any, stack: list[Any] = open_regions) -> None:
            stack.pop().__exit__(None, None, None)

        handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave, always_call=True)]
    return handles


def measure(torch: Any, module: Any, inputs: tuple[Any, ...], iterations: int, trace: Path | None) -> list[Event]:
    """Profile a module after a warm-up; writes a chrome trace when asked."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    handles = add_regions(torch, module)
    try:
        with torch.no_grad():
            for _ in track(range(3), "warming up", 3):
                module(*inputs)
            settings = {"activities": activities, "record_shapes": True, "profile_memory": True}
            if "acc_events" in inspect.signature(torch.profiler.profile.__init__).parameters:
                settings["acc_events"] = True  # newer releases warn without
            with torch.profiler.profile(**settings) as profiler:
                for _ in track(range(iterations), "profiling", iterations):
                    module(*inputs)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
    finally:
        for handle in handles:
            handle.remove()
    if trace:
        profiler.export_chrome_trace(str(trace))
    return events_of(profiler.events())


def events_of(found: Any) -> list[Event]:
    """torch.profiler's host events; the names of their fields changed with PyTorch 2.4 (cuda -> device)."""
    host = [e for e in found if "CPU" in str(getattr(e, "device_type", "CPU")).upper()]
    index = {id(e): i for i, e in enumerate(host)}

    def either(e: Any, name: str, default: float = 0.0) -> float:
        value = getattr(e, name.replace("device", "cuda"), None) if not hasattr(e, name) else getattr(e, name)
        return float(default if value is None else value)

    return [
        Event(
            str(e.name), float(e.time_range.start), float(e.time_range.end), either(e, "device_time_total"),
            either(e, "self_device_time_total"), float(getattr(e, "self_cpu_time_total", 0.0)),
            list(getattr(e, "input_shapes", None) or []), int(either(e, "self_device_memory_usage")),
            index.get(id(getattr(e, "cpu_parent", None)), -1), int(getattr(e, "thread", 0)),
        )
        for e in host
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- output
def text_table(rows: list[dict[str, Any]], title: str, limit: int, device: bool, whole: bool = False) -> str:
    """The heaviest rows with calls and memory: own time and its share, or the time of all inside with `whole`."""
    where = "device" if device else "CPU"
    own, all_in = ("self_device_us", "device_us") if device else ("self_cpu_us", "cpu_us")
    key, head = (all_in, f"{where} µs") if whole else (own, f"self {where} µs")
    # Modules contain one another: their shares are of the outermost.
    total = (max if whole else sum)([r[key] for r in rows] or [0.0]) or 1.0
    lines = [f"{title:<52}{head:>16}{'%':>7}{'calls':>8}{'MiB':>10}"]
    for r in rows[:limit]:
        name = r["name"] if len(r["name"]) <= 50 else f"…{r['name'][-49:]}"
        figures = f"{r[key]:>16.1f}{100 * r[key] / total:>7.1f}{r['calls']:>8.0f}{r['memory_bytes'] / 2**20:>10.2f}"
        lines.append(f"{name:<52}{figures}")
    return "\n".join(lines)


def spots_text(spots: list[HotSpot]) -> str:
    """The hot spots, one line each."""
    if not spots:
        return "no concatenation feeds a convolution and no row norm was found"
    lines = [f"{'removable µs':>13}{'measured µs':>13}  what our operators would take"]
    for s in spots[:20]:
        times = f" ({s.count}×)" if s.count > 1 else ""
        lines.append(f"{s.removable_us:>13.1f}{s.time_us:>13.1f}  {s.operator} at {s.where}{times}: {s.text}")
    return "\n".join(lines)


def _inputs(torch: Any, made: Any, args: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """(module, inputs) on the wanted device and in the wanted type."""
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, torch.nn.Module):
        raise CutefuseError(f"{args.target} returned {type(module).__name__}; it must return a torch.nn.Module")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    module = module.eval().to(device)
    module = module.to(dtype) if dtype else module
    if inputs is None:
        if not args.shape:
            raise CutefuseError(
                f"{args.target} returned no inputs; return (module, inputs) or give --shape 1x3x224x224"
            )
        torch.manual_seed(1)
        inputs = tuple(torch.randn(s) for s in parse_shapes(args.shape))
    inputs = tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    return module, tuple(
        x.to(device, dtype if dtype and x.is_floating_point() else x.dtype) if isinstance(x, torch.Tensor) else x
        for x in inputs
    )


def main(argv: list[str] | None = None) -> int:
    """`cutefuse profile-torch module:factory [--shape 1x3x224x224]`."""
    parser = argparse.ArgumentParser(prog="cutefuse profile-torch", allow_abbrev=False, description=__doc__)
    parser.add_argument("target", help="module:factory; it returns a module, or (module, inputs)")
    parser.add_argument("--shape", action="append", metavar="1x3x224x224", help="shape of an input, repeatable")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="convert module and inputs")
    parser.add_argument("--device", help="cuda or cpu (cuda where there is one)")
    parser.add_argument("--iterations", type=int, default=10, help="profiled iterations (10)")
    parser.add_argument("--rows", type=int, default=15, help="rows of each table (15)")
    parser.add_argument("-o", "--outdir", type=Path, default=Path("torch_profile"), help="folder (torch_profile)")
    add_json(parser)
    args = parser.parse_args(argv)

    def command() -> int:
        if args.iterations < 1:
            raise CutefuseError(f"--iterations is {args.iterations}; give 1 or more")
        try:
            import torch
        except ImportError:
            raise CutefuseError("profile-torch needs PyTorch; install it with `pip install torch`") from None
        module, inputs = _inputs(torch, load(args.target), args)
        make_folder(args.outdir)
        trace = args.outdir / "trace.json"
        events = measure(torch, module, inputs, args.iterations, trace)
        with json_alone(args.json) as show:
            show(write(events, args.iterations, args.outdir, args.rows))
            print(
                f"\nfigures in {args.outdir / 'profile.json'}, time line in {trace} (chrome://tracing, ui.perfetto.dev)"
            )
        return 0

    return run_command(command)


def write(events: list[Event], iterations: int, outdir: Path, rows: int) -> dict[str, Any]:
    """Print the tables, write profile.json and return what it holds."""
    device = any(e.device_us for e in events)
    operators, regions, spots = (
        by_operator(events, iterations),
        by_region(events, iterations),
        hot_spots(events, iterations),
    )
    print(text_table(operators, "operator", rows, device))
    print("\n" + text_table(regions, "module", rows, device, whole=True))
    print("\n" + spots_text(spots))
    figures = {
        "schema": 1, "iterations": iterations, "device_times": device, "operators": operators, "modules": regions,
        "hot_spots": [vars(s) for s in spots],
    }  # fmt: skip
    write_json(outdir / "profile.json", figures)
    return figures


if __name__ == "__main__":
    sys.exit(main())
