"""What `--verify` found, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cutefuse.table import counted, some

LISTED = 4  # inputs or sites that a line names before it says how many more there are
_some = partial(some, most=LISTED)


def _unproven(proof: Mapping[str, Any], silent: Sequence[dict[str, Any]]) -> list[str]:
    """What a proof that passed does not show: outputs without information, values that are no numbers."""
    lines, figures = list[str](), [*proof["outputs"], *proof["sites"]]
    if silent:
        which = "; ".join(f"output '{r['name']}' {r['says_nothing']}" for r in silent[:LISTED])
        lines.append(f"not proven by every output: {which}; what the fused sites make was compared by itself")
    if partly := [r for r in figures if 0 < r.get("compared", 0) < r["values"]]:
        counts = _some([f"{r['values'] - r['compared']} of {r['values']} of '{r['name']}'" for r in partly])
        lines.append(f"NaN or infinite in both models, and not compared: {counts}")
    if same := [s["name"] for s in proof["sites"] if "says_nothing" in s]:
        lines.append(f"proven through the outputs alone, since all they make is one value here: {_some(same)}")
    if len(proof.get("seeds_tried", ())) > 1:
        seeds = ", ".join(map(str, sorted(proof["seeds_tried"])))
        lines.append(f"seeds {seeds} were tried for outputs that say something")
    return lines


def words(proof: Mapping[str, Any], dtype: str) -> list[str]:
    """Sentences about a verification that passed; `dtype` is what the model was converted to, if it was."""
    inputs, compared, fused = len(proof.get("seeds_tried", [0])), len(proof["sites"]), proof["fused_sites"]
    on = f"{counted(inputs, 'random input')} (seed {proof['seed']})"
    sites_text = f"{compared} of {counted(fused, 'fused site')}"
    allowed = f"({proof['tolerance']:g} is allowed)"
    error = f"worst error {_worst(proof['sites']):.2g} of a channel's largest value {allowed}"
    silent = [r for r in proof["outputs"] if "says_nothing" in r]
    if "site_by_site" in proof:
        lines = [
            f"the whole model was not run and no output was compared: {proof['site_by_site'].split(';')[0]}",
            f"verified site by site with {proof['backend']}: {sites_text}, each cut out, on {on}; {error}",
        ]
    else:
        sizes = [f"{name} {'x'.join(map(str, dims)) or '(one number)'}" for name, dims in proof["inputs"].items()]
        outputs = {o["name"] for o in proof["outputs"]}
        own = [f for f in proof.get("end_to_end", proof["outputs"]) if f["name"] in outputs]
        verb = "compared" if silent else "verified"
        lines = [f"{verb} with {proof['backend']} on {_some(sizes)}, {on}: {counted(len(own), 'output')}, from end to "
                 f"end {_worst(own):.2g} of a channel's largest value from the unfused model's"]  # fmt: skip
        apart = ", each from the unfused model's own values" if "end_to_end" in proof else ""
        lines += [f"{sites_text} compared{apart}: {error}"] if compared else []
        if sums := proof.get("sums"):
            count = "1 sum that is" if len(sums) == 1 else f"{len(sums)} sums that are each"
            lines.append(f"{count} 1 Conv now, compared{apart}: worst error {_worst(sums):.2g}")
    lines += _unproven(proof, silent)
    reasons: dict[str, list[str]] = {}
    for site in proof["unprobed"]:
        reasons.setdefault(site["why"], []).append(site["name"])
    through = "not compared" if "site_by_site" in proof else "compared through the outputs alone"
    for why, names in reasons.items():
        lines.append(f"{through}: {_some(names)} ({why})")
    if "end_to_end" in proof:
        worst = _worst(proof["end_to_end"])
        lines.append(f"inside, the model amplifies rounding errors to {worst:.2g}; the sites' own figures count")
    if strange := [s["name"] for s in proof["sites"] if s.get("overflows")]:
        lines.append(f"the unfused model overflows inside {_some(strange)}; what float64 makes there is taken as right")
    if "conversion" in proof:
        lines.append(
            f"the conversion to {dtype} itself changes the outputs by {_worst(proof['conversion']):.2g} of a channel's "
            f"largest value on {'this input' if inputs == 1 else 'these inputs'}, with or without fusion"
        )
    lines.append("what ran are the fused nodes' function bodies, standard operators, and not the kernels; "
                 "`cutefuse accuracy` compares an engine")  # fmt: skip
    return lines


def failure(proof: Mapping[str, Any]) -> str:
    """Why a verification failed, and where first."""
    compared = [*proof["outputs"], *proof["sites"], *proof.get("sums", [])]
    why = next((o["why"] for o in (proof, *compared) if "why" in o), "")
    why = why or f"worst error {_worst(compared):.2g} of a channel's largest value, {proof['tolerance']:g} is allowed"
    return why + (f", first at site '{proof['first_wrong_site']}'" if proof.get("first_wrong_site") else "")


def _worst(figures: Sequence[Mapping[str, Any]]) -> float:
    return max((f.get("max_rel_error", f.get("mismatch_share", 0.0)) for f in figures), default=0.0)
