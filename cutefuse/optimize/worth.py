"""What fused sites are worth: layer times of the plain engine against those of the patched one, site by site.

Layers of both engines and sites belong together where they share an ONNX node. A copy that only the patched engine has
belongs to the fused node beside it. Sites whose layers cannot be told apart are judged together, except those whose
gain or loss is certain however the shared layers are divided. Within the rest a shared layer is divided by how many of
its nodes are each site's: an estimate that only says whom to blame first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cutefuse.engines.kinds import node_names
from cutefuse.match.site import FUSED, MERGED
from cutefuse.optimize.loop import Worth
from cutefuse.report.analyse.compare import Union, adopt, is_helper
from cutefuse.report.read.bodies import replaced
from cutefuse.report.read.engine import Engine
from cutefuse.report.read.graph import neighbours
from cutefuse.timing.noise import spread

LEAST_NOISE_US = 0.2  # a profiler's clock and the start of a kernel
USUAL_NOISE = 0.05  # of a time, where too few layers are the same in both engines to tell
ENOUGH = 8  # such layers
_SIGMAS = 2.0
_SITE = "site\0"  # no node's name begins so

Keys = frozenset[str]  # of a layer: its ONNX nodes, or the fused node that it is


@dataclass(frozen=True)
class _Part:
    """A timed layer, and the sites that have a share in it; `pure`: nothing else has."""

    time_us: float
    keys: Keys
    sites: frozenset[str]
    pure: bool


@dataclass
class _Group:
    """What belongs together: layers of the plain engine and of the patched one, and sites."""

    sides: tuple[list[_Part], list[_Part]] = field(default_factory=lambda: ([], []))
    sites: list[str] = field(default_factory=list)


def worths(plain: Engine, patched: Engine, sites: Sequence[Mapping[str, Any]]) -> list[Worth]:
    """The worth of every fused site of a patched engine, inseparable sites as one, the greatest loss first.

    `sites`: those of the patch report. Times are medians in microseconds; a site without layers has none.
    """
    nodes = {str(s["name"]): [str(n) for n in s["nodes"]] for s in sites if s["status"] in (FUSED, MERGED)}
    fused = {str(s["name"]) for s in sites if s["status"] == FUSED}
    nodes |= {site: own for site, own in replaced(sites)[0].items() if site in fused}
    owners: dict[str, set[str]] = defaultdict(set)
    for site, names in nodes.items():
        owners[_SITE + site].add(site)
        for name in names:
            owners[name].add(site)
    known = _keys(plain, set(), {})
    copies = {la.name: known[la.index] for la in plain.layers if is_helper(la) and la.index in known}
    sides = _parts(plain, known, owners), _parts(patched, _keys(patched, fused, copies), owners)
    groups = _groups(sides, nodes)
    noise = _noise(groups)
    heads = {m: next((h for h in fused if set(nodes[m]) <= set(nodes[h])), m) for m in nodes}  # of merged sites
    found = [w for group in groups if group.sites for w in _judge(group, noise, owners, heads)]
    return sorted(found, key=lambda w: (w.gain_us is None, w.gain_us or 0.0))


def _keys(engine: Engine, fused: set[str], copies: Mapping[str, Keys]) -> dict[int, Keys]:
    """What each layer computes. `copies`: those of the plain engine, which keep what they had there."""
    keys: dict[int, Keys] = {}
    for layer in engine.layers:
        if not is_helper(layer):
            names = node_names(layer.name, layer.raw)
            keys[layer.index] = frozenset(_SITE + n if n in fused else n for n in names)
        elif layer.name in copies:
            keys[layer.index] = copies[layer.name]
    producers, consumers = neighbours(engine)
    for layer in engine.layers:
        if fused and layer.index not in keys:
            beside = (*producers[layer.index], *consumers[layer.index])
            own = next((keys[i] for i in beside if any(k.startswith(_SITE) for k in keys.get(i, ()))), None)
            if own is not None:
                keys[layer.index] = own
    return adopt(engine, keys)


def _parts(engine: Engine, keys: Mapping[int, Keys], owners: Mapping[str, set[str]]) -> list[_Part]:
    found = []
    for layer in engine.layers:
        time_us, own = layer.time_us, keys.get(layer.index)
        if time_us and own:
            sites = frozenset(s for k in own for s in owners.get(k, ()))
            found.append(_Part(time_us, own, sites, all(k in owners for k in own)))
    return found


def _groups(sides: tuple[list[_Part], list[_Part]], nodes: Mapping[str, Sequence[str]]) -> list[_Group]:
    union = Union()
    for part in (*sides[0], *sides[1]):
        union.join(*part.keys)
    timed = {k for side in sides for part in side for k in part.keys}
    for site, names in nodes.items():
        union.join(_SITE + site, *(n for n in names if n in timed))
    groups: dict[str, _Group] = defaultdict(_Group)
    for number, side in enumerate(sides):
        for part in side:
            groups[union.find(next(iter(part.keys)))].sides[number].append(part)
    for site in nodes:
        groups[union.find(_SITE + site)].sites.append(site)
    return list(groups.values())


def _noise(groups: Sequence[_Group]) -> float:
    """The noise of a layer's time, as a share of it, from the layers that fusing did not touch."""
    changes = []
    for group in groups:
        before, after = (sorted(sorted(part.keys) for part in side) for side in group.sides)
        if not group.sites and before and before == after:
            changes.append(_sum(group.sides[1]) / _sum(group.sides[0]) - 1)
    return _SIGMAS * spread(changes) if len(changes) >= ENOUGH else USUAL_NOISE


def _judge(group: _Group, noise: float, owners: Mapping[str, set[str]], heads: Mapping[str, str]) -> list[Worth]:
    """The group as one, after the sites whose gain or loss is certain however the shared layers are divided."""

    def worth(sites: list[str], plain_us: float, patched_us: float, shares_us: Sequence[float] = ()) -> Worth:
        noise_us = max(LEAST_NOISE_US, noise * max(plain_us, patched_us))
        return Worth(tuple(sites), plain_us, patched_us, noise_us, tuple(shares_us))

    found: list[Worth] = []
    sides, left = list(group.sides), list(group.sites)
    units: dict[str, set[str]] = defaultdict(set)
    for site in group.sites:
        units[heads[site]].add(site)
    for unit in units.values() if len(units) > 1 else ():
        own = [[p for p in side if p.pure and p.sites <= unit] for side in group.sides]
        all_us = [_sum([p for p in side if p.sites & unit]) for side in group.sides]
        if not own[1]:
            continue
        names = [s for s in group.sites if s in unit]
        least, most = worth(names, _sum(own[0]), all_us[1]), worth(names, all_us[0], _sum(own[1]))
        certain = next((w for w, sign in ((least, 1), (most, -1)) if sign * (w.gain_us or 0.0) > w.noise_us), None)
        if certain is not None:
            found.append(certain)
            left = [s for s in left if s not in unit]
            sides = [[p for p in side if p not in gone] for side, gone in zip(sides, own, strict=True)]
    if left and all(sides):
        plain, patched = (_shares(side, owners, heads) for side in sides)
        several = len({heads[s] for s in left}) > 1
        shares = [plain[heads[s]] - patched[heads[s]] for s in left] if several else []
        found.append(worth(left, _sum(sides[0]), _sum(sides[1]), shares))
    elif left:
        found.append(Worth(tuple(left), None, None, LEAST_NOISE_US))
    return found


def _shares(parts: Sequence[_Part], owners: Mapping[str, set[str]], heads: Mapping[str, str]) -> dict[str, float]:
    """The layers' time divided among the sites that have nodes in them; merged sites count as one."""
    times: dict[str, float] = defaultdict(float)
    for part in parts:
        for key in part.keys:
            own = {heads[s] for s in owners.get(key, ())}
            for site in own:
                times[site] += part.time_us / len(part.keys) / len(own)
    return times


def _sum(parts: Sequence[_Part]) -> float:
    return sum(p.time_us for p in parts)
