"""What the convolutions of a network take alone, without bias and activation, each by cuDNN's fastest plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from benchmarks.lib import convolutions, cudnn
from benchmarks.lib.convolutions import Found
from benchmarks.lib.cudnn import Best, Job
from benchmarks.lib.network_model import in_float16
from benchmarks.lib.network_work import PLAIN, Task

Row = dict[str, Any]


def add(
    rows: Sequence[Row], tasks: Sequence[Task], jobs: int, limit_s: float, folder: Path, detail: bool
) -> None:  # fmt: skip
    """Give each measured row its `bare`, and each patched variant `over_bare`: its time under torch.compile over the
    sum. Distinct convolutions are timed once, in the order of the rows, within `limit_s`. detail: also one by one."""
    plain = {task.key: task.plain for task in tasks}
    measured = [(row, _found(plain[row["network"], row["batch"]])) for row in rows if "variants" in row]
    distinct = dict.fromkeys(Job(conv) for _, found in measured for conv in found.counts)
    best = cudnn.times(list(distinct), jobs, limit_s, folder) if distinct else {}
    for row, found in measured:
        row["bare"] = summed(found, best, detail)
        for name, own in row["variants"].items():
            if name != PLAIN and row["bare"]["us"] and "compile_us" in own:
                own["over_bare"] = own["compile_us"] / row["bare"]["us"]


def _found(path: Path) -> Found:
    return convolutions.of(onnx.load(str(path), load_external_data=False))


def summed(found: Found, best: Mapping[Job, Best | str], detail: bool) -> Row:
    """us: of all occurrences together, None where one has no time, and `reason` says why. left_out: Convs that are not
    2-D or whose sizes are not known; `unknown` names the latter."""
    times = {conv: best.get(Job(conv)) for conv in found.counts}
    known = {conv: time for conv, time in times.items() if isinstance(time, Best)}
    row: Row = {"us": None, "convolutions": sum(found.counts.values()), "distinct": len(times)}
    row |= {"left_out": found.left_out, "unknown": found.unknown}
    if failed := {conv: why for conv, why in times.items() if isinstance(why, str)}:
        conv, why = next(iter(failed.items()))
        alike = len(failed) == len(times) and len(set(failed.values())) == 1  # as without the package
        row["reason"] = why if alike else f"{len(failed)} of {len(times)} sizes have no time, as {conv}: {why}"
    elif not times:
        row["reason"] = "there is no 2-D convolution"
    elif len(known) < len(times):
        row["reason"] = f"{len(times) - len(known)} of {len(times)} sizes were not reached; give --bare more seconds"
    else:
        row["us"] = sum(found.counts[conv] * time.time_us for conv, time in known.items())
    if detail:
        row["shapes"] = [
            {"shape": str(conv), "occurrences": n, "gflop": conv.flops / 1e9}
            | ({"bare_us": known[conv].time_us, "plan": known[conv].plan} if conv in known else {})
            for conv, n in found.counts.items()
        ]
    return row


def listed(tasks: Sequence[Task]) -> Iterator[str]:
    """The distinct convolutions of each network, a line each, without a GPU."""
    for task in tasks:
        found = convolutions.of(in_float16(task))
        distinct, total = len(found.counts), sum(found.counts.values())
        yield f"{task.network} b{task.batch}: {distinct} distinct of {total} convolutions, {found.left_out} left out"
        yield from (f"  {n:3d}  {conv}  {conv.flops / 1e9:.3f} GFLOP" for conv, n in found.counts.items())
        yield from (f"  not known: {sentence}" for sentence in found.unknown)
