"""Runs two ONNX models on the same seeded inputs and compares every output."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from cutefuse.errors import VerificationError
from cutefuse.graph.body import DOMAIN
from cutefuse.graph.closeness import Judge, compare, passed, says_nothing
from cutefuse.graph.exact import in_float64
from cutefuse.graph.read import TYPE_NAMES, attribute, reads_of
from cutefuse.graph.runner import Runner, unfused_runner
from cutefuse.graph.shapes import fed
from cutefuse.graph.store import load_model, outside

# Sizes tried for axes without a size: (first axis, rows and columns of images, everything else).
FILLS = ((2, 64, 8), (1, 64, 8), (1, 128, 16), (1, 224, 16), (1, 32, 1), (1, 16, 1))
SCALES = (1.0, 1.0, 1 / 16, 1 / 256)  # of the inputs by which outputs are made to say something, with further seeds
MAX_ELEMENTS = 1 << 30
MAX_SITES = 256  # that are compared by themselves; all their tensors are in memory at once


def seeded_inputs(
    model: onnx.ModelProto, fill: Sequence[int], shapes: Mapping[str, Sequence[int]], seed: int, scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Random values for every graph input; an axis name has one size everywhere. Floats are normal times `scale`.

    `shapes` passed `check_shapes`. Raises VerificationError for an input that is no tensor or too large.
    """
    rng = np.random.default_rng(seed)
    sizes: dict[str, int] = {}
    inputs = {}
    for info in fed(model):
        kind = info.type.tensor_type
        ranked = kind.HasField("shape") or info.name in shapes
        if not info.type.HasField("tensor_type") or kind.elem_type not in TYPE_NAMES or not ranked:
            raise VerificationError(f"input '{info.name}' is no tensor of known rank and type; nothing is proven")
        dims = []
        for axis, d in enumerate(kind.shape.dim):
            default = fill[0] if axis == 0 else fill[1] if len(kind.shape.dim) == 4 and axis >= 2 else fill[2]
            named = sizes.setdefault(d.dim_param, default) if d.dim_param else default
            dims.append(d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else named)
        if info.name in shapes:
            dims = list(shapes[info.name])
            sizes.update((d.dim_param, s) for d, s in zip(kind.shape.dim, dims, strict=False) if d.dim_param)
        if math.prod(dims) > MAX_ELEMENTS:
            raise VerificationError(f"input '{info.name}' has {math.prod(dims)} elements; give a smaller --input-shape")
        inputs[info.name] = _random(rng, dims, TYPE_NAMES[kind.elem_type], scale)
    return inputs


def _random(rng: np.random.Generator, dims: Sequence[int], dtype: str, scale: float) -> np.ndarray:
    if dtype == "bool":
        return np.asarray(rng.random(dims) < 0.5)  # without axes the comparison gives a number, no array
    if "int" in dtype:
        return rng.integers(0, 2, dims).astype(dtype)
    return np.asarray(scale * rng.standard_normal(dims), np.dtype(dtype))  # without axes the product is no array


@dataclass(frozen=True)
class Probe:
    """A tensor that a fused site makes. `inner`: what the site's nodes make on the way to it, from its Conv on.
    `gain`: a norm's factors of the channels. `alike`: tensors that must be of its sizes; `wider`:
    but for their channels, of which a range is read. `fused`: whether a fused node makes it, and no Conv that was a sum
    of several."""

    site: str
    tensor: str
    inner: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    wider: bool = False
    gain: np.ndarray | None = field(default=None, compare=False)
    fused: bool = True


def verify(
    original: Path, patched: onnx.ModelProto, folder: Path, tolerance: float, shapes: Mapping[str, Sequence[int]],
    seed: int = 0, probes: Sequence[Probe] = (), converted: onnx.ModelProto | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare an ONNX file with its patched model (weights in `folder`), on all outputs and on the probed tensors.

    `converted` is the original after a type conversion and before any fusion, weights inside. The patched model is then
    judged against it, so that the verdict is about the fusion; what the conversion changed is under "conversion" and
    fails only where it makes infinities or NaN.

    The probed tensors, of at most MAX_SITES sites in graph order, become outputs of both models; sites that could not
    be probed are under "unprobed", Convs that were sums of several under "sums". If a model amplifies rounding errors
    (a QuantizeLinear rounds to the next step, a TopK picks another score), the plain comparison fails although every
    site is right: then both models compute every site and output again from the unfused one's values of the probed
    tensors, and that verdict counts; the plain figures of all tensors are under "end_to_end".

    Values that say nothing prove nothing: where the outputs of the original are NaN, infinite or the same everywhere,
    further seeds and smaller inputs are tried. Fails where a site then has no finite value, and where an output says
    nothing while a site before it does neither. Fails also where tensors that a fused node takes for equally large are
    not when the model runs.

    Raises VerificationError when an unfused model cannot be run: without a truth nothing is proven.
    """
    model = load_model(original)
    outputs = [o.name for o in model.graph.output]
    sites = list(dict.fromkeys(p.site for p in probes if p.fused))
    with tempfile.TemporaryDirectory() as spill:
        unfused = model if converted is None else outside(converted, Path(spill))
        base = original.parent if converted is None else Path(spill)
        chosen, unprobed = _choose(probes, unfused, patched)
        try:
            runner = unfused_runner(_with_outputs(unfused, _tensors(chosen, outputs)), base)
        except VerificationError as error:  # a tensor whose type ONNX Runtime cannot infer only costs the probes
            if not chosen:
                raise
            unprobed |= {p.site: str(error) for p in chosen}
            chosen, runner = [], unfused_runner(unfused, base)
        probed = _tensors(chosen, outputs)
        plain = runner if converted is None else unfused_runner(model, original.parent)
        fused = _behind_fused(patched)
        expected, feeds, tried = _truth(plain, model, shapes, seed, [n in fused for n in outputs])
        report: dict[str, Any] = {
            "seed": tried[-1], "seeds_tried": tried, "backend": runner.backend,
            "inputs": {k: list(v.shape) for k, v in feeds.items()}, "tolerance": tolerance, "fused_sites": len(sites),
            "unprobed": [{"name": s, "why": unprobed[s]} for s in sites if s in unprobed], "outputs": [], "sites": [],
            "sums": [],
        }  # fmt: skip
        if converted is not None:
            original_outputs, expected = expected, _run_converted(runner, feeds)
            pairs = zip(outputs, original_outputs, expected, strict=False)
            report["conversion"] = [{"name": n, **compare(a, b, tolerance)} for n, a, b in pairs]

        def inner(tensors: Sequence[str]) -> list[Any]:
            return Runner(_with_outputs(unfused, tensors), base, runner.reference)(feeds)[len(outputs) :]

        within = {p.tensor: p.inner for p in chosen}

        def exact(tensor: str) -> np.ndarray | None:
            return in_float64(unfused, base, tensor, within[tensor], feeds, inner)

        gains = {p.tensor: p.gain for p in chosen if p.gain is not None}
        judge = Judge([*outputs, *probed], len(outputs), expected, tolerance, within, inner, exact, gains)
        try:
            actual = Runner(_with_outputs(patched, probed), folder, runner.reference)(feeds)
        except Exception as error:
            report.update(passed=False, why=f"the patched model does not run: {' '.join(str(error).split())}")
            return report
        results = judge(actual)
        if chosen and not passed(results):
            local = _from_given((unfused, base), (patched, folder), runner.reference, judge, actual, feeds)
            if local is not None and passed(local):
                report["end_to_end"] = [{"name": name, **r} for name, r in results.items()]
                results = local
        for tensor, why in _of_other_sizes(chosen, unfused, feeds, inner).items():
            results[tensor] = results[tensor] | {"passed": False, "why": why}
    report["outputs"] = [{"name": name, **results[name]} for name in outputs]
    report["sites"] = [{"name": s, **_worst(results, chosen, s)} for s in sites if s not in unprobed]
    report["sums"] = [{"name": p.site, "tensor": p.tensor, **results[p.tensor]} for p in chosen if not p.fused]
    _conclude(report, results, fused)
    return report


def _conclude(report: dict[str, Any], results: Mapping[str, Mapping[str, Any]], fused: Collection[str]) -> None:
    """Add the verdict to a report, and what failed first. `fused` are the tensors that follow from fused nodes."""
    report["passed"] = passed(results)
    if wrong := next((s["name"] for s in (*report["sites"], *report["sums"]) if not s["passed"]), None):
        report["first_wrong_site"] = wrong
    if broken := next((r["name"] for r in report.get("conversion", []) if "why" in r), None):
        why = f"the type conversion makes NaN or infinity of output '{broken}'; keep nodes in float32 (--keep-float32)"
        report.update(passed=False, why=why)
    if not report["passed"]:
        return
    outputs = [r for r in report["outputs"] if r["name"] in fused]
    silent = [("output", r) for r in outputs if r.get("values") and not r["compared"]]
    silent += [("site", r) for r in report["sites"] if r.get("values") and not r["compared"]]
    proven = report["fused_sites"] == len(report["sites"]) and not any("says_nothing" in r for r in report["sites"])
    if not proven and outputs and all("says_nothing" in r for r in outputs):
        silent += [("output", r) for r in outputs]
    if silent:
        kind, first = silent[0]
        seeds = f"seeds {', '.join(map(str, sorted(report['seeds_tried'])))} were tried"
        why = f"nothing is proven: {kind} '{first['name']}' {first['says_nothing']}; {seeds}, give another --seed"
        report.update(passed=False, why=why)


def _behind_fused(patched: onnx.ModelProto) -> set[str]:
    """The tensors that follow from what the fused nodes of a model make; all of them where it has no such node."""
    found: set[str] = set()
    anything = not any(n.domain == DOMAIN for n in patched.graph.node)
    for node in patched.graph.node:
        if anything or node.domain == DOMAIN or not found.isdisjoint(reads_of(node)):
            found.update(filter(None, node.output))
    return found


def _of_other_sizes(
    probes: Sequence[Probe], unfused: onnx.ModelProto, feeds: Mapping[str, np.ndarray],
    inner: Callable[[Sequence[str]], list[Any]],
) -> dict[str, str]:  # fmt: skip
    """Probed tensor -> which other one is not of its sizes, though the fused node takes it for that."""
    wanted = {t for p in probes for t in (p.tensor, *p.alike) if p.alike}
    made = sorted(wanted & _made(unfused))
    sizes = {n: np.shape(v) for n, v in feeds.items()} | dict(zip(made, map(np.shape, inner(made)), strict=True))
    found = {}
    for p in probes:
        known = {t: size for t, size in sizes.items() if t in (p.tensor, *p.alike)}
        compared = {t: (*size[:1], *size[2:]) if p.wider else size for t, size in known.items()}
        other = next((t for t in p.alike if t in compared and compared[t] != compared.get(p.tensor, compared[t])), None)
        if other is not None:
            own, its = ("x".join(map(str, sizes[t])) for t in (p.tensor, other))
            found[p.tensor] = f"'{other}' is {its} and '{p.tensor}' {own}, which the fused node takes for equal"
    return found


def _run_converted(runner: Runner, feeds: Mapping[str, np.ndarray]) -> list[Any]:
    try:
        return runner(feeds)
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        reason = " ".join(str(error).split())
        raise VerificationError(f"the converted model does not run here ({reason}); nothing is proven") from None


def _from_given(
    unfused: tuple[onnx.ModelProto, Path], patched: tuple[onnx.ModelProto, Path], reference: bool, judge: Judge,
    actual: Sequence[Any], feeds: Mapping[str, np.ndarray],
) -> dict[str, dict[str, Any]] | None:  # fmt: skip
    """The figures when both models compute every site and output from the unfused one's values of the probed tensors,
    and of what the probed sites read.

    None when that cannot run. The unfused model runs again as well, since a runtime that sees no tensor between two
    nodes may leave out its rounding. Where sites compute in a lower type or another layout, what is given is the tensor
    before the Casts and Transposes to the graph's.
    """
    values = {n: np.asarray(v) for n, v in zip(judge.names, judge.expected, strict=True) if n in judge.probed}
    pairs = zip(judge.names, actual, strict=True)
    types = {n: np.asarray(v).dtype for n, v in pairs if not isinstance(v, list | dict)}
    probed = judge.names[judge.outputs :]
    steps = {t: chain for t, chain in from_fused(patched[0]).items() if t in values}
    made = []
    try:
        if steps:
            sources = list(dict.fromkeys(chain[0].input[0] for chain in steps.values()))
            before = Runner(_with_outputs(patched[0], sources), patched[1], reference)(dict(feeds))[judge.outputs :]
            own = {s: np.asarray(v).dtype for s, v in zip(sources, before, strict=True)}
            types |= {t: own[chain[0].input[0]] for t, chain in steps.items()}
        read = [t for t in _read_by_fused(patched[0], set(values)) if t in _made(unfused[0]) and t not in values]
        found = Runner(_with_outputs(unfused[0], read), unfused[1], reference)(dict(feeds))[judge.outputs :]
        values |= {t: np.asarray(v) for t, v in zip(read, found, strict=True)}
        low = {n: v.astype(types.get(n, v.dtype)) for n, v in values.items()}
        wide = {n: low[n].astype(v.dtype) for n, v in values.items()}
        given_low = {n: v for n, v in low.items() if n not in steps}
        given_low |= {chain[0].input[0]: _before(low[t], chain) for t, chain in steps.items()}
        for (model, folder), given, chains in ((unfused, wide, {}), (patched, given_low, steps)):
            forced = _with_given(_with_outputs(model, probed), given, chains)
            made.append(Runner(forced, folder, reference)(dict(feeds) | given))
    except Exception:  # ONNX Runtime's exceptions share no public base class; the plain verdict stands
        return None
    return judge.against(made[0])(made[1])


def _choose(
    probes: Sequence[Probe], unfused: onnx.ModelProto, patched: onnx.ModelProto
) -> tuple[list[Probe], dict[str, str]]:
    """The probes of the sites that can be compared, and site -> why for the others."""
    shared = _made(unfused) & _made(patched)
    missing = {p.site: "its result is no tensor of both models" for p in probes if p.tensor not in shared}
    able = [s for s in dict.fromkeys(p.site for p in probes) if s not in missing]
    taken = set(able[:: -(-len(able) // MAX_SITES) or 1])
    missing |= {s: f"of many sites only {len(taken)} are compared by themselves" for s in able if s not in taken}
    return [p for p in probes if p.site in taken], missing


def _tensors(probes: Sequence[Probe], outputs: Sequence[str]) -> list[str]:
    """The probed tensors that are no outputs anyway."""
    return list(dict.fromkeys(p.tensor for p in probes if p.tensor not in outputs))


def _worst(results: Mapping[str, Mapping[str, Any]], probes: Sequence[Probe], site: str) -> dict[str, Any]:
    tensors = [p.tensor for p in probes if p.site == site]
    worst = max(tensors, key=lambda t: (not results[t]["passed"], results[t].get("max_rel_error", 0.0)))
    return {"tensor": worst, **results[worst]}


def _made(model: onnx.ModelProto) -> set[str]:
    return {o for n in model.graph.node for o in n.output if o}


def _with_outputs(model: onnx.ModelProto, probes: Sequence[str]) -> onnx.ModelProto:
    if not probes:
        return model
    probed = deepcopy(model)
    probed.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in probes)
    return probed


def from_fused(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """Tensor -> the Casts and Transposes, in their order, that make it of what a fused node makes."""
    chains: dict[str, list[onnx.NodeProto]] = {}
    fused = {o for n in model.graph.node if n.domain == DOMAIN for o in n.output}
    waiting = [n for n in model.graph.node if n.op_type in ("Cast", "Transpose")]
    while ready := [n for n in waiting if n.input[0] in fused or n.input[0] in chains]:
        chains |= {n.output[0]: [*chains.get(n.input[0], []), n] for n in ready}
        done = {id(n) for n in ready}
        waiting = [n for n in waiting if id(n) not in done]
    return chains


def _before(value: np.ndarray, chain: Sequence[onnx.NodeProto]) -> np.ndarray:
    """The value that the Transposes among these nodes make the given one of."""
    for node in reversed(chain):
        if node.op_type == "Transpose":
            value = value.transpose(np.argsort(attribute(node, "perm", range(value.ndim)[::-1])))
    return np.ascontiguousarray(value)


def _read_by_fused(model: onnx.ModelProto, results: Collection[str]) -> list[str]:
    """What the fused nodes that make any of `results` read, itself or before a Transpose, as far as nodes make it."""
    chains = from_fused(model)
    wanted = {*results, *(chains[t][0].input[0] for t in results if t in chains)}
    made = _made(model)
    turned = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Transpose"}
    fused = (n for n in model.graph.node if n.domain == DOMAIN and wanted & set(n.output))
    return list(dict.fromkeys(turned.get(i, i) for n in fused for i in n.input if i in made))


def _with_given(
    model: onnx.ModelProto, given: Mapping[str, np.ndarray], chains: Mapping[str, Sequence[onnx.NodeProto]]
) -> onnx.ModelProto:
    """The model whose nodes read `given` instead of what it makes of these tensors; its outputs show what it makes.

    `chains`: nodes that make an output of a given tensor; they are there once more behind what the model makes."""
    forced = deepcopy(model)
    made = {t: f"{t}.made" for t in given}
    for node in forced.graph.node:
        node.output[:] = [made.get(o, o) for o in node.output]
    again = {id(n): n for chain in chains.values() for n in chain}
    made |= {o: f"{o}.made" for n in again.values() for o in n.output}
    for node in again.values():
        copy = forced.graph.node.add()
        copy.CopyFrom(node)
        copy.name = ""
        copy.input[:] = [made[i] for i in node.input]
        copy.output[:] = [made[o] for o in node.output]
    for output in forced.graph.output:
        output.name = made.get(output.name, output.name)
    for name, value in given.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        forced.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, value.shape))
    return forced


def _truth(
    runner: Runner, model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], seed: int, counts: Sequence[bool]
) -> tuple[list[Any], dict[str, np.ndarray], list[int]]:
    """(outputs of the original, its inputs, the seeds that were tried, the last of which made them). `counts`: which of
    the outputs should say something."""
    reason = ""
    for fill in FILLS:
        feeds = seeded_inputs(model, fill, shapes, seed)
        try:
            made = runner(feeds)
        except Exception as error:
            reason = " ".join(str(error).split())
            continue
        tried = [seed]
        while len(tried) < len(SCALES) and _is_silent(made, counts):
            other = seeded_inputs(model, fill, shapes, seed + len(tried), SCALES[len(tried)])
            again = runner(other)
            tried.append(seed + len(tried))
            if not _is_silent(again, counts):
                return again, other, tried
        return made, feeds, [*tried[1:], seed]
    raise VerificationError(
        f"the original does not run on the inputs that were tried ({reason}); nothing is proven, give --input-shape"
    )


def _is_silent(outputs: Sequence[Any], counts: Sequence[bool]) -> bool:
    """Whether an output that counts says nothing, and is not of whole numbers, as a list of detections may be."""
    return any(
        count and np.asarray(v).dtype.kind not in "biu" and says_nothing(v) not in ("", "is empty")
        for v, count in zip(outputs, counts, strict=False) if not isinstance(v, list | dict)
    )  # fmt: skip
