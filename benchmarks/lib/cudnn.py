"""cuDNN's graph API as a peer: a convolution, bare or fused, by the fastest of all plans of its three heuristics.

cudnn-frontend (pip install nvidia-cudnn-frontend, which needs no other package) names up to 90 plans a convolution.
Nearly all are built at once. The others are compiled for a second or more while Python stands still, so that processes
side by side build them without the GPU (`compiled`), and the one that measures loads them from bytes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.lib import pool, timing
from benchmarks.lib.convolutions import Convolution
from benchmarks.lib.timing import Launch
from cutefuse.errors import CutefuseError

X, W, BIAS, RESIDUAL, Y = 1, 2, 3, 4, 5  # what a graph calls its tensors
POINTWISE = {"Relu": "relu", "Silu": "swish", "Sigmoid": "sigmoid", "Tanh": "tanh", "Gelu": "gelu"}
LARGEST_ERROR = 2e-3  # of a whole output: float16 makes 3e-4, and a plan beyond this does not sum in float32
WORKSPACE_BYTES = 512 << 20  # a plan that needs more is left out
ROUGH_LAUNCHES, AHEAD_CYCLES = 4, 1_500_000  # the host enqueues while the GPU waits most of a millisecond
NEAR, MOST = 1.4, 12  # plans within this of the best rough time, and how many of them, are timed well
COMPILING = 0.5  # of the time for `times`, at most
GRACE_S = 10.0  # for what is under way at the end
RESTARTS = 4

Plans = Mapping["Job", Mapping[str, bytes]]


@dataclass(frozen=True)
class Job:
    """What is computed: a convolution of float16 pixels in float32 sums; `fused`, with a bias, an activation (the
    suffix of an op_type) and a residual "before" or "after" it."""

    conv: Convolution
    fused: bool = False
    activation: str = ""
    residual: str = ""

    def forms(self) -> list[Job]:
        """The job, and the one whose channels fill whole vectors of 8, as TensorRT lays them out."""
        c, k = (-(-channels // 8) * 8 for channels in (self.conv.C, self.conv.K))
        padded = replace(self, conv=replace(self.conv, C=c, K=k))
        return [self] if padded == self or self.conv.groups > 1 else [self, padded]


@dataclass(frozen=True)
class Best:
    """The fastest plan of a job."""

    time_us: float
    plan: str


def frontend() -> Any:
    """The package. Raises CutefuseError where it cannot be loaded."""
    try:
        import torch  # noqa: F401  loads cuDNN, and cuBLASLt: where cuDNN finds none, it ends the process

        return importlib.import_module("cudnn")
    except Exception as error:  # one of its own libraries may be what is missing
        raise CutefuseError(
            f"cuDNN's graph API cannot be asked ({pool.sentence(error)}); pip install torch nvidia-cudnn-frontend"
        ) from None


def planned(cudnn: Any, job: Job, **where: Any) -> tuple[Any, list[str]]:
    """(graph, names of its plans, best guess first); `where`: handle or device_property. Raises what cuDNN says."""
    if job.activation not in ("", *POINTWISE):
        raise CutefuseError(f"cuDNN has no {job.activation} behind a convolution; choose from {', '.join(POINTWISE)}")
    conv, half, single = job.conv, cudnn.data_type.HALF, cudnn.data_type.FLOAT
    n, k, p, q = conv.output
    c = conv.C // conv.groups
    graph = cudnn.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single, **where)
    x = graph.tensor(uid=X, dim=[n, conv.C, conv.H, conv.W], stride=_nhwc(conv.C, conv.H, conv.W), data_type=half)
    w = graph.tensor(uid=W, dim=[k, c, conv.R, conv.S], stride=_nhwc(c, conv.R, conv.S), data_type=half)
    y = graph.conv_fprop(
        image=x, weight=w, pre_padding=list(conv.pads[:2]), post_padding=list(conv.pads[2:]),
        stride=list(conv.strides), dilation=list(conv.dilations),
    )  # fmt: skip
    if job.fused:
        y = graph.bias(input=y, bias=graph.tensor(uid=BIAS, dim=[1, k, 1, 1], stride=_nhwc(k, 1, 1), data_type=half))
        z = None
        if job.residual:
            z = graph.tensor(uid=RESIDUAL, dim=[n, k, p, q], stride=_nhwc(k, p, q), data_type=half)
        if job.residual == "before":
            y = graph.add(a=y, b=z)
        if job.activation:
            y = getattr(graph, POINTWISE[job.activation])(input=y)
        if job.residual == "after":
            y = graph.add(a=y, b=z)
    y.set_output(True).set_data_type(half).set_dim([n, k, p, q]).set_stride(_nhwc(k, p, q))
    y.set_uid(Y)
    graph.validate()
    graph.build_operation_graph()
    modes = cudnn.heur_mode
    graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
    return graph, [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]


def _nhwc(c: int, h: int, w: int) -> list[int]:
    return [h * w * c, 1, w * c, c]


# ------------------------------------------------------------------------------------- compiling, beside each other
@dataclass(frozen=True)
class Chunk:
    """Jobs of one process that compiles; at `until` (of time.monotonic) it hands over what it has."""

    jobs: tuple[Job, ...]
    until: float


def build_plans(chunk: Chunk, talk: pool.Talk) -> dict[Job, dict[str, bytes]]:
    """name -> bytes of every plan that could be built."""
    cudnn, found = frontend(), dict[Job, dict[str, bytes]]()
    device = cudnn.create_device_properties(0)
    for job in chunk.jobs:
        try:
            graph, names = planned(cudnn, job, device_property=device)
        except Exception:  # who measures it will say why
            continue
        made = found[job] = {}
        for i, name in enumerate(names):
            if time.monotonic() > chunk.until:
                return found
            with contextlib.suppress(Exception):  # a plan that this cuDNN cannot build is no peer
                graph.build_plan_at_index(i)
                made[name] = bytes(graph.serialize(as_bytes=True))
    return found


def compiled(jobs: Sequence[Job], workers: int, until: float, folder: Path) -> dict[Job, dict[str, bytes]]:
    """The plans of all forms of the jobs; a job that is missing is left to the process that measures."""
    forms = list(dict.fromkeys(form for job in jobs for form in job.forms()))
    count = max(min(workers, len(forms)), 1)
    chunks = [Chunk(tuple(forms[i::count]), until) for i in range(count)]
    found: dict[Job, dict[str, bytes]] = {}
    limit_s = max(until - time.monotonic(), 0) + GRACE_S
    for _, result, _ in pool.run(build_plans, chunks, count, folder, limit_s, lambda task, text: None):
        found |= result or {}  # of a process that crashed nothing is known; the jobs are built again
    return found


# ----------------------------------------------------------------------------------------------------- on the GPU
class Gpu:
    """A handle of cuDNN and a workspace on PyTorch's current device."""

    def __init__(self) -> None:
        self.cudnn = frontend()
        import torch

        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.handle = self.cudnn.create_handle()  # on the device that has just become current

    def plan(self, graph: Any, index: int | None) -> Plan:
        """A plan that was built: of a graph that was loaded (None), or one of those that a graph lists."""
        size = graph.get_workspace_size() if index is None else graph.get_workspace_size_plan_at_index(index)
        if size > WORKSPACE_BYTES:
            raise CutefuseError(f"a plan needs {size >> 20} MiB of workspace")
        return Plan(self, graph, index)


@cache
def gpu() -> Gpu:
    """The one of this process."""
    return Gpu()


@dataclass(frozen=True)
class Plan:
    gpu: Gpu
    graph: Any
    index: int | None

    def run(self, given: Mapping[int, Any]) -> None:
        """Enqueue on PyTorch's current stream."""
        import torch

        own, tensors = self.gpu, dict(given)
        own.cudnn.set_stream(handle=own.handle, stream=torch.cuda.current_stream().cuda_stream)
        if self.index is None:
            self.graph.execute(tensors, own.workspace, handle=own.handle)
        else:
            self.graph.execute_plan_at_index(tensors, own.workspace, self.index, handle=own.handle)


@dataclass(frozen=True)
class Source:
    """The plans of a job by name; those without bytes, or whose bytes do not load, are built here."""

    gpu: Gpu
    job: Job
    stored: Mapping[str, bytes]

    @cached_property
    def planned(self) -> tuple[Any, list[str]]:
        return planned(self.gpu.cudnn, self.job, handle=self.gpu.handle)

    def make(self, name: str) -> Plan:
        if name in self.stored:
            graph = self.gpu.cudnn.pygraph(handle=self.gpu.handle)
            with contextlib.suppress(Exception):
                graph.deserialize(self.gpu.handle, self.stored[name])
                return self.gpu.plan(graph, None)
        graph, names = self.planned
        index = names.index(name)
        graph.build_plan_at_index(index)
        return self.gpu.plan(graph, index)


def operands(job: Job, sets: int, device: str = "cuda") -> list[dict[int, Any]]:
    """The tensors of each set by their numbers, with values like a network's; all sets share filter and bias."""
    import torch

    conv, generator = job.conv, torch.Generator(device).manual_seed(0)
    n, k, p, q = conv.output
    c = conv.C // conv.groups

    def image(n: int, c: int, h: int, w: int, deviation: float = 1.0) -> Any:
        pixels = torch.empty(n, h, w, c, dtype=torch.float16, device=device)
        return pixels.normal_(0, deviation, generator=generator).permute(0, 3, 1, 2)

    shared = {W: image(k, c, conv.R, conv.S, (c * conv.R * conv.S) ** -0.5)}
    if job.fused:
        shared[BIAS] = image(1, k, 1, 1)
    own = {Y: (n, k, p, q), X: (n, conv.C, conv.H, conv.W)} | ({RESIDUAL: (n, k, p, q)} if job.residual else {})
    return [shared | {uid: image(*dims) for uid, dims in own.items()} for _ in range(sets)]


def computed(job: Job, given: Mapping[int, Any]) -> Any:
    """What PyTorch makes of the same tensors in float32."""
    import problems
    import torch
    import torch.nn.functional as F

    conv = job.conv
    top, left, bottom, right = conv.pads
    x, w = F.pad(given[X].float(), (left, right, top, bottom)).contiguous(), given[W].float().contiguous()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        y = F.conv2d(x, w, None, conv.strides, 0, conv.dilations, conv.groups)
    if job.fused:
        y = y + given[BIAS].float()
        y = y + given[RESIDUAL].float() if job.residual == "before" else y
        y = problems.activate(y, job.activation)
        y = y + given[RESIDUAL].float() if job.residual == "after" else y
    return y


def candidates(
    job: Job, plans: Plans, sets: int, skip: Sequence[str] = (), note: Callable[[str], None] = lambda name: None
) -> dict[str, Launch]:
    """The launches that a quick look finds near the fastest, of all plans that are right, by name.

    note: is told each plan before it runs. Raises CutefuseError where none is right, and what PyTorch says where a plan
    has broken the GPU's state, so that nothing else could run in this process.
    """
    import torch

    launches, rough, reasons = dict[str, Launch](), dict[str, float](), list[str]()
    for form in job.forms():
        source = Source(gpu(), form, plans.get(form, {}))
        try:
            _, names = source.planned
        except Exception as error:
            reasons.append(pool.sentence(error))
            continue
        given = operands(form, sets)
        want = computed(form, given[0])
        for name in names:
            key = name if form == job else f"{name}, padded"
            if key in skip:
                continue
            note(key)
            try:
                plan = source.make(name)
                given[0][Y].fill_(float("nan"))
                plan.run(given[0])
                error_ = float((given[0][Y].float() - want).norm() / want.norm())
                if not error_ <= LARGEST_ERROR:
                    raise CutefuseError(f"plan {name} is off by {error_:.1e}")
                launch = partial(_launch, plan, given)
                rough[key] = _rough_us(launch, sets)
                launches[key] = launch
            except Exception as error:
                reasons.append(pool.sentence(error))
                torch.cuda.synchronize()  # raises where the GPU's state is broken
    if not rough:
        raise CutefuseError(f"no plan of cuDNN computes it: {reasons[0] if reasons else 'all were skipped'}")
    near = sorted((us, name) for name, us in rough.items() if us <= NEAR * min(rough.values()))
    return {name: launches[name] for _, name in near[:MOST]}


def _launch(plan: Plan, given: Sequence[Mapping[int, Any]], i: int) -> None:
    plan.run(given[i])


def _rough_us(launch: Launch, sets: int) -> float:
    """Microseconds of a launch, without a graph."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    for i in range(ROUGH_LAUNCHES):
        launch(i % sets)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / ROUGH_LAUNCHES


def fastest(job: Job, plans: Plans, skip: Sequence[str], note: Callable[[str], None]) -> Best:
    """The best plan by the method that times our own tiles: repeated inside of a CUDA graph, in turns, operands in the
    L2 cache where they would be in a network."""
    from cutefuse.engines.pytorch import tile_times

    conv, effort = job.conv, tile_times.THOROUGH
    effort = replace(effort, graph_us=500.0, least_copies=8, most_copies=100)
    read_bytes = 2 * (conv.N * conv.C * conv.H * conv.W + conv.K * conv.C // conv.groups * conv.R * conv.S)
    sets = tile_times.operand_sets(read_bytes, timing.l2_bytes())
    launches = candidates(job, plans, sets, skip, note)
    names, graphs = list(launches), dict[int, tile_times.Repeated]()
    for i, name in enumerate(names):
        note(name)
        graphs[i] = tile_times.Repeated(map(launches[name], cycle(range(sets))).__next__, effort)
    times = tile_times.in_turns(graphs, effort.first_rounds)
    near = {i: graphs[i] for i in graphs if times[i] <= tile_times.NEAR * min(times.values())}
    times = tile_times.in_turns(near, effort.rounds)
    best = min(times, key=lambda i: times[i])
    return Best(times[best], names[best])


# --------------------------------------------------------------------------- many jobs, in a process of their own
@dataclass(frozen=True)
class Measuring:
    """Jobs of the process that measures. It writes what it does into `journal`, a JSON object a line, and ends at
    `until`. skip: plans that have ended such a process."""

    jobs: tuple[Job, ...]
    plans: Path
    journal: Path
    skip: frozenset[tuple[Job, str]]
    until: float


def measure(task: Measuring, talk: pool.Talk) -> None:
    """See `Measuring`."""
    gpu()
    import torch

    plans = pickle.loads(task.plans.read_bytes())
    gc.collect()
    gc.freeze()  # every capture of a graph collects garbage
    with task.journal.open("w", encoding="utf-8") as out:
        for i, job in enumerate(task.jobs):
            if time.monotonic() > task.until:
                return

            def note(name: str, i: int = i) -> None:
                _write(out, job=i, tries=name)

            try:
                best = fastest(job, plans, [name for own, name in task.skip if own == job], note)
                _write(out, job=i, us=best.time_us, plan=best.plan)
            except Exception as error:  # a job that has none must not cost the others
                torch.cuda.synchronize()  # raises where the GPU's state is broken
                torch.cuda.empty_cache()
                _write(out, job=i, failure=str(error) if isinstance(error, CutefuseError) else pool.sentence(error))


def _write(out: Any, **facts: Any) -> None:
    out.write(json.dumps(facts) + "\n")
    out.flush()


def times(jobs: Sequence[Job], workers: int, limit_s: float, folder: Path) -> dict[Job, Best | str]:
    """The fastest plan of each job, or why it has none. A job that `limit_s` seconds did not suffice for is missing.

    folder: for logs and plans. A plan that ends the process which measures is left out, and the rest goes on.
    """
    begin = time.monotonic()
    until = begin + max(limit_s - GRACE_S, 0)
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / "plans.pickle"
    stored.write_bytes(pickle.dumps(compiled(jobs, workers, begin + COMPILING * limit_s - GRACE_S, folder / "build")))
    found: dict[Job, Best | str] = {}
    skip: frozenset[tuple[Job, str]] = frozenset()
    for attempt in range(RESTARTS):
        left, left_s = tuple(job for job in jobs if job not in found), until - time.monotonic()
        if not left or left_s <= 0:
            break
        task = Measuring(left, stored, folder / f"journal{attempt}", skip, until)
        own = folder / f"measure{attempt}"
        ((_, _, failure),) = pool.run(measure, [task], 1, own, left_s + GRACE_S, lambda task, text: None)
        tried = _read(task, found)
        if not failure:
            break
        if tried is None:  # it has not come as far as a plan
            found |= {job: failure for job in left if job not in found}
        else:
            skip |= {tried}
    else:
        found |= {job: failure for job in jobs if job not in found}
    return found


def _read(task: Measuring, found: dict[Job, Best | str]) -> tuple[Job, str] | None:
    """Take over what a process has measured; what it tried last where nothing came of it."""
    tried = None
    lines = task.journal.read_text(encoding="utf-8").splitlines() if task.journal.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the process ended within it
            continue
        job, tried = task.jobs[row["job"]], None
        if "tries" in row:
            tried = job, row["tries"]
        else:
            found[job] = row["failure"] if "failure" in row else Best(row["us"], row["plan"])
    return tried
