"""What `cutefuse patch` prints: whose time it is, what is saved of how much, the sites that matter, and why not others.

At most 40 lines of 80 columns or little more; `--verbose` adds every candidate, every node and every fault.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cutefuse import table
from cutefuse.commands import next_step
from cutefuse.match.explain import cause_of, sentence
from cutefuse.match.site import EXCLUDED, FUSED, LEFT_OUT, MERGED, REFUSED
from cutefuse.optimize import oracle
from cutefuse.rewrite.outlook import Outlook, is_float32
from cutefuse.rewrite.patch import Result
from cutefuse.rewrite.prove import failure, words
from cutefuse.select.price import MODELLED, PROFILED, TIMED

BASES = {PROFILED: "your profile", TIMED: "times taken on this GPU", MODELLED: "the time model"}
LIMITS = {"float16": "float16 ends at 65504", "bfloat16": "bfloat16 ends at 3.39e38"}
MOST_NAMED = 3  # nodes that a sentence names
MOST_SITES = 10  # that the table shows
MOST_GROUPS = 6  # of reasons, with an example each
COLUMNS = 80
PROBLEM = 34  # characters of a problem, "32+32+32->64 1x1 @160x160 Silu"
REASON = 200  # characters of an example's reason


def show(
    result: Result, verbose: bool = False, outlooks: Sequence[Outlook] = (), typed: Sequence[str] | None = None
) -> None:
    """Print a result. outlooks: see cutefuse.rewrite.outlook.foresee. typed: the words of the command line behind
    `cutefuse patch`, from which it makes a further command; None where another command was typed."""
    report = result.report
    lines = [_target(report["prediction"], report["sm"]), *_targets(outlooks), _counts(report["summary"])]
    if verbose and report["summary"]["refused_by"]:
        lines.append(sentence(report["summary"]["refused_by"]))
    lines += [*_prediction(report), *filter(None, [oracle.sentence(report)]), *_sizes(report)]
    lines += (advice := _float16(report, outlooks, typed))
    print("\n".join(lines))
    if verbose:
        _everything(report)
    else:
        for line in (*_best(report["sites"]), *_groups(report["sites"]), *_notes(report["sites"])):
            print(line)
    lines = [*_nodes(report["summary"]), *_branches(report), *_silus(report), *_types(report)]
    lines += [*_faults(report["known_faults"], verbose), *report["unused_options"]]
    for line in filter(None, (*lines, report["clean"]["stale_sizes"], report["clean"]["left"])):
        print(line)
    if proof := report["verify"]:
        if proof["passed"]:
            print("\n".join(words(proof, (report["conversion"] or {}).get("dtype", ""))))
        else:
            output = Path(report["output"]["path"])
            kept = f", and {output} and its report are still those of an earlier run" if output.exists() else ""
            print(f"error: verification failed ({failure(proof)}); no model was written{kept}", file=sys.stderr)
    if result.output:
        print(f"wrote {result.output} and {result.report_path}")
        next_step.after_patch(result.output, report)
    elif result.exit_code == 3:
        print(_nothing(report, bool(advice)))


# ------------------------------------------------------------------------------------------------------- the target
def _target(about: dict[str, Any], sm: int) -> str:
    """Which engine and GPU it is about, first of all, and how to name another."""
    engine = about["engine"] + (" (the newest known; --trt-version names another)" if about["engine_assumed"] else "")
    gpu = about["gpu"]
    if others := about["gpu_others"]:
        gpu += f" (the name fits {', '.join(others)} too: --gpu takes the whole one)"
    if about["gpu_rates"] != about["gpu"]:
        gpu = f"a GPU of {gpu} (none is known, another one's peak rates stand for it; --gpu names yours)"
    elif about["gpu_assumed"] and sm:
        gpu += f" (the usual one of compute capability {sm / 10}; --gpu names another)"
    elif about["gpu_assumed"]:
        gpu += " (assumed: --gpu 'RTX 4090' or --sm 89 names another)"
    return f"target: {engine} on {gpu}"


def _targets(outlooks: Sequence[Outlook]) -> list[str]:
    """What is fused and saved on each GPU, side by side; nothing for one alone."""
    own = [o for o in outlooks if not o.dtype]
    if len(own) < 2:
        return []
    lowered = {o.gpu: o for o in outlooks if o.dtype and o.gpu}
    headings = ["GPU", "fused", "saved", *(["with --dtype fp16: fused", "saved"] if lowered else [])]
    rows = []
    for i, o in enumerate(own):
        low = lowered.get(o.gpu)
        name = f"{o.gpu} (this run)" if i == 0 else o.gpu
        rows.append([name, o.fused, _saved(o), *([low.fused, _saved(low)] if low else [])])
    return ["  " + line for line in table.aligned(headings, rows, numbers=(1, 2, 3, 4))]


def _saved(o: Outlook) -> str:
    if o.gain_us is None:
        return "?"
    return f"{o.gain_us:.0f} us" + ("" if o.share is None else f", {o.share:.0%}")


# --------------------------------------------------------------------------------------------------------- the sums
def _counts(summary: dict[str, Any]) -> str:
    known = {s: summary[s.replace(" ", "_")] for s in (FUSED, MERGED, LEFT_OUT, REFUSED, EXCLUDED)}
    counts = ", ".join(f"{count} {status}" for status, count in known.items() if count or status == FUSED)
    saved, found = table.scaled(summary["bytes_saved"], 1e6), table.counted(summary["candidates"], "candidate")
    return f"{found}: {counts}; {saved} MB of traffic gone; {summary['seconds']} s"


def _prediction(report: dict[str, Any]) -> list[str]:
    """Sentences on what the fused sites should save together: of how much, by whose word, and what is not known."""
    summary, about = report["summary"], report["prediction"]
    bases = Counter(s["basis"] for s in report["sites"] if s["status"] == FUSED and s["basis"])
    found = []
    if summary["gain_us"] is not None and bases:
        by = " and ".join(f"{BASES[basis]} ({table.counted(n, 'site')})" for basis, n in sorted(bases.items()))
        whole = summary["plain_us"]
        part = f" of about {whole:.0f} us, {abs(summary['gain_us']) / whole:.0%}" if whole else " of an unknown whole"
        what = f"{summary['gain_us']:.1f} us saved" if summary["gain_us"] >= 0 else f"{-summary['gain_us']:.1f} us lost"
        found.append(f"predicted: {what}{part}, in {about['engine']} on {about['gpu']}")
        against = sorted({s["priced_by"] for s in report["sites"] if s["status"] == FUSED and s["priced_by"]})
        found.append(f"  by {by}: {'; '.join(against)}")
    if casts := (report["conversion"] or {}).get("casts"):
        dtype, size = report["conversion"]["dtype"], table.scaled(report["conversion"]["cast_bytes"], 1e6)
        which = table.counted(casts, "Cast")
        found.append(f"{which} to and from {dtype} stand beside the fused nodes; both totals count their {size} MB")
    if unknown := summary["gain_unknown"]:
        found.append(f"what {unknown} of the fused sites save is not known; --min-gain leaves such sites out")
    return found


def _sizes(report: dict[str, Any]) -> list[str]:
    """Which sizes were assumed, and which have to be given for figures."""
    found = []
    if assumed := report["assumed_shapes"]:
        named = ", ".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in assumed.items())
        found.append(f"the batch is open; figures are for {named} (--input-shape gives another; the model stays open)")
    if still := report["open_inputs"]:
        words = " ".join(
            f"--input-shape {name}:{'x'.join('?' if d < 0 else str(d) for d in dims)}" for name, dims in still.items()
        )
        found.append(f"figures need sizes, a number for each ?: {words}")
    return found


def _float16(report: dict[str, Any], outlooks: Sequence[Outlook], typed: Sequence[str] | None) -> list[str]:
    """What a float32 model would gain in float16, with the command."""
    if typed is None or not is_float32(report):
        return []
    low = next((o for o in outlooks if o.dtype), None)
    least_us = max(report["summary"]["gain_us"] or 0.0, 0.0)
    if low and (not low.fused or (low.gain_us is not None and low.gain_us <= least_us)):
        return []
    command = next_step.typed("patch", *typed, "--dtype", "fp16")
    told = f"would fuse {table.counted(low.fused, 'site')}, {_saved(low)} saved" if low else "lets more sites pay"
    return [f"the model is float32; float16 {told}: {command}"]


# --------------------------------------------------------------------------------------------------------- the sites
def _best(sites: Sequence[dict[str, Any]]) -> list[str]:
    fused = [s for s in sites if s["status"] == FUSED]
    if not fused:
        return []
    fused.sort(key=lambda s: (-(s["gain_us"] or 0.0), -(s["bytes_saved"] or 0)))
    best = fused[:MOST_SITES]
    cut = _common([s["name"] for s in best])
    problems = [_shortened(s["title"] or s["operator"], PROBLEM) for s in best]
    figures = [(_us(s["gain_us"]), table.scaled(s["bytes_saved"], 1e6)) for s in best]
    room = COLUMNS - 2 * 4 - sum(max(map(len, column)) for column in (*zip(*figures, strict=True), problems))
    rows = [
        [*own, problem, _shortened(s["name"][len(cut) :], room)]
        for s, own, problem in zip(best, figures, problems, strict=True)
    ]
    which = f"the {MOST_SITES} of {len(fused)} fused sites that save most" if fused[MOST_SITES:] else "the fused sites"
    types = sorted({s["dtype"] for s in fused})
    begin = f"; names begin with {cut}" if cut else ""
    title = f"{which}: us and MB saved ({', '.join(types)}{begin}; --verbose lists all)"
    return [title, *("  " + line for line in table.aligned(["us", "MB", "problem", "site"], rows, (0, 1)))]


def _us(gain_us: float | None) -> str:
    return "?" if gain_us is None else f"{gain_us:.1f}"


def _groups(sites: Sequence[dict[str, Any]]) -> list[str]:
    """The sites that stay outside, grouped by reason, with a count and one example each."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for s in sites:
        if s["status"] in (LEFT_OUT, REFUSED, EXCLUDED):
            groups.setdefault((s["status"], _why(s)), []).append(s)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    lines = []
    for (status, why), found in ordered[:MOST_GROUPS]:
        example = max(found, key=lambda s: abs(s["gain_us"] or 0.0))
        name = _shortened(example["name"], COLUMNS // 2)
        lines.append(f"{len(found)} {status}, {why}; as {name}: {_shortened(example['reason'], REASON, end=True)}")
    if rest := ordered[MOST_GROUPS:]:
        lines.append(f"{sum(len(found) for _, found in rest)} more for {len(rest)} other reasons (--verbose)")
    return lines


def _why(site: dict[str, Any]) -> str:
    """The reason's kind in a few words."""
    if site["status"] == REFUSED:
        return cause_of(site["reason"])
    if site["status"] == EXCLUDED:
        return "by your filters"
    if site["gain_us"] is None:
        return "gain not known"
    return "would cost time" if site["gain_us"] < -0.05 else "would save too little"


def _notes(sites: Sequence[dict[str, Any]]) -> list[str]:
    notes = Counter(note for s in sites if s["status"] == FUSED for note in s["notes"])
    return [f"{count} fused with a note: {_shortened(note, REASON, end=True)}" for note, count in notes.most_common(3)]


def _nodes(summary: dict[str, Any]) -> list[str]:
    """What happened to the nodes, in a line."""
    old, new = summary["ops_before"], summary["ops_after"]
    gone = [f"{op} {old[op]}->{new.get(op, 0)}" for op in sorted(old) if old[op] != new.get(op, 0)]
    return [f"nodes: {summary['nodes_before']}->{summary['nodes_after']}; {', '.join(gone)}"] if gone else []


def _common(names: Sequence[str]) -> str:
    """What all names begin with, up to a "/" or "."."""
    same = os.path.commonprefix(list(names))
    end = max(same.rfind("/"), same.rfind(".")) + 1
    return same[:end] if len(names) > 1 and end > 1 else ""


def _shortened(text: str, most: int, end: bool = False) -> str:
    """A text in so many characters: without its middle, or without its end."""
    if len(text) <= most:
        return text
    if end:
        return text[: most - 3].rstrip() + "..."
    tail = (most - 2) // 2
    return text[: most - 3 - tail] + "..." + text[-tail:]


def _everything(report: dict[str, Any]) -> None:
    """All candidates as a table, all node counts, and the nodes, tensors and shapes of every site."""
    rows = []
    for s in report["sites"]:
        gflop = table.scaled(s["flops"], 1e9) if s["op_type"] else ""
        saved = table.scaled(s["bytes_saved"], 1e6) if s["status"] == FUSED else ""
        gain = _us(s["gain_us"]) if s["status"] == FUSED else ""
        notes = f" ({'; '.join(s['notes'])})" if s["notes"] else ""
        verdict = f"fused as {s['op_type']}" if s["status"] == FUSED else f"{s['status']}: {s['reason']}"
        rows.append([s["name"], s["title"] or s["operator"], s["dtype"] or "", gflop, saved, gain, verdict + notes])
    headings = ["site", "problem", "type", "GFLOP", "MB saved", "us saved", "verdict"]
    table.show("candidates", headings, rows, numbers=(3, 4, 5))
    for s in report["sites"]:
        print(f"{s['name']}: nodes {', '.join(s['nodes'])}; inputs {', '.join(s['inputs'])}; shapes {s['shapes']}")
    old, new = report["summary"]["ops_before"], report["summary"]["ops_after"]
    changed = [[op, old.get(op, 0), new.get(op, 0)] for op in sorted({*old, *new}) if old.get(op, 0) != new.get(op, 0)]
    table.show("nodes", ["op_type", "before", "after"], changed, numbers=(1, 2))


# --------------------------------------------------------------------------------------------------------- the rest
def _branches(report: dict[str, Any]) -> list[str]:
    """The sums of convolutions that are one convolution now."""
    found = report["branches"]
    if not found:
        return []
    convs, sums = sum(b["convolutions"] for b in found), table.counted(len(found), "sum")
    return [f"{convs} Convs in {sums} of one tensor's Convs are 1 Conv a sum, as {found[0]['name']}"]


def _silus(report: dict[str, Any]) -> list[str]:
    """What became of the SiLUs outside, where the engine could compute them inside a convolution."""
    silu, found = report["silu"], []
    if silu["tanh"]:
        found.append(f"{len(silu['tanh'])} SiLUs outside are written with tanh, which TensorRT 11 computes in the Conv")
    elif silu["outside"] and report["prediction"]["fuses_tanh"]:
        found.append(f"SiLUs outside: {silu['outside']}; --tanh-silu writes them as TensorRT 11 computes them inside")
    why = {reason: [n for n, r in silu["left"].items() if r == reason] for reason in silu["left"].values()}
    return found + [f"{len(names)} SiLUs keep their form ({names[0]}, ...): {reason}" for reason, names in why.items()]


def _types(report: dict[str, Any]) -> Iterable[str]:
    """Which nodes stay in float32 because of their weights."""
    if not (conversion := report["conversion"]) or not (found := conversion["overflows"]):
        return
    named = [f"{o['node']} ('{o['tensor']}' holds {o['value']:.3g})" for o in found]
    stays = "stays" if len(found) == 1 else "stay"
    yield f"{LIMITS[conversion['dtype']]}, so {table.some(named, MOST_NAMED)} {stays} in float32"


def _faults(faults: Sequence[dict[str, Any]], verbose: bool) -> Iterable[str]:
    """What known faults of TensorRT do to nodes of this model; those that no node meets any more with --verbose."""
    for fault in faults:
        stays, fused = fault["stays"], fault["fused"]
        if not stays and not verbose:
            continue
        count = f"{len(stays)} of {len(stays) + len(fused)} such nodes stay outside: {table.some(stays, MOST_NAMED)}"
        compared = f"{count}; compare the engine with the model (cutefuse accuracy)"
        rest = compared if stays else f"all {len(fused)} are fused"
        about = f"reported fault of TensorRT {fault['versions']} ({fault['source']}): {fault['title']}"
        yield f"{about}; {fault['advice']}; {rest}"


def _nothing(report: dict[str, Any], advised: bool) -> str:
    if not report["summary"]["left_out"]:
        return "nothing to patch; nothing was written"
    if advised:
        return "no site would pay in float32; nothing was written (the line above says what float16 would fuse)"
    return "no site would pay; nothing was written (--all fuses every legal site)"


def behind_patch(argv: Sequence[str] | None) -> list[str]:
    """The words of the command line behind `patch`."""
    words = list(sys.argv[1:] if argv is None else argv)
    return words[1:] if argv is None and words[:1] == ["patch"] else words
